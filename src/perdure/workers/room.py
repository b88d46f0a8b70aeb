"""A room that keeps sessions apart which must not be run beside others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """A place for many at once, or for one alone. As soon as one wants to be alone, all newcomers wait."""

    def __init__(self) -> None:
        self._beside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._alone = 0
        """The number of those that are alone, or want to be."""
        self._open = asyncio.Event()
        self._open.set()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Use the room together with others while the block lasts."""
        while self._alone:  # a loop: the next one that wants to be alone may have come before this task woke up
            await self._open.wait()
        self._beside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._beside -= 1
            if not self._beside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Use the room alone while the block lasts."""
        # Announced before the wait, or a stream of newcomers would keep the room from ever being empty.
        self._alone += 1
        self._open.clear()
        try:
            async with self._one:
                await self._empty.wait()
                yield
        finally:
            self._alone -= 1
            if not self._alone:
                self._open.set()
