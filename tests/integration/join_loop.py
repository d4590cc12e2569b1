"""A worker that joins its own transactions, and stops as a management command does; run by test_join."""

from __future__ import annotations

import signal
import sys
import time

import psycopg

from exactly_once import ExactlyOnceConsumer
from tests.support.worker import record


def main(bootstrap_servers: str, conninfo: str, topic: str) -> None:
    """Apply one message a unit until SIGTERM; print a line after the first."""
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": topic}
    with (
        ExactlyOnceConsumer(settings, conninfo=conninfo, start="earliest", max_messages=1) as consumer,
        psycopg.connect(conninfo) as own,
    ):
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.subscribe([topic])
        for unit in consumer:
            with own.transaction(), unit.join(own):
                record(unit, "joins")
            sys.stdout.write("applied\n")
            sys.stdout.flush()
            time.sleep(0.05)  # so that the signal comes between two units, not behind the last


if __name__ == "__main__":
    main(*sys.argv[1:])
