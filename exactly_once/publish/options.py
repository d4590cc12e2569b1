"""Options of the producers, written once, and settings of the client: the caller's, with what the guarantee needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypedDict
from uuid import uuid4

from exactly_once.errors import ConfigurationError

from .owners import PublishOwner
from .snapshot import SnapshotFile, SnapshotStore

Stores = Callable[[str], SnapshotStore | None]


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """What both producers take as keywords; :class:`PublishKeywords` has their names and types for type checkers.

    :raises ConfigurationError: for an option that there is not, or a value that it cannot have.
    """

    producer_name: str | None = None
    """Of numbered messages: the same after a restart. By default the owner's, or drawn."""
    owner: PublishOwner | None = None
    """Whose lease is looked at before each message."""
    enabled: bool = True
    """False turns deduplication off for all topics."""
    topics: Mapping[str, bool] = field(default_factory=dict)
    """Patterns of topics, and whether deduplication is on; the first that matches decides."""
    recover: bool = True
    """False takes numbers without reading the topic: for tests."""
    snapshots: Callable[[str], SnapshotStore] | str | Path | None = None
    """A directory, or what makes the store of a topic: saves reading a topic from its beginning."""
    snapshot_every: int = 1000
    """Messages between two snapshots."""
    accept_trimmed: bool = False
    """Takes what retention has removed for never sent."""

    published_since: datetime | None = None
    """Takes it that no message of this name is older, by the timestamps in the topic: saves reading what is."""

    @classmethod
    def of(cls, keywords: Mapping[str, object]) -> Self:
        """Make options of keywords."""
        given: dict[str, Any] = dict(keywords)
        known = [option.name for option in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigurationError(f"{unknown[0]}= is no option; there are {', '.join(known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.producer_name == "":
            raise ConfigurationError("producer_name= is empty; name the producer, the same after a restart")
        if self.owner is not None and self.producer_name not in (None, self.owner.name):
            raise ConfigurationError(
                f"producer_name={self.producer_name!r} is not the owner's, {self.owner.name!r}; leave it out"
            )
        if self.published_since is not None and self.published_since.tzinfo is None:
            raise ConfigurationError("published_since= has no time zone: datetime(..., tzinfo=UTC)")
        if self.snapshot_every < 1:
            raise ConfigurationError(f"snapshot_every={self.snapshot_every!r} must be at least 1")

    def has_name(self) -> bool:
        """Tell whether the producer's name is one that was given."""
        return self.producer_name is not None or (self.owner is not None and self.owner.is_named)

    def name(self) -> str:
        """Return the producer's name."""
        return self.producer_name or (f"producer-{uuid4()}" if self.owner is None else self.owner.name)

    def is_on(self, topic: str) -> bool:
        """Tell whether deduplication is on."""
        if not self.enabled:
            return False
        return next((on for pattern, on in (self.topics or {}).items() if fnmatchcase(topic, pattern)), True)

    def stores(self, producer: str) -> Stores:
        """Return what makes the store of a topic; in a directory each producer and topic has a file of its own."""
        given = self.snapshots
        if given is None or callable(given):
            return given or (lambda _: None)
        digest = blake2b(producer.encode(), digest_size=8).hexdigest()
        folder = Path(given)
        return lambda topic: SnapshotFile(folder / f"{topic}-{digest}.snapshot")


@dataclass(frozen=True, kw_only=True)
class DedupOptions(PublishOptions):
    """What :class:`DedupProducer` takes beside that."""

    transactions: bool = True
    """Whether numbered messages are published in Kafka transactions, which fence a predecessor."""
    commit_messages: int = 5000
    """So many of them in one."""
    commit_seconds: float = 0.5
    """The first of them waits no longer, as long as ``produce`` or ``poll`` is called."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.commit_messages < 1 or self.commit_seconds < 0:
            raise ConfigurationError("commit_messages= must be at least 1, and commit_seconds= not negative")


class PublishKeywords(TypedDict, total=False):
    """The keywords of both producers; a test compares them with :class:`PublishOptions`."""

    producer_name: str | None
    owner: PublishOwner | None
    enabled: bool
    topics: Mapping[str, bool]
    recover: bool
    snapshots: Callable[[str], SnapshotStore] | str | Path | None
    snapshot_every: int
    accept_trimmed: bool
    published_since: datetime | None


class DedupKeywords(PublishKeywords, total=False):
    """The keywords of :class:`DedupProducer`; a test compares them with :class:`DedupOptions`."""

    transactions: bool
    commit_messages: int
    commit_seconds: float


_FORCED = {"enable.idempotence": ("true", True), "acks": ("all", "all"), "delivery.report.only.error": ("false", False)}
_ALIASES = {"request.required.acks": "acks"}
_REFUSED = {
    "on_delivery": "give on_delivery= to produce()",
    "dr_cb": "give on_delivery= to produce()",
    "delivery_cb": "give on_delivery= to produce()",
    "transactional.id": "this producer sends outside of transactions; take a TransactionalProducer",
    "default.topic.config": "give its settings beside the others",
}


def connection_settings(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for clients that read: where and as whom."""
    return {key: value for key, value in kafka.items() if not key.startswith("transaction")}


def client_settings(kafka: Mapping[str, Any], *, is_transactional: bool = False) -> dict[str, Any]:
    """Return the settings for the producing client.

    :raises ConfigurationError: for a setting that would break the guarantee, naming its key.
    """
    settings = {_ALIASES.get(key, key): value for key, value in kafka.items()}
    for key, instead in _REFUSED.items():
        if key in settings and not (is_transactional and key == "transactional.id"):
            raise ConfigurationError(f"{key} is refused: {instead}")
    for key, (wanted, forced) in _FORCED.items():
        given = str(settings.get(key, wanted)).lower()
        if _plain(key, given) != wanted:
            raise ConfigurationError(f"{key}={settings[key]!r} is refused: it must be {wanted}. Leave the key out")
        settings[key] = forced
    return settings


def _plain(key: str, given: str) -> str:
    """Read what librdkafka takes for the same."""
    same = {"-1": "all"} if key == "acks" else {"1": "true", "0": "false"}
    return same.get(given, given)
