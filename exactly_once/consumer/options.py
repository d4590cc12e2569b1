"""Options: those of the consumer and of ``run``, checked at once and against each other."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from exactly_once._model import RangePolicy, StartPolicy
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.settings import poll_interval_seconds
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.ledger.migrate import check_schema_name
from exactly_once.ledger.session import Connection, connector, server_of

Isolation = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

_UNIT_SECONDS = 60.0
"""A fifth of the default max.poll.interval.ms: the unit, its retry and a wait for locks fit into it."""
_MAX_MESSAGES = 1_000_000
"""What confluent-kafka's consume() takes at most."""

_GROUP_ID_BYTES = 2000
"""An entry of the ledger's index holds 2,704 bytes: group, topic and partition."""
_INSTANCE = re.compile(r"(-[bcdfghjklmnpqrstvwxz0-9]{5,10}){1,2}$|[-_.]?\d+$")
"""What tells one instance from the next: the random ends of a pod's name, or a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a consumer after every check."""

    group_id: str
    connect: Callable[[], Connection]
    database: str
    """Host, port and database, for messages."""
    start: StartPolicy | None
    on_out_of_range: RangePolicy
    isolation: Isolation
    max_messages: int
    max_bytes: int
    linger_seconds: float
    max_unit_seconds: float
    claims_window: float | None
    """In seconds."""
    startup_seconds: float
    stop_on_bad_partition: bool
    take_over: bool
    wait_for_topics: bool
    schema: str
    migrate: bool
    name: str | None
    application: str | None


def check_options(
    kafka: Mapping[str, Any],
    *,
    conninfo: str | None,
    connect: Callable[[], Connection] | None,
    max_unit_seconds: float | None,
    claims_window: timedelta | float | None,
    **rest: Any,
) -> Options:
    """Check the options against each other and against the client's settings.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """
    if (conninfo is None) == (connect is None):
        raise ConfigurationError("give either conninfo= (a connection string) or connect= (a callable), not both")
    options = Options(
        group_id=_group_id(kafka),
        connect=connect or connector(conninfo or ""),
        database=server_of(conninfo or "") if connect is None else "the server that connect= connects to",
        max_unit_seconds=_unit_seconds(kafka, max_unit_seconds),
        claims_window=_window_seconds(claims_window),
        **rest,
    )
    _check_choice("on_out_of_range", options.on_out_of_range, get_args(RangePolicy))
    _check_choice("isolation", options.isolation, get_args(Isolation))
    if options.start is not None and not isinstance(options.start, datetime):
        _check_choice("start", options.start, ("earliest", "latest", "committed", "a datetime with a time zone"))
    if isinstance(options.start, datetime) and options.start.tzinfo is None:
        raise ConfigurationError(f"start={options.start!r} has no time zone; give one, for example tzinfo=UTC")
    for name in ("max_messages", "max_bytes", "startup_seconds"):
        if getattr(options, name) <= 0:
            raise ConfigurationError(f"{name}={getattr(options, name)!r} must be positive")
    if not 0 <= options.linger_seconds < math.inf:
        raise ConfigurationError(f"linger_seconds={options.linger_seconds!r} must be 0 or more, and not infinite")
    if options.max_messages > _MAX_MESSAGES:
        raise ConfigurationError(f"max_messages={options.max_messages!r} is above {_MAX_MESSAGES}, the client's limit")
    check_schema_name(options.schema)
    return options


def check_run(
    handler: object,
    *,
    on_poison: object,
    attempts: int,
    dead_letter_limit: object,
    wait: object,
    revoke_seconds: object,
    stop_seconds: object,
    idle_seconds: object,
) -> None:
    """Check what ``run`` is given.

    :raises ConfigurationError: naming the option, what was given and what is possible.
    """
    if not callable(handler):
        raise ConfigurationError(f"handler={handler!r} is not possible; give a callable that takes a unit")
    for name, function in (("handler", handler), ("on_poison", on_poison)):
        if _is_lazy(function):
            raise ConfigurationError(
                f"{name}={function!r} is async or has a yield, so calling it has no effects yet: write it with def. "
                "docs/how-to/fastapi.md shows how a plain handler calls coroutines of a running loop"
            )
    if not callable(on_poison):
        _check_choice("on_poison", on_poison, ("stop", "dead-letter", "a callable(unit, message, error)"))
    if attempts < 1:
        raise ConfigurationError(f"attempts={attempts!r} must be 1 or more")
    if not isinstance(dead_letter_limit, DeadLetterLimit | None):
        raise ConfigurationError(f"dead_letter_limit={dead_letter_limit!r} is not possible; give a DeadLetterLimit")
    if not callable(wait):
        raise ConfigurationError(f"wait={wait!r} is not possible; give a wait of tenacity, as tenacity.wait_fixed(3)")
    times = {"revoke_seconds": revoke_seconds, "stop_seconds": stop_seconds, "idle_seconds": idle_seconds}
    for name, seconds in times.items():
        if seconds is None and name == "idle_seconds":
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise ConfigurationError(f"{name}={seconds!r} must be 0 or more")


def application_of(handler: Callable[..., object] | None, name: str | None) -> str:
    """Name the program that applies messages, so that another one in the same group can be told from it.

    By ``run`` it is the handler, as ``module:qualified name``; for a loop what the owners' names have in common
    (``accounts-0`` and ``accounts-7d9f8b6c5-x2v9z`` are ``accounts``), or the program's file.
    """
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    if handler is None:
        return _INSTANCE.sub("", name) or name if name else program
    while isinstance(handler, partial):
        handler = handler.func
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    module = program if named.__module__ == "__main__" else named.__module__
    return f"{module}:{named.__qualname__}"


def _is_lazy(function: object) -> bool:
    """Tell whether a call only makes a coroutine or a generator."""
    while isinstance(function, partial):
        function = function.func
    tests = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(test(f) for test in tests for f in (function, getattr(type(function), "__call__", None)))  # noqa: B004


def _group_id(kafka: Mapping[str, Any]) -> str:
    group_id = kafka.get("group.id")
    if not group_id:
        raise ConfigurationError(
            'group.id is missing from the Kafka settings; the ledger is kept per group: {"group.id": "accounts"}'
        )
    name = str(group_id)
    # The client would take it for another group without a word, so that two groups of the ledger are one in Kafka.
    encoded = name.encode(errors="ignore")  # half a pair of surrogates, say
    is_cut = "\0" in name or name[0] in " \t\n\v\f\r" or encoded.decode() != name
    if is_cut or len(encoded) > _GROUP_ID_BYTES:
        raise ConfigurationError(
            f"group.id={name[:50]!r} is not possible: give up to {_GROUP_ID_BYTES} bytes of UTF-8 without a NUL, and "
            "without white space before it"
        )
    return name


def _unit_seconds(kafka: Mapping[str, Any], given: float | None) -> float:
    limit = poll_interval_seconds(kafka)
    seconds = min(_UNIT_SECONDS, limit / 2) if given is None else given
    if not 0 < seconds < limit:
        raise ConfigurationError(
            f"max_unit_seconds={seconds!r} must be above 0 and below max.poll.interval.ms ({limit:g} s): "
            "Kafka takes the partitions away from a member that is silent for longer"
        )
    return seconds


def _window_seconds(given: timedelta | float | None) -> float | None:
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if seconds is not None and (isinstance(seconds, bool) or not 0 < seconds < math.inf):
        raise ConfigurationError(
            f"claims_window={given!r} must be a timedelta or seconds, above 0 and finite; None holds keys for ever"
        )
    return None if seconds is None else float(seconds)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not possible; choose one of {', '.join(choices)}")
