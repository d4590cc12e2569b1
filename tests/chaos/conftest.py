"""Fixtures of the chaos tests: a filled topic, workers on it, and the ways to the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.pgbouncer import PgBouncer, pgbouncer_missing
from tests.support.require import skip_unless
from tests.support.worker import Crew

MakeCrew = Callable[..., Crew]


@pytest.fixture(scope="session")
def pooled_conninfo(conninfo: str) -> Iterator[str]:
    """The database behind a transaction pooler."""
    skip_unless("pgbouncer", pgbouncer_missing())
    with PgBouncer(conninfo, pool_size=5) as pooler:
        yield pooler.conninfo


@pytest.fixture
def make_crew(bootstrap_servers: str, conninfo: str, name: str) -> Iterator[MakeCrew]:
    """Make a crew of group ``name`` on given topics; its workers are ended after the test."""
    with ExitStack() as stack:

        def make(*topics: str, **options: Any) -> Crew:
            return stack.enter_context(Crew(bootstrap_servers, conninfo, name, topics, **options))

        yield make
