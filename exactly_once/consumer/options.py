"""Options: those of the consumer and of ``run``, checked at once and against each other."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from exactly_once._log import FIELDS
from exactly_once._model import RangePolicy, StartPolicy
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice, check_kinds
from exactly_once.kafka.settings import check_brokers, poll_interval_seconds
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.ledger.migrate import check_schema_name
from exactly_once.ledger.session import Connection, connector, server_of

Isolation = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

# A fifth of the default max.poll.interval.ms: the unit, its retry and a wait for locks fit into it.
_UNIT_SECONDS = 60.0
# What confluent-kafka's consume() takes at most.
_MAX_MESSAGES = 1_000_000

# An entry of the ledger's index holds 2,704 bytes: group, topic and partition.
_GROUP_ID_BYTES = 2000
_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
# What tells one instance from the next: the random ends of a pod's name, or a number.
_INSTANCE = re.compile(r"(-[bcdfghjklmnpqrstvwxz0-9]{5,10}){1,2}$|[-_.]?\d+$")


# How an error names the kinds of these options; of the others it takes the words of the annotation.
_SAID = {
    "linger_seconds": "a number of seconds",
    "startup_seconds": "a number of seconds",
    "max_unit_seconds": "a number of seconds, or None",
    "claims_window": "a timedelta or seconds; None holds keys for ever",
    "name": "a text, or None",
    "application": "a text, or None",
    "schema": "a text",
    "connect": "a callable that returns a connection",
}


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
    check_brokers(kafka)
    if (conninfo is None) == (connect is None):
        raise ConfigurationError("give one of conninfo= (a connection string) and connect= (a callable)")
    check_kinds(Options, rest, _SAID)
    own = {"max_unit_seconds": max_unit_seconds, "claims_window": claims_window, "connect": connect}
    check_kinds(check_options, own, _SAID)
    record = logging.getLogRecordFactory()(__name__, logging.DEBUG, __file__, 0, "", (), None)
    if taken := [name for name in FIELDS if name in vars(record)]:
        raise ConfigurationError(
            f"logging.setLogRecordFactory() was given one that sets {', '.join(taken)}: records of this library have "
            "fields of these names, so that logging would raise KeyError at each. Give yours other names"
        )
    limit = poll_interval_seconds(kafka)
    unit_seconds = min(_UNIT_SECONDS, limit / 2) if max_unit_seconds is None else max_unit_seconds
    if not 0 < unit_seconds < limit:
        raise ConfigurationError(
            f"max_unit_seconds={unit_seconds!r} must be above 0 and below max.poll.interval.ms ({limit:g} s): "
            "Kafka takes the partitions away from a member that is silent for longer"
        )
    window = claims_window.total_seconds() if isinstance(claims_window, timedelta) else claims_window
    if window is not None and not 0 < window < math.inf:
        raise ConfigurationError(
            f"claims_window={claims_window!r} must be a timedelta or seconds, above 0 and finite; None holds keys for "
            "ever"
        )
    options = Options(
        group_id=group_id_in(kafka),
        connect=connect or connector(conninfo or ""),
        database=server_of(conninfo or "") if connect is None else "the server that connect= connects to",
        max_unit_seconds=unit_seconds,
        claims_window=None if window is None else float(window),
        **rest,
    )
    check_choice("on_out_of_range", options.on_out_of_range, get_args(RangePolicy))
    check_choice("isolation", options.isolation, get_args(Isolation))
    if options.start is not None and not isinstance(options.start, datetime):
        check_choice("start", options.start, ("earliest", "latest", "committed"), "a datetime with a time zone")
    if isinstance(options.start, datetime) and options.start.tzinfo is None:
        raise ConfigurationError(f"start={options.start!r} has no time zone; give one, for example tzinfo=UTC")
    for name in ("max_messages", "max_bytes", "startup_seconds"):
        number = getattr(options, name)
        if not number > 0:  # nor NaN
            raise ConfigurationError(f"{name}={number!r} must be positive")
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
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        # A call of it may only make a coroutine or a generator.
        called = (inner, getattr(type(inner), "__call__", None))  # noqa: B004
        if any(test(each) for test in _LAZY for each in called):
            raise ConfigurationError(
                f"{name}={function!r} is async or has a yield, so calling it has no effects yet: write it with def. "
                "docs/how-to/fastapi.md shows how a plain handler calls coroutines of a running loop"
            )
    if not callable(on_poison):
        check_choice("on_poison", on_poison, ("stop", "dead-letter"), "a callable(unit, message, error)")
    number: object = attempts
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(f"attempts={attempts!r} must be 1 or more")
    if not isinstance(dead_letter_limit, DeadLetterLimit | None):
        raise ConfigurationError(f"dead_letter_limit={dead_letter_limit!r} is not possible; give a DeadLetterLimit")
    if not callable(wait):
        raise ConfigurationError(f"wait={wait!r} is not possible; give a wait of tenacity, as tenacity.wait_fixed(3)")
    for name, seconds in (("revoke_seconds", revoke_seconds), ("stop_seconds", stop_seconds)):
        _check_seconds(name, seconds)
    check_idle(idle_seconds)


def check_idle(seconds: object) -> None:
    """Check after how long without messages units end.

    :raises ConfigurationError: for what is neither None nor a time.
    """
    if seconds is not None:
        _check_seconds("idle_seconds", seconds)


def application_of(handler: Callable[..., object] | None, name: str | None) -> str:
    """Name the program that applies messages, so that another one in the same group can be told from it.

    By ``run`` it is the handler, as ``module:qualified name``; for a loop what the owners' names have in common
    (``accounts-0`` and ``accounts-7d9f8b6c5-x2v9z`` are ``accounts``), or the program's file.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    # `python -m billing` has the name of its module; the file is __main__.py, as of every other package.
    file = Path(sys.argv[0] if sys.argv else "").name or "python"
    program = spec.name.removesuffix(".__main__") if spec is not None and file == "__main__.py" else file
    if handler is None:
        return _INSTANCE.sub("", name) or name if name else program
    while isinstance(handler, partial):
        handler = handler.func
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    module = program if named.__module__ == "__main__" else named.__module__
    return f"{module}:{named.__qualname__}"


def group_id_in(kafka: Mapping[str, Any]) -> str:
    """Return the group of these settings.

    :raises ConfigurationError: for none, and for one that the client would change.
    """
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


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigurationError(f"{name}={seconds!r} must be 0 or more")
