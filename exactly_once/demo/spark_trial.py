"""Trial of Spark: orders come in while a driver is killed, a Python worker too, and the checkpoint is deleted."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
import psycopg
from confluent_kafka import Producer
from psycopg import sql

from exactly_once.embedded import Servers, spark
from exactly_once.ledger.migrate import migrate

from .display import Display, Row, row
from .journal import scan
from .payments import create_topic, send
from .spark_driver import Order, jdbc
from .trial import PATIENCE_SECONDS, Stuck

PARTITIONS = 3  # more than Spark has tasks at a time, so that a killed worker leaves some of a batch undone
FAULTS = ("driver", "worker", "checkpoint")
TITLES = {
    "exactly_once": "With the sink of this library: foreachBatch(PostgresSink(...))",
    "jdbc": "The usual foreachBatch, the same faults: write.jdbc(mode='append'), and a count beside it",
}
HEAD: Row = ("", "with the sink", "foreachBatch, JDBC")
_ORDERS, _QUICK_ORDERS = 60_000, 20_000
LEAST = 10 * (len(FAULTS) + 3)  # a batch is a tenth of what comes in with each fault
_TABLES = """
    CREATE SCHEMA {schema};
    CREATE TABLE {schema}.orders (id bigint, customer text, gross bigint, partition int, "offset" bigint);
    CREATE TABLE {schema}.total (orders bigint);
    INSERT INTO {schema}.total VALUES (0)
"""


@dataclass(slots=True, kw_only=True)
class Result:
    """What happened on one side, and what was true afterwards."""

    orders: int = 0
    drivers_killed: int = 0
    workers_killed: int = 0
    checkpoints_deleted: int = 0
    errors: int = 0
    """Drivers that ended by themselves."""
    lost: int = 0
    doubled: int = 0
    """Rows beyond the first of an order."""
    counted_wrong: int = 0
    """How far the count beside the rows is from the number of orders."""
    seconds: float = 0.0
    cut_short: str = ""
    """What it was cut short waiting for, if it was; then no figure means anything."""

    @property
    def is_cut_short(self) -> bool:
        return bool(self.cut_short)

    @property
    def is_shown(self) -> bool:
        return not self.cut_short

    @property
    def failures(self) -> list[str]:
        """What went wrong, if it was not cut short: each order is to be one row, and counted once."""
        wrong = [] if self.cut_short else ["lost", "doubled", "counted_wrong", "errors"]
        return [what for what in wrong if getattr(self, what)]

    @property
    def is_exact(self) -> bool:
        return self.is_shown and not self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the two sides have in common."""

    bootstrap_servers: str
    conninfo: str
    jdbc_url: str
    seed: int
    orders: int
    faults: Sequence[str]


def plan(seed: int, *, quick: bool) -> list[str]:
    """Draw the order of the faults: each kind once, or with the driver and the worker killed twice."""
    faults = list(FAULTS if quick else (*FAULTS, "driver", "worker"))
    random.Random(f"faults {seed}").shuffle(faults)  # noqa: S311  (to be repeated, not to be secret)
    return faults


class Driver:
    """A driver in a process of its own, how far it is, and what it complained of."""

    def __init__(self, order: Order, log: TextIO) -> None:
        # Both are written by the reader's thread, line by line: the offsets behind its last batch, and when it said so.
        self.reached = 0
        self.heard_at = time.monotonic()
        self._process = psutil.Popen(
            [sys.executable, "-m", "exactly_once.demo.spark_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

        self._process.stdin.write(f"{order.to_line()}\n")
        self._process.stdin.flush()  # and kept open: when it ends, so does the driver

        def read() -> None:
            for line in self._process.stdout:
                self.reached, self.heard_at = int(line), time.monotonic()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def workers(self) -> list[psutil.Process]:
        """Return its Python workers: children of the daemon that Spark starts."""
        found = []
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                if any("pyspark" in word and "daemon" in word for word in process.cmdline()) and not process.children():
                    found.append(process)
        return found

    def kill(self) -> None:
        """End it as ``kill -9`` does, with all that it started, and wait for their end."""
        family = [self._process, *self._family()]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)  # killed processes end in milliseconds; a busy machine takes longer
        psutil.wait_procs(family[1:], timeout=30)
        self._reader.join(30)
        self._process.stdin.close()
        self._process.stdout.close()

    def _family(self) -> list[psutil.Process]:
        try:
            return list(self._process.children(recursive=True))
        except psutil.NoSuchProcess:
            return []


class SparkTrial:
    """One side: its topic, its tables, its driver."""

    def __init__(self, side: str, setting: Setting, display: Display) -> None:
        self.result = Result()
        self._setting = setting
        self._display = display
        self._topic = f"orders-{side.replace('_', '-')}"
        self._schema = f"demo_spark_{side}"
        self._directory = Path(tempfile.mkdtemp(prefix="demo-spark-"))
        self._order = Order(
            number=0,  # there is one driver
            side=side,
            bootstrap_servers=setting.bootstrap_servers,
            conninfo=setting.conninfo,
            jdbc_url=setting.jdbc_url,
            topic=self._topic,
            schema=self._schema,
            checkpoint=str(self._directory / "checkpoint"),
            # Ten batches of what comes in with each fault: any of them may be the one under way.
            batch_messages=max(1, setting.orders // (len(setting.faults) + 1) // 10),
        )
        self._driver: Driver | None = None  # none until it is first waited for, and after each kill of one
        self._published = 0  # how many orders are in the topic

    def run(self) -> Result:
        """Publish all orders while faults strike, wait until all are applied, and compare."""
        setting, began_at = self._setting, time.monotonic()
        chance = random.Random(f"moments {setting.seed}")  # noqa: S311  (to be repeated, not to be secret)
        with psycopg.connect(setting.conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL(_TABLES).format(schema=sql.Identifier(self._schema)))
        create_topic(setting.bootstrap_servers, self._topic, PARTITIONS)
        portions = len(setting.faults) + 1
        try:
            self._publish(setting.orders // portions)
            self._until(lambda driver: driver.reached > 0, "the first batch")
            for number, fault in enumerate(setting.faults, 2):
                self._publish(setting.orders * number // portions)
                time.sleep(chance.uniform(0, 2))  # at any moment of the batches that follow
                if fault == "worker":
                    self._until(lambda driver: bool(driver.workers()), "a Python worker")
                    assert self._driver is not None
                    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it may end by itself in this moment
                        self._driver.workers()[-1].kill()
                        self.result.workers_killed += 1
                    self._display.log("a Python worker killed (-9); Spark tries its task again", style="red")
                    continue
                killed_at, what = time.monotonic(), "driver killed (-9)"
                assert self._driver is not None
                self._driver.kill()
                self._driver = None
                self.result.drivers_killed += 1
                if fault == "checkpoint":
                    shutil.rmtree(self._order.checkpoint, ignore_errors=True)
                    self.result.checkpoints_deleted += 1
                    what += ", its checkpoint deleted"
                self._until(lambda driver: driver.reached > 0, "the next driver's first batch")
                seconds = time.monotonic() - killed_at
                self._display.log(f"{what}; the next one is at work after {seconds:.1f} s", style="red")
            self._until(lambda driver: driver.reached >= self._published, "the last orders")
        except Stuck as trouble:
            self.result.cut_short = str(trouble)
            self._display.log(f"gave up waiting for {trouble}", style="bold red")
            self._display.line(
                "".join((self._directory / "log").read_text().splitlines(keepends=True)[-20:])
            )  # a traceback
        finally:
            if self._driver is not None:
                self._driver.kill()
            shutil.rmtree(self._directory)
        self.result.seconds = round(time.monotonic() - began_at, 1)
        if self.result.cut_short:
            return self.result
        self._display.no_progress()
        self._display.log("checking it against the topic, read anew from its beginning")
        messages = {(r.partition, r.offset) for r in scan(setting.bootstrap_servers, self._topic)}
        with psycopg.connect(setting.conninfo) as connection:  # the ledger is not looked at
            name = sql.Identifier(self._schema)
            found = connection.execute(sql.SQL('SELECT partition, "offset" FROM {}.orders').format(name)).fetchall()
            ((total,),) = connection.execute(sql.SQL("SELECT orders FROM {}.total").format(name)).fetchall()
        times = Counter(found)
        self.result.orders = len(messages)
        self.result.lost = len(messages - times.keys())
        self.result.doubled = len(found) - len(times)
        self.result.counted_wrong = abs(total - len(messages))
        return self.result

    def _publish(self, until: int) -> None:
        """Publish orders up to a number; order n is in partition n % 3."""
        producer = Producer({"bootstrap.servers": self._setting.bootstrap_servers, "linger.ms": 5, "log_level": 2})
        for number in range(self._published, until):
            order = {"id": number, "customer": f"customer {number % 100}", "net": number % 1000}
            send(producer, self._topic, json.dumps(order), partition=number % PARTITIONS)
        if producer.flush(60):  # longer than a broker on a busy machine takes to answer
            raise Stuck("Kafka to take the orders")
        self._published = until

    def _until(self, condition: Callable[[Driver], bool], what: str) -> None:
        """Wait until something is true of the driver; start one where there is none, as a supervisor does.

        :raises Stuck: when nothing happens any more.
        """
        while self._driver is None or not condition(self._driver):
            if self._driver is None:
                with (self._directory / "log").open("a") as log:
                    self._driver = Driver(self._order, log)
            time.sleep(0.1)
            self._display.progress(min(self._driver.reached, self._setting.orders), self._setting.orders)
            if time.monotonic() - self._driver.heard_at > PATIENCE_SECONDS or self.result.errors > len(FAULTS):
                raise Stuck(what)
            if self._driver.has_ended:
                self.result.errors += 1
                self._display.log("the driver ended by itself; the next one starts", style="bold red")
                self._driver.kill()
                self._driver = None


def run(side: str, servers: Servers, display: Display, *, seed: int, messages: int | None, quick: bool) -> Result:
    spark.prepare()  # before anything waits for it
    jdbc()
    with psycopg.connect(servers.conninfo, autocommit=True) as connection:
        migrate(connection)
    setting = Setting(
        bootstrap_servers=servers.bootstrap_servers,
        conninfo=servers.conninfo,
        jdbc_url=servers.postgres.jdbc_url,
        seed=seed,
        orders=messages or (_QUICK_ORDERS if quick else _ORDERS),
        faults=plan(seed, quick=quick),
    )
    return SparkTrial(side, setting, display).run()


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table without its head; a side that was cut short has no figures."""
    titles = {
        "orders": "orders in the topic",
        "drivers_killed": "drivers killed (-9)",
        "workers_killed": "Python workers killed (-9)",
        "checkpoints_deleted": "checkpoints deleted",
        "lost": "lost",
        "doubled": "doubled rows",
        "counted_wrong": "counted too many or too few",
        "seconds": "seconds",
    }
    sides = [results["exactly_once"], results["jdbc"]]
    return [
        row(title, [f"{getattr(side, name):,}" for side in sides], [side.cut_short for side in sides])
        for name, title in titles.items()
    ]


def as_json(results: Mapping[str, Result], *, seed: int) -> dict[str, Any]:
    return {**{side: asdict(r) for side, r in results.items()}, "seed": seed, "ok": results["exactly_once"].is_exact}


def conclusion(results: Mapping[str, Result], *, seed: int) -> str:
    exact = results["exactly_once"]
    if exact.cut_short:
        return f"Nothing is shown: the run with the sink was cut short, waiting for {exact.cut_short}; --seed {seed}."
    if not exact.is_exact:
        return f"FAILED: {asdict(exact)}. That must not happen; please report it with --seed {seed}."
    plain = results["jdbc"]
    shown = f"Shown with --seed {seed}: {exact.orders:,} orders are one row each"
    if plain.cut_short:
        return f"{shown}. The other side was cut short, waiting for {plain.cut_short}: nothing is said of it."
    return f"{shown}; the usual foreachBatch doubled {plain.doubled:,} rows."
