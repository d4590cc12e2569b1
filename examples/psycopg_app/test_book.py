"""Test the handler, with a Postgres and without Kafka."""

from __future__ import annotations

import psycopg
from after import CONNINFO, book

from exactly_once.testing import message, unit


def test_payments_are_added_up() -> None:
    payments = [message("card-payments", '{"account": -1, "amount": 5}') for _ in range(2)]
    with psycopg.connect(CONNINFO) as connection, unit(connection, payments) as u:
        book(u)
        assert connection.execute("SELECT balance FROM card_account WHERE id = -1").fetchone() == (10,)
