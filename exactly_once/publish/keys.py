"""Keys: what may be a dedup key, and its one form as bytes. No I/O.

A key is bytes, str, an int of 64 bits or a UUID. ``"1"``, ``b"1"`` and ``1`` are three keys. What a caller could
change afterwards (a bytearray) is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from .errors import KeyRefused

Key = bytes | str | int | UUID
GivenKey = bytes | str | int | UUID | bytearray | memoryview

# Bytes or characters; send a digest of what is longer.
MAX_KEY_LENGTH = 1024
INT64 = 1 << 63


def is_name(given: object) -> bool:
    """Tell whether it can name something: a str that is not empty, and that Postgres, its indexes and Kafka take."""
    if type(given) is not str or not given or "\0" in given:
        return False
    form = given.encode(errors="replace")
    return form.decode() == given and len(form) <= MAX_KEY_LENGTH


NAME = f"a str of UTF-8 of 1 to {MAX_KEY_LENGTH} bytes without NUL"


def checked(given: GivenKey) -> Key:
    """Return a key that cannot change any more.

    :raises KeyRefused: for what cannot be a key.
    """
    if (type(given) is bytes or type(given) is str) and 0 < len(given) <= MAX_KEY_LENGTH:
        return given
    key: object = bytes(given) if isinstance(given, (bytearray, memoryview)) else given
    if isinstance(key, (bytes, str)):
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            what = "is empty" if not key else f"has a length of {len(key)}, above {MAX_KEY_LENGTH}; use a digest of it"
            raise KeyRefused(f"the dedup key {what}")
        # A subclass could compare or hash as it likes.
        return bytes(memoryview(key)) if isinstance(key, bytes) else str.__str__(key)
    if isinstance(key, UUID):
        return key if type(key) is UUID else UUID(int=key.int)
    if isinstance(key, int) and not isinstance(key, bool):
        if not -INT64 <= key < INT64:
            raise KeyRefused(f"the dedup key {key} does not fit into 64 bits")
        return int(key)
    raise KeyRefused(f"a dedup key is bytes, str, int or UUID, not {type(key).__name__}")


class CheckedKeys(list[Any]):
    """Keys that need no second look."""


def checked_all(keys: Iterable[GivenKey]) -> list[Key]:
    """Check many keys; those of one plain type without looking at each in Python."""
    if type(keys) is CheckedKeys:
        return keys
    given: list[Any] = CheckedKeys(keys)
    if len(given) == 1:
        return CheckedKeys((checked(given[0]),))
    kinds = set(map(type, given))
    if len(kinds) == 1 and not kinds.isdisjoint((bytes, str)):
        lengths = list(map(len, given))
        if min(lengths) and max(lengths) <= MAX_KEY_LENGTH:
            return given
    return CheckedKeys(checked(key) for key in given)


def encoded(key: Key) -> bytes:
    """Return the one form of a key as bytes; keys that are not equal have different ones."""
    if type(key) is bytes:
        return b"b" + key
    if type(key) is str:
        return b"s" + key.encode("utf-8", "surrogatepass")
    if type(key) is int:
        return b"i" + key.to_bytes(8, "big", signed=True)
    assert isinstance(key, UUID)
    return b"u" + key.bytes
