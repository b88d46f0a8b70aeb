"""A worker in a process of its own, whose model notes in a file when each of its answers begins and ends."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from perdure import connect
from perdure.protocols import ModelReply, ModelRequest, OnDelta
from perdure.testing.scripted import ScriptedDriver
from perdure.workers import Worker

THINKS = 0.05


class Noting:
    """A model that repeats its request, and notes the first word with a `+` before and a `-` after."""

    def __init__(self, path: str) -> None:
        self._notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._voice = ScriptedDriver(lambda request: f"re {request.messages[-1].text}")

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        who = request.messages[-1].text.split()[0]
        self._note("+", who)
        await asyncio.sleep(THINKS)
        self._note("-", who)
        return await self._voice.respond(request, on_delta)

    def _note(self, sign: str, who: str) -> None:
        os.write(self._notes, f"{sign} {who} {time.monotonic()}\n".encode())  # one call: the lines of all stay whole


async def main(url: str, notes: str, per_owner: int) -> None:
    async with (
        connect(url, driver=Noting(notes)) as sessions,
        Worker(sessions, concurrency=4, per_owner=per_owner) as worker,
    ):
        running = asyncio.create_task(worker.run())
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        worker.stop()
        await running


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
