"""Processes that the tests of workers attack: workers, and one that leaves messages with sessions.

Run as `python worker_process.py ROLE TASK`, where the task is JSON. A worker's agents call a tool with a side effect
twice for each message. The side effect, and the start and end of each run, are kept in a ledger: a file that every
process appends a line to, which is on disk before anything else happens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any

import msgspec
from tests.crash.addresses import store_at

from perdure import AgentDefinition, AgentEnd, AgentStart, EventBus, ModelRequest, ToolCall, ToolContext, tool
from perdure.sessions.connect import connect
from perdure.testing import Delay, ScriptedDriver
from perdure.workers import InboxDispatcher, Worker

AGENT = AgentDefinition("worker", tools=("charge",))
CHARGES = 2
"""The number of calls of the tool for a message."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a process."""

    address: str
    ledger: str
    name: str = "w"
    """The name of the process in the ledger."""
    sessions: list[str] = []
    messages: int = 0
    pause: float = 0.0
    """Seconds between two messages."""
    thinks: float = 0.15
    """Seconds that the model takes for a step."""
    slow_step: int | None = None
    """The step for which the model takes far longer."""
    works: float = 0.05
    """Seconds that the tool takes."""
    idempotent: bool = False
    """True if the tool may be called again."""
    dispatcher: str = "inbox"
    breaks: list[str] = []
    """The names of functions of `worker_breaks` that break something in this process on purpose."""
    options: dict[str, Any] = {}
    """The options of the worker."""


class Ledger:
    """Lines of actions, with their process and time."""

    def __init__(self, path: str, name: str) -> None:
        self._name = name
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, session_id: str | None, which: str = "-") -> None:
        line = f"{time.time():.6f} {self._name} {what} {session_id} {which}\n"
        os.write(self._handle, line.encode())
        os.fsync(self._handle)


def charging(ledger: Ledger, works: float, idempotent: bool) -> Any:
    """Return a tool with a side effect."""

    @tool(idempotent=idempotent)
    async def charge(which: str, context: ToolContext) -> str:
        """Take money."""
        ledger.write("begin", context.session_id, which)
        await asyncio.sleep(works)
        ledger.write("end", context.session_id, which)
        return f"charged {which}"

    return charge


def reply(request: ModelRequest, task: Task) -> Delay:
    """Call the tool for the last question, as often as it has to be called, then answer."""
    asked = next(message.text for message in reversed(request.messages) if message.role == "user")
    name = asked.replace(" ", "/")
    thinks = 30.0 if request.step == task.slow_step else task.thinks
    if request.step < CHARGES:
        which = f"{name}/{request.step}"
        return Delay(thinks, ToolCall("charge", {"which": which}, id=which))
    return Delay(thinks, f"re {asked}")


def sessions_of(task: Task, ledger: Ledger) -> Any:
    """Connect to the store of a task, with an agent whose runs are noted in the ledger."""
    events = EventBus()
    events.subscribe(AgentStart, lambda event: ledger.write("start", event.session_id, event.loop_id))
    events.subscribe(AgentEnd, lambda event: ledger.write("over", event.session_id, event.loop_id))
    driver = ScriptedDriver(lambda request: reply(request, task))
    tools = [charging(ledger, task.works, task.idempotent)]
    return connect(store_at(task.address), driver=driver, tools=tools, events=events)


async def dispatcher_of(name: str, store: Any) -> Any:
    """Return the dispatcher that a test names, ready to be used."""
    if name == "inbox":
        return InboxDispatcher(store)
    from perdure.workers.procrastinate import ProcrastinateDispatcher

    made = ProcrastinateDispatcher(store)
    await made.prepare()
    return made


class Noting:
    """A dispatcher that notes in a ledger when a worker looks at a session."""

    def __init__(self, dispatcher: Any, ledger: Ledger) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self.wake = dispatcher.wake

    async def work(self, advance: Any, options: Any, stopped: asyncio.Event) -> None:
        async def looked_at(session_id: str) -> Any:
            self._ledger.write("look", session_id)
            try:
                return await advance(session_id)
            finally:
                self._ledger.write("looked", session_id)

        await self._dispatcher.work(looked_at, options, stopped)


async def work(task: Task) -> None:
    """Work until SIGTERM."""
    ledger = Ledger(task.ledger, task.name)
    async with sessions_of(task, ledger) as sessions:
        dispatcher = Noting(await dispatcher_of(task.dispatcher, sessions.store), ledger)
        async with Worker(sessions, dispatcher=dispatcher, **task.options) as worker:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
            print("ready", flush=True)
            await worker.run()


async def post(task: Task) -> None:
    """Open sessions and leave messages with them, under keys: a killed process can begin again."""
    async with sessions_of(task, Ledger(task.ledger, task.name)) as sessions:
        print("ready", flush=True)
        for name in task.sessions:
            await sessions.open(name, AGENT)
        for number in range(task.messages):
            for name in task.sessions:
                await sessions.enqueue(name, f"{name} {number}", key=f"{name}-{number}")
                await asyncio.sleep(task.pause)


async def send(task: Task) -> None:
    """Send a message to a session, as a web process does, and wait for the answer."""
    async with sessions_of(task, Ledger(task.ledger, task.name)) as sessions:
        print("ready", flush=True)
        for name in task.sessions:
            await (await sessions.open(name, AGENT)).send(f"{name} 0")


def main(role: str, told: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{role} %(asctime)s %(name)s %(message)s")
    task = msgspec.json.decode(told, type=Task)
    for name in task.breaks:
        getattr(import_module("tests.crash.worker_breaks"), name)()
    asyncio.run({"work": work, "post": post, "send": send}[role](task))


if __name__ == "__main__":
    main(*sys.argv[1:])
