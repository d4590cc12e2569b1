"""Codecs: which codec a column has; arrays, ranges and composites by what is in them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from psycopg.postgres import types as registry
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from . import numbers, texts, times
from .codec import BYTEA, Codec, Naive, array_text, as_literal, by_text, named, record, refuse
from .errors import cut
from .literals import read_array, read_multirange, read_range, read_record
from .table import Column

_PLAIN: dict[str, Codec] = {**numbers.CODECS, **texts.CODECS, "date": times.DATE}
_BY_MODIFIER: dict[str, Callable[[int], Codec]] = {
    "numeric": numbers.numeric,
    "varchar": partial(texts.limited, "varchar"),
    "bpchar": partial(texts.limited, "char"),
    "time": partial(times.clock, "time"),
    "timetz": partial(times.clock, "timetz"),
    "interval": times.interval,
}


def codec_of(column: Column, naive: Naive = "refuse") -> Codec:
    """Return the codec of a column."""
    if column.kind == "c":
        return _composite(column, naive)
    if column.kind == "e":
        return texts.CODECS["text"]
    name = name_of(column.type_oid)
    if column.part is not None:
        make = {"r": _range, "m": _multirange}.get(column.kind, _array)
        return make(name, column.part, codec_of(column.part, naive))
    if name is None:  # what is not known here goes as text
        return by_text()
    if name in ("timestamp", "timestamptz"):
        return times.timestamp(name, column.typmod, naive)
    maker = _BY_MODIFIER.get(name)
    return maker(column.typmod) if maker else _PLAIN.get(name, by_text())


def name_of(oid: int | None) -> str | None:
    """Return the name of a built-in type; None for the types of extensions and users."""
    info = registry.get(oid) if oid else None
    return info.name if info is not None and info.oid == oid else None


def _range(name: str | None, _: Column, bound: Codec) -> Codec:
    def coerce(value: Any) -> Any:
        if isinstance(value, str):
            value = read_range(value)
        if not isinstance(value, Range):
            refuse("a range is wanted")(value)
        if value.isempty:
            return Range(empty=True)
        lower, upper = (
            converted if name is not None else bound.as_text(converted)
            for converted in map(bound.convert, (value.lower, value.upper))
        )
        converted = Range(lower, upper, value.bounds or "[)")
        return as_literal(converted) if isinstance(lower, str) or isinstance(upper, str) else converted

    return named(name, set(), coerce) if name is not None else by_text(lambda value: as_literal(coerce(value)))


def _multirange(name: str | None, _: Column, part: Codec) -> Codec:
    def coerce(value: Any) -> Any:
        parts = [part.convert(p) for p in (read_multirange(value) if isinstance(value, str) else value)]
        if any(isinstance(p, str) for p in parts):
            return "{" + ",".join(map(as_literal, parts)) + "}"
        return Multirange(parts)

    return named(name, set(), coerce) if name is not None else by_text(coerce)


def _composite(column: Column, naive: Naive) -> Codec:
    """Make the codec of a composite type: a mapping by the names of its attributes, or a tuple in their order."""
    attributes = {a.name: codec_of(a, naive) for a in column.attributes}

    def coerce(value: Any) -> str:
        if isinstance(value, str):
            texts = read_record(value)
            read = [_read(c, t) for c, t in zip(attributes.values(), texts, strict=False)]
            value = [*read, *texts[len(attributes) :]]
        if isinstance(value, Mapping):
            if unknown := set(value) - set(attributes):
                raise ValueError(f"the type has no attribute {', '.join(sorted(map(repr, unknown)))}")
            value = [value.get(name) for name in attributes]
        if len(value) != len(attributes):
            raise ValueError(f"the type has {len(attributes)} attributes, not {len(value)}: {cut(value)}")
        return record([codec.as_text(codec.convert(v)) for codec, v in zip(attributes.values(), value, strict=True)])

    return by_text(coerce)


def _read(codec: Codec, text: str | None) -> Any:
    """Return what a codec takes for a part of a text that Postgres wrote."""
    if text is None or bytes not in codec.exact:
        return text
    if not text.startswith("\\x"):
        raise ValueError(f"{cut(text)} are no bytes in hexadecimal, as Postgres writes them")
    return bytes.fromhex(text[2:])


def _array(name: str | None, column: Column, element: Codec) -> Codec:
    """Make the codec of an array: its parts are converted one by one, because the dumper looks at none."""
    is_json = element.wire == BYTEA and column.type_oid != BYTEA
    # Elements of a domain go as text: Postgres wants their own type in the binary form; the driver dumps no bpchar.
    is_text = element.wire is None or is_json or column.is_domain or name_of(column.type_oid) in (None, "bpchar")
    delimiter = ";" if name_of(column.type_oid) == "box" else ","  # Postgres' own, of no other type

    def parts(value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, tuple) and column.kind != "c"):  # else a record
            return [parts(part) for part in value]
        converted = element.convert(value)
        return element.as_text(converted) if is_text else converted

    def read(value: Any) -> Any:
        return [read(part) for part in value] if isinstance(value, list) else _read(element, value)

    def coerce(value: Any) -> Any:
        subscripts = ""
        if isinstance(value, str):
            if element.coerce is as_literal:
                return value  # Postgres alone knows the type, and what separates its values
            subscripts, texts = read_array(value)
            value = read(texts)
        if not isinstance(value, (list, tuple)):
            refuse("a list is wanted")(value)
        converted = parts(value)
        if 0 in (dimensions := _dimensions(converted, value)):
            converted = []  # Postgres knows but one empty array
        if subscripts and converted:
            return subscripts + array_text(converted, delimiter)
        return array_text(converted, delimiter) if is_text or not is_dumpable(converted, len(dimensions)) else converted

    def is_dumpable(value: Any, depth: int) -> bool:
        if depth:
            return all(is_dumpable(part, depth - 1) for part in value)
        return not element.is_literal(value)

    if is_text:
        return by_text(coerce)
    return Codec(wire=registry[column.type_oid].array_oid, coerce=coerce)


def _dimensions(value: Any, whole: Any) -> tuple[int, ...]:
    """Return the lengths of lists in lists.

    :raises ValueError: when they differ, of which the driver would make some array or other.
    """
    if not isinstance(value, list):
        return ()
    inner = {_dimensions(part, whole) for part in value}
    if len(inner) > 1:
        raise ValueError(f"the lists in an array are not of one length: {cut(whole)}")
    return len(value), *(inner.pop() if inner else ())
