"""Texts: the codecs of text, bytes, JSON, identifiers and addresses. No I/O."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from .codec import BYTEA, TEXT, Codec, by_text, named, refuse
from .errors import NAME_BYTES, cut
from .literals import json_text

# Python takes zones and masks too: the first it would lose, the second means something else.
_ADDRESS = re.compile(r"[\da-fA-F.:]+(?:/\d+)?", re.ASCII)
_BARE_UUID = r"[\da-fA-F]{8}(?:-?[\da-fA-F]{4}){3}-?[\da-fA-F]{12}"
_UUID = re.compile(rf"{_BARE_UUID}|\{{{_BARE_UUID}\}}", re.ASCII)
_JSON_ALREADY = (bytes, bytearray, memoryview)


def text() -> Codec:
    """Make the codec of text, and of all that Postgres receives as text."""
    return Codec(wire=TEXT, exact=frozenset({str}), coerce=_to_text)


def limited(name: str, typmod: int) -> Codec:
    """Make the codec of char(n) and varchar(n). Postgres cuts off blanks that are too many; nothing is cut here."""
    length = typmod - 4
    if length < 0:
        return text()
    return _holding(lambda value: len(value) <= length, f"{name}({length})")


def name() -> Codec:
    """Make the codec of name, which Postgres cuts silently."""
    return _holding(lambda value: len(value.encode()) <= NAME_BYTES, "name")


def one_byte() -> Codec:
    """Make the codec of "char", of which Postgres keeps the first byte; it has no binary form of an empty text."""
    return by_text(_holding(lambda value: len(value.encode()) <= 1, '"char"').convert)


def bytea() -> Codec:
    """Make the codec of bytes."""
    return named("bytea", {bytes, bytearray, memoryview}, refuse("bytes are wanted"))


def json() -> Codec:
    """Make the codec of json. Text is taken to be JSON already, as by Postgres; all else is written as JSON."""
    return Codec(wire=BYTEA, coerce=partial(_json_bytes, b""), as_text=lambda v: None if v is None else v.decode())


def jsonb() -> Codec:
    """Make the codec of jsonb: what Postgres receives of it is a version and the text."""
    return Codec(
        wire=BYTEA, coerce=partial(_json_bytes, b"\x01"), as_text=lambda v: None if v is None else v[1:].decode()
    )


def uuid() -> Codec:
    """Make the codec of UUIDs, from their text or 16 bytes too."""

    def coerce(value: Any) -> UUID:
        if isinstance(value, (bytes, bytearray)):
            return UUID(bytes=bytes(value))
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise ValueError(f"{cut(value)} is no UUID")
        return UUID(value)

    return named("uuid", {UUID}, coerce)


def inet() -> Codec:
    """Make the codec of addresses, with or without a network."""
    exact: set[type] = {ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface, ipaddress.IPv6Interface}
    return named("inet", exact, lambda v: _address(v, ipaddress.ip_interface if "/" in v else ipaddress.ip_address))


def cidr() -> Codec:
    """Make the codec of networks."""
    exact: set[type] = {ipaddress.IPv4Network, ipaddress.IPv6Network}
    return named("cidr", exact, lambda v: _address(v, ipaddress.ip_network))


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
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode()
    raise ValueError(f"text is wanted, not {type(value).__name__}: {cut(value)}")


def _json_bytes(version: bytes, value: Any) -> bytes:
    if isinstance(value, _JSON_ALREADY):
        return version + bytes(value)
    if isinstance(value, str):
        return version + value.encode()
    if hasattr(value, "obj"):  # psycopg's Json and Jsonb
        value = value.obj
    return version + json_text(value).encode()
