"""The cost of one of many: streams at once, and messages that wait in a queue for one run to end."""

from __future__ import annotations

import asyncio
from typing import Any

import perdure
from benchmarks.harness import Cost, Run, interleaved, median, ms, timed
from perdure import AgentDefinition, Delta, InferenceResponse, Message, ModelReply, Sessions, SqliteStore

AGENT = AgentDefinition("bench")
PIECES = 20


class Streaming:
    """A driver that says its answer in pieces, and lets others speak between them."""

    async def respond(self, request: Any, on_delta: Any) -> ModelReply:
        for number in range(PIECES):
            await on_delta(Delta("text", f"piece {number} "))
            await asyncio.sleep(0)
        return ModelReply(Message.assistant("said"), InferenceResponse("stop"))


class Waiting:
    """A driver whose first answer waits until it is released."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.released = asyncio.Event()

    async def respond(self, request: Any, on_delta: Any) -> ModelReply:
        self.asked.set()
        await self.released.wait()
        return ModelReply(Message.assistant("yes"), InferenceResponse("stop"))


async def measure(run: Run) -> None:
    await streams(run)
    await queues(run)


async def streams(run: Run) -> None:
    few, many = 10, run.size(320, 6_400)
    async with perdure.connect("memory://", driver=Streaming(), compaction=None, live=2 * many) as sessions:
        ids = [(await sessions.open(agent=AGENT)).id for _ in range(many)]
        small, large = await interleaved(
            lambda: at_once(sessions, ids[:few]), lambda: at_once(sessions, ids), rounds=3, warm_up=1
        )
    least, most = small.cpu / few, large.cpu / many
    run.report("together.streams", most / least, f"processor {ms(most)} each of {many:,} / {ms(least)} each of {few}")


async def at_once(sessions: Sessions, ids: list[Any]) -> None:
    async def listen(session_id: str) -> None:
        async for _ in sessions.stream(session_id, "Go on."):
            pass

    await asyncio.gather(*map(listen, ids))


async def queues(run: Run) -> None:
    sizes = (20, run.size(640, 3_200))
    samples: list[list[Cost]] = [[], []]
    with run.folder() as folder:
        async with SqliteStore(folder / "bench.db") as store:
            for _ in range(3):
                for taken, count in zip(samples, sizes, strict=True):
                    taken.append(await queued(store, count))
    (few, many), (small, large) = sizes, map(median, samples)
    least, most = small.cpu / few, large.cpu / many
    detail = f"processor {ms(most)} each of {many:,} / {ms(least)} each of {few}; {ms(large.wall / many)} on the clock"
    run.report("together.queued", most / least, detail)


async def queued(store: SqliteStore, count: int) -> Cost:
    """Leave messages with a run under way; return the cost from its end until all of them are answered."""
    driver = Waiting()
    async with perdure.connect(store, driver=driver, compaction=None) as sessions:
        chat = await sessions.open(agent=AGENT)
        first = asyncio.create_task(chat.send("first"))
        await driver.asked.wait()
        for number in range(count):
            await chat.send(f"queued {number}", when_busy="queue")

        async def answered() -> None:
            driver.released.set()
            await first
            while await chat.length() < 2 * (count + 1):  # noqa: ASYNC110  # nothing tells when a queue is empty
                await asyncio.sleep(0.02)

        return await timed(answered)
