"""Publishing without duplicates: filters, and a producer that uses them.

    with DedupProducer({"bootstrap.servers": ...}, dedup=WindowFilter(keys=1_000_000)) as producer:
        delivery = producer.produce("orders", value, dedup_key=order_id)

A filter never makes a message disappear that was not acknowledged, unless its docstring says so in bold.
"""

from __future__ import annotations

from .chain import ChainFilter, Link
from .delivery import Deliveries, Delivery, Outcome
from .errors import (
    FilterUnavailable,
    HeldElsewhere,
    InconsistentChain,
    KeyRefused,
    LimitReached,
    NameTaken,
    NotDelivered,
    NotPersisted,
    OutcomeUnknown,
    ProducerFenced,
    PublishError,
    SnapshotCorrupted,
    TailHidden,
    TailLost,
    Undelivered,
)
from .filter import Filter, Resolved, State, Stats
from .memcached import SharedSlotFilter
from .options import DedupOptions, PublishOptions
from .owners import DeadOwner, PublishOwner
from .postgres import PostgresWindow
from .postgres_chain import PostgresChain
from .producer import DedupProducer
from .publisher import ProducerRecord
from .sequence import SequenceFilter
from .shards import ShardedWindow
from .slots import SlotFilter, loss_probability, messages_for, slots_for
from .snapshot import SnapshotFile, SnapshotStore
from .store import Store
from .take_over import Found, TopicTakeOver, end_positions
from .transactional import Transaction, TransactionalProducer
from .window import WindowFilter

__all__ = [
    "ChainFilter",
    "DeadOwner",
    "DedupOptions",
    "DedupProducer",
    "Deliveries",
    "Delivery",
    "Filter",
    "FilterUnavailable",
    "Found",
    "HeldElsewhere",
    "InconsistentChain",
    "KeyRefused",
    "LimitReached",
    "Link",
    "NameTaken",
    "NotDelivered",
    "NotPersisted",
    "Outcome",
    "OutcomeUnknown",
    "PostgresChain",
    "PostgresWindow",
    "ProducerFenced",
    "ProducerRecord",
    "PublishError",
    "PublishOptions",
    "PublishOwner",
    "Resolved",
    "SequenceFilter",
    "ShardedWindow",
    "SharedSlotFilter",
    "SlotFilter",
    "SnapshotCorrupted",
    "SnapshotFile",
    "SnapshotStore",
    "State",
    "Stats",
    "Store",
    "TailHidden",
    "TailLost",
    "TopicTakeOver",
    "Transaction",
    "TransactionalProducer",
    "Undelivered",
    "WindowFilter",
    "end_positions",
    "loss_probability",
    "messages_for",
    "slots_for",
]
