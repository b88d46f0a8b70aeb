"""Timers and schedules: the store keeps them, and any worker rings them when they are due."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec.structs import replace

from perdure.actions.inbox import Execute
from perdure.actions.lifecycle import ResumeSession
from perdure.errors import ConfigurationError, IllegalStatusChange, InvalidData, SessionBusy, SessionNotFound
from perdure.model.ids import new_id, now
from perdure.protocols import Dispatcher, Entry, Queue, Timer, tell_of
from perdure.sessions.timing import UNTIL

if TYPE_CHECKING:
    from cronsim import CronSim

_AT_ONCE = 100


class Bell:
    """Rings the timers of a store: puts their messages into the inboxes of their sessions, each once."""

    def __init__(self, queue: Queue, dispatcher: Dispatcher, execute: Execute) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._execute = execute

    async def ring(self) -> None:
        """Ring all timers that are due."""
        while timers := await self._queue.due(now().timestamp(), limit=_AT_ONCE):
            rung = [timer for timer in timers if await self._rung(timer)]
            for timer in rung:
                await tell_of(self._dispatcher, timer.session_id, priority=timer.priority)
            if len(timers) < _AT_ONCE:
                return

    async def _rung(self, timer: Timer) -> bool:
        if timer.name == UNTIL:  # first: one that is not rung is met again
            with suppress(SessionNotFound, SessionBusy, IllegalStatusChange):  # somebody was quicker
                await self._execute(timer.session_id, ResumeSession())
        again = None if timer.cron is None else next_time(timer.cron, timer.timezone, now()).timestamp()
        return await self._queue.ring(timer, again=again, entry=_item_of(timer))


def _item_of(timer: Timer) -> Entry | None:
    """Return the item that a timer puts into an inbox. Each time that a schedule is due has a key of its own."""
    if timer.entry is None:
        return None
    body = {**timer.entry.body, "id": new_id()}
    if timer.cron is not None:
        body["key"] = f"{timer.name}@{datetime.fromtimestamp(timer.due, UTC).isoformat()}"
        body["messages"] = [{**message, "id": new_id()} for message in body["messages"]]
    return replace(timer.entry, body=body)


def next_time(cron: str, timezone: str | None, after: datetime) -> datetime:
    """Return when a schedule is due next. InvalidData if it is none, or the time zone is not known."""
    return next(_times(cron, timezone, after)).astimezone(UTC)


def _times(cron: str, timezone: str | None, after: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError("Schedules need the package cronsim.", "pip install 'perdure[workers]'") from None
    try:
        zone = ZoneInfo(timezone) if timezone is not None else UTC
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidData("$.timezone", f"there is no time zone {timezone!r}; write one like 'Europe/Oslo'") from None
    try:
        return CronSim(cron, after.astimezone(zone))
    except CronSimError as error:
        problem = f"{cron!r} is not a schedule ({error}); write one like '0 7 * * MON'"
        raise InvalidData("$.cron", problem) from None
