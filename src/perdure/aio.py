"""Waiting that a cancellation does not cut short, whether one was asked for, and long work beside which others run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import copy_context
from time import perf_counter, sleep
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

AT_ONCE = 256
"""How many messages are worked on before others have their turn: about a millisecond of counting or comparing."""
_TURN = 0.0005
_PAUSE = 0.00025


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


async def finished(work: asyncio.Future[Any]) -> None:
    """Wait until work is over, and raise what it raises. One who is cancelled here cancels it, and waits for it.

    Work that was cancelled from elsewhere has ended in good order.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            work.cancel()
    failure = None if work.cancelled() else work.exception()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure


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


def in_turns(items: Iterable[T]) -> Iterator[T]:
    """Yield items. In a thread beside the event loop, pause now and then, so that the loop can go on.

    Python has a thread that computes give way after 5 ms, and the loop waits that long after each call to the system.
    It waits without end for a thread that unpacks small pieces: each of these lets go of the interpreter, which wakes
    the loop, and has it back before the loop is awake.
    """
    if _is_in_loop():
        yield from items
        return
    due = perf_counter() + _TURN
    for item in items:
        yield item
        if perf_counter() > due:
            sleep(_PAUSE)
            due = perf_counter() + _TURN


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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
