"""The examples run and apply each message once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from tests.support.topics import create_topic
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
PAYMENTS = 500


@pytest.fixture(scope="module")
def environment(bootstrap_servers: str, conninfo: str) -> dict[str, str]:
    """The servers as the examples find them, with payments in the topic."""
    topic = create_topic(bootstrap_servers, 3, name="transfers")
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in range(PAYMENTS):
        payment = {"from": number % 7, "to": number % 5, "amount": "0.25"}
        producer.produce(topic, json.dumps(payment), partition=number % 3)
    assert producer.flush(30) == 0
    return {
        **os.environ,
        "EXACTLY_ONCE_BOOTSTRAP_SERVERS": bootstrap_servers,
        "EXACTLY_ONCE_CONNINFO": conninfo,
    }


def count(db: psycopg.Connection[Any], table: str) -> int:
    """Count the rows of a table that may not be there yet."""
    if db.execute("SELECT to_regclass(%s)", [table]).fetchone() == (None,):
        return 0
    row = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(row[0]) if row else 0


def test_explicit_loop_copies_the_topic_and_ends(environment: dict[str, str], db: psycopg.Connection[Any]) -> None:
    command = [sys.executable, str(EXAMPLES / "explicit_loop.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert count(db, "copied") == PAYMENTS


def test_service_moves_the_money_and_ends_in_order(environment: dict[str, str], db: psycopg.Connection[Any]) -> None:
    command = [sys.executable, str(EXAMPLES / "transfers.py")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as service:
        try:
            until(lambda: count(db, "transfer_statement") == 2 * PAYMENTS, 60, "every payment")
            service.send_signal(signal.SIGTERM)
            _, errors = service.communicate(timeout=30)
        finally:
            service.kill()
    assert service.returncode == 0, errors
    assert db.execute("SELECT sum(balance) FROM transfer_account").fetchone() == (0,)
