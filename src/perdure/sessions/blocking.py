"""The same verbs without `await`: a thread with an event loop awaits them."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from functools import wraps
from typing import Any, Self

from perdure.errors import ConfigurationError
from perdure.model.checks import expect
from perdure.sessions.chat import Chat
from perdure.sessions.loop_thread import LoopThread
from perdure.sessions.queueing import Queued
from perdure.sessions.sessions import Sessions
from perdure.sessions.started_run import StartedRun

CLOSED = "These sessions were closed while this thread waited for them."
NOT_OPEN = "These sessions are not open. Use them inside `with perdure.connect_blocking(…)`."


class _Blocking:
    """An object whose coroutines are waited for, and whose async iterators are plain ones."""

    def __init__(self, target: Any, loop: LoopThread | None) -> None:
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
                outcome.close()  # or Python would warn that it was never awaited
            raise ConfigurationError(NOT_OPEN)
        if inspect.iscoroutine(outcome):
            outcome = self._loop.wait(outcome)
        if isinstance(outcome, Chat):
            return BlockingChat(outcome, self._loop)
        if isinstance(outcome, StartedRun | Sessions | Queued):
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
        self._loop = LoopThread("perdure blocking", not_open=NOT_OPEN, closed=CLOSED)
        try:
            self._loop.wait(self._target.__aenter__())
        except BaseException:  # after Ctrl-C, too: the thread would stay
            self._close()
            raise
        return self

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
