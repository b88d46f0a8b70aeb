"""perdure under Temporal: a workflow leaves a message with a session, and has it answered, whatever dies meanwhile.

pip install perdure temporalio
temporal server start-dev                                                        # or the server that you have
python temporal_workflow.py worker                                               # in as many terminals as you like
python temporal_workflow.py ask order-7 "pack(order=7) then ship(order=7)" request-1
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, WorkflowAlreadyStartedError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():  # the workflow itself uses none of it
    import perdure
    from perdure.workers import advance

SERVER, QUEUE = os.environ.get("TEMPORAL_ADDRESS", "localhost:7233"), "orders"
STORE = os.environ.get("ORDERS_STORE", "sqlite:///orders.db")
CLERK = perdure.AgentDefinition("clerk", system_prompt="You handle orders.")
BEAT = float(os.environ.get("ORDERS_BEAT", "5"))  # seconds between two heartbeats


def pack(order: int) -> str:
    """Pack an order."""
    return f"order {order} is packed"


@perdure.tool(idempotent=True)
def ship(order: int) -> str:
    """Ship an order, once however often it is asked for."""
    return f"order {order} is on its way"


OPTIONS: dict[str, Any] = {"model": "offline", "tools": [pack, ship], "lease": 20.0}


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Tell Temporal that this activity is alive: without that it is tried again elsewhere, and cannot be cancelled."""

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(BEAT)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


@dataclass
class Activities:
    """A worker's activities for workflows, over one connection."""

    sessions: perdure.Sessions

    @activity.defn
    async def leave(self, session_id: str, text: str, key: str) -> None:
        """Leave a message with a session. The key makes it one message, however often the activity is repeated."""
        await self.sessions.open(session_id, agent=CLERK, on_change="keep")
        await self.sessions.enqueue(session_id, text, key=key)

    @activity.defn
    async def look_at(self, session_id: str) -> str:
        """Do what is to be done in a session. One that is repeated continues where the first was killed."""
        async with beating():
            outcome = await advance(self.sessions, session_id)
        if outcome == "busy":  # another process has it, or had it until a moment ago
            soon, benign = timedelta(seconds=1), ApplicationErrorCategory.BENIGN
            raise ApplicationError("The session is busy.", type="Busy", next_retry_delay=soon, category=benign)
        return outcome.value

    @activity.defn
    async def answer_to(self, session_id: str, key: str) -> str | None:
        """Return the answer; None if a person has to decide first. RunFailed if the run failed."""
        reply = await self.sessions.result(session_id, key)
        return None if reply is None or reply.queued or reply.pending_calls else reply.text


@workflow.defn
class Ask:
    @workflow.run
    async def run(self, session_id: str, text: str) -> str | None:
        key = workflow.info().workflow_id
        brief: Any = {"start_to_close_timeout": timedelta(seconds=60)}
        # A retry costs nothing: what is done is on record. So it may continue for as long as a store is away.
        retry = RetryPolicy(maximum_interval=timedelta(seconds=60))
        long: Any = {"start_to_close_timeout": timedelta(hours=2), "heartbeat_timeout": timedelta(seconds=4 * BEAT)}
        await workflow.execute_activity_method(Activities.leave, args=[session_id, text, key], **brief)
        await workflow.execute_activity_method(Activities.look_at, session_id, retry_policy=retry, **long)
        once = RetryPolicy(non_retryable_error_types=["RunFailed"])
        return await workflow.execute_activity_method(
            Activities.answer_to, args=[session_id, key], retry_policy=once, **brief
        )


async def work() -> None:
    client = await Client.connect(SERVER)
    async with perdure.connect(STORE, **OPTIONS) as sessions:
        tasks = Activities(sessions)
        activities: list[Callable[..., Any]] = [tasks.leave, tasks.look_at, tasks.answer_to]
        await Worker(client, task_queue=QUEUE, workflows=[Ask], activities=activities).run()


async def asked(session_id: str, text: str, request: str) -> str | None:
    client = await Client.connect(SERVER)
    once: Any = {"id": request, "id_reuse_policy": WorkflowIDReusePolicy.REJECT_DUPLICATE}
    handle: WorkflowHandle[Any, str | None]
    try:
        handle = await client.start_workflow(Ask.run, args=[session_id, text], task_queue=QUEUE, **once)
    except WorkflowAlreadyStartedError:  # the same request again is the same workflow
        handle = client.get_workflow_handle(request)
    return await handle.result()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(work())
    else:
        print(asyncio.run(asked(*sys.argv[2:])))
