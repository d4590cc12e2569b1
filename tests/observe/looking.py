"""Looking at a consumer from outside: its pages, its metrics by Prometheus' own parser, its log records."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from exactly_once import ExactlyOnceConsumer
from exactly_once.metrics.table import Metric


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the one sample of a metric with these labels among its own."""
        found = self.values(metric, suffix, **labels)
        assert len(found) == 1, f"{metric.name}{suffix} {labels}: {found}\n{self.text}"
        return found[0]

    def values(self, metric: Metric, suffix: str = "", **labels: str) -> list[float]:
        """Return every sample of a metric with these labels among its own."""
        name = metric.name + suffix
        return [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]


def get(port: int, path: str, *, method: str = "GET") -> tuple[int, str, str]:
    """Ask a page; return status, content type and text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(port: int) -> Page:
    """Scrape the metrics as Prometheus does."""
    status, content_type, text = get(port, "/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    return Page(text)


class Background:
    """A function in a thread of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float = 60) -> None:
        """Wait for its end and raise what it raised."""
        self._thread.join(timeout_seconds)
        assert not self._thread.is_alive(), "it does not end"
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - it is raised by join()
            self.error = error


@contextmanager
def in_background() -> Iterator[Callable[..., Background]]:
    """Start ``start(consumer, function)``: consume in a thread; the consumer is stopped at the end."""
    started: list[tuple[ExactlyOnceConsumer, Background]] = []

    def start(consumer: ExactlyOnceConsumer, function: Callable[[], object]) -> Background:
        consumer._thread = None  # whoever made it hands it over
        background = Background(function)
        started.append((consumer, background))
        return background

    try:
        yield start
    finally:
        for consumer, _ in started:
            consumer.stop()
        for _, background in started:
            background.join()


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the library added to a record."""
    names = ("action", "group", "topic", "partition", "offset", "owner_epoch", "partitions")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}
