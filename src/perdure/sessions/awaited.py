"""Objects whose coroutines a thread with an event loop awaits. The classes in `blocking` are made of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from perdure.errors import ConfigurationError
from perdure.model.checks import expect
from perdure.sessions.loop_thread import LoopThread, drop
from perdure.sessions.sessions import Sessions

CLOSED = "These sessions were closed while this thread waited for them."
NOT_OPEN = "These sessions are not open. Use them inside `with perdure.connect_blocking(…)`."
OPEN = "These sessions are open already. Use them as they are: only what connect_blocking() returns goes into a `with`."

T = TypeVar("T")
Target = TypeVar("Target")


class Awaited(Generic[Target]):
    """An object whose coroutines are waited for, and whose async iterators are plain ones."""

    def __init__(self, target: Target, loop: LoopThread | None) -> None:
        self._target = target
        self._loop = loop

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._running()
        except ConfigurationError:
            drop(work)
            raise
        return loop.wait(work)

    def _iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        return self._running().iterate(source)

    def _running(self) -> LoopThread:
        """Return the loop. Raise ConfigurationError if there is none yet, or none any more."""
        if self._loop is None or self._loop.is_closed:
            raise ConfigurationError(NOT_OPEN)
        return self._loop

    def __repr__(self) -> str:
        return f"<blocking {self._target!r}>"


class AwaitedSessions(Awaited[Sessions]):
    """Sessions with a loop of their own, which runs while they are open."""

    def __init__(self, sessions: Sessions, loop: LoopThread | None = None) -> None:
        super().__init__(expect(sessions, Sessions, "$.sessions"), loop)

    def _open(self) -> None:
        if self._loop is not None:
            raise ConfigurationError(OPEN)
        self._loop = LoopThread("perdure blocking", not_open=NOT_OPEN, closed=CLOSED)
        try:
            self._loop.wait(self._target.__aenter__())
        except BaseException:  # after Ctrl-C, too: the thread would stay
            self._close()
            raise

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Give runs of other threads their grace, as `Sessions` does, then end what those threads still wait for."""
        self._close(
            self._target._connection.end_runs(at_once=kind is not None), self._target.__aexit__(kind, None, None)
        )

    def _close(self, *last: Coroutine[Any, Any, Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.close(*last)
        finally:
            self._loop = None
