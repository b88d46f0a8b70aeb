"""Two processes on one store: a web server that only takes messages in, and workers that answer them.

    pip install 'perdure[serve]'
    uvicorn web_and_worker:app                            # in this folder
    python web_and_worker.py                              # in as many other terminals as you like
    curl localhost:8000/orders/7 -d '{"text": "call ship {\"order\": 7}", "key": "evt-1"}'
    curl localhost:8000/orders/7/evt-1

Stop or kill a worker at any time: another one continues what it was running.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import perdure

STORE = os.environ.get("ORDERS_STORE", "sqlite:///orders.db")
CLERK = perdure.AgentDefinition("clerk", system_prompt="You handle orders. Be brief.")


@perdure.tool(idempotent=True)
def ship(order: int) -> str:
    """Ship an order, once however often it is asked for."""
    return f"order {order} is on its way"


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    async with perdure.connect(STORE, model="offline") as sessions:  # no tools: no agent is run here
        yield {"sessions": sessions}


async def take_in(request: Request) -> JSONResponse:
    """Leave a message with the order's session. It is durable by the time the answer is sent."""
    body, order = await request.json(), f"order-{request.path_params['order']}"
    await request.state.sessions.open(order, agent=CLERK, on_change="keep")
    try:
        queued = await request.state.sessions.enqueue(order, body["text"], key=body["key"])
    except perdure.QueueFull as error:
        return JSONResponse({"error": str(error)}, 429, {"Retry-After": f"{error.retry_after:.0f}"})
    return JSONResponse({"key": queued.key}, 202)


async def answer(request: Request) -> JSONResponse:
    """Tell the answer, if there is one by now."""
    reply = await request.state.sessions.result(f"order-{request.path_params['order']}", request.path_params["key"])
    if reply is None or reply.queued:
        return JSONResponse({"answer": None}, 202)
    return JSONResponse({"answer": reply.text, "waits_for": [call.name for call in reply.pending_calls]})


routes = [Route("/orders/{order}", take_in, methods=["POST"]), Route("/orders/{order}/{key}", answer)]
app = Starlette(routes=routes, lifespan=lifespan)


async def work() -> None:
    """Answer what waits until SIGTERM; then let runs end, and hand over those that take longer than `drain`."""
    async with (
        perdure.connect(STORE, model="offline", tools=[ship]) as sessions,
        perdure.Worker(sessions, concurrency=16, lease=20, drain=60) as worker,
    ):
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, worker.stop)
        await worker.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(work())
