"""What can be seen of a producer, and what a frozen store of its filter holds up."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from exactly_once.publish import DedupProducer, Outcome, PostgresWindow, WindowFilter
from tests.publish.conftest import MakeOwner
from tests.support.topics import create_topic
from tests.support.waiting import until


def test_figures_and_skipped_duplicates_are_shown(bootstrap_servers: str, caplog: pytest.LogCaptureFixture) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    topics = [create_topic(bootstrap_servers, 1) for _ in range(2)]
    with (
        caplog.at_level(logging.DEBUG, "exactly_once.publish"),
        DedupProducer(
            {"bootstrap.servers": bootstrap_servers},
            dedup=lambda _: WindowFilter(keys=100),
            producer_name='odd "name"',
        ) as producer,
    ):
        for topic in topics:
            producer.produce(topic, b"x", dedup_key="a")
            producer.produce(topic, b"x", dedup_key="a")
            producer.flush(60)
            producer.produce(topic, b"x", dedup_key="a")
        families = {family.name: family.samples for family in parser.text_string_to_metric_families(producer.metrics())}
    found = {(s.labels["topic"], s.labels["outcome"]): s.value for s in families["exactly_once_publish_messages"]}
    for topic in topics:
        assert {outcome: found[topic, outcome] for outcome in ("delivered", "skipped", "attached", "unknown")} == {
            "delivered": 1,
            "skipped": 1,
            "attached": 1,
            "unknown": 0,
        }
    keys = {(s.labels["topic"], s.labels["state"]): s.value for s in families["exactly_once_publish_keys"]}
    assert keys[topics[0], "confirmed"] == 1
    assert {s.labels["producer"] for s in families["exactly_once_publish_keys"]} == {'odd "name"'}
    skipped = [r for r in caplog.records if getattr(r, "action", "") == "duplicate_skipped"]
    assert [r.levelno for r in skipped] == [logging.DEBUG] * 4
    assert "'a'" in skipped[0].getMessage()
    assert {vars(r)["producer"] for r in skipped} == {'odd "name"'}


def test_a_frozen_database_does_not_hold_up_poll(
    bootstrap_servers: str,
    make_owner: MakeOwner,
    db: psycopg.Connection[Any],
    own_schema: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lock on what every statement of the filter reads stands for a server that does not answer."""
    monkeypatch.setattr("exactly_once.publish.topic.MARK_SECONDS", 0.2)
    topic = create_topic(bootstrap_servers, 1)
    made = PostgresWindow(make_owner(schema=own_schema), scope=topic, seconds=100)
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=made) as producer:
        delivery = producer.produce(topic, b"x", dedup_key="a")
        with ThreadPoolExecutor(1) as pool, db.transaction():
            db.execute(f'LOCK TABLE "{own_schema}".publish_window IN ACCESS EXCLUSIVE MODE'.encode())
            answer = pool.submit(delivery.result, 60)
            try:
                message = answer.result(60)
            except TimeoutError:
                db.execute("ROLLBACK")  # let the thread end
                raise
            assert message is not None
            assert delivery.outcome is Outcome.DELIVERED
            assert [getattr(record, "action", "") for record in caplog.records].count("outcomes_wait") == 1
        until(lambda: producer.poll(0.05) >= 0 and made.stats().confirmed == 1, 30, "the mark")
        assert producer.produce(topic, b"x", dedup_key="a").duplicate
