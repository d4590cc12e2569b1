"""The demo's parts that judge and draw: the plan of faults, the result and the display."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import psutil
import psycopg
import pytest

from exactly_once._failpoints import OF_A_UNIT
from exactly_once.cli import main
from exactly_once.demo import payments, spark_driver, spark_trial
from exactly_once.demo.display import Display
from exactly_once.demo.journal import Entry, Record
from exactly_once.demo.result import HEAD, TOTAL, Result, Verdict, as_json, check, compare, conclusion, rows
from exactly_once.demo.trial import Fault, Setting, Stuck, Tally, Trial, plan
from tests.support.waiting import until

PAYMENT = b'{"from": 1, "to": 2, "amount": 30}'
SENT = [Record("payments", 0, 7, b"1", PAYMENT)]
APPLIED = [Entry("payments", 0, 7, None, "worker-1", 700)]
PAID = {(0, 1): 970, (0, 2): 1030, (0, 3): 1000}
EXACT = Verdict(messages=10, lost=0, duplicated=0, foreign=0, wrong_balances=0, balance=TOTAL)
CALM = Tally(crashes=8, frozen=2, fenced=2, drained=True)


def test_comparison_of_one_effect_for_each_message_finds_nothing_wrong() -> None:
    verdict = compare(SENT, APPLIED, PAID)
    assert (verdict.messages, verdict.lost, verdict.duplicated, verdict.foreign) == (1, 0, 0, 0)
    assert verdict.wrong_balances == 0
    assert verdict.balance == 3000


def test_comparison_counts_a_message_without_effect_as_lost() -> None:
    verdict = compare(SENT, [], dict.fromkeys(PAID, 1000))
    assert (verdict.lost, verdict.duplicated, verdict.wrong_balances) == (1, 0, 2)


def test_comparison_counts_a_message_with_two_effects_as_duplicated() -> None:
    verdict = compare(SENT, APPLIED * 2, {(0, 1): 940, (0, 2): 1060, (0, 3): 1000})
    assert (verdict.lost, verdict.duplicated, verdict.wrong_balances) == (0, 1, 2)


def test_comparison_sees_an_effect_of_a_message_that_was_taken_back() -> None:
    assert compare([], APPLIED, {}).foreign == 1


def test_check_scans_what_was_published_and_not_what_was_aborted(
    bootstrap_servers: str, postgres_conninfo: str, name: str
) -> None:
    """Nothing was applied, so that every message of the scan is lost: as many as were published for good."""
    payments.create_topic(bootstrap_servers, name)
    publisher = payments.Publisher(bootstrap_servers, name, seed=1)
    with psycopg.connect(postgres_conninfo) as connection:
        payments.create_tables(connection, name)
    publisher.publish(50)
    publisher.publish(70)
    verdict = check(bootstrap_servers, postgres_conninfo, name, name)
    assert (verdict.messages, verdict.lost) == (120, 120)
    assert verdict.balance == TOTAL


def test_effects_applied_once_are_exact_and_applied_twice_are_not(
    bootstrap_servers: str, postgres_conninfo: str, name: str
) -> None:
    """The messages are real, read by the group of this test."""
    payments.create_topic(bootstrap_servers, name)
    publisher = payments.Publisher(bootstrap_servers, name, seed=2)
    publisher.publish(200)
    messages = _read(bootstrap_servers, name, 200)
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        payments.create_tables(connection, name)
        payments.apply(connection, name, messages, "worker")
        verdict = check(bootstrap_servers, postgres_conninfo, name, name)
        assert verdict == replace(EXACT, messages=200)
        payments.apply(connection, name, messages[:30], "worker")
    verdict = check(bootstrap_servers, postgres_conninfo, name, name)
    assert (verdict.lost, verdict.duplicated) == (0, 30)
    assert verdict.wrong_balances > 0
    assert verdict.balance == TOTAL  # money that moves twice is still there: the sum alone would not tell


def _read(bootstrap_servers: str, topic: str, count: int) -> list[Any]:
    from confluent_kafka import Consumer  # noqa: PLC0415  (only here)

    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        messages: list[Any] = []
        while len(messages) < count:
            messages += consumer.consume(count - len(messages), 1)
        return messages
    finally:
        consumer.close()


@pytest.mark.parametrize("quick", [True, False])
def test_plan_kills_at_every_failpoint_and_freezes_only_with_a_batch_in_hand(*, quick: bool) -> None:
    faults = plan(11, quick=quick)
    kills = Counter(fault.at for fault in faults if fault.kind == "kill")
    assert kills == dict.fromkeys(OF_A_UNIT, 1 if quick else 2)
    frozen = {fault.at for fault in faults if fault.kind == "freeze"}
    assert len(frozen) == (2 if quick else 3)
    assert not frozen & {"committed", "positioned", "mirrored"}


def test_plan_is_repeated_by_its_seed_and_no_other() -> None:
    assert plan(3, quick=False) == plan(3, quick=False)
    assert plan(3, quick=False) != plan(4, quick=False)


@pytest.mark.parametrize("wrong", ["lost", "duplicated", "foreign", "wrong_balances", "balance", "messages"])
def test_result_is_not_exact_if_the_check_found_something(wrong: str) -> None:
    assert Result(CALM, EXACT, published=10).is_exact
    result = Result(CALM, replace(EXACT, **{wrong: 1}), published=10)
    assert len(result.failures) == 1
    assert not result.is_exact


@pytest.mark.parametrize("wrong", [{"unfenced": 1}, {"errors": 1}])
def test_result_is_not_exact_if_the_run_was_not_clean(wrong: dict[str, Any]) -> None:
    """A zombie's batch was stored, a worker ended by itself."""
    result = Result(replace(CALM, **wrong), EXACT, published=10)
    assert len(result.failures) == 1
    assert not result.is_exact


def test_conclusion_admits_that_the_ordinary_loop_was_lucky() -> None:
    exact = Result(CALM, EXACT, published=10)
    doubled = Result(CALM, replace(EXACT, duplicated=4), published=10)
    assert "without a duplicate" in conclusion({"exactly_once": exact, "at_least_once": exact}, seed=1)
    assert "4 of them more than once" in conclusion({"exactly_once": exact, "at_least_once": doubled}, seed=1)
    assert "FAILED: 4 duplicated." in conclusion({"exactly_once": doubled, "at_least_once": doubled}, seed=1)


SHORT = replace(CALM, drained=False, waited_for="a miracle")


def test_what_was_not_applied_when_a_run_was_cut_short_is_not_lost() -> None:
    """The ordinary loop was shown with 2,198 lost payments that it would have applied."""
    result = Result(SHORT, replace(EXACT, messages=7, lost=5, wrong_balances=3), published=10)
    assert (result.failures, result.is_exact) == ([], False)
    doubled = Result(SHORT, replace(EXACT, duplicated=1), published=10)
    assert doubled.failures == ["1 duplicated"], "that is wrong at any time"


@dataclass
class Demo:
    """The command with both runs, and their servers, left out: what they would have said is given."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, **sides: Result) -> tuple[int, str]:
        self.monkeypatch.setattr("exactly_once.demo.result.run", lambda loop, *_, **__: sides[loop])
        servers = SimpleNamespace(bootstrap_servers="", conninfo="")
        self.monkeypatch.setattr("exactly_once.embedded.start", lambda: contextlib.nullcontext(servers))
        code = main(["demo", "--json", "--seed", "7"])
        return code, self.capsys.readouterr().out


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    return Demo(monkeypatch, capsys)


LOST = replace(EXACT, lost=2_198, messages=3_638)


def test_a_run_that_was_cut_short_is_never_tabulated_and_the_exit_code_says_so(demo: Demo) -> None:
    exact = Result(CALM, EXACT, published=10)
    code, said = demo(exactly_once=exact, at_least_once=Result(SHORT, LOST, published=10))
    assert code == 3
    assert "2,198" not in said
    assert "2198" not in said
    assert "The ordinary loop was cut short, waiting for a miracle: it shows nothing." in said
    assert "luck" not in said
    assert re.search(r"^ *lost +0 +cut short$", said, re.MULTILINE)
    assert json.loads(said.splitlines()[-1])["at_least_once"] == {"cut_short": "a miracle", "seed": 7}


def test_where_the_library_was_cut_short_there_is_no_table_at_all(demo: Demo) -> None:
    code, said = demo(exactly_once=Result(SHORT, LOST, published=10))
    assert code == 3
    assert "Nothing is shown: the run with the library was cut short, waiting for a miracle." in said
    assert "lost" not in said
    assert json.loads(said.splitlines()[-1])["ok"] is False
    code, said = demo(exactly_once=Result(SHORT, replace(EXACT, duplicated=1), published=10))
    assert code == 1, "what is doubled stays doubled"
    assert "FAILED: 1 duplicated" in said


def test_runs_that_came_to_their_ends_are_told_by_the_exit_code(demo: Demo) -> None:
    exact, doubled = Result(CALM, EXACT, published=10), Result(CALM, replace(EXACT, duplicated=4), published=10)
    assert demo(exactly_once=exact, at_least_once=doubled)[0] == 0
    assert demo(exactly_once=doubled, at_least_once=doubled)[0] == 1


def test_faults_that_found_nothing_to_strike_are_counted_in_the_last_words(demo: Demo) -> None:
    """With --messages 1 hardly a fault struck, and the demo was as content as ever."""
    exact = Result(replace(CALM, crashes=1, frozen=0, fenced=0, spared=9), EXACT, published=10)
    code, said = demo(exactly_once=exact, at_least_once=exact)
    assert code == 0
    assert "Of 10 faults 9 did not strike the library and 9 not the ordinary loop" in said
    none = Result(replace(CALM, crashes=0, frozen=0, fenced=0, spared=10), EXACT, published=10)
    code, said = demo(exactly_once=none, at_least_once=none)
    assert code == 3
    assert "Nothing is shown: payments ran out before any fault struck; give it more --messages." in said
    assert json.loads(said.splitlines()[-1])["ok"] is False


def test_too_few_orders_for_the_faults_of_spark_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The first driver waited three minutes for a batch of none."""
    assert main(["demo", "spark", "--messages", "1"]) == 2
    assert "--messages must be 60 or more" in capsys.readouterr().err


def test_the_password_is_not_on_the_command_line_of_sparks_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the one who started it the driver ends. What it would do with Spark is left out."""
    program = (
        "import time; from exactly_once.demo import worker; "
        "worker.serve(lambda line, _: (print(len(line), flush=True), time.sleep(600)))"
    )
    given: list[list[str]] = []

    def start(command: list[str], **options: Any) -> psutil.Popen:
        given.append(command)
        return psutil.Popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(spark_trial, "psutil", SimpleNamespace(Popen=start, Process=psutil.Process))
    order = spark_driver.Order(
        number=0,
        side="jdbc",
        bootstrap_servers="",
        conninfo="postgresql://me:secret@host/",
        jdbc_url="jdbc:postgresql://host/?password=secret",
        topic="",
        schema="",
        checkpoint="",
        batch_messages=1,
    )
    with open(os.devnull, "w") as log:  # noqa: PTH123
        driver = spark_trial.Driver(order, log)
    assert "secret" not in str(given)
    until(lambda: driver.reached == len(order.to_line()) + 1, 60, "the driver to have its order")
    driver._process.stdin.close()
    until(lambda: driver.has_ended, 60, "the driver to end")
    driver._reader.join(60)
    driver._process.stdout.close()


def test_patience_lasts_as_long_as_anything_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands for a machine on which everything takes a minute."""
    setting = Setting(bootstrap_servers="", conninfo="", seed=1, messages=1, faults=(), session_ms=1)
    trial = Trial("at_least_once", setting, Display(io.StringIO()))
    now = time.monotonic()
    steps: list[bool] = []

    def listen() -> None:
        nonlocal now
        now += 60
        if len(steps) < 20:
            trial._alive_at = now
        steps.append(True)

    monkeypatch.setattr("exactly_once.demo.trial.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trial, "_listen", listen)
    assert trial._until(lambda: len(steps) > 15, "a quarter of an hour")
    with pytest.raises(Stuck, match="the end"):
        trial._until(lambda: False, "the end")
    assert 20 < len(steps) < 30


def test_the_last_victim_is_fed_for_as_long_as_there_are_payments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was spared where it stood still while the other applied what was left. All but the trial is a stand-in."""
    given: list[int] = []
    now = 0.0
    does_nothing = dict.fromkeys(("arm", "disarm", "send"), lambda *_: None)
    victim, heir = (SimpleNamespace(reports=["ended"], partitions={0: 9.0}, **does_nothing) for _ in range(2))
    publisher = SimpleNamespace(published=0, last={})
    crew = contextlib.nullcontext()
    crew.workers, crew.warm_up, crew.start = {1: victim}, *(lambda *_: None,) * 2  # type: ignore[attr-defined]

    def publish(count: int) -> None:
        given.append(count)
        publisher.published += count

    def listen() -> None:
        nonlocal now
        now += 1
        if len(given) > 4:
            victim.reports.append("dying")
            crew.workers[1] = heir  # type: ignore[attr-defined]

    publisher.publish = publish
    fault = Fault("kill", "handled", victim=1, after=0)
    trial = Trial(
        "exactly_once",
        Setting(bootstrap_servers="", conninfo="", seed=1, messages=100, faults=[fault], session_ms=1),
        Display(io.StringIO()),
    )
    monkeypatch.setattr(trial, "_crew", crew)
    monkeypatch.setattr(trial, "_listen", listen)
    monkeypatch.setattr("exactly_once.demo.trial.psycopg.connect", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("exactly_once.demo.trial.time", SimpleNamespace(monotonic=lambda: now))
    for name in ("create_topic", "create_tables"):
        monkeypatch.setattr(payments, name, lambda *_: None)
    monkeypatch.setattr(payments, "Publisher", lambda *_, **__: publisher)
    tally = trial.run()
    assert (tally.spared, tally.drained, given, sum(given)) == (0, True, [50, 25, 13, 6, 3, 3], 100)


def test_json_has_both_sides_with_the_same_keys() -> None:
    exact = Result(CALM, EXACT, published=10)
    document = as_json({"exactly_once": exact, "at_least_once": exact}, seed=1)
    assert document["exactly_once"].keys() == document["at_least_once"].keys()
    assert document["exactly_once"].keys() >= {"messages", "crashes", "fenced", "lost", "duplicated", "seed"}


def test_table_in_plain_text_is_aligned() -> None:
    out = io.StringIO()
    exact = Result(CALM, EXACT, published=10)
    Display(out).table(HEAD, rows({"exactly_once": exact, "at_least_once": exact}), good=True)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert len({len(line) for line in lines}) == 1


def test_display_without_a_terminal_is_plain() -> None:
    """No colours, no bar, no markup, no line broken at a width that nobody sees."""
    out = io.StringIO()
    with Display(out) as display:
        display.title("title")
        display.log(f"[bold]:smile: {'long ' * 40}end", style="red")
        display.progress(1, 2)
    title, said = out.getvalue().strip().splitlines()
    assert title == "title"
    assert re.fullmatch(rf" *\d+\.\ds  \[bold\]:smile: {'long ' * 40}end", said)


_ON_A_TERMINAL = """
from exactly_once.demo.display import Display
with Display() as display:
    display.title("title")
    display.log("something happens", style="red")
    display.progress(1, 2)
    display.table(("a", "b", "c"), [("d", "1", "2")], good=False)
"""


@pytest.mark.parametrize("no_color", [False, True])
def test_display_on_a_terminal_is_live_and_has_colours_unless_they_are_not_wanted(*, no_color: bool) -> None:
    """A pseudo-terminal; 31 is red, ?25l hides the cursor of a live display."""
    text = _on_a_terminal({"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {}))
    assert "something happens" in text
    assert "\x1b[?25l" in text
    assert ("\x1b[31m" in text) is not no_color


def _on_a_terminal(environment: dict[str, str]) -> str:
    controller, terminal = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run([sys.executable, "-c", _ON_A_TERMINAL], stdout=terminal, env=kept | environment, check=True)
    os.close(terminal)
    text = b""
    try:
        while piece := os.read(controller, 65536):
            text += piece
    except OSError:
        pass  # how Linux says that the other end was closed
    os.close(controller)
    return text.decode()
