"""``exactly-once migrate``: the schema is made once, and a role with the least rights can work with it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from exactly_once import ConfigurationError
from exactly_once.ledger import migrate as schemas
from exactly_once.ledger import stale_owners
from tests.cli.conftest import Command, holding_until_told
from tests.conftest import MakeConsumer
from tests.support.require import skip_unless
from tests.support.waiting import until

Db = psycopg.Connection[Any]
PROCESSES = 8


def _waiting(admin: Db) -> int:
    found = admin.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture
def admin(postgres_conninfo: str) -> Iterator[Db]:
    """A superuser's connection."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        yield connection


@pytest.fixture
def schema(admin: Db, name: str) -> Iterator[str]:
    """The name of a schema that is not there, and is gone after the test."""
    yield name
    admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def role(admin: Db, name: str) -> Iterator[str]:
    """A role that may log in and nothing else."""
    role = f"{name}_worker"
    admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'of-the-worker'").format(sql.Identifier(role)))
    yield role
    admin.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.fixture
def worker_conninfo(postgres_conninfo: str, role: str) -> str:
    """How that role connects."""
    return make_conninfo(postgres_conninfo, user=role, password="of-the-worker")


def test_it_says_what_ran_and_the_second_time_that_nothing_did(
    command: Command, postgres_conninfo: str, schema: str, admin: Db
) -> None:
    where = ("--conninfo", postgres_conninfo, "--schema", schema)
    first = command("migrate", *where)
    assert first.code == 0
    assert "ran migration" in first.out
    assert "1" in first.out.split("ran migration")[1]
    assert "nothing to do, version" in command("migrate", *where).out
    found = command("migrate", *where, "--json").json
    assert found["migrations"] == []
    assert found["version"] == schemas.VERSION
    assert found["schema"] == schema
    schemas.check(admin, schema)


@pytest.mark.parametrize("names", [("{}", "{}_a"), ("{}", 'o"{}'), ('o"{}', "{}")])
def test_a_schema_that_was_renamed_is_refused_with_the_way_back(
    names: tuple[str, str], command: Command, postgres_conninfo: str, schema: str, admin: Db
) -> None:
    before, renamed = (name.format(schema) for name in names)
    schemas.migrate(admin, before)
    admin.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(sql.Identifier(before), sql.Identifier(renamed)))
    for action in (["migrate"], ["status"], ["dead-letters", "list"]):
        refused = command(*action, "--conninfo", postgres_conninfo, "--schema", renamed)
        assert refused.code != 0
    with pytest.raises(ConfigurationError, match="was made as") as error:
        schemas.check(admin, renamed)
    found = re.search(r"ALTER SCHEMA .*$", str(error.value))
    assert found is not None
    admin.execute(found[0])
    schemas.check(admin, before)
    admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(before)))


def test_eight_processes_at_once_make_one_schema(postgres_conninfo: str, schema: str, role: str, admin: Db) -> None:
    """They all wait at one lock, so that they really are at it together."""
    environment = os.environ | {"EXACTLY_ONCE_CONNINFO": postgres_conninfo}
    args = [sys.executable, "-m", "exactly_once", "migrate", "--schema", schema, "--role", role]
    gate = "SELECT pg_advisory_xact_lock(hashtext('exactly_once.migrate'), hashtext(%s))"
    with psycopg.connect(postgres_conninfo) as holder:
        holder.execute(gate, (schema,))
        processes = [
            subprocess.Popen(args, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        until(lambda: _waiting(admin) == PROCESSES, 120, f"{PROCESSES} processes at the lock")
    outcomes = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, outcomes
    assert sum("ran migration" in out for out, _ in outcomes) == 1
    assert sum("nothing to do" in out for out, _ in outcomes) == PROCESSES - 1
    assert {err for _, err in outcomes} == {""}


GATE = "SELECT pg_advisory_xact_lock(hashtext('exactly_once.migrate'), hashtext({schema}))"


@pytest.mark.parametrize(
    ("held", "arguments"),
    [
        (GATE, ["migrate"]),
        ("LOCK TABLE {place}.version", ["migrate"]),
        ("LOCK TABLE {place}.version", ["status", "--check"]),
        ("LOCK TABLE {place}.ledger", ["status"]),
        ("LOCK TABLE {place}.dead_letter", ["dead-letters", "list"]),
    ],
)
def test_who_holds_a_command_up_is_named(
    *,
    held: str,
    arguments: list[str],
    command: Command,
    postgres_conninfo: str,
    bootstrap_servers: str,
    schema: str,
    admin: Db,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody's forgotten transaction, VACUUM FULL, or another migration, also before there is a ledger."""
    monkeypatch.setattr(stale_owners, "STILL_SECONDS", 0.1)
    if held != GATE:
        schemas.migrate(admin, schema)
    where = ["--conninfo", postgres_conninfo, "--schema", schema, "--group-id", "g"]
    where += ["--bootstrap-servers", bootstrap_servers] if arguments[0] == "status" else []
    with psycopg.connect(postgres_conninfo, application_name="a forgotten one") as other:
        names = {"schema": sql.Literal(schema), "place": sql.Identifier(schema)}
        other.execute(sql.SQL(held).format(**names))
        pid = other.info.backend_pid
        with holding_until_told(other):
            command(*arguments, *where)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"backend {pid} has it (user postgres, application_name 'a forgotten one')" in said


def test_a_role_that_is_not_there_undoes_the_whole_migration(
    command: Command, postgres_conninfo: str, schema: str, admin: Db
) -> None:
    """Grants share the migration's transaction, and so its lock: given side by side they would collide."""
    refused = command("migrate", "--conninfo", postgres_conninfo, "--schema", schema, "--role", "nobody-by-that-name")
    assert refused.code == 1
    assert 'role "nobody-by-that-name" does not exist' in refused.err
    assert admin.execute("SELECT to_regnamespace(%s)", (f'"{schema}"',)).fetchone() == (None,)


def test_what_may_not_be_granted_is_an_error(
    command: Command, printed_schema: str, worker_conninfo: str, role: str, admin: Db
) -> None:
    """Postgres warns, and grants nothing; a deployment that ends well would have workers that cannot begin."""
    admin.execute(sql.SQL("ALTER ROLE {} SET client_min_messages = error").format(sql.Identifier(role)))
    where = ["--conninfo", worker_conninfo, "--schema", printed_schema]
    refused = command("migrate", *where, "--role", "pg_monitor")
    assert refused.code == 1
    assert f'no privileges were granted for "{printed_schema}" to role pg_monitor; nothing was done' in refused.err
    assert f"The owner of schema {printed_schema} may grant it" in refused.err


def test_nothing_is_granted_to_everybody(command: Command, postgres_conninfo: str, schema: str) -> None:
    for where in (["--conninfo", postgres_conninfo], ["--sql"]):
        refused = command("migrate", *where, "--schema", schema, "--role", "public")
        assert refused.code == 2
        assert "would let everybody move offsets" in refused.err


@pytest.fixture
def printed_schema(command: Command, admin: Db, schema: str, role: str) -> str:
    """A schema that was made by the printed statements, and by nothing else."""
    printed = command("migrate", "--sql", "--schema", schema, "--role", role)
    assert (printed.code, printed.err) == (0, "")
    admin.execute(printed.out.encode())  # all statements in one simple query, as psql -c sends them
    schemas.check(admin, schema)
    return schema


def test_a_least_privilege_role_consumes_with_the_printed_schema(
    *,
    printed_schema: str,
    postgres_conninfo: str,
    worker_conninfo: str,
    role: str,
    topic: str,
    make_consumer: MakeConsumer,
) -> None:
    """The role may log in, insert into one table of effects, and do what the printed grants allow."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as owner:
        table = sql.Identifier(f"{topic}_effects")
        owner.execute(sql.SQL('CREATE TABLE {} (partition int, "offset" bigint)').format(table))
        owner.execute(sql.SQL("GRANT INSERT ON {} TO {}").format(table, sql.Identifier(role)))
        with make_consumer(conninfo=worker_conninfo, schema=printed_schema, max_messages=3) as consumer:
            consumer.subscribe([topic])
            for unit in consumer.units(until_end=True):
                with unit:
                    effects = [(m.partition(), m.offset()) for m in unit.messages]
                    unit.executemany(f'INSERT INTO "{topic}_effects" VALUES (%s, %s)', effects)
        stored = owner.execute(sql.SQL("SELECT * FROM {} ORDER BY 1, 2").format(table)).fetchall()
        assert stored == [(p, o) for p in range(2) for o in range(10)]


def test_the_commands_work_with_the_least_privileges_too(
    command: Command, printed_schema: str, worker_conninfo: str, topic: str, bootstrap_servers: str
) -> None:
    where = ["--conninfo", worker_conninfo, "--schema", printed_schema, "--group-id", topic]
    where += ["--bootstrap-servers", bootstrap_servers]
    assert command("reset", "--topic", topic, "--to-offset", 4, "--execute", *where).code == 0
    assert [p["next_offset"] for p in command("status", *where, "--json").partitions] == [4, 4]


def test_the_role_may_do_nothing_else(printed_schema: str, worker_conninfo: str) -> None:
    with psycopg.connect(worker_conninfo, autocommit=True) as worker:
        for forbidden in (
            "DELETE FROM {}.ledger",
            "TRUNCATE {}.ledger",
            "UPDATE {}.audit SET reason = ''",
            "DELETE FROM {}.audit",
            "UPDATE {}.version SET version = 2",
            "CREATE TABLE {}.mine ()",
            "DROP FUNCTION {}.advance",
            "ALTER TABLE {}.ledger ADD mine int",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                worker.execute(sql.SQL(forbidden).format(sql.Identifier(printed_schema)))


def test_a_role_that_was_not_granted_is_told_which_command_prints_the_grants(
    command: Command, postgres_conninfo: str, schema: str, worker_conninfo: str, role: str
) -> None:
    assert command("migrate", "--conninfo", postgres_conninfo, "--schema", schema).code == 0
    refused = command("status", "--conninfo", worker_conninfo, "--schema", schema)
    assert refused.code == 1
    assert "permission denied" in refused.err
    assert "exactly-once migrate --sql --role" in refused.err
    granted = command("migrate", "--conninfo", postgres_conninfo, "--schema", schema, "--role", role)
    assert (granted.code, granted.err) == (0, "")
    assert command("status", "--conninfo", worker_conninfo, "--schema", schema).code == 0


def test_a_worker_is_told_who_may_drop_dead_letters(
    command: Command, printed_schema: str, worker_conninfo: str, topic: str, make_consumer: MakeConsumer
) -> None:
    with make_consumer(conninfo=worker_conninfo, schema=printed_schema) as consumer:
        consumer.subscribe([topic])
        with next(consumer.units(until_end=True)) as unit:
            unit.dead_letter(unit.messages[0], "a test")
    where = ["--conninfo", worker_conninfo, "--schema", printed_schema]
    (letter,) = command("dead-letters", "list", *where, "--json").json["dead_letters"]
    refused = command("dead-letters", "drop", letter["id"], "--execute", *where)
    assert refused.code == 1
    assert "permission denied for table dead_letter; " in refused.err
    assert "to drop or replay dead letters, also by reset, be the owner of the schema" in refused.err


def test_psql_takes_the_printed_sql(
    command: Command, postgres_conninfo: str, schema: str, role: str, admin: Db
) -> None:
    psql = shutil.which("psql")
    skip_unless("psql", None if psql else "there is no psql on the path")
    assert psql is not None
    text = command("migrate", "--sql", "--schema", schema, "--role", role).out
    args = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", postgres_conninfo]
    first = subprocess.run(args, input=text, capture_output=True, text=True, timeout=200, check=False)
    assert (first.returncode, first.stderr) == (0, "")
    schemas.check(admin, schema)
    again = subprocess.run(args, input=text, capture_output=True, text=True, timeout=200, check=False)
    assert again.returncode != 0
    schemas.check(admin, schema)  # the second time failed as a whole


def test_names_that_need_quotes_are_quoted(command: Command, admin: Db, schema: str, role: str) -> None:
    odd = f'{schema}"; DROP TABLE x; --'
    printed = command("migrate", "--sql", "--schema", odd, "--role", role).out
    admin.execute(printed.encode())
    schemas.check(admin, odd)
    admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(odd)))


def test_a_missing_schema_is_refused_and_migrate_named(command: Command, postgres_conninfo: str, schema: str) -> None:
    result = command("status", "--conninfo", postgres_conninfo, "--schema", schema)
    assert result.code == 1
    assert "there is none" in result.err
    assert "exactly-once migrate" in result.err


def test_a_schema_that_is_too_old_is_refused(command: Command, postgres_conninfo: str, schema: str, admin: Db) -> None:
    command("migrate", "--conninfo", postgres_conninfo, "--schema", schema)
    admin.execute(sql.SQL("UPDATE {}.version SET version = 0").format(sql.Identifier(schema)))
    for args in (["status"], ["reset", "--topic", "t", "--to-current", "--group-id", "g"]):
        result = command(*args, "--conninfo", postgres_conninfo, "--schema", schema)
        assert result.code == 1
        assert f"version 0 is there, this release needs version {schemas.VERSION}" in result.err


def test_a_schema_that_is_too_new_is_refused_by_every_command_and_left_alone(
    command: Command, postgres_conninfo: str, schema: str, admin: Db
) -> None:
    command("migrate", "--conninfo", postgres_conninfo, "--schema", schema)
    admin.execute(sql.SQL("UPDATE {}.version SET version = 99, oldest_reader = 98").format(sql.Identifier(schema)))
    for args in (["migrate"], ["status"], ["reset", "--topic", "t", "--to-current", "--group-id", "g"]):
        result = command(*args, "--conninfo", postgres_conninfo, "--schema", schema)
        assert result.code == 1
        assert "Upgrade kafka-exactly-once" in result.err
    found = admin.execute(sql.SQL("SELECT version FROM {}.version").format(sql.Identifier(schema))).fetchone()
    assert found == (99,)


def test_a_newer_schema_that_this_release_still_reads_is_taken(
    command: Command, postgres_conninfo: str, schema: str, admin: Db
) -> None:
    command("migrate", "--conninfo", postgres_conninfo, "--schema", schema)
    admin.execute(sql.SQL("UPDATE {}.version SET version = 99").format(sql.Identifier(schema)))
    assert command("status", "--conninfo", postgres_conninfo, "--schema", schema).code == 0
    again = command("migrate", "--conninfo", postgres_conninfo, "--schema", schema, "--json")
    assert (again.code, again.json["version"]) == (0, 99)
    assert (
        "nothing to do, version 99 is there"
        in command("migrate", "--conninfo", postgres_conninfo, "--schema", schema).out
    )


def test_who_may_not_make_a_schema_is_told_what_migrating_needs(
    command: Command, worker_conninfo: str, schema: str
) -> None:
    refused = command("migrate", "--conninfo", worker_conninfo, "--schema", schema)
    assert refused.code == 1
    assert "who migrates needs CREATE ON DATABASE" in refused.err


def test_a_server_that_takes_no_writes_is_told_with_what_mends_it(
    command: Command, postgres_conninfo: str, schema: str
) -> None:
    """It was the server's bare answer."""
    read_only = make_conninfo(postgres_conninfo, options="-c default_transaction_read_only=on")
    refused = command("migrate", "--conninfo", read_only, "--schema", schema)
    assert refused.code == 1
    assert "name the primary, or add target_session_attrs=read-write" in refused.err


def test_a_schema_that_is_not_there_is_named_in_the_remedy(
    command: Command, postgres_conninfo: str, schema: str
) -> None:
    odd = f"{schema} Led-ger"
    refused = command("status", "--conninfo", postgres_conninfo, "--schema", odd)
    assert refused.code == 1
    assert f"exactly-once migrate --schema '{odd}' --conninfo ..." in refused.err
    assert "if the ledger is in another schema" in refused.err
