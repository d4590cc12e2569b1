"""Messages that only Postgres refuses: set aside or named, whatever the class of the error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.cli.conftest import Command
from tests.cli.test_sink import rows, send
from tests.support.topics import create_topic, produce_header_name

Database = psycopg.Connection[Any]

BIG = "".join(chr(65 + i * i % 57) + str(i) for i in range(3000))
"""Text that compression does not make small enough for an index."""
REFUSED = {
    "54000: an index entry that is too large": ("CREATE TABLE {0} (id int, v text); CREATE INDEX ON {0} (v)", BIG),
    "54000: a row that no page holds": (
        "CREATE TABLE {0} (id int, v text); ALTER TABLE {0} ALTER v SET STORAGE PLAIN",
        BIG,
    ),
    "54001: a depth that the server refuses": (
        "CREATE TABLE {0} (id int, v text CHECK (v::jsonb IS NOT NULL))",
        "[" * 60_000 + "]" * 60_000,
    ),
    "42501: a row that a policy refuses": (
        (
            "CREATE TABLE {0} (id int, v text); ALTER TABLE {0} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; "
            "CREATE POLICY p ON {0} USING (true) WITH CHECK (v <> 'no')"
        ),
        "no",
    ),
}


@pytest.fixture
def source(bootstrap_servers: str, name: str) -> str:
    """An empty topic of one partition."""
    return create_topic(bootstrap_servers, 1, name=name)


@pytest.fixture
def no_superuser(db: Database, name: str) -> Iterator[str]:
    """A role that policies apply to, with what a worker needs."""
    role = f"{name}_role"
    db.execute(f"CREATE ROLE {role} LOGIN IN ROLE pg_read_all_data, pg_write_all_data")
    db.execute(
        f"GRANT USAGE ON SCHEMA exactly_once TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA exactly_once TO {role}"
    )
    db.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA exactly_once TO {role}")
    yield role
    db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("case", REFUSED)
def test_what_only_postgres_refuses_is_set_aside_or_named(  # noqa: PLR0917 - fixtures
    case: str,
    place: int,
    command: Command,
    bootstrap_servers: str,
    conninfo: str,
    source: str,
    db: Database,
    no_superuser: str,
) -> None:
    ddl, value = REFUSED[case]
    db.execute(ddl.format(source))
    good = "1" if case.startswith("54001") else "x"
    send(bootstrap_servers, source, [("0", {"id": i, "v": value if i == place else good}) for i in range(20)], 1)
    where = ["--topic", source, "--table", source, "--until-end", "--bootstrap-servers", bootstrap_servers]
    where += ["--group-id", source, "--conninfo", make_conninfo(conninfo, options=f"-c role={no_superuser}")]
    stopped = command("sink", *where)
    assert stopped.code == 1
    assert f"{source}[0] offset {place}" in stopped.err
    assert rows(db, source, "id") == [(i,) for i in range(place)]
    result = command("sink", *where, "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    assert rows(db, source, "id") == [(i,) for i in range(20) if i != place]
    found = "SELECT message_offset, sqlstate FROM exactly_once.dead_letter WHERE topic = %s"
    assert db.execute(found, (source,)).fetchall() == [(place, case[:5])]


def test_many_bad_messages_are_set_aside_with_the_units_that_apply_the_others(
    operate: Command, bootstrap_servers: str, source: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is stored once, with its own error and place, and costs no unit of its own."""
    db.execute(f"CREATE TABLE {source} (id int PRIMARY KEY, v text)")
    bad = set(range(5, 2000, 40))
    values: list[Any] = [{"id": "no" if i in bad else i, "v": "x"} for i in range(2000)]
    values[805] = b"no json"
    send(bootstrap_servers, source, [("0", value) for value in values], 1)
    result = operate("sink", "--topic", source, "--table", source, "--until-end", "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    assert rows(db, source, "id") == [(i,) for i in range(2000) if i not in bad]
    found = "SELECT message_offset, error FROM exactly_once.dead_letter WHERE topic = %s ORDER BY message_offset"
    letters = db.execute(found, (source,)).fetchall()
    assert [offset for offset, _ in letters] == sorted(bad)
    assert all(f"{source}[0] offset {offset}: " in error for offset, error in letters)
    told = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "set_aside"]
    assert sorted(told) == sorted(
        f"{source}[0] offset {offset} was stored as a dead letter: {error}" for offset, error in letters
    )
    assert "applied all the same" not in caplog.text


@pytest.mark.parametrize("limit", [3, 7])
def test_too_many_bad_messages_stop_the_sink_where_the_limit_is(
    limit: int, operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {source} (id int)")
    values = [{"id": i} for i in range(5)] + [{"id": "no"}] + [{"id": i} for i in range(5, 9)] + [{"id": "no"}] * 30
    send(bootstrap_servers, source, [("0", value) for value in values], 1)
    options = ("--on-poison", "dead-letter", "--dead-letter-limit", str(limit))
    result = operate("sink", "--topic", source, "--table", source, "--until-end", *options)
    assert result.code == 1
    assert f"{source}[0] offset {10 + limit} would be dead letter {limit + 1} in a row" in result.err
    assert rows(db, source, "id") == [(i,) for i in range(9)]
    found = "SELECT message_offset FROM exactly_once.dead_letter WHERE topic = %s ORDER BY 1"
    assert db.execute(found, (source,)).fetchall() == [(i,) for i in (5, *range(10, 10 + limit))]


def test_a_role_that_may_not_write_the_table_is_told_what_to_grant(  # noqa: PLR0917 - fixtures
    command: Command, bootstrap_servers: str, conninfo: str, source: str, db: Database, no_superuser: str
) -> None:
    db.execute(f"REVOKE pg_write_all_data FROM {no_superuser}; CREATE TABLE {source} (id int)")
    where = ["--topic", source, "--table", source, "--until-end", "--bootstrap-servers", bootstrap_servers]
    where += ["--group-id", source, "--conninfo", make_conninfo(conninfo, options=f"-c role={no_superuser}")]
    result = command("sink", *where)
    assert result.code == 1
    assert f"permission denied for table {source}: to write to " in result.err
    assert "in mode append a role needs INSERT on the table" in result.err


READERS = {"tsquery": "a b", "jsonpath": "$$.", "regclass": "a.b.c.d", "regtype": "nosuch", '"char"': "xy"}
"""Types, and values of which their readers say what else is said of a statement that is wrong."""


def test_a_value_that_its_type_refuses_is_set_aside_though_it_is_alone(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """One message in each topic: only where Postgres was when it said so tells it from a table that takes none."""
    options = ["--until-end", "--on-poison", "dead-letter", "--dead-letter-limit", "100"]
    for number, (kind, value) in enumerate(READERS.items()):
        topic = create_topic(bootstrap_servers, 1, name=f"{source}-{number}")
        db.execute(f"CREATE TABLE {source}_{number} (id int PRIMARY KEY, v {kind})")
        send(bootstrap_servers, topic, [("0", {"id": 1, "v": value})], 1)
        mode = ("append", "upsert")[number % 2]
        result = operate("sink", "--topic", topic, "--table", f"{source}_{number}", "--mode", mode, *options)
        assert result.code == 0, result.err
        found = "SELECT sqlstate, error FROM exactly_once.dead_letter WHERE topic = %s"
        (letter,) = db.execute(found, (topic,)).fetchall()
        assert letter[0] in (None, "22P02")
        assert f"{topic}[0] offset 0: column v: " in letter[1]
        assert rows(db, f"{source}_{number}") == []


@pytest.mark.parametrize("payload", ["json", "cloudevents"])
def test_headers_that_cannot_be_read_matter_only_where_a_column_is_filled_from_them(  # noqa: PLR0917 - fixtures
    payload: str, command: Command, bootstrap_servers: str, conninfo: str, source: str, db: Database
) -> None:
    """And where the format is one that has its event in them."""
    db.execute(f"CREATE TABLE {source} (id int, sent jsonb, specversion text)")
    value = b'{"id": 1, "specversion": "1.0"}'
    produce_header_name(bootstrap_servers, source, value, b"caf\xe9")
    send(bootstrap_servers, source, [("0", {"id": 2, "specversion": "1.0"})], 1)
    where = ["--topic", source, "--table", source, "--until-end", "--bootstrap-servers", bootstrap_servers]
    where += ["--conninfo", conninfo, "--format", payload]
    asking = ["--metadata", "sent=headers"] if payload == "json" else []
    stopped = command("sink", *where, *asking, "--group-id", source)
    assert stopped.code == 1
    assert f"{source}[0] offset 0: the name of a header is no UTF-8" in stopped.err
    assert command("sink", *where, *asking, "--group-id", source, "--on-poison", "dead-letter").code == 0
    assert rows(db, source, "id") == [(2,)]
    if payload == "json":
        assert command("sink", *where, "--group-id", f"{source}-2").code == 0
        assert rows(db, source, "id") == [(1,), (2,), (2,)]


def test_a_port_for_metrics_that_is_taken_is_named(
    operate: Command, bootstrap_servers: str, source: str, db: Database
) -> None:
    """It was: Address already in use."""
    db.execute(f"CREATE TABLE {source} (id int)")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--start", "earliest", "--until-end", "--metrics-port", port)
        result = operate("sink", "--topic", source, "--table", source, *options)
    assert result.code == 1
    assert f"error: --metrics-port {port} at --metrics-host 127.0.0.1: Address already in use; say" in result.err


def test_a_grant_that_only_tombstones_need_stops_the_sink(  # noqa: PLR0917 - fixtures
    command: Command, bootstrap_servers: str, conninfo: str, source: str, db: Database, no_superuser: str
) -> None:
    """A dead letter would leave the row that its source has deleted; with the grant the same run goes on."""
    db.execute(f"REVOKE pg_write_all_data FROM {no_superuser}; CREATE TABLE {source} (id int PRIMARY KEY)")
    db.execute(f"GRANT SELECT, INSERT, UPDATE ON {source} TO {no_superuser}")
    send(bootstrap_servers, source, [*((str(n), {"id": n}) for n in range(20)), ("3", None)], 1)
    where = ["--topic", source, "--table", source, "--until-end", "--bootstrap-servers", bootstrap_servers]
    where += ["--group-id", source, "--conninfo", make_conninfo(conninfo, options=f"-c role={no_superuser}")]
    options = ["--mode", "upsert", "--on-poison", "dead-letter"]
    stopped = command("sink", *where, *options)
    assert stopped.code == 1
    assert "in mode upsert a role needs SELECT, INSERT, UPDATE, DELETE" in stopped.err
    db.execute(f"GRANT DELETE ON {source} TO {no_superuser}")
    result = command("sink", *where, *options)
    assert result.code == 0, result.err
    assert rows(db, source, "id") == [(n,) for n in range(20) if n != 3]
