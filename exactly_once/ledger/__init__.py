"""The ledger in Postgres: its rows, the guarded transaction that moves them, and the connection they are reached by."""

from __future__ import annotations
