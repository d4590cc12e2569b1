"""Claims: keys of events, each of which one unit of a group may have, in the transaction of its effects.

A key is bytes, str, int or UUID, and keeps its type: ``b"1"``, ``"1"`` and ``1`` are three keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from uuid import UUID

from .session import Connection, cursor_on, last_row
from .sql import query

Key = bytes | str | int | UUID

# Bytes of a key that are kept as they are: what keys mostly have. An entry of an index would hold 2,704 of them.
_LONGEST = 128
# Of longer ones: two keys with one digest of 256 bits will not be met, nor can anybody make them.
_DIGEST_BYTES = 32


def claim(connection: Connection, keys: Iterable[Key], *, schema: str, group_id: str) -> list[bool]:
    """Claim keys in the open transaction, in one statement; tell for each, in order, whether this is its first claim.

    :raises TypeError: or :raises ValueError: for what cannot be a key; nothing is claimed then.
    """
    forms = [_form(key) for key in keys]
    wanted = sorted(set(forms))
    if not wanted:
        return []
    cursor = cursor_on(connection)
    cursor.execute(query("claim", schema), {"group_id": group_id, "keys": wanted}, prepare=False)
    (places,) = last_row(cursor)
    taken = {wanted[int(place) - 1] for place in (places or "").split()}
    answers = []
    for form in forms:
        answers.append(form not in taken)
        taken.add(form)  # a second one of equal keys comes too late, too
    return answers


def _form(key: object) -> bytes:
    """Return the one form of a key as bytes: a letter for its type, then the key, or the digest of a long one."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        kind, form = b"b", bytes(key)
    elif isinstance(key, str):
        kind, form = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, UUID):
        kind, form = b"u", key.bytes
    elif isinstance(key, int) and not isinstance(key, bool):
        kind, form = b"i", key.to_bytes(key.bit_length() // 8 + 1, "big", signed=True)
    else:
        raise TypeError(f"a key to claim is bytes, str, int or UUID, not {type(key).__name__}")
    if not form:
        raise ValueError("a key to claim is empty; the first message without a key would stand for all of them")
    if len(form) <= _LONGEST:
        return kind + form
    return kind.upper() + blake2b(form, digest_size=_DIGEST_BYTES).digest()
