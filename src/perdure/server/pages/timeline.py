"""The time that a run has worked, as bars. Waiting for a person, or lying dead after a crash, takes no room."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from perdure.model.loop_events import AgentStart, AnyLoopEvent, UnknownEvent

_THINNEST = 0.6
"""A bar's least width, in hundredths of the run, since what took no time has happened too."""


class Bar(msgspec.Struct, frozen=True):
    """A stretch of a run's time, in hundredths of all of it."""

    x: float
    width: float
    kind: str = ""


class Timeline:
    """A scale for the times of a run, from 0 at its start to 100 at its end."""

    def __init__(self, events: Sequence[AnyLoopEvent], until: datetime) -> None:
        # An event of a kind that we do not know may not tell its time.
        self._begin = next((event.at for event in events if not isinstance(event, UnknownEvent)), until)
        self._pauses = [(event.at, event.idle) for event in events if isinstance(event, AgentStart) and event.resumed]
        # Bars are divided by it, so it must not be 0.
        self.total = max(self.after(until), 1e-6)

    def after(self, at: datetime) -> float:
        """Return the seconds of work from the start to a time."""
        idle = sum(pause for resumed_at, pause in self._pauses if resumed_at <= at)
        return max(0.0, (at - self._begin).total_seconds() - idle)

    def took(self, start: datetime, stop: datetime) -> float:
        """Return the seconds of work between two times."""
        return max(0.0, self.after(stop) - self.after(start))

    def bar(self, start: datetime, stop: datetime, kind: str = "") -> Bar:
        x = min(100.0 - _THINNEST, 100 * self.after(start) / self.total)
        width = min(100.0 - x, max(_THINNEST, 100 * self.took(start, stop) / self.total))
        return Bar(round(x, 2), round(width, 2), kind)
