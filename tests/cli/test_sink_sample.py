"""Tables that the sink command makes from a sample: what later messages bring is kept, what cannot be is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

from exactly_once.cli.sink_tables import SAMPLE
from tests.cli.conftest import Command
from tests.cli.test_sink import rows, send
from tests.support.topics import create_topic
from tests.support.waiting import until
from tests.writer.test_envelopes import CONNECT, connect, field

Database = psycopg.Connection[Any]
TYPES = "SELECT attname, format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"


@pytest.fixture
def source(bootstrap_servers: str, name: str) -> str:
    """An empty topic of three partitions."""
    return create_topic(bootstrap_servers, 3, name=name)


def created(source: str, *more: str, table: str | None = None) -> tuple[str, ...]:
    return ("sink", "--topic", source, "--table", table or source, "--create-table", "--until-end", *more)


def types(db: Database, table: str) -> dict[str, str]:
    return dict(db.execute(TYPES, (table,)).fetchall())


def test_both_ends_of_every_partition_are_looked_at_and_what_comes_between_is_kept(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """Each partition has fields of its own, one that appears in the middle only, and one that appears at the end."""
    count = 4 * SAMPLE
    changes: list[Any] = []
    for i in range(count):
        for partition in range(3):
            value: dict[str, Any] = {"id": i, f"only{partition}": i}
            value |= {"middle": "m"} if 2 * SAMPLE <= i < 2 * SAMPLE + 5 else {}
            value |= {"late": i / 2, "id": i + 0.5} if i == count - 1 else {}
            changes.append((str(partition), value))
    send(bootstrap_servers, source, changes, 3)
    result = operate(*created(source))
    assert result.code == 0, result.err
    found = types(db, source)
    assert found == {"id": "numeric", "late": "numeric", "rest": "jsonb"} | dict.fromkeys(
        ("only0", "only1", "only2"), "bigint"
    )
    assert db.execute(f"SELECT count(*), count(only0), count(only2), count(late) FROM {source}").fetchone() == (
        3 * count,
        count,
        count,
        3,
    )
    assert db.execute(f"SELECT count(*) FROM {source} WHERE rest->>'middle' = 'm'").fetchone() == (15,)

    # A run that does not make the table still knows the column for the rest, and adds columns from where it stands.
    send(bootstrap_servers, source, [("1", {"id": 1, "new": True}), *[("1", {"id": 2})] * (2 * SAMPLE)], 3)
    send(bootstrap_servers, source, [("2", {"id": 3, "new": False, "other": "x"})], 3)
    again = ("sink", "--topic", source, "--table", source, "--until-end")
    assert operate(*again, "--add-columns").code == 0
    assert types(db, source)["new"] == "boolean"
    assert db.execute(f"SELECT count(new) FROM {source}").fetchone() == (2,)
    send(bootstrap_servers, source, [("0", {"id": -4, "newest": [1]})], 3)
    assert operate(*again).code == 0
    assert db.execute(f"SELECT rest FROM {source} WHERE id = -4").fetchone() == ({"newest": [1]},)


def test_what_is_no_object_is_skipped_in_the_sample_and_told(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    odd: list[Any] = [b"heartbeat", b"", b"[1]", b'{"x": NaN}', b"\xff", b'"text"']
    send(bootstrap_servers, source, [("0", v) for v in (*odd, b'\xef\xbb\xbf{"id": 1}')], 3)
    result = operate(*created(source), "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    assert f"6 of 7 messages of the sample are no JSON objects; {source}[0] offset 0: b'heartbeat'" in result.err
    assert rows(db, source, "id") == [(1,)]
    assert types(db, source) == {"id": "bigint", "rest": "jsonb"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'[{"id": 1}]', """1 of 1 messages of the sample are no JSON objects"""),
        (b'\0\0\0\0\1{"id": 1}', "say --schema-registry URL"),
        (b'{"before": null, "after": {"id": 1}, "op": "c", "source": {}}', "say --format debezium"),
        (b'{"schema": {"type": "struct"}, "payload": {"id": 1}}', "say --format connect"),
        (b'{"database": "d", "table": "t", "type": "insert", "data": {"id": 1}}', "say --format maxwell"),
    ],
)
def test_a_topic_that_makes_no_table_says_why(
    value: bytes, said: str, operate: Command, bootstrap_servers: str, source: str
) -> None:
    send(bootstrap_servers, source, [("0", value)], 3)
    result = operate(*created(source))
    assert result.code == 1
    assert said in result.err
    assert f"{source}[0] offset 0" in result.err or "envelope" in result.err


def test_a_name_that_the_database_cannot_encode_is_told(
    command: Command, bootstrap_servers: str, conninfo: str, source: str, db: Database
) -> None:
    send(bootstrap_servers, source, [("0", {"id": 1, "price_€": 2})], 3)
    db.execute(f"CREATE DATABASE {source} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'")
    try:
        where = make_conninfo(conninfo, dbname=source, client_encoding="UTF8")
        servers = ("--conninfo", where, "--bootstrap-servers", bootstrap_servers, "--group-id", source)
        for more in ((), ("--dry-run",)):
            result = command(*created(source), *more, *servers)
            assert result.code == 1
            assert f"{source}: no column of this database can have the name of 'price_€'" in result.err
            assert "LATIN1" in result.err
        assert command(*created(source), "--drop", "price_€", "--dry-run", *servers).code == 0
    finally:
        db.execute(f"DROP DATABASE {source}")


def test_what_options_say_of_a_table_that_is_made_is_told_where_it_is_there_and_differs(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    send(bootstrap_servers, source, [("0", {"id": 1, "zip": 5, "n": 1.5})], 3)
    db.execute(f"CREATE TABLE {source} (id serial PRIMARY KEY, zip varchar(9), n numeric(9,2), zips int[])")
    same = ("--type", "id=serial", "--type", "zip=character varying(9)", "--type", "n=decimal(9, 2)")
    result = operate(*created(source, "--key", "id", "--type", "zips=int4[]", *same))
    assert (result.code, " is there, and " in result.err) == (0, False), result.err
    differ = ("--type", "id=text", "--type", "zip=varchar(5)", "--type", "zips=int8[]", "--type", "other=int")
    result = operate(*created(source, "--key", "zip", *differ))
    assert result.code == 0, result.err
    assert "is there, and has no unique index over zip: in mode append key is for a table that is made" in result.err
    told = re.findall(r"its column (.*): types are for columns that are made", result.err)
    assert told == [
        "id is integer, not text",
        "zip is character varying(9), not varchar(5)",
        "zips is integer[], not int8[]",
    ]


def test_names_that_no_column_can_have_are_kept_in_the_rest(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    long, same = "unstruct_event_" + "x" * 60 + "_1", "unstruct_event_" + "x" * 60 + "_2"
    odd = {long: 1, same: "two", 'a"b': 3, "ctid": 4, "": 5, "ä" * 32: 6, "ok" * 31 + "k": 7}
    send(bootstrap_servers, source, [("0", {"id": i} | odd) for i in range(3)], 3)
    result = operate(*created(source))
    assert result.code == 0, result.err
    assert "no column can have the name of" in result.err
    kept = {name: value for name, value in odd.items() if name != "ok" * 31 + "k"}
    assert db.execute(f'SELECT rest, "{"ok" * 31 + "k"}" FROM {source}').fetchall() == [(kept, 7)] * 3
    refused = operate(*created(source, table=f"{source}b"), "--rest", "")
    assert refused.code == 1
    assert "they are lost: say rename" in refused.err


def test_half_of_a_surrogate_pair_in_a_name_makes_no_column_and_its_message_is_named(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    values = [b'{"id": 1}', rb'{"id": 2, "\ud83d": 1}', b'{"id": 3}']
    send(bootstrap_servers, source, [("0", value) for value in values], 3)
    stopped = operate(*created(source))
    assert stopped.code == 1
    assert f"1 of 3 messages of the sample are no JSON objects; {source}[0] offset 1: " in stopped.err
    assert stopped.err.count("\\ud83d is half of a character") == 2, "of the worker, too"
    assert operate(*created(source, "--on-poison", "dead-letter")).code == 0
    assert rows(db, source, "id") == [(1,), (3,)]


def test_nested_fields_get_types_from_their_values(
    operate: Command, bootstrap_servers: str, source: str, db: Database, tmp_path: Any
) -> None:
    value = {"data": {"object": {"id": "ch_1", "amount": 5, "at": "2026-01-02T03:04:05.5Z"}}}
    send(bootstrap_servers, source, [("0", value)], 3)
    file = tmp_path / "sink.toml"
    paths = ", ".join(f'{name} = "data.object.{name}"' for name in ("id", "amount", "at"))
    file.write_text(f"""[[sink]]
        topics = ["{source}"]
        table = "{source}"
        mode = "upsert"
        key = ["id"]
        fields = {{ {paths}, missing = "data.nothing" }}
    """)
    result = operate("sink", "--config", file, "--create-table", "--until-end")
    assert result.code == 0, result.err
    assert types(db, source) == {
        "id": "text",
        "amount": "bigint",
        "at": "timestamp with time zone",
        "missing": "jsonb",
    }


def test_a_part_of_a_key_gets_the_type_that_its_schema_tells(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    fields = [
        field("id", "int32"),
        field("day", "int32", f"{CONNECT}Date"),
        field("price", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}),
    ]
    key = {"schema": {"type": "struct", "fields": fields}, "payload": {"id": 1, "day": 1, "price": "1234"}}
    parts = [option for name in ("id", "day", "price") for option in ("--metadata", f"{name}=key:{name}")]
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(source, json.dumps(connect({"v": 1})), json.dumps(key))
    assert producer.flush(60) == 0
    assert operate(*created(source), "--format", "connect", *parts).code == 0
    assert types(db, source) == {"v": "bigint", "id": "integer", "day": "date", "price": "numeric", "rest": "jsonb"}
    assert rows(db, source, "id, day::text, price::text, v") == [(1, "1970-01-02", "-26588.24", 1)]


@pytest.mark.parametrize(
    "text",
    ["2026-01-02T03Z", "2026-W01-1T03:04:05Z", "20260102T030405Z", "2026-01-02T03:04:05", "2026-01-02T03:04:05+01"],
)
def test_a_moment_that_the_decoder_refuses_makes_a_column_of_text(
    text: str, operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    send(bootstrap_servers, source, [("0", {"at": text})], 3)
    result = operate(*created(source))
    assert result.code == 0, result.err
    assert rows(db, source, "at") == [(text,)]


@pytest.mark.parametrize("more", [["--create-table"], ["--dry-run"]])
def test_brokers_that_do_not_answer_are_named(more: list[str], command: Command, conninfo: str, name: str) -> None:
    where = ("--bootstrap-servers", "127.0.0.1:1", "--conninfo", conninfo, "--group-id", name)
    result = command("sink", "--topic", name, "--table", name, "--until-end", *more, *where)
    assert result.code == 1
    assert "exactly-once: error: no answer from Kafka at 127.0.0.1:1: " in result.err
    assert "KafkaError" not in result.err


def test_a_topic_that_is_empty_is_waited_for(
    bootstrap_servers: str, conninfo: str, source: str, db: Database, operate: Command
) -> None:
    ended = operate(*created(source))
    assert ended.code == 0  # there was nothing to do
    assert f"holds no messages to learn columns from; make the table {source} yourself" in ended.err
    assert f"table {source} is not made" in ended.err
    command = [sys.executable, "-m", "exactly_once", "sink", "--topic", source, "--table", source, "--create-table"]
    command += [
        "--bootstrap-servers",
        bootstrap_servers,
        "--conninfo",
        conninfo,
        "--group-id",
        source,
        "--start",
        "earliest",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any(f"waiting for a first message of {source}" in line for line in process.stderr)
            producer = Producer({"bootstrap.servers": bootstrap_servers})
            producer.produce(source, json.dumps({"id": 1}).encode())
            assert producer.flush(60) == 0
            there = "SELECT to_regclass(%s) IS NOT NULL"
            until(lambda: db.execute(there, (source,)).fetchone() == (True,), 120, "the table")
            until(lambda: rows(db, source, "id") == [(1,)], 120, "the row")
        finally:
            process.terminate()
            process.communicate(timeout=120)


def test_insert_ignore_makes_no_table_without_a_key(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """Nothing is the same as anything else there: the table was made, and took every message."""
    send(bootstrap_servers, source, [("0", {"id": 1}), ("0", {"id": 1})], 3)
    refused = operate(*created(source, "--mode", "insert-ignore"))
    assert refused.code == 1
    assert "--mode insert-ignore needs a key in the table that is made: say --key COLUMN" in refused.err
    assert db.execute("SELECT to_regclass(%s)", (source,)).fetchone() == (None,)
    assert operate(*created(source, "--mode", "insert-ignore", "--key", "id")).code == 0
    assert db.execute(f"SELECT count(*) FROM {source}").fetchone() == (1,)


@pytest.mark.parametrize(
    ("options", "count"),
    [([], 2), (["--where", "kind=a"], 3), (["--format", "maxwell"], 3), (["--format", "maxwell", "--flatten"], 3)],
)
def test_messages_that_are_skipped_as_asked_for_are_counted(
    options: list[str], count: int, operate: Command, bootstrap_servers: str, source: str
) -> None:
    """Tombstones, deletes and truncates went without a word."""
    row = {"id": 1, "kind": "a"}
    changes: list[Any] = [row, row | {"kind": "b"}, None, None]
    if "maxwell" in options:
        told = {"database": "d", "table": "t", "ts": 1, "data": row}
        changes = [told | {"type": "insert"}, told | {"type": "delete"}, None, None]
    send(bootstrap_servers, source, [("0", change) for change in changes], 3)
    result = operate(*created(source, "--on-tombstone", "skip", *options))
    assert result.code == 0
    assert re.search(rf"table {source}: messages .*on_tombstone.*: {count}\b", result.err), result.err
