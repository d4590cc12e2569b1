"""A consumer that freezes itself inside COPY, in its second unit: ``python -m tests.integration.frozen_in_copy``."""

from __future__ import annotations

import os
import signal
import sys

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit
from tests.support import journal
from tests.support.worker import record


def freeze(unit: Unit, topic: str) -> None:
    """Hold the counter's row, open COPY, have the server read a part of it, and stop."""
    unit.execute(journal.COUNT, (topic, len(unit.messages)))
    columns = 'topic, partition, "offset", value, worker'
    with unit.connection.cursor() as cursor, cursor.copy(f"COPY journal.entries ({columns}) FROM STDIN") as copy:
        for message in unit.messages:
            copy.write_row((topic, message.partition(), message.offset(), message.value(), "frozen" + "x" * 200_000))
        os.kill(os.getpid(), signal.SIGSTOP)


def main(bootstrap_servers: str, conninfo: str, topic: str) -> None:
    """Apply one unit, freeze in the next, and go on after that as if nothing had happened."""
    kafka = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": topic,
        "session.timeout.ms": 3000,
        "heartbeat.interval.ms": 500,
    }
    with ExactlyOnceConsumer(kafka, conninfo=conninfo, max_messages=5) as consumer:
        consumer.subscribe([topic])
        units = consumer.units(idle_seconds=5)
        done = 0
        while True:
            try:
                for unit in units:
                    with unit:
                        if done == 1:
                            freeze(unit, topic)
                        else:
                            record(unit, "frozen once")
                    done += 1
                return
            except Redelivered as error:
                done += 1
                print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
