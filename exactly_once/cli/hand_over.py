"""``exactly-once hand-over``: let the plain consumer and Spark trade places on a group's offsets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from exactly_once._model import Partition
from exactly_once.ledger.commands import after_halt

from . import options, output
from .plan import changed
from .problems import CommandError
from .servers import Stored, open_cluster, open_database, stored_rows
from .status import beside_logs, lost_rows

# What the Kafka source of Spark takes for the start of a log.
EARLIEST = -2
_HEADER = ("TOPIC", "PARTITION", "NEXT OFFSET", "NOTE")

_DESCRIPTION = """\
Hand the partitions of a group from the plain consumer to Spark, or back, without a gap and without a
duplicate: both go by the same ledger. Stop the old side first. If it released its rows, as both do when
they stop in good order, nothing has to be changed. If it was killed, or stands still, its rows are still owned,
and the new side refuses them: --execute releases them, in one transaction and with a row in the audit
table. The ledger cannot see whether a process is alive: one that still is gets fenced, what it has not
committed is rolled back, and it may take the rows again before the new side does. To Spark the command also
prints where its Kafka source must start."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "hand-over",
        help="let Spark take over from the consumer, or the other way round",
        description=_DESCRIPTION,
        epilog=options.EPILOG,
    )
    parser.add_argument("--to", required=True, choices=("spark", "consumer"), help="who takes the partitions over")
    parser.add_argument("--topic", nargs="+", action="extend", help="only these topics; all that the group has")
    options.add_execute(parser, does="release what is owned", has_reason=True)
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Show what stands in the way of the new side, or clear it away; tell it where to start."""
    settings = options.settings(args)
    settings.opener()
    group_id = settings.required("group_id")
    if args.to == "spark":
        settings.required("bootstrap_servers")
    with open_database(settings) as session:
        rows = stored_rows(session, group_id=group_id)
        if unknown := sorted(set(args.topic or ()) - {row.topic for row in rows}):
            raise CommandError(f"the ledger has no rows of topic {unknown[0]!r} for group {group_id!r}")
        rows = [row for row in rows if args.topic is None or row.topic in args.topic]
        if not rows:
            raise CommandError(
                f"the ledger has no offsets of group {group_id!r}: look at --group-id. (A Spark query that counts "
                "batches has none, and cannot be handed over.)"
            )
        if halted := next((row for row in rows if row.halted), None):
            raise CommandError(
                f"{halted.place} is halted at offset {halted.next_offset} ({halted.halted}): nobody may take it over "
                f"before somebody has looked. {after_halt(group_id, session.schema, halted.place, halted.next_offset)}"
            )
        cluster = open_cluster(settings) if settings.bootstrap_servers else None
        if cluster is not None:
            lost = [row for row in lost_rows(session, rows) if args.topic is None or row.topic in args.topic]
            # At offsets that the log does not have the new side would stop, or start elsewhere.
            for line in beside_logs(rows, cluster, settings.schema, lost=lost):
                if line.problem is not None:
                    raise CommandError(f"{line.stored.place} of group {group_id!r}: {line.problem}")
        owned = [row for row in rows if row.owned and row.owner_kind != args.to]
        if owned and args.execute:
            keys = {
                "group_id": group_id,
                "topics": [row.topic for row in rows],
                "partitions": [row.partition for row in rows],
                "owner_kind": args.to,
                "reason": args.reason,
            }
            with changed(session, ("read_locked", "hand_over"), keys) as (_, found):
                # The offsets at which the owners were fenced.
                rows = [replace(row, next_offset=found[row.place][0]) for row in rows]
    starts = None
    if cluster is not None and args.to == "spark" and (not owned or args.execute):
        stored = {row.place: EARLIEST if row.next_offset is None else row.next_offset for row in rows}
        # Spark wants every partition of a topic named, those without a row too.
        starts = {
            name: {str(n): stored.get(Partition(name, n), EARLIEST) for n in range(topic.partitions)}
            for name, topic in cluster.topics(sorted({row.topic for row in rows})).items()
        }
    _show(rows, owned, starts, args)
    return 0


def _show(
    rows: Sequence[Stored],
    owned: Sequence[Stored],
    starts: dict[str, dict[str, int]] | None,
    args: argparse.Namespace,
) -> None:
    places = {row.place for row in owned}
    group_id = rows[0].group_id
    notes = [f"ready: start the {args.to}, it goes on from these offsets"]
    if owned and not args.execute:
        last = output.ago(min((row.advanced_seconds_ago for row in owned if row.advanced_seconds_ago), default=None))
        owner = f"{owned[0].owner_kind} {owned[0].owner}"
        text = f"dry run: nothing was changed. {owner} has not released its rows; it last moved one {last or 'never'}. "
        notes = [text + "See to it that it has stopped, then pass --execute"]
    elif starts is not None:
        notes = ["ready: start the query with a new checkpoint and, for its Kafka source,"]
    released = "released from" if args.execute else "owned by"
    partitions, cells = [], []
    for row in rows:
        is_owned = row.place in places
        place = {"topic": row.topic, "partition": row.partition, "next_offset": row.next_offset}
        partitions.append(place | {"in_the_way": row.owner if is_owned else None})
        cells.append([*place.values(), f"{released} {row.owner_kind} {row.owner}" if is_owned else None])
    output.show(
        args,
        {
            "executed": args.execute,
            "group_id": group_id,
            "to": args.to,
            "starting_offsets": starts,
            "partitions": partitions,
        },
        _HEADER,
        cells,
        title=[f"group {group_id}, to {args.to}"],
        give=(_HEADER.index("NOTE"), _HEADER.index("TOPIC")),
        notes=notes,
    )
    if starts is not None and not args.json:
        # In one line, however wide: it is copied into a program.
        print(f"  .option(\"startingOffsets\", '{json.dumps(starts)}')")
