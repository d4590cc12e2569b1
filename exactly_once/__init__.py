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
    Ahead,
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
    LedgerRowMissing,
    LogTruncated,
    NoCommittedOffset,
    NoProgress,
    OffsetBelowLogStart,
    OffsetBeyondLogEnd,
    OffsetOutOfRange,
    OutcomeLost,
    OutcomePending,
    OwnedByConsumer,
    OwnedBySpark,
    PartitionHalted,
    PoisonMessage,
    ReadOnly,
    Redelivered,
    Rewound,
    SchemaTooNew,
    SchemaTooOld,
    StartError,
    StartRefused,
    TooManyDeadLetters,
    TopicRecreated,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    TransactionNotYours,
    UnitNotFinished,
    UnitNotUsed,
    UnitTooSlow,
    UnknownTopic,
    Unreachable,
    WrongProcess,
)
from .ledger.dead_letters import DeadLetter, DeadLetterLimit
from .metrics.health import Health
from .metrics.table import Metrics

__version__ = "0.1.0"

__all__ = [
    "Ahead",
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
    "LedgerRowMissing",
    "LogTruncated",
    "Metrics",
    "NoCommittedOffset",
    "NoProgress",
    "OffsetBelowLogStart",
    "OffsetBeyondLogEnd",
    "OffsetOutOfRange",
    "OutcomeLost",
    "OutcomePending",
    "OwnedByConsumer",
    "OwnedBySpark",
    "PartitionHalted",
    "PoisonMessage",
    "ReadOnly",
    "Redelivered",
    "Rewound",
    "SchemaTooNew",
    "SchemaTooOld",
    "StartError",
    "StartRefused",
    "TooManyDeadLetters",
    "TopicRecreated",
    "TransactionAborted",
    "TransactionBusy",
    "TransactionEnded",
    "TransactionNotYours",
    "Unit",
    "UnitNotFinished",
    "UnitNotUsed",
    "UnitTooSlow",
    "Units",
    "UnknownTopic",
    "Unreachable",
    "WrongProcess",
    "__version__",
]

# Tracebacks and pickles show the names under which users know them.
for _name in __all__:
    if isinstance(_public := globals()[_name], type):
        _public.__module__ = __name__
del _name, _public
