"""The settings of Kafka's clients: which are forced, refused and passed on, and what a topic's name may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exactly_once.errors import ConfigurationError

# librdkafka's default.
_POLL_INTERVAL_MS = 300_000

# What a broker takes for the name of a topic.
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


# How the ``client.id`` of our clients begins.
OUR_CLIENTS = "exactly_once"
# librdkafka's names of what says which cluster it is.
BROKERS = {"bootstrap.servers", "metadata.broker.list"}

_FORCED = {"enable.auto.commit": False, "enable.auto.offset.store": False, "enable.partition.eof": True}
_AS_BOOL = {"true": True, "1": True, "false": False, "0": False}
_DEFAULTS = {"isolation.level": "read_committed", "fetch.queue.backoff.ms": 10}
_RESETS = {"earliest": ("earliest", "smallest", "beginning"), "latest": ("latest", "largest", "end")}
_CALLBACKS = ("error_cb", "stats_cb", "throttle_cb", "on_commit")
_RECEIVE, _RECEIVE_BYTES = "receive.message.max.bytes", 100_000_000  # librdkafka's default
_CONSUMER_ONLY = re.compile(
    r"group\.|session\.|heartbeat\.|max\.poll\.|enable\.auto|auto\.|fetch\.|queued\.|isolation\.|check\.crcs"
    r"|partition\.assignment|enable\.partition|coordinator\.query|consume\.callback|max\.partition|offset\.store"
    r"|statistics\.interval"
)


def client_settings(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the consuming client: the caller's, with what the protocol needs.

    Callbacks are left out, they are wired by the assignment.

    :raises ConfigurationError: for a setting that would break the guarantee, naming its key.
    """
    settings = {key: value for key, value in kafka.items() if key not in _CALLBACKS}
    for key, forced in _FORCED.items():
        if key in settings and _AS_BOOL.get(str(settings[key]).lower()) is not forced:
            why = "by it the ends of logs are known" if key == "enable.partition.eof" else "offsets live in Postgres"
            raise ConfigurationError(
                f"{key}={settings[key]!r} is refused: {why}, {key} must be {forced}. Leave the key out."
            )
    if "default.topic.config" in settings:
        raise ConfigurationError(
            "default.topic.config is refused: an auto.offset.reset in it would win over ours. "
            "Give its settings beside the others"
        )
    reset = settings.get("auto.offset.reset", "error")
    if reset != "error":
        instead = "Say start= for a group without offsets, and on_out_of_range= for offsets outside the log."
        for start, names in _RESETS.items():
            if reset in names:
                instead = f'For a group without offsets say start="{start}"; see also on_out_of_range=.'
        raise ConfigurationError(
            f"auto.offset.reset={reset!r} is refused: a reset by the client would skip or repeat messages "
            f"silently. {instead}"
        )
    return {**_DEFAULTS, **settings, **_FORCED, "auto.offset.reset": "error"}


def client_id(name: str | None) -> str:
    """Return the ``client.id`` that brokers and librdkafka's log lines show where the settings have none."""
    return f"{OUR_CLIENTS}.{name}" if name else OUR_CLIENTS


def callbacks(kafka: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the caller's own callbacks.

    :raises ConfigurationError: for one that cannot be called.
    """
    given = {name: kafka[name] for name in _CALLBACKS if kafka.get(name) is not None}
    for name, callback in given.items():
        if not callable(callback):
            raise ConfigurationError(f"{name}={callback!r} is refused: it is no function. Leave the key out.")
    return given


def admin_settings(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an admin client shares with the consumer: where and as whom."""
    settings = {k: v for k, v in kafka.items() if k not in _CALLBACKS and not _CONSUMER_ONLY.match(k)}
    if (limit := str(settings.get(_RECEIVE))).isdecimal():
        # No consumer is made with less than ``fetch.max.bytes``, which is left out here; those beside the main one have
        # its default.
        settings[_RECEIVE] = max(int(limit), _RECEIVE_BYTES)
    return settings


def is_incremental(kafka: Mapping[str, Any]) -> bool:
    """Return whether rebalances of this client are incremental: cooperative-sticky or the new protocol."""
    if str(kafka.get("group.protocol", "classic")).lower() == "consumer":
        return True
    return "cooperative-sticky" in str(kafka.get("partition.assignment.strategy", ""))


def calls_back_for_nothing(kafka: Mapping[str, Any]) -> bool:
    """Return whether a member that is given no partitions is told so: the new protocol calls back for changes only."""
    return str(kafka.get("group.protocol", "classic")).lower() != "consumer"


def reads_committed(kafka: Mapping[str, Any]) -> bool:
    """Return whether messages of open and aborted transactions are left out."""
    # The client takes the words in any case.
    return str(kafka.get("isolation.level") or _DEFAULTS["isolation.level"]).lower() != "read_uncommitted"


def poll_interval_seconds(kafka: Mapping[str, Any]) -> float:
    """Return how long Kafka waits for a poll before it takes the partitions away."""
    try:
        return float(kafka.get("max.poll.interval.ms", _POLL_INTERVAL_MS)) / 1000
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"max.poll.interval.ms={kafka['max.poll.interval.ms']!r} is not a number of milliseconds"
        ) from None


def check_brokers(kafka: Mapping[str, Any]) -> None:
    """Refuse settings that name no broker: a client would look for one for ever.

    :raises ConfigurationError: as above.
    """
    if not isinstance(kafka, Mapping):
        raise ConfigurationError(f"kafka={kafka!r} is not possible; give the settings of confluent-kafka, as a dict")
    if not any(kafka.get(name) for name in BROKERS):
        raise ConfigurationError(
            'bootstrap.servers is missing from the Kafka settings: {"bootstrap.servers": "localhost:9092"}'
        )


def check_topics(topics: Sequence[str]) -> None:
    """Refuse what is no list of names; a single name would pass for a list of letters."""
    names: object = topics
    if not (
        isinstance(names, Sequence)
        and not isinstance(names, str)
        and names
        and all(isinstance(name, str) and name for name in names)
    ):
        raise ConfigurationError(f"topics={topics!r} is not possible; give a list of names: ['payments']")
    for topic in topics:
        # Of a pattern the client itself reports what is wrong, but that it would stop reading at a NUL.
        if "\0" in topic or not (topic.startswith("^") or _TOPIC.fullmatch(topic)):
            raise ConfigurationError(
                f"{topic!r} cannot be the name of a topic: up to 249 letters and digits of ASCII, '.', '_' and '-'; "
                "or '^' and a regular expression"
            )
    if len(set(topics)) < len(topics):
        raise ConfigurationError(f"topics={topics!r} names a topic twice")
