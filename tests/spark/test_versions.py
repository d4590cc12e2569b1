"""Other versions of Spark than the installed one: a replay, a lost checkpoint, a worker killed after its commit.

Each version is fetched into the user's cache, once (400 MB, minutes), so only where it is asked for. There it is put in
front of the installed one, and shares every other package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from exactly_once.embedded.jars import Progress, cache_directory, locked
from tests.support.require import VARIABLE, required_parts
from tests.support.spark import Driver

VERSIONS = [version for version in ("3.5.3", "4.0.0") if version != metadata.version("pyspark")]
"""The oldest that is promised, and the first with Arrow on the driver and with data sources in Python."""

SHORT = (
    "test_sink.py::test_a_replayed_batch_writes_nothing",
    "test_sink.py::test_a_query_with_state_runs_through_a_replayed_batch_and_writes_nothing",
    "test_sink.py::test_a_lost_checkpoint_and_other_batches_write_nothing_twice",
    "test_sink.py::test_a_small_batch_is_written_by_the_driver_and_as_well_guarded",
    "test_faults.py::test_a_worker_that_dies_after_its_commit_is_tried_again_and_writes_nothing_twice",
    "test_batch_ids.py::test_an_aggregation_is_right_through_replays",
    "test_plans.py::test_what_picks_rows_by_looking_at_others_is_refused_with_a_transaction_for_each_task",
    "test_plans.py::test_what_makes_each_row_of_its_message_alone_is_taken_with_a_transaction_for_each_task",
)
SOURCE = (
    "test_data_source.py::test_every_message_is_written_once_also_where_batches_come_again",
    "test_data_source.py::test_a_worker_that_dies_after_it_has_staged_is_tried_again_and_only_that_counts",
)
"""Spark 3.5 has no data sources in Python."""


def fetched(version: str) -> Path:
    """Return the directory with a version of pyspark, fetching it the first time."""
    home = cache_directory() / f"pyspark-{version}"
    with locked(home):
        if not home.is_dir():
            fetch(version, home)
    return home


def fetch(version: str, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="fetching-") as temporary:
        complete = Path(temporary, "complete")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        with Progress(f"Spark {version}: fetching pyspark, once"):
            subprocess.run([*command, "--target", str(complete), f"pyspark=={version}"], check=True, timeout=1200)
        complete.rename(home)


def test_what_runs_on_spark_3_needs_no_data_source() -> None:
    modules = {f"tests.spark.{test.partition('.py')[0]}" for test in SHORT}
    hidden = "import sys; sys.modules['pyspark.sql.datasource'] = None; "
    subprocess.run([sys.executable, "-c", f"{hidden}import {', '.join(sorted(modules))}"], check=True, timeout=60)


@pytest.mark.skipif(
    "spark-versions" not in required_parts(),
    reason=f"other versions of Spark are fetched if {VARIABLE} names spark-versions",
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_short_suite_passes(
    version: str, bootstrap_servers: str, conninfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = filter(None, [str(fetched(version)), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(VARIABLE, "spark")
    monkeypatch.setenv("EXACTLY_ONCE_TEST_BOOTSTRAP_SERVERS", bootstrap_servers)
    monkeypatch.setenv("EXACTLY_ONCE_TEST_CONNINFO", conninfo)
    tests = SHORT if Version(version) < Version("4") else (*SHORT, *SOURCE)
    suite = [str(Path(__file__).parent / test) for test in tests]
    # What a Spark says of a Python or a pandas that is newer is not ours to mend.
    with Driver("-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", *suite) as running:
        running.wait(f"Spark {version}")
        assert running.wait_ended(600) == 0, running.story()
