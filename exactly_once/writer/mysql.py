"""MySQL: values as Canal sends them, texts all, by their types in MySQL. No I/O."""

from __future__ import annotations

import re

import msgspec

from .codecs import name_of
from .logical import document_in
from .table import Column

_COLUMNS = {
    kind: column
    for column, kinds in {
        "smallint": ("tinyint", "smallint", "year"),
        "integer": ("mediumint", "int", "integer"),
        "bigint": ("bigint",),
        "numeric": ("decimal", "numeric"),
        "real": ("float",),
        "double precision": ("double",),
        "date": ("date",),
        "timestamp": ("datetime", "timestamp"),
        "jsonb": ("json",),
    }.items()
    for kind in kinds
}
_WIDER = {"smallint": "integer", "integer": "bigint", "bigint": "numeric"}
_NUMBERS = ("int2", "int4", "int8", "numeric")
# Canal takes what has "binary" in its type for bytes, too; a geometry is one of MySQL's own form.
_BYTES = re.compile(r"binary|blob|geom|^(multi)?(point|linestring|polygon)")
_FRACTION = re.compile(rb'"-?\d+\.\d+"')
_LABEL = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r"}


def column_of(kind: str) -> str:
    """Return the type of a column that holds what MySQL's type does; text where that is not certain."""
    column = "bytea" if _is_bytes(kind) else _COLUMNS.get(_name(kind), "text")
    return _WIDER.get(column, column) if "unsigned" in kind.lower() else column


def value_for(column: Column | None, kind: str, text: bytes) -> bytes:
    """Write a value in JSON as a column takes it; None is a column that is not known, or takes JSON.

    Canal sends bytes as the characters of ISO 8859-1, bits, enums and sets as decimal numbers.

    :raises ValueError: for a value that the column would take for another one.
    """
    if text == b"null":
        return text
    name, base = None if column is None else name_of(column.type_oid), _name(kind)
    if base == "json":
        document = msgspec.json.decode(text, type=str)
        return document_in(document, column) if name in ("json", "jsonb") else text
    if _is_bytes(kind):
        value = msgspec.json.decode(text, type=str).encode("latin-1")
        try:
            is_base64 = column is None or name in ("bytea", "json", "jsonb")
            return msgspec.json.encode(value if is_base64 else value.decode())
        except UnicodeDecodeError as error:
            raise ValueError("bytes that are no text: make the column bytea") from error
    if name == "bytea":
        raise ValueError(f"it is no bytes: make the column {column_of(kind)}")
    if base in ("enum", "set") and name not in _NUMBERS and (found := re.fullmatch(rb'"(\d+)"', text)):
        # The label of an enum by its number, from 1, or those of a set by their bits; 0 is the empty text.
        number, written = int(found[1]), (label[1] for label in _LABEL.finditer(kind))
        labels = [re.sub(r"''|\\(.)", lambda m: _ESCAPED.get(m[1], m[1] or "'"), each) for each in written]
        chosen = [at for at in range(number.bit_length()) if number >> at & 1] if base == "set" else [number - 1]
        if number and chosen[-1] >= len(labels):  # as of a type that was altered since
            raise ValueError(f"the type has no number {number}")
        return msgspec.json.encode(",".join(labels[at] for at in chosen) if number else "")
    if base == "bit" and name in ("bit", "varbit"):  # whose digits would else be read as bits
        length = re.search(r"\d+", kind)
        return msgspec.json.encode(f"{int(msgspec.json.decode(text, type=str)):0{length[0] if length else 1}b}")
    if name == "money" and _FRACTION.fullmatch(text):
        return text.strip(b'"')  # a number, which money does not take
    return text


def _name(kind: str) -> str:
    return re.split(r"[( ]", kind.lower(), maxsplit=1)[0]


def _is_bytes(kind: str) -> bool:
    return _BYTES.search(_name(kind)) is not None
