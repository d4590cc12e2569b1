"""Odd applications: errors without a text, names that the database cannot spell, adapters, two databases."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy
from confluent_kafka import Producer
from psycopg import sql
from psycopg.adapt import Buffer, Dumper, Loader
from psycopg.conninfo import make_conninfo

from exactly_once import ConfigurationError, Unit, testing
from exactly_once.ledger.dead_letters import find
from exactly_once.ledger.migrate import migrate
from tests.integration.scene import Scene, apply
from tests.support.worker import ROOT, record

LETTERS = "SELECT message_offset, error_class, error FROM exactly_once.dead_letter WHERE group_id = %s"


@pytest.fixture
def make_database(conninfo: str, name: str) -> Iterator[Callable[[str], str]]:
    """Make a database with a schema beside the tests' own: ``make_database(encoding)`` returns how to reach it."""
    with psycopg.connect(conninfo, autocommit=True) as server:
        database = sql.Identifier(f"{name}_odd")

        def make(encoding: str) -> str:
            statement = sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} LOCALE 'C'")
            server.execute(statement.format(database, sql.Literal(encoding)))
            reached = psycopg.conninfo.make_conninfo(conninfo, dbname=f"{name}_odd")
            with psycopg.connect(reached, autocommit=True) as connection:
                migrate(connection)
            return reached

        yield make
        server.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(database))


def test_an_error_without_a_text_is_dead_lettered_where_its_name_cannot_be_spelt(
    scene: Scene, make_database: Callable[[str], str]
) -> None:
    odd = make_database("LATIN1")
    # Its __str__ gives no text, as a slip has it.
    error = type("Ошибка", (ValueError,), {"__str__": lambda _: 402})

    def handler(unit: Unit) -> None:
        unit.execute("SELECT")
        if any(message.offset() == 2 for message in unit.messages):
            raise error

    with scene.consumer(conninfo=odd, name="имя", application="приложение") as consumer:
        consumer.run(handler, on_poison="dead-letter", until_end=True)
    with psycopg.connect(odd) as connection:
        ((offset, kind, text),) = connection.execute(LETTERS, (scene.topic,)).fetchall()
        owner = connection.execute("SELECT owner_name, application, next_offset FROM exactly_once.ledger").fetchone()
    assert (offset, text) == (2, "<its text cannot be made: TypeError>")
    assert kind.endswith(ascii("Ошибка")[1:-1])
    assert owner == (ascii("имя")[1:-1], ascii("приложение")[1:-1], 20)


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8"])
def test_a_dead_letter_has_the_names_of_its_headers(
    encoding: str, scene: Scene, make_database: Callable[[str], str]
) -> None:
    names = ["plain", "日本", "é", "\\u65e5", "a\\", "\\\\x00", "😀"]
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers})
    producer.produce(scene.topic, b"poison", headers=[(name, name.encode()) for name in names])
    assert producer.flush(30) == 0

    def handler(unit: Unit) -> None:
        for message in unit.messages:
            if message.value() == b"poison":
                unit.dead_letter(message, "poison")

    conninfo = make_database(encoding)
    with scene.consumer(conninfo=conninfo) as consumer:
        consumer.run(handler, until_end=True)
    with psycopg.connect(conninfo) as connection:
        (letter,) = find(connection, schema="exactly_once", group_id=scene.topic)
    assert letter.message().headers() == [(name, name.encode()) for name in names]


class Text(Loader):
    """Gives whatever the server sends as text."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


class AsText(Dumper):
    """Sends whatever it is given as text."""

    oid = psycopg.adapters.types["text"].oid

    def dump(self, obj: Any) -> bytes:
        return str(obj).encode()


def test_adapters_of_the_application_are_for_its_own_statements(scene: Scene) -> None:
    def connect() -> psycopg.Connection[Any]:
        connection = psycopg.connect(scene.conninfo, row_factory=psycopg.rows.scalar_row)
        for name in ("bool", "int4", "int8", "float8", "uuid", "text", "timestamptz"):
            connection.adapters.register_loader(name, Text)
        for kind in (int, float, UUID, list):
            connection.adapters.register_dumper(kind, AsText)
        return connection

    seen = []

    def handler(unit: Unit) -> None:
        unit.claim_many(str(message.offset()) for message in unit.messages)
        seen.append(unit.execute("SELECT 5").fetchone())
        if any(message.offset() == 2 for message in unit.messages):
            raise ValueError

    with scene.consumer(connect=connect) as consumer:
        consumer.run(handler, on_poison="dead-letter", until_end=True)
    assert set(seen) == {"5"}
    assert scene.ledger("next_offset") == [20]
    assert [offset for offset, *_ in scene.query(LETTERS)] == [2]


def test_adapters_that_were_registered_for_everybody_before_the_import_are_no_different(scene: Scene) -> None:
    """In a process of its own: they would be the test run's, too."""
    table = scene.table('"offset" bigint, writer int, name text, document jsonb, at timestamp')
    command = [sys.executable, "-m", "tests.integration.global_adapters"]
    command += [scene.bootstrap_servers, scene.conninfo, scene.topic]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "['NEW', 'NEW', 'IN_FLIGHT']\n"), done.stderr
    assert scene.ledger("next_offset") == [20]
    ((offset, _, error),) = scene.query(LETTERS)
    assert (offset, error) == (2, "of the handler")
    rows = scene.query(f'SELECT * FROM {table} ORDER BY writer, "offset"')
    five = ("five", {"five": 5}, datetime(2005, 5, 5))  # noqa: DTZ001 - the column has none either
    assert rows == [(offset, writer, *five) for writer in (0, 1) for offset in range(20) if offset != 2]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("isolation", ["repeatable\\ read", "serializable"])
def test_a_role_may_isolate_its_transactions_as_it_likes(scene: Scene, isolation: str, *, joins: bool) -> None:
    isolated = make_conninfo(scene.proxy.conninfo, options=f"-c default_transaction_isolation={isolation}")
    levels = set()

    def handler(unit: Unit) -> None:
        levels.add(unit.execute("SHOW transaction_isolation").fetchone())
        record(unit, "test")
        assert all(unit.claim_many(f"{scene.topic}-{message.offset()}" for message in unit.messages))

    with contextlib.closing(psycopg.connect(isolated)) as own, scene.consumer(conninfo=isolated) as consumer:
        for unit in consumer.units(until_end=True):
            with unit.join(own) if joins else unit:
                handler(unit)
            own.commit()
    scene.assert_exact()
    assert levels == {(isolation.replace("\\", "") if joins else "read committed",)}


@pytest.mark.parametrize("joins", [False, True])
def test_a_connection_of_another_encoding_stores_the_same_names(scene: Scene, *, joins: bool) -> None:
    """What it lacks in an error is escaped, as what the database lacks."""
    group = f"grüße-{scene.topic}"
    latin = make_conninfo(scene.conninfo, client_encoding="LATIN1")
    own = psycopg.connect(latin)

    def handler(unit: Unit) -> None:
        for message in unit.messages:
            if message.offset() == 2:
                unit.dead_letter(message, "5 € für 'ß'")

    with contextlib.closing(own), scene.consumer({"group.id": group}, conninfo=latin, name="grün") as consumer:
        for unit in consumer.units(until_end=True):
            with unit.join(own) if joins else unit:
                handler(unit)
            own.commit()
    with psycopg.connect(scene.conninfo) as connection:
        letters = connection.execute(LETTERS, (group,)).fetchall()
        rows = connection.execute(
            "SELECT next_offset, owner_name FROM exactly_once.ledger WHERE group_id = %s", (group,)
        ).fetchall()
    assert [(offset, error) for offset, _, error in letters] == [(2, "5 \\u20ac für 'ß'")]
    assert rows == [(20, "grün")]


def test_a_name_of_the_schema_is_spelt_as_the_connection_spells_it(scene: Scene) -> None:
    schema = f"größe_{scene.topic}"
    latin = make_conninfo(scene.conninfo, client_encoding="LATIN1")
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        migrate(connection, schema)
        try:
            with scene.consumer(conninfo=latin, schema=schema) as consumer:
                for unit in consumer.units(until_end=True):
                    with unit:
                        unit.defer("SELECT 1")
            statement = sql.SQL("SELECT next_offset FROM {}.ledger").format(sql.Identifier(schema))
            assert connection.execute(statement).fetchall() == [(20,)]
        finally:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


def test_in_a_database_without_an_encoding_one_name_is_one_row(
    scene: Scene, make_database: Callable[[str], str]
) -> None:
    """Such a server converts nothing: in another encoding the group would be another one, and read all again."""
    latin = make_conninfo(make_database("SQL_ASCII"), client_encoding="LATIN1")
    with pytest.raises(ConfigurationError, match="client_encoding=UTF8"):
        scene.consumer(conninfo=latin)


@pytest.mark.parametrize("has_schema", [True, False])
def test_a_transaction_in_another_database_is_not_joined(
    scene: Scene, make_database: Callable[[str], str], *, has_schema: bool
) -> None:
    """Its offsets could never move, and the unit would come again for ever."""
    other = make_database("UTF8")
    with psycopg.connect(other) as connection, scene.consumer() as consumer:
        if not has_schema:
            connection.execute("DROP SCHEMA exactly_once CASCADE")
            connection.commit()
        unit = next(consumer.units())
        with pytest.raises(ConfigurationError, match=f"{scene.topic}_odd, which has another ledger"):  # noqa: SIM117
            with unit.join(connection):
                pytest.fail("joined")


@pytest.mark.parametrize("way", ["a consumer's unit", "a test's unit"])
@pytest.mark.parametrize("kind", ["NoneType", "sqlalchemy.engine.base.Connection", "psycopg.AsyncConnection"])
def test_what_is_around_a_connection_or_none_cannot_be_joined(scene: Scene, kind: str, way: str) -> None:
    url = re.sub("^postgresql:", "postgresql+psycopg:", scene.conninfo)
    units = scene.consumer().units(until_end=True)
    with asyncio.Runner() as runner, sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect() as around:
        asynchronous = runner.run(psycopg.AsyncConnection.connect(scene.conninfo))
        given: Any = {"NoneType": None, "psycopg.AsyncConnection": asynchronous}.get(kind, around)
        block = next(units).join(given) if way == "a consumer's unit" else testing.unit(given, [])
        with pytest.raises(ConfigurationError, match=f"was given {kind}.*driver_connection"), block:
            pytest.fail("joined")
        runner.run(asynchronous.close())
    for unit in units:
        apply(unit)
    scene.assert_exact()


def test_connect_that_gives_one_connection_for_all_is_refused_when_that_is_lost(scene: Scene) -> None:
    """Nothing could ever be read over it again, and the server, of which all logs speak, is well."""
    with psycopg.connect(scene.conninfo) as one, scene.consumer(connect=lambda: one) as consumer:

        def handler(unit: Unit) -> None:
            record(unit, "test")
            if unit.messages[0].offset() == 10:
                one.pgconn.finish()

        with pytest.raises(ConfigurationError, match="connect= gave the same connection again, which is closed"):
            consumer.run(handler, until_end=True)
    assert scene.applied() == list(range(10))


def test_connect_that_gives_no_connection_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match="connect= gave NoneType"):
        scene.consumer(connect=lambda: None)
