"""Headers: how a message tells who sent it, so that recovery can read it back from the topic. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .keys import Key, encoded

# ``<number before>:<number>:<producer name>``; -1 where nothing was before.
SEQUENCE = "exactly-once-sequence"
# The dedup key as bytes, its first one telling the type.
DEDUP_KEY = "exactly-once-key"

HeaderValue = str | bytes | None
Headers = Mapping[str, HeaderValue] | Iterable[tuple[str, HeaderValue]]
Kept = list[tuple[str, HeaderValue]]


class Sent(NamedTuple):
    """What a sequence header says."""

    producer: str
    before: int
    number: int


def kept(headers: Headers | None) -> Kept | None:
    """Return a copy without ours: who passes on what it has consumed passes on its headers, too.

    A message may go out later, and more than once, and the caller may change what it gave.
    """
    if headers is None:
        return None
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value) for name, value in pairs if name not in (SEQUENCE, DEDUP_KEY)]


def with_sequence(own: Kept | None, producer: str, before: int, number: int) -> Kept:
    """Return the caller's headers with the one of a sequence."""
    return [*(own or ()), (SEQUENCE, b"%d:%d:%b" % (before, number, producer.encode()))]


def with_key(own: Kept | None, key: Key) -> Kept:
    """Return the caller's headers with the one of a dedup key."""
    return [*(own or ()), (DEDUP_KEY, encoded(key))]


def headers_of(message: Any) -> list[tuple[str, bytes | None]] | None:
    """Return the headers of a message that was read; None where a name is no UTF-8: then they are not ours."""
    try:
        headers: list[tuple[str, bytes | None]] | None = message.headers()
    except (SystemError, UnicodeDecodeError):  # the client's way to say so
        return None
    return headers


def sequence_of(headers: Iterable[tuple[str, bytes | None]] | None) -> Sent | None:
    """Read the sequence header; None if there is none, or one that this library did not write."""
    for name, value in reversed(list(headers or ())):
        if name == SEQUENCE and value is not None:
            parts = value.split(b":", 2)
            try:
                before, number = int(parts[0]), int(parts[1])
                return Sent(parts[2].decode(), before, number)
            except (IndexError, ValueError):
                return None
    return None


def key_of(headers: Iterable[tuple[str, bytes | None]] | None) -> bytes | None:
    """Read the encoded dedup key; None if there is none."""
    return next((value for name, value in reversed(list(headers or ())) if name == DEDUP_KEY), None)
