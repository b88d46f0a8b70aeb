"""A real session as a regression test: record it, keep the file, and replay it when the prompt or the tools change."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import perdure
from perdure import LoopFactory, Recording, Replay, tool


@tool
def price(item: str) -> int:
    """The price of an item in cents."""
    return {"tea": 450, "cake": 320}[item]


async def record(path: Path) -> None:
    """Hold a conversation, and export it. The offline model makes the calls that are written out."""
    async with perdure.connect("memory://", model="offline", tools=[price]) as sessions:
        chat = await sessions.open("order-7")
        await chat.send('price(item="tea")')
        await chat.send("What is 450 + 320?")
        await chat.export(path)


async def replay(path: Path, *tools: perdure.Tool) -> None:
    """Replay it twice: with the model of today, and with the answers on record and the tools of today."""
    recording, loops = await Recording.of(path), LoopFactory(tools=tools)
    model = await Replay(recording, loops=loops).run()
    print(f"the model: {sum(step.is_same for step in model.steps)} of {len(model.steps)} steps are the same")
    calls = await Replay(recording, loops=loops, model="recorded", tools="live").run()
    print(f"the tools: {'same' if calls.is_same else 'different'}")
    print(calls)


@tool(name="price")
def dearer_price(item: str) -> int:
    """The price of an item in cents."""
    return {"tea": 480, "cake": 320}[item]


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "order-7.jsonl"
        await record(path)
        await replay(path, price)
        print("--- after the price has changed")
        await replay(path, dearer_price)


if __name__ == "__main__":
    asyncio.run(main())
