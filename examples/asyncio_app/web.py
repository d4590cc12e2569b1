"""A FastAPI application with a consumer beside it. ``uvicorn web:app``; needs fastapi, uvicorn and httpx."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from consuming import consuming
from fastapi import FastAPI, Request, Response

from exactly_once import ExactlyOnceConsumer, Unit


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    # One for each start of the application: a closed consumer does not start again.
    app.state.consumer = consumer = ExactlyOnceConsumer(
        {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "rates"},
        conninfo=os.environ["EXACTLY_ONCE_CONNINFO"],
    )

    def apply(unit: Unit) -> None:  # in the consumer's thread
        rate = asyncio.run_coroutine_threadsafe(current_rate(), loop).result(30)
        amounts = [[int(message.value() or 0) * rate] for message in unit.messages]
        unit.executemany("INSERT INTO payment (amount) VALUES (%s)", amounts)

    def end() -> None:  # as the consumer would end a process of its own
        os.kill(os.getpid(), signal.SIGTERM)

    async with consuming(consumer, ["payments"], apply, end):
        yield


app = FastAPI(lifespan=lifespan)


async def current_rate() -> float:
    async with httpx.AsyncClient() as client:
        return float((await client.get(os.environ["RATES_URL"])).text)


@app.get("/readyz")
def ready(request: Request, response: Response) -> list[str]:
    health = request.app.state.consumer.health()
    response.status_code = 200 if health.is_ready else 503
    return list(health.reasons)
