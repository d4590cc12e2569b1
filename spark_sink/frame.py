"""Frame: whether the columns of a batch fit the table, before the first row is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Literal

from exactly_once.writer import Column, Table, TableError
from exactly_once.writer.codecs import name_of
from exactly_once.writer.numbers import precision_and_scale

from .errors import FrameError
from .options import Options
from .ranges import PLACES, RESERVED

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, DecimalType, StructField, StructType

# Of several frames, which one a row is of.
FRAME = f"{RESERVED}frame"
# How the columns begin, one for each frame, that hold its rows as structs.
ROW = f"{RESERVED}row"

Form = Literal["itself", "json", "null"]

_JSON = ("json", "jsonb")
_NESTED = ("map", "struct", "variant")
_WHOLE = ("tinyint", "smallint", "int", "bigint")
# What names the columns that say where a row comes from, and their types in Kafka's source.
_PLACE_KINDS = {"topic_column": "string", "partition_column": "int", "offset_column": "bigint"}
# Spark's own forms leave out microseconds, and fields that are null. In UTC an instant has one form, whatever the
# session's time zone: as a part of a key it is the same row, and the same value in a comparison.
_JSON_FORM = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",
}
_NUMBERS = ("int2", "int4", "int8", "float4", "float8", "numeric")
_TEXTS = ("text", "varchar", "bpchar")
# By Spark's type those of Postgres that take no value of it, so that only a column of nulls would pass.
_NEVER = {
    "boolean": (*_NUMBERS, *_TEXTS),
    **dict.fromkeys(("byte", "short", "integer", "long", "float", "double", "decimal"), ("bool", *_TEXTS)),
}
# Of these the only type of Postgres, but for JSON, that takes a value.
_ONLY = {
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "time": "time",
    "daytimeinterval": "interval",
}
_NOT_IN_JSON = ("decimal", "date", "timestamp", "timestamp_ntz", "time", "daytimeinterval")
# What holds nulls only becomes this, which Arrow takes; of array() it says that no element may be null.
_OF_NULLS = {"void": "string", "array": "array<string>"}
_NOT_IN_ARROW = ("interval", "yearmonthinterval")
# Spark's type and Postgres' of which one has a time zone and the other none.
_ZONED_AND_NOT = (("timestamp_ntz", "timestamptz"), ("timestamp", "timestamp"))


def fit(frame: DataFrame, table: Table, options: Options, key: Sequence[str] = ()) -> tuple[DataFrame, tuple[str, ...]]:
    """Return the frame as tasks need it, and which of its columns are written.

    :raises FrameError: naming the column, what is wrong with it and what to do.
    """
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - Spark need not be there to import this
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    fields, forms = match(frame.schema, table, options, key)
    places: list[str] = []
    if has_places(frame.schema, options):
        kinds = zip(options.place_columns, _PLACE_KINDS.values(), PLACES, strict=True)
        places = [f"CAST({_quoted(name)} AS {kind}) AS {place}" for name, kind, place in kinds]
    nested: dict[str, SparkColumn] = {}
    for name in [name for name, form in forms.items() if form == "json"]:
        # Text with all that it holds. Of a number that JSON lacks Spark would make text: Postgres is to refuse the row.
        text, odd = F.to_json(F.col(_quoted(name)), _JSON_FORM), _not_a_number(_quoted(name), fields[name].dataType)
        refused = F.concat(F.lit("NaN, or an infinity, in "), text)
        nested[name] = F.when(F.expr(odd), refused).otherwise(text) if odd else text
    # As SQL, in one call: each function of pyspark is several round trips to Java, in every batch.
    written = [
        f"CAST({_quoted(name)} AS {_OF_NULLS[fields[name].dataType.typeName()]}) AS {_quoted(name)}"
        if form == "null"
        else _quoted(name)
        for name, form in forms.items()
    ]
    if options.claim is not None and options.claim not in forms:
        written.append(_quoted(options.claim))
    try:
        return (frame.withColumns(nested) if nested else frame).selectExpr(*written, *places), tuple(forms)
    except AnalysisException as error:
        if "AMBIGUOUS_REFERENCE" not in str(error):
            raise
        raise FrameError(
            "Spark cannot tell columns, or fields of a struct, apart that differ in upper and lower case only: "
            f"{error}; rename them in the frame, or set spark.sql.caseSensitive"
        ) from error


def combine(frames: Sequence[DataFrame]) -> DataFrame:
    """Make one frame of several: a row has the number of its frame, its columns in a struct, and its places if any."""
    if len(frames) == 1:
        return frames[0]
    parts = []
    for number, frame in enumerate(frames):
        columns, places = [n for n in frame.columns if n not in PLACES], [n for n in frame.columns if n in PLACES]
        # Of rows of other frames the struct is null, which Arrow takes only where its fields may be null, too.
        fields = ", ".join(f"if(true, {name}, null) AS {name}" for name in map(_quoted, columns))
        parts.append(frame.selectExpr(f"{number} AS {FRAME}", f"struct({fields}) AS {ROW}{number}", *places))
    return reduce(lambda whole, part: whole.unionByName(part, allowMissingColumns=True), parts)


def columns_of(schema: StructType, table: Table, options: Options, key: Sequence[str]) -> tuple[str, ...]:
    """Return which columns are written, where the frame comes as it is and nothing in it can be cast.

    :raises FrameError: as :func:`fit`, and for what only a cast would make fit.
    """
    fields, forms = match(schema, table, options, key)
    for column in table.columns:
        if forms.get(column.name) == "json":
            raise FrameError(
                f"column {column.name!r} is {fields[column.name].dataType.simpleString()}, in {table} it is "
                f"{column.type_name}; make it text with to_json() in the frame"
            )
    return tuple(forms)


def match(
    schema: StructType, table: Table, options: Options, key: Sequence[str]
) -> tuple[dict[str, StructField], dict[str, Form]]:
    """Return all fields by name, and as what each column is sent that is written.

    Those are all, but for what only tells where a row comes from, or its key.

    :raises FrameError: as :func:`fit`, which asks Spark for the rest.
    """
    fields = check_places(schema, options)
    known = {c.name: c for c in table.columns}
    optional = (*(options.place_columns if options.ledger == "offsets" else ()), options.claim)
    columns = [name for name in fields if name in known or name not in optional]
    try:
        table.pick(columns)
    except TableError as error:
        mend = (
            "change the table" if set(columns) <= known.keys() else 'add it to the table, or say evolve="add-columns"'
        )
        raise FrameError(f"{error}; drop it from the frame, or {mend}") from None
    needed = [
        c.name
        for c in table.columns
        if c.is_not_null and not (c.has_default or c.is_identity or c.is_generated or c.name in columns)
    ]
    if needed:
        raise FrameError(f"{table} needs values for {', '.join(map(repr, needed))}, and the frame has no such column")
    if not columns:
        raise FrameError(f"no column of the frame is one of {table}")
    if options.mode == "upsert" and (fixed := [n for n in columns if known[n].is_identity and n not in key]):
        raise FrameError(
            f"{table} numbers {fixed[0]!r} by itself (GENERATED ALWAYS AS IDENTITY), and no upsert can change such a "
            "column; drop it from the frame, or make it GENERATED BY DEFAULT"
        )
    forms = {name: _form(fields[name], known[name], table) for name in columns}
    if options.mode in ("upsert", "insert-ignore"):
        check_key((*key, *options.add), columns, table)
    return fields, forms


def has_places(schema: StructType, options: Options) -> bool:
    """Tell whether rows say where they come from; of several tables, some may take rows that cannot."""
    return options.ledger == "offsets" and (options.tables is None or {*options.place_columns} <= {*schema.names})


def check_places(schema: StructType, options: Options) -> dict[str, StructField]:
    """Return the fields by name; refuse two of one name, and none that say where a row comes from."""
    names = schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FrameError(f"the frame has several columns called {', '.join(map(repr, twice))}; rename or drop them")
    if ours := [name for name in names if name.lower().startswith(RESERVED)]:
        raise FrameError(f"the frame has a column {ours[0]!r}; names with {RESERVED} are the sink's own, rename it")
    fields = {f.name: f for f in schema.fields}
    if (claim := options.claim) is not None:
        found = fields[claim].dataType.simpleString() if claim in fields else "missing"
        if found not in ("string", *_WHOLE):
            raise FrameError(f"column {claim!r} (claim=) is {found}: the key of an event is text or a whole number")
    if not has_places(schema, options):
        return fields
    for (option, kind), name in zip(_PLACE_KINDS.items(), options.place_columns, strict=True):
        if name not in fields:
            raise FrameError(
                f"the frame has no column {name!r} ({option}=): topic, partition and offset of Kafka's source "
                "must reach the sink, under these names or others; for an aggregation, which has none, "
                "say ledger='batch-id'"
            )
        found = fields[name].dataType.simpleString()
        if found not in (_WHOLE if kind in _WHOLE else (kind,)):
            raise FrameError(f"column {name!r} ({option}=) is {found}; Kafka's own is {kind}")
    return fields


def check_arrow(schema: StructType) -> None:
    """Refuse what Spark does not hand to Python's tasks, which would fail without a column's name."""
    for field in schema.fields:
        if not set(_NOT_IN_ARROW).isdisjoint(_kinds(field.dataType)):
            raise FrameError(
                f"column {field.name!r} is {field.dataType.simpleString()}, which Spark does not hand to Python; "
                "cast it in the frame"
            )


def _kinds(kind: DataType) -> Iterator[str]:
    """Return the names of a type and of all types within it."""
    yield kind.typeName()
    inner = [getattr(kind, name) for name in ("elementType", "keyType", "valueType") if hasattr(kind, name)]
    for each in [*inner, *(field.dataType for field in getattr(kind, "fields", ()))]:
        yield from _kinds(each)


def check_key(key: Iterable[str], columns: Iterable[str], table: Table | str) -> None:
    """Refuse a frame without the columns by which rows are told from each other."""
    if missing := [name for name in key if name not in set(columns)]:
        raise FrameError(
            f"the frame lacks {', '.join(map(repr, missing))}, by which {table} tells rows from each other"
        )


def _takes(target: str | None, kind: str) -> bool:
    """Tell whether a type of Postgres may take values of one of Spark's; of one that is not known Postgres decides."""
    return target is None or (target not in _NEVER.get(kind, ()) and target == _ONLY.get(kind, target))


def _form(field: StructField, column: Column, table: Table) -> Form:
    """Tell as what a column must be sent."""
    kind, target = field.dataType.typeName(), name_of(column.type_oid)
    place = f"column {field.name!r} is {field.dataType.simpleString()}, in {table} it is {column.type_name}"
    if kind == "void":
        return "null"
    if kind in _NESTED or kind == "array":
        if target in _JSON:
            _not_a_number(_quoted(field.name), field.dataType)  # refuses what JSON lacks
            return "json"
        element = getattr(field.dataType, "elementType", None)
        if element is None or column.element is None or element.typeName() in (*_NESTED, "array"):
            raise FrameError(
                f"{place}; make that column jsonb, flatten the frame's with select(), or make it the text of that type"
            )
        if element.typeName() == "void":
            return "null"
        if not _takes(name_of(column.element.type_oid), element.typeName()):
            raise FrameError(f"{place}, which takes no such values; cast them in the frame, or alter the table")
    if kind in _NOT_IN_JSON and target in _JSON:
        raise FrameError(f"{place}; make it JSON in the frame, such as with to_json(struct({field.name})), or text")
    if (kind, target) in _ZONED_AND_NOT:
        raise FrameError(
            f"{place}: one says a time zone and the other none, so the server's setting would decide. Convert it with "
            "from_utc_timestamp/to_utc_timestamp and a cast, or alter the table"
        )
    if not _takes(target, kind) or kind in _NOT_IN_ARROW:
        raise FrameError(f"{place}, which takes no such value; cast it in the frame, or alter the table")
    if kind == "decimal" and target in ("int2", "int4", "int8"):
        raise FrameError(f"{place}; cast it to an integer type in the frame")
    precision, scale = precision_and_scale(column.typmod)
    if kind == "decimal" and target == "numeric" and scale is not None:
        given: DecimalType = field.dataType  # type: ignore[assignment]
        if given.scale > scale or given.precision - given.scale > precision - scale:
            raise FrameError(
                f"{place}, which has not enough digits; cast it in the frame, where you see what is cut off"
            )
    return "itself"


def _not_a_number(value: str, kind: DataType, depth: int = 0) -> str:
    """Return SQL that tells whether NaN or infinity is within; empty where none can be."""
    name, item = kind.typeName(), f"x{depth}"
    if name in ("float", "double"):
        return f"coalesce({value} IN (double('NaN'), double('Infinity'), -double('Infinity')), false)"
    if name == "struct":
        names = kind.names  # type: ignore[attr-defined]
        if twice := sorted({each for each in names if names.count(each) > 1}):
            raise FrameError(
                f"{value} has several fields called {', '.join(map(repr, twice))}, of which JSON keeps one; rename them"
            )
        fields = kind.fields  # type: ignore[attr-defined]
        found = (_not_a_number(f"{value}.{_quoted(each.name)}", each.dataType, depth) for each in fields)
        return " OR ".join(filter(None, found))
    if name == "map":
        key = kind.keyType.typeName()  # type: ignore[attr-defined]
        if key not in ("string", "byte", "short", "integer", "long", "boolean"):
            raise FrameError(f"{value} is a map with keys of type {key}, which JSON has not; cast them to string")
        value = f"map_values({value})"
    items: DataType | None = getattr(kind, "valueType", None) or getattr(kind, "elementType", None)
    inner = "" if items is None else _not_a_number(item, items, depth + 1)
    return inner and f"coalesce(exists({value}, {item} -> {inner}), false)"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
