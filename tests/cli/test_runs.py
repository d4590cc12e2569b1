"""What the commands have in common that end in a verdict."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from exactly_once.cli.problems import CommandError
from exactly_once.cli.runs import ending_in_order, naming_a_full_disk


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_an_error_on_a_full_disk_names_the_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A real one takes the right to mount: a broker there ends, and its client knows of failed deliveries only."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found: list[str] = []
    try:
        with naming_a_full_disk():
            raise KafkaException(KafkaError(KafkaError._INCONSISTENT))
    except CommandError as error:
        found.append(str(error))
    except KafkaException:
        pass
    assert [text.startswith("the disk of ") and "TMPDIR" in text for text in found] == [True] * (free == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_asked_to_end_or_has_lost_its_terminal_ends_what_it_started(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """A pipeline that is verified is in sessions of its own, so nobody else would end it."""
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(SystemExit) as left, ending_in_order(argparse.Namespace(json=True), lambda: {"seed": 1}):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert left.value.code == 128 + number
    assert json.loads(capsys.readouterr().out) == {"ok": False, "cut_short": "interrupted", "seed": 1}


def test_a_run_without_a_terminal_goes_on_where_that_was_asked_for() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_in_order(argparse.Namespace(json=False), dict):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
