"""Fixtures of the writer's tests: a connection with a transaction, and tables that go away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from tests.support.installed_postgres import installed_postgres, programs_with
from tests.support.require import skip_unless

Connection = psycopg.Connection[Any]
MakeTable = Callable[[str], str]


@pytest.fixture
def work(postgres_conninfo: str) -> Iterator[Connection]:
    """A connection on which every statement is in a transaction, as in a unit."""
    with psycopg.connect(postgres_conninfo, prepare_threshold=None) as connection:
        yield connection
        connection.rollback()


@pytest.fixture(scope="module")
def icu_conninfo(own_servers: None) -> Iterator[str]:
    """A Postgres with collations of ICU, without which there is none that is not deterministic."""
    directory = programs_with("--with-icu")
    skip_unless("icu", None if directory else "no Postgres with ICU is installed; Debian's postgresql has it")
    assert directory is not None
    with installed_postgres(directory) as conninfo:
        yield conninfo


@pytest.fixture
def make_table(postgres_conninfo: str, name: str, work: Connection) -> Iterator[MakeTable]:
    """Make a table from what is in the parentheses, and return its name; it is dropped after the test."""
    made: list[str] = []
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:

        def make(definition: str) -> str:
            table = f"{name}_{len(made)}"
            connection.execute(f"CREATE TABLE {table} {definition}")
            made.append(table)
            return table

        yield make
        work.rollback()  # or the tables stay locked
        connection.execute("SET lock_timeout = '60s'")
        for table in made:
            connection.execute(f"DROP TABLE IF EXISTS {table} CASCADE")


def messages(count: int, *, topic: str = "orders") -> list[Message]:
    """Make messages to be named in errors."""
    return [Message(topic=topic, partition=3, offset=100 + i) for i in range(count)]


def rows_of(connection: Connection, table: str, what: str = "*") -> list[tuple[Any, ...]]:
    """Read a table, in the order of its first column."""
    return connection.execute(f"SELECT {what} FROM {table} ORDER BY 1").fetchall()
