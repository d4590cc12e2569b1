"""The public API as a user writes against it; strict type checkers read this file, nobody runs it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import tenacity
from confluent_kafka import Message, TopicPartition
from psycopg import sql

from exactly_once import (
    AlreadyApplied,
    ConfigurationError,
    ExactlyOnceConsumer,
    ExactlyOnceError,
    Fenced,
    HandlerCommitted,
    Health,
    Identity,
    LedgerRewound,
    Metrics,
    OutcomePending,
    Redelivered,
    StartError,
    Unit,
    Units,
    Unreachable,
    __version__,
    testing,
)
from exactly_once.metrics.endpoints import Endpoints
from exactly_once.metrics.prometheus import PrometheusMetrics

KAFKA = {"bootstrap.servers": "localhost:9092", "group.id": "accounts", "session.timeout.ms": 6000}
CONNINFO = "postgresql://localhost/bank"


def loop() -> None:
    with ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO) as consumer:
        consumer.subscribe(["payments"])
        for unit in consumer:
            with unit:
                for message in unit.messages:
                    unit.execute("UPDATE account SET balance = balance + %s WHERE id = %s", (1, message.key()))


def loop_that_goes_on(consumer: ExactlyOnceConsumer) -> None:
    units: Units = consumer.units(until_end=True, idle_seconds=1.5)
    for unit in units:
        try:
            with unit as entered:
                same: Unit = entered
                same.executemany("INSERT INTO t VALUES (%s)", [(m.offset(),) for m in same.messages])
        except Redelivered:
            continue


def handler(unit: Unit) -> None:
    first: Message = unit.messages[0]
    attempt: int = unit.attempt
    connection: psycopg.Connection[Any] = unit.connection
    with connection.transaction():
        cursor: psycopg.Cursor[Any] = unit.execute("SELECT %(offset)s", {"offset": first.offset()})
    unit.defer("UPDATE account SET balance = balance + %s WHERE id = %s", (1, first.key()))
    unit.defer("UPDATE account SET balance = 0 WHERE id = %(id)s", {"id": first.key()})
    unit.defer(sql.SQL("DELETE FROM {}").format(sql.Identifier("stale")))
    unit.copy("bank.payment", ["id", "attempt"], ((row[0], attempt) for row in cursor))
    unit.copy(sql.Identifier("bank", "payment"), ("id",), [[1], [2]])


def service() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, name="worker-1")
    consumer.subscribe(["payments", "^refunds.*"])
    consumer.run(handler)
    consumer.run(handler, stop_seconds=5, wait=tenacity.wait_fixed(1))
    consumer.run(lambda unit: len(unit.messages))
    consumer.stop()
    consumer.close()
    print(consumer, consumer.counters.committed, str(consumer.counters))


def watched() -> None:
    metrics: Metrics = PrometheusMetrics()
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, metrics=metrics)
    with consumer, Endpoints(consumer, port=9400, host="0.0.0.0", render=PrometheusMetrics().render) as endpoints:
        health: Health = consumer.health()
        port: int = endpoints.port
        print(health.is_alive, health.is_ready, ", ".join(health.reasons), port)
        print([f"{topic}[{number}]" for topic, number in health.owned], health.seconds_since_commit)


def options() -> None:
    ExactlyOnceConsumer(
        KAFKA,
        connect=lambda: psycopg.connect(CONNINFO, autocommit=True),
        start="committed",
        on_out_of_range="earliest",
        isolation="SERIALIZABLE",
        max_messages=10_000,
        max_bytes=1_000_000,
        linger_seconds=0.05,
        max_unit_seconds=2.5,
        startup_seconds=10,
        wait_for_topics=True,
        stop_on_bad_partition=True,
        take_over=True,
        schema="ledgers",
        migrate=True,
    )
    ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, start=datetime(2026, 1, 1, tzinfo=UTC))
    ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, start="first")  # type: ignore[arg-type]
    ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, isolation="READ UNCOMMITTED")  # type: ignore[arg-type]
    ExactlyOnceConsumer(KAFKA, CONNINFO)  # type: ignore[call-arg]


def rebalance_callbacks(consumer: ExactlyOnceConsumer) -> None:
    def told(consumer: ExactlyOnceConsumer, partitions: list[TopicPartition]) -> None:
        print(consumer, [(p.topic, p.partition, p.offset) for p in partitions])

    consumer.subscribe(["payments"], on_assign=told, on_revoke=told, on_lost=lambda _, partitions: print(partitions))


def errors(unit: Unit) -> str:
    try:
        handler(unit)
    except (Fenced, AlreadyApplied, LedgerRewound, OutcomePending) as again:
        state: str | None = again.sqlstate
        return f"{again} {state}"
    except psycopg.OperationalError:
        return "the driver's base catches what Redelivered is"
    except (StartError, HandlerCommitted, Unreachable):
        return "an operator must act"
    except ConfigurationError as refused:
        value_error: ValueError = refused
        return str(value_error)
    except ExactlyOnceError:
        return __version__
    return "done"


def identities(unit: Unit) -> tuple[str, UUID]:
    identity: Identity = unit.identity(unit.messages[0])
    return identity.text, identity.uuid


def tests_of_a_handler(own: psycopg.Connection[Any]) -> None:
    made: Message = testing.message("t", "v", key=b"k", headers=[("a", None)], partition=1, offset=2, timestamp=3)
    with testing.unit(own, [made], attempt=2, group_id="g", schema="ledgers") as u:
        handler(u)
    with testing.failing_at("advanced", OSError("cut"), nth=2):
        handler(u)
    for name in testing.FAILPOINTS:
        testing.crash_at(name, nth=3)


def what_is_not_offered(consumer: ExactlyOnceConsumer) -> None:
    consumer.commit()  # type: ignore[attr-defined]
    consumer.seek(TopicPartition("payments", 0, 0))  # type: ignore[attr-defined]
    consumer.subscrbe(["payments"])  # type: ignore[attr-defined]
    consumer.run_forever(handler)  # type: ignore[attr-defined]
    # What comes after a misspelt call is checked, too.
    number: int = "text"  # type: ignore[assignment]
    print(number)


async def in_asyncio(consumer: ExactlyOnceConsumer) -> None:
    async with consumer:  # type: ignore[attr-defined]
        async for _ in consumer:  # type: ignore[attr-defined]
            return
