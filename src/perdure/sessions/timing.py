"""Times that callers give."""

from __future__ import annotations

from datetime import datetime

from perdure.errors import InvalidData

UNTIL = "until"
"""The name of the timer that opens a session again which was suspended until a time."""


def due_at(at: object, path: str = "$.at") -> float:
    """Return a time in seconds since 1970. InvalidData if it has no time zone, or is none."""
    if not isinstance(at, datetime):
        raise InvalidData(path, f"expected a datetime, got {type(at).__name__}")
    if at.tzinfo is None:
        raise InvalidData(path, "the time needs a time zone: datetime.now(UTC) + timedelta(days=3), say")
    return at.timestamp()
