"""Times and schedules from callers, checked and converted to seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from perdure.errors import ConfigurationError, InvalidData
from perdure.protocols import FARTHEST

if TYPE_CHECKING:
    from cronsim import CronSim

UNTIL = "until"
"""The name of the timer that opens a session again after it was suspended until a time."""
_FIELDS = 5
"""The number of fields in a schedule."""


def due_at(at: object, path: str = "$.at") -> float:
    """Return a time in seconds since 1970. Raise InvalidData if it is not a datetime, or has no time zone."""
    if not isinstance(at, datetime):
        raise InvalidData(path, f"expected a datetime, got {type(at).__name__}")
    if at.tzinfo is None:
        raise InvalidData(path, "the time needs a time zone: datetime.now(UTC) + timedelta(days=3), say")
    due = at.timestamp()
    if due > FARTHEST:
        raise InvalidData(path, f"{at:%Y-%m-%d} is too far away; name a nearer time")
    return due


def next_time(cron: str, timezone: str | None, after: datetime) -> datetime:
    """Return when a schedule is due next. Raise InvalidData if it is not a schedule, or the time zone is not known."""
    found = next(_times(cron, timezone, after), None)
    if found is None:
        raise InvalidData("$.cron", f"{cron!r} names no time that ever comes")
    return found.astimezone(UTC)


def _times(cron: str, timezone: str | None, after: datetime) -> CronSim:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError("Schedules need the package cronsim.", "pip install 'perdure[workers]'") from None
    try:
        zone = ZoneInfo(timezone) if timezone is not None else UTC
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidData("$.timezone", f"no time zone is called {timezone!r}; write one like 'Europe/Oslo'") from None
    # CronSim reads a sixth field as seconds, and workers are not that exact.
    if not isinstance(cron, str) or len(cron.split()) != _FIELDS:
        problem = f"{cron!r} is not a schedule: it needs 5 fields, which are minute, hour, day, month and weekday"
        raise InvalidData("$.cron", f"{problem}; write one like '0 7 * * MON'")
    try:
        return CronSim(cron, after.astimezone(zone))
    except CronSimError as error:
        problem = f"{cron!r} is not a schedule ({error}); write one like '0 7 * * MON'"
        raise InvalidData("$.cron", problem) from None
