"""Recovery in the background: a connection continues killed runs while it is open, without delaying other work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from weakref import WeakValueDictionary

from perdure.actions.resume import RecoveryReport
from perdure.errors import PerdureError
from perdure.model.ids import SessionId

_log = logging.getLogger("perdure.recovery")
# A tool of a run that is being recovered must not wait for the end of that recovery.
_is_within: ContextVar[bool] = ContextVar("perdure_recovering", default=False)


class Recovering:
    """A search for killed runs, at once and then at intervals: on other machines a claim lapses only with its lease.

    It is stopped by `stop`, never by a cancellation. That would end the run that it is continuing, and cut off its
    answer. When the connection is left, such a run is interrupted like any other, and waits for the next process.
    """

    def __init__(
        self,
        lapsed: Callable[[], Awaitable[Sequence[SessionId]]],
        recover: Callable[[SessionId], Awaitable[RecoveryReport]],
        root_of: Callable[[SessionId], Awaitable[SessionId]],
        every: float,
    ) -> None:
        self._lapsed = lapsed
        self._recover = recover
        self._root_of = root_of
        self._every = every
        self._is_stopped = False
        self._awake = asyncio.Event()
        self._locks: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        self.ended = 0
        """The number of recoveries that have ended."""
        self._told: set[tuple[str, str]] = set()
        """The failures that were logged: a run that cannot be continued is met again at every look."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    @property
    def is_stopped(self) -> bool:
        """Return whether the connection is being left."""
        return self._is_stopped

    @asynccontextmanager
    async def alone(self, session_id: SessionId) -> AsyncIterator[None]:
        """Keep other recoveries here out of a session, its callers and its sub-agents while the block lasts.

        The recovery of a caller continues its sub-agents too. It would fail if one of them is being recovered apart.
        """
        if _is_within.get():
            yield
            return
        lock = self._locks.setdefault(await self._root_of(session_id), asyncio.Lock())
        async with lock:
            token = _is_within.set(True)
            try:
                yield
            finally:
                _is_within.reset(token)
                self.ended += 1

    async def is_over(self, session_id: SessionId, ended: int) -> bool:
        """Wait until a session is not being recovered here. Return False if no recovery has ended since `ended`.

        In a connection that is being left, False is returned, too.
        """
        if _is_within.get():
            return False
        lock = self._locks.get(await self._root_of(session_id))
        if lock is not None:
            async with lock:
                pass
        return self.ended != ended and not self.is_stopped

    def stop(self) -> None:
        """Begin no other recovery."""
        self._is_stopped = True
        self._awake.set()

    def look_soon(self) -> None:
        """Look for killed runs now instead of at the end of the interval, because a caller has found one."""
        self._awake.set()

    async def end(self) -> None:
        """Wait until nothing is being recovered. Call `stop` first."""
        await asyncio.wait({self._task})
        if not self._task.cancelled() and self._task.exception() is not None:
            _log.error("the recovery of killed runs has failed", exc_info=self._task.exception())

    async def _watch(self) -> None:
        while not self._is_stopped:
            self._awake.clear()
            try:
                await self._look()
            except PerdureError as error:  # the store may work again at the next look
                _log.warning("killed runs could not be looked for: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), self._every)

    async def _look(self) -> None:
        for session_id in await self._lapsed():
            if self._is_stopped:
                return
            async with self.alone(session_id):
                report = await self._recover(session_id)
            for failed, reason in report.failed:
                if (failed, reason) not in self._told:
                    self._told.add((failed, reason))
                    _log.error("the killed run of session %s could not be recovered: %s", failed, reason)
