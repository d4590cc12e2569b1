"""Flows of the sink command: which topics go to which table, how; from the command line and a TOML file."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from psycopg import sql

from exactly_once._model import RangePolicy
from exactly_once.errors import ConfigurationError
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.writer.ddl import parts_of
from exactly_once.writer.decoding import Decoder, Envelope, Source
from exactly_once.writer.errors import NAME_BYTES
from exactly_once.writer.sink import Evolve, TableSink
from exactly_once.writer.statements import Mode

from .options import Settings, undotted
from .problems import CommandError, UsageError

try:
    import msgspec
    from msgspec import Meta

    from exactly_once.writer.envelopes import EnvelopeName, Format
    from exactly_once.writer.formats import FormatDecoder, FormatName, Shaped, format_of
    from exactly_once.writer.from_json import JsonDecoder, OnTombstone
except ImportError as error:
    raise ImportError(f"{error}\nthe sink command needs msgspec: pip install 'kafka-exactly-once[sink]'") from error


# At most 20 transactions a second and worker where little comes; nobody who reads a table notices the delay.
LINGER_SECONDS = 0.05

T = TypeVar("T")
# What Python and the clients of Kafka read in different ways.
_NOT_POSIX = re.compile(r"\(\?|\\[A-Za-z0-9]")
# Quoted names in SQL, and a blank within another one.
_QUOTED, _BLANK = re.compile(r'"(?:[^"]|"")*"'), re.compile(r"[^\s.]\s+[^\s.]")
_Scalar = str | bool | int | float
_Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One table and what fills it; also the keys of a ``[[sink]]`` in the file."""

    topics: tuple[str, ...] = ()
    topics_regex: str | None = None
    """In their place: what the names of topics are, those that come later too."""
    table: str
    """With a pattern the name may hold parts of the topic's: {topic}, or {1} for a group of the pattern."""
    mode: Mode = "append"
    key: tuple[str, ...] | None = None
    format: FormatName | Literal["json", "raw"] | None = None
    """What messages are; None is JSON, but refuses messages that look like another format."""
    schema_registry: Mapping[str, Any] | str | None = field(default=None, repr=False)
    """Where the schemas are of messages that name one: its URL, or settings of a client."""
    csv_columns: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """The names of a line's fields; by default the table's columns."""
    csv_delimiter: str = ","
    on_truncate: Literal["refuse", "skip"] = "refuse"
    update: tuple[str, ...] | None = None
    newest_by: str | None = None
    missing: Literal["null", "default", "keep"] | None = None
    fields: Mapping[str, str | tuple[str, ...]] | None = None
    """Where the values of columns are; only these columns are filled."""
    rename: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The same, and the others are filled by their names."""
    drop: tuple[str, ...] = ()
    flatten: bool | str = False
    """Whether objects in objects become their fields, and what stands between the names then; true is "_"."""
    where: Mapping[str, _Scalar | tuple[_Scalar, ...]] = field(default_factory=dict)
    where_not: Mapping[str, _Scalar | tuple[_Scalar, ...]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    """The types of columns that are made, whatever the sample says."""
    evolve: Evolve | None = None
    """Whether a field without a column gets one while the sink runs."""
    claim: str | tuple[str, ...] | None = None
    """The field that tells one event from another: of those with one, the first is stored."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Source] = field(default_factory=dict)
    epoch: Mapping[str, str] = field(default_factory=dict)
    decimal: Mapping[str, int] = field(default_factory=dict)
    json_text: tuple[str, ...] = ()
    binary: Mapping[str, Literal["base64", "hex"]] = field(default_factory=dict)
    nul: Literal["refuse", "strip"] = "refuse"
    rest: str | None = None
    """The jsonb column for fields without a column; "" for none. --create-table makes one."""
    lax: bool = False
    naive_timestamps: Literal["refuse", "utc"] = "refuse"
    on_tombstone: OnTombstone | None = None

    def of_topic(self, topic: str) -> Flow | None:
        """Return the flow of one topic that the pattern may have found; None for another one.

        :raises CommandError: where its table's name would be too long.
        """
        found = None if self.topics_regex is None else re.fullmatch(self.topics_regex, topic)
        if found is None:
            return None
        names = [part.format(found[0], *found.groups(""), topic=topic) for part in parts_of(self.table)]
        if long := [name for name in names if len(name.encode()) > NAME_BYTES]:
            raise CommandError(f"topic {topic}: Postgres cuts the name of its table {long[0]}: say another table")
        if not all(names):
            raise CommandError(f"topic {topic}: its table {self.table} would have an empty name: say another table")
        return replace(self, topics=(topic,), topics_regex=None, table=sql.Identifier(*names).as_string(None))

    def decoder(self) -> Decoder:
        """Make the decoder."""
        if self.format == "raw":
            from exactly_once.writer.raw import RawDecoder  # noqa: PLC0415

            return RawDecoder(metadata=self.metadata)
        options = {name: getattr(self, name) for name in _OF_DECODER}
        options |= {"missing": "null" if self.missing == "null" else "apart"} if self.missing else {}
        if self.flatten:  # what is within objects is dropped before there are none
            options["drop"] = [path for path in self.drop if "." not in path]
        lax = self.lax or self.format in ("csv", "canal")  # all of whose values are texts
        return self.unwrapping(JsonDecoder(self.fields, rest=self.rest or None, lax=lax, **options))

    def unwrapping(self, decoder: JsonDecoder) -> FormatDecoder:
        """Make what turns messages into JSON and gives them to a decoder."""
        binary = None
        if self.schema_registry is not None:
            from exactly_once.writer.registry import Registry  # noqa: PLC0415 - an extra

            given = self.schema_registry
            binary = Registry({"url": given} if isinstance(given, str) else undotted(given, where="schema_registry"))
        name = self.format
        assert name != "raw"
        if binary is not None and name in (None, "json"):
            name = "connect"  # which is what comes out of a registry, with a schema or without
        form: Format | None = None
        if name is not None and name != "json":
            options = {name: getattr(self, name) for name in _OF_FORMAT} | {"missing": self.missing or "null"}
            form = format_of(name, columns=self.csv_columns, delimiter=self.csv_delimiter, **options)
        if self.where or self.where_not or self.flatten:
            where, where_not = ({f: _texts(v) for f, v in w.items()} for w in (self.where, self.where_not))
            flatten = "_" if self.flatten is True else self.flatten or None
            form = Shaped(form or Format(), where=where, where_not=where_not, flatten=flatten, drop=self.drop)
        guards, opens_keys = self.format is None and binary is None, str(self.claim).startswith("key:")
        return FormatDecoder(decoder, form, binary=binary, opens_keys=opens_keys, guards=guards)

    def sink(self) -> TableSink:
        """Make the sink."""
        return TableSink(self.table, decoder=self.decoder(), **{name: getattr(self, name) for name in _OF_SINK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the workers run; also the keys of ``[run]`` in the file."""

    start: str | None = None
    workers: _Count = 1
    until_end: bool = False
    max_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    linger_seconds: Annotated[float, Meta(ge=0)] = LINGER_SECONDS
    stop_seconds: Annotated[float, Meta(gt=0)] = 20.0
    """Below the 30 seconds that Kubernetes gives by default."""
    on_poison: Literal["stop", "dead-letter"] = "stop"
    on_out_of_range: RangePolicy = "fail"
    name: str | None = None
    dead_letter_limit: _Count = DeadLetterLimit().in_a_row
    dead_letter_window: _Count = DeadLetterLimit().in_window
    claims_window: Annotated[float, Meta(gt=0)] | None = None
    """In seconds: for how long the keys of claim are held at least; for ever without it."""
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a worker needs; it crosses from process to process."""

    flows: Sequence[Flow]
    """Those whose topics are named, ready to be filled."""
    patterns: Sequence[Flow] = ()
    found: Mapping[str, Flow] = field(default_factory=dict)
    """Topics that patterns have found so far, with their tables."""
    waiting: Sequence[Flow] = ()
    """Those of which no message has shown yet what columns their tables are to have."""
    creates_tables: bool = False
    adds_columns: bool = False
    settings: Settings
    kafka: Mapping[str, Any] = field(repr=False)
    """Those settings of Kafka, and what a sink adds."""
    run: Run
    start: Any = None
    log_json: bool = False
    is_live: bool = False

    def found_by_pattern(self, topic: str) -> Flow | None:
        """Return the flow of a topic by the first pattern that finds it; None where none does."""
        return next(filter(None, (flow.of_topic(topic) for flow in self.patterns)), None)


def read_run(args: argparse.Namespace, stored: object) -> Run:
    """Put together what the command line says, then what ``[run]`` in the file says.

    :raises UsageError: for a key that nobody knows, or a value that is not possible.
    """
    if not isinstance(stored, Mapping):
        raise UsageError("run in the file must be a table: [run]")
    given = {f.name: getattr(args, f.name) for f in fields(Run) if getattr(args, f.name) is not None}
    return _checked(Run, {**stored, **given}, "[run]")


def read_flows(args: argparse.Namespace, stored: object, registry: object = None) -> list[Flow]:
    """Put the flows together: those of the file, or the one of the command line; ``registry`` is for all of them.

    :raises UsageError: for a key that nobody knows, and where topic or table are missing.
    """
    given = {f.name: value for f in fields(Flow) if (value := getattr(args, f.name, None)) is not None}
    for name, value in given.items():
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            # A table of pairs, in which a name that comes twice has several values: a filter takes any of them.
            several: dict[str, list[Any]] = {}
            for key, each in value:
                several.setdefault(key, []).append(each)
            twice = [key for key, found in several.items() if len(found) > 1]
            if twice and name not in ("where", "where_not"):
                raise UsageError(f"--{_OPTIONS.get(name, name)} names {', '.join(twice)} twice")
            given[name] = {key: found if len(found) > 1 else found[0] for key, found in several.items()}
    if isinstance(stored, Mapping) or not isinstance(stored, Sequence) or isinstance(stored, str):
        raise UsageError("the file has [sink]; write [[sink]] with two brackets, once for each table")
    if "schema_registry" in given and given.get("format") not in _OF_REGISTRY:
        raise UsageError(
            f"messages of format {given['format']} name no schema of a registry: leave --schema-registry out"
        )
    registry = given.pop("schema_registry", registry)
    if stored and given:
        named = ", ".join(f"--{_OPTIONS.get(name, name.replace('_', '-'))}" for name in given)
        raise UsageError(f"the file has [[sink]] tables; say {named} there")
    flows = [_flow(one, registry) for one in stored or [given]]
    topics = [topic for flow in flows for topic in flow.topics or (flow.topics_regex,)]
    if len(set(topics)) < len(topics):
        raise UsageError("a topic goes to one table only; it is named twice")
    return flows


def with_rest(flow: Flow, column: str | None) -> Flow:
    """Let a column take the fields without one, unless the flow says which one does."""
    return flow if flow.rest is not None or flow.format == "raw" or column is None else replace(flow, rest=column)


def _flow(given: object, registry: object) -> Flow:
    if not isinstance(given, Mapping):
        raise UsageError("[[sink]] in the file must be tables")
    if registry is not None and given.get("format") in _OF_REGISTRY:
        given = {"schema_registry": registry, **given}
    if not ((given.get("topics") or given.get("topics_regex")) and given.get("table")) and set(given) <= _KEYS:
        raise UsageError("say --topic and --table, or topics and table in a [[sink]] of the file of --config")
    if isinstance(given.get("topics"), str):
        given = {**given, "topics": [given["topics"]]}
    flow = _checked(Flow, given, "[[sink]]")
    if flow.format == "raw" and (idle := [name for name in given if name not in _RAW]):
        raise UsageError(f"[[sink]]: format raw does not look into messages, so there is no {', '.join(idle)} with it")
    try:
        Envelope(flow.metadata, flow.constants)
    except ConfigurationError as error:
        raise UsageError(f"[[sink]]: {error}") from None
    _check_pattern(flow)
    for is_wrong, what in (
        (
            _BLANK.search(_QUOTED.sub("x", flow.table)),
            f'table {flow.table}: a name with a blank in it needs double quotes, as in SQL: "Odd Name"',
        ),
        (flow.topics and flow.topics_regex is not None, "topics names them, so there is no topics_regex beside it"),
        (
            flow.format == "raw" and not str(flow.claim or "key:").startswith(("key:", "header:")),
            "format raw does not look into messages, so claim is header:NAME or key:PATH",
        ),
        (flow.fields is not None and flow.evolve, "fields names all columns that are filled, so there is no evolve"),
        (flow.fields is not None and flow.rename, "fields names all columns that are filled, so there is no rename"),
        (
            flow.format != "csv" and (flow.csv_columns or flow.csv_delimiter != ","),
            'csv_columns and csv_delimiter are about format = "csv"',
        ),
        (
            flow.format == "csv" and flow.fields is not None and flow.csv_columns is None,
            "fields is of names, and only csv_columns says in which order a line of CSV has them",
        ),
        (flow.flatten == "", 'flatten has no text between names, which could not be told apart; "_" is the default'),
        (
            str(flow.flatten).isalnum() and isinstance(flow.flatten, str),
            f'flatten is true, false or what stands between names, such as "_": {flow.flatten} would be part of them',
        ),
        (
            flow.schema_registry is not None and flow.format not in _OF_REGISTRY,
            f"messages of format {flow.format} name no schema of a registry",
        ),
    ):
        if is_wrong:
            raise UsageError(f"[[sink]]: {what}")
    return flow


def _check_pattern(flow: Flow) -> None:
    """Refuse a pattern that clients read otherwise, and a table's name that asks for more than it finds."""
    if (pattern := flow.topics_regex) is None:
        return
    if other := _NOT_POSIX.search(pattern):
        raise UsageError(
            f"[[sink]]: topics_regex {pattern}: clients read {other[0]} in another way; say [0-9], [.] and the like"
        )
    try:
        groups = re.compile(pattern).groups
        for part in parts_of(flow.table):
            part.format(*[""] * (groups + 1), topic="")
    except re.error as error:
        raise UsageError(f"[[sink]]: topics_regex {pattern}: {error}") from None
    except (LookupError, ValueError, AttributeError):
        raise UsageError(
            f"[[sink]]: table {flow.table}: with topics_regex {pattern} there are {{topic}} and {{0}} to {{{groups}}}"
        ) from None


def _checked(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Make a dataclass of what was given, and say by name what is wrong with it."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"{where}: unknown key {name}; {meant}")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `")
        path = place.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".")
        (key,) = re.findall(r"^\w*", path)[:1]
        option = f" (--{key.replace('_', '-')})" if kind is Run and key else ""
        choices = ""
        if "Invalid enum value" in said:
            (one,) = [f.type for f in msgspec.inspect.type_info(kind).fields if f.name == key]  # type: ignore[attr-defined]
            choices = f"; choose one of {', '.join(sorted(map(str, _choices(one))))}"
        raise UsageError(f"{where}: {path or 'it'}{option}: {said.replace('`', '')}{choices}") from None


def _choices(kind: msgspec.inspect.Type) -> Iterator[object]:
    """Give the values of the enumerations in a type, also those of a mapping's values."""
    yield from getattr(kind, "values", ())
    for each in (*getattr(kind, "types", ()), *filter(None, [getattr(kind, "value_type", None)])):
        yield from _choices(each)


def _texts(given: _Scalar | tuple[_Scalar, ...]) -> list[str]:
    """Write values as JSON does, texts without quotes."""
    values = given if isinstance(given, tuple) else (given,)
    return [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values]


# What can be said of messages that are stored as they are.
_RAW = {"topics", "topics_regex", "table", "mode", "key", "format", "update", "metadata", "missing", "types", "claim"}
# The formats whose messages may be in the wire format of a Schema Registry.
_OF_REGISTRY = (None, "json", *get_args(EnvelopeName))
_KEYS = {f.name for f in fields(Flow)}
# What those are called on the command line that may be said there several times.
_OPTIONS = {"topics": "topic", "fields": "field", "constants": "constant", "types": "type"}
# Those that the format, the decoder and the sink take under the same names.
_OF_FORMAT = ("on_tombstone", "on_truncate", "decimal", "binary", "lax", "drop")
_OF_DECODER = (
    *("rename", "drop", "metadata", "constants", "epoch", "decimal"),
    *("json_text", "binary", "nul", "naive_timestamps", "on_tombstone"),
)
_OF_SINK = ("mode", "key", "update", "newest_by", "missing", "naive_timestamps", "evolve", "types", "claim")
