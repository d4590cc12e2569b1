"""The outcome table: whose fault an error is, for every row of it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.errors import lookup

from exactly_once.outcome import FOREIGN_TRANSACTION, SHORT_COUNT, Fault, classify, driver_error

CONFLICT = ["40001", "40P01", "40000", "40002", "40003", "55P03"]
ENVIRONMENT = ["08000", "08006", "53000", "53100", "53300", "57000", "57P01", "57P02", "57P03", "58000", "58030"]
ENVIRONMENT += ["25006", "26000"]
DURATION = ["57014", "25P03", "25P04"]
HANDLER = ["22001", "22012", "22P02", "23502", "23503", "23505", "23514", "P0001", "25P02"]
OTHER = ["42501", "42601", "42P01", "54000", "XX000", "XX001", "55006", "0A000", "P0002", SHORT_COUNT]
OTHER += [FOREIGN_TRANSACTION]

TABLE = {
    **dict.fromkeys(CONFLICT, Fault.CONFLICT),
    **dict.fromkeys(ENVIRONMENT, Fault.ENVIRONMENT),
    **dict.fromkeys(DURATION, Fault.DURATION),
    **dict.fromkeys(HANDLER, Fault.HANDLER),
    **dict.fromkeys(OTHER, Fault.OTHER),
}


def server_error(state: str) -> psycopg.Error:
    """Make the error that psycopg raises for a SQLSTATE."""
    try:
        kind: type[psycopg.Error] = lookup(state)
    except KeyError:
        kind = type("Unlisted", (psycopg.DatabaseError,), {"sqlstate": state})
    return kind("told by the server")


def test_a_sqlstate_on_a_live_connection_decides() -> None:
    assert {state: classify(server_error(state), connection_lost=False) for state in TABLE} == TABLE


def test_a_lost_connection_decides_before_the_sqlstate() -> None:
    """Except where the server ended the connection for its duration: it says so, and then it is gone."""
    expected = {state: Fault.DURATION if state in DURATION else Fault.ENVIRONMENT for state in TABLE}
    assert {state: classify(server_error(state), connection_lost=True) for state in TABLE} == expected


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of the handler"),
        psycopg.InterfaceError("the cursor is closed"),
        psycopg.OperationalError("no SQLSTATE"),
        KeyboardInterrupt(),
    ],
)
def test_without_a_sqlstate_the_connection_decides(error: BaseException) -> None:
    assert classify(error, connection_lost=False) is Fault.HANDLER
    assert classify(error, connection_lost=True) is Fault.ENVIRONMENT


class FrameworkError(Exception):
    """SQLAlchemy's way: the driver's error is in ``orig``."""

    def __init__(self, orig: object) -> None:
        super().__init__("wrapped")
        self.orig = orig


def caused_by(cause: BaseException) -> Exception:
    try:
        raise RuntimeError("wrapped") from cause
    except RuntimeError as error:
        return error


def while_handling(context: BaseException) -> Exception:
    try:
        try:
            raise context
        except BaseException:  # noqa: BLE001 - whatever the context is
            raise RuntimeError("wrapped")  # noqa: B904 - the context is what is tested
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("wrap", [caused_by, while_handling, FrameworkError])
def test_the_driver_error_is_found_behind_a_wrapper(wrap: type[FrameworkError]) -> None:
    error = server_error("40001")
    assert driver_error(wrap(error)) is error
    assert driver_error(caused_by(while_handling(wrap(error)))) is error
    assert classify(wrap(error), connection_lost=False) is Fault.CONFLICT


def test_the_nearest_driver_error_decides() -> None:
    near, far = server_error("23505"), server_error("40001")
    near.__context__ = far
    assert driver_error(caused_by(near)) is near


def test_orig_comes_before_the_causes() -> None:
    wrapped = FrameworkError(server_error("22012"))
    wrapped.__cause__ = server_error("40001")
    assert classify(wrapped, connection_lost=False) is Fault.HANDLER


def test_an_orig_that_is_no_exception_is_ignored() -> None:
    assert driver_error(FrameworkError("just text")) is None


def test_a_cycle_of_causes_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__context__ = second, first
    assert driver_error(first) is None
    second.__cause__ = error = server_error("40P01")
    assert driver_error(first) is error
