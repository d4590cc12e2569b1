"""What a move of an offset brings again and leaves out, at the edges of the log and of the move."""

from __future__ import annotations

from typing import Any

import pytest

from exactly_once._model import Partition
from exactly_once.cli.plan import Move
from exactly_once.cli.servers import Log


def move(old: int | None, new: int | None, log: Log | None = Log(10, 20)) -> Move:  # noqa: B008 - it does not change
    stored: Any = type("Stored", (), {"next_offset": old})
    return Move(partition=Partition("t", 0), stored=stored, new_offset=new, log=log)


@pytest.mark.parametrize(
    ("old", "new", "letters"),
    [
        (18, 15, [15, 16, 17]),
        (15, 18, []),
        (18, 5, [10, 11, 12, 13, 14, 15, 16, 17]),
        (25, 18, [18, 19]),
        (18, None, []),
        (None, 15, []),
    ],
)
def test_the_dead_letters_that_come_again_are_those_of_offsets_that_do(
    old: int | None, new: int | None, letters: list[int]
) -> None:
    found = move(old, new)
    again: list[Any] = [type("Letter", (), {"message_offset": offset}) for offset in range(30)]
    assert [letter.message_offset for letter in again if found.brings_again(letter)] == letters
    assert found.again == len(letters)


@pytest.mark.parametrize(
    ("old", "new", "left_out"), [(15, 18, 3), (18, 15, 0), (None, 18, 8), (None, 10, 0), (5, 12, 2)]
)
def test_what_is_left_out_is_counted_of_what_the_log_has(old: int | None, new: int, left_out: int) -> None:
    assert move(old, new).left_out == left_out


@pytest.mark.parametrize(("new", "is_outside"), [(9, True), (10, False), (20, False), (21, True)])
def test_both_ends_of_a_log_are_inside_of_it(new: int, *, is_outside: bool) -> None:
    assert move(15, new).is_outside is is_outside
    assert not move(15, new, None).is_outside
