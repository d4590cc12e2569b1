"""Retry: what is waited for, by the loop and by who asks one thing of a server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import tenacity
from confluent_kafka import KafkaError, KafkaException

from exactly_once.errors import (
    AlreadyApplied,
    DatabaseUnreachable,
    ExactlyOnceError,
    Fenced,
    LedgerRewound,
    LedgerRowMissing,
)
from exactly_once.ledger.outcome import is_mistaken
from exactly_once.ledger.retry import Stop, at_start, is_retryable, is_unavailable, retry_for, retry_forever
from exactly_once.ledger.session import hiding
from exactly_once.writer import TableChanged

AWAY = [
    DatabaseUnreachable("no answer"),
    psycopg.OperationalError("no connection, so no SQLSTATE"),
    psycopg.errors.AdminShutdown("57P01"),
    psycopg.errors.LockNotAvailable("55P03"),
    psycopg.errors.SerializationFailure("40001"),
    KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, retriable=True)),
    TableChanged("read anew when it is asked again"),
]
REDELIVERED = [Fenced("by another owner"), AlreadyApplied("an earlier attempt"), LedgerRewound("a failover")]
FINAL = [
    psycopg.errors.UniqueViolation("23505"),
    psycopg.ProgrammingError("closed by us"),
    LedgerRowMissing("no row"),
    KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)),
    ValueError("ours"),
]


@pytest.mark.parametrize("error", AWAY)
def test_a_server_that_is_away_is_waited_for(error: Exception) -> None:
    assert is_unavailable(error)
    assert is_retryable(error)


@pytest.mark.parametrize("error", REDELIVERED)
def test_messages_that_come_again_keep_the_loop_going_and_mend_no_question(error: Exception) -> None:
    """They are OperationalErrors without a SQLSTATE, like a connection that is lost."""
    assert is_retryable(error)
    assert not is_unavailable(error)


class EngineError(Exception):
    """As the engine of a framework raises it, which is no error of the driver's."""


@pytest.mark.parametrize("state", [is_retryable, is_unavailable])
def test_a_server_that_a_framework_says_is_away_is_waited_for(state: Callable[[BaseException], bool]) -> None:
    def connect() -> psycopg.Connection[Any]:
        try:
            raise psycopg.OperationalError("connection to 10.0.0.1 refused: postgresql://app:secret@10.0.0.1/bank")
        except psycopg.Error as error:
            raise EngineError("(psycopg.OperationalError) ...") from error

    with pytest.raises(psycopg.OperationalError, match=r"connection to 10\.0\.0\.1 refused") as raised:
        hiding(connect)()
    assert "secret" not in str(raised.value)
    assert state(raised.value)


def test_what_was_handled_when_a_function_was_called_is_no_cause_of_its_error() -> None:
    def connect() -> psycopg.Connection[Any]:
        raise KeyError("DB_PASSWORD")

    def handling() -> None:
        try:
            raise psycopg.OperationalError("of another database")
        except psycopg.Error:
            hiding(connect)()

    with pytest.raises(KeyError, match="DB_PASSWORD"):
        handling()


def test_an_error_may_be_its_own_cause() -> None:
    def connect() -> psycopg.Connection[Any]:
        error = LookupError("of the function")
        raise error from error

    with pytest.raises(LookupError, match="of the function"):
        hiding(connect)()


def test_what_else_a_function_raises_is_its_own() -> None:
    def connect() -> psycopg.Connection[Any]:
        try:
            raise psycopg.errors.InvalidParameterValue("SET: no such role")
        except psycopg.Error as error:
            raise EngineError("not ready") from error

    with pytest.raises(EngineError, match="not ready") as raised:
        hiding(connect)()
    assert not is_retryable(raised.value)


@pytest.mark.parametrize(
    ("error", "action"), [(LedgerRewound("x"), "rewound"), (AlreadyApplied("x"), "ahead"), (Fenced("x"), "fenced")]
)
def test_what_happens_once_is_told_by_its_action(
    error: Exception, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop, errors = Stop(), [error, error]

    def one() -> None:
        if errors:
            raise errors.pop()

    retry_forever(sleep=lambda _: None, stop=stop, group_id="g")(one)
    assert [vars(each)["action"] for each in caplog.records] == [action, action]


@pytest.mark.parametrize("error", FINAL)
def test_nothing_else_is_waited_for(error: Exception) -> None:
    assert not is_retryable(error)


@pytest.mark.parametrize("error", [Fenced("by another owner"), LedgerRowMissing("no row")])
def test_who_asks_briefly_hears_at_once_that_it_is_fenced(error: Exception) -> None:
    calls = []

    def ask() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        retry_for(5)(ask)
    assert len(calls) == 1


@pytest.mark.parametrize("told_always", REDELIVERED)
def test_what_happens_once_is_told_each_time_and_what_lasts_less_and_less_often(
    told_always: ExactlyOnceError, caplog: pytest.LogCaptureFixture
) -> None:
    """The third try in a row is none of those at which a wait is told."""
    away = DatabaseUnreachable("no answer")
    errors: list[Exception] = [away, away, told_always, away, away, away, away]

    def ask() -> None:
        if errors:
            raise errors.pop(0)

    retry_forever(sleep=lambda _: None, stop=Stop(), group_id="g", wait=tenacity.wait_none())(ask)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "waiting (try 1): no answer",
        "waiting (try 2): no answer",
        f"{type(told_always).__name__}: {told_always}",
        "waiting (try 4): no answer",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


REFUSED = 'connection failed: connection to server at "10.0.0.1", port 5432 failed: '
MISTAKES = [
    'FATAL:  password authentication failed for user "bank"',
    'FATAL:  database "bnak" does not exist',
    'FATAL:  role "bnak" does not exist',
    'FATAL:  no pg_hba.conf entry for host "10.0.0.2", user "bank", database "bank", no encryption',
    "FATAL:  no such database: bnak",
    "fe_sendauth: no password supplied",
    "server does not support SSL, but SSL was required",
    "SSL error: certificate verify failed",
    'server certificate for "db" does not match host name "10.0.0.1"',
    'root certificate file "/etc/ssl/missing.crt" does not exist',
]
PASSING = [
    "Connection refused",
    "timeout expired",
    "FATAL:  the database system is starting up",
    "FATAL:  sorry, too many clients already",
    "SSL error: unexpected eof while reading",
    "SSL SYSCALL error: Connection reset by peer",
    "server closed the connection unexpectedly",
]


@pytest.mark.parametrize("text", MISTAKES)
def test_what_waiting_does_not_mend_is_raised_at_once(text: str) -> None:
    error = psycopg.OperationalError(REFUSED + text)
    assert is_mistaken(error)
    calls = []

    def ask() -> None:
        calls.append(1)
        raise error

    with pytest.raises(psycopg.OperationalError):
        at_start(ask, seconds=60, what="Postgres", group_id="g")
    assert len(calls) == 1


def test_a_sqlstate_tells_what_waiting_does_not_mend_and_no_text_beside_it_does() -> None:
    for state, is_one in (("28P01", True), ("28000", True), ("57P03", False), ("53300", False)):
        assert is_mistaken(psycopg.errors.lookup(state)(REFUSED + MISTAKES[0])) is is_one
    for error in (psycopg.ProgrammingError(REFUSED + MISTAKES[0]), ValueError(REFUSED + MISTAKES[0])):
        assert not is_mistaken(error), "no error of a connection"


@pytest.mark.parametrize("text", PASSING)
def test_what_goes_away_is_waited_for_at_the_start(text: str) -> None:
    assert not is_mistaken(psycopg.OperationalError(REFUSED + text))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("failed to resolve host 'db.exmaple': [Errno -2] Name or service not known", True),
        ("failed to resolve host 'db.exmaple': [Errno 8] nodename nor servname provided, or not known", True),
        ("failed to resolve host 'db.example': [Errno -3] Temporary failure in name resolution", False),
        ('definition of service "bank" not found', True),
    ],
)
def test_unknown_name_is_a_mistake_and_a_name_server_that_is_away_is_not(text: str, is_one: bool) -> None:  # noqa: FBT001
    assert is_mistaken(psycopg.OperationalError(text)) is is_one


def several(*attempts: tuple[str, str, str]) -> psycopg.OperationalError:
    """What psycopg raises where it tried several addresses."""
    lines = [
        f"- host: '{host}', port: '5432', hostaddr: '{address}': {REFUSED}{text}" for host, address, text in attempts
    ]
    head = f"{REFUSED}{attempts[-1][2]}\nMultiple connection attempts failed. All failures were:"
    return psycopg.OperationalError("\n".join([head, *lines]))


def test_of_several_hosts_all_must_be_mistaken_and_of_a_host_one_address() -> None:
    assert is_mistaken(several(("localhost", "::1", PASSING[0]), ("localhost", "127.0.0.1", MISTAKES[0])))
    assert is_mistaken(several(("localhost", "::1", MISTAKES[0]), ("localhost", "127.0.0.1", PASSING[0])))
    assert is_mistaken(several(("a", "10.0.0.1", MISTAKES[0]), ("b", "10.0.0.2", MISTAKES[0])))
    assert not is_mistaken(several(("a", "10.0.0.1", PASSING[0]), ("b", "10.0.0.2", MISTAKES[0])))
    assert not is_mistaken(several(("a", "10.0.0.1", MISTAKES[0]), ("b", "10.0.0.2", PASSING[0])))
