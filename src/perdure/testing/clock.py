"""A clock that moves only when it is told to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class FrozenClock:
    """A clock that stands still until `advance` is called. Each reading may move it by `tick` seconds.

    Use it with `ids.use(clock=…)`.
    """

    def __init__(self, start: datetime | None = None, *, tick: float = 0.0) -> None:
        self._time = start or datetime(2025, 1, 1, tzinfo=UTC)
        self._tick = timedelta(seconds=tick)

    def __call__(self) -> datetime:
        self._time += self._tick
        return self._time

    def advance(self, seconds: float) -> datetime:
        """Move the clock forward, and return the new time."""
        self._time += timedelta(seconds=seconds)
        return self._time
