"""Options of the producers, and settings of the client: the caller's, with what the guarantee needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_kinds
from exactly_once.kafka.settings import check_brokers

from .keys import NAME, is_name
from .owners import PublishOwner
from .snapshot import SnapshotStore


class PublishOptions(TypedDict, total=False):
    """What both producers take as keywords."""

    producer_name: str | None
    """Of numbered messages: the same after a restart. By default the owner's, or drawn."""
    owner: PublishOwner | None
    """Whose lease is looked at before each message."""
    enabled: bool
    """False turns deduplication off for all topics."""
    topics: Mapping[str, bool]
    """Patterns of topics, and whether deduplication is on; the first that matches decides."""
    recover: bool
    """False takes numbers without reading the topic: for tests."""
    snapshots: Callable[[str], SnapshotStore] | str | Path | None
    """A directory, or what makes the store of a topic: saves reading a topic from its beginning."""
    snapshot_every: int
    """Messages between two snapshots: 1000 by default."""
    accept_trimmed: bool
    """True takes what retention has removed for never sent."""
    published_since: datetime | None
    """Takes it that no message of this name is older, by the timestamps in the topic: saves reading what is."""


class DedupOptions(PublishOptions, total=False):
    """What :class:`DedupProducer` takes beside that."""

    transactions: bool
    """Whether numbered messages are published in Kafka transactions, which fence a predecessor: by default they are."""
    commit_messages: int
    """So many of them in one: 5000 by default."""
    commit_seconds: float
    """The first of them waits no longer, 0.5 by default, as long as ``produce`` or ``poll`` is called."""


_LEAST = {"snapshot_every": 1, "commit_messages": 1, "commit_seconds": 0}


def check_options(kafka: Mapping[str, Any], options: Mapping[str, Any], takes: type) -> None:
    """Refuse settings without a broker, an option that there is not, or a value that it cannot have.

    :raises ConfigurationError: naming the option.
    """
    check_brokers(kafka)
    known = takes.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise ConfigurationError(f"{unknown[0]}= is no option; there are {', '.join(known)}")
    check_kinds(takes, options)
    for pattern, is_on in options.get("topics", {}).items():
        if not (isinstance(pattern, str) and isinstance(is_on, bool)):
            raise ConfigurationError(f"topics={{{pattern!r}: {is_on!r}}} must be a pattern, and True or False")
    name, owner, since = (options.get(option) for option in ("producer_name", "owner", "published_since"))
    if name is not None and not is_name(name):
        raise ConfigurationError(f"producer_name={name!r} is not {NAME}; name the producer, in each life the same")
    if owner is not None and name not in (None, owner.name):
        raise ConfigurationError(f"producer_name={name!r} is not the owner's, {owner.name!r}; leave it out")
    if since is not None and since.tzinfo is None:
        raise ConfigurationError("published_since= has no time zone: datetime(..., tzinfo=UTC)")
    for option, least in _LEAST.items():
        if options.get(option, least) < least:
            raise ConfigurationError(f"{option}={options[option]!r} must be at least {least}")


# What is forced, and what librdkafka takes for the same.
_FORCED: dict[str, tuple[object, tuple[str, ...]]] = {
    "enable.idempotence": (True, ("true", "1")),
    "acks": ("all", ("all", "-1")),
    "delivery.report.only.error": (False, ("false", "0")),
}
_ALIASES = {"request.required.acks": "acks", "delivery.timeout.ms": "message.timeout.ms"}
_REFUSED = {
    **dict.fromkeys(("on_delivery", "dr_cb", "delivery_cb"), "give on_delivery= to produce()"),
    "transactional.id": "this producer sends outside of transactions; take a TransactionalProducer",
    "default.topic.config": "give its settings beside the others",
}


def named_alike(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under one name each: librdkafka has two for some."""
    return {_ALIASES.get(key, key): value for key, value in kafka.items()}


def client_settings(kafka: Mapping[str, Any], *, is_transactional: bool = False) -> dict[str, Any]:
    """Return the settings for the producing client.

    :raises ConfigurationError: for a setting that would break the guarantee, naming its key.
    """
    settings = named_alike(kafka)
    for key, instead in _REFUSED.items():
        if key in settings and not (is_transactional and key == "transactional.id"):
            raise ConfigurationError(f"{key} is refused: {instead}")
    for key, (forced, same) in _FORCED.items():
        if str(settings.get(key, forced)).lower() not in same:
            raise ConfigurationError(f"{key}={settings[key]!r} is refused: it must be {same[0]}. Leave the key out")
        settings[key] = forced
    return settings
