"""Waiting that a cancellation does not cut short, whether one was asked for, and long work beside which others run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

AT_ONCE = 256
"""How many messages are worked on before others have their turn: about a millisecond of counting or comparing."""


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


async def in_slices(items: Sequence[T], size: int = AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """Yield a sequence slice by slice. After each, every other task of the event loop has its turn."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        await asyncio.sleep(0)


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that computes for long in a thread of its own, while the event loop goes on.

    Not in the loop's executor: tools may keep all threads of that busy.
    """
    from concurrent.futures import ThreadPoolExecutor

    def call() -> T:
        return function(*args, **kwargs)

    executor = ThreadPoolExecutor(1, "perdure aside")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, call)
    finally:
        executor.shutdown(wait=False)
