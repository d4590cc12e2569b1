"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch: `old` occurs in the file, and its occurrence number `nth` becomes `new`."""

    name: str
    what: str
    """What is wrong then, for the table."""
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    """What pytest is given: files, or tests of them; together they must fail."""
    nth: int = 1


def each(file: str, killers: tuple[str, ...], *patches: tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    """Patches of one file that the same tests notice: name, what is wrong, old, new."""
    return tuple(Mutant(name, what, file, old, new, killers) for name, what, old, new in patches)
