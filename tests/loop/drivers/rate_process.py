"""Asks a model again and again at a shared rate for some seconds, and prints the time of each answer."""

from __future__ import annotations

import asyncio
import sys
import time

from perdure import connect
from perdure.loop.drivers.pacing import RateLimit
from perdure.protocols import ModelReply, ModelRequest, OnDelta
from perdure.testing.scripted import ScriptedDriver

_voice = ScriptedDriver(lambda request: "re")


class Clocked:
    """Answers at once, and prints the time."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        print(time.time(), flush=True)
        return await _voice.respond(request, on_delta)


async def main(url: str, requests: float, burst: int, seconds: float) -> None:
    rate = RateLimit(requests=requests, seconds=1.0, burst=burst, name="shared")
    async with connect(url, driver=Clocked(), rate=rate) as sessions:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        ends = time.time() + seconds

        async def talk() -> None:
            chat = await sessions.open()
            while time.time() < ends:
                await chat.send("Hello")

        await asyncio.gather(*(talk() for _ in range(4)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
