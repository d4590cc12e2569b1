"""Handlers that the tests name to ``exactly-once dead-letters replay``.

Each writes what it was given into `replayed`, which has no keys: what happens twice is seen.
"""

from __future__ import annotations

import os
import socket

import psycopg

from exactly_once import Redelivered, Unit
from exactly_once.testing import crash_at

NO_HANDLER = "a text"

if "CRASH_AT" in os.environ:
    crash_at(os.environ["CRASH_AT"], nth=2)


def apply(unit: Unit) -> None:
    """Have the effect."""
    for message in unit.messages:
        unit.execute(
            "INSERT INTO replayed VALUES (%s, %s, %s, %s)",
            (message.topic(), message.partition(), message.offset(), unit.identity(message).text),
        )


def tell_isolation(unit: Unit) -> None:
    """Write down at which isolation this runs, in place of the identity."""
    for message in unit.messages:
        unit.execute(
            "INSERT INTO replayed VALUES (%s, %s, %s, current_setting('transaction_isolation'))",
            (message.topic(), message.partition(), message.offset()),
        )


def refuse_odd(unit: Unit) -> None:
    """Have the effect, then fail for odd offsets."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        raise ValueError("odd \x1b[31m\nstill")


def ask_for_another_try_of_odd(unit: Unit) -> None:
    """Have the effect, then say for odd offsets that an API is away."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        raise Redelivered("the API is away")


def swallow_for_odd(unit: Unit) -> None:
    """Leave an aborted transaction behind, for odd offsets."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        swallow(unit)


def roll_back_for_odd(unit: Unit) -> None:
    """End the transaction, for odd offsets."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        unit.execute("ROLLBACK")


class _Unsayable(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]  # which is no text


def refuse_odd_without_words(unit: Unit) -> None:
    """Have the effect, then fail for odd offsets with an error that has no text."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        raise _Unsayable(5)


def commit_and_fail(unit: Unit) -> None:
    """Have the effect, commit it, which is forbidden, and fail."""
    apply(unit)
    unit.execute("COMMIT")
    raise ValueError("too late")


def swallow(unit: Unit) -> None:
    """Leave an aborted transaction behind."""
    try:
        unit.execute("SELECT 1/0")
    except psycopg.Error:
        return


def leave(unit: Unit) -> None:
    """Have the effect and end the process."""
    apply(unit)
    raise SystemExit(7)


def leave_well(unit: Unit) -> None:
    """Have the effect and end the process as if all was done."""
    apply(unit)
    raise SystemExit(0)


def drop_the_others(unit: Unit) -> None:
    """Have the effect, while somebody else drops every other letter of the topic."""
    apply(unit)
    dead = unit.messages[0]
    info = unit.connection.info
    with psycopg.connect(info.dsn, password=info.password) as other:
        other.execute(
            "UPDATE exactly_once.dead_letter SET status = 'dropped' "
            "WHERE topic = %s AND (partition, message_offset) <> (%s, %s)",
            (dead.topic(), dead.partition(), dead.offset()),
        )


def meet_conflicts(unit: Unit) -> None:
    """Lose against another transaction at first, and each time at offset 4."""
    apply(unit)
    is_first = not _met
    _met.append(unit.attempt)
    if is_first or unit.messages[0].offset() == 4:
        fail_with(unit, "40001")


def lose_connection_at_4(unit: Unit) -> None:
    """Lose the connection, of which the server says nothing, and tell it in words of a framework."""
    apply(unit)
    if unit.messages[0].offset() == 4:
        with socket.socket(fileno=os.dup(unit.connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        try:
            unit.execute("SELECT 1").fetchone()
        except psycopg.Error as error:
            raise RuntimeError("the database driver failed") from error


def find_data_corrupted_at_4(unit: Unit) -> None:
    """Fail by what is neither the message's nor the handler's."""
    apply(unit)
    if unit.messages[0].offset() == 4:
        fail_with(unit, "XX001")


def be_cancelled_at_4(unit: Unit) -> None:
    """Take longer than the role may."""
    apply(unit)
    if unit.messages[0].offset() == 4:
        fail_with(unit, "57014")


def write_read_only_for_odd(unit: Unit) -> None:
    """Get the state of a standby by a statement of its own."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        unit.execute("SET TRANSACTION READ ONLY")
        apply(unit)


def miss_a_table_for_odd(unit: Unit) -> None:
    """Write into a table that is not there."""
    apply(unit)
    if (unit.messages[0].offset() or 0) % 2:
        unit.execute("INSERT INTO of_nobody VALUES (1)").close()


def fail_with(unit: Unit, state: str) -> None:
    """Raise an error of the server's with this SQLSTATE."""
    unit.execute(f"DO $$BEGIN RAISE EXCEPTION 'of the test' USING ERRCODE = '{state}'; END$$").close()


_met: list[int] = []
