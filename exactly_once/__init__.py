"""Apply Kafka messages to Postgres with exactly-once effects.

    with ExactlyOnceConsumer({"bootstrap.servers": ..., "group.id": ...}, conninfo=...) as consumer:
        consumer.subscribe(["payments"])
        for unit in consumer:
            with unit:
                ...

Offsets live in Postgres and move in the transaction of the effects, behind a fence that a paused old
consumer cannot pass.
"""

from __future__ import annotations

try:
    import psycopg as _psycopg  # noqa: F401
except ImportError as error:  # psycopg is there and finds no libpq
    raise ImportError(f"{error}\nInstall libpq, or: pip install 'kafka-exactly-once[binary]'") from error

from .consumer.consumer import ExactlyOnceConsumer
from .consumer.identity import Identity
from .consumer.unit import Unit
from .consumer.units import Units
from .errors import (
    AlreadyApplied,
    BatchUnreadable,
    BrokerUnreachable,
    ClientFailed,
    ClusterChanged,
    ConfigurationError,
    DatabaseUnreachable,
    ExactlyOnceError,
    Fenced,
    HandlerCommitted,
    HandlerError,
    InstanceFenced,
    LedgerRewound,
    LedgerRowMissing,
    LogTruncated,
    NoCommittedOffset,
    NoProgress,
    OffsetBelowLogStart,
    OffsetBeyondLogEnd,
    OffsetOutOfRange,
    OffsetsNotAdopted,
    OutcomePending,
    OwnedByConsumer,
    OwnedBySpark,
    PartitionHalted,
    PoisonMessage,
    ReadOnly,
    Redelivered,
    SchemaTooNew,
    SchemaTooOld,
    StartError,
    TooManyDeadLetters,
    TopicRecreated,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    TransactionNotYours,
    TransactionOutcomeUnknown,
    UnitNotFinished,
    UnitNotUsed,
    UnitTooSlow,
    UnknownTopic,
    Unreachable,
    WrongThreadOrProcess,
)
from .ledger.dead_letters import DeadLetter, DeadLetterLimit
from .metrics.health import Health
from .metrics.table import Metrics

__version__ = "0.1.0"

__all__ = [
    "AlreadyApplied",
    "BatchUnreadable",
    "BrokerUnreachable",
    "ClientFailed",
    "ClusterChanged",
    "ConfigurationError",
    "DatabaseUnreachable",
    "DeadLetter",
    "DeadLetterLimit",
    "ExactlyOnceConsumer",
    "ExactlyOnceError",
    "Fenced",
    "HandlerCommitted",
    "HandlerError",
    "Health",
    "Identity",
    "InstanceFenced",
    "LedgerRewound",
    "LedgerRowMissing",
    "LogTruncated",
    "Metrics",
    "NoCommittedOffset",
    "NoProgress",
    "OffsetBelowLogStart",
    "OffsetBeyondLogEnd",
    "OffsetOutOfRange",
    "OffsetsNotAdopted",
    "OutcomePending",
    "OwnedByConsumer",
    "OwnedBySpark",
    "PartitionHalted",
    "PoisonMessage",
    "ReadOnly",
    "Redelivered",
    "SchemaTooNew",
    "SchemaTooOld",
    "StartError",
    "TooManyDeadLetters",
    "TopicRecreated",
    "TransactionAborted",
    "TransactionBusy",
    "TransactionEnded",
    "TransactionNotYours",
    "TransactionOutcomeUnknown",
    "Unit",
    "UnitNotFinished",
    "UnitNotUsed",
    "UnitTooSlow",
    "Units",
    "UnknownTopic",
    "Unreachable",
    "WrongThreadOrProcess",
    "__version__",
]

# Tracebacks and pickles show the names under which users know them.
for _name in __all__:
    if isinstance(_public := globals()[_name], type):
        _public.__module__ = __name__
del _name, _public
