"""A group that counts batches and was halted goes on after the commands that its error names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from exactly_once.cli import main
from exactly_once.errors import Fenced, HandlerCommitted, PartitionHalted
from tests.spark.attempts import CountingPlace, Place, run

Db = psycopg.Connection[Any]
Reset = Callable[..., dict[str, Any]]


@pytest.fixture
def counting(place: Place) -> CountingPlace:
    return CountingPlace(place, "query")


@pytest.fixture
def reset(conninfo: str, capsys: pytest.CaptureFixture[str]) -> Reset:
    """Run a command that an error named, with --execute unless told otherwise, and return its document."""

    def run_it(command: str, *more: str) -> dict[str, Any]:
        capsys.readouterr()
        words = shlex.split(command.removeprefix("exactly-once"))
        assert main([*words, "--json", "--conninfo", conninfo, *(more or ["--execute"])]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run_it


def halted_behind_batch_0(counting: CountingPlace) -> tuple[str, str]:
    """Write batch 0, and batch 1 with an ``also`` that commits; return the two commands that the error names."""
    write(counting, 0, range(3))
    with pytest.raises(HandlerCommitted):
        write(counting, 1, range(3, 5), in_transaction=lambda unit: unit.execute("COMMIT"))
    with pytest.raises(PartitionHalted) as halted:
        counting.work(1)
    keep, again = re.findall(r"exactly-once reset --group-id \w+ --topic query:\S+ --to-batch \d+", str(halted.value))
    return keep, again


def write(counting: CountingPlace, batch_id: int, offsets: range, **options: Any) -> None:
    place = counting.place
    run("batch", counting.work(batch_id, **options), [place.rows(offsets), place.mark()])


def test_a_batch_whose_rows_are_there_is_left_out(counting: CountingPlace, reset: Reset) -> None:
    keep, _ = halted_behind_batch_0(counting)
    assert reset(keep)["new_batch"] == 1
    write(counting, 1, range(3, 5))
    write(counting, 2, range(5, 6))
    assert counting.place.written() == [(0, offset) for offset in range(6)]


def test_a_batch_whose_rows_were_taken_out_is_written_again(counting: CountingPlace, reset: Reset, db: Db) -> None:
    _, again = halted_behind_batch_0(counting)
    db.execute(f'DELETE FROM {counting.place.name} WHERE "offset" >= 3')
    assert reset(again)["halted"].startswith("in_transaction= ended the transaction")
    write(counting, 1, range(3, 5))
    assert counting.place.written() == [(0, offset) for offset in range(5)]


def test_a_dry_run_changes_nothing_and_the_change_is_audited(counting: CountingPlace, reset: Reset, db: Db) -> None:
    keep, _ = halted_behind_batch_0(counting)
    look = "SELECT next_offset, halted IS NULL, owner_epoch FROM exactly_once.ledger WHERE group_id = %s"
    name = (counting.place.name,)
    before = db.execute(look, name).fetchone()
    assert reset(keep, "--reason", "looking")["executed"] is False
    assert db.execute(look, name).fetchone() == before
    reset(keep, "--execute", "--reason", "they are right")
    audit = (
        "SELECT reason, topic, partition, old_offset, new_offset FROM exactly_once.audit "
        "WHERE group_id = %s AND action = 'reset'"
    )
    assert db.execute(audit, name).fetchall() == [("they are right", "query:query", 0, 1, 2)]


def test_a_live_query_is_fenced_by_the_command(counting: CountingPlace, reset: Reset) -> None:
    work = counting.work(0)
    reset(f"exactly-once reset --group-id {counting.place.name} --to-batch -1")
    with pytest.raises(Fenced):
        run("batch", work, [counting.place.rows(range(3)), counting.place.mark()])
    assert counting.place.written() == []


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--to-batch", "3"], (1, "counts no batches")),
        (["--to-batch", "-2"], (2, "-2 is not a batch")),
        (["--to-batch", "3", "--topic", "t"], (2, "--topic unless")),
        (["--to-current"], (2, "required: --topic")),
    ],
)
def test_what_means_nothing_is_refused(
    arguments: list[str], refusal: tuple[int, str], conninfo: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        left = main(["reset", "--group-id", name, "--conninfo", conninfo, *arguments])
    except SystemExit as leaving:
        left = int(leaving.code or 0)
    code, complaint = refusal
    assert left == code
    assert complaint in capsys.readouterr().err
