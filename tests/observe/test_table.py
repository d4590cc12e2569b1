"""The table of metrics: well-formed, complete, and what the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exactly_once.consumer.observer import _COUNTED
from exactly_once.metrics.table import METRICS, Metric

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def row(metric: Metric) -> str:
    """The line of the documentation that describes a metric."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.help} |"


def test_the_documentation_shows_the_table_line_by_line() -> None:
    lines = DOCUMENT.read_text("utf-8").splitlines()
    assert [line for line in lines if re.match(r"\| `\w+` \|", line)] == [row(metric) for metric in METRICS]


def test_alerts_name_metrics_that_exist() -> None:
    named = re.findall(r"exactly_once_\w+", DOCUMENT.read_text("utf-8"))
    assert set(named) == {metric.name for metric in METRICS}


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_metric_is_named_as_prometheus_wants_it(subtests: pytest.Subtests) -> None:
    for metric in METRICS:
        with subtests.test(metric.name):
            assert metric.name.startswith("exactly_once_")
            assert metric.name.endswith("_total") == (metric.kind == "counter")
            assert ("seconds" in metric.name) == (metric.unit == "seconds")
            assert metric.labels[:2] == ("group", "owner")
            assert bool(metric.buckets) == (metric.kind == "histogram")
            assert list(metric.buckets) == sorted(metric.buckets)
            assert metric.help.endswith(".")


def test_every_counter_of_the_table_is_counted_somewhere() -> None:
    assert {metric for metric, _, _ in _COUNTED} == {metric for metric in METRICS if metric.kind == "counter"}
    assert all(len(metric.labels) == 2 + len(values) for metric, values, _ in _COUNTED)
