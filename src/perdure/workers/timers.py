"""Timers and schedules. The store keeps them, and any worker rings them when they are due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from msgspec.structs import replace

from perdure.actions.inbox import Execute
from perdure.actions.waiting import is_waiting
from perdure.errors import SessionConflict, SessionNotFound
from perdure.model.ids import new_id, now
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import PARKED, ActionContext, ActionResult, Answer, Dispatcher, Entry, Queue, Timer, tell_of
from perdure.sessions.queueing import MOST_WAITING
from perdure.sessions.timing import UNTIL, next_time

_AT_ONCE = 100
_FULL = 30.0
"""Seconds after which a message for a full session is tried again."""
_log = logging.getLogger("perdure.workers")


class Bell:
    """A bell that rings the timers of a store: it puts their messages into the inboxes of their sessions, each once."""

    def __init__(self, queue: Queue, dispatcher: Dispatcher, execute: Execute) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._execute = execute
        self._full: set[str] = set()
        """The sessions that were logged as full. Their timers come up again and again."""

    async def ring(self, *, ahead: float = 0.0) -> None:
        """Ring all timers that are due, and those that come due within `ahead` seconds, each at its time."""
        while timers := await self._queue.due(now().timestamp() + ahead, limit=_AT_ONCE):
            by_session: dict[str, list[Timer]] = {}
            for timer in timers:
                by_session.setdefault(timer.session_id, []).append(timer)
            ringing = map(self._ring_all, by_session.values())  # together, so that they share commits
            failures = [each for each in await asyncio.gather(*ringing, return_exceptions=True) if each is not None]
            if failures:  # only now, so that one session's error does not keep the others from ringing
                raise failures[0]
            if len(timers) < _AT_ONCE or timers[-1].due > now().timestamp():
                return

    async def _ring_all(self, timers: Sequence[Timer]) -> None:
        """Ring timers of one session, in the order in which they are due."""
        for timer in timers:
            await asyncio.sleep(timer.due - now().timestamp())
            # If the clock was set back meanwhile, it is too early, and the next look finds the timer again.
            if timer.due <= now().timestamp() and await self._rung(timer):
                await tell_of(self._dispatcher, timer.session_id, priority=timer.priority)

    async def _rung(self, timer: Timer) -> bool:
        if timer.name == UNTIL:  # before the ring: if this process dies in between, the timer is still there
            # SessionBusy is not suppressed: a claim ends soon, and the timer must not be rung without any effect.
            # If two workers find the timer, one opens the session, and the other has nothing left to do.
            with suppress(SessionNotFound, SessionConflict):
                await self._execute(timer.session_id, _EndPause())
        again = None if timer.cron is None else next_time(timer.cron, timer.timezone, now()).timestamp()
        later = now().timestamp() + _FULL
        rung = await self._queue.ring(timer, again=again, entry=_item_of(timer), most=MOST_WAITING, later=later)
        if rung is not None:
            self._full.discard(timer.session_id)
        elif timer.session_id not in self._full:
            self._full.add(timer.session_id)
            what = "is left out until there is room" if timer.cron else "is tried again"
            _log.warning("session %s is full: what is due there (%s) %s", timer.session_id, timer.name, what)
        return bool(rung)


@dataclass(frozen=True, slots=True)
class _EndPause:
    """An action that opens a session if it is still paused. One that is closed, parked or waits for a person stays."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        is_paused = session.status is SessionStatus.SUSPENDED and not is_waiting(session)
        if not is_paused or PARKED in session.info.tags:
            return session if context is None else Answer(session)
        return session.activated()


def _item_of(timer: Timer) -> Entry | None:
    """Return the item that a timer puts into an inbox. Each time of a schedule has a key of its own."""
    if timer.entry is None:
        return None
    body = {**timer.entry.body, "id": new_id()}
    # A schedule puts in the same entry each time, so each time needs a key and message ids of its own.
    if timer.cron is not None:
        body["key"] = f"{timer.name}@{datetime.fromtimestamp(timer.due, UTC).isoformat()}"
        body["messages"] = [{**message, "id": new_id()} for message in body["messages"]]
    return replace(timer.entry, body=body)
