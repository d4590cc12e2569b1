"""Retry: what is waited for, by the loop and by who asks one thing of a server."""

from __future__ import annotations

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from exactly_once.errors import Ahead, DatabaseUnreachable, Fenced, LedgerRowMissing, Rewound
from exactly_once.retry import briefly, is_away, is_passing
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
REDELIVERED = [Fenced("by another owner"), Ahead("an earlier attempt"), Rewound("a failover")]
FINAL = [
    psycopg.errors.UniqueViolation("23505"),
    psycopg.ProgrammingError("closed by us"),
    LedgerRowMissing("no row"),
    KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)),
    ValueError("ours"),
]


@pytest.mark.parametrize("error", AWAY)
def test_a_server_that_is_away_is_waited_for(error: Exception) -> None:
    assert is_away(error)
    assert is_passing(error)


@pytest.mark.parametrize("error", REDELIVERED)
def test_messages_that_come_again_keep_the_loop_going_and_mend_no_question(error: Exception) -> None:
    """They are OperationalErrors without a SQLSTATE, like a connection that is lost."""
    assert is_passing(error)
    assert not is_away(error)


@pytest.mark.parametrize("error", FINAL)
def test_nothing_else_is_waited_for(error: Exception) -> None:
    assert not is_passing(error)


@pytest.mark.parametrize("error", [Fenced("by another owner"), LedgerRowMissing("no row")])
def test_who_asks_briefly_hears_at_once_that_it_is_fenced(error: Exception) -> None:
    calls = []

    def ask() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        briefly(5)(ask)
    assert len(calls) == 1
