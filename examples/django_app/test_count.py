"""Test the handler, with Django's own test runner and without Kafka: ``python -m django test``."""

from __future__ import annotations

from after_connect import count_all
from django.db import connection
from django.test import TestCase
from votes.models import Poll

from exactly_once.testing import message, unit


class CountAll(TestCase):
    def test_votes_are_added_up(self) -> None:
        votes = [message("votes", '{"poll": "logo", "weight": 2}') for _ in range(2)]
        with unit(connection.connection, votes) as u:
            count_all(u)
            assert Poll.objects.get(name="logo").votes == 4
