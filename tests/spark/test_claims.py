"""Rows of events that came before are left out: who claims them, and when a claim is free again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from confluent_kafka import Message

from exactly_once import _failpoints
from exactly_once.errors import ConfigurationError
from exactly_once.ledger import claims, dead_letters, stale_owners
from exactly_once.writer import BadRow, TableSink, TableWriter
from exactly_once.writer.arrow import write_arrow
from exactly_once.writer.from_json import JsonDecoder
from spark_sink import FrameError
from spark_sink.options import check_options
from tests.spark.attempts import CountingPlace, Place, interrupted, run
from tests.spark.staged import Run, Target, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink import PostgresSink
    from tests.spark.scene import Scene

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@pytest.fixture
def place(place: Place, db: psycopg.Connection[Any]) -> Place:
    """The offset serves as the id of an event; partition 0 has no row of offset 3."""
    db.execute(f'ALTER TABLE {place.name} ADD CHECK (partition <> 0 OR "offset" <> 3)')
    return place


def events(place: Place, offsets: Iterable[int], keys: Sequence[Any], *, partition: int = 0) -> list[pa.RecordBatch]:
    """Rows with a column for the id of an event, which the table lacks, and the end mark."""
    kind = pa.string() if any(isinstance(key, str) for key in keys) else pa.int64()
    rows = place.rows(*[()] * partition, offsets).append_column("event", pa.array(keys, kind))
    return [rows, place.mark().append_column("event", pa.nulls(1, kind))]


def key(place: Place, event: str | int) -> str:
    """What is claimed for an event of the table."""
    return f'"public"."{place.name}" {json.dumps(event)}'


@both
def test_of_several_rows_of_an_event_the_first_is_stored(place: Place, transaction: str) -> None:
    owners = place.owners()
    work = place.work(owners, place.ranges(3, 3), transaction=transaction, claim="offset")
    result = run(transaction, work, place.input(transaction, [0, 1], [1, 2]))
    assert (result["rows"], result["repeated"], result["dropped"]) == (3, 1, 0)
    assert place.written() == [(0, 0), (0, 1), (1, 2)]
    # By other messages of a later batch, and by a batch that comes again.
    later = place.work(place.owners(), place.ranges(5, 6), transaction=transaction, claim="offset")
    result = run(transaction, later, place.input(transaction, [0, 1, 4], [1, 2, 4, 5]))
    assert (result["rows"], result["repeated"]) == (2, 1)
    assert place.written() == [(0, 0), (0, 1), (0, 4), (1, 2), (1, 5)]


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_of_several_copies_and_where_every_event_came_before(
    place: Place, db: psycopg.Connection[Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which nothing is sent to the writer."""
    sent: list[int] = []

    def noted(writer: TableWriter, connection: psycopg.Connection[Any], rows: pa.Table) -> int:
        sent.append(rows.num_rows)
        return write_arrow(writer, connection, rows)

    monkeypatch.setattr("spark_sink.attempt.write_arrow", noted)
    db.execute(f'ALTER TABLE {place.name} ADD PRIMARY KEY (partition, "offset")')
    work = place.work(place.owners(), place.ranges(3, 2), claim="offset", mode=mode)
    result = run("batch", replace(work, rows_a_copy=1), [place.rows(range(3)), place.rows((), [1]), place.mark()])
    assert (result["rows"], result["repeated"], result["transactions"]) == (3, 1, 1)
    work = place.work(place.owners(), place.ranges(3, 3), claim="offset", mode=mode)
    result = run("batch", work, place.input("batch", (), [2]))
    assert (result["rows"], result["repeated"], result["transactions"]) == (0, 1, 1)
    assert sent == [3]
    assert place.written() == [(0, 0), (0, 1), (0, 2)]
    assert place.ledger() == [3, 3]


def test_what_is_added_is_added_once(place: Place, db: psycopg.Connection[Any]) -> None:
    db.execute(f"ALTER TABLE {place.name} ADD PRIMARY KEY (partition)")
    options: dict[str, Any] = {"claim": "offset", "mode": "upsert", "key": ["partition"], "add": ["offset"]}
    work = place.work(place.owners(), place.ranges(5, 6), **options)
    run("batch", work, place.input("batch", [1, 4], [4, 5]))
    assert place.written() == [(0, 5), (1, 5)]


@both
def test_an_attempt_that_is_rolled_back_has_claimed_nothing(place: Place, transaction: str) -> None:
    """One whose answer to COMMIT is lost has claimed and moved the ledger, so that nothing comes again."""
    work = place.work(place.owners(), place.ranges(3), transaction=transaction, claim="offset")

    def fail() -> None:
        _failpoints.disarm()
        raise ZeroDivisionError

    for moment in ("guarded", "committed"):
        _failpoints.arm(moment, fail)
        with pytest.raises(ZeroDivisionError):
            run(transaction, work, place.input(transaction, range(3)))
        assert place.written() == ([] if moment == "guarded" else [(0, 0), (0, 1), (0, 2)])
    result = run(transaction, work, place.input(transaction, range(3)))
    assert (result.get("rows", 0), result.get("repeated", 0)) == (0, 0)
    assert place.written() == [(0, 0), (0, 1), (0, 2)]
    assert place.ledger() == [3]


def test_what_an_attempt_finds_claimed_by_its_twin_is_dropped(place: Place) -> None:
    """The twin has landed since the attempt has looked at the ledger."""
    work = place.work(place.owners(), place.ranges(3), claim="offset")

    def twin() -> None:
        assert run("batch", work, place.input("batch", range(3)))["rows"] == 3

    def rows() -> Iterator[pa.RecordBatch]:
        yield from interrupted([place.rows()], twin)
        yield from place.input("batch", range(3))

    result = run("batch", replace(work, rows_a_copy=0), rows())
    assert (result["rows"], result["repeated"], result["dropped"], result["transactions"]) == (0, 0, 3, 0)
    assert place.written() == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("on_bad_row", ["fail", "dead-letter"])
@pytest.mark.parametrize("joined", [1, 100])
def test_rows_of_one_message_need_an_id_each(place: Place, on_bad_row: str, joined: int) -> None:
    """As behind an explode; else all but the first would be left out."""
    work = place.work(place.owners(), place.ranges(3), claim="event", on_bad_row=on_bad_row)
    work = replace(work, rows_a_copy=joined)
    rows, end = events(place, [0, 1, 1, 2], ["a", "b", "b", "c"])
    with pytest.raises(FrameError, match=rf"several rows of {place.name}\[0\] offset 1 .*event 'b'.* posexplode"):
        run("batch", work, [*(rows.slice(n, 1) for n in range(4)), end])
    assert (place.written(), place.ledger()) == ([], [0])
    run("batch", work, events(place, [0, 1, 1, 2], ["a", "b-0", "b-1", "c"]))
    assert place.written() == [(0, 0), (0, 1), (0, 1), (0, 2)]


@both
@pytest.mark.parametrize("mode", ["append", "insert-ignore"])
def test_a_dead_letter_has_claimed_nothing(place: Place, transaction: str, mode: str) -> None:
    """Wherever it is among rows that are left out: its twin of the same COPY is stored in its place."""
    first = place.work(place.owners(), place.ranges(3, 0), claim="offset")
    run("batch", first, place.input("batch", range(3)))
    work = place.work(place.owners(), place.ranges(5, 5), claim="offset", mode=mode, on_bad_row="dead-letter")
    result = run(transaction, work, place.input(transaction, [3, 4], [0, 1, 2, 3, 4]))
    assert place.written() == [(0, 0), (0, 1), (0, 2), (0, 4), (1, 3)]
    assert (result["rows"], result["repeated"]) == (2, 4)
    assert [text.partition(": ")[0] for text in result["set_aside"]] == [f"{place.name}[0] offset 3"]


def test_a_bad_row_that_is_replaced_at_once_is_a_dead_letter(place: Place, db: psycopg.Connection[Any]) -> None:
    """Its event is another row's then."""
    db.execute(f'ALTER TABLE {place.name} ADD UNIQUE (partition), ADD CHECK ("offset" <> 0)')
    options: dict[str, Any] = {"mode": "upsert", "key": ["partition"], "on_bad_row": "dead-letter"}
    work = place.work(place.owners(), place.ranges(3), claim="event", **options)
    result = run("batch", work, events(place, range(3), ["a", "b", "a"]))
    assert place.written() == [(0, 2)]
    assert (result["repeated"], len(result["set_aside"])) == (0, 1)


def test_a_dead_letter_names_what_its_row_has_to_claim(place: Place, db: psycopg.Connection[Any]) -> None:
    """Spark no longer has the message, and the table need not have the column; a row without an id names none."""
    work = place.work(place.owners(), place.ranges(5), claim="event", on_bad_row="dead-letter")
    assert run("batch", work, events(place, range(5), ["a", "b", None, "d", "a"]))["rows"] == 2
    without, dead = dead_letters.find(db, schema="exactly_once", group_id=place.name)
    row_of = ("exactly_once.row_of", place.name.encode())
    assert without.headers == [row_of]
    assert dead.headers == [row_of, ("exactly_once.claim", key(place, "d").encode())]
    keys = [key(place, "a"), key(place, "d")]
    assert claims.claim(db, keys, schema="exactly_once", group_id=place.name) == [False, True]
    work = place.work(place.owners(), place.ranges(5, 1), claim="event")
    assert run("batch", work, events(place, [0], ["d"], partition=1))["repeated"] == 1


def message(place: Place, event: int, header: str | None = None) -> Message:
    """A message of the table sink's, of the same event."""
    value = json.dumps({"partition": 9, "offset": event}).encode()
    headers: list[tuple[str, str | bytes | None]] = [] if header is None else [("event", header)]
    return Message(
        topic=place.name, partition=9, offset=event, key=None, value=value, headers=headers, timestamp=(0, -1)
    )


def test_text_is_text_and_a_number_a_number_for_both(place: Place, db: psycopg.Connection[Any]) -> None:
    """A header is text."""
    sink = TableSink(place.name, decoder=JsonDecoder(), claim="header:event")
    texts = ["8", "é", "e\u0301", "a\0b", "a", "a\\u0000b"]

    def store(*numbered: str) -> list[int]:
        with db.transaction():
            claim = partial(claims.claim, db, schema="exactly_once", group_id=place.name)
            messages = [message(place, number, header) for number, header in enumerate(numbered)]
            sink.write(db, messages, claim=claim)
        found = [offset for partition, offset in place.written() if partition == 9]
        db.execute(f"DELETE FROM {place.name}")
        return found

    assert store("7") == [0]
    options: dict[str, Any] = {"claim": "event"}
    run(
        "batch",
        place.work(place.owners(), place.ranges(0, 7), **options),
        events(place, range(7), ["7", *texts], partition=1),
    )
    assert place.written() == [(1, n) for n in range(1, 7)]
    run("batch", place.work(place.owners(), place.ranges(0, 8), **options), events(place, [7], [7], partition=1))
    assert place.written()[-1] == (1, 7), "the number is another key"
    assert store("7", *texts, "9") == [7]


def test_keys_are_those_of_the_sink_command(place: Place, db: psycopg.Connection[Any]) -> None:
    sink = TableSink(place.name, decoder=JsonDecoder(), claim="offset")

    def store(*events: int) -> None:
        with db.transaction():
            claim = partial(claims.claim, db, schema="exactly_once", group_id=place.name)
            sink.write(db, [message(place, event) for event in events], claim=claim)

    store(0, 1)
    run("batch", place.work(place.owners(), place.ranges(3), claim="offset"), place.input("batch", range(3)))
    assert place.written() == [(0, 2), (9, 0), (9, 1)]
    store(2, 3)
    assert place.written() == [(0, 2), (9, 0), (9, 1), (9, 3)]


@pytest.mark.parametrize("event", [None, ""])
def test_a_row_without_a_key_is_named(place: Place, event: str | None) -> None:
    """The key may be a column that the table lacks."""
    bad = events(place, range(3), ["a", event, "c"])
    work = place.work(place.owners(), place.ranges(3), claim="event")
    with pytest.raises(BadRow, match=rf"{place.name}\[0\] offset 1: column event: the key to claim"):
        run("batch", work, bad)
    assert place.written() == []
    work = place.work(place.owners(), place.ranges(3), claim="event", on_bad_row="dead-letter")
    assert run("batch", work, bad)["rows"] == 2
    assert place.written() == [(0, 0), (0, 2)]
    # Among rows that are left out, too.
    work = place.work(place.owners(), place.ranges(3, 3), claim="event", on_bad_row="dead-letter")
    result = run("batch", work, events(place, range(3), ["a", event, "c"], partition=1))
    assert (result["rows"], result["repeated"], len(result["set_aside"])) == (0, 2, 1)


def test_batches_that_are_counted_claim_as_well(place: Place) -> None:
    counting = CountingPlace(place, "query")
    run("batch", counting.work(0, claim="offset"), place.input("batch", [1, 2]))
    assert run("batch", counting.work(1, claim="offset"), place.input("batch", [2, 4]))["repeated"] == 1
    assert place.written() == [(0, 1), (0, 2), (0, 4)]
    result = run("batch", counting.work(2, claim="offset"), place.input("batch", [1, 2]))
    assert (result["rows"], result["repeated"], result["transactions"]) == (0, 2, 1), "none is left"
    assert len(place.written()) == 3


def test_the_data_source_claims_in_the_order_of_offsets(conninfo: str, name: str) -> None:
    target = Target(conninfo, name)
    source = Run(target, claim="value")
    source.write(rows(name, 0, [4, 3]), rows(name, 0, [0, 1]))
    source.write(rows(name, 1, [0, 1, 2]), batch_id=1)
    assert target.offsets() == [(0, 0), (0, 1), (0, 3), (0, 4), (1, 2)]
    assert target.ledger() == [5, 3]
    # The first wins however a shuffle has spread rows over tasks.
    source.write(rows(name, 0, [6, 5]).set_column(3, "value", pa.array(["one", "one"])), batch_id=2)
    source.write(
        rows(name, 0, [7, 10]).set_column(3, "value", pa.array(["two", "three"])),
        rows(name, 0, [9, 8]).set_column(3, "value", pa.array(["three", "two"])),
        batch_id=3,
    )
    assert [offset for _, offset in target.offsets() if offset > 4] == [5, 7, 9]
    other = Run(Target(conninfo, f"{name}_other"), claim="number")
    with pytest.raises(FrameError, match=r"'number' \(claim=\) is missing"):
        other.write(rows(other.target.name, 0, [0]))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="claim= leaves out"):
        check_options(conninfo="", group_id="g", table="t", claim="id", mode="replace", ledger="batch-id")
    with pytest.raises(ConfigurationError, match="tables= has for each table"):
        check_options(conninfo="", group_id="g", tables={"t": {}}, claim="id")
    column: Any
    for column in (["a", "b"], "", 7):
        for given in ({"table": "t", "claim": column}, {"tables": {"t": {"claim": column}}}):
            with pytest.raises(ConfigurationError, match="must be the name of one column"):
                check_options(conninfo="", group_id="g", **given)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_of", ["this run", "a run that was fenced"])
def test_an_attempt_that_stands_still_with_its_claims_is_ended_by_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch, run_of: str
) -> None:
    """Its machine is gone, say; one of this run is left alone for a minute, here for a second."""
    monkeypatch.setattr(stale_owners, "STILL_SECONDS", 1.0)
    monkeypatch.setattr(stale_owners, "UNBOUNDED_SECONDS", 1.0)
    work = place.work(place.owners(), place.ranges(3), claim="offset")
    session = work.options.session(work.instance if run_of == "this run" else uuid4())
    session.begin("READ COMMITTED")
    frozen = session.connection
    claims.claim(frozen, [key(place, 1)], schema="exactly_once", group_id=place.name)
    assert run("batch", work, place.input("batch", range(3)))["rows"] == 3
    with pytest.raises(psycopg.OperationalError):
        frozen.execute("SELECT 1")
    session.close()
    assert place.written() == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.timeout(300)
def test_of_tasks_that_claim_in_opposite_orders_one_is_run_again(place: Place, db: psycopg.Connection[Any]) -> None:
    # The first claim of a group makes its tables, for which all others wait.
    claims.claim(db, [b"first"], schema="exactly_once", group_id=place.name)
    work = place.work(place.owners(), place.ranges(2, 2), transaction="partition", claim="event")
    work = replace(work, rows_a_copy=1)
    have_claimed = threading.Barrier(2, timeout=120)

    def task(partition: int) -> int:
        keys = ["a", "b"] if partition == 0 else ["b", "a"]
        first, last = (events(place, [n], [keys[n]], partition=partition)[0] for n in range(2))

        def rows() -> Iterator[pa.RecordBatch]:
            yield from interrupted([first], have_claimed.wait)
            yield last

        try:
            run("partition", work, rows())
        except psycopg.errors.DeadlockDetected:
            run("partition", work, [first, last])
            return 1
        return 0

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(task, range(2))) == 1
    assert place.written() in ([(0, 0), (0, 1)], [(1, 0), (1, 1)])
    assert place.ledger() == [2, 2]


@pytest.fixture
def tables(name: str, db: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
    """The second one has a column for the id of an event."""
    db.execute(f'CREATE TABLE {name} (partition int, "offset" bigint)')
    db.execute(f"CREATE TABLE {name}_events (event bigint)")
    yield name, f"{name}_events"
    db.execute(f"DROP TABLE {name}, {name}_events")


def with_event(frame: DataFrame) -> DataFrame:
    """Each event comes twice in both partitions, first at an even offset."""
    return frame.selectExpr("topic", "partition", "offset", "offset - offset % 2 AS event")


def test_by_a_task_by_each_task_and_by_the_driver(
    scene: Scene, tables: tuple[str, str], db: psycopg.Connection[Any]
) -> None:
    def write(sink: PostgresSink, frame: DataFrame, batch_id: int) -> None:
        sink(with_event(frame), batch_id)

    ways: list[dict[str, Any]] = [{}, {"small_batch": 1000}, {"transaction": "partition"}]
    for number, way in enumerate(ways, 1):
        sink = scene.sink(table=tables[0], claim="event", **way)
        scene.produce(20)
        scene.run(partial(write, sink))
        stored = db.execute(f'SELECT "offset" FROM {tables[0]} ORDER BY 1').fetchall()
        assert stored == [(offset,) for offset in range(0, 10 * number, 2)]
        assert scene.reports[-1].repeated == 15


def test_each_of_several_tables_claims_for_itself(
    scene: Scene, tables: tuple[str, str], db: psycopg.Connection[Any]
) -> None:
    sink = scene.sink(table=None, tables={name: {"claim": "event"} for name in tables})
    scene.produce(20)
    scene.run(lambda frame, batch_id: sink.write(dict.fromkeys(tables, with_event(frame)), batch_id))
    for name, column in zip(tables, ("offset", "event"), strict=True):
        assert db.execute(f'SELECT "{column}" FROM {name} ORDER BY 1').fetchall() == [(n,) for n in range(0, 10, 2)]
    assert scene.reports[-1].repeated == 30
