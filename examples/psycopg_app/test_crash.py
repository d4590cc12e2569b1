"""Crash the worker at the worst moment: everything is written, and COMMIT is not sent."""

from __future__ import annotations

import multiprocessing
import signal

import psycopg
from after import CONNINFO, main

from exactly_once.testing import crash_at


def crashing_worker() -> None:
    crash_at("advanced")
    main()


def look() -> list[object]:
    with psycopg.connect(CONNINFO) as connection:
        return [
            connection.execute("SELECT * FROM card_account ORDER BY id").fetchall(),
            connection.execute("SELECT partition, next_offset FROM exactly_once.ledger ORDER BY 1").fetchall(),
        ]


def test_crash_before_commit_changes_nothing() -> None:
    before = look()
    worker = multiprocessing.get_context("spawn").Process(target=crashing_worker)
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert look() == before
