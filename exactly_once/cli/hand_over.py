"""``exactly-once hand-over``: let the plain consumer and Spark trade places on a group's offsets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exactly_once._model import Partition
from exactly_once.kafka.admin import Topic
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import Session, cursor_on
from exactly_once.ledger.sql import query

from . import options, output
from .options import Settings
from .problems import CommandError
from .servers import CommandCluster, Stored, open_cluster, open_database, stored_rows
from .status import Line, beside_logs

EARLIEST = -2
"""What the Kafka source of Spark takes for the start of a log."""

_DESCRIPTION = """\
Hand the partitions of a group from the plain consumer to Spark, or back, without a gap and without a
duplicate: both go by the same ledger. Stop the old side first. If it released its rows, as both do when
they stop in good order, nothing has to be changed. If it was killed, or stands still, its rows are still owned,
and the new side refuses them: --execute releases them, in one transaction and with a row in the audit
table. The ledger cannot see whether a process is alive: one that still is gets fenced, what it has not
committed is rolled back, and it may take the rows again before the new side does. To Spark the command also
prints where its Kafka source must start."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "hand-over",
        help="let Spark take over from the consumer, or the other way round",
        description=_DESCRIPTION,
        epilog=options.EPILOG,
    )
    parser.add_argument("--to", required=True, choices=("spark", "consumer"), help="who takes the partitions over")
    parser.add_argument("--topic", nargs="+", action="extend", help="only these topics; all that the group has")
    parser.add_argument("--reason", default="no reason was given", help="kept in the audit table")
    parser.add_argument(
        "--execute", action="store_true", help="release what is owned; without it the command only looks"
    )
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Show what stands in the way of the new side, or clear it away; tell it where to start."""
    settings = options.settings(args)
    settings.opener()
    settings.required("group_id")
    if args.to == "spark":
        settings.required("bootstrap_servers")
    with open_database(settings) as session:
        rows = _rows(session, settings, args.topic)
        cluster = open_cluster(settings) if settings.bootstrap_servers else None
        if cluster is not None:
            _refuse(beside_logs(rows, cluster))
        owned = [row for row in rows if row.owned and row.owner_kind != args.to]
        if owned and args.execute:
            rows = _release(session, rows, args)
    is_ready = not owned or args.execute
    starts = _starts(rows, cluster) if cluster is not None and args.to == "spark" and is_ready else None
    if args.json:
        _print_document(rows, owned, starts, args, settings)
    else:
        _print(rows, owned, starts, args, settings)
    return 0


def _rows(session: Session, settings: Settings, topics: Sequence[str] | None) -> list[Stored]:
    rows = stored_rows(session, group_id=settings.group_id)
    if topics is not None:
        if unknown := sorted(set(topics) - {row.topic for row in rows}):
            raise CommandError(f"the ledger has no rows of topic {unknown[0]!r} for group {settings.group_id!r}")
        rows = [row for row in rows if row.topic in topics]
    if not rows:
        raise CommandError(
            f"the ledger has no offsets of group {settings.group_id!r}: look at --group-id. (A Spark query that counts "
            "batches has none, and cannot be handed over.)"
        )
    if halted := next((row for row in rows if row.halted), None):
        raise CommandError(
            f"{halted.place} is halted ({halted.halted}): nobody may take it over before exactly-once reset "
            f"--topic {halted.topic} --partition {halted.partition}"
        )
    return rows


def _refuse(lines: Sequence[Line]) -> None:
    """Refuse offsets that the log does not have: the new side would stop at them, or start elsewhere."""
    for line in lines:
        if line.problem is not None:
            raise CommandError(f"{line.stored.place} of group {line.stored.group_id!r}: {line.problem}")


def _release(session: Session, rows: Sequence[Stored], args: argparse.Namespace) -> list[Stored]:
    """Release rows; return them with the offsets at which they were fenced."""
    parameters = {
        "group_id": rows[0].group_id,
        "topics": [row.topic for row in rows],
        "partitions": [row.partition for row in rows],
        "owner_kind": args.to,
        "reason": args.reason,
    }
    with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
        cursor = cursor_on(connection)
        for name in ("read_locked", "hand_over"):
            cursor.execute(query(name, session.schema), parameters, prepare=False)
        offsets = {Partition(topic, number): next_offset for topic, number, next_offset in cursor}
        if len(offsets) < len(rows):
            raise CommandError("rows of the ledger were deleted at this very moment; nothing was changed, try again")
    return [replace(row, next_offset=offsets[row.place]) for row in rows]


def _starts(rows: Sequence[Stored], cluster: CommandCluster) -> dict[str, dict[str, int]]:
    """Return ``startingOffsets``: Spark wants every partition of a topic named, those without a row too."""
    topics: dict[str, Topic] = cluster.topics(sorted({row.topic for row in rows}))
    stored = {row.place: row.next_offset for row in rows}
    return {
        name: {str(number): _start(stored.get(Partition(name, number))) for number in range(topic.partitions)}
        for name, topic in topics.items()
    }


def _start(next_offset: int | None) -> int:
    return EARLIEST if next_offset is None else next_offset


def _print_document(
    rows: Sequence[Stored],
    owned: Sequence[Stored],
    starts: dict[str, dict[str, int]] | None,
    args: argparse.Namespace,
    settings: Settings,
) -> None:
    places = {row.place for row in owned}
    document: dict[str, Any] = {
        "executed": args.execute,
        "group_id": settings.group_id,
        "to": args.to,
        "starting_offsets": starts,
        "partitions": [
            {
                "topic": row.topic,
                "partition": row.partition,
                "next_offset": row.next_offset,
                "in_the_way": row.owner if row.place in places else None,
            }
            for row in rows
        ],
    }
    output.print_json(document)


def _print(
    rows: Sequence[Stored],
    owned: Sequence[Stored],
    starts: dict[str, dict[str, int]] | None,
    args: argparse.Namespace,
    settings: Settings,
) -> None:
    places = {row.place for row in owned}
    released = "released from" if args.execute else "owned by"
    print(f"group {settings.group_id}, to {args.to}")
    output.print_table(
        ("TOPIC", "PARTITION", "NEXT OFFSET", "NOTE"),
        [
            (
                row.topic,
                row.partition,
                row.next_offset,
                f"{released} {row.owner_kind} {row.owner}" if row.place in places else None,
            )
            for row in rows
        ],
        give=(3, 0),
    )
    if owned and not args.execute:
        last = output.ago(min((row.advanced_seconds_ago for row in owned if row.advanced_seconds_ago), default=None))
        output.print_lines(
            f"dry run: nothing was changed. {owned[0].owner_kind} {owned[0].owner} has not released its rows; it last "
            f"moved one {last or 'never'}. See to it that it has stopped, then say --execute"
        )
    elif starts is not None:
        print("ready: start the query with a new checkpoint and, for its Kafka source,")
        print(f"  .option(\"startingOffsets\", '{json.dumps(starts)}')")
    else:
        print(f"ready: start the {args.to}, it goes on from these offsets")
