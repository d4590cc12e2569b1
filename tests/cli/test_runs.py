"""What the commands have in common that end in a verdict."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from exactly_once.cli.problems import CommandError
from exactly_once.cli.runs import naming_a_full_disk


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
