"""Helpers for asyncio: waiting that a cancellation does not cut short, and long work that lets other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import copy_context
from time import perf_counter, sleep
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

AT_ONCE = 256
"""The number of messages to work on before other tasks have a turn: about a millisecond of counting or comparing."""
# Seconds that a thread computes, and then pauses, so that the event loop gets the interpreter: see `in_turns`.
_TURN = 0.0005
_PAUSE = 0.00025


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be left half done. A cancellation takes effect only after the work has ended."""
    loop = asyncio.get_running_loop()
    over = _Over(loop=loop)

    async def carried_out() -> T:
        try:
            return await work
        finally:
            over.tell()  # here, since a callback of the task would come a turn of the loop later

    task = loop.create_task(carried_out())
    task.add_done_callback(over.tell)  # too: a task that is cancelled before it begins does not run its `finally`
    try:
        await over
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # marks it as seen: asyncio would log an error that nobody has asked for
        raise
    return task.result()


class _Over(asyncio.Future[None]):
    """A future that tells that work is over. A task that waits for it gets its cancellation only after that."""

    def cancel(self, msg: Any = None) -> bool:
        # asyncio cancels what a task waits for. If that refuses, the task is cancelled when it wakes up.
        return False

    def tell(self, task: object = None) -> None:
        if not self.done():
            self.set_result(None)


async def finished(work: asyncio.Future[Any]) -> None:
    """Wait until work is over, and raise what it raises. A cancellation cancels the work, and waits for its end.

    If the work was cancelled from elsewhere, nothing is raised.
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
    """Tell whether the cancellation of the current task was requested.

    A CancelledError alone does not tell: what the task waits for may have been cancelled by itself.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if it was requested, and the code that was awaited has swallowed it."""
    if is_cancelled():
        raise asyncio.CancelledError


async def in_slices(items: Sequence[T], size: int = AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """Yield a sequence slice by slice. After each, every other task of the event loop has its turn."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        await asyncio.sleep(0)


def in_turns(items: Iterable[T]) -> Iterator[T]:
    """Yield items. In a thread beside the event loop, pause now and then, so that the loop can run.

    A thread that computes gives way to others after 5 ms, and the loop waits that long after each system call. It waits
    for ever if the thread unpacks small pieces. Each piece releases the interpreter, which wakes the loop, but the
    thread takes it back before the loop is awake.
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
    """Call a function that computes for long in a thread of its own, while the event loop continues.

    The loop's own executor is not used: tools may keep all its threads busy.
    """
    from concurrent.futures import ThreadPoolExecutor  # imported late: most processes never need it

    def call() -> T:
        return function(*args, **kwargs)

    executor = ThreadPoolExecutor(1, "perdure aside")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, call)
    finally:
        executor.shutdown(wait=False)  # waiting would block the loop, if this task was cancelled
