"""Prometheus, configured by docker/observability/, scrapes a worker and answers every query of the dashboard."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from exactly_once import ExactlyOnceConsumer
from exactly_once.metrics.endpoints import Endpoints
from exactly_once.metrics.prometheus import PrometheusMetrics
from tests.conftest import MakeConsumer
from tests.docker.test_dashboard import queries
from tests.support.docker import Stack, docker, stack
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

MESSAGES = 300
LONG = 60
PORTS = (9400, 9401, 9402)
"""What prometheus.yml scrapes."""


@pytest.fixture(scope="module")
def prometheus(engine: None) -> Iterator[Stack]:
    """Prometheus with our configuration."""
    with stack("observability", ["prometheus"], ["PROMETHEUS_PORT"]) as running:
        yield running


def test_every_query_of_the_dashboard_shows_a_worker_that_is_scraped(
    prometheus: Stack, bootstrap_servers: str, conninfo: str, make_consumer: MakeConsumer, name: str
) -> None:
    topic = create_topic(bootstrap_servers, 3, replication=3)
    ensure_journal(conninfo)
    metrics = PrometheusMetrics(CollectorRegistry())
    consumer = make_consumer(metrics=metrics)
    consumer.subscribe([topic])
    with _served(consumer, metrics):
        for total in (MESSAGES, 2 * MESSAGES):
            produce(bootstrap_servers, topic, MESSAGES, 3, start=total - MESSAGES)
            assert drain(consumer) == MESSAGES
            count = f'exactly_once_messages_total{{group="{name}"}}'
            until(lambda: _values(prometheus, count) == [total], LONG, f"{count} to be {total}")  # noqa: B023
        # Of the last minute, so before anything else is waited for.
        rate = _shown(name)[0]
        until(lambda: [value > 0 for value in _values(prometheus, rate)] == [True], LONG, f"{rate} to be above 0")
        # Lag, for the query that is about lag.
        produce(bootstrap_servers, topic, MESSAGES, 3, start=2 * MESSAGES)
        for query in _shown(name):
            until(lambda: _values(prometheus, query), LONG, f"an answer to {query}")  # noqa: B023


def _shown(group: str) -> list[str]:
    """Return the dashboard's queries as Grafana asks them for one group."""
    return [query.replace("$group", group) for query in queries() if not query.startswith("label_values")]


def _values(prometheus: Stack, query: str) -> list[float]:
    """Ask Prometheus."""
    address = f"http://127.0.0.1:{prometheus.ports['PROMETHEUS_PORT']}/api/v1/query"
    with urllib.request.urlopen(f"{address}?{urllib.parse.urlencode({'query': query})}", timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


@contextmanager
def _served(consumer: ExactlyOnceConsumer, metrics: PrometheusMetrics) -> Iterator[None]:
    """Serve the metrics where containers find this machine, and nobody outside of it does, at the first free port."""
    host = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    for port in PORTS:
        try:
            endpoints = Endpoints(consumer, port=port, host=host, render=metrics.render)
        except OSError as error:
            taken = error
            continue
        with endpoints:
            yield
        return
    raise taken
