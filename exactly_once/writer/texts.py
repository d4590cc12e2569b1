"""Texts: the codecs of text, bytes, JSON, identifiers and addresses. No I/O."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from .codec import BYTEA, TEXT, Codec, by_text, json_text, named, refuse, text_or
from .errors import NAME_BYTES, cut

# Python takes zones and masks too: the first it would lose, the second means something else.
_ADDRESS = re.compile(r"[\da-fA-F.:]+(?:/\d+)?", re.ASCII)
_BARE_UUID = r"[\da-fA-F]{8}(?:-?[\da-fA-F]{4}){3}-?[\da-fA-F]{12}"
_UUID = re.compile(rf"{_BARE_UUID}|\{{{_BARE_UUID}\}}", re.ASCII)
_BYTES = (bytes, bytearray, memoryview)


def limited(name: str, typmod: int) -> Codec:
    """Make the codec of char(n) and varchar(n). Postgres cuts off blanks that are too many; nothing is cut here."""
    length = typmod - 4
    return CODECS["text"] if length < 0 else _holding(lambda value: len(value) <= length, f"{name}({length})")


def _to_uuid(value: Any) -> UUID:
    if isinstance(value, (bytes, bytearray)):
        return UUID(bytes=bytes(value))
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        raise ValueError(f"{cut(value)} is no UUID")
    return UUID(value)


def _address(value: Any, make: Callable[[str], Any]) -> Any:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise ValueError(f"{cut(value)} is no address")
    return make(value)


def _holding(holds: Callable[[str], bool], what: str) -> Codec:
    def check(value: str) -> None:
        if not holds(value):
            raise ValueError(f"{cut(value)} is too long for {what}")

    return Codec(
        wire=TEXT,
        exact=frozenset({str}),
        coerce=_to_text,
        check=check,
        check_all=lambda values: all(map(holds, values)),
    )


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, _BYTES):
        return _decoded(bytes(value))
    return refuse("text is wanted")(value)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{cut(value)} is no text: {error}") from None


def _json_bytes(version: bytes, value: Any) -> bytes:
    if isinstance(value, _BYTES):  # JSON already
        _decoded(text := bytes(value))  # else it goes to Postgres as it is
        return version + text
    if isinstance(value, str):
        return version + value.encode()
    if hasattr(value, "obj"):  # psycopg's Json and Jsonb
        value = value.obj
    return version + json_text(value).encode()


_INETS: set[type] = {ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface, ipaddress.IPv6Interface}
# The codecs of types without a modifier.
CODECS: dict[str, Codec] = {
    "text": Codec(wire=TEXT, exact=frozenset({str}), coerce=_to_text),
    # Postgres cuts it silently.
    "name": _holding(lambda value: len(value.encode()) <= NAME_BYTES, "name"),
    # Postgres keeps the first byte, and has no binary form of an empty text.
    '"char"': by_text(_holding(lambda value: len(value.encode()) <= 1, '"char"').convert),
    # The digits of a number would be read as bits.
    **dict.fromkeys(("bit", "varbit"), by_text(text_or("a text of bits is wanted"))),
    "bytea": named("bytea", {bytes, bytearray, memoryview}, refuse("bytes are wanted")),
    # Text is taken to be JSON already, as by Postgres; all else is written as JSON.
    "json": Codec(wire=BYTEA, coerce=partial(_json_bytes, b""), as_text=lambda v: None if v is None else v.decode()),
    # Postgres receives a version and the text.
    "jsonb": Codec(
        wire=BYTEA, coerce=partial(_json_bytes, b"\x01"), as_text=lambda v: None if v is None else v[1:].decode()
    ),
    "uuid": named("uuid", {UUID}, _to_uuid),
    "inet": named("inet", _INETS, lambda v: _address(v, ipaddress.ip_interface if "/" in v else ipaddress.ip_address)),
    "cidr": named("cidr", {ipaddress.IPv4Network, ipaddress.IPv6Network}, lambda v: _address(v, ipaddress.ip_network)),
}
