"""A dispatcher without an engine: the message that waits in an inbox is the job."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from perdure.errors import PerdureError
from perdure.model.ids import SessionId
from perdure.protocols import Advance, Outcome, Queue, WorkerOptions

_log = logging.getLogger("perdure.workers")
LOOK_EVERY = 0.2
"""Seconds between two looks for what other processes have posted. What this one posts is seen at once."""
_BUSY_AGAIN = 1.0
_FAILED_AGAIN = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


class InboxDispatcher:
    """Hands out the sessions in whose inboxes something waits, the most urgent first.

    Several processes may look at one store: the claim on a session lets one of them through.
    """

    def __init__(self, queue: Queue, *, look_every: float = LOOK_EVERY) -> None:
        self._queue = queue
        self._look_every = look_every
        self._woken: dict[SessionId, int | None] = {}
        """Sessions to be looked at though nothing may wait there, such as those whose runs were killed, by priority."""
        self._news = asyncio.Event()
        self._resting: dict[SessionId, float] = {}
        """When a session may be looked at again."""
        self._failures: dict[SessionId, int] = {}
        self._running: dict[SessionId, asyncio.Task[None]] = {}

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        self._woken[SessionId(session_id)] = priority
        self._news.set()

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        ending = asyncio.create_task(stopped.wait())
        try:
            while not stopped.is_set():
                self._news.clear()
                for session_id in await self._next(options, options.concurrency - len(self._running)):
                    self._begin(session_id, advance)
                await self._pause(ending)
            if self._running:
                await asyncio.wait(self._running.values(), timeout=options.drain)
        finally:
            ending.cancel()

    async def _next(self, options: WorkerOptions, room: int) -> list[SessionId]:
        """Return the sessions to begin with now."""
        if room <= 0:
            return []
        self._woken = {each: at for each, at in self._woken.items() if at is None or options.takes(at)}
        woken = [each for each in self._woken if self._may_begin(each)][:room]
        found = dict.fromkeys(woken)
        if len(found) < room:
            # As many more as cannot be begun now.
            limit = room + len(self._running) + len(self._resting) + len(found)
            try:
                waiting = await self._queue.waiting(limit)
            except PerdureError as error:  # the store may answer again
                _log.warning("the inboxes could not be looked into: %s", error)
                waiting = []
            urgent = (each.session_id for each in waiting if options.takes(each.priority))
            found |= dict.fromkeys(each for each in urgent if self._may_begin(each))
        chosen = list(found)[:room]
        for session_id in chosen:
            self._woken.pop(session_id, None)
        return chosen

    def _may_begin(self, session_id: SessionId) -> bool:
        if session_id in self._running:
            return False
        again = self._resting.get(session_id)
        if again is not None and again > asyncio.get_running_loop().time():
            return False
        self._resting.pop(session_id, None)
        return True

    def _begin(self, session_id: SessionId, advance: Advance) -> None:
        task = asyncio.ensure_future(self._advanced(session_id, advance))
        self._running[session_id] = task
        task.add_done_callback(lambda _: self._ended(session_id))

    def _ended(self, session_id: SessionId) -> None:
        del self._running[session_id]
        self._news.set()

    async def _advanced(self, session_id: SessionId, advance: Advance) -> None:
        outcome = await advance(session_id)
        if outcome is Outcome.FAILED:
            count = self._failures[session_id] = self._failures.get(session_id, -1) + 1
            self._rest(session_id, _FAILED_AGAIN[min(count, len(_FAILED_AGAIN) - 1)])
            return
        self._failures.pop(session_id, None)
        if outcome is Outcome.BUSY:
            self._rest(session_id, _BUSY_AGAIN)

    def _rest(self, session_id: SessionId, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._resting[session_id] = loop.time() + seconds
        loop.call_later(seconds, self._rested, session_id)

    def _rested(self, session_id: SessionId) -> None:
        self._resting.pop(session_id, None)
        self._woken[session_id] = None  # it was urgent enough before
        self._news.set()

    async def _pause(self, ending: asyncio.Task[Any]) -> None:
        """Wait until there may be something to do."""
        news: asyncio.Task[Any] = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({news, ending}, timeout=self._look_every, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            with suppress(asyncio.CancelledError):
                await news
