"""An event loop in a thread of its own, for callers that have none, or another."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from perdure.errors import ConfigurationError

T = TypeVar("T")
FORKED = (
    "This was opened in process {opened}, and process {here} was forked from it since: the thread that carries its "
    "verbs out has stayed there. Open it in each process, after the fork: gunicorn without --preload, uWSGI with "
    "lazy-apps."
)


class LoopThread:
    """An event loop in a thread of its own.

    `not_open` is the error's text for calls that come after its end, and `closed` for calls that its end cuts off. A
    fork leaves the thread in the parent: in the child every call raises ConfigurationError.
    """

    def __init__(self, name: str, *, not_open: str, closed: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, or a program that forgets to close would never end.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._not_open = not_open
        self._closed = closed
        self._closing = threading.Lock()
        self._is_closed = False
        self._under_way: set[asyncio.Task[Any]] = set()
        self._process = os.getpid()
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Return whether the caller runs in the thread of the loop."""
        return threading.current_thread() is self._thread

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Return whether this process was forked from the one that has the thread."""
        return os.getpid() != self._process

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread."""
        self._loop.call_soon_threadsafe(function)

    def wait(self, work: Awaitable[T], timeout: float | None = None) -> T:
        """Return the result of a coroutine. Ctrl-C cancels it, and waits until it has ended in good order.

        Raise TimeoutError if it takes longer than `timeout` seconds, whatever holds it up.
        """
        tasks: list[asyncio.Task[Any]] = []
        self._require_own_process(work)
        if self.is_here:
            drop(work)
            raise ConfigurationError("A blocking verb was called from inside a run. Tools and subscribers use await.")
        future = self._begun(work, tasks)
        try:
            return future.result(timeout)
        except CancelledError:
            self._require_open_still()
            raise
        except TimeoutError:
            future.cancel()
            raise
        except KeyboardInterrupt:
            future.cancel()
            asyncio.run_coroutine_threadsafe(_ended(tasks), self._loop).result()
            raise

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of a coroutine, to a task of any event loop. If that is cancelled, the work continues."""
        self._require_own_process(work)
        if self.is_here:
            return await work
        answer: asyncio.Future[asyncio.Task[T]] = asyncio.get_running_loop().create_future()
        with self._beginning(work):
            self._loop.call_soon_threadsafe(self._begin, work, answer)
        task = await answer
        if task.cancelled():  # the end of the loop has cancelled it
            self._require_open_still()
        return task.result()

    def _begin(self, work: Awaitable[T], answer: asyncio.Future[asyncio.Task[T]]) -> None:
        task = self._loop.create_task(self._noted(work, []))
        task.add_done_callback(lambda done: _tell(answer, done))

    def _begun(self, work: Awaitable[T], tasks: list[asyncio.Task[Any]]) -> Future[T]:
        with self._beginning(work):
            return asyncio.run_coroutine_threadsafe(self._noted(work, tasks), self._loop)

    @contextmanager
    def _beginning(self, work: Awaitable[Any]) -> Iterator[None]:
        with self._closing:  # `close` cancels what begins before it, and nothing begins after it
            if self._is_closed:
                drop(work)
                raise ConfigurationError(self._not_open)
            yield

    def _require_own_process(self, work: Awaitable[Any]) -> None:
        # Before any lock is taken: another thread may have held it at the moment of the fork, and is not here.
        if self.is_forked:
            drop(work)
            raise ConfigurationError(FORKED.format(opened=self._process, here=os.getpid()))

    def _require_open_still(self) -> None:
        if self._is_closed:
            raise ConfigurationError(self._closed) from None

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        try:
            while True:
                try:
                    item = self.wait(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(source, "aclose", None)
            if close is not None and not self._is_closed and not self.is_forked:
                self.wait(close())

    def close(self, *last: Coroutine[Any, Any, Any], at_exit: bool = False) -> None:
        """Carry out the `last` coroutines, and stop. Before the very last, end what other threads still wait for.

        At the interpreter's exit no thread can be started any more, and executors have ended by themselves. This call
        then waits for ten seconds at most.

        In a forked child there is nothing to stop, and the `last` are the parent's to carry out.
        """
        if self.is_forked:
            self._is_closed = True
            for work in last:
                drop(work)
            _of_parents.append(self)
            return
        with self._closing:
            self._is_closed = True
        try:
            ended = asyncio.run_coroutine_threadsafe(self._shut_down(*last, at_exit=at_exit), self._loop)
            ended.result(_SECONDS_AT_EXIT if at_exit else None)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self, *last: Coroutine[Any, Any, Any], at_exit: bool) -> None:
        try:
            for work in last[:-1]:
                await work
            for task in self._under_way:
                task.cancel()  # a thread that waits for it would wait for ever
            await asyncio.gather(*self._under_way, return_exceptions=True)
            for work in last[-1:]:
                await work
        finally:
            await self._loop.shutdown_asyncgens()
            if not at_exit:
                await self._loop.shutdown_default_executor()

    async def _noted(self, work: Awaitable[T], tasks: list[asyncio.Task[Any]]) -> T:
        """Await the work, and note its task, so that it can be waited for and cancelled."""
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        self._under_way.add(task)
        try:
            return await work
        finally:
            self._under_way.discard(task)


_SECONDS_AT_EXIT = 10.0
_of_parents: list[LoopThread] = []
"""Loops that a forked child has closed. Collected, they would close tasks and files that are the parent's too."""


def _tell(answer: asyncio.Future[asyncio.Task[T]], done: asyncio.Task[T]) -> None:
    """Tell a task of another event loop that work is done, if it still waits and its loop is still there."""
    if not done.cancelled():
        done.exception()  # fetched, or asyncio would complain if nobody is left to be told
    with suppress(RuntimeError):  # a loop that is closed raises it
        answer.get_loop().call_soon_threadsafe(_settle, answer, done)


def _settle(answer: asyncio.Future[asyncio.Task[T]], done: asyncio.Task[T]) -> None:
    if not answer.done():
        answer.set_result(done)


def drop(work: Awaitable[Any]) -> None:
    """Close a coroutine that is never awaited, so that Python does not warn of it."""
    if inspect.iscoroutine(work):
        work.close()


async def _next(source: AsyncIterator[T]) -> T:
    """Return the next item, in the loop's own thread. So the loop knows the generator, and closes it at its end."""
    return await anext(source)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
