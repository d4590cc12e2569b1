"""The check that tests leave nothing behind: it sees each kind, and waits for what is about to end."""

from __future__ import annotations

import sys
import threading

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from tests.support import leaks
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def test_it_counts_clients_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.census()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}):
        until(lambda: leaks.census().kafka_clients > before.kafka_clients, 60, "the client's thread")
        with monkeypatch.context() as patched:
            patched.setattr(leaks, "_GRACE_SECONDS", 0.2)
            left = leaks.left_since(before)
        assert f"kafka clients {before.kafka_clients} -> {before.kafka_clients + 1}" in left
        assert f"threads {before.threads} -> {before.threads + 1}" in left
    done.set()
    thread.join()
    assert leaks.left_since(before) == ""


def test_what_ends_in_time_is_no_leak() -> None:
    before = leaks.census()
    thread = threading.Timer(0.1, lambda: None)
    thread.start()
    assert leaks.left_since(before) == ""
    assert thread not in threading.enumerate(), "it may be about to end, and counts no more"


def test_it_counts_connections(postgres_conninfo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_SECONDS", 0.2)
    before = leaks.census()
    with psycopg.connect(postgres_conninfo):
        assert leaks.left_since(before) == f"connections {before.connections} -> {before.connections + 1}"
    assert leaks.left_since(before) == ""
