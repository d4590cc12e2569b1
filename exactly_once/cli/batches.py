"""Batches: ``exactly-once reset --to-batch``, for groups whose Spark query counts batches instead of offsets."""

from __future__ import annotations

import argparse
from typing import Any

from psycopg.rows import dict_row

from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.sql import query

from . import output
from .options import Settings
from .plan import Target
from .problems import CommandError, UsageError
from .servers import open_database

KIND = "batch"
_MAX_BATCH = 2**63 - 2


def add_target(to: argparse._MutuallyExclusiveGroup) -> None:
    """Add the option to where offsets may be moved to."""
    to.add_argument(
        "--to-batch",
        dest="target",
        type=_batch,
        metavar="N",
        help="of a Spark query that counts batches: the last batch whose rows are in the table, -1 for none",
    )


def reset(settings: Settings, args: argparse.Namespace) -> int:
    """Show which batch would count as the last one, or say so; fence the query, un-halt its group.

    :raises CommandError: when the group counts no batches.
    """
    if args.topic is not None or args.partition is not None:
        raise UsageError("--to-batch is about a group without topics: leave out --topic and --partition")
    wanted = {"group_id": settings.required("group_id"), "batch_id": args.target.offset, "reason": args.reason}
    with (
        open_database(settings) as session,
        session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _),
        connection.cursor(row_factory=dict_row) as cursor,
    ):
        before = cursor.execute(query("spark_counted", session.schema), wanted, prepare=False).fetchone()
        if before is None:
            raise CommandError(
                f"group {wanted['group_id']!r} counts no batches: look at --group-id; offsets have --to-offset"
            )
        if args.execute:
            cursor.execute(query("spark_reset", session.schema), wanted, prepare=False)
    _tell(before, args, wanted["group_id"])
    return 0


def _tell(before: dict[str, Any], args: argparse.Namespace, group_id: str) -> None:
    owner = before["owner_name"] if before["owner_token"] is not None else None
    old, new = before["batch_id"], args.target.offset
    if args.json:
        document = {"executed": args.execute, "group_id": group_id, "query_id": before["query_id"]}
        output.print_json(document | {"old_batch": old, "new_batch": new, "owner": owner, "halted": before["halted"]})
        return
    print(f"group {group_id}, query {before['query_id']}, to {args.target}")
    fences = f"fences {owner}" if owner else None
    goes_on = f"no longer halted: {before['halted']}" if before["halted"] else None
    note = "; ".join(filter(None, (fences, goes_on))) or None
    output.print_table(("OLD BATCH", "", "NEW BATCH", "NOTE"), [(old, "->", new, note)])
    print("done" if args.execute else "dry run: nothing was changed; --execute does it")


def _batch(text: str) -> Target:
    if text != "-1" and not (text.isdecimal() and int(text) <= _MAX_BATCH):
        raise argparse.ArgumentTypeError(f"{text} is not a batch: -1, 0 or more")
    return Target(KIND, offset=int(text))
