"""Bad messages among good ones: what is set aside, what is stored, and how much work the rest of them make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.ledger.outcome import Fault, classify
from exactly_once.writer import BadRow, TableChanged, TableSink
from exactly_once.writer.formats import FormatDecoder, format_of
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.sink import Bad
from tests.writer.conftest import Connection, MakeTable, rows_of


def messages(values: Sequence[bytes | None], *, key: bytes | None = None) -> list[Message]:
    return [Message(topic="t", partition=0, offset=i, key=key, value=value) for i, value in enumerate(values)]


def sift(sink: TableSink, work: Connection, sent: Sequence[Message]) -> list[int | None]:
    """Write what can be written; return the offsets of what was set aside, in the order of the calls."""
    aside: list[Bad] = []
    work.execute("SAVEPOINT s")
    with pytest.raises(BadRow):  # the first bad message is tried alone
        sink.write(work, sent, set_aside=aside.append)
    work.execute("ROLLBACK TO s")
    sink.write(work, sent, set_aside=aside.append)
    return [message.offset() for bad in aside for message, _ in bad]


def test_a_message_of_several_rows_is_stored_whole_or_set_aside(work: Connection, make_table: MakeTable) -> None:
    """Its first line is good; a line that is no CSV at all is found before any row is made, and told in its place."""
    table = make_table("(n int, v text)")
    sink = TableSink(table, decoder=FormatDecoder(JsonDecoder(lax=True), format_of("csv")))
    sent = messages([b"1,a", b"2,b\nno,c", b"3,d\n4,e", b"5", b"6,f"])
    assert sift(sink, work, sent) == [1, 3]
    assert rows_of(work, table) == [(1, "a"), (3, "d"), (4, "e"), (6, "f")]


def test_parts_of_a_large_batch_are_stored_in_their_order(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(k int PRIMARY KEY, n int)")
    sink = TableSink(table, decoder=JsonDecoder(), mode="upsert")
    sent = messages([b'{"k": 1, "n": "x"}' if i == 300 else b'{"k": 1, "n": %d}' % i for i in range(600)])
    assert sift(sink, work, sent) == [300]
    assert rows_of(work, table) == [(1, 599)]


def test_few_messages_pay_for_a_bad_one(work: Connection, make_table: MakeTable) -> None:
    """Of a thousand with ten bad ones nearly all are decoded by the loops that decode many."""
    table = make_table("(n int)")
    looked_at: list[Any] = []

    class Counting(JsonDecoder):
        def _alone(self, *args: Any) -> Any:
            looked_at.append(args[0].offset())
            return super()._alone(*args)

    sink = TableSink(table, decoder=Counting())
    sent = messages([b'{"n": "x"}' if i % 100 == 7 else b'{"n": %d}' % i for i in range(1000)])
    assert sift(sink, work, sent) == list(range(7, 1000, 100))
    assert set(looked_at) == set(range(7, 1000, 100))
    assert len(rows_of(work, table)) == 990


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_tombstones_among_rows_keep_their_order(mode: Any, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(n int PRIMARY KEY, v text)")
    sink = TableSink(table, decoder=JsonDecoder(), mode=mode)
    values: list[bytes | None] = [b'{"n": 1, "v": "a"}', None, b'{"n": 1, "v": "b"}', b'{"n": 2, "v": "c"}']
    sent = [
        *messages(values, key=b"1"),
        Message(topic="t", partition=0, offset=4, key=b"2"),
        Message(topic="t", partition=0, offset=5, value=b'{"n": 3, "odd": 1, "v": ""}'),
    ]
    if mode == "append":
        with pytest.raises(BadRow, match=r"t\[0\] offset 1: the message has no value"):
            sink.write(work, sent)
        return
    sink.write(work, sent)
    assert rows_of(work, table) == [(1, "b"), (3, "")]
    assert sink.unused_fields == {"odd": 1}


def test_names_that_postgres_cuts_alike_are_refused_where_they_meet(work: Connection, make_table: MakeTable) -> None:
    long = "a" * 63
    table = make_table(f"({long} int, n int)")
    sink = TableSink(table, decoder=JsonDecoder())
    sent = messages([b'{"%s": 1, "n": 1}' % (long + each).encode() for each in "xxyx"])
    assert sift(sink, work, sent) == [2]
    assert rows_of(work, table, f"{long}, n") == [(1, 1)] * 3


def test_a_key_that_is_no_object_is_the_fault_of_its_own_message(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(n int, k text)")
    sink = TableSink(table, decoder=JsonDecoder(metadata={"k": "key:id"}))
    sent = [
        Message(topic="t", partition=0, offset=i, key=b"5" if i == 20 else b'{"id": "k"}', value=b'{"n": 1}')
        for i in range(40)
    ]
    assert sift(sink, work, sent) == [20]
    assert len(rows_of(work, table)) == 39
    with pytest.raises(BadRow, match=r"t\[0\] offset 20: column k: key:id: the key is no object"):
        list(sink.decoder.decode(sent))


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
@pytest.mark.parametrize(("kind", "value"), [("jsonpath", "$$."), ("regclass", "a.b.c.d"), ("regtype", "nosuch")])
def test_what_the_reader_of_a_type_refuses_is_the_value(
    mode: Any, kind: str, value: str, work: Connection, make_table: MakeTable
) -> None:
    """A batch that fails so by a merge comes again by way of COPY, which says which column it was."""
    table = make_table(f"(n int PRIMARY KEY, v {kind})")
    sink = TableSink(table, decoder=JsonDecoder(), mode=mode)
    good = b'{"n": 1, "v": null}'
    sink.write(work, messages([good]))
    work.execute("SAVEPOINT s")
    error: BaseException | None = None
    for attempt in range(2):
        with pytest.raises((BadRow, TableChanged), match=r"column v: |or a value does not fit") as caught:
            sink.write(work, messages([b'{"n": 2, "v": "%s"}' % value.encode()]))
        work.execute("ROLLBACK TO s")
        error = caught.value
        if isinstance(error, BadRow):
            break
        assert (attempt, mode == "append") == (0, False)
    assert isinstance(error, BadRow)
    assert (error.offset, error.column) == (0, "v")
    assert classify(error, connection_lost=False) is Fault.HANDLER
    sink.write(work, messages([good.replace(b"1", b"3")]))
    assert rows_of(work, table, "n") == [(1,), (3,)]


def test_a_statement_that_is_wrong_is_no_value(work: Connection, make_table: MakeTable) -> None:
    """A trigger that calls what is not there fails for each row: no message is at fault."""
    table = make_table("(n int PRIMARY KEY)")
    body = "'BEGIN PERFORM nosuch(); RETURN NEW; END'"
    work.execute(f"CREATE FUNCTION pg_temp.wrong() RETURNS trigger LANGUAGE plpgsql AS {body}")
    work.execute(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION pg_temp.wrong()")
    work.execute("SAVEPOINT s")
    for mode in ("append", "upsert"):
        sink = TableSink(table, decoder=JsonDecoder(), mode=mode)
        errors: list[type[BaseException]] = []
        for _ in range(3):
            with pytest.raises(psycopg.Error) as caught:
                sink.write(work, messages([b'{"n": 1}']))
            errors.append(caught.type)
            work.execute("ROLLBACK TO s")
        assert errors[-1] is psycopg.errors.UndefinedFunction


def test_a_table_that_is_full_gets_no_more_columns_and_no_message_is_at_fault(
    work: Connection, make_table: MakeTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = make_table(f"(n int, rest jsonb, {', '.join(f'c{i} int' for i in range(1590))})")
    sink = TableSink(table, decoder=JsonDecoder(rest="rest"), evolve="add-columns")
    fields = ", ".join(f'"x{i}": {i}' for i in range(20))
    sent = messages([b'{"n": 1, %s}' % fields.encode(), b'{"n": 2, "y": 1}'])
    work.execute("SAVEPOINT s")
    for said in ("gets columns that the messages bring", "takes no more columns"):
        with pytest.raises(TableChanged, match=said):
            sink.write(work, sent)
        work.execute("ROLLBACK TO s")
    assert sink.write(work, sent) == 2
    assert rows_of(work, table, "n, rest->>'x7', rest->>'y'") == [(1, "7", None), (2, None, "1")]
