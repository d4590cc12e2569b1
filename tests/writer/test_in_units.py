"""The sink in the units of a consumer: alterations while it runs, bad messages, a pooler in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from exactly_once import PoisonMessage, Unit
from exactly_once.writer import FunctionDecoder, TableError, TableSink, TableWriter, Tombstone
from tests.conftest import MakeConsumer
from tests.support.pgbouncer import PgBouncer, pgbouncer_missing
from tests.support.require import skip_unless
from tests.support.topics import create_topic, produce

Database = psycopg.Connection[Any]
COUNT = 60


@pytest.fixture
def topic(bootstrap_servers: str, name: str, db: Database) -> Iterator[str]:
    """Sixty numbers in one partition, and a table of the same name for them."""
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, COUNT, 1)
    db.execute(f"CREATE TABLE {name} (n bigint, o bigint)")
    yield name
    db.execute(f"DROP TABLE {name}")


def number(message: Any) -> dict[str, int]:
    return {"n": int(message.value()), "o": message.offset()}


def sink_of(topic: str, **options: Any) -> TableSink:
    return TableSink(topic, decoder=FunctionDecoder(number), **options)


@pytest.mark.parametrize("kind", ["double precision", "integer", "numeric(5,1)"])
def test_a_table_may_be_altered_while_the_sink_runs(
    kind: str, topic: str, make_consumer: MakeConsumer, db: Database
) -> None:
    sink = sink_of(topic)

    def handler(unit: Unit) -> None:
        if unit.attempt == 1 and unit.messages[0].offset() == COUNT // 2:
            db.execute(f"ALTER TABLE {topic} ALTER COLUMN n TYPE {kind}, ADD COLUMN more int DEFAULT 7")
        sink(unit)

    with make_consumer(max_messages=10) as consumer:
        consumer.subscribe([topic])
        consumer.run(handler, until_end=True)
    found = db.execute(f"SELECT n::int, o::int FROM {topic} ORDER BY 1").fetchall()
    assert found == [(i, i) for i in range(COUNT)]


def test_a_column_that_is_dropped_stops_the_sink_and_nothing_is_set_aside(
    topic: str, make_consumer: MakeConsumer, db: Database
) -> None:
    sink = sink_of(topic)

    def handler(unit: Unit) -> None:
        if unit.messages[0].offset() == COUNT // 2:
            db.execute(f"ALTER TABLE {topic} DROP COLUMN IF EXISTS n")
        sink(unit)

    with make_consumer(max_messages=10) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(TableError, match="no column 'n'"):
            consumer.run(handler, until_end=True, on_poison="dead-letter")
    assert db.execute(f"SELECT count(*) FROM {topic}").fetchone() == (COUNT // 2,)


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_the_search_for_a_bad_message_ends_at_it(
    mode: Any, topic: str, make_consumer: MakeConsumer, db: Database
) -> None:
    """Postgres itself refuses the value, so in an upsert nothing but the search can tell which message it was."""
    db.execute(f"ALTER TABLE {topic} ADD CHECK (n <> 41), ADD PRIMARY KEY (o)")
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        with pytest.raises(PoisonMessage, match="41"):
            consumer.run(sink_of(topic, mode=mode), until_end=True)
    assert db.execute(f"SELECT count(*), max(n) FROM {topic}").fetchone() == (41, 40)


@pytest.fixture
def pooled(postgres_conninfo: str) -> Iterator[Database]:
    """A connection through a pooler that gives each transaction another server connection."""
    skip_unless("pgbouncer", pgbouncer_missing())
    with (
        PgBouncer(postgres_conninfo, pool_size=2) as pooler,
        psycopg.connect(pooler.conninfo, prepare_threshold=None) as connection,
    ):
        yield connection


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_nothing_outlives_the_transaction_behind_a_pooler(
    mode: Any, pooled: Database, topic: str, db: Database
) -> None:
    db.execute(f"ALTER TABLE {topic} ADD PRIMARY KEY (n)")
    writer = TableWriter(topic, mode=mode, small_batch=5)
    for start in range(0, 200, 20):
        writer.write(pooled, [(i, start) for i in range(start, start + 20)])
        if mode == "upsert":
            writer.write(pooled, [Tombstone((start,)), *((i, -1) for i in range(start + 1, start + 20))])
        pooled.commit()
    expected = 190 if mode == "upsert" else 200
    assert db.execute(f"SELECT count(*) FROM {topic}").fetchone() == (expected,)
