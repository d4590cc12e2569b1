"""Dead letters: messages that a handler could not apply, kept whole for an operator.

A worker stores one in the transaction that moves the offset past the message, so a message is applied,
dead, or still to come, and never two of these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

import psycopg
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message
from psycopg import sql
from psycopg.rows import class_row

from exactly_once._failpoints import failpoint
from exactly_once._log import about, text_of
from exactly_once._model import Advance, Partition
from exactly_once.errors import ConfigurationError, TooManyDeadLetters

from .commands import grants_hint
from .outcome import sqlstate_of
from .session import Connection, cursor_on, execute, last_row, storable
from .sql import query

logger = logging.getLogger(__name__)

Status = Literal["dead", "replayed", "dropped"]

# What is kept of an error: its statement and parameters could be as large as the message itself.
_ERROR_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterLimit:
    """When dead-lettering ends and the worker stops, because it is hardly the messages' fault.

    ``in_a_row`` counts messages of one partition, with none between them that was applied, that are dead and neither
    replayed nor dropped yet; ``in_window`` all of the group within ``window_seconds``, by the database's clock. Both
    are counted in the database, so a restart does not begin anew.
    """

    # Ten failures with no success between them: the handler is broken, not ten messages.
    in_a_row: int = 10
    # Bad messages between good ones: with so many in an hour their producer is broken, and nobody will read them all.
    in_window: int = 1000
    window_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            number, kind = getattr(self, field.name), float | int if field.name == "window_seconds" else int
            if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:  # nor NaN
                raise ConfigurationError(f"{field.name}={number!r} must be a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A row of the table: the message as it was, why it is here, and what became of it."""

    id: int
    group_id: str
    topic: str
    partition: int
    message_offset: int
    cluster_id: str | None
    topic_id: str | None
    leader_epoch: int | None
    timestamp_type: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    header_names: list[str] | None
    """As they are stored: a backslash is doubled, and escapes NUL and what the database's encoding lacks."""
    header_values: list[bytes | None] | None
    error_class: str
    error: str
    sqlstate: str | None
    attempts: int
    dead_at: datetime
    status: Status
    settled_at: datetime | None
    settled_by: str | None
    dead_seconds_ago: float
    """By the clock of the server, when the row was read."""

    @property
    def place(self) -> str:
        """Where the message was: topic, partition, offset."""
        return f"{Partition(self.topic, self.partition)} offset {self.message_offset}"

    @property
    def headers(self) -> list[tuple[str, str | bytes | None]] | None:
        """The headers in their order, or None where there were none."""
        if self.header_names is None:
            return None
        names = [name.encode("latin-1", "backslashreplace").decode("unicode_escape") for name in self.header_names]
        return list(zip(names, self.header_values or [], strict=True))

    def message(self) -> Message:
        """Make the message anew, as the consumer delivered it."""
        return Message(
            topic=self.topic,
            partition=self.partition,
            offset=self.message_offset,
            key=self.key,
            value=self.value,
            headers=self.headers,
            timestamp=(self.timestamp_type, self.timestamp_ms),
            leader_epoch=-1 if self.leader_epoch is None else self.leader_epoch,  # librdkafka's for none
        )


# Of the table; what the server computes comes last, and the statements write it out.
COLUMNS = sql.SQL(", ").join(sql.Identifier(field.name) for field in fields(DeadLetter)[:-1])


def store(
    connection: Connection,
    message: Message,
    error: BaseException | str,
    *,
    schema: str,
    group_id: str,
    advance: Advance,
    after_offset: int,
    attempts: int,
    once: bool = True,
) -> bool:
    """Store a message in the open transaction of its unit; return False where it is a dead letter already.

    Without ``once`` it is stored again: a row that Spark has made of a message may have others beside it.

    Text that the database's encoding lacks, and NUL, is escaped; the message itself is kept byte by byte. Where its
    headers cannot be read, the error says so, and there are none.
    """
    said = text_of(error)
    # Of a message whose headers the client cannot read the buffer has made another one, which raises here.
    try:
        headers = message.headers()
    except ValueError as unreadable:
        headers, note = None, f"(stored without its headers: {unreadable})"
        said = f"{said[: _ERROR_CHARACTERS - len(note) - 1]} {note}"
    headers = list(headers.items()) if isinstance(headers, dict) else headers
    kind, milliseconds = message.timestamp()

    def text(value: str) -> str:
        return storable(value, connection)

    cursor = _granted(
        connection,
        schema,
        "dead_letter",
        group_id=group_id,
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        cluster_id=advance.cluster_id,
        topic_id=advance.topic_id,
        leader_epoch=message.leader_epoch(),
        timestamp_type=kind,
        timestamp_ms=milliseconds if kind != TIMESTAMP_NOT_AVAILABLE else -1,
        key=as_bytes(message.key()),
        value=as_bytes(message.value()),
        # What is escaped is told from what a name has itself, so that a replay has the names of the message.
        header_names=None if headers is None else [text(name.replace("\\", r"\\")) for name, _ in headers],
        header_values=None if headers is None else [as_bytes(value) for _, value in headers],
        error_class=text("str" if isinstance(error, str) else f"{type(error).__module__}.{type(error).__qualname__}"),
        error=text(said)[:_ERROR_CHARACTERS],
        sqlstate=sqlstate_of(error) if isinstance(error, BaseException) else None,
        attempts=attempts,
        after_offset=after_offset,
        once=once,
    )
    if is_there := cursor.rowcount == 0:
        extra = about("dead_already", group=group_id, partition=advance.partition, offset=message.offset())
        logger.warning("%s is a dead letter already, which stays as it is: %s", place_of(message), said, extra=extra)
    failpoint("dead_lettered")
    return not is_there


def _granted(connection: Connection, schema: str, name: str, /, **values: Any) -> psycopg.Cursor[tuple[Any, ...]]:
    """Execute a statement of the library, and say what is to be granted where it is refused."""
    try:
        return execute(connection, schema, name, **values)
    except psycopg.errors.InsufficientPrivilege as error:
        error.add_note(f"a dead letter could not be stored. {grants_hint(schema)}")
        raise


def enforce(limit: DeadLetterLimit, connection: Connection, message: Message, *, schema: str, group_id: str) -> None:
    """Count what is dead, that message included.

    :raises TooManyDeadLetters: when it is more than the limit allows.
    """
    cursor = _granted(
        connection,
        schema,
        "count_dead_letters",
        group_id=group_id,
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        in_a_row=limit.in_a_row + 1,
        window_seconds=limit.window_seconds,
    )
    in_a_row, in_window = last_row(cursor)
    if in_a_row > limit.in_a_row:
        raise TooManyDeadLetters(
            f"{place_of(message)} would be dead letter {in_a_row} in a row, {limit.in_a_row} are allowed"
        )
    if in_window > limit.in_window:
        raise TooManyDeadLetters(
            f"{place_of(message)} would be dead letter {in_window} of group {group_id!r} within "
            f"{limit.window_seconds:g} s, {limit.in_window} are allowed"
        )


def find(
    connection: Connection,
    *,
    schema: str,
    group_id: str | None = None,
    topic: str | None = None,
    partition: int | None = None,
    ids: Iterable[int] | None = None,
    status: Status | None = "dead",
    limit: int | None = None,
) -> list[DeadLetter]:
    """Return dead letters in the order of the log."""
    return _letters(
        connection,
        query("list_dead_letters", schema, columns=COLUMNS),
        group_id=group_id,
        topic=topic,
        partition=partition,
        ids=None if ids is None else list(ids),
        status=status,
        limit=limit,
    )


def settle(connection: Connection, letter_id: int, status: Status, *, schema: str) -> DeadLetter | None:
    """Take a dead letter off the list in the open transaction; None when it is not on it any more."""
    statement = query("settle_dead_letter", schema, columns=COLUMNS)
    return next(iter(_letters(connection, statement, id=letter_id, status=status)), None)


def place_of(message: Message) -> str:
    """Name a message: topic, partition, offset."""
    return f"{Partition.of(message)} offset {message.offset()}"


def _letters(connection: Connection, statement: sql.Composed, **parameters: Any) -> list[DeadLetter]:
    # Binary: times come as they are whatever DateStyle the database has.
    cursor = cursor_on(connection, class_row(DeadLetter))
    return cursor.execute(statement, parameters, prepare=False, binary=True).fetchall()


def as_bytes(value: str | bytes | None) -> bytes | None:
    """Encode text as the client does."""
    return value.encode() if isinstance(value, str) else value
