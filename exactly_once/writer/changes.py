"""Changes: several changes of one key become one, as if they had been applied one after the other. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

Row = Sequence[Any]
# Makes one value of two, of which the second is the newer one.
Merge = Callable[[Any, Any], Any]


class Missing:
    """The kind of :data:`MISSING` and :data:`UNAVAILABLE`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


# What stands for a field that a message does not have, where that differs from null.
MISSING: Final = Missing("MISSING")
# The same where the source has a value: only a row that is there can keep it, and a new one would get another.
UNAVAILABLE: Final = Missing("UNAVAILABLE")


class Tombstone(tuple[Any, ...]):
    """In place of a row: the row with this key, in the order of the key's columns, is to be deleted."""

    __slots__ = ()


@dataclass(slots=True)
class Collapsed:
    """What is left to do: first delete, then store."""

    deletes: list[Row] = field(default_factory=list)
    follows: set[int] = field(default_factory=set)
    """Of which deletes, by their positions, a row of the same changes came first: they find one, or that one."""
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What of a change counts where rows of one key meet; all as positions in the row."""

    key: tuple[int, ...]
    inserted_only: tuple[int, ...] = ()
    """Columns that keep the value with which the row was made."""
    newest_by: int | None = None
    """The column that says which of two rows is the newer one."""
    keeps_missing: bool = False
    """Whether a field that is missing leaves what was there before."""
    merges: Mapping[int, Merge] = field(default_factory=dict)
    """The columns whose values are merged with those that were there before."""
    replaces_all: bool = True
    """Whether a row says all there is to say, so that none of the columns can outlive a tombstone before it."""

    @property
    def is_plain(self) -> bool:
        """Whether the last change wins and nothing else is to be thought of."""
        merges = self.keeps_missing or self.inserted_only or self.merges
        return self.replaces_all and not merges and self.newest_by is None


@dataclass(frozen=True, slots=True)
class Marks:
    """What changes are compared by."""

    keys: Sequence[Any]
    ages: Sequence[Any] = ()
    """What says which of two is the newer one, if anything does; None where a row has no value for it."""


def marks_of(changes: Sequence[Row], rules: Rules) -> Marks:
    """Take the values themselves to compare by."""
    newest_by = rules.newest_by
    ages = () if newest_by is None else [None if type(c) is Tombstone else c[newest_by] for c in changes]
    return Marks(keys_of(changes, rules.key), ages)


def collapse(changes: Sequence[Row], rules: Rules, marks: Marks | None = None) -> Collapsed:
    """Make one change of all that share a key; without marks the values themselves are compared."""
    marks = marks or marks_of(changes, rules)
    if not rules.is_plain:
        return _one_by_one(changes, rules, marks)
    # The last change of each key wins; the loops stay in C.
    last = dict(zip(marks.keys, range(len(changes)), strict=True))
    if len(last) == len(changes) and Tombstone not in set(map(type, changes)):
        return Collapsed(rows=list(changes))
    result = Collapsed()
    first = dict(zip(reversed(marks.keys), range(len(changes) - 1, -1, -1), strict=True))
    for key, index in last.items():
        change = changes[index]
        if type(change) is Tombstone:
            if type(changes[first[key]]) is not Tombstone:
                result.follows.add(len(result.deletes))
            result.deletes.append(change)
        else:
            result.rows.append(change)
    return result


def rounds(keys: Iterable[Any]) -> list[list[int]]:
    """Split into rounds in which no key comes twice; for rules under which changes cannot be made one."""
    seen: dict[Any, int] = {}
    result: list[list[int]] = []
    for index, key in enumerate(keys):
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(result):
            result.append([])
        result[number].append(index)
    return result


def runs(changes: Iterable[Row], keys: Iterable[Any]) -> list[list[int]]:
    """Split into runs in which no key comes twice, and tombstones each by itself; all stay in order."""
    seen: set[Any] = set()
    was_delete = False
    result: list[list[int]] = []
    for index, (change, key) in enumerate(zip(changes, keys, strict=True)):
        is_delete = type(change) is Tombstone
        if not result or is_delete or was_delete or key in seen:
            seen = set()
            result.append([])
        seen.add(key)
        result[-1].append(index)
        was_delete = is_delete
    return result


def keys_of(changes: Iterable[Row], key: tuple[int, ...]) -> list[Any]:
    """Return the key of each change; a key of one column is its bare value."""
    pick = itemgetter(*key)
    if len(key) == 1:
        return [c[0] if type(c) is Tombstone else pick(c) for c in changes]
    return [tuple(c) if type(c) is Tombstone else pick(c) for c in changes]


@dataclass(slots=True)
class _Fate:
    """What becomes of one key."""

    row: Row | None = None
    age: Any = None
    deleted: Tombstone | None = None
    is_delete_first: bool = False


def _one_by_one(changes: Sequence[Row], rules: Rules, marks: Marks) -> Collapsed:
    fates: dict[Any, _Fate] = {}
    for index, (key, change) in enumerate(zip(marks.keys, changes, strict=True)):
        fate = fates.setdefault(key, _Fate())
        age = marks.ages[index] if marks.ages else None
        if type(change) is Tombstone:
            fate.is_delete_first |= fate.row is None and fate.deleted is None
            fate.row, fate.deleted = None, change
        elif fate.row is None:
            fate.row, fate.age = change, age
        elif rules.newest_by is None or is_not_older(age, fate.age):
            if rules.inserted_only or rules.keeps_missing or rules.merges:
                merged = list(change)
                for position, value in enumerate(fate.row):
                    is_missing = rules.keeps_missing and isinstance(merged[position], Missing)
                    if position in rules.inserted_only or is_missing:
                        merged[position] = value
                    elif position in rules.merges:
                        merged[position] = rules.merges[position](value, merged[position])
                change = tuple(merged)  # noqa: PLW2901 - what both leave
            fate.row = change
            if rules.newest_by not in rules.inserted_only:
                fate.age = age
    result = Collapsed()
    for fate in fates.values():
        if fate.deleted is not None and (fate.row is None or not rules.replaces_all):
            if not fate.is_delete_first:
                result.follows.add(len(result.deletes))
            result.deletes.append(fate.deleted)
        if fate.row is not None:
            result.rows.append(fate.row)
    return result


def is_not_older(new: Any, old: Any) -> bool:
    """Tell whether a row replaces one that is there; the statement that stores it decides the same way."""
    return old is None or (new is not None and new >= old)
