"""The same verbs for those who do not await: a thread with an event loop does."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from concurrent.futures import CancelledError
from functools import wraps
from typing import Any, Self

from perdure.errors import ConfigurationError
from perdure.model.checks import expect
from perdure.sessions.chat import Chat
from perdure.sessions.sessions import Sessions
from perdure.sessions.started_run import StartedRun

NOT_OPEN = "These sessions are not open. Use them inside `with perdure.connect_blocking(…)`."


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="perdure blocking", daemon=True)
        self._closing = threading.Lock()
        self._is_closed = False
        self._under_way: set[asyncio.Task[Any]] = set()
        self._thread.start()

    def wait(self, work: Awaitable[Any]) -> Any:
        """What a coroutine comes to. Ctrl-C cancels it, and waits until it has put its things in order."""
        tasks: list[asyncio.Task[Any]] = []
        with self._closing:  # what is begun before the end is cancelled by it, and nothing is begun after it
            self._require_usable(work)
            future = asyncio.run_coroutine_threadsafe(self._noted(work, tasks), self._loop)
        try:
            return future.result()
        except CancelledError:
            if self._is_closed:
                raise ConfigurationError("These sessions were closed while this thread waited for them.") from None
            raise
        except KeyboardInterrupt:
            future.cancel()
            asyncio.run_coroutine_threadsafe(_ended(tasks), self._loop).result()
            raise

    def _require_usable(self, work: Awaitable[Any]) -> None:
        problem = None
        if self._is_closed:
            problem = NOT_OPEN
        elif threading.current_thread() is self._thread:
            problem = "A blocking verb was called from inside a run. Tools and subscribers use await."
        if problem is not None:
            if inspect.iscoroutine(work):
                work.close()
            raise ConfigurationError(problem)

    def iterate(self, source: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    item = self.wait(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(source, "aclose", None)
            if close is not None and not self._is_closed:
                self.wait(close())

    def close(self, *last: Coroutine[Any, Any, Any]) -> None:
        """Do the last things there are to be done, end what other threads still wait for before the very last, stop."""
        with self._closing:
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._shut_down(*last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self, *last: Coroutine[Any, Any, Any]) -> None:
        try:
            for work in last[:-1]:
                await work
            for task in self._under_way:
                task.cancel()  # those who wait for it would wait for ever
            await asyncio.gather(*self._under_way, return_exceptions=True)
            for work in last[-1:]:
                await work
        finally:
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

    async def _noted(self, work: Awaitable[Any], tasks: list[asyncio.Task[Any]]) -> Any:
        """Wait for something, having written down which task does."""
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        self._under_way.add(task)
        try:
            return await work
        finally:
            self._under_way.discard(task)


async def _next(source: AsyncIterator[Any]) -> Any:
    """Begin in the loop's own thread: only then does the loop know of a generator, and close it at its end."""
    return await anext(source)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


class _Blocking:
    """An object whose coroutines are waited for, and whose async iterators are plain ones."""

    def __init__(self, target: Any, loop: _Loop | None) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found) or inspect.isclass(found):
            return found

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: _awaitable(each) for name, each in kwargs.items()}
            return self._passed_on(found(*map(_awaitable, args), **named))

        return call

    def _passed_on(self, outcome: Any) -> Any:
        if self._loop is None:
            if inspect.iscoroutine(outcome):
                outcome.close()
            raise ConfigurationError(NOT_OPEN)
        if inspect.iscoroutine(outcome):
            outcome = self._loop.wait(outcome)
        if isinstance(outcome, Chat):
            return BlockingChat(outcome, self._loop)
        if isinstance(outcome, StartedRun | Sessions):
            return _Blocking(outcome, self._loop)
        return self._loop.iterate(outcome) if hasattr(outcome, "__anext__") else outcome

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._target)})

    def __repr__(self) -> str:
        return f"<blocking {self._target!r}>"


def _awaitable(given: Any) -> Any:
    return given._target if isinstance(given, _Blocking) else given


class BlockingChat(_Blocking):
    """A `Chat` whose verbs are not awaited."""


class BlockingSessions(_Blocking):
    """`Sessions` whose verbs are not awaited."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(expect(sessions, Sessions, "$.sessions"), None)

    def __enter__(self) -> Self:
        self._loop = _Loop()
        try:
            self._loop.wait(self._target.__aenter__())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Give runs of other threads their grace, as `Sessions` does, then end what these threads still wait for."""
        self._close(
            self._target._connection.end_runs(at_once=kind is not None), self._target.__aexit__(kind, None, None)
        )

    def _close(self, *last: Coroutine[Any, Any, Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.close(*last)
        finally:
            self._loop = None
