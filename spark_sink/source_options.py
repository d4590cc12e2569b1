"""Options of the data source: strings, under names that Spark lower-cases, checked like the sink's. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from exactly_once.errors import ConfigurationError

from .options import Options, check_options

_DEFAULTS: dict[str, Any] = {
    "conninfo": "",
    "table": "",
    "group_id": "",
    "mode": "append",
    "ledger": "offsets",
    "key": None,
    "checkpoint_location": None,
    "bootstrap_servers": None,
    "kafka": None,
    "topic_column": "topic",
    "partition_column": "partition",
    "offset_column": "offset",
    "password": None,
    "take_over": "false",
    "previous_table": None,
    "job_id": None,
    "schema": "exactly_once",
    "name": None,
    "patience_seconds": "120",
    "reap_after_seconds": "86400",
}
_FIXED: dict[str, Any] = {
    "transaction": "batch",
    "in_transaction": None,
    "on_report": None,
    "small_batch": 0,
}
"""What only ``foreachBatch`` can do."""
_OF_SPARK = frozenset({"path", "queryname"})
_TRUTHS = {"true": True, "false": False}


def check_source_options(given: Mapping[str, str]) -> Options:
    """Check the options of one query. Case and underscores in their names do not matter: ``groupId`` is ``group_id``.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """
    known = {_plain(name): name for name in _DEFAULTS}
    chosen = dict(_DEFAULTS)
    settings = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
    chosen["kafka"] = settings or None
    for name, value in given.items():
        if name.startswith("kafka."):
            continue
        if _plain(name) in known:
            chosen[known[_plain(name)]] = value
        elif _plain(name) in map(_plain, _FIXED) and _plain(name) not in _OF_SPARK:
            raise ConfigurationError(f"{name} is an option of PostgresSink, for foreachBatch; the data source has none")
        elif _plain(name) not in _OF_SPARK:
            raise ConfigurationError(f"there is no option {name}; there are {', '.join(map(_camel, _DEFAULTS))}")
    seconds = _number("reapAfterSeconds", chosen.pop("reap_after_seconds"))
    chosen["patience_seconds"] = _number("patienceSeconds", chosen["patience_seconds"])
    key = chosen.pop("key")
    password = chosen.pop("password")
    if password is not None:
        chosen["conninfo"] = _with_password(chosen["conninfo"], password)
    chosen["take_over"] = _truth("takeOver", chosen["take_over"])
    options = check_options(key=_names(key) if key is not None else None, **chosen, **_FIXED)
    return replace(options, reap_after_seconds=seconds)


def _with_password(conninfo: str, password: str) -> str:
    """Add the option that Spark itself redacts, by its name, in plans, logs and its pages."""
    try:
        return make_conninfo(conninfo, password=password)
    except psycopg.ProgrammingError:
        return conninfo  # what is wrong with it is said where all options are checked


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _truth(name: str, value: str) -> bool:
    try:
        return _TRUTHS[value.lower()]
    except KeyError:
        raise ConfigurationError(f"{name}={value!r} is not possible; choose true or false") from None


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds")
    return number
