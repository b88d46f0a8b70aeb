"""A service that is killed in the middle of a stream: OpenAI's client continues with the one that takes its place."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 50 if os.environ.get("PERDURE_TORTURE") else 1
ANSWER = "".join(f"piece {number}, " for number in range(6))


@asynccontextmanager
async def _serving(store: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve in a process of its own, and kill it at the end of the block."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.crash.openai_process",
        store,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.stdout is not None
    try:
        told = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        async with openai.AsyncOpenAI(base_url=told["url"], api_key=told["secret"], max_retries=0) as client:
            yield client
    finally:
        process.kill()
        await process.wait()


async def _followed(client: openai.AsyncOpenAI, response: str, seen: list[Any], most: int | None) -> None:
    """Read the events that follow those seen: all of them, or until `most` are seen."""
    after = seen[-1].sequence_number if seen else -1
    async with await client.responses.retrieve(response, stream=True, starting_after=after) as stream:
        async for event in stream:
            seen.append(event)
            if most is not None and len(seen) >= most:
                return


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_killed_service_is_taken_over(seed: int, tmp_path: Path) -> None:
    """No event comes twice, and the events add up to the stored answer."""
    store, seen = f"sqlite:///{tmp_path / 's.db'}", list[Any]()
    async with _serving(store) as client:
        made = await client.responses.create(model="clerk", input="slow", background=True)
        await _followed(client, made.id, seen, random.Random(seed).randint(1, 9))
    async with _serving(store) as client:
        await _followed(client, made.id, seen, None)
        last = seen[-1].response
        assert (await client.responses.retrieve(made.id)).model_dump() == last.model_dump()
    assert (seen[-1].type, last.output_text) == ("response.completed", ANSWER)
    numbers = [event.sequence_number for event in seen]
    assert numbers == sorted(set(numbers))
    texts: dict[int, str] = {}
    for event in seen:
        if event.type == "response.output_text.delta":
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    assert texts[max(texts)] == ANSWER
    assert all(ANSWER.startswith(text) for text in texts.values())
