"""Upsert: a batch of rows and tombstones, as the deletes and merges that have the effect of applying them in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from confluent_kafka import Message

from exactly_once.ledger.session import Connection

from .changes import (
    MISSING,
    UNAVAILABLE,
    Marks,
    Merge,
    Missing,
    Row,
    Rules,
    Tombstone,
    collapse,
    keys_of,
    marks_of,
    rounds,
    runs,
)
from .errors import BadRow, origin
from .plan import Plan, Prepared
from .statements import Conflict, by_key, counts_each, delete_by_key, merge, rank
from .table import OnMissing

_NO_KEY = (None, MISSING, UNAVAILABLE)


class Upsert:
    """Applies changes by key to one table."""

    def __init__(
        self,
        plan: Plan,
        conflict: Conflict,
        *,
        missing: OnMissing | None,
        merges: Mapping[str, Merge],
        sends_each: bool,
        small_batch: int,
    ) -> None:
        self._plan = plan
        # A default that counts is for new rows only.
        defaults = tuple(c.name for c in plan.columns if not c.is_numbered) if missing == "default" else ()
        self._conflict = replace(conflict, always=defaults, merge=tuple(merges))
        self._sends_each = sends_each
        self._small_batch = small_batch
        self._key = plan.part(conflict.key)
        keeps_missing = plan.may_leave_out and missing != "default"
        inserted_only: tuple[int, ...] = ()
        if conflict.update is not None:
            inserted_only = plan.positions(
                [n for n in plan.names if n not in conflict.key and n not in conflict.update]
            )
        # A row that is there keeps its key as it was written first, unless a tombstone comes between.
        changing = tuple(i for i in plan.positions(conflict.key) if not plan.has_one_form(i))
        says_all = set(plan.names) >= {c.name for c in plan.table.columns if not c.is_generated}
        self._rules = Rules(
            key=plan.positions(conflict.key),
            inserted_only=inserted_only + changing,
            newest_by=plan.positions([conflict.newest_by])[0] if conflict.newest_by else None,
            keeps_missing=keeps_missing,
            merges={plan.names.index(name): merge for name, merge in merges.items()},
            replaces_all=says_all
            and not (keeps_missing or inserted_only or changing or conflict.newest_by or plan.table.notices_deletes),
        )
        # How many deletes took no row away, how many rows a trigger of the table has kept out, and how many the table
        # had already, or had newer.
        self.missed = self.kept_out = self.ignored = 0

    def apply(
        self,
        connection: Connection,
        changes: Sequence[Row],
        *,
        exact: Collection[str] = (),
        origins: Sequence[Message] | None = None,
    ) -> int:
        """Apply changes in their order; return how many rows Postgres stored, changed or deleted."""
        looked_at, is_binary = self._prepare(changes, exact, origins)
        written = 0
        # What changes are compared by: their values, or their ranks where only Postgres can tell.
        marks = Marks(range(len(looked_at)), [None] * len(looked_at))
        newest_by = self._rules.newest_by
        stored = [c for c in looked_at if type(c) is not Tombstone]
        if len(looked_at) > 1:
            deletes = [c for c in looked_at if type(c) is Tombstone]
            is_known = all(
                self._key.is_comparable(i, [*(c[p] for c in stored), *(c[i] for c in deletes)])
                for i, p in enumerate(self._rules.key)
            )
            if is_known and newest_by is not None and not self._rules.keeps_missing:
                is_known = self._plan.is_ordered(newest_by, [c[newest_by] for c in stored])
            if is_known:
                marks = marks_of(looked_at, self._rules)
            else:
                marks = rank(connection, self._plan, looked_at, self._rules, is_binary=is_binary)
        is_age_unknown = newest_by is not None and any(isinstance(c[newest_by], Missing) for c in stored)
        # Each is a statement, or a delete and one.
        parts: Sequence[Sequence[int]] = [range(len(looked_at))]
        if self._plan.table.keeps_order or self._sends_each:
            parts = runs(looked_at, marks.keys)
        elif self._conflict.add or (self._rules.keeps_missing and newest_by is not None) or is_age_unknown:
            # Such changes cannot be made one, as a sum takes each row, and only the table knows its default: a
            # statement for each time that a key comes.
            parts = rounds(marks.keys)
        for part in parts:
            is_all = len(parts) == 1
            some, known = (looked_at, marks) if is_all else ([looked_at[i] for i in part], Marks(range(len(part))))
            step = collapse(some, self._rules, known)
            if step.deletes:
                deleted = delete_by_key(connection, self._key, Prepared(step.deletes, is_binary))
                written += len(deleted)
                self.missed += len(set(range(len(step.deletes))) - deleted - step.follows)
            if self._rules.keeps_missing and (unsure := [row for row in step.rows if UNAVAILABLE in row]):
                keys = [tuple(row[i] for i in self._rules.key) for row in unsure]
                there = by_key("find_rows", connection, self._key, Prepared(keys, is_binary))
                for index, row in enumerate(unsure):
                    if index not in there:
                        raise self._unkept(row, looked_at, part, marks, origins)
                step.rows = [tuple(MISSING if v is UNAVAILABLE else v for v in row) for row in step.rows]
            for plan, rows in self._plan.by_columns(Prepared(step.rows, is_binary)):
                given = list(rows.rows)
                changed = merge(
                    connection, plan, Prepared(given, rows.is_binary), self._conflict, small_batch=self._small_batch
                )
                if counts_each(plan, self._conflict):
                    self.kept_out += len(given) - changed
                else:
                    self.ignored += len(given) - changed
                written += changed
        return written

    def _unkept(
        self, row: Row, changes: Sequence[Row], part: Sequence[int], marks: Marks, origins: Sequence[Message] | None
    ) -> BadRow:
        """Name the first change of a part, given by their indexes, that lacks a value of a row that is not there."""
        (key,) = keys_of([row], self._rules.key)
        mark = marks.keys[keys_of(changes, self._rules.key).index(key)]
        at: int | None = None
        for index in part:
            if marks.keys[index] == mark:
                change = changes[index]
                at = None if type(change) is Tombstone else index if at is None and UNAVAILABLE in change else at
        return BadRow(
            "a large value that did not change is not in the message, and the table has no such row to keep it: copy "
            "the row from the source, or begin with a snapshot, or set REPLICA IDENTITY FULL there",
            message=origin(origins, at) if at is not None else None,
            row=at,
            column=self._plan.names[row.index(UNAVAILABLE)],
        )

    def _prepare(
        self, changes: Sequence[Row], exact: Collection[str], origins: Sequence[Message] | None
    ) -> tuple[Sequence[Row], bool]:
        """Look at rows and tombstones, each by its own plan, and put them back into their order."""
        if Tombstone not in set(map(type, changes)):
            prepared = self._plan.prepare(changes, exact=exact, origins=origins)
            rows = list(prepared.rows)
            self._plan.refuse_keyless(rows, self._rules.key, origins, without=_NO_KEY)
            return rows, prepared.is_binary
        is_tombstone = [type(change) is Tombstone for change in changes]
        parts = []
        for plan, kind, trusted in ((self._plan, False, exact), (self._key, True, ())):
            indexes = [i for i, found in enumerate(is_tombstone) if found is kind]
            sources = [origins[i] for i in indexes] if origins is not None else None
            prepared = plan.prepare([changes[i] for i in indexes], exact=trusted, origins=sources)
            rows = list(prepared.rows)
            key = tuple(range(len(plan.names))) if kind else self._rules.key
            plan.refuse_keyless(rows, key, sources, without=_NO_KEY)
            parts.append(Prepared(rows, prepared.is_binary))
        kept, deleted = (iter(part.rows) for part in parts)
        merged: list[Row] = [Tombstone(next(deleted)) if found else next(kept) for found in is_tombstone]
        return merged, all(part.is_binary for part in parts)
