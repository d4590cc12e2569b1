"""The adapter for Prometheus by itself: what is pushed and read stands on a page that a scraper can parse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from exactly_once.metrics import table as m
from exactly_once.metrics.prometheus import PrometheusMetrics
from tests.observe.looking import Page

COMMON = ("g", "worker-1")


def page(metrics: PrometheusMetrics) -> Page:
    return Page(metrics.render()[1].decode())


def test_counters_add_up_and_stand_at_zero_from_the_start(metrics: PrometheusMetrics) -> None:
    metrics.add(m.UNITS, 0, COMMON)
    assert page(metrics).value(m.UNITS, group="g", owner="worker-1") == 0
    metrics.add(m.UNITS, 2, COMMON)
    metrics.add(m.UNITS, 3, COMMON)
    assert page(metrics).value(m.UNITS) == 5


def test_a_histogram_has_the_buckets_of_the_table(metrics: PrometheusMetrics) -> None:
    metrics.observe(m.COMMIT_SECONDS, 0.003, COMMON)
    found = page(metrics)
    assert found.value(m.COMMIT_SECONDS, "_sum") == pytest.approx(0.003)
    assert found.value(m.COMMIT_SECONDS, "_bucket", le="0.0025") == 0
    assert found.value(m.COMMIT_SECONDS, "_bucket", le="0.005") == 1
    assert len(found.values(m.COMMIT_SECONDS, "_bucket")) == len(m.COMMIT_SECONDS.buckets) + 1


def test_gauges_are_read_at_each_scrape_until_they_are_detached(metrics: PrometheusMetrics) -> None:
    owned = iter((3, 4))

    def read() -> Iterator[m.Sample]:
        yield m.Sample(m.OWNED, COMMON, next(owned))

    metrics.attach(read)
    assert page(metrics).value(m.OWNED) == 3
    assert page(metrics).value(m.OWNED) == 4
    metrics.detach(read)
    assert page(metrics).values(m.OWNED) == []


def test_two_consumers_of_one_name_leave_the_page_valid(metrics: PrometheusMetrics) -> None:
    metrics.attach(lambda: [m.Sample(m.OWNED, COMMON, 1)])
    metrics.attach(lambda: [m.Sample(m.OWNED, COMMON, 2)])
    assert page(metrics).value(m.OWNED) == 2


def test_labels_may_hold_what_a_group_may_be_called(metrics: PrometheusMetrics) -> None:
    group = 'a "b" \\ c\nd'
    metrics.add(m.UNITS, 1, (group, ""))
    assert page(metrics).value(m.UNITS, group=group) == 1


def test_a_registry_takes_the_metrics_once() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusMetrics(registry)


def test_the_scraper_chooses_the_format(metrics: PrometheusMetrics) -> None:
    metrics.add(m.UNITS, 1, COMMON)
    content_type, text = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
    assert "exactly_once_units" in {family.name for family in families}


_WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
import exactly_once
try:
    import exactly_once.metrics.prometheus
except ImportError as error:
    print(error)
"""


def test_without_the_package_the_library_works_and_the_adapter_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'kafka-exactly-once[prometheus]'" in done.stdout


def test_gauges_that_several_processes_do_not_serve_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "anywhere")
    PrometheusMetrics(CollectorRegistry())
    assert [getattr(record, "action", None) for record in caplog.records] == ["gauges_unserved"]
