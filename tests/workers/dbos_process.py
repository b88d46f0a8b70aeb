"""A process of the example for DBOS: `ask` starts a workflow, `recover` waits for one that another has begun."""

from __future__ import annotations

import asyncio
import json
import sys

from dbos import DBOS
from tests.workers.engine_tools import example

MESSAGE = "pack(order=7) then ship(order=7)"
app = example("dbos_workflow")


async def ask() -> object:
    return await app.asked("order-7", MESSAGE, "request-1")


async def recover() -> object:
    """Wait for the workflow that DBOS continues by itself; ask again; then let several work at one session."""
    first = await (await DBOS.retrieve_workflow_async("request-1")).get_result()
    again = await ask()
    texts = [f"pack(order={number})" for number in (1, 2, 3)]
    beside = [app.asked("order-8", text, f"request-{text}") for text in texts]
    return [first, again, *await asyncio.gather(*beside)]


if __name__ == "__main__":
    app.start()
    print(json.dumps(asyncio.run(ask() if sys.argv[1] == "ask" else recover())))
    DBOS.destroy()
