"""The journal of the tests' handlers, compared with the topic by the oracle of the demo.

It is a table **without** unique keys, so that a second effect is seen instead of prevented, and a
counter per topic, an effect that is not idempotent. A handler under test appends to both:

    unit.executemany(journal.APPEND, [journal.entry(message, "worker 1") for message in unit.messages])
    unit.execute(journal.COUNT, (topic, len(unit.messages)))

The counter is one row: transactions that count run one after the other, and a frozen one stops the others. A
test in which that is not wanted leaves COUNT out and passes ``counts=False`` to `check`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from confluent_kafka import Message

from exactly_once.demo import journal
from exactly_once.demo.journal import Entry, Identity, Record, scan

__all__ = [
    "APPEND",
    "COUNT",
    "Entry",
    "Identity",
    "Record",
    "Verdict",
    "check",
    "compare",
    "counted",
    "create",
    "entries",
    "entry",
    "scan",
]

CREATE = """
    CREATE SCHEMA journal;
    CREATE TABLE journal.entries (
        topic text NOT NULL,
        partition integer NOT NULL,
        "offset" bigint NOT NULL,
        value bytea,
        worker text NOT NULL,
        xid xid8 NOT NULL DEFAULT pg_current_xact_id()
    );
    CREATE TABLE journal.counter (topic text PRIMARY KEY, total bigint NOT NULL);
"""
# One entry per message; the parameters are those of `entry`.
APPEND = 'INSERT INTO journal.entries (topic, partition, "offset", value, worker) VALUES (%s, %s, %s, %s, %s)'
# Adds to the counter; the parameters are a topic and a number of messages.
COUNT = """
    INSERT INTO journal.counter (topic, total) VALUES (%s, %s)
    ON CONFLICT (topic) DO UPDATE SET total = counter.total + excluded.total
"""


@dataclass(frozen=True)
class Verdict(journal.Verdict):
    """The comparison of a topic with its journal; `str` of it is fit for an assertion's message."""

    counted: int
    """The counter."""
    counter_ok: bool
    """Whether the counter equals the number of messages; also true where the test does not count."""

    @property
    def exact(self) -> bool:
        """Each message took effect exactly once, and nothing else did."""
        return self.counter_ok and not (self.lost or self.duplicated or self.foreign or self.altered)

    def __str__(self) -> str:
        kinds = ("lost", "duplicated", "foreign", "altered")
        found = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)
        firsts = [f"first {kind}: {next(iter(getattr(self, kind)))}" for kind in kinds if getattr(self, kind)]
        if self.duplicated:  # with its effects, whose workers and transactions tell how it came about
            firsts.append(f"its effects: {next(iter(self.duplicated.values()))}")
        return "\n".join([f"{self.messages} messages, {found}, counter {self.counted}", *firsts])


def create(conninfo: str) -> None:
    """Create an empty journal in place of one that is there."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("DROP SCHEMA IF EXISTS journal CASCADE")
        connection.execute(CREATE)


def entry(message: Message, worker: str) -> tuple[str | None, int | None, int | None, bytes | None, str]:
    """Return the parameters of APPEND for a message."""
    return message.topic(), message.partition(), message.offset(), message.value(), worker


def entries(conninfo: str, topic: str) -> list[Entry]:
    query = """
        SELECT topic, partition, "offset", value, worker, xid::text::bigint FROM journal.entries
        WHERE topic = %s ORDER BY partition, "offset", xid
    """
    with psycopg.connect(conninfo) as connection:
        return [Entry(*row) for row in connection.execute(query, (topic,))]


def counted(conninfo: str, topic: str) -> int:
    with psycopg.connect(conninfo) as connection:
        row = connection.execute("SELECT total FROM journal.counter WHERE topic = %s", (topic,)).fetchone()
    return row[0] if row else 0


def compare(records: Iterable[Record], effects: Iterable[Entry], counter: int | None) -> Verdict:
    """Compare a scan with journal entries and, unless it is None, the counter."""
    found = journal.compare(records, effects)
    return Verdict(**vars(found), counted=counter or 0, counter_ok=counter is None or counter == found.messages)


def check(conninfo: str, bootstrap_servers: str, topic: str, *, counts: bool = True) -> Verdict:
    """Scan the topic and compare it with its journal; `counts=False` where the handler left COUNT out."""
    counter = counted(conninfo, topic) if counts else None
    return compare(scan(bootstrap_servers, topic), entries(conninfo, topic), counter)
