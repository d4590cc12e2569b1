"""What an idle member costs: looks that write nothing, acquisitions that read no more than they need."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest

from exactly_once import BrokerUnreachable, ExactlyOnceConsumer
from exactly_once.consumer import maintenance
from exactly_once.kafka.admin import Cluster
from tests.conftest import MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, backend_of
from tests.support.waiting import until

Db = psycopg.Connection[Any]


def idle(consumer: Any, seconds: float, condition: Callable[[], bool] = lambda: True) -> None:
    """Have the consumer wait for messages for so long, and as often as it takes until a condition holds."""

    def is_over() -> bool:
        for _ in consumer.units(idle_seconds=seconds):
            raise AssertionError("nothing was to come")
        return condition()

    until(is_over, 60, "what an idle consumer does")


def count(scene: Scene, *words: str) -> int:
    return sum(any(word in statement for word in words) for statement in scene.proxy.statements)


def next_xid(db: Db) -> int:
    """The next transaction id: whoever writes takes one."""
    found = db.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.usefixtures("without_autovacuum")
def test_a_look_at_rows_writes_nothing_and_waits_for_nobody(
    make_scene: MakeScene, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    scene = make_scene(20, partitions=2)
    consumer = scene.consumer()
    scene.drain(consumer)
    idle(consumer, 0.5)
    with psycopg.connect(scene.conninfo) as blocker:
        blocker.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (scene.topic,))
        scene.proxy.statements.clear()
        before = next_xid(db)
        idle(consumer, 1.0, lambda: count(scene, ".ledger l") >= 3)
        after = next_xid(db)
    assert not count(scene, "lock_row", "FOR UPDATE", "UPDATE ")
    assert after == before


@pytest.fixture
def wal_bytes(scene: Scene) -> Callable[[ExactlyOnceConsumer], int]:
    """Ask how many bytes of WAL the backend of a consumer has written so far."""
    (version,) = scene.query("SHOW server_version_num")[0]
    if int(version) < 180000:
        pytest.skip("before version 18 Postgres does not count the WAL of a backend")

    def ask(consumer: ExactlyOnceConsumer) -> int:
        consumer._session.connection.execute("SELECT pg_stat_force_next_flush()")
        return int(scene.query(f"SELECT wal_bytes FROM pg_stat_get_backend_wal({backend_of(consumer)})")[0][0])

    return ask


@pytest.mark.usefixtures("without_autovacuum")
def test_an_idle_owner_writes_no_wal_and_a_unit_a_few_hundred_bytes(
    scene: Scene, db: Db, wal_bytes: Callable[[ExactlyOnceConsumer], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit without effects is the marker, the advance and the commit; the first write of a page is left out."""
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    consumer = scene.consumer(max_messages=1)
    units = consumer.units(until_end=True)
    for _ in range(3):
        with next(units):
            pass
    before, ids = wal_bytes(consumer), next_xid(db)
    for _ in range(10):
        with next(units):
            pass
    each = (wal_bytes(consumer) - before) / 10
    assert 50 < each < 600
    assert next_xid(db) - ids == 10
    for unit in units:
        with unit:
            pass
    idle(consumer, 0.5)
    before = wal_bytes(consumer)
    idle(consumer, 2.0)
    assert wal_bytes(consumer) == before


def test_a_reset_is_noticed_by_the_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    consumer = scene.consumer()
    scene.drain(consumer)
    scene.query(
        "UPDATE exactly_once.ledger SET next_offset = 15, owner_epoch = owner_epoch + 1, owner_token = NULL "
        "WHERE group_id = %s RETURNING 1"
    )
    unit = next(iter(consumer))
    assert unit.messages[0].offset() == 15


def test_one_locked_row_does_not_keep_the_look_from_the_others(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(maintenance, "LOCK_SECONDS", 0.5)
    scene = make_scene(40, partitions=2)
    consumer = scene.consumer()
    scene.drain(consumer)
    scene.query(
        "UPDATE exactly_once.ledger SET next_offset = 15, owner_epoch = owner_epoch + 1, owner_token = NULL "
        "WHERE group_id = %s RETURNING 1"
    )
    with psycopg.connect(scene.conninfo) as blocker:
        blocker.execute(
            "SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition = 0 FOR UPDATE", (scene.topic,)
        )
        unit = next(iter(consumer))
    assert (unit.messages[0].partition(), unit.messages[0].offset()) == (1, 15)


def test_an_acquisition_reads_its_own_rows_and_not_those_of_the_topic(make_scene: MakeScene, db: Db) -> None:
    scene = make_scene(20, partitions=2)
    with scene.consumer() as first:
        scene.drain(first)
        assert count(scene, "AS has_row") >= 1, "a new topic is looked at as a whole"
    scene.proxy.statements.clear()
    with scene.consumer() as second:
        scene.drain(second)
    assert not count(scene, "has_row", ".audit")


def test_a_large_topic_is_described_less_often(
    make_consumer: MakeConsumer, make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.05)
    scene = make_scene(4, partitions=4)
    asked: list[str] = []
    ask = Cluster.ask

    def note(self: Cluster, topics: Any) -> dict[str, Future[Any]]:
        asked.extend(topics := list(topics))
        return ask(self, topics)

    consumer = scene.consumer()
    scene.drain(consumer)
    monkeypatch.setattr(Cluster, "ask", note)
    idle(consumer, 1.0, lambda: len(asked) >= 3)
    monkeypatch.setattr(maintenance, "PARTITIONS_PER_SECOND", 0.1)
    idle(consumer, 0.5)  # what was due before
    asked.clear()
    idle(consumer, 2.5)
    assert len(asked) <= 1, "four partitions at a tenth of one a second: every 40 seconds"


def test_trouble_with_brokers_costs_no_description_of_the_whole_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    monkeypatch.setattr("exactly_once.kafka.admin.REQUEST_SECONDS", 0.3)
    asked: list[object] = []
    admin = cluster._admin

    class Noting:
        """The client itself cannot be patched; what was asked of it shows on no wire, as nobody answers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(admin, name)

        def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
            asked.append(topic)
            return admin.list_topics(topic=topic, timeout=timeout)

    cluster._clients["admin"] = Noting()  # type: ignore[assignment]
    with cluster, pytest.raises(BrokerUnreachable):
        cluster.describe(["ours"])
    assert asked == ["ours"]
    cluster.close()
