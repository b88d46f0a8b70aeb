"""Processes of the soak: workers, and one that leaves messages, waits for the answers and reads what was said.

Run as `python soak_process.py ROLE TASK`, where the task is JSON. Each printed line is JSON: `Measured`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import msgspec
from tests.crash.addresses import store_at

from perdure import AgentDefinition, ModelReply, ModelRequest, PerdureError, ToolCall, tool
from perdure.protocols import OnDelta
from perdure.sessions.connect import connect
from perdure.testing import ScriptedDriver
from perdure.workers import Worker

AGENT = AgentDefinition("clerk", tools=("look_up",))
TURNS = 10
"""Turns of a session."""
AT_ONCE = 24
"""The sessions that are talked to at the same time."""
PATIENCE = 120.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    turns: int = 0
    hour: int = 1
    """The number of turns in an hour."""
    keep: float = 60.0
    """Seconds after which a session is erased that nobody talks to. A busy disk delays everybody for some."""
    leaks: bool = False
    """True if workers keep every request to the model."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a process at the end of an hour."""

    turns: int = 0
    memory: int = 0
    """Resident bytes."""
    handles: int = 0
    threads: int = 0
    wrong: str = ""

    @classmethod
    def now(cls, turns: int = 0) -> Measured:
        with open("/proc/self/statm") as statm:
            memory = int(statm.read().split()[1]) * resource.getpagesize()
        handles = len(os.listdir("/proc/self/fd"))
        return cls(turns=turns, memory=memory, handles=handles, threads=threading.active_count())


def tell(measured: Measured) -> None:
    os.write(1, msgspec.json.encode(measured) + b"\n")


@tool(idempotent=True)  # otherwise a call that dies with its worker is answered with an error, and not made again
def look_up(order: str) -> str:
    """Look an order up."""
    return f"{order} was sent"


def reply(request: ModelRequest) -> Any:
    """Call the tool for the last question, then answer."""
    asked = next(message.text for message in reversed(request.messages) if message.role == "user")
    return ToolCall("look_up", {"order": asked}, id=f"call {asked}") if request.step == 0 else f"re {asked}"


def expected(name: str, turns: int = TURNS) -> list[str]:
    """Return all that is said in a session."""
    asked = [f"{name} {number}" for number in range(turns)]
    return [text for each in asked for text in (each, "", f"{each} was sent", f"re {each}")]


class Forgetful(ScriptedDriver):
    """A model that keeps none of its requests, as a provider's model keeps nothing here."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        answer = await super().respond(request, on_delta)
        self.requests.clear()
        self._given.clear()
        return answer


def sessions_of(task: Task) -> Any:
    kept: list[Any] = []

    def leaking(request: ModelRequest) -> Any:
        kept.append(msgspec.json.encode([message.text for message in request.messages] * 20))
        return reply(request)

    return connect(store_at(task.address), driver=Forgetful(leaking if task.leaks else reply), tools=[look_up])


async def work(task: Task) -> None:
    """Work until SIGTERM, erase old sessions, and now and then print the resources in use."""
    async with sessions_of(task) as sessions, Worker(sessions, lease=5, concurrency=8) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        beside = [asyncio.ensure_future(_erase_old(sessions, task)), asyncio.ensure_future(_measure())]
        tell(Measured.now())
        try:
            await worker.run()
        finally:
            for each in beside:
                each.cancel()


async def _erase_old(sessions: Any, task: Task) -> None:
    while True:
        await asyncio.sleep(task.keep / 4)
        await sessions.purge(older_than=timedelta(seconds=task.keep))


async def _measure() -> None:
    while True:
        await asyncio.sleep(0.5)
        tell(Measured.now())


async def talk(task: Task) -> None:
    """Leave messages with one session after another, many at a time, and check the outcome of each."""
    names, done = iter(range(task.turns // TURNS)), 0
    tell(Measured.now())

    async def one_after_another(sessions: Any, until: int) -> None:
        nonlocal done
        while done < until and (number := next(names, None)) is not None:
            wrong = await _converse(sessions, f"s{number}")
            done += TURNS
            tell(Measured(turns=done, wrong=wrong))

    while done < task.turns:  # a new connection each hour
        async with sessions_of(task) as sessions:
            until = min(task.turns, done + task.hour)
            await asyncio.gather(*(one_after_another(sessions, until) for _ in range(AT_ONCE)))
            tell(Measured.now(done))


async def _converse(sessions: Any, name: str) -> str:
    """Hold a conversation. Return what is wrong with it, or nothing."""
    chat = await sessions.open(name, AGENT)
    for number in range(TURNS):
        queued = await sessions.enqueue(name, f"{name} {number}", key=str(number))
        await sessions.enqueue(name, f"{name} {number}", key=str(number))  # a request that was sent twice
        answer = await queued.reply(timeout=PATIENCE)
        if answer is None or answer.text != f"re {name} {number}":
            return f"{name} {number} was answered with {answer and answer.text!r}"
        if number == TURNS // 2:
            await _cover(chat)
    said, wanted = [message.text for message in await chat.history()], expected(name)
    different = [pair for pair in zip_longest(said, wanted) if pair[0] != pair[1]]
    return f"{name} says {different[:4]} (said, wanted), and {len(different)} such in all" if different else ""


async def _cover(chat: Any) -> None:
    """Compact, as an application does beside its workers; a running session is left as it is."""
    try:
        await chat.compact(compact_strategy="truncate", keep_last=4)
    except PerdureError as error:
        logging.info("not compacted: %s", error)


def main(role: str, told: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{role} %(asctime)s %(name)s %(message)s")
    asyncio.run({"work": work, "talk": talk}[role](msgspec.json.decode(told, type=Task)))


if __name__ == "__main__":
    main(*sys.argv[1:])
