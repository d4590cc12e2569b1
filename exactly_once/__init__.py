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

from .consumer import ExactlyOnceConsumer
from .dead_letters import DeadLetter, DeadLetterLimit
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
from .health import Health
from .identity import Identity
from .metrics import Metrics
from .unit import Unit
from .units import Units

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
