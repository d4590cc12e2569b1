"""Configuration: what is refused and how it says so, what is filled in, what an admin client gets."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer

from exactly_once import ConfigurationError, ExactlyOnceConsumer
from exactly_once.config import (
    Options,
    admin_settings,
    callbacks,
    check_options,
    client_settings,
    is_incremental,
)

KAFKA = {"bootstrap.servers": "localhost:1", "group.id": "g"}
REST: dict[str, Any] = {
    "start": None,
    "on_out_of_range": "fail",
    "isolation": "READ COMMITTED",
    "max_messages": 500,
    "max_bytes": 1024,
    "startup_seconds": 1.0,
    "take_over": False,
    "wait_for_topics": False,
    "schema": "exactly_once",
    "migrate": False,
    "name": None,
    "application": None,
}


def checked(kafka: dict[str, Any] | None = None, /, **changed: Any) -> Options:
    given = {"conninfo": "dbname=x", "connect": None, "max_unit_seconds": None, **REST, **changed}
    return check_options(KAFKA | (kafka or {}), **given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["enable.auto.commit", "enable.auto.offset.store"], [True, "true", "TRUE", 1, "1", "yes"]),
        *itertools.product(["enable.partition.eof"], [False, "false", 0]),
        *itertools.product(["auto.offset.reset"], ["earliest", "latest", "smallest", "largest", "beginning", "end"]),
    ],
)
def test_a_setting_that_breaks_the_guarantee_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{key}='?{value}'? is refused"):
        client_settings({**KAFKA, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["enable.auto.commit", "enable.auto.offset.store"], [False, "false", "False", 0, "0"]),
        *itertools.product(["enable.partition.eof"], [True, "true", 1]),
        ("auto.offset.reset", "error"),
    ],
)
def test_a_forced_setting_may_be_given_as_it_must_be(key: str, value: object) -> None:
    assert client_settings({**KAFKA, key: value}) == client_settings(KAFKA)


@pytest.mark.parametrize(("reset", "instead"), [("earliest", 'start="earliest"'), ("latest", 'start="latest"')])
def test_a_refused_reset_names_the_option_to_use(reset: str, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead):
        client_settings({**KAFKA, "auto.offset.reset": reset})


def test_the_client_gets_what_the_protocol_needs() -> None:
    assert client_settings(KAFKA) == {
        **KAFKA,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "fetch.queue.backoff.ms": 10,
    }


@pytest.mark.parametrize(
    ("key", "value"), [("isolation.level", "read_uncommitted"), ("fetch.queue.backoff.ms", 1000), ("client.id", "me")]
)
def test_what_the_caller_sets_wins_over_a_default(key: str, value: object) -> None:
    assert client_settings({**KAFKA, key: value})[key] == value


def test_the_caller_s_settings_are_not_changed() -> None:
    kafka = dict(KAFKA)
    client_settings(kafka)
    admin_settings(kafka)
    assert kafka == KAFKA


def test_librdkafka_accepts_what_the_client_gets() -> None:
    Consumer(client_settings(KAFKA)).close()


def test_callbacks_are_wired_apart_from_the_settings() -> None:
    def callback(*_: object) -> None: ...

    kafka = {**KAFKA, "error_cb": callback, "stats_cb": callback, "throttle_cb": None, "on_commit": callback}
    assert callbacks(kafka) == {"error_cb": callback, "stats_cb": callback, "on_commit": callback}
    assert client_settings(kafka) == client_settings(KAFKA)
    assert admin_settings(kafka) == admin_settings(KAFKA)


CONNECTION = {
    "bootstrap.servers": "b",
    "metadata.broker.list": "b",
    "client.id": "c",
    "client.rack": "r",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "u",
    "sasl.password": "p",
    "oauth_cb": print,
    "ssl.ca.location": "/ca.pem",
    "ssl.endpoint.identification.algorithm": "https",
    "enable.ssl.certificate.verification": True,
    "broker.address.family": "v4",
    "socket.keepalive.enable": True,
    "reconnect.backoff.ms": 50,
    "logger": None,
}
CONSUMING = {
    "group.id": "g",
    "group.instance.id": "i",
    "group.protocol": "consumer",
    "group.remote.assignor": "uniform",
    "session.timeout.ms": 6000,
    "heartbeat.interval.ms": 1000,
    "max.poll.interval.ms": 60000,
    "partition.assignment.strategy": "range",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.commit.interval.ms": 5000,
    "auto.offset.reset": "error",
    "fetch.min.bytes": 1,
    "fetch.queue.backoff.ms": 10,
    "max.partition.fetch.bytes": 1048576,
    "queued.min.messages": 1000,
    "queued.max.messages.kbytes": 1000,
    "isolation.level": "read_committed",
    "check.crcs": True,
    "coordinator.query.interval.ms": 1000,
    "statistics.interval.ms": 0,
}


@pytest.mark.parametrize("key", CONNECTION)
def test_an_admin_client_connects_as_the_consumer_does(key: str) -> None:
    assert admin_settings(CONNECTION | CONSUMING)[key] == CONNECTION[key]


@pytest.mark.parametrize("key", CONSUMING)
def test_an_admin_client_does_not_get_what_only_consumers_understand(key: str) -> None:
    assert key not in admin_settings(CONNECTION | CONSUMING)


@pytest.mark.parametrize(
    ("kafka", "expected"),
    [
        ({}, False),
        ({"partition.assignment.strategy": "range"}, False),
        ({"partition.assignment.strategy": "range,roundrobin"}, False),
        ({"partition.assignment.strategy": "cooperative-sticky"}, True),
        ({"group.protocol": "classic"}, False),
        ({"group.protocol": "classic", "partition.assignment.strategy": "cooperative-sticky"}, True),
        ({"group.protocol": "consumer"}, True),
        ({"group.protocol": "CONSUMER"}, True),
    ],
)
def test_incremental_rebalances_are_told_from_eager_ones(kafka: dict[str, str], *, expected: bool) -> None:
    assert is_incremental(kafka) is expected


@pytest.mark.parametrize("given", [{"conninfo": None}, {"connect": print}])
def test_exactly_one_way_to_the_database_must_be_given(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"either conninfo= .* or connect="):
        checked(**given)


def test_a_broken_conninfo_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigurationError, match="conninfo is not a connection string") as caught:
        checked(conninfo="password=hunter2 =")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("group_id", [None, ""])
def test_a_group_id_is_required(group_id: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r"group\.id is missing"):
        checked({"group.id": group_id})


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("start", "beginning", "start='beginning' is not possible; choose one of earliest, latest, committed"),
        ("start", datetime(2026, 1, 1), "has no time zone"),  # noqa: DTZ001 - that is what is refused
        ("on_out_of_range", "ignore", "on_out_of_range='ignore' is not possible; choose one of fail, earliest"),
        ("isolation", "READ UNCOMMITTED", "isolation='READ UNCOMMITTED' is not possible"),
        ("max_messages", 0, "max_messages=0 must be positive"),
        ("max_bytes", -1, "max_bytes=-1 must be positive"),
        ("startup_seconds", 0, "startup_seconds=0 must be positive"),
        ("schema", "", "schema='' is not the name of a schema"),
        ("schema", "ü" * 32, "is not the name of a schema"),
        ("schema", "a\0b", "is not the name of a schema"),
        ("max_unit_seconds", 0, "max_unit_seconds=0 must be above 0"),
        ("max_unit_seconds", 300, r"below max\.poll\.interval\.ms \(300 s\)"),
    ],
)
def test_an_impossible_option_is_refused_by_name(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        checked(**{option: value})


@pytest.mark.parametrize("start", [None, "earliest", "latest", "committed", datetime(2026, 1, 1, tzinfo=UTC)])
def test_every_way_to_start_is_accepted(start: object) -> None:
    assert checked(start=start).start == start


@pytest.mark.parametrize(
    ("poll_interval", "given", "expected"),
    [(None, None, 60.0), (10_000, None, 5.0), ("10000", None, 5.0), (1_000_000, None, 60.0), (10_000, 9.5, 9.5)],
)
def test_a_unit_s_time_stays_below_what_kafka_allows(
    poll_interval: object, given: float | None, expected: float
) -> None:
    kafka = {} if poll_interval is None else {"max.poll.interval.ms": poll_interval}
    assert checked(kafka, max_unit_seconds=given).max_unit_seconds == expected


def test_a_poll_interval_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"max\.poll\.interval\.ms='soon' is not a number"):
        checked({"max.poll.interval.ms": "soon"})


def test_what_librdkafka_refuses_is_a_configuration_error_with_its_words() -> None:
    with pytest.raises(ConfigurationError, match=r'No such configuration property: "no\.such\.key"'):
        ExactlyOnceConsumer({**KAFKA, "no.such.key": 1}, conninfo="dbname=x")


def test_the_defaults_are_those_that_the_documents_tell() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, conninfo="dbname=x")
    options = consumer._options
    consumer.close()
    assert (options.start, options.on_out_of_range, options.isolation) == (None, "fail", "READ COMMITTED")
    assert (options.max_messages, options.max_bytes, options.max_unit_seconds) == (500, 64 * 1024 * 1024, 60.0)
    assert (options.schema, options.migrate, options.take_over, options.wait_for_topics) == (
        "exactly_once",
        False,
        False,
        False,
    )
