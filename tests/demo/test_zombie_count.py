"""A zombie counts as fenced also when it learns of it only after its COMMIT was cut off."""

from __future__ import annotations

import psycopg
import pytest

from exactly_once import Fenced, _failpoints
from exactly_once.demo import payments
from tests.conftest import MakeConsumer


def test_fence_found_out_by_resolving_a_lost_commit_is_counted(
    bootstrap_servers: str, db: psycopg.Connection[tuple[object, ...]], make_consumer: MakeConsumer, name: str
) -> None:
    """What the demo does to a worker frozen after its advance: its backend is ended, its rows are taken."""
    payments.create_topic(bootstrap_servers, name)
    payments.Publisher(bootstrap_servers, name, seed=1).publish(20)
    consumer = make_consumer()
    consumer.subscribe([name])
    pids: list[int] = []

    def take_over() -> None:
        _failpoints.disarm()
        db.execute("SELECT pg_terminate_backend(%s, 10000)", pids)
        db.execute("UPDATE exactly_once.ledger SET owner_token = gen_random_uuid() WHERE group_id = %s", (name,))

    _failpoints.arm("advanced", take_over)
    with pytest.raises(Fenced), next(iter(consumer)) as unit:
        pids.append(unit.connection.info.backend_pid)
    assert consumer.counters.fenced == 1
