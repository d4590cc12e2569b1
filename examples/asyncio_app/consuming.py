"""A consumer in a thread of its own beside an event loop: for FastAPI's lifespan, or any asyncio program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from exactly_once import ExactlyOnceConsumer, Unit


@contextlib.asynccontextmanager
async def consuming(
    consumer: ExactlyOnceConsumer, topics: list[str], handler: Callable[[Unit], object], on_end: Callable[[], object]
) -> AsyncIterator[None]:
    """Have the consumer work while the block lasts; leaving it stops the consumer and raises what it failed with.

    ``on_end`` is called when the consumer ends by itself, which is always by an error.
    """

    def work() -> None:
        with consumer:
            consumer.subscribe(topics)
            consumer.run(handler)

    working = asyncio.create_task(asyncio.to_thread(work))
    is_leaving = False
    working.add_done_callback(lambda _: None if is_leaving else on_end())
    try:
        yield
    finally:
        is_leaving = True
        consumer.stop()
        await working
