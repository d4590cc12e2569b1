"""``exactly-once migrate``: make the schema of the ledger, or bring it up to date."""

from __future__ import annotations

import argparse

import psycopg

from exactly_once.ledger import migrate as schemas
from exactly_once.ledger.session import Connection, address
from exactly_once.ledger.sql import grants

from . import options, output
from .problems import CommandError, UsageError
from .servers import open_database

_ROLE = "exactly_once_worker"  # of the statements that --sql prints, where --role names no other
_DESCRIPTION = """\
Make the schema of the ledger or bring it up to date, in one transaction; safe to run from any number of
deployments at once. With --role that role is granted what a consumer needs, and no more; it must exist.
With --sql nothing is asked or changed: the statements for a new schema are printed, for whoever may run
them:  exactly-once migrate --sql --role bank_worker | psql -v ON_ERROR_STOP=1 ..."""
_NOT_GRANTED = "01007"  # the state of that warning of Postgres
_HEAD = "-- The schema of kafka-exactly-once, and what a role needs to consume with it. The role must exist.\n"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "migrate", help="make the schema or bring it up to date", description=_DESCRIPTION, epilog=options.EPILOG
    )
    parser.add_argument("--sql", action="store_true", help="print the statements for a new schema, do nothing")
    role = f"the role that consumes (with --sql: {_ROLE})"
    parser.add_argument("--role", action=options.Once, metavar="NAME", help=role)
    options.add_common(parser)


def _grant(connection: Connection, schema: str, role: str) -> None:
    """Grant what a worker needs.

    :raises CommandError: for what our own role may not grant, which Postgres only warns of.
    """
    refused: list[str] = []

    def take_note(notice: psycopg.errors.Diagnostic) -> None:
        if notice.sqlstate == _NOT_GRANTED:
            refused.append(str(notice.message_primary))

    connection.add_notice_handler(take_note)
    try:
        connection.execute("SET LOCAL client_min_messages = warning")
        connection.execute(grants(schema, role))
    finally:
        connection.remove_notice_handler(take_note)
    if refused:
        raise CommandError(f"{refused[0]} to role {role}; nothing was done. The owner of schema {schema} may grant it")


def run(args: argparse.Namespace) -> int:
    settings = options.settings(args)
    if args.role is not None and (not args.role or "\0" in args.role):
        raise UsageError("--role is not the name of a role")
    if args.role == "public":  # also in quotes
        raise UsageError("--role public would let everybody move offsets; name the role that consumes")
    if args.sql:
        text = f"{_HEAD}BEGIN;\n\n{schemas.as_sql(settings.schema, args.role or _ROLE)}\nCOMMIT;\n"
        if args.json:
            output.print_json({"sql": text})
        else:
            print(text, end="")
        return 0
    # The schema need not be there, or may be of an older version.
    with open_database(settings, check=False) as session:
        where = address(session.connection)
        # One transaction for both: grants given at the same time by two processes would collide.
        with session.connection.transaction():
            try:
                ran = schemas.migrate(session.connection, settings.schema)
                version = schemas.version(session.connection, settings.schema)
            except psycopg.errors.InsufficientPrivilege as error:
                raise CommandError(
                    f"{error.diag.message_primary}: who migrates needs CREATE ON DATABASE, or owns the schema; or "
                    "give `exactly-once migrate --sql` to somebody who may run it"
                ) from error
            if args.role is not None:
                _grant(session.connection, settings.schema, args.role)
    done = f"ran migration{'s' if len(ran) > 1 else ''} {', '.join(map(str, ran))}"
    if not ran:
        done = f"nothing to do, version {version} is there"
    notes = [f"schema {settings.schema} in {where}: {done}"]
    notes += [] if args.role is None else [f"role {args.role} may consume with it"]
    found = {"database": where, "schema": settings.schema, "version": version, "migrations": ran}
    output.show(args, {**found, "role": args.role}, (), (), notes=notes, done=done)
    return 0
