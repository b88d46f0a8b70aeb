"""Who may be run beside whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """A place for many beside each other, or for one alone. Behind one that wants to be alone the others wait."""

    def __init__(self) -> None:
        self._beside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._alone = 0
        """How many are alone, or want to be."""
        self._open = asyncio.Event()
        self._open.set()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Be in it with others."""
        while self._alone:
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
        """Be the only one in it."""
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
