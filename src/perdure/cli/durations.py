"""Times as people type them: `30d` ago, `3d` from now, a date, or a span such as `20s`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*(s|min|m|h|d|w)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


_SPANS = "30s, 10min, 2h, 3d or 4w"
_DATES = "2026-01-31 or 2026-01-31T18:00:00+01:00"


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """The callback of an option: so long ago, or a date with or without a time, in UTC unless it says otherwise."""
    return _found(ctx, param, value, -1)


def moment_to_come(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """The callback of an option: so long from now, or a date as `moment` takes it."""
    return _found(ctx, param, value, 1)


def span(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The callback of an option: how long, in seconds. A number alone is one of seconds."""
    if value is None:
        return None
    length = _length(value if value[-1:].isalpha() else f"{value}s")
    if length is None:
        raise click.BadParameter(f"{value!r} is no time span. Use {_SPANS}.", ctx, param)
    return length


def _found(ctx: click.Context, param: click.Parameter, value: str | None, direction: int) -> datetime | None:
    from perdure.model.ids import now

    if value is None:
        return None
    try:
        length = _length(value)
        return _at(value) if length is None else now() + direction * timedelta(seconds=length)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is no time. Use {_SPANS}, {_DATES}.", ctx, param) from None


def _length(value: str) -> float | None:
    found = _SPAN.fullmatch(value)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def _at(value: str) -> datetime:
    at = datetime.fromisoformat(value)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
