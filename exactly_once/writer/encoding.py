"""Encoding: rows as the bytes of a COPY, in parts, so that the server stores one while the next one is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from psycopg._copy_base import format_row_binary
from psycopg.adapt import Transformer
from psycopg.pq import Format

_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_CHUNK = 256
_PART_BYTES = 64 * 1024
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def encode_binary(rows: Iterable[Sequence[Any]], wires: Sequence[int]) -> Iterator[bytearray]:
    """Encode rows whose values are exactly what the driver dumps as these types; yield parts."""
    # The driver's own function for one row: what Copy.write_row calls, without its two calls in between,
    # which cost more than the dumping.
    transformer = Transformer()
    transformer.set_dumper_types(wires, Format.BINARY)
    encoded = bytearray(_SIGNATURE)
    iterator = iter(rows)
    # By turns some hundred rows are made and encoded: one by one is a sixth slower, all at once needs their memory.
    while chunk := list(islice(iterator, _CHUNK)):
        deque(map(format_row_binary, chunk, repeat(transformer), repeat(encoded)), maxlen=0)
        if len(encoded) >= _PART_BYTES:
            yield encoded
            encoded = bytearray()
    encoded += _TRAILER
    yield encoded


def encode_text(rows: Iterable[Sequence[Any]], writers: Sequence[Callable[[Any], str | None]]) -> bytes:
    """Encode rows by the literals of their values."""
    return "".join(map(_line, rows, repeat(writers))).encode()


def _line(row: Sequence[Any], writers: Sequence[Callable[[Any], str | None]]) -> str:
    texts = (write(value) for write, value in zip(writers, row, strict=True))
    return "\t".join("\\N" if text is None else text.translate(_ESCAPES) for text in texts) + "\n"
