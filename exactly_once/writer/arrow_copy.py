"""Arrow copy: record batches as the bytes of a binary COPY, where their types say all that the columns ask for.

pgpq makes the bytes. It goes by the Arrow type alone and knows nothing of the table, and Postgres trusts binary
values: it rounds them to a column's scale and reads eight bytes of one type as another. So each Arrow column
is held against the table's column here. Whatever is not certain is left to the way of Python's rows, which is
slower, stores the same, and says which row it was that cannot be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from typing import Any

import pgpq
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pgpq import encoders, schema

from .codecs import name_of
from .numbers import precision_and_scale
from .table import Column

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_DAYS = (date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY)
_SECOND = 1_000_000
_INSTANTS = (
    int(datetime(1, 1, 1, tzinfo=UTC).timestamp()) * _SECOND,
    int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * _SECOND + _SECOND - 1,
)
_UUID = r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_NO_UUID = "00000000-0000-0000-0000-000000000000"

# Return the array that pgpq encodes as the column wants it; None, or an Arrow error, if that is not certain.
Fit = Callable[[Any, Column], Any]


def encode(batch: Any, columns: Sequence[Column]) -> Iterator[bytes] | None:
    """Encode a ``RecordBatch`` or a ``Table`` for these columns; None if that would not certainly be right."""
    if batch.num_columns != len(columns):
        return None
    batches = batch.to_batches() if isinstance(batch, pa.Table) else [batch]
    try:
        fitting = []
        for each in batches:
            arrays = []
            for array, column in zip(each.columns, columns, strict=True):
                name = name_of(column.type_oid) or "" if column.kind == "b" else ""
                fit = _text if column.kind == "e" else _array if column.element else _FITS.get(name)
                if fit is None or (fitted := fit(array, column)) is None:
                    return None
                arrays.append(fitted)
            # Numbers for names, whatever they are called; and all may be null, for pgpq writes what lies under a null
            # of a column that claims to have none.
            fields = [pa.field(str(i), array.type) for i, array in enumerate(arrays)]
            fitting.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
        if not fitting:
            return None
        schema_ = fitting[0].schema
        chosen = {field.name: pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field) for field in schema_}
        for field, column in zip(schema_, columns, strict=True):
            if name_of(column.type_oid) == "jsonb":
                chosen[field.name] = encoders.StringEncoderBuilder.new_with_output(field, schema.Jsonb())
        encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(schema_, chosen)
    except (pa.ArrowException, ValueError, TypeError, RuntimeError):
        return None  # Arrow's casts refuse what does not fit
    return _parts(encoder, fitting)


def _parts(encoder: Any, batches: Sequence[Any]) -> Iterator[bytes]:
    """Encode one batch while the server stores the one before."""
    yield encoder.write_header()
    yield from map(encoder.write_batch, batches)
    yield encoder.finish()


def _whole(wanted: Any) -> Fit:
    # The cast raises where a value is out of range.
    return lambda array, _: array.cast(wanted) if pa.types.is_integer(array.type) else None


def _only(wanted: Any) -> Fit:
    return lambda array, _: array if array.type == wanted else None


def _text(array: Any, _: Column) -> Any:
    # Postgres itself refuses a NUL, what is not UTF-8, an unknown label of an enum and what is not JSON.
    return array.cast(pa.string()) if _is_text(array.type) else None


def _limited(array: Any, column: Column) -> Any:
    """Postgres cuts off blanks that are too many."""
    text, length = _text(array, column), column.typmod - 4
    if text is None or length < 0:
        return text
    return text if _within(pc.utf8_length(text), 0, length) else None


def _bytea(array: Any, _: Column) -> Any:
    kind = array.type
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return array.cast(pa.binary()) if is_bytes else None


def _timestamp(*, is_zoned: bool) -> Fit:
    def fit(array: Any, column: Column) -> Any:
        is_fitting = pa.types.is_timestamp(array.type) and (array.type.tz is not None) is is_zoned
        if not is_fitting or column.typmod >= 0:  # Postgres would round to so many digits
            return None
        # The cast raises where there are nanoseconds. What is encoded is the count of microseconds, in both types.
        micros = array.cast(pa.timestamp("us", array.type.tz)).view(pa.int64())
        return micros.view(pa.timestamp("us")) if _within(micros, *_INSTANTS) else None

    return fit


def _numeric(array: Any, column: Column) -> Any:
    if not pa.types.is_decimal128(array.type):
        return None
    # Postgres refuses too many digits before the point, and rounds those behind it.
    _, scale = precision_and_scale(column.typmod)
    return array if array.type.scale >= 0 and (scale is None or array.type.scale <= scale) else None


def _uuid(array: Any, _: Column) -> Any:
    if not _is_text(array.type):
        return array if pa.types.is_fixed_size_binary(array.type) and array.type.byte_width == 16 else None
    filled = pc.fill_null(array.cast(pa.string()), _NO_UUID)
    if not pc.all(pc.match_substring_regex(filled, _UUID)).as_py():
        return None
    values = bytes.fromhex("".join(filled.to_pylist()).replace("-", ""))
    bare = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(array), [None, pa.py_buffer(values)])
    return pc.if_else(array.is_valid(), bare, pa.scalar(None, pa.binary(16)))


def _array(array: Any, column: Column) -> Any:
    """Postgres compares the type of the elements, so only the usual ones need be told apart here."""
    element = column.element
    wanted = None if element is None or element.is_domain else _ELEMENTS.get(name_of(element.type_oid) or "")
    kind = array.type
    if wanted is None or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    return array.cast(pa.list_(wanted)) if kind.value_type == wanted else None


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _within(array: Any, low: int, high: int) -> bool:
    found = pc.min_max(array).as_py()
    return found["min"] is None or (low <= found["min"] and found["max"] <= high)


_FITS: dict[str, Fit] = {
    "int2": _whole(pa.int16()),
    "int4": _whole(pa.int32()),
    "int8": _whole(pa.int64()),
    "float4": _only(pa.float32()),
    "float8": lambda array, _: array.cast(pa.float64()) if pa.types.is_floating(array.type) else None,
    "numeric": _numeric,
    "bool": _only(pa.bool_()),
    "text": _text,
    "varchar": _limited,
    "bpchar": _limited,
    "bytea": _bytea,
    "json": _text,
    "jsonb": _text,
    "uuid": _uuid,
    "date": lambda array, _: (
        array if pa.types.is_date32(array.type) and _within(array.view(pa.int32()), *_DAYS) else None
    ),
    "timestamp": _timestamp(is_zoned=False),
    "timestamptz": _timestamp(is_zoned=True),
}
_ELEMENTS = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}
