"""Waiting that a cancellation does not cut short, and whether one was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Await to the end what must not be left in between: a cancellation waits for it, and goes on after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # it is of no interest to one who has been told to stop
        raise cancelled
    return task.result()


def is_cancelled() -> bool:
    """Whether somebody has asked for the current task to be cancelled; what it waits for may be, of itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if somebody has asked for that and what was awaited took no notice."""
    if is_cancelled():
        raise asyncio.CancelledError
