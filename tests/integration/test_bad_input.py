"""Options and settings that cannot work are refused at once, by name, with the way out and without secrets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from exactly_once import (
    BrokerUnreachable,
    ConfigurationError,
    DatabaseUnreachable,
    ExactlyOnceConsumer,
    SchemaTooNew,
    SchemaTooOld,
    UnknownTopic,
)
from exactly_once.embedded.proxy import PostgresProxy
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic

SECRET = "correct-horse-battery-staple"
NOBODY = "127.0.0.1:1"
"""An address where nobody listens."""
KAFKA = {"bootstrap.servers": NOBODY, "group.id": "g"}


def refused(kafka: dict[str, Any] | None = None, **options: Any) -> str:
    """Return why these are refused; nothing may be contacted for it."""
    options.setdefault("conninfo", f"postgresql://{NOBODY}/nowhere")
    with pytest.raises(ConfigurationError) as caught:
        ExactlyOnceConsumer(KAFKA if kafka is None else kafka, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.fault("D5")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable.auto.commit", True),
        ("enable.auto.commit", "true"),
        ("enable.auto.offset.store", True),
        ("enable.partition.eof", False),
    ],
)
def test_setting_that_would_break_the_guarantee_is_refused_by_name(key: str, value: object) -> None:
    message = refused({**KAFKA, key: value})
    assert f"{key}={value!r} is refused" in message
    assert ("ends of logs" in message) == (key == "enable.partition.eof")
    assert "Leave the key out" in message


@pytest.mark.parametrize("value", [False, "false", "False"])
def test_setting_that_says_what_must_be_anyway_is_accepted(value: object) -> None:
    consumer = ExactlyOnceConsumer({**KAFKA, "enable.auto.commit": value}, conninfo="")
    consumer.close()


@pytest.mark.parametrize(
    ("reset", "instead"),
    [
        ("earliest", 'start="earliest"'),
        ("smallest", 'start="earliest"'),
        ("latest", 'start="latest"'),
        ("largest", 'start="latest"'),
        ("none", "on_out_of_range="),
    ],
)
def test_auto_offset_reset_is_refused_with_the_option_that_means_the_same(reset: str, instead: str) -> None:
    message = refused({**KAFKA, "auto.offset.reset": reset})
    assert f"auto.offset.reset={reset!r} is refused" in message
    assert instead in message


def test_topic_defaults_in_which_a_reset_could_hide_are_refused() -> None:
    message = refused({**KAFKA, "default.topic.config": {"auto.offset.reset": "latest"}})
    assert "default.topic.config is refused" in message


@pytest.mark.parametrize("group_id", [None, ""])
def test_missing_group_id_is_refused(group_id: str | None) -> None:
    kafka = {"bootstrap.servers": NOBODY} if group_id is None else {**KAFKA, "group.id": group_id}
    assert "group.id is missing" in refused(kafka)


def test_setting_that_librdkafka_does_not_know_is_refused() -> None:
    assert "no.such.setting" in refused({**KAFKA, "no.such.setting": 1})


def test_setting_with_a_wrong_value_is_refused() -> None:
    assert "session.timeout.ms" in refused({**KAFKA, "session.timeout.ms": "soon"})


@pytest.mark.parametrize(
    ("option", "value", "possible"),
    [
        ("start", "beginning", "earliest, latest, committed"),
        ("start", datetime(2024, 1, 1), "time zone"),  # noqa: DTZ001  (that is the mistake)
        ("on_out_of_range", "ignore", "fail, earliest, latest"),
        ("isolation", "READ UNCOMMITTED", "READ COMMITTED, REPEATABLE READ, SERIALIZABLE"),
        ("max_messages", 0, "positive"),
        ("max_bytes", -1, "positive"),
        ("startup_seconds", 0, "positive"),
        ("max_unit_seconds", 0, "above 0"),
        ("max_unit_seconds", -5, "above 0"),
        ("schema", "", "1 to 63 bytes"),
        ("schema", "ä" * 32, "1 to 63 bytes"),
        ("schema", "a\0b", "1 to 63 bytes"),
    ],
)
def test_option_with_a_wrong_value_is_refused_with_the_possible_ones(option: str, value: Any, possible: str) -> None:
    message = refused(**{option: value})
    assert f"{option}=" in message
    assert possible in message


def test_record_factory_that_sets_our_fields_is_refused() -> None:
    """Else logging raises KeyError at the first record, which may be one of trouble in the middle of the night."""
    before = logging.getLogRecordFactory()

    def factory(*args: Any, **options: Any) -> logging.LogRecord:
        record = before(*args, **options)
        record.topic, record.group = "billing", "blue"
        return record

    logging.setLogRecordFactory(factory)
    try:
        assert "sets group, topic" in refused()
    finally:
        logging.setLogRecordFactory(before)


def test_unit_may_not_outlast_the_poll_interval() -> None:
    message = refused({**KAFKA, "max.poll.interval.ms": 30_000, "session.timeout.ms": 6000}, max_unit_seconds=30)
    assert "max_unit_seconds=30" in message
    assert "max.poll.interval.ms (30 s)" in message
    assert "max.poll.interval.ms='often'" in refused({**KAFKA, "max.poll.interval.ms": "often"})


def test_conninfo_and_connect_exclude_each_other_and_one_is_needed() -> None:
    def connect() -> psycopg.Connection[Any]:
        raise AssertionError("it is too early to connect")

    assert "conninfo=" in refused(conninfo="", connect=connect)
    assert "connect=" in refused(conninfo=None)


def test_unknown_topic_is_an_error_within_seconds(
    make_consumer: MakeConsumer, bootstrap_servers: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when it is one among several, and without waiting for a first message; what is waited for is told."""
    known = create_topic(bootstrap_servers, 1)
    consumer = make_consumer()
    began = time.monotonic()
    with pytest.raises(UnknownTopic, match=r"'no-such-topic'.*wait_for_topics=True"):
        consumer.subscribe([known, "no-such-topic"])
    assert time.monotonic() - began < 30
    told = [record.getMessage() for record in caplog.records if record.__dict__.get("action") == "waiting"]
    assert any(": there is no topic 'no-such-topic'" in text for text in told)


@pytest.mark.parametrize("topics", [[], [""], "payments"])
def test_topics_that_are_no_list_of_names_are_refused(topics: Any, make_consumer: MakeConsumer) -> None:
    """A single string would be taken for a list of one-letter topics."""
    with pytest.raises(ConfigurationError, match="topics"):
        make_consumer().subscribe(topics)


def test_unreachable_broker_is_named_and_bounded(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer({"bootstrap.servers": NOBODY}, startup_seconds=2)
    began = time.monotonic()
    with pytest.raises(BrokerUnreachable, match=NOBODY):
        consumer.subscribe(["t"])
    assert time.monotonic() - began < 30


def test_unreachable_database_is_named_and_bounded(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(conninfo=f"postgresql://somebody:{SECRET}@{NOBODY}/bank", startup_seconds=1)
    began = time.monotonic()
    with pytest.raises(DatabaseUnreachable, match=r"127\.0\.0\.1.*port 1 ") as caught:
        consumer.subscribe(["t"])
    assert time.monotonic() - began < 30
    assert SECRET not in _everything(caught.value)


def test_missing_schema_is_an_error_with_the_command_that_makes_it(make_consumer: MakeConsumer) -> None:
    with pytest.raises(SchemaTooOld, match="exactly-once migrate"):
        make_consumer(schema="never_made").subscribe(["t"])


def test_schema_of_a_later_release_is_refused(
    make_consumer: MakeConsumer, db: psycopg.Connection[Any], bootstrap_servers: str, name: str
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    make_consumer(schema=name, migrate=True).subscribe([topic])
    db.execute(
        psycopg.sql.SQL("UPDATE {}.version SET version = 9, oldest_reader = 9").format(psycopg.sql.Identifier(name))
    )
    with pytest.raises(SchemaTooNew, match=rf"{name}.*version 9"):
        make_consumer(schema=name).subscribe([topic])


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql://somebody:{SECRET}@{NOBODY}/bank",
        f"host=127.0.0.1 port=1 user=somebody password={SECRET}",
        f"host=127.0.0.1 port=1 pass word={SECRET}",
        f"postgresql://somebody:{SECRET}@127.0.0.1:notaport/bank",
        f"postgresql://somebody:{SECRET}%zz@127.0.0.1/bank",
        f"postgresql://{NOBODY}/bank?nosuchoption=1&password={SECRET}",
        f"postgresql://somebody:x@{SECRET}@{NOBODY}/bank",
        f"postgresql://somebody:{SECRET}/x@{NOBODY}/bank",
        f"postgresql://somebody:{SECRET}@[::1]:1/bank",
        f"postgresql://somebody:{SECRET}@127.0.0.1:1,127.0.0.1:2/bank",
        f"postgresql://somebody:{SECRET}/bank",
        f"service=nosuch password={SECRET}",
    ],
)
def test_password_is_in_no_message_repr_or_log(conninfo: str, caplog: pytest.LogCaptureFixture) -> None:
    """Well formed or not, at construction, in use and in what is logged."""
    caplog.set_level(logging.DEBUG)
    said = [_said(lambda: ExactlyOnceConsumer(KAFKA, conninfo=conninfo, startup_seconds=0.5))]
    if not said[0]:
        consumer = ExactlyOnceConsumer(KAFKA, conninfo=conninfo, startup_seconds=0.5)
        said += [repr(consumer), _said(lambda: consumer.subscribe(["t"])), repr(consumer)]
        consumer.close()
    assert any(said)
    assert SECRET not in "\n".join([*said, caplog.text])


@pytest.mark.parametrize("written", [f"somebody:x@{SECRET}@{NOBODY}/bank", f"somebody:{SECRET}/x@{NOBODY}/bank"])
def test_password_is_in_no_message_of_a_callable_that_connects(written: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is not looked at beforehand, so what psycopg says of it is cleaned."""
    caplog.set_level(logging.INFO)
    consumer = ExactlyOnceConsumer(
        KAFKA, connect=lambda: psycopg.connect(f"postgresql://{written}"), startup_seconds=1.5
    )
    said = _said(lambda: consumer.subscribe(["t"]))
    consumer.close()
    assert "DatabaseUnreachable" in said
    assert SECRET not in said + caplog.text


def test_asynchronous_connection_is_refused(conninfo: str) -> None:
    def connect() -> Any:
        return psycopg.AsyncConnection.connect(conninfo)

    consumer = ExactlyOnceConsumer(KAFKA, connect=connect)
    with pytest.raises(ConfigurationError, match=r"connect= gave coroutine.*fastapi\.md"):
        consumer.subscribe(["t"])
    consumer.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dbname": "nosuch"}, 'database "nosuch" does not exist'),
        ({"user": "nosuch"}, 'password authentication failed for user "nosuch"'),
        ({"sslmode": "require"}, "server does not support SSL"),
        ({"host": "nosuch.invalid"}, r"nosuch\.invalid"),
        ({"service": "nosuch"}, 'service "nosuch" not found'),
    ],
)
def test_setting_of_the_database_that_is_wrong_is_an_error_at_once(
    change: dict[str, str], told: str, conninfo: str, make_consumer: MakeConsumer
) -> None:
    """Without waiting for startup_seconds, for which the test has no time."""
    consumer = make_consumer(conninfo=psycopg.conninfo.make_conninfo(conninfo, **change), startup_seconds=1000)
    with pytest.raises(DatabaseUnreachable, match=told):
        consumer.subscribe(["t"])


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as waited for."""
    return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "waiting"]


def test_start_says_what_it_waits_for_and_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database by host, port and name; then the brokers, about which the client itself says no more than once."""
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=f"postgresql://somebody:{SECRET}@{NOBODY}/bank", startup_seconds=600)
    connect = consumer._session.connect

    def until_told_twice() -> psycopg.Connection[Any]:
        if len(waits(caplog)) > 1:
            raise ZeroDivisionError
        return connect()

    monkeypatch.setattr(consumer._session, "connect", until_told_twice)
    with pytest.raises(ZeroDivisionError):
        consumer.subscribe(["t"])
    first, second, *_ = waits(caplog)
    assert first.startswith(f"waiting for Postgres at {NOBODY}/bank for 1 s: ")
    assert "Connection refused" in first
    assert "for 2 s" in second
    consumer.close()


def test_start_says_once_that_the_brokers_are_away(
    make_consumer: MakeConsumer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    consumer = make_consumer({"bootstrap.servers": NOBODY}, name="billing-1", startup_seconds=4)
    with pytest.raises(BrokerUnreachable, match=NOBODY):
        consumer.subscribe(["t"])
    consumer.close()
    assert waits(caplog)[0].startswith(f"waiting for Kafka at {NOBODY} for 1 s: ")
    assert any("Connection refused" in waited for waited in waits(caplog)), "as soon as the client has said it"
    client = [r.getMessage() for r in caplog.records if r.name == "exactly_once.kafka"]
    assert 1 <= len(client) <= 4
    assert all("exactly_once.billing-1#" in line for line in client if line.startswith("FAIL"))
    assert "rdkafka" not in capfd.readouterr().err


@pytest.mark.parametrize("statement", ["has_schema", "SELECT version, oldest_reader", "pg_is_in_recovery"])
def test_connection_that_is_lost_during_the_first_look_is_made_again(
    statement: str, make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str
) -> None:
    """A pooler that restarts, just then."""
    topic = create_topic(bootstrap_servers, 1)
    match = {"has_schema": "to_regclass"}.get(statement, statement)
    with PostgresProxy(conninfo) as proxy:
        fault = proxy.cut_before(match)
        consumer = make_consumer(conninfo=proxy.conninfo, migrate=True, startup_seconds=60)
        consumer.subscribe([topic])
        fault.wait()
        consumer.close()


def test_database_that_goes_away_during_the_first_look_is_unreachable(
    make_consumer: MakeConsumer, conninfo: str
) -> None:
    with PostgresProxy(conninfo) as proxy:
        proxy.cut_before("to_regclass")
        consumer = make_consumer(conninfo=proxy.conninfo, startup_seconds=1.5)
        real = consumer._session.connect

        def connect() -> psycopg.Connection[Any]:
            connection = real()
            proxy.refuse()
            return connection

        consumer._session.connect = connect
        with pytest.raises(DatabaseUnreachable, match="no connection to Postgres at"):
            consumer.subscribe(["t"])
        proxy.heal()


def _said(action: Callable[[], object]) -> str:
    try:
        made = action()
    except Exception as error:  # noqa: BLE001  (whatever it is, it must not tell)
        return _everything(error)
    if isinstance(made, ExactlyOnceConsumer):
        made.close()
    return ""


def _everything(error: BaseException | None) -> str:
    """The texts of an error and of all that is chained to it."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)
