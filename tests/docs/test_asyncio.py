"""The recipe of docs/how-to/fastapi.md: a consumer in a thread beside an event loop, without a web server around it."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from exactly_once import PoisonMessage, Unit
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, produce
from tests.support.worker import ensure_journal, record

EXAMPLE = Path(__file__).parents[2] / "examples" / "asyncio_app"
MESSAGES = 60

Consuming = Callable[..., AbstractAsyncContextManager[None]]


@pytest.fixture
def consuming() -> Consuming:
    """The function that the page shows."""
    spec = importlib.util.spec_from_file_location("consuming", EXAMPLE / "consuming.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Consuming = module.consuming
    return function


@pytest.fixture
def topic(bootstrap_servers: str, conninfo: str) -> str:
    """A topic with messages."""
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    return topic


def test_handler_calls_coroutines_and_leaving_the_block_ends_in_order(
    *,
    consuming: Consuming,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    topic: str,
    name: str,
    db: psycopg.Connection[Any],
) -> None:
    threads = set()

    async def looked_up(unit: Unit) -> str:
        threads.add(threading.current_thread())
        await asyncio.sleep(0)
        return f"worker of {len(unit.messages)}"

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        consumer = make_consumer(max_messages=10)

        def apply(unit: Unit) -> None:
            assert threading.current_thread() is not threading.main_thread()
            record(unit, asyncio.run_coroutine_threadsafe(looked_up(unit), loop).result(60))

        async with consuming(consumer, [topic], apply, ended.set):
            while consumer.counters.messages < MESSAGES:
                await asyncio.sleep(0.01)
            assert consumer.health().is_ready
            assert not ended.is_set()
        assert "ended" in consumer.health().reasons[0]
        await asyncio.sleep(0)  # callbacks of what has ended run now
        assert not ended.is_set(), "it was ended, and did not end by itself"

    asyncio.run(serve())
    assert threads == {threading.main_thread()}
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
    owned = db.execute("SELECT owner_token FROM exactly_once.ledger WHERE group_id = %s", (name,)).fetchall()
    assert owned == [(None,)], "the rows were not released"


def test_consumer_that_fails_says_so_and_its_error_is_raised_by_the_block(
    consuming: Consuming, make_consumer: MakeConsumer, topic: str
) -> None:
    def fail(unit: Unit) -> None:
        raise LookupError("the handler's own")

    async def serve() -> None:
        ended = asyncio.Event()
        async with consuming(make_consumer(), [topic], fail, ended.set):
            await asyncio.wait_for(ended.wait(), 60)

    with pytest.raises(PoisonMessage, match="the handler's own"):
        asyncio.run(serve())
