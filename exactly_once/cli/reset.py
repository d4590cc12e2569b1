"""``exactly-once reset``: move offsets, fence whoever owns them, let halted partitions go on."""

from __future__ import annotations

import argparse

from exactly_once._model import QUERY

from . import batches, options, plan
from .problems import CommandError, UsageError
from .servers import open_database

_DESCRIPTION = """\
Move the offsets of one topic of a group, or with --to-current only fence, release and un-halt its
partitions. A dry run unless --execute is given; then everything happens in one transaction, is kept in
the audit table, and a row that somebody deleted is made again. A live owner is fenced: what it has not
committed is rolled back, and it goes on from the new offset within seconds. Effects stay: moving
back applies messages a second time, moving on leaves messages out. --to-committed is for going on after
an ordinary consumer has worked for the group. --to-batch is for a Spark
query whose batches the ledger counts (ledger="batch-id", or the data source): they have no topics."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "reset", help="move the offsets of a topic, with fencing", description=_DESCRIPTION, epilog=options.EPILOG
    )
    to = plan.add_targets(
        parser,
        keep="--to-current",
        keep_help="leave the offsets; fence and release owners, un-halt (no brokers needed)",
        needs_topic=False,
    )
    batches.add_target(to)
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings(args)
    settings.opener()
    settings.required("group_id")
    if args.target.kind == batches.KIND:
        return batches.reset(settings, args)
    if args.topic is None:
        raise UsageError("the following arguments are required: --topic")
    if args.topic.startswith(QUERY):
        raise UsageError(f"{args.topic} has batch ids, no offsets: say --to-batch N")
    is_kept = args.target.kind == "current"
    # An offset that is forced is compared with nothing, so it can be set while Kafka is away.
    is_blind = args.force and args.target.kind == "offset" and not settings.bootstrap_servers
    if not is_kept and not is_blind:
        settings.required("bootstrap_servers")
    with open_database(settings) as session:
        chosen = plan.make_plan(session, settings, args, ask_kafka=not is_kept and not is_blind)
        # No consumer would take offsets for rows that belong to another topic or cluster.
        for move in chosen.moves:
            for what, now in (("topic_id", chosen.topic_id), ("cluster_id", chosen.cluster_id)):
                stored = getattr(move.stored, what, None)
                if None not in (stored, now) and stored != now:
                    raise CommandError(
                        f"{move.partition} of group {chosen.group_id!r} belongs to {what} {stored}, Kafka has {now} "
                        f"now. If that is meant: exactly-once adopt --topic {chosen.topic} with the same --to-..."
                    )
        if not args.force:
            plan.refuse_outside(chosen)
        if args.execute:
            chosen = plan.execute(session, chosen, "reset", reason=args.reason)
    plan.show(chosen, args)
    return 0
