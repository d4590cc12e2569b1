"""What the programs of the documents write to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest


@pytest.fixture
def bank(db: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """The table of the documents."""
    db.execute("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL)")
    db.execute("INSERT INTO account VALUES (1, 0)")
    yield db
    db.execute("DROP TABLE account")
