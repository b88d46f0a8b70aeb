"""Numbers, times and JSON as people read them on a page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from perdure.model.usage import Usage

NONE = "–"
"""Stands where there is nothing to tell."""
_BRIEF = 90


class Moment(msgspec.Struct, frozen=True):
    """A time: the text that is shown, and the whole of it for programs and tooltips. All times are UTC."""

    text: str
    iso: str

    def __str__(self) -> str:
        return self.text


def moment(at: datetime, *, date: bool = True, fine: bool = False) -> Moment:
    """Return a time as `2026-11-16 07:53:08`, without its `date`, or `fine`, with milliseconds."""
    here = at.astimezone(UTC)
    shown = f"{here:%Y-%m-%d %H:%M:%S}" if date else f"{here:%H:%M:%S}"
    return Moment(f"{shown}.{here.microsecond // 1000:03}" if fine else shown, here.isoformat(timespec="milliseconds"))


def number(count: int) -> str:
    return f"{count:,}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `1,360 tokens`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def money(usage: Usage) -> str:
    """Return a cost in dollars; with a + where the price of some tokens is not known, and ? where no price is."""
    if usage.is_cost_known:
        return f"${usage.cost:,.4f}"
    return f"${usage.cost:,.4f}+" if usage.cost else "?"


def seconds(span: float | None) -> str:
    """Return how long something took: `3 ms`, `1.3 s`, `2 min 5 s`, `3 h 20 min`, `4 d`."""
    if span is None:
        return NONE
    if span < 0.9995:
        return f"{span * 1000:.0f} ms"
    if span < 59.95:
        return f"{span:.1f} s"
    minutes, left = divmod(round(span), 60)
    if minutes < 60:
        return f"{minutes} min {left} s" if left else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d"


def pretty(value: Any) -> str:
    """Return JSON on several lines."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()


def brief(text: str, most: int = _BRIEF) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def in_line(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as `a=12.5, b="x"`, as much of them as a line holds."""
    told = (f"{name}={msgspec.json.encode(value, enc_hook=str).decode()}" for name, value in arguments.items())
    return brief(", ".join(told))


def short(identity: str) -> str:
    """Return the end of an id, by which people tell runs apart."""
    return identity[-6:]
