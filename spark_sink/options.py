"""Options of the sink and of the data source, checked at construction, and what is made of them. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from uuid import UUID

import psycopg
import tenacity
from psycopg.conninfo import make_conninfo

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.admin import Cluster
from exactly_once.kafka.kinds import check_choice
from exactly_once.kafka.settings import BROKERS
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.rows import Ledger, Watch
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.start import StartOffsets
from exactly_once.writer import TableWriter
from exactly_once.writer.sink import Evolve
from exactly_once.writer.statements import Mode as WriterMode

from .ranges import Group

if TYPE_CHECKING:
    from .report import BatchReport, SinkUnit

Mode = Literal["append", "upsert", "insert-ignore", "replace"]
Transaction = Literal["batch", "partition"]
LedgerKind = Literal["offsets", "batch-id"]
OnBadRow = Literal["fail", "dead-letter"]

# What each of several tables may have for itself.
_OF_TABLE = ("mode", "key", "add", "claim", "create_table", "evolve")
# Of which an empty text would be found out late, if at all.
_NAMING = ("bootstrap_servers", "schema", "checkpoint_location", "topic_column", "partition_column", "offset_column")
# What only ``foreachBatch`` can do.
_ONLY_SINK = ("transaction", "in_transaction", "on_report", "small_batch", "tables", "dead_letter_limit")


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
    claim: str | None = None
    create_table: bool = False
    evolve: Evolve | None = None
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
    def group(self) -> Group:
        """The group as errors name it."""
        return Group(self.group_id, self.schema)

    @property
    def patiently(self) -> tenacity.Retrying:
        """A retrier for whole transactions of a batch."""
        return waiting(self.patience_seconds, group_id=self.group_id)

    def session(self, instance: UUID | None = None) -> Session:
        """Return a connection to the database that is opened when it is needed."""
        return Session(connector(self.conninfo), schema=self.schema, instance=instance)

    def ledger_in(self, session: Session, query_id: str | None = None, watch: Watch | None = None) -> Ledger:
        """Return the ledger as a run of this query sees it."""
        return Ledger(
            session,
            group_id=self.group_id,
            owner_kind="spark",
            owner_name=self.name or f"query {query_id}",
            take_over=self.take_over,
            watch=watch,
        )

    def watcher(self, session: Session, instance: UUID) -> StaleBackendTerminator:
        """Return what ends owners that stand still, but for other backends of this instance."""
        return StaleBackendTerminator(session.connect, schema=self.schema, group_id=self.group_id, instance=instance)

    def starter(self, ledger: Ledger) -> StartOffsets | None:
        """Return what checks ids of cluster and topics, where the cluster is known and offsets are counted."""
        settings = dict(self.kafka or {})
        if self.bootstrap_servers is not None:
            settings["bootstrap.servers"] = self.bootstrap_servers
        if not settings or self.ledger == "batch-id":
            return None
        # Spark chooses where to start, whatever another program of the group has committed to Kafka.
        return StartOffsets(ledger, Cluster(settings), start="earliest", on_out_of_range="fail")

    def writer(self, table: str | None = None) -> TableWriter:
        """Return the writer of the one table, by its full name if that is known.

        Rows that replace others are appended to the emptied table.
        """
        name = table or self.table
        assert name is not None
        mode: WriterMode = "append" if self.mode == "replace" else self.mode
        # What cannot be stored claims nothing, so each row is looked at.
        return TableWriter(name, mode=mode, key=self.key, add=self.add, sends_each=self.claim is not None)

    def report(self, query_id: str, run_id: UUID | str, batch_id: int, fingerprint: str | None) -> dict[str, Any]:
        """Return what is written down of a batch, for `exactly-once status`, but for what it has written."""
        named = {"query_id": query_id, "run_id": str(run_id), "name": self.name}
        return {**named, "batch_id": batch_id, "fingerprint": fingerprint}

    @property
    def place_columns(self) -> tuple[str, str, str]:
        """The columns that say where a row comes from."""
        return self.topic_column, self.partition_column, self.offset_column

    @property
    def minds_order(self) -> bool:
        """Whether it matters which of two rows comes first."""
        return self.mode != "append" or self.claim is not None

    @property
    def targets(self) -> tuple[Options, ...]:
        """The options of each table by itself."""
        if self.tables is None:
            return (self,)
        return tuple(replace(self, table=name, **given) for name, given in self.tables.items())


def check_options(**given: Any) -> Options:
    """Check options by themselves and against each other."""
    given = _with_names(given)
    if (tables := given.get("tables")) is not None:
        given["tables"] = _checked_tables(given, tables)
    options = Options(**given)
    for option, possible in (
        ("mode", get_args(Mode)),
        ("transaction", get_args(Transaction)),
        ("ledger", get_args(LedgerKind)),
        ("on_bad_row", get_args(OnBadRow)),
        ("create_table", (True, False)),
        ("evolve", (*get_args(Evolve), None)),
    ):
        for each in (options, *options.targets):
            check_choice(option, getattr(each, option), possible)
    connector(options.conninfo)
    for option, value in (("table", options.tables or options.table), ("group_id", options.group_id)):
        if not value:
            raise ConfigurationError(f"{option}= is needed")
    if len(set(options.place_columns)) < 3:
        raise ConfigurationError(
            f"topic_column=, partition_column= and offset_column= must differ, got {', '.join(options.place_columns)}"
        )
    if not isinstance(options.bootstrap_servers, str | None):
        raise ConfigurationError("bootstrap_servers= must be text: 'kafka-1:9092,kafka-2:9092'")
    if options.kafka and not (options.bootstrap_servers or options.kafka.keys() & BROKERS):
        raise ConfigurationError("kafka= is about a cluster, and nothing says which one: add bootstrap_servers=")
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
    """Make tuples of what names several columns; see that what names one does, or something else."""
    for option in _NAMING:
        if given.get(option) == "":
            raise ConfigurationError(f"{option}='' is empty; leave it out, or say what it is to be")
    lists = {option: given[option] for option in ("key", "add") if given.get(option) is not None}
    for option, value in lists.items():
        if isinstance(value, str):
            raise ConfigurationError(f"{option}={value!r} must be a list of columns: {option}=[{value!r}]")
    if (claim := given.get("claim")) is not None and not (isinstance(claim, str) and claim):
        raise ConfigurationError(f"claim={claim!r} must be the name of one column")
    return {**given, **{option: tuple(value) for option, value in lists.items()}}


def _checked_tables(given: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check what is said of several tables, as far as it is not said of one."""
    if given.get("table") is not None or any(given.get(name) for name in _OF_TABLE[1:]):
        raise ConfigurationError(
            "tables= has for each table what table=, key=, add=, claim=, create_table= and evolve= are for one; leave "
            "them out"
        )
    for name, each in tables.items():
        if unknown := sorted(set(each) - set(_OF_TABLE)):
            raise ConfigurationError(f"tables={{{name!r}: ...}} takes {', '.join(_OF_TABLE)}, not {unknown[0]}")
    return {name: _with_names(each) for name, each in tables.items()}


def _check_target(options: Options) -> None:
    if options.ledger == "offsets" and options.mode == "replace":
        raise ConfigurationError(
            "mode='replace' is for aggregations in output mode complete; it needs ledger='batch-id', "
            "because such rows have no offsets"
        )
    if options.key is not None and options.mode not in ("upsert", "insert-ignore"):
        raise ConfigurationError(f"key= is about rows that exist; mode={options.mode!r} does not look at them")
    if options.claim is not None and options.mode == "replace":
        raise ConfigurationError(
            "claim= leaves out rows that came before, and with mode='replace' each batch has them all"
        )
    if options.add and options.mode != "upsert":
        raise ConfigurationError(f"add= is about rows that exist: mode='upsert', not {options.mode!r}")


def _seconds(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError
    return number


# The data source's options that are no text: what reads them, and what they must be.
_READ: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("take_over", "create_table"), ({"true": True, "false": False}.__getitem__, "true or false")),
    "reap_after_seconds": (_seconds, "a positive number of seconds"),
    "patience_seconds": (_seconds, "a positive number of seconds"),
}


def check_source_options(given: Mapping[str, str]) -> Options:
    """Check the options of one query of the data source: strings, under names that Spark lower-cases.

    Case and underscores in names do not matter: ``groupId`` is ``group_id``.
    """

    def plain(name: str) -> str:
        return name.lower().replace("_", "")

    names = [each.name for each in fields(Options) if each.name not in (*_ONLY_SINK, "kafka")] + ["password"]
    known = {plain(name): name for name in names}
    chosen: dict[str, Any] = {}
    settings = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
    for name, value in given.items():
        if plain(name) in known:
            chosen[known[plain(name)]] = value
        elif plain(name) in map(plain, _ONLY_SINK):
            raise ConfigurationError(f"{name} is an option of PostgresSink, for foreachBatch; the data source has none")
        elif plain(name) == "path":  # of save("name") and start("name")
            raise ConfigurationError(f"path={value!r}: option table names the table; call save() or start() without it")
        elif not name.startswith("kafka.") and plain(name) != "queryname":  # which Spark itself hands on
            raise ConfigurationError(f"there is no option {name}; there are {', '.join(map(_camel, names))}, kafka.*")
    for option in {"key", "add"} & chosen.keys():
        chosen[option] = [name.strip() for name in chosen[option].split(",")]
    if (password := chosen.pop("password", None)) is not None:
        # The option that Spark itself redacts, by its name, in plans, logs and its pages.
        with contextlib.suppress(psycopg.ProgrammingError):  # what is wrong is said where all options are checked
            chosen["conninfo"] = make_conninfo(chosen.get("conninfo", ""), password=password)
    for option in chosen.keys() & _READ.keys():
        try:
            chosen[option] = _READ[option][0](chosen[option].lower())
        except (KeyError, ValueError):
            raise ConfigurationError(f"{_camel(option)}={chosen[option]!r} must be {_READ[option][1]}") from None
    options = check_options(**chosen, kafka=settings or None, small_batch=0)
    if options.job_id is not None and options.ledger == "offsets":
        raise ConfigurationError(
            "jobId is for batch jobs with ledger=batch-id: where rows have offsets, these tell what was written, under "
            "whatever name. Leave it out"
        )
    return options


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
