"""``exactly-once status``: where groups stand, who owns what, what is halted."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import psycopg
from psycopg.rows import dict_row

from exactly_once._model import Partition
from exactly_once.errors import BrokerUnreachable, DatabaseUnreachable
from exactly_once.kafka.admin import Topic
from exactly_once.ledger.session import Session
from exactly_once.ledger.sql import query

from . import options, output
from .problems import UsageError, one_line
from .servers import CommandCluster, Log, Stored, open_cluster, open_database, stored_rows

_DESCRIPTION = """\
Show each group, and each of its partitions in the ledger: the next offset to be applied, how far that is
from the end of the log (in offsets, so gaps of compaction and transactions count), its owner, and when it
last moved. What is wrong with a partition is said below it. All groups, unless --group-id is said. Without
--bootstrap-servers it shows what the database knows. Spark queries follow with what each wrote last;
COUNTED is the last batch in the ledger, where it counts batches. The last line says what makes every advance slower:
dead rows of the ledger, and who holds the oldest snapshot, for which they must stay (of other roles only with
pg_read_all_stats). In a terminal, long names are shortened in the middle."""
_CHECK = """\
say what needs an operator, one line each, and exit with 1 if anything does: a halted partition, an offset outside
the log, a topic that is gone or was made again, a group without rows; and what --max-... say"""
_HEADER = ("PARTITION", "NEXT OFFSET", "LOG END", "LAG", "OWNER", "ADVANCED")
_OWNER, _PARTITION = 4, 0
_QUERY_HEADER = ("GROUP", "SPARK QUERY", "RUN", "BATCH", "ROWS", "DROPPED", "WRITTEN", "COUNTED")
_WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
"""Moves the cursor of a terminal to the top and clears it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One partition: what the ledger has, what Kafka has, and what does not fit."""

    stored: Stored
    log: Log | None = None
    problem: str | None = None

    @property
    def lag(self) -> int | None:
        """How many offsets are left to the end of the log."""
        if self.log is None or self.stored.next_offset is None:
            return None
        return self.log.end - self.stored.next_offset

    @property
    def complaint(self) -> str | None:
        """What an operator must see to."""
        halted = f"halted: {self.stored.halted}" if self.stored.halted else None
        return "; ".join(filter(None, (halted, self.problem))) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All partitions of one group, and their sums."""

    group_id: str
    lines: list[Line] = field(default_factory=list)
    dead_letters: int = 0

    @property
    def lag(self) -> int | None:
        """The sum over the partitions whose lag is known; None where none is."""
        known = [line.lag for line in self.lines if line.lag is not None]
        return sum(known) if known else None

    @property
    def halted(self) -> int:
        """How many partitions are halted."""
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
    """What was found; ``unreachable`` says why Kafka's part of it is missing."""

    schema: str
    group_id: str | None
    groups: list[Group]
    queries: list[dict[str, Any]]
    ledger: dict[str, Any]
    unreachable: BrokerUnreachable | None

    @property
    def lines(self) -> list[Line]:
        """The partitions of all groups."""
        return [line for group in self.groups for line in group.lines]

    @property
    def is_empty(self) -> bool:
        """Whether the database knows nothing of what was asked for."""
        return not self.groups and not self.queries


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "status", help="show offsets, lag, owners and problems", description=_DESCRIPTION, epilog=options.EPILOG
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--check", action="store_true", help=_CHECK)
    way.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"look again after so many seconds ({_WATCH_SECONDS:g}), until Ctrl-C",
    )
    parser.add_argument("--max-lag", type=_limit, metavar="N", help="with --check: of any partition")
    parser.add_argument("--max-dead-letters", type=_limit, metavar="N", help="with --check: of any group")
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Print the ledger beside the logs; once, again and again, or only what is wrong."""
    settings = options.settings(args)
    settings.opener()
    _check_usage(args)
    if args.max_lag is not None:
        settings.required("bootstrap_servers")
    with open_database(settings) as session:
        if args.watch is not None:
            _watch(session, settings, args)
        report = look(session, settings, _Kafka(settings))
    troubles = _troubles(report, args) if args.check else []
    if args.json:
        output.print_json(_document(report, troubles if args.check else None))
    elif args.check:
        _print_check(report, troubles)
    else:
        _print(report)
    if report.unreachable is not None:
        raise report.unreachable
    return 1 if troubles else 0


class _Kafka:
    """The cluster, connected to when it is first asked."""

    def __init__(self, settings: options.Settings) -> None:
        self._settings = settings
        self._cluster: CommandCluster | None = None

    def beside(self, rows: list[Stored]) -> list[Line]:
        """Put rows beside their logs, if there are brokers to ask."""
        if not self._settings.bootstrap_servers:
            return [Line(row) for row in rows]
        self._cluster = self._cluster or open_cluster(self._settings)
        return beside_logs(rows, self._cluster)


def look(session: Session, settings: options.Settings, kafka: _Kafka) -> Report:
    """Find out what the database and, if they answer, the brokers know."""
    rows = stored_rows(session, group_id=settings.group_id)
    wanted = {"group_id": settings.group_id}
    with session.connection.cursor(row_factory=dict_row) as cursor:
        queries = cursor.execute(query("spark_queries", session.schema), wanted, prepare=False).fetchall()
    dead = dict(session.connection.execute(query("dead_letters_by_group", session.schema), wanted, prepare=False))
    unreachable = None
    lines = [Line(row) for row in rows]
    try:
        lines = kafka.beside(rows)
    except BrokerUnreachable as error:
        unreachable = error  # what the database knows is shown all the same
    of_group = {name: list(found) for name, found in groupby(lines, lambda line: line.stored.group_id)}
    groups = [
        Group(group_id=name, lines=of_group.get(name, []), dead_letters=dead.get(name, 0))
        for name in sorted(of_group.keys() | dead.keys())
    ]
    return Report(
        schema=settings.schema,
        group_id=settings.group_id,
        groups=groups,
        queries=queries,
        ledger=_ledger_health(session),
        unreachable=unreachable,
    )


def _watch(session: Session, settings: options.Settings, args: argparse.Namespace) -> None:
    """Look until somebody interrupts; a server that is away is said and waited for."""
    kafka = _Kafka(settings)
    while True:
        try:
            report = look(session, settings, kafka)
            print(_CLEAR if sys.stdout.isatty() else "", end="")
            _print(report)
            if report.unreachable is not None:
                output.print_lines(one_line(report.unreachable, settings.secrets))
        except (psycopg.OperationalError, DatabaseUnreachable) as error:
            output.print_lines(one_line(error, settings.secrets))
        print(flush=True)
        time.sleep(args.watch)


def _print(report: Report) -> None:
    if report.is_empty:
        print(_no_rows(report))
    for number, group in enumerate(report.groups):
        if number:
            print()
        _print_group(group)
    if report.queries:
        if report.groups:
            print()
        output.print_table(_QUERY_HEADER, [_query_cells(each) for each in report.queries], give=(1, 2, 0))
    for complaint in _complaints(report.queries):
        output.print_lines(complaint, indent="! ")
    if report.lines:
        print()
        output.print_lines(_told(report.ledger))


def _print_group(group: Group) -> None:
    output.print_lines(str(group))
    if group.lines:
        output.print_table(_HEADER, [_cells(line) for line in group.lines], give=(_OWNER, _PARTITION))
    for line in group.lines:
        if line.complaint:
            output.print_lines(f"{line.stored.place} {line.complaint}", indent="! ")


def _no_rows(report: Report) -> str:
    return f"the ledger has no rows{f' of group {report.group_id}' if report.group_id else ''}"


def _complaints(queries: list[dict[str, Any]]) -> list[str]:
    """Say which Spark queries that count batches are halted."""
    names = ((f"group {each['group_id']}, Spark query {each['query_id']}", each["halted"]) for each in queries)
    return [f"{name} halted: {halted}" for name, halted in names if halted]


def _troubles(report: Report, args: argparse.Namespace) -> list[str]:
    """Return what needs an operator, in words."""
    found = [_no_rows(report)] if report.is_empty else []
    max_lag = math.inf if args.max_lag is None else args.max_lag
    max_dead_letters = math.inf if args.max_dead_letters is None else args.max_dead_letters
    for group in report.groups:
        for line in group.lines:
            place = f"group {group.group_id}, {line.stored.place}"
            if line.complaint:
                found.append(f"{place}: {line.complaint}")
            if (line.lag or 0) > max_lag:
                found.append(f"{place}: lag {line.lag} is above {max_lag}")
        if group.dead_letters > max_dead_letters:
            dead = _count(group.dead_letters, "dead letter")
            found.append(f"group {group.group_id}: {dead}, above {max_dead_letters}")
    return found + _complaints(report.queries)


def _print_check(report: Report, troubles: Iterable[str]) -> None:
    for trouble in troubles:
        print(output.printable(trouble))  # one line each, however wide: it goes into a mail or a log
    if not troubles and report.unreachable is None:
        print("ok: " + ("; ".join(map(str, report.groups)) or _count(len(report.queries), "Spark query")))


def _ledger_health(session: Session) -> dict[str, Any]:
    """Ask the server's statistics what makes advances slow."""
    with session.connection.cursor(row_factory=dict_row) as cursor:
        statement = query("ledger_health", session.schema)
        return cursor.execute(statement, {"schema": session.schema}, prepare=False).fetchone() or {}


def _told(health: Mapping[str, Any]) -> str:
    """Tell it in one line; some of it is hidden from a role that may not see others' sessions."""
    snapshot = "no snapshot is held"
    if (held := health.get("snapshot_held_by")) is not None:
        since = output.ago(health["snapshot_seconds"]) or "unknown"
        snapshot = f"oldest snapshot: {held}, since {since}, {health['snapshot_transactions']} transactions"
    return output.printable(f"ledger: {health.get('dead_rows')} dead rows, {health.get('bytes')} bytes; {snapshot}")


def beside_logs(rows: list[Stored], cluster: CommandCluster) -> list[Line]:
    """Ask Kafka for the logs of all rows that belong to this cluster."""
    ours = [row for row in rows if row.cluster_id in (None, cluster.cluster_id)]
    topics = cluster.topics(sorted({row.topic for row in ours}))
    there = {row.place for row in ours if row.topic in topics and row.partition < topics[row.topic].partitions}
    logs = cluster.logs(sorted(there))
    return [_line(row, cluster, topics, logs) for row in rows]


def _line(row: Stored, cluster: CommandCluster, topics: Mapping[str, Topic], logs: Mapping[Partition, Log]) -> Line:
    """Put a row beside its log, unless it is another topic's or cluster's."""
    if row.cluster_id not in (None, cluster.cluster_id):
        return Line(row, None, f"belongs to cluster {row.cluster_id}")
    topic = topics.get(row.topic)
    if topic is None:
        return Line(row, None, "the topic is gone")
    if None not in (row.topic_id, topic.topic_id) and row.topic_id != topic.topic_id:
        return Line(row, None, "the topic was deleted and made again")
    log = logs.get(row.place)
    if log is None:
        return Line(row, None, "the topic has no such partition")
    return Line(row, log, _out_of_range(row, log))


def _out_of_range(row: Stored, log: Log) -> str | None:
    if row.next_offset is None:
        return None
    if row.next_offset < log.start:
        return f"below the log start {log.start}"
    return "beyond the log end" if row.next_offset > log.end else None


def _document(report: Report, troubles: list[str] | None) -> dict[str, Any]:
    document = {
        "schema": report.schema,
        "groups": [
            {
                "group_id": group.group_id,
                "partitions": len(group.lines),
                "lag": group.lag,
                "halted": group.halted,
                "problems": group.problems,
                "dead_letters": group.dead_letters,
            }
            for group in report.groups
        ],
        "partitions": [_partition_document(line) for line in report.lines],
        "queries": report.queries,
        "ledger": report.ledger,
    }
    return document if troubles is None else {**document, "troubles": troubles}


def _partition_document(line: Line) -> dict[str, Any]:
    return {
        **asdict(line.stored),
        "owner": line.stored.owner,
        "log_start": line.log.start if line.log else None,
        "log_end": line.log.end if line.log else None,
        "lag": line.lag,
        "problem": line.problem,
    }


def _query_cells(found: dict[str, Any]) -> list[object]:
    written = output.ago(found["written_seconds_ago"])
    names = ("group_id", "query_id", "run_id", "batch_id", "rows", "dropped")
    return [*(found[name] for name in names), written, found["counted_batch_id"]]


def _cells(line: Line) -> list[object]:
    row = line.stored
    return [
        f"{'! ' if line.complaint else ''}{row.place}",
        row.next_offset,
        line.log.end if line.log else None,
        line.lag,
        _owner(row),
        output.ago(row.advanced_seconds_ago),
    ]


def _owner(row: Stored) -> str | None:
    """Name the owner in few characters: of an id the first eight, as nobody reads more of it."""
    if not row.owned:
        return "released" if row.owner_instance else None
    name = row.owner_name or (row.owner_instance or "")[:8]
    return f"{name} (Spark)" if row.owner_kind == "spark" else name


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'S' if what.isupper() else 's'}"


def _check_usage(args: argparse.Namespace) -> None:
    if args.watch is not None and args.json:
        raise UsageError("--watch is for people: leave out --json, or ask again and again")
    if not args.check and (args.max_lag is not None or args.max_dead_letters is not None):
        raise UsageError("--max-lag and --max-dead-letters are limits of --check: say --check, too")


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number: 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 86400")
    return seconds
