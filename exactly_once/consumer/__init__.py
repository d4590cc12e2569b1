"""The consumer: the loop, the partitions it owns, the unit that users are given, and what becomes of it."""

from __future__ import annotations
