"""Tables that come and grow while the sink runs: topics of a pattern, and columns that two workers add at once."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message, Producer

from exactly_once.cli.options import Settings
from exactly_once.cli.problems import CommandError
from exactly_once.cli.sink_flows import Flow, Run, Task
from exactly_once.cli.sink_tables import prepare
from exactly_once.ledger import stale_owners
from exactly_once.writer import TableChanged, TableSink
from exactly_once.writer.from_json import JsonDecoder
from tests.cli.conftest import Command, holding_until_told
from tests.cli.test_sink import rows, send
from tests.support.topics import create_topic
from tests.support.waiting import until

Database = psycopg.Connection[Any]


def flow(pattern: str, table: str) -> Flow:
    return Flow(topics_regex=pattern, table=table)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("raw.{topic}", '"raw"."shop.eu-1.Orders"'),
        ("{topic}", '"shop.eu-1.Orders"'),
        ("Shop.{2}", '"shop"."Orders"'),
        ('"Shop {1}".t_{2}', '"Shop eu-1"."t_Orders"'),
        ("events", '"events"'),
    ],
)
def test_a_table_takes_its_name_from_the_topics(table: str, found: str) -> None:
    made = flow(r"shop\.([^.]*)\.(.*)", table).of_topic("shop.eu-1.Orders")
    assert made is not None
    assert (made.table, made.topics, made.topics_regex) == (found, ("shop.eu-1.Orders",), None)
    assert flow(r"shop\.([^.]*)\.(.*)", table).of_topic("myshop.eu-1.Orders") is None


def test_a_topic_whose_table_would_have_no_name_is_told() -> None:
    with pytest.raises(CommandError, match=r"topic shop\.: its table s\.\{1\} would have an empty name"):
        flow(r"shop\.(.*)", "s.{1}").of_topic("shop.")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--topics-regex", "a(", "--table", "t"], "topics_regex a("),
        (["--topics-regex", r"a\d", "--table", "t"], r"clients read \d in another way"),
        (["--topics-regex", "(?i)a", "--table", "t"], "clients read (? in another way"),
        (["--topics-regex", "a(.*)", "--table", "t_{2}"], "there are {topic} and {0} to {1}"),
        (["--topics-regex", "a(.*)", "--table", "{name}"], "there are {topic} and {0} to {1}"),
        (["--topics-regex", "a", "--topic", "a", "--table", "t"], "there is no topics_regex beside it"),
        (["--topics-regex", "a"], "say --topic and --table"),
    ],
)
def test_a_pattern_that_cannot_be_is_told(options: list[str], said: str, operate: Command) -> None:
    result = operate("sink", *options)
    assert result.code == 2
    assert said in result.err


def test_each_topic_of_a_pattern_fills_its_table(
    operate: Command, bootstrap_servers: str, name: str, db: Database
) -> None:
    topics = [create_topic(bootstrap_servers, 1, name=f"{name}.{each}") for each in ("a", "b-c", "x")]
    for number, topic in enumerate(topics):
        send(bootstrap_servers, topic, [("0", {"id": i, f"only{number}": i}) for i in range(3)], 1)
    command = ["sink", "--topics-regex", rf"{name}\.([abc-]*)", "--table", f"{name}_{{1}}", "--until-end"]
    stopped = operate(*command)
    assert stopped.code == 1
    assert f'there is no table "{name}_a"; --create-table makes one' in stopped.err
    shown = operate(*command, "--create-table", "--dry-run", "--json").json
    assert [sink["table"] for sink in shown["sinks"]] == [f'"{name}_a"', f'"{name}_b-c"']
    assert operate(*command, "--create-table").code == 0
    assert rows(db, f"{name}_a", "id, only0") == [(0, 0), (1, 1), (2, 2)]
    assert rows(db, f'"{name}_b-c"', "id, only1") == [(0, 0), (1, 1), (2, 2)]
    assert db.execute("SELECT to_regclass(%s)", (f"{name}_x",)).fetchone() == (None,)


def test_topics_that_are_made_while_it_runs_get_tables(
    bootstrap_servers: str, conninfo: str, name: str, db: Database, tmp_path: Path
) -> None:
    """Two workers meet a new topic at about the same time, and each of them may be the one that makes its table."""
    create_topic(bootstrap_servers, 2, name=f"{name}.old")
    send(bootstrap_servers, f"{name}.old", [(str(i), {"id": i}) for i in range(4)])
    command = [sys.executable, "-m", "exactly_once", "sink", "--topics-regex", rf"{name}[.](.*)"]
    command += ["--table", f"{name}_{{1}}", "--create-table", "--workers", "2", "--conninfo", conninfo]
    command += ["--bootstrap-servers", bootstrap_servers, "--group-id", name, "--config", str(tmp_path / "sink.toml")]
    (tmp_path / "sink.toml").write_text("[kafka]\ntopic.metadata.refresh.interval.ms = 200\n")

    def filled(table: str, expected: list[tuple[Any, ...]]) -> bool:
        there = db.execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone() == (True,)
        return there and rows(db, table, "id") == expected

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: filled(f"{name}_old", [(i,) for i in range(4)]), 120, "the first topic")
            create_topic(bootstrap_servers, 2, name=f"{name}.new")
            send(bootstrap_servers, f"{name}.new", [(str(i), {"id": i, "v": "x"}) for i in range(50)])
            until(lambda: filled(f"{name}_new", [(i,) for i in range(50)]), 120, "the new topic")
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"topic {name}.new is new, and goes to" in errors


def test_a_table_that_another_worker_is_making_is_taken(
    bootstrap_servers: str, conninfo: str, name: str, db: Database
) -> None:
    """IF NOT EXISTS does not wait for a table that is not committed yet: its name is a duplicate then."""
    topic = create_topic(bootstrap_servers, 1, name=name)
    send(bootstrap_servers, topic, [("0", {"id": 1})], 1)
    kafka = {"bootstrap.servers": bootstrap_servers, "group.id": name}
    settings = Settings(schema="exactly_once", conninfo=conninfo)
    task = Task(flows=(), kafka=kafka, settings=settings, run=Run(), creates_tables=True)
    made: list[Flow] = []
    with psycopg.connect(conninfo) as other:
        other.execute(f"CREATE TABLE {name} (id int)")
        thread = threading.Thread(target=lambda: made.append(prepare(task, Flow(topics=(topic,), table=name))))
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        until(lambda: db.execute(waits, (f"CREATE TABLE%{name}%",)).fetchone() == (1,), 120, "the other waits")
        other.commit()
    thread.join(120)
    assert [each.table for each in made] == [name]


@pytest.mark.parametrize("how", ["--until-end", "--dry-run"])
def test_who_has_locked_the_table_is_told_before_the_first_unit(
    how: str, operate: Command, bootstrap_servers: str, name: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_owners, "STILL_SECONDS", 0.1)
    topic = create_topic(bootstrap_servers, 1, name=name)
    send(bootstrap_servers, topic, [("0", {"id": 1})], 1)
    db.execute(f"CREATE TABLE {name} (id int)")
    with psycopg.connect(db.info.dsn, password=db.info.password, application_name="nightly report") as other:
        other.execute(f"LOCK TABLE {name}")
        pid = other.info.backend_pid
        with holding_until_told(other):
            done = operate("sink", "--topic", topic, "--table", name, "--start", "earliest", how)
    assert done.code == 0, done.err
    assert done.err.count(f"backend {pid} has it (user postgres, application_name 'nightly report')") == 1


def test_two_workers_add_the_same_columns_to_two_tables(
    bootstrap_servers: str, conninfo: str, name: str, db: Database, tmp_path: Path
) -> None:
    """All partitions bring the same fields at the same time, so each worker meets what the other adds."""
    file = tmp_path / "sink.toml"
    lines = ['[run]\nworkers = 2\nmax_messages = 20\nuntil_end = true\nstart = "earliest"']
    for each in "ab":
        topic = create_topic(bootstrap_servers, 2, name=f"{name}-{each}")
        db.execute(f"CREATE TABLE {name}_{each} (id int)")
        sent = [(str(i), {"id": i, f"f{i // 60}": i, f"{each}{i // 100}": str(i)}) for i in range(600)]
        send(bootstrap_servers, topic, sent)
        lines.append(f'[[sink]]\ntopics = ["{topic}"]\ntable = "{name}_{each}"\nevolve = "add-columns"')
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "exactly_once", "sink", "--config", str(file), "--conninfo", conninfo]
    command += ["--bootstrap-servers", bootstrap_servers, "--group-id", name]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "dead letter" not in done.stderr
    for each in "ab":
        fields = [*(f"f{i}" for i in range(10)), *(f"{each}{i}" for i in range(6))]
        sums = ", ".join(f"count({field})" for field in fields)
        found = db.execute(f"SELECT count(*), count(DISTINCT id), {sums} FROM {name}_{each}").fetchone()
        assert found == (600, 600, *[60] * 10, *[100] * 6)


def test_a_column_that_another_worker_is_adding_is_waited_for(name: str, conninfo: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    sink = TableSink(name, decoder=JsonDecoder(), evolve="add-columns")
    sent = [Message(topic="t", partition=0, offset=0, value=b'{"id": 1, "x": 2}')]
    with psycopg.connect(conninfo) as other, psycopg.connect(conninfo) as ours:
        with pytest.raises(TableChanged):
            sink.write(ours, sent)
        ours.rollback()
        other.execute(f"ALTER TABLE {name} ADD COLUMN x bigint; INSERT INTO {name} VALUES (0, 7)")
        thread = threading.Thread(target=sink.write, args=(ours, sent))
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        until(lambda: db.execute(waits, (f"ALTER TABLE%{name}%",)).fetchone() == (1,), 120, "ours waits")
        other.commit()
        thread.join(120)
        ours.commit()
    assert rows(db, name) == [(0, 7), (1, 2)]


@pytest.mark.parametrize("options", [["--where", "type=refunded"], ["--mode", "upsert", "--key", "id"]])
def test_what_shows_no_columns_makes_no_table(
    options: list[str], operate: Command, bootstrap_servers: str, name: str, db: Database
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    sent: list[tuple[str, Any]] = [
        (str(i), None if "--key" in options else {"id": i, "type": "paid"}) for i in range(3)
    ]
    send(bootstrap_servers, name, sent, 1)
    result = operate("sink", "--topic", name, "--table", name, "--create-table", "--until-end", *options)
    assert result.code == 0, result.err
    assert f"none of 3 messages in the sample of {name} makes a row to learn columns from" in result.err
    assert f"table {name} is not made" in result.err
    assert db.execute("SELECT to_regclass(%s)", (name,)).fetchone() == (None,)


def holds(db: Database, query: str, expected: list[Any]) -> bool:
    """Tell whether a query returns these rows; a table that is not there has none."""
    try:
        return db.execute(query).fetchall() == expected
    except psycopg.errors.UndefinedTable:
        return False


def test_topics_that_show_no_columns_yet_do_not_hold_up_the_others(
    operate: Command, bootstrap_servers: str, conninfo: str, name: str, db: Database, tmp_path: Path
) -> None:
    """One is empty, one holds tombstones only; both get their tables when rows come."""
    lines = []
    for each in ("empty", "deleted", "full"):
        create_topic(bootstrap_servers, 1, name=f"{name}-{each}")
        lines.append(f'[[sink]]\ntopics = ["{name}-{each}"]\ntable = "{name}_{each}"\nmode = "upsert"\nkey = ["id"]')
    (tmp_path / "sink.toml").write_text("\n".join(lines))
    send(bootstrap_servers, f"{name}-deleted", [("1", None), ("2", None)], 1)
    send(bootstrap_servers, f"{name}-full", [("1", {"id": 1})], 1)
    command = ["sink", "--config", str(tmp_path / "sink.toml"), "--create-table"]
    shown = operate(*command, "--dry-run", "--json")
    assert [sink["table"] for sink in shown.json["sinks"]] == [f"{name}_full"]
    ended = operate(*command, "--start", "earliest", "--until-end")
    assert ended.code == 0, ended.err
    assert rows(db, f"{name}_full", "id") == [(1,)]
    for result in (shown, ended):
        assert f"{name}-empty holds no messages to learn columns from" in result.err
        assert f"none of 2 messages in the sample of {name}-deleted makes a row" in result.err
    assert ended.err.count(f"{name}_empty is not made") == 1, "at the end"
    where = ["--conninfo", conninfo, "--bootstrap-servers", bootstrap_servers, "--group-id", name]
    arguments = [sys.executable, "-m", "exactly_once", *command, *where]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            send(bootstrap_servers, f"{name}-full", [("2", {"id": 2})], 1)
            until(lambda: rows(db, f"{name}_full", "id") == [(1,), (2,)], 120, "the topic that has columns")
            for each in ("empty", "deleted"):
                changes: list[Any] = [("1", None), ("7", {"id": 7, "v": each}), ("8", {"id": 8})]
                send(bootstrap_servers, f"{name}-{each}", changes, 1)
            for each in ("empty", "deleted"):
                query = f"SELECT id, v FROM {name}_{each} ORDER BY id"
                until(partial(holds, db, query, [(7, each), (8, None)]), 60, each)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_what_would_be_refused_is_refused_where_there_is_no_table_yet(
    operate: Command, bootstrap_servers: str, name: str, db: Database, tmp_path: Path
) -> None:
    file = tmp_path / "sink.toml"
    lines = []
    for each in ("deleted", "full"):
        create_topic(bootstrap_servers, 1, name=f"{name}-{each}")
        lines.append(f'[[sink]]\ntopics = ["{name}-{each}"]\ntable = "{name}_{each}"')
    file.write_text("\n".join(lines))
    send(bootstrap_servers, f"{name}-deleted", [("1", None), ("2", None)], 1)
    send(bootstrap_servers, f"{name}-full", [("1", {"id": 1})], 1)
    command = ["sink", "--config", str(file), "--create-table", "--until-end"]
    result = operate(*command)
    assert result.code == 1
    assert f"{name}-deleted[0] offset 0: the message has no value" in result.err
    result = operate(*command, "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    assert rows(db, f"{name}_full", "id") == [(1,)]


CANNOT_BE: list[tuple[list[str], Any, str]] = [
    (["--format", "csv"], "1,a", "say --csv-columns"),
    ([], {f"f{i}": i for i in range(1700)}, "too many columns"),
    (["--rename", "amount=data.amount", "--drop", "data"], {"id": 1, "data": {"amount": 1}}, "data"),
]


def test_a_table_that_cannot_be_made_is_told_with_the_way_out(
    operate: Command, bootstrap_servers: str, name: str
) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number, (options, value, said) in enumerate(CANNOT_BE):
        topic = create_topic(bootstrap_servers, 1, name=f"{name}-{number}")
        producer.produce(topic, value if isinstance(value, str) else json.dumps(value))
        producer.flush(60)
        result = operate("sink", "--topic", topic, "--table", name, "--create-table", "--until-end", *options)
        assert result.code == 1
        assert said in result.err
        assert "CREATE TABLE" not in result.err, "nothing was made"


def test_a_pattern_that_finds_nothing_has_no_end_to_wait_for(operate: Command, name: str) -> None:
    """With --until-end it waited for ever, for other members of the group as it said."""
    result = operate("sink", "--topics-regex", f"{name}[.].*", "--table", "{topic}", "--create-table", "--until-end")
    assert result.code == 1
    assert "error: no topic has a name that a pattern finds" in result.err
