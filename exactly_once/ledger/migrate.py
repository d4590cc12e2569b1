"""Schema: make it, bring it up to date, and refuse to work with one that does not fit."""

from __future__ import annotations

import psycopg
from psycopg import sql

from exactly_once.errors import ConfigurationError, SchemaTooNew, SchemaTooOld

from .commands import DEFAULT_SCHEMA, command
from .outcome import driver_error
from .session import Connection, address, cursor_on, execute, last_row
from .sql import grants, latest, migrations, query
from .store import LedgerSession

# The version of the schema that this release was written for.
VERSION = latest()
# How the server refuses statements of the library where its schema is not there, or is an older one.
_NOT_THERE = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)


def migrate(connection: Connection, schema: str = DEFAULT_SCHEMA) -> list[int]:
    """Bring the schema up to date in one transaction; return the migrations that ran.

    Safe to run from any number of processes at once. ``connection`` must be in autocommit mode.

    :raises SchemaTooNew: when the schema is newer than this release can work with.
    """
    with connection.transaction():
        # What a role has for its own statements is too short for DDL that waits for workers.
        execute(connection, schema, "no_timeouts")
        execute(connection, schema, "migration_lock", schema=schema)
        found = _installed(connection, schema)
        if found is not None:
            _refuse_too_new(connection, schema, found)
        # Read under the lock: of processes that start at once the first one migrates, the others find it done.
        todo = {n: ddl for n, ddl in migrations(schema).items() if found is None or n > found[0]}
        if found is None:
            execute(connection, schema, "create_schema")
        for ddl in todo.values():
            cursor_on(connection).execute(ddl)
    return list(todo)


def as_sql(schema: str = DEFAULT_SCHEMA, role: str = "exactly_once_worker") -> str:
    """Return everything that a new schema needs as text: DDL, then the grants for a worker's role."""
    create = query("create_schema", schema) + sql.SQL(";")
    parts = [create, *migrations(schema).values(), grants(schema, role)]
    return "\n\n".join(part.as_string(None).strip() for part in parts) + "\n"


def check(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Refuse a schema that this release cannot work with.

    :raises SchemaTooOld: when it is missing or behind; ``exactly-once migrate`` mends it.
    :raises SchemaTooNew: when a newer release has made it unreadable for this one.
    """
    found = _installed(connection, schema)
    if found is None or found[0] < VERSION:
        stored = "there is none" if found is None else f"version {found[0]} is there"
        other = "; if the ledger is in another schema, pass its name" if found is None else ""
        raise SchemaTooOld(
            f"schema {schema!r} in {address(connection)}: {stored}, this release needs version {VERSION}. "
            f"Run: {command('migrate', None, schema)} --conninfo ..., or pass migrate=True{other}"
        )
    _refuse_too_new(connection, schema, found)


def version(connection: Connection, schema: str = DEFAULT_SCHEMA) -> int | None:
    """Return the version of the schema that is there, which may be newer than this release."""
    found = _installed(connection, schema)
    return None if found is None else found[0]


def refuse_lost(session: LedgerSession, error: BaseException) -> None:
    """Say what happened if ``error`` comes from a schema that is gone behind a good start; else return.

    :raises SchemaTooOld: saying what mends it.
    """
    if not isinstance(driver_error(error), _NOT_THERE):
        return
    try:
        check(session.connection, session.schema)
    except psycopg.Error:
        return  # who cannot be asked now is asked again
    except SchemaTooOld as old:
        raise SchemaTooOld(
            f"{old}. It was right when this process started: the database went back to a time before, by a failover "
            "or a restore, or the connection leads to another one now. Go on from a copy that has the schema; if this "
            "one is to be the database, its ledger begins anew: a consumer says at its next start what Kafka has of "
            "its offsets, a Spark query needs a new checkpoint"
        ) from error


def _refuse_too_new(connection: Connection, schema: str, found: tuple[int, int]) -> None:
    version, oldest_reader = found
    if oldest_reader > VERSION:
        raise SchemaTooNew(
            f"schema {schema!r} in {address(connection)} has version {version}, which needs a release that supports "
            f"version {oldest_reader}; this one supports {VERSION}. Upgrade kafka-exactly-once"
        )


def _installed(connection: Connection, schema: str) -> tuple[int, int] | None:
    """Return version and oldest reader, or None when the schema was never made."""
    is_there, made_as = last_row(execute(connection, schema, "has_schema", schema=schema))
    if made_as not in (None, quoted := schema.replace('"', '""')):
        raise ConfigurationError(
            f"schema {schema!r} in {address(connection)} was made as {made_as!r}, and its functions work there: "
            f'ALTER SCHEMA "{quoted}" RENAME TO "{made_as}"'
        )
    return execute(connection, schema, "version").fetchone() if is_there else None


def check_schema_name(schema: str) -> None:
    """Refuse names that Postgres would cut, that are none, or that look like something else where they are written.

    A percent sign is a placeholder to psycopg, and ``$...$`` may end the body of a function.
    """
    # 63 bytes is Postgres' limit, as it is built everywhere; it cuts longer names, with a notice that nobody reads.
    if not schema or len(schema.encode()) > 63 or "\0" in schema or "%" in schema or schema.count("$") > 1:
        raise ConfigurationError(f"schema={schema!r} is not the name of a schema (1 to 63 bytes, no %, at most one $)")
    if schema == "information_schema" or schema.startswith("pg_"):
        raise ConfigurationError(f"schema={schema!r} is one of Postgres' own; give another name")
