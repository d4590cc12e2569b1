"""Settings of the producing client: the caller's, with what the guarantee needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exactly_once.errors import ConfigurationError

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
