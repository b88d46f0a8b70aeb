"""A dispatcher without an engine: a message that waits in an inbox is the job."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

from perdure.errors import PerdureError
from perdure.model.ids import SessionId
from perdure.protocols import Advance, Outcome, Queue, Waiting, WorkerOptions

_log = logging.getLogger("perdure.workers")
LOOK_EVERY = 0.2
"""Seconds between two looks for messages of other processes. Those of this process are seen at once."""
_BUSY_AGAIN = 1.0
_FAILED_AGAIN = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


class InboxDispatcher:
    """A dispatcher of sessions with waiting messages, the most urgent first. Of equal urgency, owners take turns.

    Several processes may look at one store, the `queue`: the claim on a session lets one of them through. Each looks
    for messages of others every `look_every` seconds.
    """

    def __init__(self, queue: Queue, *, look_every: float = LOOK_EVERY) -> None:
        self._queue = queue
        self._look_every = look_every
        self._woken: dict[SessionId, int | None] = {}
        """The priorities of sessions to look at even if nothing waits there, such as those with killed runs."""
        self._news = asyncio.Event()
        self._resting = _Resting(self._rested)
        self._owners_resting = _Resting(lambda _: self.look())
        """The owners with as many runs as are allowed. One session of each is tried again later, not all of them."""
        self._failures: dict[SessionId, int] = {}
        self._running: dict[SessionId, asyncio.Task[None]] = {}
        self._of_owner: Counter[str | None] = Counter()
        """The number of sessions of each owner that are run here."""
        self._last: str | None = None
        """The owner of the session that was begun last. The next one should be of another owner."""

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        """Look at a session soon. `session_id` names it, `priority` is how urgent it is, and `owner` is its owner."""
        self._woken[SessionId(session_id)] = priority
        self._news.set()

    def look(self) -> None:
        """Look for waiting messages now."""
        self._news.set()

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        """Hand sessions to `advance` until `stopped` is set, as the worker's `options` allow."""
        ending = asyncio.create_task(stopped.wait())
        try:
            while not stopped.is_set():
                self._news.clear()  # before the look: news that come during it are not lost
                await self._begin_some(advance, options, stopped)
                await self._pause(ending)
            if self._running:
                await asyncio.wait(self._running.values(), timeout=options.drain)
        finally:
            ending.cancel()

    async def _begin_some(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        """Begin as many sessions as there is room for. Begin none once the worker is told to stop."""
        self._woken = {each: at for each, at in self._woken.items() if at is None or options.takes(at)}
        for session_id in [each for each in self._woken if self._may_begin(each)]:
            if len(self._running) < options.concurrency:
                self._begin(session_id, None, advance)
        while len(self._running) < options.concurrency:
            begun = False
            found = await self._in_turn(options)
            if stopped.is_set():  # a session begun now would end at once as busy, and the loop would look for another
                return
            for each in found:
                # Looked at again: an owner may have got their full share by the sessions before in this list.
                if self._has_room(each.owner, options) and self._may_begin(each.session_id):
                    self._begin(each.session_id, each.owner, advance)
                    self._last, begun = each.owner, True
            if not begun:
                return

    async def _in_turn(self, options: WorkerOptions) -> list[Waiting]:
        """Return the sessions to begin next."""
        full = {owner for owner in self._of_owner if owner is not None and not self._has_room(owner, options)}
        try:
            found = await self._queue.in_turn(
                options.concurrency - len(self._running),
                after=self._last,
                skip={*self._running, *self._resting.names},
                not_of=self._owners_resting.names | full,
            )
        except PerdureError as error:  # the store may answer again
            _log.warning("the inboxes could not be looked into: %s", error)
            return []
        return [each for each in found if options.takes(each.priority)]

    def _has_room(self, owner: str | None, options: WorkerOptions) -> bool:
        if owner is None or options.per_owner is None:
            return True
        return self._of_owner[owner] < options.per_owner and owner not in self._owners_resting.names

    def _may_begin(self, session_id: SessionId) -> bool:
        return session_id not in self._running and session_id not in self._resting.names

    def _begin(self, session_id: SessionId, owner: str | None, advance: Advance) -> None:
        self._woken.pop(session_id, None)
        task = asyncio.ensure_future(self._advanced(session_id, owner, advance))
        self._running[session_id] = task
        self._of_owner[owner] += 1
        task.add_done_callback(lambda _: self._ended(session_id, owner))

    def _ended(self, session_id: SessionId, owner: str | None) -> None:
        del self._running[session_id]
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        self._news.set()

    async def _advanced(self, session_id: SessionId, owner: str | None, advance: Advance) -> None:
        outcome = await advance(session_id)
        if outcome is Outcome.FAILED:
            count = self._failures[session_id] = self._failures.get(session_id, -1) + 1
            self._resting.begin(session_id, _FAILED_AGAIN[min(count, len(_FAILED_AGAIN) - 1)])
            return
        self._failures.pop(session_id, None)
        if outcome is Outcome.OWNER_BUSY and owner is not None:
            self._owners_resting.begin(owner, _BUSY_AGAIN)
        elif outcome in (Outcome.BUSY, Outcome.OWNER_BUSY):
            self._resting.begin(session_id, _BUSY_AGAIN)
        elif owner is not None:  # a run of this owner has ended, so another one may begin
            self._owners_resting.end(owner)

    def _rested(self, name: str) -> None:
        self._woken[SessionId(name)] = None  # without a priority: it was urgent enough before
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


class _Resting:
    """Names of sessions or owners that must not be looked at for a while."""

    def __init__(self, rested: Callable[[str], None]) -> None:
        self._rested = rested
        self._ends: dict[str, asyncio.TimerHandle] = {}

    @property
    def names(self) -> Set[str]:
        return self._ends.keys()

    def begin(self, name: str, seconds: float) -> None:
        self.end(name)
        self._ends[name] = asyncio.get_running_loop().call_later(seconds, self._over, name)

    def end(self, name: str) -> None:
        handle = self._ends.pop(name, None)
        if handle is not None:
            handle.cancel()

    def _over(self, name: str) -> None:
        del self._ends[name]
        self._rested(name)
