"""What the sink command says while it runs; measurements are given by hand here, test_sink has a real consumer's."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter

import pytest

from exactly_once.cli.sink_progress import CLEAR, Counts, LeftOut, Measurements, Progress
from exactly_once.metrics import table as m
from exactly_once.writer import RawDecoder, TableSink

LABELS = ("group", "owner")


class Sink:
    """A progress on a clock that is set, with a consumer whose lag is set."""

    def __init__(self, *, is_live: bool) -> None:
        self.now = 100.0
        self.rows = 0
        self.lag = {("payments", "0"): 7, ("payments", "1"): 30}
        self.owned = 2
        self.out = io.StringIO()
        self.measured = Measurements(rows=lambda: self.rows)
        self.progress = Progress(self.measured.counts, is_live=is_live, out=self.out, clock=lambda: self.now)
        self.measured.attach(self.read)

    def read(self) -> list[m.Sample]:
        lag = [m.Sample(m.LAG, (*LABELS, *p), lag) for p, lag in self.lag.items()]
        return [m.Sample(m.OWNED, LABELS, self.owned), *lag]

    def unit(self, messages: int, *, commit_seconds: float) -> None:
        self.measured.add(m.MESSAGES, messages, LABELS)
        self.measured.add(m.UNITS, 1, LABELS)
        self.measured.observe(m.COMMIT_SECONDS, commit_seconds, LABELS)
        self.rows += 2 * messages

    def line(self) -> str:
        """The line that stands on the terminal now."""
        return self.out.getvalue().split(CLEAR)[-1]


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


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_on_a_terminal_one_line_moves_and_holds_still(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers are, each stands where it stood, and nothing is cut in the middle of a word."""
    monkeypatch.setenv("COLUMNS", str(width))
    sink = Sink(is_live=True)
    shapes = set()
    for messages, lag in ((1, 5), (1000, 123_456_789), (1_234_567, 0), (0, 7)):
        if messages:
            sink.unit(messages, commit_seconds=0.0103)
        sink.lag = {("payments", "0"): lag}
        sink.now += 1
        sink.progress.tell()
        line = sink.line()
        assert len(line) < width
        assert re.fullmatch(r" *[\d,]+ messages(  +.*(/s|[\d,]+|a unit|ms))?", line), line
        shapes.add(tuple((found.start(), found[0]) for found in re.finditer(r"[a-z]+(/s)?|/s", line.split("most")[0])))
    assert len(shapes) == 1, shapes
    shown = {40: ["/s"], 80: ["lag", "rows/s"], 100: ["a unit"], 160: ["commit", "most: payments[0] 7"]}
    assert all(text in line for at, texts in shown.items() if at <= width for text in texts), line
    sink.progress.end()
    assert sink.out.getvalue().endswith("\n")


def test_it_says_for_how_long_it_waits_for_the_group(caplog: pytest.LogCaptureFixture) -> None:
    sink, live = Sink(is_live=False), Sink(is_live=True)
    with caplog.at_level(logging.INFO):
        for each in (sink, live):
            each.owned, each.lag = 0, {}
            for _ in range(2):
                each.now += 12
                each.progress.tell()
            each.owned = 1
            each.progress.tell()
    assert [r.getMessage() for r in caplog.records] == [
        "0 messages; waiting for the group: 12 s",
        "0 messages; waiting for the group: 24 s",
        "0 messages; 0 messages/s, 0 rows/s",
    ]
    assert "waiting for the group: 24 s" in live.out.getvalue()
    assert "waiting" not in live.line()


def test_what_several_workers_have_done_is_summed_up() -> None:
    one = Counts(messages=5, units=1, commit_seconds=0.5, rows=4, owned=1, lag={"t[0]": 3})
    other = Counts(messages=2, units=2, commit_seconds=0.1, rows=2, owned=2, lag={"t[1]": 1})
    assert sum([one, other], Counts()) == Counts(
        messages=7, units=3, commit_seconds=0.6, rows=6, owned=3, lag={"t[0]": 3, "t[1]": 1}
    )


def test_a_closed_consumer_is_not_asked_for_its_lag() -> None:
    sink = Sink(is_live=False)
    sink.measured.detach(list)
    assert sink.measured.counts().lag == {}


def test_what_is_left_out_is_reported_when_it_grows(caplog: pytest.LogCaptureFixture) -> None:
    sink = TableSink("payment", decoder=RawDecoder())
    left_out = LeftOut([("payment", sink)])
    left_out.tell()
    sink.rows, sink.unfilled_columns, sink.unmet_fields = 10, {"total"}, {"kindd"}
    sink.unused_fields = Counter({"late": 3999, "screenWidth": 3499, **{f"f{i:02}": 1 for i in range(30)}})
    left_out.tell()
    left_out.tell()
    sink.unused_fields["late"] += 1
    sink.unfilled_columns, sink.unmet_fields = set(), set()
    left_out.tell()
    first, second = [r.getMessage() for r in caplog.records]
    assert first.startswith("table payment: fields without a column: late (3,999), screenWidth (3,499), f00 (1), ")
    columns = "columns that no message has filled: total; fields of where, where_not or drop that no message had: kindd"
    assert first.endswith(f"f17 (1) and 12 more; {columns}")
    assert "late (4,000)" in second
    assert "columns" not in second.partition(":")[2].replace("without a column", "")
    assert vars(caplog.records[0])["unused_fields"]["late"] == 3999


def test_deletes_that_found_no_row_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """They may show that keys are read otherwise than those of the rows were; a row of one unit's life is none, too."""
    caplog.set_level(logging.INFO)
    sink = TableSink("payment", decoder=RawDecoder(), mode="upsert")
    left_out = LeftOut([("payment", sink)])
    sink.writer.missed_deletes = 1234
    left_out.tell()
    left_out.tell()
    assert [r.getMessage() for r in caplog.records] == ["table payment: deletes that took no row away: 1,234"]


def test_rows_that_the_mode_ignores_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sink = TableSink("payment", decoder=RawDecoder(), mode="insert-ignore")
    left_out = LeftOut([("payment", sink)])
    sink.writer.ignored_rows = 12
    left_out.tell()
    left_out.tell()
    (record,) = caplog.records
    assert record.getMessage() == "table payment: rows that the table had already, or had newer: 12"
    assert record.levelno == logging.INFO


def test_a_name_that_differs_in_case_and_underscores_only_is_pointed_at(caplog: pytest.LogCaptureFixture) -> None:
    sink = TableSink("segment", decoder=RawDecoder())
    sink.rows, sink.unfilled_columns = 1, {"messageid", "user_id", "other"}
    sink.unused_fields = Counter({"messageId": 5, "userId": 5, "more": 5})
    LeftOut([("segment", sink)]).tell()
    (record,) = caplog.records
    assert 'column messageid is not field messageId: say rename = {messageid = "messageId", ...}' in record.getMessage()
    assert "column user_id is not field userId" in record.getMessage()
