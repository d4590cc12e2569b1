"""Options of the sink, checked at construction. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.session import connector

if TYPE_CHECKING:
    from .report import BatchReport
    from .unit import SinkUnit

Mode = Literal["append", "upsert", "insert-ignore", "replace"]
Transaction = Literal["batch", "partition"]
LedgerKind = Literal["offsets", "batch-id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one sink after every check; they travel to the executors."""

    conninfo: str = field(repr=False)
    table: str
    group_id: str
    mode: Mode
    transaction: Transaction
    ledger: LedgerKind
    key: tuple[str, ...] | None
    checkpoint_location: str | None
    bootstrap_servers: str | None
    kafka: Mapping[str, str] | None = field(repr=False)
    topic_column: str
    partition_column: str
    offset_column: str
    in_transaction: Callable[[SinkUnit], object] | None
    on_report: Callable[[BatchReport], object] | None
    small_batch: int
    take_over: bool
    schema: str
    name: str | None
    previous_table: str | None = None
    """The table that the group has written before, where that was another one."""
    job_id: str | None = None
    """The data source: what a batch job is called; under one name it is written once."""
    patience_seconds: float = 120.0
    """How long each step of a batch waits for a database that is away or busy; a stop waits as long."""
    reap_after_seconds: float = 86400.0
    """The data source: how long staged rows are kept that nobody has published."""

    @property
    def place_columns(self) -> tuple[str, str, str]:
        """The columns that say where a row comes from."""
        return self.topic_column, self.partition_column, self.offset_column


def check_options(*, key: Sequence[str] | None, **rest: Any) -> Options:
    """Check options by themselves and against each other.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """
    if isinstance(key, str):
        raise ConfigurationError(f"key={key!r} must be a list of columns: key=[{key!r}]")
    options = Options(key=tuple(key) if key is not None else None, **rest)
    for option, kind in (("mode", Mode), ("transaction", Transaction), ("ledger", LedgerKind)):
        value = getattr(options, option)
        if value not in get_args(kind):
            raise ConfigurationError(f"{option}={value!r} is not possible; choose one of {', '.join(get_args(kind))}")
    connector(options.conninfo)
    for option in ("table", "group_id"):
        if not getattr(options, option):
            raise ConfigurationError(f"{option}= is needed")
    if len(set(options.place_columns)) < 3:
        raise ConfigurationError(
            f"topic_column=, partition_column= and offset_column= must differ, got {', '.join(options.place_columns)}"
        )
    if options.small_batch < 0:
        raise ConfigurationError(f"small_batch={options.small_batch!r} must not be negative; 0 is for never")
    if not options.patience_seconds >= 0:
        raise ConfigurationError(f"patience_seconds={options.patience_seconds!r} must not be negative")
    _check_ledger(options)
    return options


def _check_ledger(options: Options) -> None:
    if options.ledger == "batch-id" and options.transaction != "batch":
        raise ConfigurationError(
            "ledger='batch-id' needs transaction='batch': a batch id is either written whole or not at all"
        )
    if options.ledger == "offsets" and options.mode == "replace":
        raise ConfigurationError(
            "mode='replace' is for aggregations in output mode complete; it needs ledger='batch-id', "
            "because such rows have no offsets"
        )
    if options.key is not None and options.mode not in ("upsert", "insert-ignore"):
        raise ConfigurationError(f"key= is about rows that exist; mode={options.mode!r} does not look at them")
