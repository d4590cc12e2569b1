"""Claiming: rows of events whose key a unit of the group has claimed before are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from exactly_once.errors import ConfigurationError

from .changes import Tombstone
from .decoding import Decoded, header
from .errors import BadRow, cut, place_of
from .from_json import path_of
from .json_shape import BYTE_ORDER_MARK, NULL, Raw, Shape
from .json_values import UNREADABLE
from .logical import in_key
from .table import Table

# Claims keys in the transaction of a unit; tells of each whether it is the first.
Claim = Callable[[Sequence[str]], Sequence[bool]]


class Claims:
    """Leaves out the rows whose key was claimed before.

    ``source`` is the path of a field of the row in JSON, ``header:NAME``, ``key:PATH`` in the message's key, or
    ``key:`` for all of that as text.

    :raises ConfigurationError: for one that names nothing.
    """

    def __init__(self, source: str | Sequence[str]) -> None:
        kind, is_named, name = source.partition(":") if isinstance(source, str) else ("", "", "")
        self._envelope = (kind, name) if is_named and kind in ("header", "key") else None
        if not source or source == "header:":
            raise ConfigurationError(f"claim={source!r} names no field, header:NAME or key:PATH (key: is a whole key)")
        self._path = path_of(name if self._envelope else source)
        self._shape = Shape({"key": (self._path, Raw)})

    def unclaimed(self, decoded: Decoded, table: Table, claim: Claim) -> Decoded:
        """Make all rows, so that what is bad claims nothing; then claim their keys, and return the rows that are first.

        :raises BadRow: for a row without a key.
        """
        rows = list(decoded)
        keys: list[str | None] = []  # as JSON, which tells the text "7" from the number; None for a delete
        for message, row in zip(decoded.origins, rows, strict=True):
            try:
                if self._envelope is None:
                    value = message.value()
                    if value is None and type(row) is Tombstone:
                        keys.append(None)
                        continue
                    found, _ = self._shape.find((value or NULL).removeprefix(BYTE_ORDER_MARK))
                    key = json.loads(found.get("key", NULL))
                elif self._envelope[0] == "header":
                    key = header(self._envelope[1], message, is_bytes=False)
                elif not self._envelope[1]:
                    key = (message.key() or b"").decode()
                else:
                    key = json.loads(in_key(self._shape, message.key()).get("key", NULL))
            except UNREADABLE as error:
                raise BadRow(f"there is no key to claim: {error}", message=message) from error
            if not isinstance(key, (str, int)) or isinstance(key, bool) or key == "":
                where = ":".join(self._envelope) if self._envelope else ".".join(self._path)
                hint = "" if self._envelope else "; claim= may be header:NAME, key:PATH, and key: for a whole key, too"
                reason = f"the key to claim, {where}, is text or a whole number, not {cut(key)}{hint}"
                raise BadRow(reason, message=message)
            keys.append(json.dumps(key))
        places = [place_of(message) for message in decoded.origins]
        # All rows of a message have its key or header, and are one event: the first of them claims for all.
        claims = [(key, places[i] if self._envelope else i) for i, key in enumerate(keys)]
        named = {claim: i for i, claim in reversed([*enumerate(claims)]) if claim[0] is not None}
        firsts = sorted(named.values())
        # The keys of a group are one space, and 7 is mostly another event in another table.
        answers = dict(zip(firsts, claim([f"{table} {keys[i]}" for i in firsts]), strict=True))
        again = {places[i] for i, is_first in answers.items() if not is_first}
        # A delete without a key of its own belongs to the row of the same message: an event that changes a row's key.
        kept = [i for i, each in enumerate(claims) if answers.get(named.get(each, i), places[i] not in again)]
        origins, first = [decoded.origins[i] for i in kept], [rows[i] for i in kept]
        return replace(decoded, origins=origins, make=lambda: iter(first), repeated=len(rows) - len(kept))
