"""Times as people type them: `30d` ago, or a date."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_SPAN = re.compile(r"(\d{1,6})\s*(s|min|m|h|d|w)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """The callback of an option: so long ago, or a date with or without a time, in UTC unless it says otherwise."""
    if value is None:
        return None
    try:
        return _ago(value) or _at(value)
    except (ValueError, OverflowError):
        problem = f"{value!r} is no time. Use 30min, 2h, 3d, 4w, 2026-01-31 or 2026-01-31T18:00:00+01:00."
        raise click.BadParameter(problem, ctx, param) from None


def _ago(value: str) -> datetime | None:
    from perdure.model.ids import now

    span = _SPAN.fullmatch(value)
    return now() - timedelta(seconds=int(span[1]) * _SECONDS[span[2]]) if span else None


def _at(value: str) -> datetime:
    at = datetime.fromisoformat(value)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
