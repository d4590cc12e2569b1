"""The schema: made by many at once, refused when it does not fit, and under any name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql

from exactly_once import (
    ConfigurationError,
    ExactlyOnceConsumer,
    OffsetsNotAdopted,
    SchemaTooNew,
    SchemaTooOld,
    Unit,
)
from exactly_once.consumer.unit import apply
from exactly_once.ledger.migrate import VERSION, as_sql, check, migrate
from tests.conftest import MakeConsumer
from tests.support.roles import as_role
from tests.support.topics import create_topic, produce

NAMES = ["plain", "Capitals", "with space", 'quo"ted', "gr\u00fc\u00dfe", "select", "semi;colon--", "per%cent", "{b}"]


@pytest.fixture
def schema(postgres_conninfo: str, name: str) -> Iterator[str]:
    """The name of a schema that is not there; it is dropped in the end."""
    yield name
    _drop(postgres_conninfo, name)


@pytest.mark.fault("B19")
@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_eight_threads_migrate_at_once(postgres_conninfo: str, schema: str, isolation: str) -> None:
    def run(_: int) -> list[int]:
        with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
            connection.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
            return migrate(connection, schema)

    with ThreadPoolExecutor(8) as pool:
        ran = sorted(pool.map(run, range(8)))
    assert ran == [[]] * 7 + [list(range(1, VERSION + 1))]


@pytest.mark.fault("B19", more=True)
def test_four_processes_migrate_at_once(postgres_conninfo: str, schema: str) -> None:
    program = (
        "import sys, psycopg; from exactly_once.ledger.migrate import migrate\n"
        "sys.stdin.read()\n"
        "with psycopg.connect(sys.argv[1], autocommit=True) as c: print(migrate(c, sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, postgres_conninfo, schema]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    assert sorted(said) == sorted(["[]"] * 3 + [str(list(range(1, VERSION + 1)))])


@pytest.mark.fault("B19", more=True)
def test_a_migration_that_is_killed_leaves_nothing(postgres_conninfo: str, schema: str) -> None:
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        with connection.transaction(force_rollback=True):
            migrate(connection, schema)
        with pytest.raises(SchemaTooOld, match="there is none"):
            check(connection, schema)
        assert migrate(connection, schema) == list(range(1, VERSION + 1))
        check(connection, schema)


def test_a_database_without_the_schema_is_refused_with_the_command_that_makes_it(
    make_consumer: MakeConsumer, schema: str, name: str
) -> None:
    with pytest.raises(SchemaTooOld, match="exactly-once migrate"):
        make_consumer(schema=schema).subscribe([name])


@pytest.mark.fault("B20", more=True)
def test_an_older_schema_is_refused(db: psycopg.Connection[Any], schema: str) -> None:
    migrate(db, schema)
    db.execute(sql.SQL("UPDATE {}.version SET version = 0").format(sql.Identifier(schema)))
    with pytest.raises(SchemaTooOld, match="version 0 is there"):
        check(db, schema)


@pytest.mark.fault("B20")
def test_a_newer_schema_is_refused_only_if_it_says_so(db: psycopg.Connection[Any], schema: str) -> None:
    migrate(db, schema)
    change = sql.SQL("UPDATE {}.version SET version = 99, oldest_reader = %s").format(sql.Identifier(schema))
    db.execute(change, (VERSION,))
    check(db, schema)
    assert migrate(db, schema) == []
    db.execute(change, (VERSION + 1,))
    with pytest.raises(SchemaTooNew, match="Upgrade"):
        check(db, schema)
    with pytest.raises(SchemaTooNew):
        migrate(db, schema)


@pytest.mark.parametrize("schema_name", NAMES)
def test_a_schema_of_any_name_works_or_is_refused_at_once(
    bootstrap_servers: str, make_consumer: MakeConsumer, conninfo: str, name: str, schema_name: str
) -> None:
    schema = f"{name} {schema_name}"
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 5, 1)
    try:
        consumer: ExactlyOnceConsumer = make_consumer(schema=schema, migrate=True)
    except ConfigurationError as refused:
        assert "schema" in str(refused)  # noqa: PT017
        return
    try:
        consumer.subscribe([name])
        for unit in consumer.units(until_end=True):
            with unit:
                unit.execute("SELECT 1")
        consumer.close()
        with psycopg.connect(conninfo) as connection:
            found = connection.execute(
                sql.SQL("SELECT next_offset, owner_token FROM {}.ledger").format(sql.Identifier(schema))
            )
            assert found.fetchall() == [(5, None)]
    finally:
        _drop(conninfo, schema)


@pytest.mark.parametrize("schema_name", ["", "x" * 64, "\u00fc" * 32, "nul\0", "a $lock$ b"])
def test_what_is_no_name_of_a_schema_is_refused(make_consumer: MakeConsumer, schema_name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema="):
        make_consumer(schema=schema_name)


def test_the_printed_sql_makes_a_schema_that_serves_a_role_with_nothing_else(
    conninfo: str, schema: str, bootstrap_servers: str, make_consumer: MakeConsumer, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 5, 1)
    role = f"{name}_worker"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        connection.execute(as_sql(schema, role).encode())
    try:
        consumer = make_consumer(conninfo=as_role(conninfo, role), schema=schema)
        consumer.subscribe([name])
        for unit in consumer.units(until_end=True):
            with unit:
                unit.execute("SELECT 1")
        assert consumer.counters.messages == 5
        consumer.close()
    finally:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.mark.parametrize("where", ["unit", "run", "between units"])
def test_a_schema_that_is_gone_behind_a_good_start_is_told_with_what_mends_it(  # noqa: PLR0917 - fixtures
    where: str, conninfo: str, schema: str, bootstrap_servers: str, make_consumer: MakeConsumer, name: str
) -> None:
    """As behind a failover to a time before it was made; a handler is not at fault, nor is a message."""
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 5, 1)
    consumer = make_consumer(schema=schema, migrate=True)
    consumer.subscribe([name])
    for unit in consumer.units(until_end=True):
        with unit:
            unit.execute("SELECT 1")
    calls = 0

    def handler(unit: Unit) -> None:
        nonlocal calls
        calls += 1
        unit.execute("SELECT 1")
        _drop(conninfo, schema)

    told = rf"schema '{schema}' in .*: there is none.*exactly-once migrate --schema {schema}.*a failover or a restore"
    if where == "between units":
        _drop(conninfo, schema)
        with pytest.raises(SchemaTooOld, match=told):
            list(consumer.units(idle_seconds=60))
    else:
        produce(bootstrap_servers, name, 5, 1, start=5)
        with pytest.raises(SchemaTooOld, match=told):
            consumer.run(handler) if where == "run" else apply(handler, next(iter(consumer)))
        assert calls == 1
    consumer.close()
    again = make_consumer(schema=schema, migrate=True)
    again.subscribe([name])
    with pytest.raises(OffsetsNotAdopted, match="the ledger has no rows"):
        next(iter(again))


def _drop(conninfo: str, schema: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


@pytest.mark.parametrize("granted", ["USAGE ON SCHEMA", "SELECT ON ALL TABLES IN SCHEMA"])
def test_a_role_without_grants_is_told_what_gives_them(  # noqa: PLR0917 - fixtures are positional
    granted: str,
    db: psycopg.Connection[Any],
    conninfo: str,
    bootstrap_servers: str,
    name: str,
    make_consumer: MakeConsumer,
) -> None:
    """At the start, or as soon as something is refused that the role may not do."""
    create_topic(bootstrap_servers, 1, name=name)
    db.execute(f"CREATE ROLE {name} LOGIN".encode())
    db.execute(f"GRANT USAGE ON SCHEMA exactly_once TO {name}".encode())
    db.execute(f"GRANT {granted} exactly_once TO {name}".encode())
    try:
        consumer = make_consumer(conninfo=as_role(conninfo, name))
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:  # noqa: PT012 - at either, by the grant
            consumer.subscribe([name])
            next(iter(consumer))
        assert "exactly-once migrate --schema exactly_once --role" in raised.value.__notes__[0]
        consumer.close()
    finally:
        db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())
