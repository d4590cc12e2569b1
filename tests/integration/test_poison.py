"""Messages that cannot be applied: found, set aside in the transaction that skips them, and never the wrong ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import psycopg
import pytest
import tenacity
from confluent_kafka import Message, Producer

from exactly_once import (
    ConfigurationError,
    DeadLetterLimit,
    ExactlyOnceConsumer,
    HandlerCommitted,
    PoisonMessage,
    TooManyDeadLetters,
    TransactionAborted,
    Unit,
)
from exactly_once.consumer.replay import DeadAgain, Replay
from exactly_once.consumer.service import OnPoison
from exactly_once.ledger.dead_letters import DeadLetter, find
from exactly_once.ledger.session import connector
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, text
from tests.support.worker import record

AT_ONCE = tenacity.wait_fixed(0.01)
LETTERS = "SELECT message_offset FROM exactly_once.dead_letter WHERE group_id = %s ORDER BY partition, message_offset"


def dead(scene: Scene) -> list[int]:
    return [offset for (offset,) in scene.query(LETTERS)]


def letters(scene: Scene) -> list[DeadLetter]:
    with psycopg.connect(scene.conninfo) as connection:
        return find(connection, schema="exactly_once", group_id=scene.topic)


def refusing(*offsets: int, with_: Callable[[Unit], object] | None = None) -> Callable[[Unit], None]:
    """A handler that has its effects and then fails if one of these offsets is among its messages."""

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if any(message.offset() in offsets for message in unit.messages):
            if with_ is None:
                raise ValueError("this is no payment")
            with_(unit)

    return handler


def run(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object], **options: Any) -> None:
    consumer.run(handler, until_end=True, wait=AT_ONCE, **options)


@pytest.mark.fault("C11")
def test_dead_letters_are_exactly_the_poison_and_the_rest_is_applied_once(make_scene: MakeScene) -> None:
    scene = make_scene(300, partitions=3)
    run(scene.consumer(max_messages=100), refusing(3, 4, 50, 99), on_poison="dead-letter")
    # Offsets are those of each partition, so each is met three times.
    assert dead(scene) == [3, 4, 50, 99] * 3
    assert sorted(scene.applied()) == sorted([n for n in range(100) if n not in (3, 4, 50, 99)] * 3)
    assert scene.query("SELECT total FROM journal.counter WHERE topic = %s") == [(288,)]
    assert scene.ledger("next_offset") == [100, 100, 100]


def take_from_the_front(unit: Unit) -> None:
    while unit.messages:
        first, unit.messages = unit.messages[0], unit.messages[1:]
        apply_one(unit, first)


def take_from_the_back(unit: Unit) -> None:
    while unit.messages:
        last, unit.messages = unit.messages[-1], unit.messages[:-1]
        apply_one(unit, last)


def leave_nothing_and_fail_at_the_end(unit: Unit) -> None:
    messages, unit.messages = unit.messages, ()
    for message in messages:
        apply_one(unit, message)


def apply_one(unit: Unit, message: Message) -> None:
    """Apply what is not poison, counted by a plain table: record() reads the unit's own messages."""
    if message.offset() in (4, 9):
        raise ValueError
    unit.execute(text("INSERT INTO taken VALUES (%s, %s)"), [message.topic(), message.offset()])


@pytest.mark.parametrize("handler", [take_from_the_front, take_from_the_back, leave_nothing_and_fail_at_the_end])
def test_the_search_goes_by_what_was_handed_out_whatever_the_handler_has_left(
    make_scene: MakeScene, handler: Callable[[Unit], None]
) -> None:
    """Else a healthy message is set aside, or the search never ends."""
    scene = make_scene(12)
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS taken (topic text, o bigint)")
    calls = 0

    def counted(unit: Unit) -> None:
        nonlocal calls
        calls += 1
        assert calls < 100, "the search does not end"
        handler(unit)

    run(scene.consumer(max_messages=12), counted, on_poison="dead-letter")
    assert dead(scene) == [4, 9]
    found = scene.query("SELECT o FROM taken WHERE topic = %s ORDER BY o")
    assert found == [(n,) for n in range(12) if n not in (4, 9)]


class Named(ValueError):
    """An error that names a message, as the table writer's do."""

    def __init__(self, message: Message) -> None:
        super().__init__("no payment")
        self.topic, self.partition, self.offset = message.topic(), message.partition(), message.offset()


def test_messages_that_errors_name_are_set_aside_in_two_tries_each(
    make_scene: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make_scene(300, partitions=3)
    bad = {5, 6, 40, 99}
    failures = 0

    def handler(unit: Unit) -> None:
        nonlocal failures
        record(unit, "test")
        for message in unit.messages:
            if message.offset() in bad:
                failures += 1
                raise Named(message)

    caplog.set_level("INFO", "exactly_once.consumer.service")
    run(scene.consumer(max_messages=100), handler, on_poison="dead-letter")
    assert dead(scene) == sorted(bad) * 3
    assert sorted(scene.applied()) == sorted([n for n in range(100) if n not in bad] * 3)
    assert failures <= 2 * len(bad) * 3
    told = [r.getMessage() for r in caplog.records if r.name == "exactly_once.consumer.service"]
    told += [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "set_aside"]
    assert len(told) == len(bad) * 3, told


def test_an_error_that_names_the_wrong_message_sets_none_aside(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The first batch fails by an error that names its fourth message, which can be applied alone."""
    left = [1]

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if left:
            left.pop()
            raise Named(unit.messages[3])

    run(scene.consumer(), handler, on_poison="dead-letter")
    assert dead(scene) == []
    scene.assert_exact()
    assert "offset 3, which was applied all the same" in caplog.text


def test_order_within_a_partition_is_kept(make_scene: MakeScene) -> None:
    scene = make_scene(100)
    seen = scene.table("n int GENERATED ALWAYS AS IDENTITY, o bigint")

    def handler(unit: Unit) -> None:
        offsets = [message.offset() for message in unit.messages]
        unit.executemany(text(f"INSERT INTO {seen} (o) VALUES (%s)"), [(o,) for o in offsets])
        if {7, 40, 41, 99} & set(offsets):
            raise ValueError

    run(scene.consumer(max_messages=100), handler, on_poison="dead-letter")
    applied = [o for (o,) in scene.query(f"SELECT o FROM {seen} ORDER BY n")]
    assert applied == [n for n in range(100) if n not in (7, 40, 41, 99)]


def test_stop_names_the_message_and_commits_everything_before_it(scene: Scene) -> None:
    for _ in range(2):  # starting again changes nothing
        consumer = scene.consumer(max_messages=20)
        with pytest.raises(PoisonMessage, match=rf"{scene.topic}\[0\] offset 13: ValueError: this is no") as caught:
            run(consumer, refusing(13))
        assert (caught.value.topic, caught.value.partition, caught.value.offset) == (scene.topic, 0, 13)
        assert isinstance(caught.value.__cause__, ValueError)
        consumer.close()
        assert scene.applied() == list(range(13))
        assert scene.ledger("next_offset") == [13]
    assert dead(scene) == []
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_what_the_server_refuses_is_found(scene: Scene) -> None:
    """A check violation: the server's word for bad data."""
    table = scene.table("o bigint CHECK (o <> 5)")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        unit.executemany(text(f"INSERT INTO {table} VALUES (%s)"), [(m.offset(),) for m in unit.messages])

    run(scene.consumer(max_messages=20), handler, on_poison="dead-letter")
    assert dead(scene) == [5]
    (letter,) = letters(scene)
    assert letter.sqlstate == "23514"
    assert letter.error_class == "psycopg.errors.CheckViolation"
    assert letter.attempts == 1


def test_deferred_constraint_that_fails_at_commit_is_found(scene: Scene) -> None:
    table = scene.table("o bigint UNIQUE DEFERRABLE INITIALLY DEFERRED")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        rows = [(0 if m.offset() == 12 else m.offset(),) for m in unit.messages]
        unit.executemany(text(f"INSERT INTO {table} VALUES (%s)"), rows)

    run(scene.consumer(max_messages=20), handler, on_poison="dead-letter")
    assert dead(scene) == [12]
    assert scene.applied() == [n for n in range(20) if n != 12]


@pytest.mark.parametrize("on_poison", ["stop", "dead-letter"])
def test_revoked_grant_stops_and_is_no_dead_letter(scene: Scene, on_poison: Any) -> None:
    def refuse(unit: Unit) -> None:
        raise psycopg.errors.InsufficientPrivilege("permission denied for table payment")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run(scene.consumer(), refusing(*range(20), with_=refuse), on_poison=on_poison)
    assert dead(scene) == []
    assert scene.applied() == []


@pytest.mark.parametrize(
    "trouble",
    [
        psycopg.errors.LockNotAvailable,
        psycopg.errors.ReadOnlySqlTransaction,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.AdminShutdown,
        psycopg.errors.DiskFull,
    ],
)
def test_trouble_of_the_server_is_waited_out_and_no_dead_letter(scene: Scene, trouble: type[psycopg.Error]) -> None:
    """Raised by the handler as a framework would: wrapped, with psycopg's error as the cause."""
    left = [1, 2, 3]

    def fail(unit: Unit) -> None:
        if left:
            left.pop()
            raise RuntimeError("the framework says no") from trouble("the server says no")

    run(scene.consumer(), refusing(3, with_=fail), on_poison="dead-letter", dead_letter_limit=DeadLetterLimit())
    assert not left
    assert dead(scene) == []
    scene.assert_exact()


def test_real_lock_timeout_is_waited_out(scene: Scene) -> None:
    table = scene.table("o bigint")
    with psycopg.connect(scene.conninfo) as blocker:
        blocker.execute(text(f"LOCK TABLE {table}"))
        tries = 0

        def handler(unit: Unit) -> None:
            nonlocal tries
            tries += 1
            if tries == 3:
                blocker.rollback()
            unit.execute("SET LOCAL lock_timeout = '50ms'")
            unit.execute(text(f"INSERT INTO {table} VALUES (1)"))
            record(unit, "test")

        run(scene.consumer(), handler, on_poison="dead-letter")
    assert tries > 3
    assert dead(scene) == []
    scene.assert_exact()


def test_swallowed_sql_error_is_never_a_dead_letter(scene: Scene) -> None:
    """It may have been a lock time-out or a revoked grant as well."""

    def swallow(unit: Unit) -> None:
        with contextlib.suppress(psycopg.Error):
            unit.execute("SELECT 1/0")

    with pytest.raises(PoisonMessage, match=r"offset 3: .*swallowed") as caught:
        run(scene.consumer(), refusing(3, with_=swallow), on_poison="dead-letter")
    assert isinstance(caught.value.__cause__, TransactionAborted)
    assert dead(scene) == []
    assert scene.applied() == [0, 1, 2]


def test_handler_that_commits_is_halted_and_no_dead_letter(scene: Scene) -> None:
    def commit(unit: Unit) -> None:
        unit.connection.execute("COMMIT")
        raise ValueError("and fails then")

    with pytest.raises(HandlerCommitted):
        run(scene.consumer(), refusing(3, with_=commit), on_poison="dead-letter")
    assert dead(scene) == []
    assert all(scene.ledger("halted"))


def test_a_message_is_tried_as_often_as_asked(scene: Scene) -> None:
    failures = [1, 2]

    def fail(unit: Unit) -> None:
        if len(unit.messages) == 1 and failures:
            failures.pop()
            raise TimeoutError
        if len(unit.messages) > 1:
            raise TimeoutError

    run(scene.consumer(), refusing(3, with_=fail), on_poison="dead-letter", attempts=3)
    assert not failures
    assert dead(scene) == []
    scene.assert_exact()


@pytest.mark.parametrize(
    "on_poison", ["dead-letter", lambda unit, message, error: unit.dead_letter(message, error)], ids=["named", "called"]
)
def test_too_many_in_a_row_stop_and_the_last_is_not_stored(scene: Scene, on_poison: OnPoison) -> None:
    limit = DeadLetterLimit(in_a_row=4)
    for _ in range(2):  # a restart does not begin to count anew
        consumer = scene.consumer()
        with pytest.raises(TooManyDeadLetters, match=r"offset 9 would be dead letter 5 in a row, 4 are allowed"):
            run(consumer, refusing(*range(5, 15)), on_poison=on_poison, dead_letter_limit=limit)
        consumer.close()
        assert dead(scene) == [5, 6, 7, 8]
        assert scene.ledger("next_offset") == [9]
    assert scene.applied() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seconds", [3600.0, math.inf])
def test_too_many_in_the_window_stop(scene: Scene, seconds: float) -> None:
    consumer, limit = scene.consumer(), DeadLetterLimit(in_window=3, window_seconds=seconds)
    told = rf"offset 8 would be dead letter 4 of group .* within {seconds:g} s"
    with pytest.raises(TooManyDeadLetters, match=told):
        run(consumer, refusing(*range(2, 20, 2)), on_poison="dead-letter", dead_letter_limit=limit)
    assert dead(scene) == [2, 4, 6]
    assert scene.ledger("next_offset") == [8]


def test_callable_decides_in_the_transaction_that_skips(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    table = scene.table("o bigint, why text")

    def aside(unit: Unit, message: Message, error: Exception) -> None:
        unit.execute(text(f"INSERT INTO {table} VALUES (%s, %s)"), (message.offset(), str(error)))

    run(scene.consumer(), refusing(6), on_poison=aside)
    assert scene.query(f"SELECT * FROM {table}") == [(6, "this is no payment")]
    assert dead(scene) == []
    assert scene.ledger("next_offset") == [20]
    assert "was stored as a dead letter" not in caplog.text
    assert f"{scene.topic}[0] offset 6 was skipped by on_poison, without a new dead letter: ValueError" in caplog.text


class ByPayload(Exception):
    """Has the fields of an answer as attributes, and a KeyError for what is not there."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # pytest asks for such
            raise AttributeError(name)
        return {"code": 402}[name]


class ByProperty(Exception):
    @property
    def orig(self) -> NoReturn:
        raise ConnectionError("too late")

    @property
    def topic(self) -> NoReturn:
        raise ConnectionError("too late")


@pytest.mark.parametrize("error", [ByPayload("no payment"), ByProperty("no payment")], ids=repr)
def test_an_error_whose_attributes_cannot_be_read_is_one_all_the_same(scene: Scene, error: Exception) -> None:
    def fail(unit: Unit) -> None:
        raise error

    run(scene.consumer(), refusing(6, with_=fail), on_poison="dead-letter")
    assert [(letter.message_offset, letter.error) for letter in letters(scene)] == [(6, "no payment")]
    assert scene.ledger("next_offset") == [20]


async def _later(unit: Unit, message: Message, error: Exception) -> None:
    unit.dead_letter(message, error)


LAZY: list[Callable[[Unit, Message, Exception], object]] = [
    lambda unit, message, error: _later(unit, message, error),  # noqa: PLW0108 - else it is refused before it is called
    lambda unit, message, error: Future[None](),
    lambda unit, message, error: {"later": Future[None]()},
    lambda unit, message, error: (1, [_later(unit, message, error)]),
    lambda unit, message, error: map(unit.execute, ["SELECT 1"]),
    lambda unit, message, error: (unit.execute("SELECT 1") for _ in range(1)),
]


@pytest.mark.parametrize("aside", LAZY)
def test_a_callable_that_has_no_effects_yet_is_refused(scene: Scene, aside: Any) -> None:
    with pytest.raises(ConfigurationError, match="on_poison returned"):
        run(scene.consumer(), refusing(6), on_poison=aside)
    assert dead(scene) == []
    assert scene.ledger("next_offset") == [6]


def test_a_message_is_one_dead_letter_however_often_it_is_set_aside(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def aside(unit: Unit, message: Message, error: Exception) -> None:
        with contextlib.suppress(ZeroDivisionError), unit.connection.transaction():
            unit.dead_letter(message, "undone")
            raise ZeroDivisionError
        unit.dead_letter(message, error)
        unit.dead_letter(message, "again")

    run(scene.consumer(), refusing(6), on_poison=aside)
    assert [(letter.message_offset, letter.error) for letter in letters(scene)] == [(6, "this is no payment")]
    assert len([record for record in caplog.records if vars(record).get("action") == "dead_already"]) == 1
    assert scene.ledger("next_offset") == [20]


@pytest.mark.parametrize("change", ["value = 'other'", "key = 'other'", "timestamp_ms = 1"])
def test_another_message_at_the_offset_of_a_dead_letter_is_none_the_less_one(scene: Scene, change: str) -> None:
    """As in a log that was cut, and has other messages at its old offsets since."""

    def aside(unit: Unit, message: Message, error: Exception) -> None:
        unit.dead_letter(message, error)
        cut = f"UPDATE exactly_once.dead_letter SET {change} WHERE group_id = %s"
        unit.execute(cut, (unit.work.group_id,))
        unit.dead_letter(message, error)

    run(scene.consumer(), refusing(6), on_poison=aside)
    assert [letter.message_offset for letter in letters(scene)] == [6, 6]


def test_a_replay_that_sets_its_message_aside_again_has_failed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    run(scene.consumer(), refusing(6), on_poison="dead-letter")
    (letter,) = letters(scene)
    replay = Replay(connector(scene.conninfo), schema="exactly_once")
    try:
        with pytest.raises(DeadAgain):
            replay.replay(letter, lambda unit: unit.dead_letter(unit.messages[0], "again"))
        assert [each.error for each in letters(scene)] == ["this is no payment"]
        assert replay.replay(letter, lambda unit: unit.execute("SELECT 1"))
        assert letters(scene) == []
    finally:
        replay.close()
    assert "did not use its unit" not in caplog.text


def test_a_replay_that_does_not_use_its_unit_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    run(scene.consumer(), refusing(6), on_poison="dead-letter")
    (letter,) = letters(scene)
    replay = Replay(connector(scene.conninfo), schema="exactly_once")
    try:
        assert replay.replay(letter, lambda unit: None)
    finally:
        replay.close()
    assert f"did not use its unit for dead letter {letter.id}" in caplog.text


def test_a_replay_whose_key_is_claimed_already_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A handler that claims, and then makes the dead letter itself, has committed the claim with it."""
    can_apply = False

    def handler(unit: Unit) -> None:
        for each, is_first in zip(
            unit.messages, unit.claim_many([m.offset() or 0 for m in unit.messages]), strict=True
        ):
            if is_first and each.offset() == 6 and not can_apply:
                unit.dead_letter(each, "there is no such account yet")
            elif is_first:
                unit.execute("SELECT 1")

    run(scene.consumer(), handler)
    (letter,) = letters(scene)
    can_apply = True
    replay = Replay(connector(scene.conninfo), schema="exactly_once")
    try:
        assert replay.replay(letter, handler)
    finally:
        replay.close()
    assert f"claims for dead letter {letter.id} ({letter.place}) is claimed already" in caplog.text


def test_what_the_callable_raises_stops_and_stores_nothing(scene: Scene) -> None:
    def aside(unit: Unit, message: Message, error: Exception) -> None:
        unit.dead_letter(message, error)
        raise KeyError("no")

    with pytest.raises(KeyError):
        run(scene.consumer(), refusing(6), on_poison=aside)
    assert dead(scene) == []
    assert scene.ledger("next_offset") == [6]


def test_the_whole_message_is_kept(scene: Scene) -> None:
    headers: list[tuple[str, str | bytes | None]] = [("a", b"\xff\x00"), ("a", None), ("ä", b"")]
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers})
    producer.produce(scene.topic, b"\x00\xfe" * 450_000, b"\xff", headers=headers, timestamp=1234567890123)
    producer.produce(scene.topic, None, None)
    producer.produce(scene.topic, b"", b"")
    producer.flush(30)
    met: dict[int, Message] = {}

    def handler(unit: Unit) -> None:
        met.update({message.offset() or 0: message for message in unit.messages})
        raise ValueError("NUL \0, a lone surrogate \udc80, and very long: " + "x" * 20_000)

    run(scene.consumer(), handler, on_poison="dead-letter", dead_letter_limit=DeadLetterLimit(in_a_row=100))
    found = letters(scene)
    assert [letter.message_offset for letter in found] == list(range(23))
    for letter in found:
        again, was = letter.message(), met[letter.message_offset]
        for part in ("topic", "partition", "offset", "key", "value", "headers", "timestamp", "leader_epoch", "error"):
            assert getattr(again, part)() == getattr(was, part)(), part
        assert letter.topic_id
        assert letter.cluster_id
    assert found[0].error.startswith("NUL \\x00, a lone surrogate \\udc80, and")
    assert len(found[0].error) == 10_000


def test_unit_sets_a_message_aside_in_the_loop_form(scene: Scene) -> None:
    for unit in scene.consumer(max_messages=20).units(until_end=True):
        with unit:
            record(unit, "test")
            unit.dead_letter(unit.messages[2], "not now")
    assert dead(scene) == [2]
    (letter,) = letters(scene)
    assert (letter.error, letter.error_class) == ("not now", "str")


def test_dead_letter_of_a_unit_that_fails_is_undone(scene: Scene) -> None:
    unit = next(scene.consumer().units())

    def fail() -> None:
        with unit:
            unit.dead_letter(unit.messages[0], "x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dead(scene) == []


def test_message_of_another_partition_is_no_dead_letter_of_this_unit(scene: Scene) -> None:
    unit = next(scene.consumer().units())
    with pytest.raises(ValueError, match=r"other\[0\] offset 7 does not belong to"), unit:
        unit.dead_letter(Message(topic="other", partition=0, offset=7), "x")
