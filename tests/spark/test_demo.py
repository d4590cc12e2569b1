"""``exactly-once demo spark`` as a user starts it: drivers killed, a checkpoint deleted, and both sides compared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from exactly_once.demo import spark_trial
from tests.support.seeds import seeds


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
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("needs_spark", "own_servers")
def test_the_sink_is_exact_where_the_usual_foreach_batch_doubles() -> None:
    (seed,) = seeds([], new=1)
    command = [sys.executable, "-m", "exactly_once", "demo", "spark", "--quick", "--json"]
    command += ["--seed", str(seed), "--messages", "6000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exactly_once"]["orders"] == 6000
    # Before the first fault a batch was committed; without its checkpoint it is written again.
    assert result["jdbc"]["doubled"] > 0
