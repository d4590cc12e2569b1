"""A row that cannot be stored is set aside in the transaction that skips it: stored, dead, or still to come."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC as UTC_ZONE
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from psycopg.conninfo import make_conninfo

from exactly_once import Unit, _failpoints
from exactly_once.cli import main
from exactly_once.errors import ConfigurationError, TooManyDeadLetters
from exactly_once.ledger.dead_letters import DeadLetter, DeadLetterLimit, find
from exactly_once.writer import BadRow
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.sink import TableSink
from spark_sink.options import check_options
from tests.spark.attempts import Place, run
from tests.spark.staged import Run, Target

BAD = 3
"""The offset whose row no table here takes."""
both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@pytest.fixture
def place(place: Place, db: psycopg.Connection[Any]) -> Place:
    refused = f'"offset" NOT IN ({BAD}, 7, 8)'
    db.execute(f'ALTER TABLE {place.name} ADD CHECK ({refused}), ADD PRIMARY KEY (partition, "offset")')
    return place


def letters(db: psycopg.Connection[Any], name: str) -> list[DeadLetter]:
    return find(db, schema="exactly_once", group_id=name)


@both
def test_rows_that_the_table_keeps_out_are_not_reported_as_written(
    place: Place, db: psycopg.Connection[Any], transaction: str, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute(
        f"""CREATE FUNCTION {place.name}_no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER no BEFORE INSERT ON {place.name} FOR EACH ROW WHEN (NEW."offset" < {BAD + 1})
        EXECUTE FUNCTION {place.name}_no()"""
    )
    work = place.work(place.owners(), place.ranges(7, 0), transaction=transaction)
    assert run(transaction, work, place.input(transaction, range(7), range(0)))["rows"] == 6 - BAD
    assert place.ledger()[0] == 7
    assert f"Postgres counts {6 - BAD} of 7 rows as stored" in caplog.text


@both
@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_the_rest_of_its_batch_is_stored_and_the_ledger_moves_on(
    place: Place, db: psycopg.Connection[Any], transaction: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever Postgres tells which row it was, and where it does not."""
    options = {"transaction": transaction, "mode": mode, "on_bad_row": "dead-letter"}
    work = place.work(place.owners(), place.ranges(10, 2), **options)
    result = run(transaction, work, place.input(transaction, range(10), range(2)))
    assert place.written() == [*((0, n) for n in range(10) if n not in (BAD, 7, 8)), (1, 0), (1, 1)]
    assert place.ledger() == [10, 2]
    assert (result["rows"], len(result["set_aside"])) == (9, 3)
    found = letters(db, place.name)
    assert [letter.message_offset for letter in found] == [BAD, 7, 8]
    assert json.loads(found[0].value or b"") == {"partition": 0, "offset": BAD}
    assert found[0].headers == [("exactly_once.row_of", place.name.encode())]
    assert f"{place.name}[0] offset {BAD}" in found[0].error
    assert main(["dead-letters", "list", "--json", "--group-id", place.name, "--conninfo", place.conninfo]) == 0
    assert len(json.loads(capsys.readouterr().out)["dead_letters"]) == 3


def test_each_row_of_a_message_is_a_dead_letter(place: Place, db: psycopg.Connection[Any]) -> None:
    """Also where they are alike, as after an explode."""
    work = place.work(place.owners(), place.ranges(5), on_bad_row="dead-letter")
    result = run("batch", work, [place.rows([0, 1, 2, BAD, BAD, BAD, 4]), place.mark()])
    assert place.written() == [(0, n) for n in (0, 1, 2, 4)]
    assert [letter.message_offset for letter in letters(db, place.name)] == [BAD, BAD, BAD]
    assert (result["rows"], len(result["set_aside"])) == (4, 3)


@pytest.mark.parametrize("claim", [None, "offset"])
@pytest.mark.parametrize("count", [10, 900])
@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_a_value_that_its_type_refuses_as_a_statement_is_the_rows_fault(
    place: Place, db: psycopg.Connection[Any], mode: str, count: int, claim: str | None
) -> None:
    """Postgres says the same of an altered table; attempts have new writers, so the next one would not know better."""
    bad = {BAD, 7, 8, 2}
    paths = pa.array(["$.a[" if n in (2, count - 1) else "$.a" for n in range(count)], pa.string())
    attempt_with(place, db, "q jsonpath", paths, mode=mode, claim=claim, on_bad_row="dead-letter")
    assert place.written() == [(0, n) for n in range(count - 1) if n not in bad]
    found = letters(db, place.name)
    assert [letter.message_offset for letter in found] == [*sorted(bad), *([count - 1] if count - 1 not in bad else [])]
    assert "jsonpath" in found[0].error


@pytest.mark.parametrize("claim", [None, "offset"])
@pytest.mark.parametrize("count", [10, 2500])
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_row_that_no_page_holds_is_found(
    place: Place, db: psycopg.Connection[Any], mode: str, count: int, claim: str | None
) -> None:
    """COPY reads up to a thousand rows before it stores one, and names the last that it has read."""
    column = "q text, ALTER q SET STORAGE PLAIN"
    texts = pa.array(["x" * (10_000 if n == 1 else 1) for n in range(count)])
    with pytest.raises(BadRow, match=rf"{place.name}\[0\] offset 1: row is too big"):
        attempt_with(place, db, column, texts, mode=mode, claim=claim)
    db.execute(f"ALTER TABLE {place.name} DROP q")
    attempt_with(place, db, column, texts, mode=mode, claim=claim, on_bad_row="dead-letter")
    assert place.written() == [(0, n) for n in range(count) if n not in {1, BAD, 7, 8}]
    assert [letter.message_offset for letter in letters(db, place.name)] == [1, BAD, 7, 8]


NO_UTF8 = pa.array([b"a\xffb"], pa.binary()).view(pa.string())
FAR = pa.array([[400_000_000_000_000_000, None]], pa.list_(pa.timestamp("us", "UTC")))


LONG = pa.array(["".join(map(str, range(30_000)))])


def attempt_with(place: Place, db: psycopg.Connection[Any], column: str, values: Any, **options: Any) -> None:
    """Write rows with one more column, called q."""
    db.execute(f"ALTER TABLE {place.name} ADD {column}")
    work = place.work(place.owners(), place.ranges(len(values)), **options)
    (part,) = work.parts
    work = replace(work, parts=(replace(part, columns=(*part.columns, "q")),))
    batches = [
        pa.RecordBatch.from_arrays([*rows.columns, some], [*rows.schema.names, "q"])
        for rows, some in ((place.rows(range(len(values))), values), (place.mark(), pa.nulls(1, values.type)))
    ]
    run("batch", work, batches)


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(
    ("column", "values", "options", "shown"),
    [
        ("q text", NO_UTF8, {}, "a\udcffb"),
        ("q text", NO_UTF8, {"claim": "q"}, "a\udcffb"),
        ("q timestamptz[]", FAR, {}, ["14645-06-30 15:06:40.000000Z", None]),
        ("q text UNIQUE", LONG, {}, LONG[0].as_py()),
        ("q float8 CHECK (q < 1)", pa.array([float("nan")]), {}, "NaN"),
        ("q bytea[] CHECK (q IS NULL)", pa.array([[b"\xff", None]]), {}, ["/w==", None]),
    ],
)
def test_a_row_is_set_aside_whatever_it_holds(  # noqa: PLR0917 - most are the cases
    place: Place, db: psycopg.Connection[Any], mode: str, column: str, values: Any, options: Any, shown: Any
) -> None:
    """A value that Python cannot hold, one that JSON lacks, and a key that is too long for its index."""
    good = pa.array(["k0", "k2"]) if options else pa.nulls(2, values.type)
    some = pa.concat_arrays([good.slice(0, 1), values, good.slice(1, 1)])
    attempt_with(place, db, column, some, mode=mode, on_bad_row="dead-letter", **options)
    assert place.written() == [(0, 0), (0, 2)]
    (letter,) = letters(db, place.name)
    row = json.loads(letter.value or b"", parse_constant=lambda _: pytest.fail("no JSON"))
    assert row == {"partition": 0, "offset": 1, "q": shown}


@pytest.mark.parametrize("small_batch", [0, 1000])
@pytest.mark.parametrize("on_bad_row", ["fail", "dead-letter"])
def test_a_value_that_must_be_unique_goes_from_row_to_row_within_a_batch(
    place: Place, db: psycopg.Connection[Any], on_bad_row: str, small_batch: int
) -> None:
    """Rows are stored in the order of their keys, in which the second row would take it before the first lets it go."""
    db.execute(f"ALTER TABLE {place.name} ADD q int UNIQUE")
    db.execute(f'INSERT INTO {place.name} (partition, "offset", q) VALUES (0, 1, 2), (0, 9, 1)')
    options = {"mode": "upsert", "key": ["q"], "on_bad_row": on_bad_row, "small_batch": small_batch}
    attempt_with(place, db, "IF NOT EXISTS q int", pa.array([2, 1], pa.int32()), **options)
    assert db.execute(f'SELECT q, "offset" FROM {place.name} ORDER BY 1').fetchall() == [(1, 1), (2, 0)]
    assert letters(db, place.name) == []


def test_the_batch_fails_with_the_row_of_which_postgres_says_nothing(place: Place, db: psycopg.Connection[Any]) -> None:
    """Of a statement it does not tell which of its values it refuses."""
    texts = pa.concat_arrays([pa.array(["a"]), LONG, pa.array(["b"])])
    with pytest.raises(BadRow, match=rf"^{place.name}\[0\] offset 1: index row"):
        attempt_with(place, db, "q text UNIQUE", texts, mode="upsert")


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_row_that_a_policy_refuses_is_set_aside(place: Place, db: psycopg.Connection[Any], mode: str) -> None:
    role = f"{place.name}_role"
    db.execute(f"CREATE ROLE {role} IN ROLE pg_read_all_data, pg_write_all_data")
    db.execute(f"ALTER TABLE {place.name} ENABLE ROW LEVEL SECURITY")
    db.execute(f"""CREATE POLICY p ON {place.name} USING (true) WITH CHECK ("offset" <> 1)""")
    try:
        conninfo = make_conninfo(place.conninfo, options=f"-c role={role}")
        work = place.work(place.owners(), place.ranges(5), mode=mode, on_bad_row="dead-letter", conninfo=conninfo)
        run("batch", work, place.input("batch", range(5)))
        assert [letter.message_offset for letter in letters(db, place.name)] == [1, BAD]
    finally:
        db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert place.written() == [(0, 0), (0, 2), (0, 4)]


@both
def test_an_attempt_that_dies_leaves_no_dead_letter_and_the_next_one_does(
    place: Place, db: psycopg.Connection[Any], transaction: str
) -> None:
    def die() -> None:
        _failpoints.disarm()
        raise KeyboardInterrupt

    work = place.work(place.owners(), place.ranges(5), transaction=transaction, on_bad_row="dead-letter")
    batches = place.input(transaction, range(5))
    _failpoints.arm("guarded", die)
    with pytest.raises(KeyboardInterrupt):
        run(transaction, work, batches)
    assert (place.written(), letters(db, place.name)) == ([], [])
    for _ in range(2):  # the second finds what the first has done
        run(transaction, work, batches)
    assert [letter.message_offset for letter in letters(db, place.name)] == [BAD]
    assert place.written() == [(0, n) for n in range(5) if n != BAD]


def mend(unit: Unit) -> None:
    """Store a row that was set aside, under an offset that the table takes."""
    (message,) = unit.messages
    table = dict(cast("list[tuple[str, bytes]]", message.headers()))["exactly_once.row_of"].decode()
    row = json.loads(message.value() or b"")
    unit.execute(f"INSERT INTO {table} VALUES (%s, %s)", (row["partition"], row["offset"] + 100))


def test_a_row_that_was_set_aside_is_replayed(place: Place, db: psycopg.Connection[Any]) -> None:
    work = place.work(place.owners(), place.ranges(5), on_bad_row="dead-letter")
    run("batch", work, [place.rows(range(5)), place.mark()])
    handler = ["--handler", "tests.spark.test_bad_rows:mend", "--execute"]
    assert main(["dead-letters", "replay", *handler, "--group-id", place.name, "--conninfo", place.conninfo]) == 0
    assert place.written() == [(0, 0), (0, 1), (0, 2), (0, 4), (0, BAD + 100)]
    assert letters(db, place.name) == []


def store_again(unit: Unit) -> None:
    """Replay as the sink command would: the row is JSON that fills the columns of its names."""
    (message,) = unit.messages
    table = dict(cast("list[tuple[str, bytes]]", message.headers()))["exactly_once.row_of"].decode()
    TableSink(table, decoder=JsonDecoder())(unit)


UTC = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("jsonb", pa.array(['{"a": 1.10, "b": [null, "ä", "{}"], "c": 12345678901234567890}'])),
        ("json", pa.array(['"text"'])),
        ("json", pa.array([b'{"a": {}}'], pa.binary())),
        ("jsonb", pa.array([0.1], pa.float32())),
        ("jsonb[]", pa.array([['{"a": 1.10}', None]])),
        ("text", pa.array(['{"a": 1}'])),
        ("text", pa.array(["ä".encode()], pa.binary())),
        ("text[]", pa.array([[b"abcd"]], pa.list_(pa.binary()))),
        ("uuid", pa.array([bytes(range(16))], pa.binary())),
        ("bytea", pa.array([b"\x00\xffAB"], pa.binary())),
        ("bytea[]", pa.array([[b"\x00\xffAB", None, b""]], pa.list_(pa.binary()))),
        ("interval", pa.array([-timedelta(days=3, hours=4, microseconds=5)], pa.duration("us"))),
        ("interval[]", pa.array([[timedelta(hours=-1)]], pa.list_(pa.duration("us")))),
        ("float8", pa.array([float("nan")])),
        ("float8[]", pa.array([[float("-inf"), None, 0.1]])),
        ("real", pa.array([0.1], pa.float32())),
        ("float8", pa.array([Decimal("1.50")], pa.decimal128(10, 2))),
        ("real[]", pa.array([[Decimal("-0.25"), None]], pa.list_(pa.decimal128(10, 2)))),
        ("numeric", pa.array([Decimal("1234567890123456789012345678.0123456789")], pa.decimal128(38, 10))),
        ("timestamptz", pa.array([datetime(1, 1, 1, 5, tzinfo=UTC_ZONE)], UTC)),
        ("timestamp[]", pa.array([[datetime(2026, 3, 8, 2, 30, 0, 5), None]], pa.list_(pa.timestamp("us")))),  # noqa: DTZ001
        ("date", pa.array([date(1582, 10, 10)])),
        ("time", pa.array([time(23, 59, 59, 5)], pa.time64("us"))),
    ],
)
def test_a_row_that_is_replayed_by_the_sink_is_the_row_that_was_set_aside(
    place: Place, db: psycopg.Connection[Any], column: str, value: Any
) -> None:
    """No type is changed by its way through JSON: the row beside it went without."""
    attempt_with(place, db, f"q {column}", pa.concat_arrays([value] * 4), on_bad_row="dead-letter")
    db.execute(f"ALTER TABLE {place.name} DROP CONSTRAINT {place.name}_offset_check")
    handler = ["--handler", "tests.spark.test_bad_rows:store_again", "--execute"]
    assert main(["dead-letters", "replay", *handler, "--group-id", place.name, "--conninfo", place.conninfo]) == 0
    assert place.written() == [(0, 0), (0, 1), (0, 2), (0, BAD)]
    assert len(db.execute(f"SELECT DISTINCT q::text FROM {place.name}").fetchall()) == 1


@pytest.mark.parametrize("text", ["NaN, or an infinity, in {}", "{bad", '1, "offset": 5', "NaN", ""])
def test_what_is_no_json_is_refused_again_when_it_is_replayed(
    place: Place, db: psycopg.Connection[Any], text: str
) -> None:
    """In the row as text it would be stored, and by itself it might be another row."""
    attempt_with(place, db, "q jsonb", pa.array(["{}", text, "1"]), on_bad_row="dead-letter")
    (letter,) = letters(db, place.name)
    assert json.dumps(text).encode() in (letter.value or b"")
    handler = ["--handler", "tests.spark.test_bad_rows:store_again", "--execute"]
    assert main(["dead-letters", "replay", *handler, "--group-id", place.name, "--conninfo", place.conninfo]) == 1
    assert place.written() == [(0, 0), (0, 2)]
    assert [each.value for each in letters(db, place.name)] == [letter.value]


def test_without_it_the_batch_fails_and_names_the_row(place: Place, db: psycopg.Connection[Any]) -> None:
    work = place.work(place.owners(), place.ranges(5))
    with pytest.raises(BadRow, match=rf"{place.name}\[0\] offset {BAD}"):
        run("batch", work, [place.rows(range(5)), place.mark()])
    assert (place.written(), letters(db, place.name)) == ([], [])


def test_where_it_is_hardly_the_rows_fault_the_batch_fails(place: Place, db: psycopg.Connection[Any]) -> None:
    """Two in a row are one too many, 3 and 7 are not in a row."""
    limit = DeadLetterLimit(in_a_row=1)
    work = place.work(place.owners(), place.ranges(10), on_bad_row="dead-letter", dead_letter_limit=limit)
    with pytest.raises(TooManyDeadLetters, match="offset 8 would be dead letter 2 in a row"):
        run("batch", work, [place.rows(range(10)), place.mark()])
    assert (place.written(), place.ledger(), letters(db, place.name)) == ([], [0], [])


def test_the_data_source_sets_them_aside_as_well(conninfo: str, name: str, db: psycopg.Connection[Any]) -> None:
    target = Target(conninfo, name)
    db.execute(f"ALTER TABLE {name} ADD CHECK (value <> 'v{BAD}')")
    source = Run(target, onBadRow="dead-letter")
    source.write(source.rows(0, range(5)), source.rows(1, range(5)))
    assert target.offsets() == [(p, n) for p in range(2) for n in range(5) if n != BAD]
    assert target.ledger() == [5, 5]
    assert [(x.partition, x.message_offset) for x in letters(db, name)] == [(0, BAD), (1, BAD)]


def test_rows_without_offsets_cannot_be_skipped() -> None:
    with pytest.raises(ConfigurationError, match="on_bad_row='dead-letter' needs ledger='offsets'"):
        check_options(conninfo="", table="t", group_id="g", ledger="batch-id", on_bad_row="dead-letter")
