"""A primary of Postgres and a standby that replicates asynchronously: what is behind a failover that loses commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg

from exactly_once import embedded
from exactly_once.ledger.migrate import migrate
from tests.support.waiting import until


class Pair(NamedTuple):
    """A primary and its standby."""

    primary: embedded.Postgres
    standby: embedded.Postgres

    @property
    def conninfo(self) -> str:
        """Lead to whichever of them takes writes."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in (self.standby, self.primary))
        account = self.primary.conninfo.partition("@")[0]
        return f"{account}@{hosts}/postgres?target_session_attrs=read-write"

    def is_streaming(self) -> bool:
        """Tell whether the standby has everything."""
        with psycopg.connect(self.primary.conninfo, autocommit=True) as connection:
            query = "SELECT coalesce(bool_and(replay_lsn = pg_current_wal_lsn()), false) FROM pg_stat_replication"
            return connection.execute(query).fetchone() == (True,)

    def fall_behind(self) -> None:
        """Have the standby receive nothing from now on, and serve what it has."""
        until(self.is_streaming, 30, "a standby that has everything")
        for statement in ("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"):
            ask(self.standby, statement)
        until(lambda: ask(self.primary, "SELECT count(*) FROM pg_stat_replication") == 0, 30, "the end of replication")

    def fail_over(self) -> None:
        """Crash the primary and promote the standby, which lacks what it missed while it was stopped or behind."""
        self.primary.kill()
        if not self.standby.is_running():
            self.standby.start()
        assert ask(self.standby, "SELECT pg_promote()")


def ask(server: embedded.Postgres, statement: str) -> Any:
    """Execute a statement and return the first value, if there is one."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


@contextmanager
def primary_and_standby() -> Iterator[Pair]:
    """Start both, with our schema."""
    with embedded.Postgres(settings={"fsync": "off"}) as primary:
        with psycopg.connect(primary.conninfo, autocommit=True) as connection:
            migrate(connection)
        with primary.start_standby() as standby:
            pair = Pair(primary, standby)
            until(pair.is_streaming, 30, "replication")
            yield pair
