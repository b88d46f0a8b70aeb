"""Times as people type them: `30d` ago, or a date."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

_SPAN = re.compile(r"(\d{1,6})\s*(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


class Moment(click.ParamType):
    """An instant: so long ago, or a date with or without a time, in UTC unless it says otherwise."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = _SPAN.fullmatch(value)
        if span:
            from perdure.model.ids import now

            return now() - timedelta(seconds=int(span[1]) * _SECONDS[span[2]])
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time. Use 30min, 2h, 3d, 4w, 2026-01-31 or 2026-01-31T18:00:00+01:00.", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


MOMENT = Moment()
