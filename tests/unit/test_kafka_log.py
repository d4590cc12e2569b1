"""The lines of the Kafka client: each once, however often it writes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from exactly_once.kafka.log import _MOST_LINES, Unrepeated


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger with the filter."""
    logger = logging.getLogger("tests.kafka_log")
    logger.addFilter(unrepeated := Unrepeated())
    yield logger
    logger.removeFilter(unrepeated)


def test_lines_that_differ_in_numbers_only_pass_once(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        log.error("FAIL [exactly_once#producer-%d] Connection refused (after %dms)", number, number)
        log.error("another line")
    assert [r.getMessage() for r in caplog.records] == [
        "FAIL [exactly_once#producer-0] Connection refused (after 0ms)",
        "another line",
    ]


def test_what_goes_on_is_told_again_with_the_number_left_out(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    times: list[float] = []
    for _ in range(1000):
        log.error("Connection refused")
        if len(caplog.records) > len(times):
            times.append(now - 1000)
        now += 1
    assert times == [0, 60, 180, 420, 900]
    assert caplog.records[1].getMessage() == "Connection refused (59 more like this since)"


def test_no_number_of_different_lines_fills_the_memory(log: logging.Logger) -> None:
    unrepeated = log.filters[0]
    assert isinstance(unrepeated, Unrepeated)
    for number in range(3000):
        log.error("line %s", "x" * number)
    assert len(unrepeated._seen) <= _MOST_LINES
