"""A process that is killed during a traced run, or a worker that ends when it has answered.

Run as `python traced_process.py URL SESSION_ID send|untraced|parallel|subagent|worker`. It prints a line when the model
is asked, and as a worker all its spans, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.telemetry.watching import Watching, operation
from tests.waiting import until

import perdure
from perdure import AgentDefinition, SendParallel, ToolCall, Worker, tool
from perdure.testing import Delay, ScriptedDriver
from perdure.workers import InboxDispatcher

HELPER = AgentDefinition("helper", system_prompt="child")


@tool(idempotent=True)
async def note() -> str:
    """Write something down."""
    return "noted"


def script(request: Any, *, hangs: bool) -> Any:
    """Return the model's replies: a call, and then an answer, which never comes in a process that is to be killed."""
    if request.system_prompt == "child":
        return _answer("found", hangs=hangs)
    if request.step == 0:
        is_boss = any(spec.name == "helper" for spec in request.tools)
        return ToolCall("helper", {"prompt": "help"}) if is_boss else ToolCall("note")
    return _answer("done", hangs=hangs)


def _answer(text: str, *, hangs: bool) -> Any:
    if not hangs:
        return text
    print("asked", flush=True)
    return Delay(60, text)


def connected(url: str, seen: Watching, how: str, *, hangs: bool = False) -> perdure.Sessions:
    return perdure.connect(
        url,
        driver=ScriptedDriver(lambda request: script(request, hangs=hangs)),
        tools=[note],
        subagents=[HELPER] if how == "subagent" else [],
        telemetry=None if how == "untraced" and hangs else seen.telemetry,
    )


async def main(url: str, session_id: str, how: str) -> None:
    seen = Watching()
    async with connected(url, seen, how, hangs=how != "worker") as sessions:
        if how == "worker":
            await _work(sessions)
        elif how == "parallel":
            configs = ["openai:one", "openai:two"]
            await sessions.execute(session_id, SendParallel("go", sessions.loops, configs=configs))
        else:
            await sessions.send(session_id, "go")
    for span in seen.spans():
        links = [[link.context.trace_id, link.context.span_id] for link in span.links]
        print(json.dumps({"operation": operation(span), "trace": span.get_span_context().trace_id, "links": links}))


async def _work(sessions: perdure.Sessions) -> None:
    """Run a worker until nothing waits."""
    journal: Any = sessions.runtime.journal
    async with Worker(sessions, dispatcher=InboxDispatcher(journal, look_every=0.02)) as worker:
        running = asyncio.ensure_future(worker.run())
        await until(lambda: _is_idle(journal))
        worker.stop()
        await running


async def _is_idle(journal: Any) -> bool:
    return not await journal.waiting(idle_only=False)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
