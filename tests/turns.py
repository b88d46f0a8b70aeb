"""Counting how often other tasks have their turn during long work in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """The number of turns that others have had."""

    count = 0


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Count the turns that an idle task gets inside the block."""
    turns = Turns()

    async def count() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield turns
    finally:
        counting.cancel()
