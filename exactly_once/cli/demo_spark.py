"""``exactly-once demo spark``: orders through Spark into a table, by the sink and by the usual ``foreachBatch``."""

from __future__ import annotations

import argparse
import json
import random

import psycopg

from exactly_once import embedded
from exactly_once.demo import spark_trial
from exactly_once.demo.display import Display
from exactly_once.demo.spark_driver import jdbc
from exactly_once.embedded import spark
from exactly_once.ledger.migrate import migrate

from .runs import CUT_SHORT, ending_on_sigterm

_ORDERS, _QUICK_ORDERS = 60_000, 20_000
_TITLES = {
    "exactly_once": "With the sink of this library: foreachBatch(PostgresSink(...))",
    "jdbc": "The usual foreachBatch, the same faults: write.jdbc(mode='append'), and a count beside it",
}


def run(args: argparse.Namespace) -> int:
    """Run both sides; return 0 when the sink lost and doubled nothing, 1 when it did, 3 for a run cut short."""
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    results: dict[str, spark_trial.Result] = {}
    with ending_on_sigterm(), Display() as display:
        display.log(f"starting Kafka, Postgres and Spark; --seed {seed} repeats the orders and faults")
        spark.java_home(), spark.kafka_source(), jdbc()  # fetched before anything waits for it
        with embedded.start() as servers:
            with psycopg.connect(servers.conninfo, autocommit=True) as connection:
                migrate(connection)
            setting = spark_trial.Setting(
                bootstrap_servers=servers.bootstrap_servers,
                conninfo=servers.conninfo,
                jdbc_url=servers.postgres.jdbc_url,
                seed=seed,
                orders=args.messages or (_QUICK_ORDERS if args.quick else _ORDERS),
                faults=spark_trial.plan(seed, quick=args.quick),
            )
            for side, title in _TITLES.items():
                display.title(title)
                results[side] = spark_trial.SparkTrial(side, setting, display).run()
        exact = results["exactly_once"]
        display.line("")
        display.table(spark_trial.HEAD, spark_trial.rows(results), good=exact.is_exact)
        display.line(f"\n{spark_trial.conclusion(results, seed=seed)}")
    if args.json:
        print(json.dumps(spark_trial.as_json(results, seed=seed)), flush=True)
    if exact.cut_short:
        return CUT_SHORT
    return 0 if exact.is_exact else 1
