"""The unit of work as a user meets it: what it promises while the database is well."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once import ConfigurationError, Redelivered, Unit, UnitNotFinished, UnitTooSlow
from exactly_once.embedded.proxy import Fault
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, apply_until_done, collect, offsets
from tests.support import journal
from tests.support.topics import produce
from tests.support.waiting import until
from tests.support.worker import record


def test_leaving_the_block_commits_effects_and_offset_together(scene: Scene) -> None:
    units = iter(scene.consumer())
    with next(units) as unit:
        record(unit, "test")
        assert scene.applied() == []
        assert scene.ledger("next_offset") == [0]
    assert scene.applied() == offsets(unit)
    assert scene.ledger("next_offset") == [offsets(unit)[-1] + 1]


def test_an_exception_undoes_the_unit_propagates_itself_and_the_same_messages_come_again(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    mistake = KeyError("the handler's own")
    first = next(units)
    with pytest.raises(KeyError) as raised, first:
        record(first, "test")
        raise mistake
    assert raised.value is mistake
    assert raised.value.__cause__ is None
    assert scene.applied() == []
    again = next(units)
    assert (first.attempt, again.attempt) == (1, 2)
    assert offsets(again) == offsets(first)
    apply(again)
    following = next(units)
    assert (following.attempt, offsets(following)[0]) == (1, offsets(first)[-1] + 1)
    apply(following)
    scene.drain(consumer)
    scene.assert_exact()


def test_attempts_count_on_until_the_messages_took_effect(scene: Scene) -> None:
    units = iter(scene.consumer())
    for attempt in (1, 2, 3, 4):
        unit = next(units)
        assert unit.attempt == attempt
        with pytest.raises(ValueError, match="again"), unit:
            raise ValueError("again")


@pytest.mark.parametrize("attempts", [1, 3])
def test_except_redelivered_continue_is_a_correct_loop(make_scene: MakeScene, attempts: int) -> None:
    """Under cuts at BEGIN, in the handler and around COMMIT, also when the next attempt meets the next cut."""
    scene = make_scene(200, partitions=3)
    consumer = scene.consumer(max_messages=7)
    proxy = scene.proxy
    arm: list[Callable[[], Fault]] = [
        proxy.cut_before,
        proxy.cut_after,
        lambda: proxy.cut_before("^BEGIN ISOLATION.*xact_id"),
        lambda: proxy.cut_after("^BEGIN ISOLATION.*xact_id"),
        lambda: proxy.cut_before("journal.counter"),
        lambda: proxy.cut_after("journal.counter"),
        lambda: proxy.cut_after("pg_xact_status"),
        proxy.cut_before,
    ]
    faults = []

    def handler(unit: Unit) -> None:
        if arm and unit.attempt <= attempts:
            faults.append(arm.pop(0)())

    survived = apply_until_done(consumer, handler)
    assert len(faults) == 8
    assert len(survived) >= 4
    scene.assert_exact()


def test_asking_for_the_next_unit_before_the_last_was_entered_raises(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(UnitNotFinished, match="not entered"):
        next(units)
    apply(unit)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_unit_that_nobody_has_any_more_is_told_of_once_and_comes_again(scene: Scene) -> None:
    """An error between the loop and the block, such as that of a transaction that cannot begin, has lost it."""
    consumer = scene.consumer()
    units = iter(consumer)
    lost = next(units)
    with pytest.raises(UnitNotFinished, match="iterate on, and its messages come again"):
        next(units)
    again = next(units)
    assert (offsets(again), again.attempt) == (offsets(lost), lost.attempt + 1)
    with pytest.raises(UnitNotFinished, match="entered before"), lost:
        pytest.fail("entered though its messages are in another unit")
    apply(again)
    scene.drain(consumer)
    scene.assert_exact()


def test_asking_for_the_next_unit_inside_the_last_raises_and_undoes_it(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    with pytest.raises(UnitNotFinished, match="open"), next(units) as unit:
        record(unit, "test")
        next(units)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_unit_cannot_be_entered_twice_and_the_first_time_stands(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    apply(unit)
    with pytest.raises(UnitNotFinished, match="entered before"), unit:
        pytest.fail("entered twice")
    scene.drain(consumer)
    scene.assert_exact()


def test_entering_a_unit_inside_itself_raises_and_undoes_it(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(UnitNotFinished, match="entered before"), unit:
        record(unit, "test")
        unit.__enter__()
    scene.drain(consumer)
    scene.assert_exact()


def test_a_unit_left_by_break_before_it_was_entered_goes_to_the_next_consumer(scene: Scene) -> None:
    consumer = scene.consumer()
    for _ in consumer:
        break
    consumer.close()
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_a_unit_is_of_use_only_inside_its_block(scene: Scene) -> None:
    unit = next(iter(scene.consumer()))
    for use in (lambda: unit.connection, lambda: unit.execute("SELECT 1"), lambda: unit.executemany("SELECT 1", [])):
        with pytest.raises(UnitNotFinished, match="not open"):
            use()
    apply(unit)
    with pytest.raises(UnitNotFinished, match="not open"):
        unit.copy("t", ["a"], [])


def test_closing_the_consumer_inside_a_unit_undoes_it_and_opens_nothing_anew(scene: Scene) -> None:
    consumer = scene.consumer()
    with pytest.raises(Redelivered), next(iter(consumer)) as unit:
        record(unit, "test")
        consumer.close()
    assert scene.applied() == []
    assert consumer._session._connection is None
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_max_messages_bounds_a_unit(scene: Scene) -> None:
    sizes = [len(offsets(unit)) for unit in collect(scene.consumer(max_messages=3))]
    assert max(sizes) == 3
    assert sum(sizes) == 20


def test_max_bytes_bounds_a_unit_and_a_larger_message_comes_alone(make_scene: MakeScene) -> None:
    scene = make_scene(6)
    scene.produce_values([b"x" * 5000, b"y", b"z" * 5000, b"a" * 40, b"b" * 40, b"c" * 40])
    found = [[len(m.value() or b"") for m in unit.messages] for unit in collect(scene.consumer(max_bytes=100))]
    assert [size for sizes in found for size in sizes] == [1] * 6 + [5000, 1, 5000, 40, 40, 40]
    assert all(sum(sizes) <= 100 or len(sizes) == 1 for sizes in found)
    assert [40, 40] in found or [40] in found
    scene.assert_exact()


def test_keys_weigh_as_values_do(make_scene: MakeScene) -> None:
    """A topic of tombstones has nothing else."""
    scene = make_scene(0)
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers})
    for number in range(12):
        producer.produce(scene.topic, None, key=f"{number:040}", partition=0)
    assert producer.flush(30) == 0
    sizes = [len(unit.messages) for unit in collect(scene.consumer(max_bytes=100))]
    assert sum(sizes) == 12
    assert max(sizes) == 2
    scene.assert_exact()


def test_a_batch_of_several_partitions_is_one_transaction(make_scene: MakeScene) -> None:
    scene = make_scene(30, partitions=3)
    consumer = scene.consumer(max_messages=30)
    units = iter(consumer)
    produced = 30

    def spans_three() -> bool:
        # What was produced while nobody polled comes together, sooner or later.
        nonlocal produced
        produce(scene.bootstrap_servers, scene.topic, 30, 3, start=produced)
        produced += 30
        return _spans(next(units), 3)

    until(spans_three, 20, "a unit of three partitions")
    transactions: dict[int, set[int]] = {}
    for entry in journal.entries(scene.conninfo, scene.topic):
        transactions.setdefault(entry.xid, set()).add(entry.partition)
    assert {0, 1, 2} in transactions.values()
    scene.drain(consumer)
    scene.assert_exact()


def _spans(unit: Unit, partitions: int) -> bool:
    apply(unit)
    return len({message.partition() for message in unit.messages}) == partitions


def test_messages_are_a_sequence_without_error_events(scene: Scene) -> None:
    """The end of a partition is an error event to librdkafka; it is asked for by the library itself."""
    consumer = scene.consumer()
    seen = collect(consumer)
    produce(scene.bootstrap_servers, scene.topic, 5, 1, start=20)
    seen += collect(consumer)
    for unit in seen:
        assert isinstance(unit.messages, Sequence)
        assert all(message.error() is None for message in unit.messages)
        assert len(unit.messages) == len(list(unit.messages)) > 0
    scene.assert_exact()


def test_execute_executemany_and_copy_run_in_the_transaction(scene: Scene) -> None:
    with next(iter(scene.consumer())) as unit:
        (before,) = unit.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() or (None,)
        entries = [journal.entry(message, "test") for message in unit.messages]
        unit.execute(journal.APPEND, entries[0])
        unit.executemany(journal.APPEND, entries[1:2])
        unit.copy("journal.entries", ["topic", "partition", "offset", "value", "worker"], entries[2:])
    assert {entry.xid for entry in journal.entries(scene.conninfo, scene.topic)} == {before}
    assert scene.applied() == offsets(unit)


def test_rows_that_fail_while_they_are_made_cost_copy_no_connection(scene: Scene) -> None:
    unit = next(iter(scene.consumer()))
    with unit:
        with pytest.raises(ZeroDivisionError):
            unit.copy("journal.entries", ["topic"], ((1 / 0,) for _ in range(3)))
        record(unit, "test")
    assert scene.applied() == offsets(unit)


def test_a_savepoint_undoes_a_part_of_a_unit(scene: Scene) -> None:
    with next(iter(scene.consumer())) as unit:
        record(unit, "test")
        with pytest.raises(psycopg.errors.DivisionByZero), unit.connection.transaction():
            record(unit, "undone")
            unit.execute("SELECT 1 / 0")
    assert {e.worker for e in journal.entries(scene.conninfo, scene.topic)} == {"test"}
    assert scene.applied() == offsets(unit)


def test_a_slow_unit_commits_and_the_next_is_halved(make_scene: MakeScene) -> None:
    scene = make_scene(64)
    consumer = scene.consumer(max_messages=16, max_unit_seconds=0.2)
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        sizes.append(len(unit.messages))
        if sizes[-1] == 16:
            unit.execute("SELECT pg_sleep(0.3)")

    assert apply_until_done(consumer, handler) == []
    assert 16 in sizes
    assert sizes[sizes.index(16) + 1] <= 8
    scene.assert_exact()


def test_a_run_in_a_thread_bounds_nothing_and_leaves_no_trace_in_what_follows(make_scene: MakeScene) -> None:
    """Kafka does not wait for its handler; for the one of a later loop it does."""
    scene = make_scene(64)
    consumer = scene.consumer(max_messages=16, max_unit_seconds=0.2)
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        sizes.append(len(unit.messages))
        unit.execute("SELECT pg_sleep(0.3)")
        if len(sizes) == 2:
            consumer.stop()

    consumer.run(handler, in_thread=True)
    assert consumer._commits.limit == 16
    consumer._stopping.is_set = False
    with pytest.raises(ConfigurationError):
        consumer.run(handler, in_thread=True, attempts=0)
    apply_until_done(consumer, lambda unit: unit.execute("SELECT pg_sleep(0.3)"))
    assert consumer._commits.limit < 16


def test_a_unit_lost_to_a_statement_timeout_is_halved_until_one_message_is_too_slow(make_scene: MakeScene) -> None:
    scene = make_scene(40)
    consumer = scene.consumer(max_messages=16)
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        sizes.append(len(unit.messages))
        if 7 in offsets(unit):
            unit.execute("SET LOCAL statement_timeout = '50ms'")
            unit.execute("SELECT pg_sleep(30)")

    with pytest.raises(UnitTooSlow) as raised:
        apply_until_done(consumer, handler)
    assert isinstance(raised.value.__cause__, psycopg.errors.QueryCanceled)
    assert scene.applied() == list(range(7))
    assert sizes[-1] == 1
    assert all(size <= 16 for size in sizes)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_unit_lost_to_the_idle_timeout_is_halved_too(make_scene: MakeScene) -> None:
    """Nothing tells the client before it sends COMMIT, so the outcome must be resolved first."""
    scene = make_scene(40)
    consumer = scene.consumer(max_messages=16)
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        sizes.append(len(unit.messages))
        if len(unit.messages) > 4:
            unit.execute("SET LOCAL idle_in_transaction_session_timeout = '50ms'")
            pid = unit.connection.info.backend_pid
            until(lambda: scene.query(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}") == [(0,)], 10, "end")

    assert apply_until_done(consumer, handler)
    assert all(later <= max(1, earlier // 2) for earlier, later in pairwise(sizes) if earlier > 4)
    scene.assert_exact()
