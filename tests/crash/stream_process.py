"""Two processes: one runs agents that answer slowly, to be killed at any instant, and the other follows them all.

Run as `python stream_process.py ADDRESS run` or `… follow`. Each line of its input names sessions. The first starts a
run in each of them, and prints a line once all have begun. The other follows them to their end, coming back again and
again with the cursor of the last chunk, and prints what it has seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

from tests.crash.addresses import store_at

import perdure
from perdure import ModelRequest
from perdure.testing import Chunks, Delay, ScriptedDriver

WORDS = 30


def slow_answer(request: ModelRequest) -> Chunks:
    """Say something that no other process and no other session says, so that a mix-up can be seen."""
    asked = request.messages[-1].text
    words = [f"{asked}-{os.getpid()}-{number} " for number in range(WORDS)]
    return Chunks([each for word in words for each in (Delay(random.uniform(0.002, 0.03), word),)])


def connection(address: str) -> Any:
    return perdure.connect(store_at(address), driver=ScriptedDriver(slow_answer))


async def run(app: Any, ids: list[str]) -> str:
    chats = [await app.open(each) for each in ids]
    await asyncio.gather(*(chat.start(chat.id) for chat in chats))
    return "begun"


async def follow(app: Any, ids: list[str]) -> str:
    return json.dumps(await asyncio.gather(*(seen(app, each) for each in ids)))


async def seen(app: Any, session_id: str) -> list[Any]:
    """Follow a run to its reply; return each chunk as text, offset, whether it restarts, and the reply's text."""
    chunks: list[Any] = []
    cursor = None
    while not chunks or chunks[-1][3] is None:
        left = random.randrange(1, 6)  # chunks until this follower loses its connection, and comes back
        async for chunk in app.follow(session_id, after=cursor, timeout=60.0):
            reply = None if chunk.reply is None else chunk.reply.text
            chunks.append((str(chunk), chunk.offset, chunk.restarts, reply))
            cursor, left = chunk.cursor, left - 1
            if not left:
                break
    return chunks


async def main(address: str, how: str) -> None:
    async with connection(address) as app:
        print("ready", flush=True)
        while ids := (await asyncio.to_thread(sys.stdin.readline)).split():
            print(await {"run": run, "follow": follow}[how](app, ids), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
