"""Ending: stop, signals, deadlines, forks, threads, close; and what is left behind in ledger and Kafka."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from exactly_once import ConfigurationError, ExactlyOnceConsumer, Unit, UnitNotFinished, WrongThreadOrProcess
from exactly_once.embedded.proxy import PostgresProxy
from tests.conftest import MakeConsumer
from tests.integration.scene import Scene
from tests.support import journal
from tests.support.interrupts import Interrupt, Interrupter
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import FAILED, ROOT, Crew, drain, ensure_journal, record

PARTITIONS = 2
MESSAGES = 200

Db = psycopg.Connection[Any]


@pytest.fixture
def topic(bootstrap_servers: str, conninfo: str) -> str:
    """A topic with messages."""
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.fixture
def crew(bootstrap_servers: str, conninfo: str, name: str, topic: str) -> Iterator[Crew]:
    """Workers on the topic."""
    with Crew(bootstrap_servers, conninfo, name, [topic]) as crew:
        yield crew


def members(bootstrap_servers: str, group: str) -> int:
    """How many members Kafka counts."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    return len(admin.describe_consumer_groups([group])[group].result(60).members)


def committed(bootstrap_servers: str, group: str, topic: str) -> list[int]:
    """What Kafka holds for the group, by partition."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    offsets = consumer.committed([TopicPartition(topic, number) for number in range(PARTITIONS)], timeout=60)
    consumer.close()
    return [tp.offset for tp in offsets]


def ledger(db: Db, group: str) -> list[tuple[int, bool]]:
    """What the ledger holds, by partition: the offset, and whether somebody owns it."""
    query = (
        "SELECT next_offset, owner_token IS NOT NULL FROM exactly_once.ledger WHERE group_id = %s ORDER BY partition"
    )
    return [(offset, owned) for offset, owned in db.execute(query, (group,))]


def test_stop_from_another_thread_ends_the_iteration_after_the_unit(make_consumer: MakeConsumer, topic: str) -> None:
    with make_consumer(max_messages=10) as consumer:
        consumer.subscribe([topic])
        done = 0
        for unit in consumer:
            with unit:
                stopping = threading.Thread(target=consumer.stop)
                stopping.start()
                stopping.join()
            done += 1
        assert done == 1
        assert consumer.counters.committed == 1


def test_stop_while_nothing_comes_ends_the_iteration(make_consumer: MakeConsumer, topic: str) -> None:
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        drain(consumer)
        threading.Timer(0.5, consumer.stop).start()
        assert list(consumer) == []


def test_stop_while_the_database_is_away_ends_the_iteration(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, conninfo: str
) -> None:
    with PostgresProxy(conninfo) as proxy, make_consumer(conninfo=proxy.conninfo) as consumer:
        consumer.subscribe([topic])
        drain(consumer)
        proxy.refuse()
        produce(bootstrap_servers, topic, 10, PARTITIONS)
        began = time.monotonic()
        threading.Timer(1, consumer.stop).start()
        consumer.run(lambda unit: unit.execute("SELECT 1"))
        assert 0.9 < time.monotonic() - began < 60
        proxy.heal()


@pytest.mark.fault("D7")
def test_sigterm_lets_the_unit_finish_then_releases_and_leaves(
    crew: Crew, bootstrap_servers: str, db: Db, name: str, topic: str
) -> None:
    worker = crew.start(mode="run", handler_seconds=1.5, options={"max_messages": 20})
    worker.wait("handling")
    worker.term()
    counters = worker.finish()
    assert counters["committed"] == 1
    assert sum(offset for offset, _ in ledger(db, name)) == counters["messages"] == 20
    assert not any(owned for _, owned in ledger(db, name)), "the rows were not released"
    assert members(bootstrap_servers, name) == 0, "it did not leave the group"
    assert sum(max(0, offset) for offset in committed(bootstrap_servers, name, topic)) == 20


def test_handler_that_outlasts_stop_seconds_is_rolled_back(crew: Crew, db: Db, name: str) -> None:
    worker = crew.start(mode="run", handler_seconds=60, stop_seconds=1)
    worker.wait("handling")
    began = time.monotonic()
    worker.term()
    assert worker.wait_exit(50) == 128 + signal.SIGTERM
    assert 0.9 < time.monotonic() - began < 50
    assert [offset for offset, _ in ledger(db, name)] == [0, 0]
    crew.start(until_end=True).finish()
    crew.assert_exact()


def test_second_signal_ends_the_unit_at_once(crew: Crew, db: Db, name: str) -> None:
    worker = crew.start(mode="run", handler_seconds=60, stop_seconds=50)
    worker.wait("handling")
    worker.term()
    # Signals that are pending together are one: wait until the first was taken.
    until(lambda: "stopping after the unit" in worker.story(), 10, "the first signal to be handled")
    began = time.monotonic()
    worker.term()
    assert worker.wait_exit(50) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50
    assert ledger(db, name) == [(0, False), (0, False)]


def test_run_tries_again_what_the_environment_spoils(crew: Crew, conninfo: str) -> None:
    """The connection is lost in the middle of it, before COMMIT and after, and the database goes away."""
    with PostgresProxy(conninfo) as proxy:
        faults = [proxy.cut_before("journal.entries"), proxy.cut_before(), proxy.cut_after()]
        worker = crew.start(mode="run", conninfo=proxy.conninfo, options={"max_messages": 20})
        for fault in faults:
            fault.wait()
        proxy.refuse()
        proxy.heal()
        crew.until_applied(MESSAGES)
        crew.end_well(worker)
    crew.assert_exact()


def test_failing_worker_says_so_by_its_status(crew: Crew) -> None:
    worker = crew.start(failpoint=["handled", "raise", 2], options={"max_messages": 20})
    assert worker.wait_exit() == FAILED
    assert worker.wait("failed")["error"] == "RuntimeError"
    crew.start(until_end=True).finish()
    crew.assert_exact()


@pytest.mark.fault("D6")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn, and this is the test of it
def test_use_in_a_forked_child_is_refused(make_consumer: MakeConsumer, topic: str) -> None:
    """And leaving the `with` block there takes nothing away from the parent."""
    consumer = make_consumer()
    consumer.subscribe([topic])
    drain(consumer)

    def use(answers: Any) -> None:
        try:
            next(iter(consumer))
        except WrongThreadOrProcess as error:
            answers.put(str(error))
        consumer.close()

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=use, args=[answers])
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "another process" in answers.get()
    assert drain(consumer) == 0
    consumer.close()


PARENT = """
import gc, os, sys, time
from exactly_once import ExactlyOnceConsumer

servers, conninfo, topic = sys.argv[1:]
consumer = ExactlyOnceConsumer({"bootstrap.servers": servers, "group.id": topic}, conninfo=conninfo, start="earliest")
consumer.subscribe([topic])
for unit in consumer.units(until_end=True):
    with unit:
        pass
children = []
for _ in range(5):
    if (child := os.fork()) == 0:
        del unit, consumer
        gc.collect()
        sys.exit(0)
    children.append(child)
ends = []
deadline = time.monotonic() + 60
while len(ends) < len(children) and time.monotonic() < deadline:
    ended, status = os.waitpid(children[len(ends)], os.WNOHANG)
    if ended:
        ends.append(os.waitstatus_to_exitcode(status))
    else:
        time.sleep(0.05)
for child in children[len(ends):]:
    os.kill(child, 9)
consumer.close()
print(ends)
"""


def test_children_that_end_leave_the_client_to_their_parent(bootstrap_servers: str, conninfo: str, topic: str) -> None:
    """The client cannot be freed where its threads are not: the child crashed, or hung, in the garbage collector."""
    command = [sys.executable, "-W", "ignore", "-c", PARENT, bootstrap_servers, conninfo, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "[0, 0, 0, 0, 0]\n"), done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_the_handler_forked_ends_at_the_first_signal(make_consumer: MakeConsumer, topic: str) -> None:
    """As the workers of a pool are ended: `run` stops on a signal in its own process only."""
    context = multiprocessing.get_context("fork")
    ends: list[int | None] = []
    process = os.getpid()

    def wait(ready: Any) -> None:
        ready.put("ready")
        time.sleep(60)

    def handle(unit: Unit) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            ready = context.SimpleQueue()  # Python drops a signal that comes while it forks
            child = context.Process(target=wait, args=[ready])
            child.start()
            assert child.pid is not None
            ready.get()
            os.kill(child.pid, number)
            child.join(60)
            ends.append(child.exitcode)
        record(unit, "test")
        assert os.getpid() == process

    with make_consumer(max_messages=MESSAGES) as consumer:
        consumer.subscribe([topic])
        consumer.run(handle, until_end=True)
    assert set(ends[::2]) == {-signal.SIGTERM}
    assert set(ends[1::2]) == {1}  # KeyboardInterrupt


@pytest.mark.fault("D3")
def test_use_from_another_thread_is_refused(make_consumer: MakeConsumer, topic: str) -> None:
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        errors: list[BaseException] = []

        def use() -> None:
            try:
                next(iter(consumer))
            except WrongThreadOrProcess as error:
                errors.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(60)
        assert "thread" in str(errors[0])
        assert drain(consumer) == MESSAGES


def test_closing_from_another_thread_is_refused_and_undoes_nothing(
    make_consumer: MakeConsumer, topic: str, conninfo: str, bootstrap_servers: str
) -> None:
    """The unit that is open goes on; a consumer whose thread has ended may be closed by whoever is left."""
    errors: list[WrongThreadOrProcess] = []

    def close() -> None:
        try:
            consumer.close()
        except WrongThreadOrProcess as error:
            errors.append(error)

    def work() -> None:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                record(unit, "test")
                closing = threading.Thread(target=close)
                closing.start()
                closing.join(60)

    consumer = make_consumer()
    owner = threading.Thread(target=work, name="owner")
    owner.start()
    owner.join(120)
    assert errors
    assert "'owner'" in str(errors[0])
    assert "stop()" in str(errors[0])
    assert consumer.counters.messages == MESSAGES
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
    consumer.close()
    assert consumer.health().reasons == ("it is stopping or has ended",)


def test_close_is_idempotent_and_final(make_consumer: MakeConsumer, topic: str) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    drain(consumer)
    consumer.close()
    consumer.close()
    with pytest.raises(ConfigurationError, match="closed"):
        next(iter(consumer))
    with pytest.raises(ConfigurationError, match="closed"):
        consumer.subscribe([topic])


def test_a_handler_that_closes_the_consumer_is_told_and_stores_nothing(
    make_consumer: MakeConsumer, topic: str, db: Db, name: str
) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])

    def handle(unit: Unit) -> None:
        record(unit, "test")
        consumer.close()

    with pytest.raises(ConfigurationError, match="this consumer is closed"):
        consumer.run(handle)
    assert {offset for offset, _ in ledger(db, name)} == {0}
    with make_consumer() as again:
        again.subscribe([topic])
        assert drain(again) == MESSAGES


@pytest.mark.parametrize("lines", [4, 10, 40, 90])
def test_closing_again_does_what_an_interrupt_has_left(
    lines: int, make_consumer: MakeConsumer, topic: str, bootstrap_servers: str, name: str
) -> None:
    """Else the member would stay in its group for as long as the process lives, and so keep its partitions."""
    consumer = make_consumer()
    consumer.subscribe([topic])
    drain(consumer)
    with pytest.raises(Interrupt), Interrupter().after(lines):
        consumer.close()
    consumer.close()
    assert members(bootstrap_servers, name) == 0


def test_closing_a_consumer_that_never_subscribed_is_quick(
    make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_GOODBYE_SECONDS", "CLOSE_SECONDS"):  # so that who waits is told from a busy machine
        monkeypatch.setattr(f"exactly_once.consumer.consumer.{limit}", 100.0)
    began = time.monotonic()
    make_consumer().close()
    assert time.monotonic() - began < 50


def test_leaving_the_block_never_masks_the_exception(make_consumer: MakeConsumer, topic: str, conninfo: str) -> None:
    """Not even when closing fails, because the database is gone."""
    with PostgresProxy(conninfo) as proxy:

        def leave() -> None:
            with make_consumer(conninfo=proxy.conninfo) as consumer:
                consumer.subscribe([topic])
                for unit in consumer:
                    with unit:
                        unit.execute("SELECT 1")
                    proxy.refuse()
                    raise LookupError("the caller's own")

        with pytest.raises(LookupError, match="own"):
            leave()


def test_after_close_kafka_has_what_the_ledger_has(
    *, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, name: str, protocol: dict[str, Any]
) -> None:
    """For the lag dashboards; also when the unit before last was mirrored a moment ago."""
    with make_consumer(protocol, max_messages=30) as consumer:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                pass
            if consumer.counters.messages > MESSAGES * 3 // 4:
                break
    offsets = [offset for offset, _ in ledger(db, name)]
    assert committed(bootstrap_servers, name, topic) == offsets
    assert sum(offsets) == consumer.counters.messages


def test_kafka_gets_the_offsets_of_an_owner_that_could_not_mirror_them(
    *, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, name: str, protocol: dict[str, Any]
) -> None:
    """Also where nothing is left to apply: who goes back to an old consumer would apply all of it again."""
    for _ in range(2):
        with make_consumer(protocol) as consumer:
            consumer.subscribe([topic])
            drain(consumer)
        offsets = [offset for offset, _ in ledger(db, name)]
        assert committed(bootstrap_servers, name, topic) == offsets
        assert sum(offsets) == MESSAGES
        # As if it had been killed behind its last COMMIT.
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        until(lambda: members(bootstrap_servers, name) == 0, 60, "all members have left")
        admin.delete_consumer_groups([name])[name].result(60)


def test_break_leaves_the_next_unit_undone(make_consumer: MakeConsumer, topic: str, db: Db, name: str) -> None:
    with make_consumer(max_messages=10) as consumer:
        consumer.subscribe([topic])
        for _ in consumer:
            break
    assert sum(offset for offset, _ in ledger(db, name)) == 0
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == MESSAGES


def test_subscribing_inside_of_a_unit_is_refused(scene: Scene) -> None:
    """It would end the unit's transaction, which was told of as a ROLLBACK of the handler."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        record(unit, "test")
        with pytest.raises(UnitNotFinished, match=r"subscribe\(\) inside of <Unit open"):
            consumer.subscribe([scene.topic])
    consumer.subscribe([scene.topic])
    scene.drain(consumer)
    scene.assert_exact()


def test_units_before_subscribe_are_refused(make_consumer: MakeConsumer) -> None:
    consumer: ExactlyOnceConsumer = make_consumer()
    with pytest.raises(ConfigurationError, match="subscribe"):
        consumer.units()


@pytest.mark.parametrize("end", [{"until_end": True}, {"idle_seconds": 30.0}])
def test_a_signal_before_the_end_that_was_asked_for_is_no_success(
    topic: str, make_consumer: MakeConsumer, end: dict[str, Any]
) -> None:
    with make_consumer(max_messages=5) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(SystemExit) as ended:
            consumer.run(lambda _: signal.raise_signal(signal.SIGTERM), **end)
    assert ended.value.code == 128 + signal.SIGTERM


def test_run_tells_whether_the_end_was_reached(topic: str, make_consumer: MakeConsumer) -> None:
    def stop(_: Unit) -> None:
        consumer.stop()

    def stop_in_the_last(unit: Unit) -> None:
        applied = sum(s.next_offset for s in consumer._ownership.states.values())
        if applied + len(unit.messages) == MESSAGES:
            signal.raise_signal(signal.SIGTERM)

    with make_consumer(max_messages=5) as consumer:
        consumer.subscribe([topic])
        assert not consumer.run(stop, until_end=True)
    with make_consumer(max_messages=5) as consumer:
        consumer.subscribe([topic])
        assert consumer.run(stop_in_the_last, until_end=True)
        assert consumer.counters.messages == MESSAGES - 5
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert consumer.run(lambda _: None, until_end=True)
