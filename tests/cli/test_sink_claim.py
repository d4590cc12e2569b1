"""`sink --claim`: of the messages about one event the first is stored, whatever partition, unit or run it is in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.errors import ConfigurationError
from exactly_once.writer import BadRow, TableSink
from exactly_once.writer.formats import FormatDecoder, format_of
from exactly_once.writer.from_json import JsonDecoder
from tests.cli.conftest import Command
from tests.cli.test_sink import rows, send
from tests.support.topics import create_topic
from tests.writer.conftest import Connection, MakeTable, make_table, rows_of, work

Database = psycopg.Connection[Any]
__all__ = ["make_table", "work"]  # fixtures


class Claimed:
    """Stands for a unit where only the rows that are left matter: the real one is claimed from by the command below."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def __call__(self, keys: Sequence[str]) -> list[bool]:
        answers = []
        for key in keys:
            answers.append(key not in self.keys)
            self.keys.add(key)
        return answers


def test_events_that_came_before_are_left_out_and_counted(
    operate: Command, bootstrap_servers: str, name: str, db: Database
) -> None:
    """The first one of 3 is bad and set aside, so its repeat is the first; ids of one table are none of another's."""
    source = create_topic(bootstrap_servers, 2, name=name)
    db.execute(f"CREATE TABLE {name} (v int, part int)")
    command = ["sink", "--topic", source, "--table", source, "--claim", "event.id", "--metadata", "part=partition"]
    command += ["--until-end", "--max-messages", "7", "--on-poison", "dead-letter", "--claims-window", "3600"]
    values = [{"event": {"id": i % 10}, "v": "no" if i == 3 else i} for i in range(30)]
    send(bootstrap_servers, source, [(None, value) for value in values])
    first = operate(*command)
    assert first.code == 0, first.err
    assert "rows of events that came before, left out by claim: " in first.err
    found = [value for (value,) in db.execute(f"SELECT v FROM {name}").fetchall()]
    assert sorted(value % 10 for value in found) == list(range(10))
    assert 3 not in found
    send(bootstrap_servers, source, [(None, {"event": {"id": i}, "v": 100 + i}) for i in range(8, 12)])
    assert operate(*command).code == 0
    assert rows(db, source, "v")[-2:] == [(110,), (111,)]
    assert len(rows(db, source)) == 12
    window = "SELECT seconds FROM exactly_once.claim_window WHERE group_id = %s"
    assert db.execute(window, (source,)).fetchone() == (3600,)


def test_each_table_has_its_own_events(
    operate: Command, bootstrap_servers: str, name: str, db: Database, tmp_path: Path
) -> None:
    """Two topics of one table share them; a header can be the id, and the dry run claims nothing."""
    db.execute(f"CREATE TABLE {name}_a (id int); CREATE TABLE {name}_b (id int)")
    topics = [create_topic(bootstrap_servers, 1, name=f"{name}-{each}") for each in "xyz"]
    for topic in topics:
        send(bootstrap_servers, topic, [("0", {"id": i % 3}) for i in range(6)], 1)
    file = tmp_path / "sink.toml"
    file.write_text(f"""
        [[sink]]
        topics = ["{topics[0]}", "{topics[1]}"]
        table = "{name}_a"
        claim = "id"
        [[sink]]
        topics = ["{topics[2]}"]
        table = "{name}_b"
        claim = ["id"]
    """)
    assert len(operate("sink", "--config", file, "--dry-run", "--json").json["sinks"][0]["rows"]) == 12
    assert operate("sink", "--config", file, "--until-end").code == 0
    assert rows(db, f"{name}_a") == rows(db, f"{name}_b") == [(0,), (1,), (2,)]


@pytest.mark.parametrize("claim", ["key:a.id", "header:event-id"])
def test_keys_and_headers_can_name_an_event(claim: str, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(n int)")
    sink, claimed = TableSink(table, decoder=JsonDecoder(), claim=claim), Claimed()
    sent = [
        Message(
            topic="t",
            partition=0,
            offset=i,
            key=b'{"a": {"id": "%d"}}' % (i // 2),
            headers=[("event-id", b"%d" % (i // 2))],
            value=b'{"n": %d}' % i,
        )
        for i in range(6)
    ]
    sink.write(work, sent, claim=claimed)
    assert rows_of(work, table) == [(0,), (2,), (4,)]
    assert sink.repeated_rows == 3
    assert claimed.keys == {f'{sink.writer.table(work)} "{i}"' for i in range(3)}
    with pytest.raises(BadRow, match=r"t\[0\] offset 9: (the key to claim|there is no key)"):
        sink.write(work, [Message(topic="t", partition=0, offset=9, key=b"{}", value=b'{"n": 1}')], claim=claimed)
    with pytest.raises(ConfigurationError, match="claim= needs a unit"):
        sink.write(work, sent)


def test_a_whole_key_can_name_an_event(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(n int)")
    sink, claimed = TableSink(table, decoder=JsonDecoder(), claim="key:"), Claimed()

    def sent(offset: int, key: bytes | None) -> Message:
        return Message(topic="t", partition=0, offset=offset, key=key, value=b'{"n": %d}' % offset)

    keys = [b"order-1", b"order-2", b"order-1", b'{"id": 1}', "ä".encode(), b"1", '"ä"'.encode(), b"1"]
    sink.write(work, list(map(sent, range(len(keys)), keys)), claim=claimed)
    assert rows_of(work, table) == [(n,) for n in (0, 1, 3, 4, 5, 6)]
    for odd in (None, b"", b"\xff"):
        with pytest.raises(BadRow, match=r"t\[0\] offset 9: (the key to claim, key:, is|there is no key)"):
            sink.write(work, [sent(9, odd)], claim=claimed)
    with pytest.raises(BadRow, match=r"the key to claim, key, is text.*header:NAME, key:PATH, and key: for"):
        TableSink(table, decoder=JsonDecoder(), claim="key").write(work, [sent(9, b"1")], claim=claimed)
    for empty in ("", "header:", ()):
        with pytest.raises(ConfigurationError, match="names no field"):
            TableSink(table, decoder=JsonDecoder(), claim=empty)


def test_a_bad_row_that_is_replaced_at_once_claims_nothing(work: Connection, make_table: MakeTable) -> None:
    """Whether its event is lost would depend on which messages share a batch."""
    table = make_table("(id int PRIMARY KEY, n int CHECK (n <> 13), event text)")
    sink, claimed = TableSink(table, decoder=JsonDecoder(), mode="upsert", claim="event"), Claimed()
    values = [b'{"id": 1, "n": 13, "event": "a"}', b'{"id": 1, "n": 1, "event": "b"}']
    sent = [Message(topic="t", partition=0, offset=offset, value=value) for offset, value in enumerate(values)]
    with pytest.raises(BadRow, match="violates check constraint"):
        sink.write(work, sent, claim=claimed)


@pytest.mark.parametrize("claim", ["key:event", "header:event"])
def test_all_rows_of_a_message_are_one_event_of_its_key_or_header(
    claim: str, work: Connection, make_table: MakeTable
) -> None:
    lines, changes = make_table("(n int)"), make_table("(id int PRIMARY KEY)")

    def sent(offset: int, event: int, value: bytes) -> Message:
        key = b'{"event": %d}' % event
        return Message(topic="t", partition=0, offset=offset, key=key, headers=[("event", b"%d" % event)], value=value)

    sink, claimed = TableSink(lines, decoder=FormatDecoder(JsonDecoder(), format_of("csv")), claim=claim), Claimed()
    sink.write(work, [sent(0, 1, b"1\n2\n3"), sent(1, 1, b"1\n2\n3"), sent(2, 2, b"4")], claim=claimed)
    assert rows_of(work, lines) == [(1,), (2,), (3,), (4,)]
    decoder = FormatDecoder(JsonDecoder(), format_of("debezium"))
    sink = TableSink(changes, decoder=decoder, mode="upsert", claim=claim)
    moved = b'{"op": "u", "before": {"id": 1}, "after": {"id": 2}}'
    sink.write(work, [sent(3, 3, b'{"op": "c", "after": {"id": 1}}'), sent(4, 4, moved)], claim=claimed)
    assert rows_of(work, changes) == [(2,)]


@pytest.mark.parametrize("value", [b'{"n": 1}', b'{"n": 1, "id": null}', b'{"n": 1, "id": 1.5}', b'{"n": 1, "id": ""}'])
def test_an_event_without_an_id_is_no_repeat_of_another(value: bytes, work: Connection, make_table: MakeTable) -> None:
    sink, claimed = TableSink(make_table("(n int)"), decoder=JsonDecoder(), claim="id"), Claimed()
    with pytest.raises(BadRow, match=r"t\[0\] offset 4: .*id"):
        sink.write(work, [Message(topic="t", partition=0, offset=4, value=value)], claim=claimed)
    assert not claimed.keys


def test_a_repeated_change_of_a_key_deletes_nothing(work: Connection, make_table: MakeTable) -> None:
    """It is a delete and a row, and only the row has the id; a delete alone is done each time."""
    table = make_table("(id int PRIMARY KEY, event text)")
    decoder = FormatDecoder(JsonDecoder(), format_of("debezium"))
    sink, claimed = TableSink(table, decoder=decoder, mode="upsert", claim="event"), Claimed()

    def event(offset: int, text: str) -> Message:
        return Message(topic="t", partition=0, offset=offset, key=b'{"id": 1}', value=text.encode())

    moved = event(1, '{"op": "u", "before": {"id": 1, "event": "a"}, "after": {"id": 2, "event": "b"}}')
    again = event(3, '{"op": "u", "before": {"id": 1, "event": "a"}, "after": {"id": 2, "event": "b"}}')
    sink.write(work, [event(0, '{"op": "c", "after": {"id": 1, "event": "a"}}'), moved], claim=claimed)
    assert rows_of(work, table) == [(2, "b")]
    sink.write(work, [event(2, '{"op": "c", "after": {"id": 1, "event": "c"}}'), again], claim=claimed)
    assert rows_of(work, table) == [(1, "c"), (2, "b")]
    sink.write(work, [event(4, '{"op": "d", "before": {"id": 1}}')], claim=claimed)
    assert rows_of(work, table) == [(2, "b")]
