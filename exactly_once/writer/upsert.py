"""Upsert: a batch of rows and tombstones, as the deletes and merges that have the effect of applying them in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from confluent_kafka import Message

from exactly_once.session import Connection

from .changes import MISSING, Collapsed, Row, Rules, Tombstone, collapse, rounds
from .errors import BadRow, origin
from .plan import Plan, Prepared
from .statements import Conflict
from .storing import delete, merge


class Upsert:
    """Applies changes by key to one table."""

    def __init__(self, plan: Plan, conflict: Conflict, *, keeps_missing: bool, small_batch: int) -> None:
        self._plan = plan
        self._conflict = conflict if keeps_missing else replace(conflict, always=plan.names)
        self._small_batch = small_batch
        self._key = plan.part(conflict.key)
        self._rules = _rules(plan, conflict, keeps_missing=keeps_missing)

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
        for step in self._steps(looked_at):
            if step.deletes:
                written += delete(connection, self._key, step.deletes, is_binary=is_binary)
            for plan, rows in self._plan.by_columns(Prepared(step.rows, is_binary)):
                written += merge(connection, plan, rows, self._conflict, small_batch=self._small_batch)
        return written

    def _steps(self, changes: Sequence[Row]) -> Iterator[Collapsed]:
        """Collapse what can be; the rest takes a statement for each time that a key comes."""
        if not all(map(self._plan.is_comparable, self._rules.key)) or self._has_literal_keys(changes):
            # Two keys may be equal to Postgres only, so each change goes alone.
            yield from (collapse([change], self._rules) for change in changes)
        elif self._rules.keeps_missing and self._rules.newest_by is not None:
            for indexes in rounds(changes, self._rules):
                yield collapse([changes[i] for i in indexes], self._rules)
        else:
            yield collapse(changes, self._rules)

    def _prepare(
        self, changes: Sequence[Row], exact: Collection[str], origins: Sequence[Message] | None
    ) -> tuple[Sequence[Row], bool]:
        """Look at rows and tombstones, each by its own plan, and put them back into their order."""
        if Tombstone not in set(map(type, changes)):
            prepared = self._plan.prepare(changes, exact=exact, origins=origins)
            rows = list(prepared.rows)
            self._check_keys(rows, self._rules.key, origins)
            return rows, prepared.is_binary
        is_tombstone = [type(change) is Tombstone for change in changes]
        parts = []
        for plan, kind, trusted in ((self._plan, False, exact), (self._key, True, ())):
            indexes = [i for i, found in enumerate(is_tombstone) if found is kind]
            sources = [origins[i] for i in indexes] if origins is not None else None
            prepared = plan.prepare([changes[i] for i in indexes], exact=trusted, origins=sources)
            rows = list(prepared.rows)
            self._check_keys(rows, tuple(range(len(plan.names))) if kind else self._rules.key, sources)
            parts.append(Prepared(rows, prepared.is_binary))
        kept, deleted = (iter(part.rows) for part in parts)
        merged: list[Row] = [Tombstone(next(deleted)) if found else next(kept) for found in is_tombstone]
        return merged, all(part.is_binary for part in parts)

    def _check_keys(self, rows: Sequence[Row], positions: Sequence[int], origins: Sequence[Message] | None) -> None:
        """Refuse a key without a value: it would belong to no row, and come again as another one."""
        for name, position in zip(self._key.names, positions, strict=True):
            values = [row[position] for row in rows]
            for lacking in (None, MISSING):
                if lacking in values:
                    index = values.index(lacking)
                    raise BadRow("the key has no value", message=origin(origins, index), row=index, column=name)

    def _has_literal_keys(self, changes: Sequence[Row]) -> bool:
        for position, codec in zip(self._rules.key, self._key.codecs, strict=True):
            values = [change[position] for change in changes if type(change) is not Tombstone]
            if codec.wire is None or any(map(codec.is_literal, values)):
                return True
        return False


def _rules(plan: Plan, conflict: Conflict, *, keeps_missing: bool) -> Rules:
    inserted_only: tuple[int, ...] = ()
    if conflict.update is not None:
        inserted_only = plan.positions([n for n in plan.names if n not in conflict.key and n not in conflict.update])
    says_all = set(plan.names) >= {c.name for c in plan.table.columns if not c.is_generated}
    return Rules(
        key=plan.positions(conflict.key),
        inserted_only=inserted_only,
        newest_by=plan.positions([conflict.newest_by])[0] if conflict.newest_by else None,
        keeps_missing=keeps_missing,
        replaces_all=says_all and not (keeps_missing or inserted_only or conflict.newest_by),
    )
