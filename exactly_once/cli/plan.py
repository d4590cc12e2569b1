"""Plan: which offsets an operator moves, from where to where, what shows it, and the transaction that does it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import psycopg

from exactly_once._model import Partition
from exactly_once.errors import DatabaseUnreachable
from exactly_once.kafka.admin import Topic
from exactly_once.ledger import dead_letters
from exactly_once.ledger.commands import command
from exactly_once.ledger.dead_letters import DeadLetter
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Connection, Session, cursor_on
from exactly_once.ledger.sql import query

from . import options, output
from .options import Settings
from .problems import CommandError
from .servers import CommandCluster, Log, Stored, open_cluster, stored_rows

_HEADER = ("PARTITION", "OLD OFFSET", "", "NEW OFFSET", "LOG START", "LOG END", "NOTE")
_NAMED = 5  # dead letters; `dead-letters list` has all


class Target(NamedTuple):
    """Where offsets are moved to: a kind, and what the kind needs."""

    kind: str
    offset: int | None = None
    time: datetime | None = None

    def __str__(self) -> str:
        return " ".join((self.kind, *self._values))

    @property
    def option(self) -> tuple[str, ...]:
        """The option that says it; offsets that stay have one of its own in each command."""
        return (f"--to-{self.kind}", *self._values)

    @property
    def _values(self) -> tuple[str, ...]:
        value = self.time.isoformat() if self.time else self.offset
        return () if value is None else (str(value),)


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
        """The offset afterwards, as far as it is known before."""
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

    @property
    def gone(self) -> int:
        """How many offsets that were never applied are passed over, because the log has lost them."""
        if self.log is None or self.old_offset is None or self.result is None:
            return 0
        return max(0, min(self.result, self.log.start) - self.old_offset)

    def _in_log(self, start: int | None, end: int | None) -> int:
        """Count the offsets from one to another that the log has; without a log, all."""
        if start is None or end is None:
            return 0
        if self.log is not None:
            start, end = max(start, self.log.start), min(end, self.log.end)
        return max(0, end - start)

    def brings_again(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter's message is applied again: it is in the log, as far as that is known."""
        if self.result is None or self.old_offset is None:
            return False
        is_there = self.log is None or self.log.start <= letter.message_offset < self.log.end
        return is_there and self.result <= letter.message_offset < self.old_offset

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
    letters: Sequence[DeadLetter] = ()
    """The dead letters whose messages come again: they are dropped, or a replay would apply them once more."""
    left: Sequence[int] = ()
    """The partitions that stay, because Kafka holds no offset of theirs that another consumer has committed."""


def add_targets(
    parser: argparse.ArgumentParser, *, keep: str, keep_help: str, needs_topic: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Add options for which partitions are moved, where to, and whether really; return those of where to."""
    parser.add_argument("--topic", action=options.Once, required=needs_topic, help="the topic")
    no_offset = "is not an offset: 0 or more; see also --to-earliest and --to-latest"
    an_offset = options.number(int, no_offset, least=0, most=options.INT64)
    parser.add_argument(
        "--partition",
        type=options.partition,
        nargs="+",
        action="extend",
        metavar="N",
        help="only these of its partitions",
    )
    to = parser.add_mutually_exclusive_group(required=True)
    committed = "what another consumer has committed to Kafka since; partitions where none did stay"
    for option, kind, text in (
        ("--to-earliest", "earliest", "where the log starts"),
        ("--to-latest", "latest", "where the log ends now"),
        ("--to-committed", "committed", committed),
        (keep, "current", keep_help),
    ):
        to.add_argument(option, dest="target", action="store_const", const=Target(kind), help=text)
    to.add_argument(
        "--to-offset",
        action=options.Once,
        dest="target",
        type=lambda text: Target("offset", offset=an_offset(text)),
        metavar="N",
        help="the first offset not yet applied",
    )
    to.add_argument(
        "--to-time",
        action=options.Once,
        dest="target",
        type=_time,
        metavar="ISO-8601",
        help="the first message not older than this, with a zone: 2026-01-31T12:00:00+01:00",
    )
    options.add_execute(parser, has_reason=True)
    parser.add_argument("--force", action="store_true", help="allow offsets that are not in the log")
    return to


def make_plan(session: Session, settings: Settings, args: argparse.Namespace, *, ask_kafka: bool) -> Plan:
    """Find out what ledger and log have, and choose the offsets.

    :raises CommandError: when the topic, a partition or the group is not there.
    """
    group_id, topic, target = settings.required("group_id"), args.topic, args.target
    stored = {row.place: row for row in stored_rows(session, group_id=group_id, topic=topic)}
    cluster = open_cluster(settings) if ask_kafka else None
    found = cluster.topic(topic) if cluster else None
    if cluster and found is None:
        forget = command("reset", group_id, settings.schema, "--topic", topic, "--forget")
        raise CommandError(
            f"there is no topic {topic!r} on {settings.bootstrap_servers}: look at --topic and the servers"
            + (f"; if it is gone for good: {forget}" if stored else "")
        )
    # Which were there before all rows of the topic were deleted: each may be made again by itself.
    _, had = (set(), set()) if stored else Ledger(session, group_id=group_id, owner_kind="consumer").known([topic])
    partitions = _partitions(group_id, topic, args.partition, stored.keys() | had, found)
    new = [p for p in partitions if p not in stored]
    if new and target.kind == "current":
        # Whoever is assigned to a partition that was added later starts it at its beginning.
        partitions = [p for p in partitions if p in stored]
        if args.partition or not partitions:
            raise CommandError(
                f"the ledger has no row of {new[0]} for group {group_id!r}: pass --to-offset N, where it starts"
            )
    chosen: Mapping[Partition, int] = {}
    left: list[Partition] = []
    if target.kind == "committed" and cluster and found:
        chosen = _committed(cluster, group_id, topic, found)
        left = [p for p in partitions if p not in chosen]
        if left and not stored:
            # Rows of a part of a topic would make a worker take the others for added, or for deleted by somebody.
            raise CommandError(
                f"the ledger has no rows of topic {topic!r} for group {group_id!r}, and Kafka no offset of "
                f"{', '.join(map(str, left))} that another consumer has committed: make the rows with --to-earliest, "
                "--to-latest or --to-time first"
            )
        partitions = [p for p in partitions if p in chosen]
    logs = cluster.logs(partitions) if cluster else {}
    if target.kind == "offset" and target.offset is not None:
        chosen = dict.fromkeys(partitions, target.offset)
    elif target.kind == "earliest":
        chosen = {p: log.start for p, log in logs.items()}
    elif target.kind == "latest" and cluster:
        # Where a reader of committed messages would stop; the log's end may lie behind an open transaction.
        chosen = cluster.ends(partitions)
    elif target.kind == "time" and cluster and target.time:
        chosen = cluster.at(partitions, target.time)
    plan = Plan(
        group_id=group_id,
        topic=topic,
        target=target,
        moves=[Move(partition=p, stored=stored.get(p), new_offset=chosen.get(p), log=logs.get(p)) for p in partitions],
        topic_id=found.topic_id if found else None,
        cluster_id=cluster.cluster_id if cluster else None,
        left=[p.number for p in left],
    )
    return replace(plan, letters=_letters(session.connection, session.schema, plan))


def refuse_outside(plan: Plan) -> None:
    """Refuse to leave a partition at an offset that is not in its log.

    :raises CommandError: naming the first of them.
    """
    for move in plan.moves:
        if move.is_outside and move.log is not None:
            raise CommandError(
                f"offset {move.result} of {move.partition} is outside its log, which has offsets {move.log.start} to "
                f"{move.log.end}: choose another, or pass --force"
            )


def execute(session: Session, plan: Plan, statement: str, *, reason: str) -> Plan:
    """Carry a plan out in one transaction; return it as it was done, with the offsets that were there.

    :raises CommandError: when rows went away meanwhile; nothing was changed then.
    """
    # One array for each column: all rows are changed by one statement, in the order in which they were locked.
    keys: dict[str, Any] = {
        "group_id": plan.group_id,
        "cluster_id": plan.cluster_id,
        "topics": [plan.topic] * len(plan.moves),
        "partitions": [m.partition.number for m in plan.moves],
        "next_offsets": [m.new_offset for m in plan.moves],
        "topic_ids": [plan.topic_id] * len(plan.moves),
        "owner_epochs": [m.stored.owner_epoch if m.stored else None for m in plan.moves],
        "reason": reason,
    }
    statements = ("register_lock", "register_for_operator", "read_locked", statement)
    with changed(session, statements, keys) as (connection, before):
        moves = []
        for move in plan.moves:
            old, new = before[move.partition]
            stored = replace(move.stored, next_offset=old) if move.stored else None
            moves.append(replace(move, stored=stored, new_offset=new))
        plan = replace(plan, moves=moves)
        plan = replace(plan, letters=_letters(connection, session.schema, plan))
        for letter in plan.letters:
            dead_letters.settle(connection, letter.id, "dropped", schema=session.schema)
    return plan


@contextlib.contextmanager
def changed(
    session: Session, statements: Sequence[str], keys: Mapping[str, Any]
) -> Iterator[tuple[Connection, dict[Partition, list[Any]]]]:
    """Execute statements in one transaction; yield it, and for each partition what the last of them returned.

    :raises CommandError: when that lacks some of the partitions of ``keys``; nothing is changed then.
    """
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            cursor = cursor_on(connection)
            for name in statements:
                cursor.execute(query(name, session.schema), keys, prepare=False)
            found = {Partition(topic, number): rest for topic, number, *rest in cursor}
            if len(found) < len(keys["topics"]):
                raise CommandError(
                    "rows of the ledger were deleted or taken at this very moment; nothing was changed, try again"
                )
            yield connection, found
    except psycopg.OperationalError as error:
        # With a state the server has answered, and has rolled back; without, COMMIT may be on its way.
        if error.sqlstate is not None:
            raise
        status = command("status", keys["group_id"], session.schema)
        raise DatabaseUnreachable(
            f"the connection to Postgres was lost on the way: {error}; `{status}` shows whether it was done"
        ) from error


def show(plan: Plan, args: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Print a plan, or what was done; ``more`` are lines for people between title and table."""
    rows = [move.stored for move in plan.moves if move.stored]
    topic_ids = {row.topic_id for row in rows} | {plan.topic_id}
    cluster_ids = {row.cluster_id for row in rows} | {plan.cluster_id}
    # Where offsets before and after are of two logs, their difference counts nothing.
    is_one_log = len(topic_ids - {None}) <= 1 and len(cluster_ids - {None}) <= 1
    partitions, cells = [], []
    for m in plan.moves:
        row = m.stored
        partitions.append(
            {
                "partition": m.partition.number,
                "old_offset": m.old_offset,
                "new_offset": m.result,
                "again": m.again if is_one_log and m.old_offset is not None else None,
                "left_out": m.left_out if is_one_log else None,
                "log_start": m.log.start if m.log else None,
                "log_end": m.log.end if m.log else None,
                "is_new": row is None,
                "owner": row.owner if row else None,
                "halted": row.halted if row else None,
                "old_topic_id": row.topic_id if row else None,
                "old_cluster_id": row.cluster_id if row else None,
            }
        )
        note = "new row" if row is None else row.note
        cells.append([m.partition.number, m.old_offset, "->", m.result, *(m.log or (None, None)), note])
    output.show(
        args,
        {
            "executed": args.execute,
            "group_id": plan.group_id,
            "topic": plan.topic,
            "to": str(plan.target),
            "topic_id": plan.topic_id,
            "cluster_id": plan.cluster_id,
            "partitions": partitions,
            "dead_letters": [letter.id for letter in plan.letters],
        },
        _HEADER,
        cells,
        title=[f"group {plan.group_id}, topic {plan.topic}, to {plan.target}", *more],
        give=(_HEADER.index("NOTE"),),
        notes=[*_effects(plan, is_one_log=is_one_log, is_done=args.execute), output.ending(args)],
    )


def _effects(plan: Plan, *, is_one_log: bool, is_done: bool) -> list[str]:
    """Say what becomes of messages, and what is not known of them."""
    # An owner that lives goes on meanwhile, so a dry run counts for this moment.
    again, left_out = sum(m.again for m in plan.moves), sum(m.left_out for m in plan.moves)
    gone = sum(m.gone for m in plan.moves)
    verb, other, drop = "would come", "would be left out", "would be dropped"
    if is_done:
        verb, other, drop = "come", "are left out", "are dropped"
    # As after a failover that lost the rows: effects may be there, or may have gone with them.
    blank = [m for m in plan.moves if m.old_offset is None and (m.log is None or m.log.start < m.log.end)]
    effects = [f"{again} {verb} again, their effects a second time"] if again else []
    # Whoever committed them to Kafka has had their effects, or left them out itself.
    why = ", which another consumer has committed" if plan.target.kind == "committed" else ", without effects"
    # Effects of messages from its offset on may be there, which is why it was halted.
    halted = [m for m in plan.moves if m.stored and m.stored.halted]
    effects += [f"{left_out} {other}" + ("" if blank or halted else why)] if left_out else []
    effects += [f"{gone} that the log has lost {other}, too"] if gone else []
    beyond = [
        f"{m.partition} ends at offset {m.log.end}: messages that are produced at offsets below {m.result} {other}"
        for m in plan.moves
        if m.log is not None and (m.result or 0) > m.log.end
    ]
    effect = "no message comes again, none is left out" + (" of those that are there" if beyond else "")
    if effects:
        effect = f"messages: {'; '.join(effects)} (counted in offsets, so gaps of compaction and transactions count)"
    notes = [effect] if is_one_log and (effects or not (blank or halted)) else []
    notes += beyond
    if halted:
        places = ", ".join(f"{m.partition} at offset {m.old_offset}" for m in halted)
        notes.append(
            f"halted: {places}; messages from there on may have taken effect, as the reason says, and those that have "
            "take effect a second time unless the new offset is behind them"
        )
    if blank:
        notes.append(f"partitions without an offset: {len(blank)}; which of their messages took effect is not known")
    if plan.left:
        notes.append(
            f"left alone, as no other consumer has committed an offset: partitions {', '.join(map(str, plan.left))}"
        )
    if plan.letters:
        places = ", ".join(letter.place for letter in plan.letters[:_NAMED]) + (", ..." * (len(plan.letters) > _NAMED))
        notes.append(f"dead letters whose messages {verb} again, and {drop} for that: {len(plan.letters)} ({places})")
    return notes


def _letters(connection: Connection, schema: str, plan: Plan) -> list[DeadLetter]:
    """Find the dead letters that come again; those of a topic of that name that is known to be another one do not."""
    found = dead_letters.find(connection, schema=schema, group_id=plan.group_id, topic=plan.topic)
    moves = {move.partition.number: move for move in plan.moves}
    letters = []
    for letter in found:
        move = moves.get(letter.partition)
        if move is not None and move.brings_again(letter):
            topic_id = plan.topic_id or (move.stored.topic_id if move.stored else None)
            if letter.topic_id == topic_id or None in (letter.topic_id, topic_id):
                letters.append(letter)
    return letters


def _partitions(
    group_id: str,
    topic: str,
    numbers: Iterable[int] | None,
    stored: Set[Partition],
    found: Topic | None,
) -> list[Partition]:
    """Return the partitions that are meant, in locking order; ``stored`` has, or had, rows."""
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
                f"the ledger has no row of {partition} for group {group_id!r}: pass --bootstrap-servers and "
                "--to-offset N to make it"
            )
    return chosen


def _committed(cluster: CommandCluster, group_id: str, topic: str, found: Topic) -> dict[Partition, int]:
    """Return the offsets that others than this library have committed; ours are where the ledger was, or is."""
    # They would go on committing, to where nobody looks any more.
    others = cluster.foreign_members(group_id)
    if others:
        raise CommandError(
            f"members that are none of this library's are still in group {group_id!r}: {', '.join(others)}. "
            "Stop every one of them first, or what they commit next is applied again"
        )
    if cluster.has_undescribed_members(group_id):
        raise CommandError(
            f"group {group_id!r} has members, of which Kafka does not tell (group.protocol=consumer) whether they are "
            "this library's. Stop every one of them first, or what others commit next is applied again"
        )
    held = cluster.committed(group_id, topic, found.partitions)
    committed = {partition: c.offset for partition, c in held.items() if not c.is_mirrored}
    if not committed:
        raise CommandError(
            f"Kafka holds no offset of group {group_id!r} for {topic!r} that another consumer has committed: "
            "choose another --to-..., or leave the ledger as it is"
        )
    return committed


def _time(text: str) -> Target:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in ISO 8601") from None
    if time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no zone: {time.isoformat()}Z is UTC")
    # Kafka takes negative times for its marks of the ends of a log.
    if time < datetime.fromtimestamp(0, UTC):
        raise argparse.ArgumentTypeError(f"{text!r} is before 1970")
    return Target("time", time=time)
