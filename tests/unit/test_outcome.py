"""The outcome table: whose fault an error is, for every row of it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.errors import lookup

from exactly_once import Fenced, Redelivered, TransactionNotYours
from exactly_once.ledger.outcome import (
    _STANDARD,
    FOREIGN_TRANSACTION,
    PATIENCE_SECONDS,
    SHORT_COUNT,
    TRIES,
    Fault,
    Patience,
    classify,
    driver_error,
    is_by_statement,
    may_be_data,
    own_error,
    sqlstate_of,
)

CONFLICT = ["40001", "40P01", "40000", "40002", "40003", "55P03"]
ENVIRONMENT = ["08000", "08006", "53000", "53100", "53300", "57000", "57P01", "57P02", "57P03", "58000", "58030"]
ENVIRONMENT += ["25006", "26000", "HV00N"]
DURATION = ["57014", "25P03", "25P04"]
HANDLER = ["22001", "22012", "22P02", "23502", "23503", "23505", "23514", "P0001", "25P02"]
HANDLER += ["21000", "38000", "38001", "39004", "44000", "54000", "54001", "54023", "P0000", "P0002", "P0003", "P0004"]
HANDLER += ["00000", "01004", "02000", "09000", "10608", "20000", "27000", "2F005"]
HANDLER += ["MY001", "U0001", "45000", "99999", "ZZZZZ"]  # made up by applications
DOUBTFUL = ["42501", "42601", "42P01", "0A000", "0B000", "0L000", "0P000", "24000", "28000", "2B000", "2D000", "34000"]
DOUBTFUL += ["3B001", "3D000", "3F000", "55000", "HV000", "XX000"]
OTHER = ["XX001", "XX002", "03000", "25001", "25P01", "55006", "55P02", "72000", "F0000"]
OTHER += [SHORT_COUNT, FOREIGN_TRANSACTION, "EO004"]

TABLE = {
    **dict.fromkeys(CONFLICT, Fault.CONFLICT),
    **dict.fromkeys(ENVIRONMENT, Fault.ENVIRONMENT),
    **dict.fromkeys(DURATION, Fault.DURATION),
    **dict.fromkeys(HANDLER, Fault.HANDLER),
    **dict.fromkeys([*DOUBTFUL, *OTHER], Fault.OTHER),
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


def test_what_takes_all_memory_is_nobodys_fault() -> None:
    assert classify(MemoryError(), connection_lost=False) is Fault.OTHER


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


def test_the_end_of_a_session_is_found_behind_the_pipeline_that_could_not_be_left() -> None:
    """As a soak saw it: a backend was terminated between executemany's statement and its Sync.

    The chain is put together here: the server cannot be made to end a session at just that place.
    """
    ended, stuck = server_error("57P01"), psycopg.OperationalError("cannot exit pipeline mode while busy")
    stuck.__context__ = ended
    assert sqlstate_of(stuck) == "57P01"
    assert classify(while_handling(stuck), connection_lost=False) is Fault.ENVIRONMENT
    alone = psycopg.InterfaceError("the cursor is closed")
    alone.__context__ = ended
    assert sqlstate_of(alone) is None, "an error of the handler's own use"


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


def test_a_group_is_judged_by_what_is_in_it() -> None:
    error = server_error("40P01")
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [FrameworkError(error)])])
    assert driver_error(group) is error
    assert classify(group, connection_lost=False) is Fault.CONFLICT
    assert own_error(group) is None
    again, wrong = Fenced("taken"), TransactionNotYours("commit()")
    assert own_error(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [again])])) is again
    assert own_error(ExceptionGroup("tasks", [again, wrong])) is wrong, "what stops goes before what is tried again"


def test_an_own_error_is_none_of_what_it_was_raised_beside() -> None:
    """A service that is begun anew where an earlier one has ended has that one's error for its context."""
    assert own_error(again := Redelivered("again")) is again
    assert own_error(while_handling(again)) is own_error(ValueError()) is None


def test_every_class_that_the_driver_knows_is_one_of_postgres() -> None:
    states = [getattr(error, "sqlstate", None) for error in vars(psycopg.errors).values()]
    known = {state[:2] for state in states if isinstance(state, str)}
    assert known <= _STANDARD
    assert len(known) > 30


def test_what_no_statement_of_a_message_brings_about_is_never_its_fault() -> None:
    states = [*DOUBTFUL, *OTHER]
    assert [state for state in states if may_be_data(caused_by(server_error(state)))] == DOUBTFUL
    assert not may_be_data(ValueError("of the handler"))
    assert not may_be_data(psycopg.OperationalError("without a SQLSTATE"))


def test_what_a_statement_can_do_to_its_own_session_is_told_from_a_server_that_is_away() -> None:
    for state in ("25006", "26000", "53400", "58P01"):
        assert is_by_statement(server_error(state), connection_lost=False)
    for state in ("53100", "57P03", "08006", "58030"):
        assert not is_by_statement(server_error(state), connection_lost=False)
    for error in (psycopg.OperationalError("server closed the connection"), server_error("58P01")):
        assert not is_by_statement(error, connection_lost=True)
    for other in (psycopg.OperationalError("without a SQLSTATE"), ValueError("of the handler")):
        assert not is_by_statement(other, connection_lost=False)


def test_patience_counts_the_tries_of_one_batch_until_something_is_committed() -> None:
    patience = Patience()
    for _ in range(TRIES - 1):
        patience.failed("a", 0.0, by_statement=True)
    assert not patience.is_out
    patience.failed("b", 0.0, by_statement=True)
    assert not patience.is_out, "another batch"
    for _ in range(TRIES):
        patience.failed("a", 0.0, by_statement=True)
    tried = patience.is_out, patience.is_handlers, patience.tries
    patience.committed()
    patience.failed("a", 0.0, by_statement=True)
    assert (*tried, patience.tries) == (True, True, TRIES, 1)


def test_what_no_statement_can_have_done_does_not_count_against_the_handler() -> None:
    patience = Patience()
    for _ in range(3 * TRIES):
        patience.failed("a", 0.0, by_statement=False)
    for _ in range(TRIES - 1):
        patience.failed("a", 0.0, by_statement=True)
        assert (patience.is_out, patience.is_handlers) == (True, False)
    patience.failed("a", 0.0, by_statement=True)
    assert patience.is_handlers


def test_what_may_be_a_statements_doing_is_counted_of_one_batch() -> None:
    patience = Patience()
    for _ in range(TRIES - 1):
        patience.failed("a", 0.0, by_statement=True)
    patience.failed("b", 0.0, by_statement=True)
    assert (patience.tries, patience.by_statement, patience.is_handlers) == (1, 1, False)


def test_patience_lasts_ten_minutes_of_which_no_failure_takes_more_than_half_a_minute() -> None:
    patience, now = Patience(), 1000.0
    for _ in range(2):  # after a commit it begins anew
        assert (patience.tries, patience.by_statement, patience.is_out, patience.is_handlers) == (0, 0, False, False)
        for pause in (100.0, *(19 * [3600.0]), 29.5, 0.5):  # the first is no pause between two failures
            now += pause
            patience.failed("a", now, by_statement=True)
            assert not patience.is_overdue
        patience.failed("a", now := now + 0.5, by_statement=True)
        assert patience.is_overdue
        patience.committed()


def test_the_hours_that_a_server_was_away_do_not_end_the_patience() -> None:
    patience = Patience()
    for hour in range(12):
        patience.failed("a", hour * 3600.0, by_statement=False)
    assert not patience.is_overdue
    for second in range(0, int(PATIENCE_SECONDS) + 60, 5):
        patience.failed(second, 50_000.0 + second, by_statement=False)
    assert patience.is_overdue, "whatever the batches are"
