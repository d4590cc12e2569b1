"""What the sink command says while it runs; measurements are given by hand here, test_sink has a real consumer's."""

from __future__ import annotations

import io
import logging

import pytest

from exactly_once import metrics as m
from exactly_once.cli.sink_progress import Both, Progress

LABELS = ("group", "owner")


class Sink:
    """A progress on a clock that is set, with a consumer whose lag is set."""

    def __init__(self, *, is_live: bool) -> None:
        self.now = 100.0
        self.rows = 0
        self.lag = {("payments", "0"): 7, ("payments", "1"): 30}
        self.out = io.StringIO()
        self.progress = Progress(is_live=is_live, rows=lambda: self.rows, out=self.out, clock=lambda: self.now)
        self.progress.attach(lambda: [m.Sample(m.LAG, (*LABELS, *p), lag) for p, lag in self.lag.items()])

    def unit(self, messages: int, *, commit_seconds: float) -> None:
        Both(self.progress).add(m.MESSAGES, messages, LABELS)
        Both(self.progress).add(m.UNITS, 1, LABELS)
        Both(self.progress).observe(m.COMMIT_SECONDS, commit_seconds, LABELS)
        self.rows += 2 * messages


def test_a_record_tells_rates_since_the_last_one_and_lag(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(is_live=False)
    with caplog.at_level(logging.INFO):
        sink.unit(1000, commit_seconds=0.010)
        sink.unit(2000, commit_seconds=0.030)
        sink.now += 2
        sink.progress.tell()
        sink.unit(500, commit_seconds=0.001)
        sink.lag = {("payments", "0"): 0}
        sink.now += 1
        sink.progress.tell()
        sink.progress.tell()
    first, second, third = caplog.records
    assert first.getMessage() == (
        "3,000 messages; 1,500 messages/s, 3,000 rows/s, 1,500 a unit, commit 20.0 ms, lag 37 (most: payments[1] 30)"
    )
    assert second.getMessage() == "3,500 messages; 500 messages/s, 1,000 rows/s, 500 a unit, commit 1.0 ms, lag 0"
    assert third.getMessage() == "3,500 messages; 0 messages/s, 0 rows/s, lag 0"
    assert vars(first)["lag"] == {"payments[0]": 7, "payments[1]": 30}
    assert (vars(second)["messages"], vars(second)["rows"]) == (3500, 7000)


def test_on_a_terminal_one_line_moves_and_is_never_wider_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    sink = Sink(is_live=True)
    sink.unit(1000, commit_seconds=0.010)
    sink.now += 1
    with sink.progress:
        sink.progress.tell()
    lines = sink.out.getvalue().split("\r")
    assert lines[1] == "1,000 messages; 1,000 messages/s, 2,000"
    assert all(len(line.rstrip("\n")) <= 39 for line in lines)
    assert sink.out.getvalue().endswith("\n")


def test_a_closed_consumer_is_not_asked_for_its_lag() -> None:
    sink = Sink(is_live=True)
    sink.progress.detach(list)
    sink.progress.tell()
    assert "lag" not in sink.out.getvalue()
