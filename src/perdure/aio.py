"""Waiting that a cancellation does not cut short, and whether one was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Await to the end what must not be left in between: a cancellation waits for it, and goes on after it."""
    loop = asyncio.get_running_loop()
    over = _Over(loop=loop)

    async def carried_out() -> T:
        try:
            return await work
        finally:
            over.tell()  # here, and not in a callback of the task, which comes a turn of the loop later

    task = loop.create_task(carried_out())
    task.add_done_callback(over.tell)  # one that is cancelled before it begins runs nothing
    try:
        await over
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # it is of no interest to one who has been told to stop
        raise
    return task.result()


class _Over(asyncio.Future[None]):
    """Tells that work is over. A task that waits for it and is cancelled hears of that once it is."""

    def cancel(self, msg: Any = None) -> bool:
        return False

    def tell(self, task: object = None) -> None:
        if not self.done():
            self.set_result(None)


def is_cancelled() -> bool:
    """Whether somebody has asked for the current task to be cancelled; what it waits for may be, of itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if somebody has asked for that and what was awaited took no notice."""
    if is_cancelled():
        raise asyncio.CancelledError
