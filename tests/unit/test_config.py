"""Configuration: what is refused and how it says so, what is filled in, what an admin client gets."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any, get_args

import pytest
import tenacity
from confluent_kafka import Consumer

from exactly_once import ConfigurationError, DeadLetterLimit, ExactlyOnceConsumer
from exactly_once.consumer.options import Isolation, Options, application_of, check_options, check_run
from exactly_once.kafka.kinds import check_choice
from exactly_once.kafka.settings import (
    admin_settings,
    callbacks,
    check_topics,
    client_settings,
    is_incremental,
    reads_committed,
)

KAFKA = {"bootstrap.servers": "localhost:1", "group.id": "g"}
REST: dict[str, Any] = {
    "start": None,
    "on_out_of_range": "fail",
    "isolation": "READ COMMITTED",
    "max_messages": 500,
    "max_bytes": 1024,
    "linger_seconds": 0.0,
    "startup_seconds": 1.0,
    "stop_on_bad_partition": False,
    "take_over": False,
    "wait_for_topics": False,
    "schema": "exactly_once",
    "migrate": False,
    "name": None,
    "application": None,
}


class Choice(StrEnum):
    """As an application may keep its settings."""

    ISOLATION = "REPEATABLE READ"


def test_a_choice_is_an_equal_value() -> None:
    check_choice("isolation", Choice.ISOLATION, get_args(Isolation))
    check_choice("create_table", value=1, choices=(True, False))
    for name, value, choices in (("create_table", "1", (True, False)), ("ways", "4", (1, 2)), ("evolve", [], (None,))):
        with pytest.raises(ConfigurationError, match=f"{name}=.*is not possible; choose one of {choices[0]}"):
            check_choice(name, value, choices)


def checked(kafka: dict[str, Any] | None = None, /, **changed: Any) -> Options:
    given = {
        "conninfo": "dbname=x",
        "connect": None,
        "max_unit_seconds": None,
        "claims_window": None,
        **REST,
        **changed,
    }
    return check_options(KAFKA | (kafka or {}), **given)


BREAKS: list[tuple[str, object]] = [
    *itertools.product(["enable.auto.commit", "enable.auto.offset.store"], [True, "true", "TRUE", 1, "1", "yes"]),
    *itertools.product(["enable.partition.eof"], [False, "false", 0]),
    *itertools.product(["auto.offset.reset"], ["earliest", "latest", "smallest", "largest", "beginning", "end"]),
]
FORCED: list[tuple[str, object]] = [
    *itertools.product(["enable.auto.commit", "enable.auto.offset.store"], [False, "false", "False", 0, "0"]),
    *itertools.product(["enable.partition.eof"], [True, "true", 1]),
    ("auto.offset.reset", "error"),
]


def test_a_setting_that_breaks_the_guarantee_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for key, value in BREAKS:
        with (
            subtests.test(f"{key}={value!r}"),
            pytest.raises(ConfigurationError, match=rf"^{key}='?{value}'? is refused"),
        ):
            client_settings({**KAFKA, key: value})


def test_a_forced_setting_may_be_given_as_it_must_be(subtests: pytest.Subtests) -> None:
    for key, value in FORCED:
        with subtests.test(f"{key}={value!r}"):
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


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"stats_cb=1 is refused: it is no function"):
        ExactlyOnceConsumer({**KAFKA, "stats_cb": 1}, conninfo="postgresql:///")


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


def test_an_admin_client_connects_as_the_consumer_does() -> None:
    settings = admin_settings(CONNECTION | CONSUMING)
    assert {key: settings[key] for key in CONNECTION if key in settings} == CONNECTION


def test_an_admin_client_does_not_get_what_only_consumers_understand() -> None:
    assert admin_settings(CONNECTION | CONSUMING).keys() & CONSUMING.keys() == set()


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
    with pytest.raises(ConfigurationError, match=r"one of conninfo= .* and connect="):
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


@pytest.mark.parametrize("settings", [{"group.id": "g"}, {"group.id": "g", "bootstrap.servers": ""}])
def test_brokers_are_required(settings: dict[str, str]) -> None:
    """Without them the client would wait for a connection that it never tries."""
    with pytest.raises(ConfigurationError, match=r"bootstrap\.servers is missing"):
        ExactlyOnceConsumer(settings, conninfo="postgresql:///")


@pytest.mark.parametrize("kafka", [None, "localhost:9092", [("group.id", "g")], object()])
def test_settings_are_a_dict(kafka: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"kafka=.* give the settings of confluent-kafka, as a dict"):
        ExactlyOnceConsumer(kafka, conninfo="postgresql:///")


@pytest.mark.parametrize("group_id", [" g", "\tg", " ", "g\0h", "\0", "g\ud800", "g" * 2001])
def test_a_group_id_is_refused_that_the_client_would_take_for_another(group_id: str) -> None:
    """Or that aborts the process, or that no broker answers."""
    with pytest.raises(ConfigurationError, match=r"group\.id=.* is not possible"):
        checked({"group.id": group_id})


@pytest.mark.parametrize("group_id", ["g", "grüppe 'q\" \\ ;--", "%s {0}", "g ", "a\nb", "g" * 2000])
def test_any_other_group_id_is_taken(group_id: str) -> None:
    assert checked({"group.id": group_id}).group_id == group_id


@pytest.mark.parametrize(
    "topics", [["a b"], ["ü"], ["a\0b"], ["^a\0b"], ["."], [".."], ["t" * 250], ["t\n"], ["a", "a"]]
)
def test_a_name_that_no_topic_can_have_is_refused(topics: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be the name of a topic|twice"):
        check_topics(topics)


@pytest.mark.parametrize("topics", ["abc", [], [""], [None], [b"a"], [1], None, {"a"}, {"a": 1}, iter(["a"])])
def test_what_is_no_list_of_names_is_refused(topics: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a list of names"):
        check_topics(topics)


def test_names_and_patterns_are_taken() -> None:
    check_topics(["T" * 249, "a.b_c-1", "...", "^ü .*"])


IMPOSSIBLE: list[tuple[str, object, str]] = [
    ("start", "beginning", "start='beginning' is not possible; choose one of earliest, latest, committed"),
    ("start", datetime(2026, 1, 1), "has no time zone"),  # noqa: DTZ001 - that is what is refused
    ("on_out_of_range", "ignore", "on_out_of_range='ignore' is not possible; choose one of fail, earliest"),
    ("isolation", "READ UNCOMMITTED", "isolation='READ UNCOMMITTED' is not possible"),
    ("max_messages", 0, "max_messages=0 must be positive"),
    ("max_bytes", -1, "max_bytes=-1 must be positive"),
    ("linger_seconds", -0.1, "linger_seconds=-0.1 must be 0 or more"),
    ("startup_seconds", 0, "startup_seconds=0 must be positive"),
    ("startup_seconds", math.nan, "startup_seconds=nan must be positive"),
    ("max_messages", 2.5, "max_messages=2.5 must be a whole number"),
    ("max_messages", "5", "max_messages='5' must be a whole number"),
    ("max_bytes", True, "max_bytes=True must be a whole number"),
    ("linger_seconds", "0.1", "linger_seconds='0.1' must be a number of seconds"),
    ("startup_seconds", None, "startup_seconds=None must be a number of seconds"),
    ("max_unit_seconds", "60", "max_unit_seconds='60' must be a number of seconds, or None"),
    ("claims_window", "7", "claims_window='7' must be a timedelta or seconds"),
    ("name", 5, "name=5 must be a text, or None"),
    ("application", 5, "application=5 must be a text, or None"),
    ("schema", 5, "schema=5 must be a text"),
    ("take_over", "no", "take_over='no' must be True or False"),
    ("migrate", 1, "migrate=1 must be True or False"),
    ("wait_for_topics", None, "wait_for_topics=None must be True or False"),
    ("stop_on_bad_partition", "0", "stop_on_bad_partition='0' must be True or False"),
    ("start", "a datetime with a time zone", "choose one of earliest, latest, committed, a datetime"),
    ("schema", "", "schema='' is not the name of a schema"),
    ("schema", "ü" * 32, "is not the name of a schema"),
    ("schema", "a\0b", "is not the name of a schema"),
    ("schema", "information_schema", "one of Postgres' own"),
    ("schema", "pg_toast", "one of Postgres' own"),
    ("max_unit_seconds", 0, "max_unit_seconds=0 must be above 0"),
    ("max_unit_seconds", 300, r"below max\.poll\.interval\.ms \(300 s\)"),
]


def test_an_impossible_option_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for option, value, told in IMPOSSIBLE:
        with subtests.test(f"{option}={value!r}"), pytest.raises(ConfigurationError, match=told):
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
    for interval in ("soon", None):
        with pytest.raises(ConfigurationError, match=rf"max\.poll\.interval\.ms={interval!r} is not a number"):
            checked({"max.poll.interval.ms": interval})


def test_what_cannot_be_called_is_no_way_to_connect() -> None:
    with pytest.raises(ConfigurationError, match="connect='x' must be a callable that returns a connection"):
        checked(conninfo=None, connect="x")


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


@pytest.mark.parametrize(
    "conninfo",
    [
        "postgresql://u:Xq7@geheim@127.0.0.1:1/db",
        "postgresql://u:Xq7@geheim@[::1]:5432/db",
        "postgresql://u:Xq7@geheim@h1:1,h2:2/db",
        "postgresql://u:Xq7/geheim@127.0.0.1:1/db",
        "postgresql://u:geheim/db",
        "postgresql://u:geheim?host=h",
        "postgres://u@x:geheim@h/db",
        "host=geheim@h port=5432",
        "host=h port=geheim",
    ],
)
def test_password_that_libpq_would_misread_is_refused_without_repeating_it(conninfo: str) -> None:
    with pytest.raises(ConfigurationError, match=r"the port is no number, or .* %40") as caught:
        checked(conninfo=conninfo)
    assert "geheim" not in str(caught.value)
    assert "Xq7" not in str(caught.value)


@pytest.mark.parametrize(
    ("conninfo", "server"),
    [
        ("postgresql://u:a%40b%2Fc@h:1/db", "h:1/db"),
        ("postgresql://u@[::1]:5/db", "::1:5/db"),
        ("postgresql://u@h1,h2:2/db?target_session_attrs=read-write", "h1:5432,h2:2/db"),
        ("host=/run/postgresql dbname=bank", "/run/postgresql:5432/bank"),
        ("host=h1,h2 port=7 dbname=bank password='a@b'", "h1:7,h2:7/bank"),
        ("service=bank", "service bank"),
        ("postgresql://%2Frun%2Fpostgresql/bank?user=a%40b", "/run/postgresql:5432/bank"),
    ],
)
def test_server_is_named_without_secrets(conninfo: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE", "PGHOSTADDR"):
        monkeypatch.delenv(variable, raising=False)
    assert checked(conninfo=conninfo).database == server


async def coroutine(unit: object) -> None: ...


def generator(unit: object) -> Iterator[None]:
    yield


class Handler:
    async def __call__(self, unit: object) -> None: ...


RUN: dict[str, Any] = {
    "attempts": 1,
    "dead_letter_limit": None,
    "wait": tenacity.wait_fixed(1),
    "revoke_seconds": 1,
    "stop_seconds": 1,
    "idle_seconds": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", 3),
        ("dead_letter_limit", 5),
        ("idle_seconds", math.nan),
        ("idle_seconds", -1),
        ("stop_seconds", "5"),
        ("stop_seconds", None),
        ("revoke_seconds", -1),
    ],
)
def test_options_of_run_are_checked_before_they_are_needed(name: str, value: object) -> None:
    check_run(print, on_poison="stop", **RUN)
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        check_run(print, on_poison="stop", **RUN | {name: value})


@pytest.mark.parametrize("lazy", [coroutine, generator, partial(coroutine), Handler(), Handler().__call__])
def test_handler_that_would_only_make_a_coroutine_is_refused(lazy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"handler=.*write it with def.*fastapi\.md"):
        check_run(lazy, on_poison="stop", **RUN)
    with pytest.raises(ConfigurationError, match="on_poison="):
        check_run(print, on_poison=lazy, **RUN)
    with pytest.raises(ConfigurationError, match="handler=None"):
        check_run(None, on_poison="stop", **RUN)


def test_consumer_in_asyncio_says_what_to_do_instead() -> None:
    consumer: Any = ExactlyOnceConsumer(KAFKA, conninfo="dbname=x")

    async def loop() -> None:
        async for _ in consumer:
            pass

    async def block() -> None:
        async with consumer:
            pass

    for misuse in (loop, block):
        with pytest.raises(TypeError, match=r"thread of its own.*run_coroutine_threadsafe.*fastapi\.md"):
            asyncio.run(misuse())
    with pytest.raises(ConfigurationError, match="async"):
        consumer.run(coroutine)
    with pytest.raises(AttributeError, match="no attribute 'subscrbe'"):
        consumer.subscrbe(["t"])
    consumer.close()


@pytest.mark.parametrize(
    ("handler", "name", "application"),
    [
        (checked, "accounts-0", f"{__name__}:checked"),
        (partial(checked, None), None, f"{__name__}:checked"),
        (Handler(), None, f"{__name__}:Handler"),
        (None, "accounts-0", "accounts"),
        (None, "accounts-7d9f8b6c5-x2v9z", "accounts"),
        (None, "app-a", "app-a"),
        (None, "42", "42"),
    ],
)
def test_program_is_named_by_its_handler_or_its_members(handler: Any, name: str | None, application: str) -> None:
    assert application_of(handler, name) == application


@pytest.mark.parametrize(("given", "seconds"), [(timedelta(days=2), 172_800.0), (60, 60.0), (0.5, 0.5), (None, None)])
def test_window_of_claims_is_a_timedelta_or_seconds(given: Any, seconds: float | None) -> None:
    assert checked(claims_window=given).claims_window == seconds


@pytest.mark.parametrize("given", [0, -1, timedelta(0), math.inf, math.nan, True])
def test_window_of_claims_that_would_hold_nothing_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="claims_window="):
        checked(claims_window=given)


def test_program_without_names_is_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/srv/billing/worker.py", "--fast"])
    assert application_of(None, None) == "worker.py"
    own = lambda unit: None  # noqa: E731
    own.__module__ = "__main__"
    assert application_of(own, None).startswith("worker.py:")


@pytest.mark.parametrize("given", [{"attempts": "3"}, {"attempts": True}, {"attempts": 2.5}])
def test_attempts_are_a_whole_number(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="attempts="):
        check_run(print, on_poison="stop", **RUN | given)


@pytest.mark.parametrize("given", [{"in_a_row": "5"}, {"in_window": 0}, {"window_seconds": math.nan}])
def test_limits_of_dead_letters_are_positive_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive number"):
        DeadLetterLimit(**given)


@pytest.mark.parametrize(("given", "is_so"), [("READ_COMMITTED", True), (None, True), ("Read_Uncommitted", False)])
def test_words_of_the_client_are_read_in_any_case(given: Any, is_so: bool) -> None:  # noqa: FBT001
    assert reads_committed({"isolation.level": given}) is is_so


@pytest.mark.parametrize("module", ["billing", "billing.__main__", "jobs.mail.__main__"])
def test_a_package_that_is_run_has_its_own_name(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All their files are called __main__.py."""
    monkeypatch.setattr("sys.argv", [f"/srv/{module.removesuffix('.__main__').replace('.', '/')}/__main__.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None), raising=False)
    assert application_of(None, None) == module.removesuffix(".__main__")
