"""perdure under DBOS: a workflow leaves a message with a session, and has it answered, whatever dies meanwhile.

    pip install perdure dbos
    python dbos_workflow.py order-7 "pack(order=7) then ship(order=7)" request-1

Kill it in the middle and start it again: DBOS repeats the step, and perdure continues the run in it.
"""

import asyncio
import os
import sys
from typing import Any

from dbos import DBOS, DBOSConfig, SetWorkflowID

import perdure
from perdure.workers import advance

STORE = perdure.shared(os.environ.get("ORDERS_STORE", "sqlite:///orders.db"))  # for every event loop of the process
CLERK = perdure.AgentDefinition("clerk", system_prompt="You handle orders.")


def pack(order: int) -> str:
    """Pack an order."""
    return f"order {order} is packed"


@perdure.tool(idempotent=True)
def ship(order: int) -> str:
    """Ship an order, once however often it is asked for."""
    return f"order {order} is on its way"


OPTIONS: dict[str, Any] = {"model": "offline", "tools": [pack, ship]}


@DBOS.step(retries_allowed=True, max_attempts=10)
async def leave(session_id: str, text: str, key: str) -> None:
    """Leave a message with a session. The key makes it one message, however often the step is repeated."""
    async with perdure.connect(STORE, **OPTIONS) as sessions:
        await sessions.open(session_id, agent=CLERK, on_change="keep")
        await sessions.enqueue(session_id, text, key=key)


@DBOS.step(retries_allowed=True, max_attempts=100)
async def look_at(session_id: str) -> str:
    """Do what is to be done in a session. A step that is repeated continues where the first was killed."""
    async with perdure.connect(STORE, **OPTIONS) as sessions:
        return (await advance(sessions, session_id)).value


@DBOS.step()
async def answer_to(session_id: str, key: str) -> str | None:
    """Return the answer; None if a person has to decide first. RunFailed if the run failed."""
    async with perdure.connect(STORE, **OPTIONS) as sessions:
        reply = await sessions.result(session_id, key)
        return None if reply is None or reply.queued or reply.pending_calls else reply.text


@DBOS.workflow()
async def ask(session_id: str, text: str) -> str | None:
    key = DBOS.workflow_id or ""
    await leave(session_id, text, key)
    while await look_at(session_id) == "busy":  # another process has it, or had it until a moment ago
        await DBOS.sleep_async(1.0)
    return await answer_to(session_id, key)


def start() -> None:
    """Start DBOS, which continues the workflows that this executor has left behind."""
    database, schema = os.environ.get("DBOS_DATABASE", "sqlite:///dbos.db"), os.environ.get("DBOS_SCHEMA", "dbos")
    config: DBOSConfig = {"name": "orders", "application_version": "1", "console_log_level": "WARNING"}
    DBOS(config={**config, "system_database_url": database, "dbos_system_schema": schema})
    DBOS.launch()


async def asked(session_id: str, text: str, request: str) -> str | None:
    with SetWorkflowID(request):  # the same request again is the same workflow
        handle = await DBOS.start_workflow_async(ask, session_id, text)
    return await handle.get_result()


if __name__ == "__main__":
    start()
    print(asyncio.run(asked(*sys.argv[1:])))
    DBOS.destroy()
