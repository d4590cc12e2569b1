"""Fixtures of these tests: the scene of the integration tests, and ways to look at a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from exactly_once import ExactlyOnceConsumer
from exactly_once.metrics.endpoints import Endpoints
from exactly_once.metrics.prometheus import PrometheusMetrics
from tests.integration.conftest import make_scene, scene
from tests.observe.looking import Background, Page, in_background, scrape

__all__ = ["make_scene", "scene"]

Scrape = Callable[[], Page]
Run = Callable[..., Background]


@pytest.fixture
def metrics() -> PrometheusMetrics:
    """Metrics in a registry of the test's own."""
    return PrometheusMetrics(CollectorRegistry())


@pytest.fixture
def look(metrics: PrometheusMetrics) -> Iterator[Callable[[ExactlyOnceConsumer], Scrape]]:
    """Serve a consumer over HTTP and return what scrapes it."""
    made: list[Endpoints] = []

    def serve(consumer: ExactlyOnceConsumer) -> Scrape:
        endpoints = Endpoints(consumer, port=0, render=metrics.render)
        made.append(endpoints)
        return lambda: scrape(endpoints.port)

    yield serve
    for endpoints in made:
        endpoints.close()


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a function in a thread until the end of the test; what it raises is raised there."""
    with in_background() as start:
        yield start
