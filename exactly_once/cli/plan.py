"""Plan: which offsets an operator moves, from where to where, and the one transaction that does it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import psycopg

from exactly_once._model import Partition
from exactly_once.errors import DatabaseUnreachable
from exactly_once.kafka.admin import Topic
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import Session, cursor_on
from exactly_once.ledger.sql import query

from .options import Settings
from .problems import CommandError
from .servers import CommandCluster, Log, Stored, open_cluster, stored_rows

_MAX_OFFSET = 2**63 - 1


class Target(NamedTuple):
    """Where offsets are moved to: a kind, and what the kind needs."""

    kind: str
    offset: int | None = None
    time: datetime | None = None

    def __str__(self) -> str:
        value = self.time.isoformat() if self.time else self.offset
        return self.kind if value is None else f"{self.kind} {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What is to become of one partition; without ``new_offset`` its offset stays, whatever it is by then."""

    partition: Partition
    stored: Stored | None
    new_offset: int | None
    log: Log | None

    @property
    def old_offset(self) -> int | None:
        """What the ledger showed when the plan was made."""
        return self.stored.next_offset if self.stored else None

    @property
    def result(self) -> int | None:
        """The offset afterwards, as far as can be told before."""
        return self.old_offset if self.new_offset is None else self.new_offset

    @property
    def again(self) -> int:
        """How many offsets of the log would be applied a second time."""
        return self._in_log(self.result, self.old_offset)

    @property
    def left_out(self) -> int:
        """How many offsets of the log would never be applied; without an offset before, of all that are there."""
        start = self.log.start if self.log and self.old_offset is None else self.old_offset
        return self._in_log(start, self.result)

    def _in_log(self, start: int | None, end: int | None) -> int:
        """Count the offsets from one to another that the log has; without a log, all."""
        if start is None or end is None:
            return 0
        if self.log is not None:
            start, end = max(start, self.log.start), min(end, self.log.end)
        return max(0, end - start)

    @property
    def is_outside(self) -> bool:
        """Whether the offset afterwards is none of the log's."""
        return self.log is not None and self.result is not None and not self.log.start <= self.result <= self.log.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The moves of one topic of one group, in locking order, and the ids that Kafka has for it now."""

    group_id: str
    topic: str
    target: Target
    moves: Sequence[Move]
    topic_id: str | None
    cluster_id: str | None


def add_targets(
    parser: argparse.ArgumentParser, *, keep: str, keep_help: str, needs_topic: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Add the options that say which partitions are moved, where to, and whether really; return those of where to."""
    parser.add_argument("--topic", required=needs_topic, help="the topic")
    parser.add_argument(
        "--partition", type=_partition, nargs="+", action="extend", metavar="N", help="only these of its partitions"
    )
    to = parser.add_mutually_exclusive_group(required=True)
    for kind, text in (("earliest", "where the log starts"), ("latest", "where the log ends now")):
        to.add_argument(f"--to-{kind}", dest="target", action="store_const", const=Target(kind), help=text)
    to.add_argument(
        "--to-committed",
        dest="target",
        action="store_const",
        const=Target("committed"),
        help="what another consumer has committed to Kafka since; partitions where none did stay",
    )
    to.add_argument("--to-offset", dest="target", type=_offset, metavar="N", help="the first offset not yet applied")
    to.add_argument(
        "--to-time",
        dest="target",
        type=_time,
        metavar="ISO-8601",
        help="the first message not older than this, with a zone: 2026-01-31T12:00:00+01:00",
    )
    to.add_argument(keep, dest="target", action="store_const", const=Target("current"), help=keep_help)
    parser.add_argument("--reason", default="no reason was given", help="kept in the audit table")
    parser.add_argument(
        "--execute", action="store_true", help="do it; without it the command only shows what it would do"
    )
    parser.add_argument("--force", action="store_true", help="allow offsets that are not in the log")
    return to


def make_plan(session: Session, settings: Settings, args: argparse.Namespace, *, ask_kafka: bool) -> Plan:
    """Find out what ledger and log have, and choose the offsets.

    :raises CommandError: when the topic, a partition or the group is not there.
    """
    group_id, topic, target = settings.required("group_id"), args.topic, args.target
    stored = {row.place: row for row in stored_rows(session, group_id=group_id, topic=topic)}
    cluster = open_cluster(settings) if ask_kafka else None
    found = _existing(cluster, topic, settings) if cluster else None
    partitions = _partitions(group_id, topic, args.partition, stored, found)
    new = [p for p in partitions if p not in stored]
    if new and target.kind == "current":
        # Whoever is assigned to a partition that was added later starts it at its beginning.
        partitions = [p for p in partitions if p in stored]
        if args.partition or not partitions:
            raise CommandError(
                f"the ledger has no row of {new[0]} for group {group_id!r}: say where it starts, --to-offset N"
            )
    committed = _committed(cluster, group_id, topic, found) if cluster and found and target.kind == "committed" else {}
    if target.kind == "committed":
        partitions = [p for p in partitions if p in committed]
    return Plan(
        group_id=group_id,
        topic=topic,
        target=target,
        moves=_moves(partitions, target, stored, cluster, committed),
        topic_id=found.topic_id if found else None,
        cluster_id=cluster.cluster_id if cluster else None,
    )


def refuse_outside(plan: Plan) -> None:
    """Refuse to leave a partition at an offset that is not in its log.

    :raises CommandError: naming the first of them.
    """
    for move in plan.moves:
        if move.is_outside and move.log is not None:
            raise CommandError(
                f"offset {move.result} of {move.partition} is outside its log, which has offsets {move.log.start} to "
                f"{move.log.end}: choose another, or say --force"
            )


def execute(session: Session, plan: Plan, statement: str, *, reason: str, **parameters: Any) -> Plan:
    """Carry a plan out in one transaction; return it as it was done, with the offsets that were there.

    :raises CommandError: when rows went away meanwhile; nothing was changed then.
    """
    keys: dict[str, Any] = {
        "group_id": plan.group_id,
        "cluster_id": plan.cluster_id,
        "topics": [plan.topic] * len(plan.moves),
        "partitions": [m.partition.number for m in plan.moves],
        "next_offsets": [m.new_offset for m in plan.moves],
        "topic_ids": [plan.topic_id] * len(plan.moves),
        "reason": reason,
        **parameters,
    }
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            cursor = cursor_on(connection)
            for name in ("register_lock", "register_for_operator", "read_locked", statement):
                cursor.execute(query(name, session.schema), keys, prepare=False)
            before = {Partition(topic, number): (old, new) for topic, number, old, new in cursor}
            if len(before) < len(plan.moves):
                raise CommandError(
                    "rows of the ledger were deleted at this very moment; nothing was changed, try again"
                )
    except psycopg.OperationalError as error:
        if error.sqlstate is not None:
            raise
        raise DatabaseUnreachable(
            f"the connection to Postgres was lost on the way: {error}; `exactly-once status` shows whether it was done"
        ) from error
    return _done(plan, before)


def _existing(cluster: CommandCluster, topic: str, settings: Settings) -> Topic:
    found = cluster.topics([topic]).get(topic)
    if found is None:
        raise CommandError(
            f"there is no topic {topic!r} on {settings.bootstrap_servers}: look at --topic and the servers"
        )
    return found


def _partitions(
    group_id: str,
    topic: str,
    numbers: Iterable[int] | None,
    stored: dict[Partition, Stored],
    found: Topic | None,
) -> list[Partition]:
    """Return the partitions that are meant, in locking order."""
    count = found.partitions if found else None
    if not stored and (numbers or found is None):
        raise CommandError(
            f"the ledger has no rows of topic {topic!r} for group {group_id!r}: look at --topic and --group-id"
            + ("; to make the rows of a new group leave out --partition" if numbers and found else "")
        )
    if numbers is None:
        of_ledger = {p for p in stored if count is None or p.number < count}
        return sorted(of_ledger | {Partition(topic, n) for n in range(count or 0)})
    chosen = sorted({Partition(topic, n) for n in numbers})
    for partition in chosen:
        if count is not None and partition.number >= count:
            raise CommandError(f"there is no {partition}: the topic has {count} partitions")
        if count is None and partition not in stored:
            raise CommandError(
                f"the ledger has no row of {partition} for group {group_id!r}: say --bootstrap-servers and "
                "--to-offset N to make it"
            )
    return chosen


def _moves(
    partitions: list[Partition],
    target: Target,
    stored: dict[Partition, Stored],
    cluster: CommandCluster | None,
    committed: dict[Partition, int],
) -> list[Move]:
    logs = cluster.logs(partitions) if cluster else {}
    chosen = dict(committed)
    if target.kind == "offset" and target.offset is not None:
        chosen = dict.fromkeys(partitions, target.offset)
    elif target.kind == "earliest":
        chosen = {p: log.start for p, log in logs.items()}
    elif target.kind == "latest" and cluster:
        chosen = cluster.ends(partitions)
    elif target.kind == "time" and cluster and target.time:
        chosen = cluster.at(partitions, target.time)
    return [Move(partition=p, stored=stored.get(p), new_offset=chosen.get(p), log=logs.get(p)) for p in partitions]


def _committed(cluster: CommandCluster, group_id: str, topic: str, found: Topic) -> dict[Partition, int]:
    """Return what Kafka was told by others than this library; what we told it is where the ledger was, or is."""
    others = cluster.foreign_members(group_id)
    if others:
        raise CommandError(
            f"members that are none of this library's are still in group {group_id!r}: {', '.join(others)}. "
            "Stop every one of them first, or what they commit next is applied again"
        )
    held = cluster.committed(group_id, topic, found.partitions)
    committed = {partition: c.offset for partition, c in held.items() if not c.is_mirrored}
    if not committed:
        raise CommandError(
            f"Kafka holds no offset of group {group_id!r} for {topic!r} that another consumer has committed: the "
            "ledger is where it should be"
        )
    return committed


def _done(plan: Plan, offsets: dict[Partition, tuple[int | None, int | None]]) -> Plan:
    moves = []
    for move in plan.moves:
        old, new = offsets[move.partition]
        stored = replace(move.stored, next_offset=old) if move.stored else None
        moves.append(replace(move, stored=stored, new_offset=new))
    return replace(plan, moves=moves)


def _partition(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text} is not the number of a partition")
    return int(text)


def _offset(text: str) -> Target:
    if not (text.isdecimal() and int(text) <= _MAX_OFFSET):
        raise argparse.ArgumentTypeError(f"{text} is not an offset: 0 or more; see also --to-earliest and --to-latest")
    return Target("offset", offset=int(text))


def _time(text: str) -> Target:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in ISO 8601") from None
    if time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no zone: {text}+00:00, or {text}Z, is UTC")
    if time < datetime.fromtimestamp(0, UTC):
        raise argparse.ArgumentTypeError(f"{text!r} is before 1970")
    return Target("time", time=time)
