"""Options of the sink and of the data source, checked at construction. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import psycopg
from psycopg.conninfo import make_conninfo

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.ledger.session import connector

if TYPE_CHECKING:
    from .report import BatchReport, SinkUnit

Mode = Literal["append", "upsert", "insert-ignore", "replace"]
Transaction = Literal["batch", "partition"]
LedgerKind = Literal["offsets", "batch-id"]
OnBadRow = Literal["fail", "dead-letter"]

# What each of several tables may have for itself.
_OF_TABLE = ("mode", "key", "add")
# What only ``foreachBatch`` can do.
_ONLY_SINK = ("transaction", "in_transaction", "on_report", "small_batch", "tables", "dead_letter_limit")
# What Spark itself hands on to a data source.
_OF_SPARK = ("path", "queryname")
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one sink after every check; they travel to the executors."""

    conninfo: str = field(default="", repr=False)
    table: str | None = None
    group_id: str = ""
    mode: Mode = "append"
    transaction: Transaction = "batch"
    ledger: LedgerKind = "offsets"
    key: tuple[str, ...] | None = None
    add: tuple[str, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] | None = None
    checkpoint_location: str | None = None
    bootstrap_servers: str | None = None
    kafka: Mapping[str, str] | None = field(default=None, repr=False)
    topic_column: str = "topic"
    partition_column: str = "partition"
    offset_column: str = "offset"
    in_transaction: Callable[[SinkUnit], object] | None = None
    on_report: Callable[[BatchReport], object] | None = None
    on_bad_row: OnBadRow = "fail"
    dead_letter_limit: DeadLetterLimit | None = None
    small_batch: int = 1000
    take_over: bool = False
    previous_table: str | None = None
    """The table that the group has written before, where that was another one."""
    patience_seconds: float = 120.0
    """How long each step of a batch waits for a database that is away or busy; a stop waits as long."""
    schema: str = "exactly_once"
    name: str | None = None
    job_id: str | None = None
    """The data source: what a batch job is called; under one name it is written once."""
    reap_after_seconds: float = 86400.0
    """The data source: how long staged rows are kept that nobody has published."""

    @property
    def place_columns(self) -> tuple[str, str, str]:
        """The columns that say where a row comes from."""
        return self.topic_column, self.partition_column, self.offset_column

    @property
    def is_one_of_several(self) -> bool:
        """Whether these are the options of one of several tables."""
        return self.tables is not None and self.table is not None

    @property
    def targets(self) -> tuple[Options, ...]:
        """The options of each table by itself."""
        if self.tables is None:
            return (self,)
        return tuple(replace(self, table=name, **given) for name, given in self.tables.items())


def check_options(**given: Any) -> Options:
    """Check options by themselves and against each other.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """
    given = _with_names(given)
    if (tables := given.get("tables")) is not None:
        given["tables"] = _checked_tables(given, tables)
    options = Options(**given)
    for option, kind in (
        ("mode", Mode),
        ("transaction", Transaction),
        ("ledger", LedgerKind),
        ("on_bad_row", OnBadRow),
    ):
        for each in (options, *options.targets):
            if (value := getattr(each, option)) not in get_args(kind):
                raise ConfigurationError(
                    f"{option}={value!r} is not possible; choose one of {', '.join(get_args(kind))}"
                )
    connector(options.conninfo)
    for option, value in (("table", options.tables or options.table), ("group_id", options.group_id)):
        if not value:
            raise ConfigurationError(f"{option}= is needed")
    if len(set(options.place_columns)) < 3:
        raise ConfigurationError(
            f"topic_column=, partition_column= and offset_column= must differ, got {', '.join(options.place_columns)}"
        )
    if options.small_batch < 0:
        raise ConfigurationError(f"small_batch={options.small_batch!r} must not be negative; 0 is for never")
    if not options.patience_seconds >= 0:
        raise ConfigurationError(f"patience_seconds={options.patience_seconds!r} must not be negative")
    if options.transaction != "batch" and (options.ledger == "batch-id" or options.tables is not None):
        raise ConfigurationError(
            "ledger='batch-id' and tables= need transaction='batch': such a batch is either written whole or not at all"
        )
    if options.ledger == "batch-id" and options.on_bad_row != "fail":
        raise ConfigurationError("on_bad_row='dead-letter' needs ledger='offsets': other rows have no offset to skip")
    for each in options.targets:
        _check_target(each)
    return options


def _with_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make tuples of what names columns."""
    lists = {option: given[option] for option in ("key", "add") if given.get(option) is not None}
    for option, value in lists.items():
        if isinstance(value, str):
            raise ConfigurationError(f"{option}={value!r} must be a list of columns: {option}=[{value!r}]")
    return {**given, **{option: tuple(value) for option, value in lists.items()}}


def _checked_tables(given: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check what is said of several tables, as far as it is not said of one."""
    if given.get("table") is not None or any(given.get(name) for name in ("key", "add")):
        raise ConfigurationError("tables= has for each table what table=, key= and add= are for one; leave them out")
    for name, each in tables.items():
        if unknown := sorted(set(each) - set(_OF_TABLE)):
            raise ConfigurationError(f"tables={{{name!r}: ...}} takes {', '.join(_OF_TABLE)}, not {unknown[0]}")
    return {name: _with_names(each) for name, each in tables.items()}


def _check_target(options: Options) -> None:
    """Check what is said of one table."""
    if options.ledger == "offsets" and options.mode == "replace":
        raise ConfigurationError(
            "mode='replace' is for aggregations in output mode complete; it needs ledger='batch-id', "
            "because such rows have no offsets"
        )
    if options.key is not None and options.mode not in ("upsert", "insert-ignore"):
        raise ConfigurationError(f"key= is about rows that exist; mode={options.mode!r} does not look at them")
    if options.add and options.mode != "upsert":
        raise ConfigurationError(f"add= is about rows that exist: mode='upsert', not {options.mode!r}")


def check_source_options(given: Mapping[str, str]) -> Options:
    """Check the options of one query of the data source: strings, under names that Spark lower-cases.

    Case and underscores in names do not matter: ``groupId`` is ``group_id``.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """

    def plain(name: str) -> str:
        return name.lower().replace("_", "")

    names = [each.name for each in fields(Options) if each.name not in _ONLY_SINK] + ["password"]
    known = {plain(name): name for name in names}
    chosen: dict[str, Any] = {}
    settings = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
    for name, value in given.items():
        if plain(name) in known:
            chosen[known[plain(name)]] = value
        elif plain(name) in map(plain, _ONLY_SINK):
            raise ConfigurationError(f"{name} is an option of PostgresSink, for foreachBatch; the data source has none")
        elif not name.startswith("kafka.") and plain(name) not in _OF_SPARK:
            raise ConfigurationError(f"there is no option {name}; there are {', '.join(map(_camel, names))}")
    for option in ("reap_after_seconds", "patience_seconds"):
        if option in chosen:
            chosen[option] = _number(_camel(option), chosen[option])
    for option in {"key", "add"} & chosen.keys():
        chosen[option] = [name.strip() for name in chosen[option].split(",")]
    if (password := chosen.pop("password", None)) is not None:
        # The option that Spark itself redacts, by its name, in plans, logs and its pages.
        with contextlib.suppress(psycopg.ProgrammingError):  # what is wrong is said where all options are checked
            chosen["conninfo"] = make_conninfo(chosen.get("conninfo", ""), password=password)
    if "take_over" in chosen:
        if (said := chosen["take_over"].lower()) not in _TRUTHS:
            raise ConfigurationError(f"takeOver={said!r} is not possible; choose true or false")
        chosen["take_over"] = _TRUTHS[said]
    return check_options(**chosen, kafka=settings or None, small_batch=0)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds")
    return number
