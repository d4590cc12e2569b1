"""The sink command copies topics into tables, each message once, also when its workers are killed."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, Producer
from confluent_kafka.admin import AdminClient

from exactly_once.cli.sink_worker import _Member
from tests.cli.conftest import Command
from tests.support.journal import scan
from tests.support.seeds import first_seed
from tests.support.topics import create_topic, delete_records
from tests.support.waiting import until

Database = psycopg.Connection[Any]
Change = tuple[str | None, Any]


def send(bootstrap_servers: str, topic: str, changes: Iterable[Change], partitions: int = 2) -> None:
    """Produce keys and JSON values; a key always goes to the same partition."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5})
    for number, (key, value) in enumerate(changes):
        place = int(key) % partitions if key is not None else number % partitions
        encoded = value if isinstance(value, (bytes, type(None))) else json.dumps(value).encode()
        producer.produce(topic, encoded, key.encode() if key is not None else None, partition=place)
        producer.poll(0)
    assert producer.flush(60) == 0


@pytest.fixture
def source(bootstrap_servers: str, name: str) -> str:
    """An empty topic of two partitions."""
    return create_topic(bootstrap_servers, 2, name=name)


def payments(count: int) -> list[Change]:
    return [(None, {"id": i, "name": f"n{i}", "amount": i / 4, "at": "2026-01-02T03:04:05Z"}) for i in range(count)]


def rows(db: Database, table: str, what: str = "*") -> list[tuple[Any, ...]]:
    return db.execute(f"SELECT {what} FROM {table} ORDER BY 1").fetchall()


def test_a_topic_becomes_a_table_once(
    operate: Command, bootstrap_servers: str, source: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(bootstrap_servers, source, payments(50))
    told = []
    for style in ("ISO", "German"):
        monkeypatch.setenv("PGDATESTYLE", style)
        result = operate("sink", "--topic", source, "--table", source, "--create-table", "--until-end")
        assert result.code == 0, result.err
        told.append(result.err)
    assert rows(db, source, "id") == [(i,) for i in range(50)]
    kinds = "SELECT string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position) "
    kinds += "FROM information_schema.columns WHERE table_name = %s"
    assert db.execute(kinds, (source,)).fetchone() == (
        "id bigint, name text, amount numeric, at timestamp with time zone, rest jsonb",
    )
    assert "messages/s" in told[0]  # the second one may have waited for the group, and say that


@pytest.mark.parametrize("partitioned", ["", "PARTITION BY RANGE (id)", "INHERITS ()"])
def test_a_group_that_applied_messages_before_is_told_of_when_its_table_is_empty(
    partitioned: str, operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """A mended name of a table, say: what is in the other one does not come again."""
    for table in (f"{source}_a", f"{source}_b"):
        db.execute(f"CREATE TABLE {table} (id int) {partitioned.removeprefix('INHERITS ()')}")
        if partitioned.startswith("INHERITS"):  # as TimescaleDB does it
            db.execute(f"""CREATE TABLE {table}_1 () INHERITS ({table});
                CREATE FUNCTION {table}_moves() RETURNS trigger LANGUAGE plpgsql AS
                $$BEGIN INSERT INTO {table}_1 VALUES (NEW.*); RETURN NULL; END$$;
                CREATE TRIGGER moves BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_moves()""")
        elif partitioned:
            db.execute(f"CREATE TABLE {table}_1 PARTITION OF {table} DEFAULT")
    send(bootstrap_servers, source, [("0", {"id": 1})])
    said = []
    for table in (f"{source}_a", f"{source}_a", f"{source}_b"):
        result = operate("sink", "--topic", source, "--table", table, "--start", "earliest", "--until-end")
        assert result.code == 0, result.err
        said.append("is empty, and group" in result.err)
    assert said == [False, False, True]
    assert f"WARNING {source}_b is empty" in result.err
    assert f"whatever --start says: {source}[0] from offset 1; " in result.err


def test_a_dry_run_shows_rows_and_ddl_and_stores_nothing(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    send(bootstrap_servers, source, payments(3))
    result = operate("sink", "--topic", source, "--table", source, "--key", "id", "--mode", "upsert", "--dry-run")
    assert result.code == 0, result.err
    assert f'CREATE TABLE IF NOT EXISTS "{source}"' in result.out
    assert 'PRIMARY KEY ("id")' in result.out
    assert "n2" in result.out
    assert "3 rows" in result.out
    assert db.execute("SELECT to_regclass(%s)", (source,)).fetchone() == (None,)
    assert db.execute("SELECT count(*) FROM exactly_once.ledger WHERE group_id = %s", (source,)).fetchone() == (0,)
    document = operate("sink", "--topic", source, "--table", source, "--dry-run", "--json").json
    assert len(document["sinks"][0]["rows"]) == 3


def test_a_dry_run_whose_reader_leaves_is_no_error(bootstrap_servers: str, conninfo: str, source: str) -> None:
    """Of more output than is kept back until the end."""
    send(bootstrap_servers, source, [(None, {"id": i, "text": "x" * 500}) for i in range(50)])
    command = [sys.executable, "-m", "exactly_once", "sink", "--topic", source, "--table", source, "--dry-run"]
    command += ["--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--group-id", source]
    read, write = os.pipe()
    os.close(read)
    left = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(write)
    assert (left.returncode, left.stderr) == (141, "")


def test_a_dry_run_tells_deletes_from_rows(operate: Command, bootstrap_servers: str, source: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {source} (v text, id int PRIMARY KEY, n int DEFAULT 1, doc jsonb, b bytea)")
    send(bootstrap_servers, source, [("1", {"id": 1, "v": "a", "doc": {"x": 1}, "b": "AAE="}), ("2", None)], 1)
    command = ["sink", "--topic", source, "--table", source, "--mode", "upsert", "--dry-run"]
    (shown,) = operate(*command, "--json").json["sinks"]
    assert (shown["rows"], [list(each) for each in shown["deletes"]]) == (
        [["a", 1, "(default)", '{"x": 1}', "\\x0001"]],
        [["id"]],
    )
    text = operate(*command).out
    assert "delete id = 2" in text
    assert "1 rows and 1 deletes" in text


def test_the_last_change_of_a_key_stays_and_a_tombstone_deletes(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source} (id int PRIMARY KEY, v text)")
    changes: list[Change] = [("1", {"id": 1, "v": "a"}), ("2", {"id": 2, "v": "b"}), ("1", {"id": 1, "v": "c"})]
    send(bootstrap_servers, source, [*changes, ("2", None), ("3", {"id": 3})])
    result = operate("sink", "--topic", source, "--table", source, "--mode", "upsert", "--until-end")
    assert result.code == 0, result.err
    assert rows(db, source) == [(1, "c"), (3, None)]


def test_a_file_sends_several_topics_to_several_tables(
    operate: Command, bootstrap_servers: str, source: str, db: Database, tmp_path: Path
) -> None:
    other = create_topic(bootstrap_servers, 1, name=f"{source}-other")
    send(bootstrap_servers, source, payments(4))
    send(bootstrap_servers, other, [("0", {"deep": {"city": "x"}, "z": 1})], partitions=1)
    db.execute(f"CREATE TABLE {source} (id int, at timestamptz, o bigint)")
    db.execute(f'CREATE TABLE "{source} B" (city text, topic text, more jsonb)')
    file = tmp_path / "sink.toml"
    file.write_text(f"""
        [kafka]
        client.id = "sink-test"
        [[sink]]
        topics = ["{source}"]
        table = "{source}"
        metadata = {{ o = "offset" }}
        [[sink]]
        topics = ["{other}"]
        table = '"{source} B"'
        fields = {{ city = "deep.city" }}
        rest = "more"
        metadata = {{ topic = "topic" }}
    """)
    result = operate("sink", "--config", file, "--until-end")
    assert result.code == 0, result.err
    assert rows(db, source, "id, o") == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert rows(db, f'"{source} B"') == [("x", other, {"z": 1})]


def test_two_flows_may_fill_one_table_each_in_its_way(
    operate: Command, bootstrap_servers: str, source: str, db: Database, tmp_path: Path
) -> None:
    other = create_topic(bootstrap_servers, 1, name=f"{source}-other")
    send(bootstrap_servers, source, [("0", {"id": 1})])
    send(bootstrap_servers, other, [("0", {"number": 2})], partitions=1)
    db.execute(f"CREATE TABLE {source} (id int)")
    file = tmp_path / "sink.toml"
    file.write_text(f"""
        [[sink]]
        topics = ["{source}"]
        table = "{source}"
        [[sink]]
        topics = ["{other}"]
        table = "{source}"
        fields = {{ id = "number" }}
    """)
    result = operate("sink", "--config", file, "--until-end")
    assert result.code == 0, result.err
    assert rows(db, source) == [(1,), (2,)]


def test_columns_are_added_by_request_only(operate: Command, bootstrap_servers: str, source: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {source} (id int)")
    send(bootstrap_servers, source, payments(2))
    command = ("sink", "--topic", source, "--table", source, "--until-end")
    assert operate(*command, "--add-columns").code == 0
    assert rows(db, source, "id, name") == [(0, "n0"), (1, "n1")]


def test_a_partition_gets_its_columns_elsewhere(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source}_all (id int) PARTITION BY RANGE (id)")
    db.execute(f"CREATE TABLE {source} PARTITION OF {source}_all DEFAULT")
    send(bootstrap_servers, source, payments(2))
    refused = operate("sink", "--topic", source, "--table", source, "--add-columns", "--until-end")
    assert refused.code == 1
    assert "; add id, name, amount, at to the table that it is a partition of, or to the type" in refused.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rename", "id=nope"], "it has id; fields or rename fill id from nope, which it does not have"),
        (
            ["--update", "id"],
            "error: update, newest_by, add and --missing keep are about rows that exist: --mode upsert",
        ),
        (["--epoch", "zz=ms"], "error: epoch names zz, which no field fills"),
        (["--mode", "upsert"], "no primary key that is checked at once; say --key COLUMNS, over which there is"),
    ],
)
def test_an_option_that_does_not_fit_is_told_in_the_words_of_options(
    options: list[str], said: str, operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source} (id int PRIMARY KEY DEFERRABLE)")
    send(bootstrap_servers, source, [("0", {"id": 1})])
    result = operate("sink", "--topic", source, "--table", source, "--until-end", *options)
    assert result.code in (1, 2)
    assert said in result.err


@pytest.mark.parametrize("bad", [b"no json", {"id": "x"}, {"id": 2**31}, {"id": None}, None])
def test_a_bad_message_stops_the_sink_and_is_named(
    bad: Any, operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source} (id int NOT NULL)")
    send(bootstrap_servers, source, [("0", {"id": i}) for i in range(5)])
    send(bootstrap_servers, source, [("0", bad)])
    result = operate("sink", "--topic", source, "--table", source, "--until-end")
    assert result.code == 1
    assert f"{source}[0]" in result.err
    assert "offset 5" in result.err
    assert rows(db, source) == [(i,) for i in range(5)]


def test_a_bad_message_can_be_set_aside(operate: Command, bootstrap_servers: str, source: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {source} (id int NOT NULL)")
    send(bootstrap_servers, source, [("0", b"bad" if i == 7 else {"id": i}) for i in range(20)])
    result = operate("sink", "--topic", source, "--table", source, "--until-end", "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    assert rows(db, source) == [(i,) for i in range(20) if i != 7]
    found = db.execute("SELECT message_offset FROM exactly_once.dead_letter WHERE topic = %s", (source,)).fetchall()
    assert found == [(7,)]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--table", "t"),
        ("--topic", "t"),
        ("--topic", "t", "--table", "t", "--workers", "0"),
        ("--topic", "t", "--table", "t", "--start", "tomorrow"),
        ("--topic", "t", "--topic", "t", "--table", "t"),
    ],
)
def test_a_wrong_command_line_is_told(wrong: tuple[str, ...], operate: Command) -> None:
    assert operate("sink", *wrong).code == 2


def test_a_time_without_a_zone_is_told_with_one_that_is_taken(operate: Command, source: str) -> None:
    where = ("sink", "--topic", source, "--table", "no_such_table", "--start")
    assert "no time zone: say 2026-01-31T00:00:00Z, or" in operate(*where, "2026-01-31").err
    assert "there is no table no_such_table" in operate(*where, "2026-01-31T00:00:00Z").err


def test_what_is_no_table_is_told_and_not_to_be_made(operate: Command, source: str, db: Database) -> None:
    db.execute(f"CREATE VIEW {source} AS SELECT 1 AS id")
    try:
        for options in ((), ("--create-table",)):
            result = operate("sink", "--topic", source, "--table", source, "--until-end", *options)
            assert result.code == 1
            assert result.err.endswith(
                f"{source} is not a table; rows can be written to tables, partitioned and foreign ones too\n"
            )
    finally:
        db.execute(f"DROP VIEW {source}")


def test_a_table_that_is_not_there_is_told(operate: Command, source: str) -> None:
    result = operate("sink", "--topic", source, "--table", "no_such_table", "--until-end")
    assert result.code == 1
    assert "there is no table no_such_table" in result.err


def workers_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    workers = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # nor what was killed and not waited for yet
            workers += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return workers


@pytest.mark.parametrize(
    ("mode", "kills"), [("append", 3), ("insert-ignore", 3), pytest.param("upsert", 12, marks=pytest.mark.slow)]
)
def test_killed_workers_leave_the_table_as_the_topic_says(
    mode: str, kills: int, bootstrap_servers: str, conninfo: str, source: str, db: Database, tmp_path: Path
) -> None:
    """The table's rows are compared with a scan of the topic; in append there is no key that could hide a double."""
    chance = random.Random(first_seed())
    key = "" if mode == "append" else " PRIMARY KEY"
    db.execute(f"CREATE TABLE {source} (id int{key}, v int)")
    count = 6000
    numbers = range(count) if mode != "upsert" else [chance.randrange(500) for _ in range(count)]
    changes: list[Change] = [
        (str(n), {"id": n, "v": i} if mode != "upsert" or chance.random() > 0.1 else None)
        for i, n in enumerate(numbers)
    ]
    send(bootstrap_servers, source, changes)
    command = [sys.executable, "-m", "exactly_once", "sink", "--topic", source, "--table", source, "--mode", mode]
    command += ["--workers", "2", "--max-messages", "20", "--bootstrap-servers", bootstrap_servers]
    command += ["--conninfo", conninfo, "--group-id", source, "--config", str(tmp_path / "sink.toml")]
    # Kafka waits so long for a member that was killed before it gives away its partitions.
    (tmp_path / "sink.toml").write_text("[kafka]\nsession.timeout.ms = 6000\n")
    done = "SELECT coalesce(sum(next_offset), 0) FROM exactly_once.ledger WHERE group_id = %s"

    def applied() -> int:
        (offset,) = db.execute(done, (source,)).fetchone() or (0,)
        return int(offset)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for share in (0.1 + 0.6 * number / kills for number in range(kills)):
                until(lambda share=share: applied() >= share * count, 120, f"{share:.0%} of the messages")  # type: ignore[misc]
                victim = chance.choice(workers_of(process))
                victim.kill()
                victim.wait(60)
                until(lambda: len(workers_of(process)) == 2, 120, "another one in its place")
            until(lambda: applied() == count, 120, "the end")
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=120)
        finally:
            for child in workers_of(process) if process.poll() is None else []:
                child.kill()
            process.kill()
    assert process.returncode == 0, errors
    assert errors.count("another takes its place") == kills
    log = scan(bootstrap_servers, source)
    assert len(log) == count
    left = {int(record.key or b""): json.loads(record.value or b"null") for record in log}
    assert rows(db, source) == sorted((value["id"], value["v"]) for value in left.values() if value is not None)


@pytest.mark.parametrize("given", ["0", "120"])
def test_lingering_does_not_hold_up_the_end(
    operate: Command, bootstrap_servers: str, source: str, db: Database, given: str
) -> None:
    db.execute(f'CREATE TABLE "{source}" (id bigint)')
    send(bootstrap_servers, source, [(None, {"id": i}) for i in range(20)])
    began = time.monotonic()
    options = ("--until-end", "--linger-seconds", given)
    result = operate("sink", "--topic", source, "--table", f'"{source}"', *options)
    assert result.code == 0, result.err
    assert rows(db, f'"{source}"') == [(i,) for i in range(20)]
    assert time.monotonic() - began < 120


def test_a_partition_whose_next_offset_is_gone_is_left_or_goes_on_as_the_option_says(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f'CREATE TABLE "{source}" (id bigint)')
    codes, said = [], ""
    for number, more in enumerate(([], [], ["--on-out-of-range", "earliest", "--name", "pod-7"])):
        send(bootstrap_servers, source, [("0", {"id": 10 * number + i}) for i in range(10)])
        if number == 1:
            delete_records(bootstrap_servers, source, 15)
        result = operate("sink", "--topic", source, "--table", f'"{source}"', "--until-end", *more)
        codes.append(result.code)
        said += result.err if number == 1 else ""
    assert codes[0] == codes[2] == 0 != codes[1]
    assert said.count("say --on-out-of-range") == 2, "the record and the last line"
    assert "on_out_of_range=" not in said
    assert rows(db, f'"{source}"') == [(i,) for i in (*range(10), *range(15, 30))]
    names = "SELECT DISTINCT owner_name FROM exactly_once.ledger WHERE group_id = %s"
    assert db.execute(names, (source,)).fetchall() == [("pod-7",)]


def members_of(bootstrap_servers: str, group_id: str) -> int:
    """How many members Kafka counts in a group."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    return len(admin.describe_consumer_groups([group_id])[group_id].result().members)


def test_a_start_that_is_refused_leaves_no_member_behind(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """The program before may go on at once then, or an operator move its offsets."""
    db.execute(f'CREATE TABLE "{source}" (id bigint)')
    send(bootstrap_servers, source, [("0", {"id": 1})])
    result = operate("sink", "--topic", source, "--table", f'"{source}"', "--until-end", "--start", "committed")
    assert result.code == 1
    assert "leave --start out" in result.err
    assert members_of(bootstrap_servers, source) == 0


def test_a_member_that_ends_while_others_are_waited_for_leaves_none_behind(
    bootstrap_servers: str, conninfo: str, source: str
) -> None:
    """As it may be when a deployment is taken back at once; here the other one answers within two seconds."""
    kafka = {"bootstrap.servers": bootstrap_servers, "group.id": source}
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})

    def is_waiting() -> bool:
        group = admin.describe_consumer_groups([source])[source].result()
        return bool(group.state == ConsumerGroupState.PREPARING_REBALANCING)

    with contextlib.closing(Consumer({**kafka, "enable.auto.commit": False})) as other, ThreadPoolExecutor() as pool:
        other.subscribe([source])
        until(lambda: other.poll(0.1) is not None or other.assignment(), 30, "the other one has joined")
        with _Member({**kafka, "group.instance.id": "one"}, conninfo=conninfo, migrate=True) as member:
            member.subscribe([source])
            until(is_waiting, 30, "the member is joining")
            polling = pool.submit(lambda: [other.poll(0.5) for _ in range(10)])
        polling.result()
        assert members_of(bootstrap_servers, source) == 1


def test_a_linger_time_that_is_none_is_refused(operate: Command, source: str, db: Database) -> None:
    db.execute(f'CREATE TABLE "{source}" (id bigint)')
    result = operate("sink", "--topic", source, "--table", f'"{source}"', "--linger-seconds", "-1")
    assert result.code == 2
    assert "--linger-seconds: -1 must be a number of seconds, 0 or more" in result.err


def test_workers_end_with_the_process_that_started_them(
    bootstrap_servers: str, conninfo: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source} (id int)")
    command = [sys.executable, "-m", "exactly_once", "sink", "--topic", source, "--table", source, "--workers", "2"]
    command += ["--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--group-id", source]
    owners = (
        "SELECT count(DISTINCT owner_token) FROM exactly_once.ledger WHERE group_id = %s AND owner_token IS NOT NULL"
    )
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        workers: list[psutil.Process] = []
        try:
            until(lambda: db.execute(owners, (source,)).fetchone() == (2,), 120, "both workers at work")
            workers = workers_of(process)
            process.kill()
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert not alive
        finally:
            process.kill()
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
