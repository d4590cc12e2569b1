"""Messages and handlers of the odd kind: each works, or is one clear error, or one dead letter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message, Producer
from psycopg.types.json import Jsonb

from exactly_once import ConfigurationError, HandlerCommitted, PoisonMessage, Unit, WrongThreadOrProcess
from exactly_once.ledger.dead_letters import DeadLetter, find
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, text
from tests.support.topics import produce_header_name
from tests.support.worker import record

BAD = 5
"""The offset of the bad message, among ten good ones."""
Write = Callable[[Unit, Message], object]
Handler = Callable[[Unit], object]


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    """Five messages; the test adds a bad one, and five more."""
    return make_scene(BAD)


def add(scene: Scene, value: bytes | None, headers: list[tuple[str, str | bytes | None]] | None = None) -> None:
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers, "message.max.bytes": 2_000_000})
    producer.produce(scene.topic, value, headers=headers, partition=0)
    for number in range(5):
        producer.produce(scene.topic, str(number), partition=0)
    assert producer.flush(30) == 0


def run(scene: Scene, handler: Handler, **options: Any) -> None:
    with scene.consumer(max_messages=20) as consumer:
        consumer.run(handler, on_poison="dead-letter", until_end=True, **options)


def writing(scene: Scene, type_: str, write: Callable[[Message], object]) -> Handler:
    """A handler that stores something of each message in a column of that type, and has the journal's effects."""
    table = scene.table(f'"offset" bigint, value {type_}')

    def handler(unit: Unit) -> None:
        record(unit, "test")
        rows = [(message.offset(), write(message)) for message in unit.messages]
        unit.executemany(text(f"INSERT INTO {table} VALUES (%s, %s)"), rows)

    return handler


def stored(scene: Scene) -> dict[int, Any]:
    """What is in the table of :func:`writing`."""
    return dict(scene.query(f'SELECT * FROM "{scene.topic}_own"'))


def letters(scene: Scene) -> list[DeadLetter]:
    with psycopg.connect(scene.conninfo) as connection:
        return find(connection, schema="exactly_once", group_id=scene.topic)


def as_text(message: Message) -> str:
    value = message.value()
    assert isinstance(value, bytes)
    return value.decode()


def as_json(message: Message) -> object:
    # Unchecked on the way, as from json.loads: the server is the first to see what is in it.
    return Jsonb(as_text(message), dumps=str)


DEAD: dict[str, tuple[bytes | None, str, Callable[[Message], object], str]] = {
    "NUL in text": (b"a\0b", "text", as_text, "NUL"),
    "NUL in a varchar": (b"\0", "varchar(5)", as_text, "NUL"),
    "too long for its column": (b"x" * 6, "varchar(5)", as_text, "value too long"),
    "NUL in JSON": (rb'{"a": "\u0000"}', "jsonb", as_json, "unsupported Unicode escape sequence"),
    "half a character in JSON": (rb'{"a": "\ud800"}', "jsonb", as_json, "invalid input syntax for type json"),
    "no JSON": (b"{", "jsonb", as_json, "invalid input syntax for type json"),
    "invalid UTF-8": (b"\xff\xfe", "text", as_text, "'utf-8' codec can't decode byte 0xff"),
    "half a character": (b"", "text", lambda m: "\ud800" if m.offset() == BAD else "", "surrogates not allowed"),
    "number out of range": (b"9" * 30, "bigint", as_text, "out of range"),
    "null where text is expected": (None, "text", as_text, "AssertionError"),
}


@pytest.mark.fault("B22", "C12")
@pytest.mark.parametrize("kind", DEAD)
def test_value_that_cannot_be_stored_is_one_dead_letter(scene: Scene, kind: str) -> None:
    value, type_, write, why = DEAD[kind]
    add(scene, value)
    run(scene, writing(scene, type_, write))
    (letter,) = letters(scene)
    assert (letter.message_offset, letter.value) == (BAD, value)
    assert why in f"{letter.error_class}: {letter.error}"
    assert scene.applied() == sorted(stored(scene)) == [n for n in range(11) if n != BAD]
    assert scene.ledger("next_offset") == [11]


GOOD: dict[str, bytes | None] = {
    "900 KB": b"\x00\xff" * 450_000,
    "NUL as bytes": b"a\0b",
    "null": None,
    "empty": b"",
}


@pytest.mark.parametrize("kind", GOOD)
def test_value_that_can_be_stored_is_stored_as_it_is(scene: Scene, kind: str) -> None:
    add(scene, GOOD[kind])
    run(scene, writing(scene, "bytea", lambda message: message.value()))
    assert letters(scene) == []
    assert stored(scene)[BAD] == GOOD[kind]
    scene.assert_exact()


def test_message_above_the_limit_of_bytes_is_a_unit_of_its_own(scene: Scene) -> None:
    add(scene, b"x" * 900_000)
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        record(unit, "test")
        sizes.append(sum(len(message) for message in unit.messages))

    scene.consumer(max_bytes=1000).run(handler, until_end=True)
    assert 900_000 in sizes
    scene.assert_exact()


def test_headers_come_as_they_are(scene: Scene) -> None:
    """Duplicate names in their order, values that are no UTF-8, empty and null ones."""
    headers: list[tuple[str, str | bytes | None]] = [("a", b"1"), ("a", b"\xff\xfe"), ("ä", b""), ("a", None)]
    add(scene, b"5", headers)
    met: dict[int, object] = {}

    def handler(unit: Unit) -> None:
        record(unit, "test")
        met.update({message.offset() or 0: message.headers() for message in unit.messages})

    run(scene, handler)
    assert met[BAD] == headers
    assert met[0] is None
    scene.assert_exact()


# A header whose name is no UTF-8: the client gives none of the headers of that message.


@pytest.fixture
def unreadable(scene: Scene) -> Scene:
    """A scene with such a message among ten others."""
    produce_header_name(scene.bootstrap_servers, scene.topic, b"5", b"caf\xe9")
    scene.produce_values(b"%d" % number for number in range(5))
    return scene


@pytest.mark.fault("C12")
def test_headers_that_cannot_be_read_are_not_noticed_by_who_does_not_ask(unreadable: Scene) -> None:
    """Nor by a second try, with ``run`` and in the loop."""
    seen: list[list[bytes | str | None]] = []

    def handler(unit: Unit) -> None:
        record(unit, "test")
        seen.append([message.value() for message in unit.messages])
        if len(seen) == 1:
            raise psycopg.errors.DeadlockDetected

    run(unreadable, handler)
    assert seen[0] == seen[1]
    assert letters(unreadable) == []
    unreadable.assert_exact()


def test_headers_that_cannot_be_read_are_the_messages_fault_where_they_are_asked_for(unreadable: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        for message in unit.messages:
            message.headers()

    place = rf"{unreadable.topic}\[0\] offset {BAD}"
    asked = pytest.raises(ValueError, match=f"{place}: the name of a header")
    with asked, unreadable.consumer(max_messages=20) as consumer:
        for unit in consumer.units(until_end=True):
            with unit:
                handler(unit)
    with pytest.raises(PoisonMessage, match=place), unreadable.consumer(max_messages=20) as consumer:
        consumer.run(handler, until_end=True)
    run(unreadable, handler)
    (letter,) = letters(unreadable)
    assert (letter.message_offset, letter.value, letter.headers) == (BAD, b"5", None)
    assert letter.error_class.endswith("HeadersUnreadable")
    assert unreadable.applied() == [n for n in range(11) if n != BAD]


def test_a_dead_letter_says_that_its_headers_could_not_be_read(unreadable: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        if any(message.offset() == BAD for message in unit.messages):
            raise ValueError("no" * 10_000)

    run(unreadable, handler)
    (letter,) = letters(unreadable)
    assert (letter.message_offset, letter.value, letter.headers) == (BAD, b"5", None)
    assert letter.error.startswith("nono")
    assert f"stored without its headers: {unreadable.topic}[0] offset {BAD}: the name of a header" in letter.error


# Handlers.


@pytest.mark.parametrize("result", [False, 0, "x", [], pytest.param(object(), id="object")], ids=repr)
def test_what_a_handler_returns_is_nobodys_business(scene: Scene, result: object) -> None:
    def handler(unit: Unit) -> object:
        record(unit, "test")
        return result

    run(scene, handler)
    scene.assert_exact()


def test_a_cursor_that_a_handler_returns_has_had_its_effects(scene: Scene) -> None:
    def handler(unit: Unit) -> object:
        record(unit, "test")
        return unit.execute("SELECT 1")

    run(scene, handler)
    scene.assert_exact()


async def coroutine(unit: Unit) -> None:
    record(unit, "test")


def generator(unit: Unit) -> Iterator[None]:
    record(unit, "test")
    yield


async def async_generator(unit: Unit) -> AsyncIterator[None]:
    record(unit, "test")
    yield


def future(unit: Unit) -> Future[None]:
    """As ``executor.submit`` and ``asyncio.run_coroutine_threadsafe`` return it."""
    return Future()


def mapping(unit: Unit) -> Iterator[None]:
    return map(record, [unit], ["test"])


def repeating(unit: Unit) -> Iterator[None]:
    return itertools.starmap(record, [(unit, "test")])


def futures(unit: Unit) -> list[Future[None]]:
    """As ``[executor.submit(store, message) for message in unit.messages]``."""
    return [Future() for _ in unit.messages]


def coroutines(unit: Unit) -> list[Coroutine[Any, Any, None]]:
    return [coroutine(unit) for _ in unit.messages]


LAZY = [coroutine, generator, async_generator, future, mapping, repeating, futures, coroutines]


@pytest.mark.parametrize("handler", LAZY)
@pytest.mark.parametrize("in_thread", [False, True])
def test_handler_that_has_not_run_yet_is_an_error_and_applies_nothing(
    scene: Scene, handler: Handler, *, in_thread: bool
) -> None:
    """Nobody awaits it: every message would be skipped."""
    with pytest.raises(ConfigurationError, match="write it with def"):
        run(scene, handler, in_thread=in_thread)
    assert scene.applied() == []
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_endless_recursion_is_one_dead_letter(scene: Scene) -> None:
    def recurse(depth: int) -> int:
        return recurse(depth + 1) + 1

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if any(message.offset() == BAD for message in unit.messages):
            recurse(0)

    add(scene, b"5")
    run(scene, handler)
    (letter,) = letters(scene)
    assert (letter.message_offset, letter.error_class) == (BAD, "builtins.RecursionError")
    assert scene.applied() == [n for n in range(11) if n != BAD]


@pytest.mark.parametrize("in_thread", [False, True])
def test_exit_in_a_handler_ends_the_service_and_stores_nothing(scene: Scene, *, in_thread: bool) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        sys.exit(3)

    with pytest.raises(SystemExit) as left:
        run(scene, handler, in_thread=in_thread)
    assert left.value.code == 3
    assert (scene.applied(), letters(scene)) == ([], [])
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_commit_in_a_handler_is_one_clear_error(scene: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        unit.execute("COMMIT")

    with pytest.raises(HandlerCommitted, match="Take COMMIT"):
        run(scene, handler)
    assert letters(scene) == []
    assert scene.applied() == list(range(BAD))


def test_handler_may_start_programs(scene: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=30)

    run(scene, handler)
    scene.assert_exact()


def fork() -> int:
    """Fork; where other threads run, later Pythons warn of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_handler_may_fork_what_ends_by_itself(scene: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        if (child := fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    run(scene, handler)
    scene.assert_exact()


def test_a_unit_is_refused_to_what_the_handler_forks(scene: Scene) -> None:
    """Both would write to one socket: answers get mixed up, and some hang."""
    consumer = scene.consumer()
    with next(iter(consumer)) as unit:
        uses: list[Callable[[], object]] = [
            lambda: unit.execute("SELECT 1"),
            lambda: unit.defer("SELECT 1"),
            lambda: unit.connection,
            partial(unit.connection.execute, "SELECT 1"),
        ]
        for use in uses:
            if (child := fork()) == 0:
                try:
                    use()
                except WrongThreadOrProcess:
                    os._exit(7)
                finally:  # whatever it was
                    os._exit(8)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        record(unit, "test")
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.parametrize(
    ("leave", "told"),
    [(lambda: None, "left by its child"), (lambda: sys.exit(3), "SystemExit: 3"), (lambda: int("x"), "ValueError")],
    ids=["returns", "exits", "fails"],
)
def test_forked_child_that_comes_back_neither_commits_nor_disturbs(
    scene: Scene, leave: Callable[[], object], told: str
) -> None:
    """It has the same connection: a COMMIT of the child would be a second one of the parent's unit."""
    parent = os.getpid()
    reader, writer = os.pipe()

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if (child := fork()) == 0:
            leave()
            return
        os.waitpid(child, 0)

    try:
        run(scene, handler)
    except BaseException as error:
        if os.getpid() != parent:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        raise
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert told in os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    scene.assert_exact()
