"""Headers: how a message tells who sent it, so that recovery can read it back from the topic. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .keys import Key, encoded

SEQUENCE = "exactly-once-sequence"
"""``<number before>:<number>:<producer name>``; -1 where nothing was before."""
DEDUP_KEY = "exactly-once-key"
"""The dedup key as bytes, its first one telling the type."""

HeaderValue = str | bytes | None
Headers = Mapping[str, HeaderValue] | Iterable[tuple[str, HeaderValue]]


class Sent(NamedTuple):
    """What a sequence header says."""

    producer: str
    before: int
    number: int


def with_sequences(
    headers: Iterable[Headers | None], sequences: Sequence[tuple[str, int]], befores: Iterable[int]
) -> list[list[tuple[str, HeaderValue]]]:
    """Return the callers' headers with those of sequences of one producer."""
    name = sequences[0][0].encode()
    return [
        [*(_listed(given) if given else ()), (SEQUENCE, b"%d:%d:%b" % (before, number, name))]
        for given, (_, number), before in zip(headers, sequences, befores, strict=True)
    ]


def with_sequence(headers: Headers | None, producer: str, before: int, number: int) -> list[tuple[str, HeaderValue]]:
    """Return a caller's headers with that of a sequence."""
    return with_sequences([headers], [(producer, number)], [before])[0]


def with_key(headers: Headers | None, key: Key) -> list[tuple[str, HeaderValue]]:
    """Return the caller's headers with the one of a dedup key."""
    return [*_listed(headers), (DEDUP_KEY, encoded(key))]


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


def _listed(headers: Headers | None) -> Iterable[tuple[str, HeaderValue]]:
    """Return the caller's headers without ours: who passes on what it has consumed passes on its headers, too."""
    if headers is None:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value) for name, value in pairs if name not in (SEQUENCE, DEDUP_KEY)]
