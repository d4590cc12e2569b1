"""``exactly-once status``: where groups stand, who owns what, what is halted."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.rows import dict_row

from exactly_once.cluster import Topic
from exactly_once.errors import BrokerUnreachable
from exactly_once.model import Partition
from exactly_once.session import Session
from exactly_once.sql import query

from . import options, output
from .servers import CommandCluster, Log, Stored, open_cluster, open_database, stored_rows

_DESCRIPTION = """\
Show each partition in the ledger: the next offset to be applied, how far that is from the end of the log
(in offsets, so gaps of compaction and transactions count), its owner, and what is wrong with it. All
groups, unless --group-id is said. Without --bootstrap-servers it shows what the database knows. Spark
queries follow with what each wrote last; COUNTED is for those that count batches, not offsets. The last
line tells what makes every advance slower: dead rows of the ledger, and who holds the oldest snapshot,
for which they must stay (of other roles only with pg_read_all_stats)."""
_HEADER = (
    "GROUP", "TOPIC", "PARTITION", "NEXT OFFSET", "LOG END", "LAG", "OWNER", "KIND", "ADVANCED", "PROBLEM",
)  # fmt: skip
_QUERY_HEADER = ("GROUP", "SPARK QUERY", "RUN", "BATCH", "ROWS", "DROPPED", "WRITTEN", "COUNTED")


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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "status", help="show offsets, lag, owners and problems", description=_DESCRIPTION, epilog=options.EPILOG
    )
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Print the ledger beside the logs."""
    settings = options.settings(args)
    settings.opener()
    with open_database(settings) as session:
        rows = stored_rows(session, group_id=settings.group_id)
        queries = _spark_queries(session, settings.group_id)
        health = _ledger_health(session)
    unreachable = None
    lines = [Line(row) for row in rows]
    if settings.bootstrap_servers:
        try:
            lines = beside_logs(rows, open_cluster(settings))
        except BrokerUnreachable as error:
            unreachable = error  # what the database knows is shown all the same
    if args.json:
        document = {"schema": settings.schema, "partitions": [*map(_document, lines)], "queries": queries}
        output.print_json({**document, "ledger": health})
    else:
        _print(lines, queries, settings.group_id)
        if lines:
            print(f"\n{_told(health)}")
    if unreachable is not None:
        raise unreachable
    return 0


def _print(lines: list[Line], queries: list[dict[str, Any]], group_id: str | None) -> None:
    if lines:
        output.print_table(_HEADER, [_cells(line) for line in lines])
    elif not queries:
        print(f"the ledger has no rows{f' of group {group_id}' if group_id else ''}")
    if queries:
        if lines:
            print()
        output.print_table(_QUERY_HEADER, [_query_cells(each) for each in queries])


def _spark_queries(session: Session, group_id: str | None) -> list[dict[str, Any]]:
    """Read what Spark queries wrote last: a snapshot, for looking."""
    with session.connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query("spark_queries", session.schema), {"group_id": group_id}, prepare=False).fetchall()


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


def _document(line: Line) -> dict[str, Any]:
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
    halted = f"halted: {row.halted}" if row.halted else None
    return [
        row.group_id,
        row.topic,
        row.partition,
        row.next_offset,
        line.log.end if line.log else None,
        line.lag,
        row.owner,
        row.owner_kind if row.owned else None,
        output.ago(row.advanced_seconds_ago),
        "; ".join(filter(None, (halted, line.problem))) or None,
    ]
