"""Batches: ``exactly-once reset --to-batch``, for the rows of the ledger that have batch ids of a Spark query."""

from __future__ import annotations

import argparse

from exactly_once._model import QUERY

from . import output
from .options import Settings
from .plan import Move, Plan, Target, execute
from .problems import CommandError, UsageError
from .servers import open_database, stored_rows

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

    :raises CommandError: when the group counts no batches, or those of several queries.
    """
    if args.partition is not None or (args.topic is not None and not args.topic.startswith(QUERY)):
        raise UsageError(f"--to-batch is about queries: leave out --partition, and --topic unless it is {QUERY}ID")
    group_id, offset = settings.required("group_id"), args.target.offset + 1
    with open_database(settings) as session:
        rows = stored_rows(session, group_id=group_id, topic=args.topic, counts_batches=True)
        # Where there are several, that of the query which has counted a batch.
        counted = [row for row in rows if row.next_offset or row.halted] or rows
        if not counted:
            raise CommandError(f"group {group_id!r} counts no batches: look at --group-id; offsets have --to-offset")
        if len(counted) > 1:
            names = " or ".join(f"--topic {row.topic}" for row in counted)
            raise CommandError(f"group {group_id!r} counts the batches of several queries: say {names}")
        (stored,) = counted
        move = Move(partition=stored.place, stored=stored, new_offset=offset, log=None)
        plan = Plan(
            group_id=group_id,
            topic=stored.topic,
            target=args.target,
            moves=[move],
            topic_id=stored.topic_id,
            cluster_id=stored.cluster_id,
        )
        if args.execute:
            plan = execute(session, plan, "reset", reason=args.reason)
    query_id, owner = stored.topic.removeprefix(QUERY), stored.owner
    old, new = (plan.moves[0].old_offset or 0) - 1, args.target.offset
    fences = f"fences {owner}" if owner else None
    goes_on = f"no longer halted: {stored.halted}" if stored.halted else None
    note = "; ".join(filter(None, (fences, goes_on))) or None
    document = {"executed": args.execute, "group_id": plan.group_id, "query_id": query_id}
    output.show(
        args,
        document | {"old_batch": old, "new_batch": new, "owner": owner, "halted": stored.halted},
        ("OLD BATCH", "", "NEW BATCH", "NOTE"),
        [(old, "->", new, note)],
        title=[f"group {plan.group_id}, query {query_id}, to {args.target}"],
        notes=[output.ending(args)],
    )
    return 0


def _batch(text: str) -> Target:
    if text != "-1" and not (text.isdecimal() and int(text) <= _MAX_BATCH):
        raise argparse.ArgumentTypeError(f"{text} is not a batch: -1, 0 or more")
    return Target(KIND, offset=int(text))
