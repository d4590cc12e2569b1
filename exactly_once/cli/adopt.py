"""``exactly-once adopt``: declare that a group's offsets belong to the topic and cluster of today."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace

from exactly_once.ledger.commands import command

from . import options, plan
from .problems import CommandError
from .servers import open_database

_DESCRIPTION = """\
A topic that was deleted and made again, or that moved to another cluster, has other offsets than the
ledger has, so consumers refuse to start. This command gives the rows of a group the ids that Kafka has
now, and offsets by one of --to-... or --keep-offsets; rows that have these ids are left alone. A dry run
unless --execute is given; then everything happens in one transaction, is kept in the audit table, and a
live owner is fenced."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "adopt",
        help="take a recreated topic or another cluster for the ledger's",
        description=_DESCRIPTION,
        epilog=options.EPILOG,
    )
    plan.add_targets(
        parser,
        keep="--keep-offsets",
        keep_help="leave the offsets: the new log has the same messages at the same places",
    )
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings(args)
    settings.opener()
    for key in ("group_id", "bootstrap_servers"):
        settings.required(key)
    with open_database(settings) as session:
        chosen = plan.make_plan(session, settings, args, ask_kafka=True)
        rows = [move.stored for move in chosen.moves if move.stored]
        if not rows:
            raise CommandError(
                f"group {chosen.group_id!r} has no rows of topic {chosen.topic!r}: there is nothing to adopt"
            )
        # What belongs to them already is left alone: its offsets are not moved by the wrong command.
        now = (chosen.cluster_id, chosen.topic_id)
        own = [row.place.number for row in rows if (row.cluster_id, row.topic_id) == now]
        if len(own) == len(rows):
            topic_of = ("--topic", chosen.topic)
            reset = command("reset", chosen.group_id, session.schema, *topic_of, *args.target.option)
            raise CommandError(
                f"the rows belong to topic id {chosen.topic_id} of cluster {chosen.cluster_id} already: there is "
                "nothing to adopt" + (f". To move offsets: {reset}" if args.target.kind != "current" else "")
            )
        chosen = replace(chosen, moves=[move for move in chosen.moves if move.partition.number not in own])
        rows = [move.stored for move in chosen.moves if move.stored]
        if not args.force:
            plan.refuse_outside(chosen)
        if args.execute:
            chosen = plan.execute(session, chosen, "adopt", reason=args.reason)
    topic_ids, cluster_ids = _ids(row.topic_id for row in rows), _ids(row.cluster_id for row in rows)
    identity = [f"topic id {topic_ids} -> {chosen.topic_id}", f"cluster  {cluster_ids} -> {chosen.cluster_id}"]
    if own:
        identity.append(f"left alone, as they belong to these already: partitions {', '.join(map(str, sorted(own)))}")
    if args.target.kind != "current":
        identity.append(
            "what was applied of the new topic before it was noticed comes again if it is behind the offset"
        )
    plan.show(chosen, args, identity)
    return 0


def _ids(ids: Iterable[str | None]) -> str:
    return ", ".join(sorted({found or "unknown" for found in ids}))
