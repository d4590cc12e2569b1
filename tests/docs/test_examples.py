"""The examples run and apply each message once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    assert producer.flush(60) == 0
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert count(db, "copied") == PAYMENTS


def test_service_moves_the_money_and_ends_in_order(environment: dict[str, str], db: psycopg.Connection[Any]) -> None:
    command = [sys.executable, str(EXAMPLES / "transfers.py")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as service:
        try:
            until(lambda: count(db, "transfer_statement") == 2 * PAYMENTS, 120, "every payment")
            service.send_signal(signal.SIGTERM)
            _, errors = service.communicate(timeout=120)
        finally:
            service.kill()
    assert service.returncode == 0, errors
    assert db.execute("SELECT sum(balance) FROM transfer_account").fetchone() == (0,)


class PaymentApi(ThreadingHTTPServer):
    """A payment API that charges once for each idempotency key, and often fails to say so."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _PaymentRequest)
        self.asked: Counter[str] = Counter()
        self.charges: dict[str, int] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/charges"


class _PaymentRequest(BaseHTTPRequestHandler):
    server: PaymentApi

    def do_POST(self) -> None:
        key = self.headers["Idempotency-Key"]
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked[key] += 1
            if order["amount"] < 0:
                return self.send_error(422)
            self.server.charges.setdefault(key, order["amount"])
            number = len(self.server.charges)
        if self.server.asked[key] == 1 and number % 10 == 3:
            return self.send_error(503)  # and has charged
        if self.server.asked[key] == 1 and number % 10 == 6:
            return self.close_connection_early()
        if self.server.asked[key] == 1 and number % 10 == 9:
            return self.send_error(409)  # as where a first try is at work
        answer = json.dumps({"charge": key}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        is_cut = self.server.asked[key] == 1 and number % 10 == 1
        self.wfile.write(answer[:5] if is_cut else answer)
        return self.close_connection_early() if is_cut else None

    def close_connection_early(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def payment_api() -> Iterator[PaymentApi]:
    """The API, running."""
    with PaymentApi() as api:
        thread = threading.Thread(target=api.serve_forever)
        thread.start()
        yield api
        api.shutdown()
        thread.join()


@pytest.mark.fault("B6")
def test_charges_are_made_once_although_the_api_is_asked_again(
    environment: dict[str, str], db: psycopg.Connection[Any], payment_api: PaymentApi
) -> None:
    bootstrap_servers = environment["EXACTLY_ONCE_BOOTSTRAP_SERVERS"]
    create_topic(bootstrap_servers, 1, name="card-orders")
    db.execute("CREATE TABLE charge (id text, card text, amount int)")
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    amounts = [*range(30), -1, *range(30, 60)]
    for amount in amounts:
        producer.produce("card-orders", json.dumps({"card": "c1", "amount": amount}))
    assert producer.flush(60) == 0
    command = [sys.executable, str(EXAMPLES / "charges.py")]
    variables = {**environment, "CHARGES_URL": payment_api.url}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as service:
        try:
            until(lambda: count(db, "charge") == 60 or service.poll() is not None, 120, "every charge")
            service.send_signal(signal.SIGTERM)
            _, errors = service.communicate(timeout=120)
        finally:
            service.kill()
    assert service.returncode == 0, errors
    assert sorted(payment_api.charges.values()) == list(range(60)), "each order was charged once"
    assert max(payment_api.asked.values()) > 1, "the API was asked again"
    rows = db.execute("SELECT id, amount FROM charge").fetchall()
    assert dict(rows) == payment_api.charges, "and the database knows exactly these charges"
    assert len(rows) == 60
    dead = db.execute("SELECT message_offset, error FROM exactly_once.dead_letter WHERE group_id = 'charges'")
    assert dead.fetchall() == [(30, "HTTP Error 422: Unprocessable Entity")]
