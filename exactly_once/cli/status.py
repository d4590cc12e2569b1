"""``exactly-once status``: where groups stand, who owns what, what is halted."""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import psycopg
from psycopg.rows import dict_row

from exactly_once._model import Partition
from exactly_once.errors import BrokerUnreachable, DatabaseUnreachable
from exactly_once.ledger.commands import after_halt, command, reset_command
from exactly_once.ledger.session import Session, cursor_on
from exactly_once.ledger.sql import query

from . import options, output
from .problems import UsageError, one_line
from .servers import CommandCluster, Log, Stored, open_cluster, open_database, stored_rows

_DESCRIPTION = """\
Show each group, and each of its partitions in the ledger: the next offset to be applied, how far that is
from the end of the log (in offsets, so gaps of compaction and transactions count), its owner, and when it
last moved. What is wrong with a partition is below the table. All groups, unless --group-id is given. Without
--bootstrap-servers it shows what the database has. Spark queries follow with what each wrote last;
COUNTED is the last batch in the ledger, where it counts batches. The last line is about what lets the ledger's
table grow: dead rows, and who holds the oldest snapshot, for which they must stay (of other roles only with
pg_read_all_stats). In a terminal, long names are shortened in the middle."""
_CHECK = """\
print what needs an operator, one line each, and exit with 1 if anything does: a halted partition, an offset outside
the log, a topic that is gone or was made again, a group without rows, a partition that no worker could start; and what
is above --max-..."""
_HEADER = ("PARTITION", "NEXT OFFSET", "LOG END", "LAG", "OWNER", "ADVANCED")
_OWNER, _PARTITION = _HEADER.index("OWNER"), _HEADER.index("PARTITION")
_QUERY_HEADER = ("GROUP", "SPARK QUERY", "RUN", "BATCH", "ROWS", "DROPPED", "WRITTEN", "COUNTED")
_WATCH_SECONDS = 2.0  # a look costs the database a few milliseconds, and offsets move about once a second
_WATCH_FROM = 0.1  # faster nobody reads
_SHORT_ID = 8  # characters of a process's id: nobody reads more of it
_NO_ROW: dict[str, Any] = {
    **dict.fromkeys(("next_offset", "leader_epoch", "owner_kind", "owner_name", "owner_instance", "halted")),
    **dict.fromkeys(("acquired_at", "advanced_at", "advanced_seconds_ago")),
    "owner_epoch": 0,
    "owned": False,
}
_CLEAR = "\x1b[H\x1b[2J"  # moves the cursor of a terminal to the top and clears it


@dataclass(frozen=True, slots=True)
class Line:
    """One partition: what the ledger has, what Kafka has, and what does not fit."""

    stored: Stored
    log: Log | None = None
    problem: str | None = None
    stable_end: int | None = None
    """Where the log ends for those who read committed messages, if a transaction that is open hides more of it."""

    @property
    def lag(self) -> int | None:
        """How many offsets are left to the end of the log; unknown beyond it, where it would hide that of others."""
        if self.log is None or self.stored.next_offset is None or self.stored.next_offset > self.log.end:
            return None
        return self.log.end - self.stored.next_offset

    @property
    def wait(self) -> str | None:
        """Say what all of the lag waits for, if it waits."""
        if self.stable_end is None or (self.stored.next_offset or 0) < self.stable_end:
            return None
        return (
            f"is applied up to offset {self.stable_end}, where a transaction of a producer is open; "
            "the rest comes when it ends"
        )

    def complaint(self, schema: str) -> str | None:
        """Say what is wrong, and what mends it."""
        row = self.stored
        halted = row.halted and f"halted: {row.halted}. {after_halt(row.group_id, schema, row.place, row.next_offset)}"
        return "; ".join(filter(None, (halted, self.problem))) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All partitions of one group, and their sums."""

    group_id: str
    lines: list[Line] = field(default_factory=list)
    dead_letters: int = 0
    claims: dict[str, Any] | None = None
    """The window of claimed keys, of a group that has claimed any."""

    @property
    def lag(self) -> int | None:
        """The sum over the partitions whose lag is known; None where none is."""
        known = [line.lag for line in self.lines if line.lag is not None]
        return sum(known) if known else None

    @property
    def halted(self) -> int:
        return sum(line.stored.halted is not None for line in self.lines)

    @property
    def problems(self) -> int:
        """How many partitions have another problem than that."""
        return sum(line.problem is not None for line in self.lines)

    def __str__(self) -> str:
        unknown = sum(line.lag is None for line in self.lines)
        parts = [_count(len(self.lines), "partition")]
        if self.lag is not None:
            parts.append(f"lag {self.lag}" + (f" without {_count(unknown, 'partition')}" if unknown else ""))
        parts += [f"{self.halted} HALTED"] if self.halted else []
        parts += [_count(self.problems, "PROBLEM")] if self.problems else []
        parts += [_count(self.dead_letters, "dead letter")] if self.dead_letters else []
        return f"group {self.group_id}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found; ``unreachable`` is why Kafka's part of it is missing."""

    schema: str
    group_id: str | None
    groups: list[Group]
    queries: list[dict[str, Any]]
    ledger: dict[str, Any]
    unreachable: BrokerUnreachable | None

    @property
    def lines(self) -> list[Line]:
        return [line for group in self.groups for line in group.lines]

    @property
    def nothing(self) -> str | None:
        """The message where the database has no rows of what was asked for.

        Dead letters and claims, which outlive the rows, are none: without rows a group would start anew.
        """
        if self.lines or self.queries:
            return None
        return f"the ledger has no rows{f' of group {self.group_id}' if self.group_id else ''}"

    @property
    def halted_queries(self) -> list[str]:
        """Which Spark queries that count batches are halted, why, and what mends it."""
        found = []
        for each in self.queries:
            if each["halted"]:
                group_id, query_id, counted = each["group_id"], each["query_id"], each["counted_batch_id"]
                next_batch = 0 if counted is None else counted + 1
                mend = after_halt(group_id, self.schema, Partition.of_query(query_id), next_batch)
                found.append(f"group {group_id}, Spark query {query_id} halted: {each['halted']}. {mend}")
        return found


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status", help="show offsets, lag, owners and problems", description=_DESCRIPTION, epilog=options.EPILOG
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--check", action="store_true", help=_CHECK)
    way.add_argument(
        "--watch",
        type=options.number(
            float,
            f"is not a number of seconds from {_WATCH_FROM} to {options.DAY_SECONDS:,.0f}",
            least=_WATCH_FROM,
            most=options.DAY_SECONDS,
        ),
        nargs="?",
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"look again after so many seconds ({_WATCH_SECONDS:g}), until Ctrl-C",
    )
    parser.add_argument("--max-lag", type=options.whole, metavar="N", help="with --check: of any partition")
    parser.add_argument("--max-dead-letters", type=options.whole, metavar="N", help="with --check: of any group")
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Print the ledger beside the logs; once, again and again, or only what is wrong."""
    settings = options.settings(args)
    settings.opener()  # is refused here, before anything is asked
    if args.watch is not None and args.json:
        raise UsageError("--watch is for people: leave out --json, or ask again and again")
    if not args.check and (args.max_lag is not None or args.max_dead_letters is not None):
        raise UsageError("--max-lag and --max-dead-letters are limits of --check: pass --check, too")
    if args.max_lag is not None:
        settings.required("bootstrap_servers")
    with open_database(settings) as session:
        connect = functools.cache(lambda: open_cluster(settings))  # asked again, but connected to once
        while args.watch is not None:  # until somebody interrupts; an error is printed, and the server waited for
            try:
                report = look(session, settings, connect)
                print(_CLEAR if sys.stdout.isatty() else "", end="")
                _print(report)
                if report.unreachable is not None:
                    output.print_lines(one_line(report.unreachable, settings.secrets))
            except (psycopg.OperationalError, DatabaseUnreachable) as error:
                output.print_lines(one_line(error, settings.secrets))
            print(flush=True)
            time.sleep(args.watch)
        report = look(session, settings, connect)
    troubles = _troubles(report, args) if args.check else None
    if args.json:
        output.print_json(_document(report, troubles))
    elif troubles is None:
        _print(report)
    else:
        for trouble in troubles:
            print(output.printable(trouble))  # one line each, however wide: it goes into a mail or a log
        if not troubles and report.unreachable is None:
            print(
                "ok: "
                + (output.printable("; ".join(map(str, report.groups))) or _count(len(report.queries), "Spark query"))
            )
    # Behind what the database has: the exit code is that of a look that is not complete.
    if report.unreachable is not None:
        raise report.unreachable
    return 1 if troubles else 0


def look(session: Session, settings: options.Settings, connect: Callable[[], CommandCluster]) -> Report:
    """Find out what the database and, if they answer, the brokers have."""
    rows = stored_rows(session, group_id=settings.group_id)
    wanted = {"group_id": settings.group_id, "schema": session.schema}
    with cursor_on(session.connection, dict_row) as cursor:
        queries = cursor.execute(query("spark_queries", session.schema), wanted, prepare=False, binary=True).fetchall()
        health = cursor.execute(query("ledger_health", session.schema), wanted, prepare=False).fetchone()
        windows = cursor.execute(query("claim_windows", session.schema), wanted, prepare=False).fetchall()
    claims = {window.pop("group_id"): window for window in windows}
    per_group = cursor_on(session.connection).execute(
        query("dead_letters_by_group", session.schema), wanted, prepare=False
    )
    dead: dict[str, int] = dict(per_group.fetchall())
    unreachable = None
    lost = lost_rows(session, rows)
    lines = sorted([*map(Line, rows), *(Line(row, problem=deleted(row, settings.schema)) for row in lost)], key=_order)
    try:
        if settings.bootstrap_servers:
            lines = beside_logs(rows, connect(), settings.schema, lost=lost)
    except BrokerUnreachable as error:
        unreachable = error  # what the database has is shown all the same
    of_group = {name: list(found) for name, found in groupby(lines, lambda line: line.stored.group_id)}
    groups = [
        Group(group_id=name, lines=of_group.get(name, []), dead_letters=dead.get(name, 0), claims=claims.get(name))
        for name in sorted(of_group.keys() | dead.keys() | claims.keys())
    ]
    return Report(
        schema=settings.schema,
        group_id=settings.group_id,
        groups=groups,
        queries=queries,
        ledger=health or {},
        unreachable=unreachable,
    )


def _print(report: Report) -> None:
    if report.nothing:
        print(report.nothing)
    for number, group in enumerate(report.groups):
        if number:
            print()
        output.print_lines(str(group))
        cells: list[list[object]] = []
        for line in group.lines:
            row = line.stored
            owner = "released" if row.owner_instance else None
            if row.owned:
                owner = row.owner_name or (row.owner_instance or "")[:_SHORT_ID]
                owner += " (Spark)" if row.owner_kind == "spark" else ""
            place = f"{'! ' if line.complaint(report.schema) else ''}{row.place}"
            end = line.log.end if line.log else None
            cells.append([place, row.next_offset, end, line.lag, owner, output.ago(row.advanced_seconds_ago)])
        if cells:
            output.print_table(_HEADER, cells, give=(_OWNER, _PARTITION))
        for line in group.lines:
            complaint = line.complaint(report.schema)
            if text := complaint or line.wait:
                output.print_lines(f"{line.stored.place} {text}", indent="! " if complaint else "")
        if group.claims is not None:
            output.print_lines(_claims_text(group.claims))
    if report.queries:
        if report.groups:
            print()
        names = ("group_id", "query_id", "run_id", "batch_id", "rows", "dropped", "written", "counted_batch_id")
        found = [each | {"written": output.ago(each["written_seconds_ago"])} for each in report.queries]
        output.print_table(_QUERY_HEADER, [[each[name] for name in names] for each in found], give=(1, 2, 0))
    for halted in report.halted_queries:
        output.print_lines(halted, indent="! ")
    if report.lines:
        print()
        health = report.ledger
        snapshot = "no snapshot is held"
        if (held := health.get("snapshot_held_by")) is not None:
            # Hidden from a role that may not see others' sessions.
            since = output.ago(health["snapshot_seconds"]) or "unknown"
            snapshot = f"oldest snapshot: {held}, since {since}, {health['snapshot_transactions']} transactions"
        output.print_lines(f"ledger: {health.get('dead_rows')} dead rows, {health.get('bytes')} bytes; {snapshot}")


def _claims_text(claims: Mapping[str, Any]) -> str:
    size = f"claims: about {claims['keys']} keys, {claims['bytes']} bytes"
    if claims["seconds"] is None:
        return f"{size}; held for ever"
    turned, since = "turned" if claims["turns"] else "began", output.ago(claims["turned_seconds_ago"])
    return f"{size}; held for {claims['seconds']:g} s at least, the window {turned} {since} (turn {claims['turns']})"


def _troubles(report: Report, args: argparse.Namespace) -> list[str]:
    found = [report.nothing] if report.nothing else []
    max_lag = math.inf if args.max_lag is None else args.max_lag
    max_dead_letters = math.inf if args.max_dead_letters is None else args.max_dead_letters
    for group in report.groups:
        for line in group.lines:
            place = f"group {group.group_id}, {line.stored.place}"
            if complaint := line.complaint(report.schema):
                found.append(f"{place}: {complaint}")
            if (line.lag or 0) > max_lag:
                found.append(f"{place}: lag {line.lag} is above {max_lag}" + (f"; it {line.wait}" if line.wait else ""))
            elif line.stored.next_offset is None and line.log and line.log.end - line.log.start > max_lag:
                unread = line.log.end - line.log.start
                found.append(f"{place}: no worker has started it, and its log holds {unread} offsets, above {max_lag}")
        if group.dead_letters > max_dead_letters:
            dead = _count(group.dead_letters, "dead letter")
            found.append(f"group {group.group_id}: {dead}, above {max_dead_letters}")
    return found + report.halted_queries


def lost_rows(session: Session, rows: Sequence[Stored]) -> list[Stored]:
    """Return what somebody has deleted of groups that have rows, as far as it is known: where they were."""
    of_group = {row.group_id: row for row in rows}
    found = cursor_on(session.connection).execute(
        query("lost_rows", session.schema), {"group_ids": list(of_group)}, prepare=False
    )
    nothing = {**_NO_ROW, "cluster_id": None, "topic_id": None}
    return [replace(of_group[group], topic=topic, partition=n, **nothing) for group, topic, n in found]


def deleted(row: Stored, schema: str) -> str:
    """Say what mends the lack of a row."""
    return f"its row of the ledger was deleted: restore it, or give it an offset with: {_reset(row, schema)}"


def _reset(row: Stored, schema: str) -> str:
    return reset_command(row.group_id, schema, row.place)


def _order(line: Line) -> tuple[str, Partition]:
    return line.stored.group_id, line.stored.place


def beside_logs(
    rows: Sequence[Stored], cluster: CommandCluster, schema: str, *, lost: Sequence[Stored] = ()
) -> list[Line]:
    """Put rows beside their logs in this cluster, and name what does not fit.

    ``lost`` is what :func:`lost_rows` returned for them; of topics that are gone nothing is missed.
    """
    ours = [row for row in rows if row.cluster_id in (None, cluster.cluster_id)]
    topics = cluster.topics(sorted({row.topic for row in (*ours, *lost)}))
    lost = [row for row in lost if row.topic in topics and row.partition < topics[row.topic].partitions]
    rows = [*rows, *lost]
    # A partition that no worker has met yet, or whose row is gone, is shown: the lag without it is not all of it.
    known = {(row.group_id, row.place) for row in rows}
    met = {
        (r.group_id, r.topic): r for r in ours if r.topic in topics and topics[r.topic].topic_id in (None, r.topic_id)
    }
    added = [replace(row, partition=n, **_NO_ROW) for row in met.values() for n in range(topics[row.topic].partitions)]
    rows += (row for row in added if (row.group_id, row.place) not in known)
    # The brokers refuse to be asked for partitions that are not there.
    there = {row.place for row in rows if row.topic in topics and row.partition < topics[row.topic].partitions}
    logs = cluster.logs(sorted(there))
    # Of a partition that is applied to its end a transaction hides nothing.
    behind = {r.place for r in rows if r.place in logs and (r.next_offset or 0) < logs[r.place].end}
    stable_ends = cluster.ends(sorted(behind))
    lines = []
    for row in rows:
        topic, log = topics.get(row.topic), logs.get(row.place)
        topic_of = ("--topic", row.topic)
        mend = f"; if it is for good: {command('reset', row.group_id, schema, *topic_of, '--forget')}"
        problem = None
        if row.cluster_id not in (None, cluster.cluster_id):
            # A topic of that name may be here as well: its log is another one.
            adopt = command("adopt", row.group_id, schema, *topic_of, "--keep-offsets")
            log = None
            problem = f"belongs to cluster {row.cluster_id}; if the topic moved here with its offsets: {adopt}"
        elif topic is None:
            problem = f"the topic is gone{mend}"
        elif not topic.partitions:
            problem = "Kafka does not report which partitions the topic has: may this principal DESCRIBE it?"
        elif log is None:
            problem = f"the topic has no such partition{mend}"
        elif None not in (row.topic_id, topic.topic_id) and row.topic_id != topic.topic_id:
            log = None
            adopt = command("adopt", row.group_id, schema, *topic_of, "--to-earliest")
            problem = "the topic was deleted and made again; "
            if row.next_offset:
                problem += f"what is below offset {row.next_offset} of the new one may have been applied; "
            problem += f"to read the new one: {adopt}"
        elif row.next_offset is not None and row.next_offset < log.start:
            problem = f"below the log start {log.start}; choose where to go on: {_reset(row, schema)}"
        elif row.next_offset is not None and row.next_offset > log.end:
            problem = f"beyond the log end {log.end}; choose where to go on: {_reset(row, schema)}"
        elif row in lost:
            problem = deleted(row, schema)
        elif row.next_offset is None and not row.owned and log.start < log.end and (row.group_id, row.place) in known:
            problem = "has messages and no offset, and nobody who starts it: the log of the worker that tried says why"
        stable = stable_ends.get(row.place)
        hides = log is not None and stable is not None and stable < log.end  # asked later, it may also be beyond
        lines.append(Line(row, log, problem, stable if hides else None))
    return sorted(lines, key=_order)


def _document(report: Report, troubles: list[str] | None) -> dict[str, Any]:
    sums = ("group_id", "lag", "halted", "problems", "dead_letters", "claims")
    return {
        "schema": report.schema,
        "groups": [
            {**{name: getattr(group, name) for name in sums}, "partitions": len(group.lines)} for group in report.groups
        ],
        "partitions": [
            {
                **asdict(line.stored),
                "owner": line.stored.owner,
                "log_start": line.log.start if line.log else None,
                "log_end": line.log.end if line.log else None,
                "stable_end": line.stable_end,
                "lag": line.lag,
                "problem": line.problem,
            }
            for line in report.lines
        ],
        "queries": report.queries,
        "ledger": report.ledger,
        **({} if troubles is None else {"troubles": troubles}),
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'S' if what.isupper() else 's'}"
