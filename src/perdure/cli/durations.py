"""Times in the form that people type: `30d` ago, `3d` from now, a date, or a span such as `20s`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click

_SPAN = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|min|m|h|d|w)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


_SPANS = "30s, 10min, 2h, 3d or 4w"
_DATES = "2026-01-31 or 2026-01-31T18:00 in this machine's time zone, or 2026-01-31T18:00:00+01:00"


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Return the time that an option names: a span before now, or a date with or without a time.

    A date without a time zone is in that of this machine.
    """
    return _found(ctx, param, value, -1)


def moment_to_come(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Return the time that an option names: a span from now, or a date as `moment` takes it."""
    return _found(ctx, param, value, 1)


def span(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return how many seconds an option names."""
    if value is None:
        return None
    length = _length(value)
    if length is None:
        raise click.BadParameter(f"{value!r} is not a time span. Use a number and a unit: {_SPANS}.", ctx, param)
    return length


def _found(ctx: click.Context, param: click.Parameter, value: str | None, direction: int) -> datetime | None:
    from perdure.model.ids import now

    if value is None:
        return None
    length = _length(value)
    try:
        if length is not None:
            return (now() + direction * timedelta(seconds=length)).astimezone()
        return _at(value)
    except OverflowError:
        raise click.BadParameter(f"{value!r} is too far away. Name a nearer time.", ctx, param) from None
    except ValueError:
        problem = f"{value!r} is not a time. Use a number and a unit ({_SPANS}), or a date: {_DATES}."
        raise click.BadParameter(problem, ctx, param) from None


def _length(value: str) -> float | None:
    found = _SPAN.fullmatch(value)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def _at(value: str) -> datetime:
    at = datetime.fromisoformat(value)
    return at if at.tzinfo else at.astimezone()
