"""Odd applications: errors without a text, names that the database cannot spell, adapters, two databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.adapt import Buffer, Dumper, Loader

from exactly_once import ConfigurationError, Unit
from exactly_once.ledger.migrate import migrate
from tests.integration.scene import Scene

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


def test_connect_that_gives_no_connection_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match="connect= gave NoneType"):
        scene.consumer(connect=lambda: None)
