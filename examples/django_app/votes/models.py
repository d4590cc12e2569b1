"""A poll, and who voted in it."""

from __future__ import annotations

from django.db import models


class Poll(models.Model):
    name = models.CharField(max_length=50, unique=True)
    votes = models.IntegerField(default=0)


class Vote(models.Model):
    poll = models.ForeignKey(Poll, on_delete=models.CASCADE)
    weight = models.IntegerField()
