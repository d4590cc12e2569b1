"""Every metric of the table, scraped over HTTP from a real consumer, shows what really happened."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition

from exactly_once import ExactlyOnceConsumer, Fenced, LedgerRewound, LedgerRowMissing, Redelivered, Unit
from exactly_once.metrics import table as m
from exactly_once.metrics.prometheus import PrometheusMetrics
from exactly_once.metrics.table import METRICS, Metric, Read
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, armed
from tests.observe.conftest import Run, Scrape
from tests.observe.looking import fields
from tests.support.topics import create_topic, produce, until_end
from tests.support.waiting import until
from tests.support.worker import record

Look = Callable[[ExactlyOnceConsumer], Scrape]


def interfere(scene: Scene, change: str) -> None:
    """Change the group's rows as somebody else would."""
    scene.query(f"UPDATE exactly_once.ledger SET {change} WHERE group_id = %s RETURNING 1")


def lag(page: Scrape, **labels: str) -> float:
    """Return the lag of the one partition with these labels, once Kafka answers: until then there is none."""
    (value,) = until(lambda: page().values(m.LAG, **labels), 60, "a lag")
    return value


def test_a_quiet_run_shows_what_was_committed(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    consumer = scene.consumer(metrics=metrics, name="worker-1")
    page = look(consumer)
    labels = {"group": scene.topic, "owner": "worker-1"}
    assert page().value(m.UNITS, **labels) == 0
    units = left = 0
    for unit in consumer.units(until_end=True):
        units += 1
        with unit:
            record(unit, "test")
            time.sleep(0.06)  # what a unit lasts is what is measured here
        left = 19 - (unit.messages[-1].offset() or 0)
        assert lag(page, **labels, topic=scene.topic, partition="0") == left
    assert left == 0
    found = page()
    assert found.value(m.UNITS, **labels) == units
    assert found.value(m.MESSAGES, **labels) == 20
    assert found.value(m.UNIT_SECONDS, "_count", **labels) == units
    assert found.value(m.UNIT_SECONDS, "_bucket", **labels, le="0.05") == 0
    assert units * 0.06 <= found.value(m.UNIT_SECONDS, "_sum", **labels) < units * 60
    assert found.value(m.COMMIT_SECONDS, "_count", **labels) == units
    assert 0 < found.value(m.COMMIT_SECONDS, "_sum", **labels) < found.value(m.UNIT_SECONDS, "_sum", **labels)
    assert (found.value(m.OWNED, **labels), found.value(m.WAITING, **labels)) == (1, 0)
    for metric in (m.REDELIVERED, m.FENCED, m.REWOUND, m.MISSING, m.DEAD_LETTERS, m.GAPS):
        assert found.value(metric, **labels) == 0
    assert found.values(m.DROPPED) == [0, 0]
    assert found.values(m.UNKNOWN_COMMITS) == [0, 0, 0]


def test_every_metric_of_the_table_is_on_the_page(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    apply(next(iter(consumer)))
    apply(next(iter(consumer)))
    names = {metric.name + ("_count" if metric.kind == "histogram" else "") for metric in METRICS}
    # The lag is left out where Kafka does not answer at once.
    until(lambda: names <= {sample.name for sample in page().samples}, 60, "every metric")


def test_lag_follows_the_log_while_the_handler_works(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    """Nothing is polled meanwhile, and the log grows."""
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    with next(iter(consumer)) as unit:
        record(unit, "test")
        produce(scene.bootstrap_servers, scene.topic, 7, 1, start=20)
        assert lag(page) == 27
    assert lag(page) == 27 - len(unit.messages)


def test_lag_is_told_of_each_partition_that_is_owned(
    make_scene: MakeScene, metrics: PrometheusMetrics, look: Look
) -> None:
    scene = make_scene(30, partitions=3)
    produce(scene.bootstrap_servers, scene.topic, 5, 1, start=30)
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    next(iter(consumer))
    lags = {number: lag(page, topic=scene.topic, partition=number) for number in "012"}
    assert lags == {"0": 15, "1": 10, "2": 10}


def test_transactions_leave_gaps_and_no_lag_at_their_end(
    bootstrap_servers: str, scene: Scene, metrics: PrometheusMetrics, look: Look
) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": scene.topic})
    producer.init_transactions(60)
    for _ in range(3):
        producer.begin_transaction()
        producer.produce(scene.topic, b"0", partition=0)
        producer.commit_transaction(60)
    until_end(bootstrap_servers, scene.topic, 26)
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    scene.drain(consumer)
    assert page().value(m.MESSAGES) == 23
    assert page().value(m.GAPS) == 2, "one marker between each two of the three transactions"
    assert lag(page) == 0, "the last marker is no message that waits"


def test_messages_that_come_again_are_dropped_and_counted(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    """The client is told behind the library's back to go back."""
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    scene.drain(consumer)
    consumer._client.seek(TopicPartition(scene.topic, 0, 15))
    until(
        lambda: not list(consumer.units(idle_seconds=1)) and page().value(m.DROPPED, reason="applied") == 5, 60, "five"
    )
    assert page().value(m.DROPPED, reason="not_owned") == 0


def test_messages_of_a_partition_that_is_not_owned_are_dropped_and_counted(
    scene: Scene, metrics: PrometheusMetrics, look: Look
) -> None:
    """The client is made to fetch behind the library's back what nobody assigned to it."""
    foreign = create_topic(scene.bootstrap_servers, 1)
    produce(scene.bootstrap_servers, foreign, 4, 1)
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    scene.drain(consumer)
    consumer._buffer.only_topic = None  # it is not the only topic any more
    consumer._client.assign([TopicPartition(scene.topic, 0, 20), TopicPartition(foreign, 0, 0)])
    until(
        lambda: not list(consumer.units(idle_seconds=0.5)) and page().values(m.DROPPED, reason="not_owned") == [4],
        20,
        "",
    )
    assert page().value(m.DROPPED, reason="applied") == 0


def test_a_unit_that_was_undone_is_counted_as_redelivered(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    with pytest.raises(ValueError, match="mine"), next(iter(consumer)):
        raise ValueError("mine")
    scene.drain(consumer)
    assert page().value(m.REDELIVERED) == 1
    assert page().value(m.MESSAGES) == 20


def test_a_fence_is_counted_in_a_unit_and_between_units(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    with pytest.raises(Fenced), next(iter(consumer)) as unit:
        interfere(scene, "owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1")
        record(unit, "test")
    scene.drain(consumer)
    assert page().value(m.FENCED) == 1
    interfere(scene, "owner_token = NULL, owner_epoch = owner_epoch + 1")
    until(lambda: not list(consumer.units(idle_seconds=6)) and page().value(m.FENCED) == 2, 60, "the second fence")
    until(lambda: not list(consumer.units(idle_seconds=1)) and page().value(m.OWNED) == 1, 60, "its partition again")


def test_a_failover_that_lost_commits_is_counted_as_rewound(
    scene: Scene, metrics: PrometheusMetrics, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    """In a unit, and, after the traffic has ended, by the look at the rows."""
    consumer = scene.consumer(metrics=metrics, max_messages=5)
    page = look(consumer)
    units = iter(consumer)
    apply(next(units))
    with pytest.raises(LedgerRewound), next(units):
        interfere(scene, "next_offset = 0")
    assert page().value(m.REWOUND) == 0, "it is published when the loop goes on"
    for unit in consumer.units(until_end=True):
        with unit:
            pass
    assert page().value(m.REWOUND) == 1
    interfere(scene, "next_offset = 12")
    with caplog.at_level(logging.WARNING, logger="exactly_once"), next(iter(consumer)) as unit:
        assert unit.messages[0].offset() == 12
    assert page().value(m.REWOUND) == 2
    assert [fields(r)["offset"] for r in caplog.records if fields(r).get("action") == "rewound"] == [20]


@pytest.mark.parametrize("is_in_unit", [True, False])
def test_a_row_that_is_gone_is_counted_as_missing(
    *, is_in_unit: bool, scene: Scene, metrics: PrometheusMetrics, look: Look
) -> None:
    """In a unit, and, after the traffic has ended, by the look at the rows."""
    consumer = scene.consumer(metrics=metrics, stop_on_bad_partition=True)
    page = look(consumer)
    delete = "DELETE FROM exactly_once.ledger WHERE group_id = %s RETURNING 1"
    if is_in_unit:
        with pytest.raises(Redelivered, match="it was deleted"), next(iter(consumer)) as unit:
            record(unit, "test")
            scene.query(delete)
    else:
        scene.drain(consumer)
        scene.query(delete)
    with pytest.raises(LedgerRowMissing):
        list(consumer.units(idle_seconds=60))
    consumer.close()
    assert page().value(m.MISSING) == 1
    assert (page().value(m.FENCED), page().value(m.REWOUND)) == (0, 0)


def test_unknown_commits_are_counted_by_what_was_found_out(
    scene: Scene, metrics: PrometheusMetrics, look: Look
) -> None:
    consumer = scene.consumer(metrics=metrics, max_messages=5)
    page = look(consumer)
    units = iter(consumer)
    unit = next(units)
    scene.proxy.cut_before()
    with pytest.raises(Redelivered):
        apply(unit)
    unit = next(units)
    scene.proxy.cut_after()
    apply(unit)
    unit = next(units)
    scene.proxy.cut_before()
    with pytest.raises(Fenced), unit:
        interfere(scene, "owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1")
    scene.drain(consumer)
    for outcome in ("committed", "aborted", "fenced"):
        assert page().value(m.UNKNOWN_COMMITS, outcome=outcome) == 1, outcome
    assert page().value(m.FENCED) == 1
    assert page().value(m.REDELIVERED) == 2
    assert page().value(m.MESSAGES) == 20
    scene.assert_exact()


def test_dead_letters_are_counted_once_they_are_committed(scene: Scene, metrics: PrometheusMetrics, look: Look) -> None:
    """The transaction that sets the first one aside is cut once."""

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if any(message.offset() in (3, 14) for message in unit.messages):
            raise ValueError("this is no payment")

    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)

    def cut() -> None:
        scene.proxy.cut_before()

    with armed("dead_lettered", cut):
        consumer.run(handler, on_poison="dead-letter", until_end=True)
    assert page().value(m.DEAD_LETTERS) == 2
    assert page().value(m.MESSAGES) == 20


def test_a_joined_transaction_is_counted_and_its_commit_is_not_timed(
    scene: Scene, metrics: PrometheusMetrics, look: Look
) -> None:
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    with psycopg.connect(scene.conninfo) as connection:
        units = 0
        for unit in consumer.units(until_end=True):
            units += 1
            with unit.join(connection):
                connection.execute("SELECT 1")
            connection.commit()
    assert page().value(m.UNITS) == units > 0
    assert page().value(m.UNIT_SECONDS, "_count") == units
    assert page().values(m.COMMIT_SECONDS, "_count") == []


def test_partitions_wait_and_time_passes_while_the_database_is_away(
    make_scene: MakeScene, metrics: PrometheusMetrics, look: Look, run: Run
) -> None:
    scene = make_scene(30, partitions=3)
    consumer = scene.consumer(metrics=metrics)
    page = look(consumer)
    scene.proxy.refuse()
    run(consumer, lambda: consumer.run(apply_nothing))
    until(lambda: page().value(m.WAITING) == 3, 20, "Kafka's assignment")
    assert page().value(m.OWNED) == 0
    assert page().values(m.LAG) == [], "where they stand is not known yet"
    until(lambda: page().value(m.SINCE_COMMIT) > 1, 20, "a second without a commit")
    until(lambda: page().value(m.SINCE_POLL) < 1, 60, "the loop to turn")
    healed_at = time.monotonic()
    scene.proxy.heal()
    until(lambda: page().value(m.MESSAGES) == 30, 20, "every message")
    assert (page().value(m.OWNED), page().value(m.WAITING)) == (3, 0)
    assert page().value(m.SINCE_COMMIT) < time.monotonic() - healed_at


def apply_nothing(unit: Unit) -> None:
    """Move the offsets only."""


class Recorder:
    """Metrics that note every call."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[tuple[Metric, float]] = []
        self.readers: list[Read] = []
        self._fails = fails

    def add(self, metric: Metric, amount: float, labels: tuple[str, ...]) -> None:
        if amount or self._fails:
            self._note(metric, amount)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        self._note(metric, value)

    def attach(self, read: Read) -> None:
        if self._fails:
            raise OSError("nobody attaches it")
        self.readers.append(read)

    def detach(self, read: Read) -> None:
        self.readers.remove(read)

    def _note(self, metric: Metric, value: float) -> None:
        self.calls.append((metric, value))
        if self._fails:
            raise OSError("nobody takes it")


def of(calls: Iterable[tuple[Metric, float]], metric: Metric) -> list[float]:
    return [value for found, value in calls if found is metric]


@pytest.mark.parametrize("size", [1, 100])
def test_a_unit_is_published_in_four_calls_however_large_it_is(make_scene: MakeScene, size: int) -> None:
    scene, recorder = make_scene(200), Recorder()
    with scene.consumer(metrics=recorder, max_messages=size) as consumer:
        scene.drain(consumer)
    units = len(of(recorder.calls, m.UNITS))
    assert sum(of(recorder.calls, m.MESSAGES)) == 200
    assert units >= 200 / size
    assert len(recorder.calls) == 4 * units


def test_the_last_unit_is_published_and_the_reader_is_gone_after_close(scene: Scene) -> None:
    recorder = Recorder()
    with scene.consumer(metrics=recorder) as consumer:
        unit = next(iter(consumer))
        apply(unit)
        assert of(recorder.calls, m.MESSAGES) == []
    assert of(recorder.calls, m.MESSAGES) == [len(unit.messages)]
    assert recorder.readers == []


def test_metrics_that_fail_are_told_once_and_disturb_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with scene.consumer(metrics=Recorder(fails=True)) as consumer:
        scene.drain(consumer)
    scene.assert_exact()
    assert [r.levelname for r in caplog.records if fields(r).get("action") == "metrics_failed"] == ["ERROR"]


def test_gauges_can_be_read_from_threads_while_partitions_come_and_go(
    make_scene: MakeScene, metrics: PrometheusMetrics, look: Look, run: Run
) -> None:
    scene = make_scene(400, partitions=8)
    first = scene.consumer({"partition.assignment.strategy": "cooperative-sticky"}, metrics=metrics, name="first")
    page = look(first)
    running = run(first, lambda: first.run(apply_nothing))
    until(lambda: page().value(m.OWNED, owner="first") == 8, 20, "all partitions")
    for _ in range(2):
        with scene.consumer(
            {"partition.assignment.strategy": "cooperative-sticky"}, metrics=metrics, name="second"
        ) as c:
            units = c.units(idle_seconds=5)
            with contextlib.suppress(StopIteration):
                next(units)
            assert page().value(m.OWNED, owner="first") <= 8
        until(
            lambda: page().value(m.OWNED, owner="first") == 8,
            20,
            f"all partitions again {first.health()} {running.error!r}",
        )
    first.stop()
    running.join()
