"""``exactly-once publish``: what the filters of producers hold in Postgres, and numbered messages in topics."""

from __future__ import annotations

import argparse
from typing import Any

from psycopg.rows import dict_row

from exactly_once.ledger.session import cursor_on
from exactly_once.ledger.sql import query
from exactly_once.publish.recovery import sequences_in

from . import options, output
from .problems import CommandParser
from .servers import open_cluster, open_database

_STATUS = """\
Show owners and their leases, windows with their keys in flight and unknown, and chains with their gaps. A window is
scanned for that. With --topic the topic is read, too: up to which number each producer's messages are there, and
how many are there beyond a gap. Then the database may be left out, which numbers do not need."""

_QUERIES = {
    "window": "publish_show_window",
    "owners": "publish_show_owners",
    "scopes": "publish_show_scopes",
    "chains": "publish_show_chains",
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("publish", help="look at the filters of producers", description=_STATUS)
    actions = parser.add_subparsers(dest="action", metavar="action", required=True, parser_class=CommandParser)
    status = actions.add_parser(
        "status", help="show owners, windows, chains and sequences", description=_STATUS, epilog=options.EPILOG
    )
    status.add_argument("--topic", nargs="+", action="extend", default=[], help="read the sequences of these topics")
    options.add_common(status)


def run(args: argparse.Namespace) -> int:
    settings = options.settings(args)
    if args.topic:
        open_cluster(settings)  # says within seconds that no broker answers; what reads the topics waits for one
    found: dict[str, Any] = {}
    if settings.connect or settings.conninfo or not args.topic:  # numbers alone need no database
        with open_database(settings) as session, cursor_on(session.connection, dict_row) as cursor:
            for part, name in _QUERIES.items():
                found[part] = cursor.execute(query(name, session.schema), prepare=False, binary=True).fetchall()
        (found["window"],) = found["window"]
    found["sequences"] = [
        {"topic": topic, "producer": name, "persisted": persisted, "beyond_a_gap": len(beyond)}
        for topic in args.topic
        for name, (persisted, beyond) in sorted(sequences_in(settings.admin(), topic).items())
    ]
    if args.json:
        output.print_json(found)
        return 0
    if window := found.pop("window", None):
        seconds = "not agreed yet" if window["seconds"] is None else f"{window['seconds']:g} s"
        output.print_lines(f"window: {seconds}; the younger generation is {window['generation_seconds']:.0f} s old")
    for owner in found.get("owners", ()):  # as the table has no room for the time itself, nor for long names
        del owner["started_at"]
        owner["transactions"], owner["lease_s"] = owner.pop("transactional_id"), owner.pop("lease_seconds")
        owner["started"] = output.ago(owner.pop("started_seconds_ago"))
    for part, rows in found.items():
        print(f"\n{part}: {'' if rows else 'none'}".rstrip())
        if rows:
            texts = [n for n, value in enumerate(rows[0].values()) if isinstance(value, str)]
            output.print_table([column.upper() for column in rows[0]], [list(row.values()) for row in rows], give=texts)
    return 0
