"""Sessions in the transaction of a unit: SQLAlchemy and the consumer share a connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy
from models import engine
from sqlalchemy.orm import Session

from exactly_once import Unit

_shared: dict[psycopg.Connection[Any], sqlalchemy.Connection] = {}


def connect() -> psycopg.Connection[Any]:
    """Open a connection through the engine, which initialises the engine too, and take it out of the pool."""
    connection = engine.connect()
    driver = connection.connection.driver_connection
    connection.detach()
    for lost in [each for each in list(_shared) if each.closed]:  # another thread of the library's may do so just now
        _shared.pop(lost, None)
    _shared[driver] = connection
    return driver


@contextmanager
def session_in(unit: Unit) -> Iterator[Session]:
    """Give a session whose COMMIT is the unit's: what it commits by itself is a savepoint."""
    connection = _shared[unit.connection]
    if not connection.in_transaction():
        connection.begin()  # sends nothing: the unit has begun the transaction already
    with Session(connection, join_transaction_mode="create_savepoint") as session:
        yield session
        session.commit()
