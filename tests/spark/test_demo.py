"""``exactly-once demo spark``: what it says, and the side of this library."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from exactly_once.demo import spark_trial
from exactly_once.demo.display import Display
from tests.support.waiting import SPARK_SECONDS


def side(**figures: object) -> spark_trial.Result:
    return spark_trial.Result(**figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exact", "plain", "said"),
    [
        (side(orders=9), side(doubled=3), "9 orders are one row each; the usual foreachBatch doubled 3 rows"),
        (side(orders=9, lost=1), side(), "FAILED"),
        (side(orders=9, counted_wrong=1), side(), "FAILED"),
        (side(cut_short="Godot"), side(), "Nothing is shown: the run with the sink was cut short, waiting for Godot"),
        (side(orders=9), side(cut_short="Godot"), "9 orders are one row each. The other side was cut short"),
    ],
)
def test_the_sentence_says_what_was_shown(exact: spark_trial.Result, plain: spark_trial.Result, said: str) -> None:
    results = {"exactly_once": exact, "jdbc": plain}
    assert said in spark_trial.conclusion(results, seed=1)
    assert spark_trial.as_json(results, seed=1)["ok"] is exact.is_exact
    shown = {cell for row in spark_trial.rows(results) for cell in row[1:]}
    assert ("cut short" in shown) is bool(exact.cut_short or plain.cut_short)


def test_every_kind_of_fault_is_drawn() -> None:
    for seed in range(20):
        assert set(spark_trial.plan(seed, quick=True)) == set(spark_trial.FAULTS)
    assert spark_trial.plan(3, quick=False) == spark_trial.plan(3, quick=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("needs_spark")
def test_the_sink_is_exact_when_a_worker_is_killed_and_a_checkpoint_is_gone(
    bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's side of this library; the other one takes as long, and shows nothing of ours."""
    monkeypatch.setattr(spark_trial, "PATIENCE_SECONDS", SPARK_SECONDS)
    setting = spark_trial.Setting(
        bootstrap_servers=bootstrap_servers,
        conninfo=conninfo,
        jdbc_url="",
        seed=1,
        orders=1500,
        faults=("worker", "checkpoint"),
    )
    try:
        result = spark_trial.SparkTrial("exactly_once", setting, Display()).run()
    finally:
        db.execute("DROP SCHEMA IF EXISTS demo_spark_exactly_once CASCADE")
    assert result.is_exact, result
    assert (result.orders, result.drivers_killed, result.checkpoints_deleted) == (1500, 1, 1)
