"""Waiting in a test for a condition that sends no signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Return once a condition holds, plain or async; pytest's time-out ends one that never does."""
    while True:
        holds = condition()
        if await holds if isawaitable(holds) else holds:
            return
        await asyncio.sleep(0.001)
