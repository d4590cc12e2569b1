"""``exactly-once reset``: move offsets, fence whoever owns them, let halted partitions go on."""

from __future__ import annotations

import argparse

from exactly_once._model import QUERY
from exactly_once.ledger import dead_letters
from exactly_once.ledger.commands import command

from . import options, output, plan
from .options import Settings
from .plan import Move, Plan, Target
from .problems import CommandError, UsageError
from .servers import open_cluster, open_database, stored_rows

_BATCH, _FORGET = "batch", "forget"
_MAX_BATCH = 2**63 - 2
_DESCRIPTION = """\
Move the offsets of one topic of a group, or with --to-current only fence, release and un-halt its
partitions. A dry run unless --execute is given; then everything happens in one transaction, is kept in
the audit table, and a row that somebody deleted is made again. A live owner is fenced: what it has not
committed is rolled back, and it goes on from the new offset within seconds. Effects stay: moving
back applies messages a second time, moving on leaves messages out. --to-committed is for going on after
an ordinary consumer has worked for the group. --to-batch is for a Spark
query whose batches the ledger counts (ledger="batch-id", or the data source): they have no topics.
--forget deletes the rows of partitions that are gone for good, of which `exactly-once status --check` would
report a problem. What comes back begins as new to the group: a topic by start=, a partition at its log's start."""


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
    a_batch = options.number(int, "is not a batch: -1, 0 or more", least=-1, most=_MAX_BATCH)
    to.add_argument(
        "--to-batch",
        action=options.Once,
        dest="target",
        type=lambda text: Target(_BATCH, offset=a_batch(text)),
        metavar="N",
        help="of a Spark query that counts batches: the last batch whose rows are in the table, -1 for none",
    )
    to.add_argument(
        "--forget",
        dest="target",
        action="store_const",
        const=Target(_FORGET),
        help="delete the rows of partitions that the topic does not have any more, or of a topic that is gone",
    )
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings(args)
    settings.opener()
    settings.required("group_id")
    if args.target.kind == _BATCH:
        return _reset_batch(settings, args)
    if args.topic is None:
        raise UsageError("the following arguments are required: --topic")
    if args.topic.startswith(QUERY):
        raise UsageError(f"{args.topic} has batch ids, no offsets: pass --to-batch N")
    is_kept = args.target.kind == "current"
    # An offset that is forced is compared with nothing, so it can be set while Kafka is away.
    is_blind = args.force and args.target.kind == "offset" and not settings.bootstrap_servers
    if not is_kept and not is_blind:
        settings.required("bootstrap_servers")
    if args.target.kind == _FORGET:
        return _forget(settings, args)
    with open_database(settings) as session:
        chosen = plan.make_plan(session, settings, args, ask_kafka=not is_kept and not is_blind)
        # No consumer would take offsets for rows that belong to another topic or cluster.
        for move in chosen.moves:
            for what, now in (("topic_id", chosen.topic_id), ("cluster_id", chosen.cluster_id)):
                stored = getattr(move.stored, what, None)
                if None not in (stored, now) and stored != now:
                    adopt = command(
                        "adopt", chosen.group_id, session.schema, "--topic", chosen.topic, *args.target.option
                    )
                    raise CommandError(
                        f"{move.partition} of group {chosen.group_id!r} belongs to {what} {stored}, Kafka has {now} "
                        f"now. If that is meant: {adopt}"
                    )
        if not args.force:
            plan.refuse_outside(chosen)
        if args.execute:
            chosen = plan.execute(session, chosen, "reset", reason=args.reason)
    plan.show(chosen, args)
    return 0


def _forget(settings: Settings, args: argparse.Namespace) -> int:
    """Show the rows of partitions that Kafka does not have, or delete them.

    :raises CommandError: when there are none, or they are another cluster's and that is not forced.
    """
    if args.partition is not None:
        raise UsageError("--forget is about all partitions of the topic that are gone: leave out --partition")
    group_id, topic = settings.required("group_id"), args.topic
    with open_database(settings) as session:
        cluster = open_cluster(settings)
        found = cluster.topic(topic)
        stored = stored_rows(session, group_id=group_id, topic=topic)
        gone = [row for row in stored if found is None or row.partition >= found.partitions]
        if not gone:
            raise CommandError(
                f"the ledger has no rows of {topic!r} for group {group_id!r} that Kafka has no partitions of: there is "
                "nothing to forget"
            )
        other = next((row for row in gone if row.cluster_id is None or row.cluster_id != cluster.cluster_id), None)
        if other is not None and not args.force:
            owner = f"cluster {other.cluster_id}" if other.cluster_id else "a cluster that is not known"
            raise CommandError(
                f"{other.place} of group {group_id!r} belongs to {owner}, this is cluster {cluster.cluster_id}: look "
                "at --bootstrap-servers. If that cluster is gone for good, or is this one, pass --force"
            )
        chosen = Plan(
            group_id=group_id,
            topic=topic,
            target=args.target,
            moves=[Move(partition=row.place, stored=row, new_offset=None, log=None) for row in gone],
            topic_id=None,
            cluster_id=cluster.cluster_id,
        )
        if args.execute:
            chosen = plan.execute(session, chosen, "forget", reason=args.reason)
        letters = dead_letters.find(session.connection, schema=session.schema, group_id=group_id, topic=topic)
    numbers = {row.partition for row in gone}
    kept = [letter for letter in letters if letter.partition in numbers]
    replay = command("dead-letters replay", group_id, session.schema, "--topic", topic)
    notes = [f"{len(kept)} dead letters of them stay, for `{replay}` or `drop`"] if kept else []
    output.show(
        args,
        {
            "executed": args.execute,
            "group_id": group_id,
            "topic": topic,
            "partitions": [
                {"partition": row.partition, "old_offset": move.old_offset, "owner": row.owner, "halted": row.halted}
                for row, move in zip(gone, chosen.moves, strict=True)
            ],
            "dead_letters": [letter.id for letter in kept],
        },
        ("PARTITION", "OLD OFFSET", "NOTE"),
        [(row.partition, move.old_offset, row.note) for row, move in zip(gone, chosen.moves, strict=True)],
        title=[
            f"group {group_id}, topic {topic}, which "
            + ("is gone" if found is None else f"has {found.partitions} partitions")
        ],
        notes=[*notes, output.ending(args)],
    )
    return 0


def _reset_batch(settings: Settings, args: argparse.Namespace) -> int:
    """Show which batch would count as the last one, or set it; fence the query, un-halt its group.

    :raises CommandError: when the group counts no batches, or those of several queries.
    """
    if args.partition is not None or (args.topic is not None and not args.topic.startswith(QUERY)):
        raise UsageError(f"--to-batch is about queries: leave out --partition, and --topic unless it is {QUERY}ID")
    group_id = settings.required("group_id")
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
        chosen = Plan(
            group_id=group_id,
            topic=stored.topic,
            target=args.target,
            moves=[Move(partition=stored.place, stored=stored, new_offset=args.target.offset + 1, log=None)],
            topic_id=stored.topic_id,
            cluster_id=stored.cluster_id,
        )
        if args.execute:
            chosen = plan.execute(session, chosen, "reset", reason=args.reason)
    query_id = stored.topic.removeprefix(QUERY)
    old, new = (chosen.moves[0].old_offset or 0) - 1, args.target.offset
    document = {"executed": args.execute, "group_id": group_id, "query_id": query_id}
    output.show(
        args,
        document | {"old_batch": old, "new_batch": new, "owner": stored.owner, "halted": stored.halted},
        ("OLD BATCH", "", "NEW BATCH", "NOTE"),
        [(old, "->", new, stored.note)],
        title=[f"group {group_id}, query {query_id}, to {args.target}"],
        notes=[output.ending(args)],
    )
    return 0
