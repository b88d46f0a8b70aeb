"""Retention by workers: from time to time one of them looks for sessions whose time is over, and erases them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from perdure.errors import PerdureError
from perdure.model.ids import now
from perdure.protocols import Left, Queue, Retains
from perdure.sessions.rounds import RetentionReport, Round

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

_NAME = "perdure.retention"
"""The name of the rate with one place, which a worker takes for a round. The rate's time is the end of that place."""
_LEASE = 30.0
"""Seconds after which another worker begins the round again, if its worker was killed."""
_PAUSE = 0.05
"""Seconds between two commits, in which other processes can write."""
_NAMED = 10
"""The most sessions that a line of the log names, of those that stay."""
_log = logging.getLogger("perdure.workers")


class Retainer:
    """A worker's part in retention: it carries out a round if no other worker has within `every` seconds."""

    def __init__(self, sessions: Sessions, queue: Queue, every: float, stopped: asyncio.Event) -> None:
        self._sessions = sessions
        self._queue = queue
        self._every = every
        self._stopped = stopped
        self._clock = SteadyClock()
        self._not_before = 0.0
        self._renewed = 0.0
        self._since: datetime | None = None
        """The time at which this worker's last complete round began. Older versions were counted in it."""
        self._told: Counter[tuple[str, str]] = Counter()

    async def look(self) -> None:
        """Carry out a round, if one is due and no other worker is at it."""
        if time.monotonic() < self._not_before or not isinstance(self._sessions.store, Retains):
            return
        if not await self._is_taken():
            return
        at = self._clock()
        try:
            work = Round(self._sessions, self._sessions._connection.retention, at, since=self._since)
            report = await work.carry_out(between=self._between)
        except _Stopped:
            return
        self._since = at
        # The place is kept until the next round is due, so that no other worker begins one earlier.
        await self._queue.reserve(_NAME, cost=self._every, burst=_LEASE)
        self._tell(report)

    async def _is_taken(self) -> bool:
        """Take the place for a round, and return True. Otherwise remember when it may be free."""
        wait = await self._queue.reserve(_NAME, cost=_LEASE, burst=_LEASE, most=0.0)
        # No worker takes the place for longer than this. So the clock was set back since, and to wait for that time
        # might take years. Two rounds at once do no harm.
        is_real = wait <= self._every + 2 * _LEASE
        self._renewed = time.monotonic()
        self._not_before = self._renewed + (self._every if wait == 0.0 or not is_real else min(wait, self._every))
        return wait == 0.0 or not is_real

    async def _between(self) -> None:
        """Keep the place, and let other processes write."""
        if self._stopped.is_set():
            raise _Stopped
        elapsed = time.monotonic() - self._renewed
        if elapsed > _LEASE / 3:
            self._renewed += elapsed
            await self._queue.reserve(_NAME, cost=elapsed, burst=_LEASE)
        await asyncio.sleep(_PAUSE)

    def _tell(self, report: RetentionReport) -> None:
        if report.erased or report.pruned:
            facts = {"event": "retention", "erased": report.sessions, "pruned": len(report.pruned)}
            facts |= {"versions": report.versions, "messages": report.messages, "bytes": report.bytes}
            _log.info(
                "retention erased %d sessions, %d versions and %d messages (%d bytes)",
                *(report.sessions, report.versions, report.messages, report.bytes),
                extra={"facts": facts},
            )
        new = [each for each in report.left if not self._told[each.session_id, each.why]]
        self._told = Counter((each.session_id, each.why) for each in report.left)
        if new:
            facts = {"event": "retention_left", "sessions": {each.session_id: each.why for each in new}}
            _log.info("retention leaves for now: %s", _listed(new), extra={"facts": facts})


class SteadyClock:
    """The clock that ages are counted by: the wall clock, unless that has jumped ahead recently.

    A clock that is wrong by a year for a minute must not erase sessions that are kept for a year. So a jump ahead is
    believed once it has lasted for an hour. A clock that is set back is believed at once, since that erases less.
    """

    TOLERANCE = timedelta(seconds=60)
    BELIEVED_AFTER = 3600.0

    def __init__(self) -> None:
        self._wall, self._steady = now(), time.monotonic()
        self._jumped: float | None = None

    def __call__(self) -> datetime:
        wall, steady = now(), time.monotonic()
        expected = self._wall + timedelta(seconds=steady - self._steady)
        if wall <= expected + self.TOLERANCE or self._is_believed(steady, wall - expected):
            self._wall, self._steady, self._jumped = wall, steady, None
            return wall
        return expected

    def _is_believed(self, steady: float, ahead: timedelta) -> bool:
        if self._jumped is None:
            self._jumped = steady
            _log.warning("the clock has jumped ahead by %s: retention waits until it has lasted for an hour", ahead)
        return steady - self._jumped >= self.BELIEVED_AFTER


class _Stopped(PerdureError):
    """The signal that the worker was told to stop in the middle of a round. The next round does the rest."""


def _listed(left: Sequence[Left]) -> str:
    named = ", ".join(f"{each.session_id} ({each.why})" for each in left[:_NAMED])
    return named + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
