"""Numbers, times and texts as people read them. Characters that could deceive a reader are made visible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import msgspec
from markupsafe import Markup

from perdure.model.ids import now
from perdure.model.usage import Usage

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)
"""Control characters, marks that turn the direction of writing, lone surrogates, and letters that are not drawn at all.
Models read the last ones, so a person could approve what they cannot see."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_SHOWN_ARGUMENTS = 160
_LONGEST = 20_000


def visible(text: str) -> str:
    """Return a text in which control characters can be seen, and nothing turns the direction of what follows."""
    return _ODD.sub(_seen, text) if _ODD.search(text) else text


def _seen(found: re.Match[str]) -> str:
    return f"‹U+{ord(found[0]):04X}›"


def as_shown(value: Any) -> Any:
    """Return a value as templates show it. Every text passes here, ours and others'."""
    if value is None:
        return "–"
    # Markup is made by templates, of texts that have passed here.
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def whole(number: int | None) -> str:
    """Return a number with its thousands apart."""
    return "–" if number is None else f"{number:,}"


def money(usage: Usage | None) -> str:
    """Return what was spent, in dollars. With unpriced tokens it is "> $1.20", or "–" if nothing has a price."""
    if usage is None or (not usage.cost and not usage.is_cost_known):
        return "–"
    known = "$0" if not usage.cost else f"${usage.cost:.4f}" if usage.cost < 1 else f"${usage.cost:,.2f}"
    return known if usage.is_cost_known else f"> {known}"


def seconds(taken: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if taken is None:
        return "–"
    # From here on, rounding would give 1000 ms.
    if taken < 0.9995:
        return f"{taken * 1000:.0f} ms"
    if taken < 60:
        return f"{taken:.1f} s"
    minutes, rest = divmod(round(taken), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def since(at: datetime | None) -> str:
    """Return how long ago something was, for a glance."""
    if at is None:
        return "–"
    passed = (now() - at).total_seconds()
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if passed >= size:
            return f"{passed // size:.0f} {name} ago"
    return "now" if passed < 5 else f"{passed:.0f} s ago"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `1,360 tokens`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def fine(at: datetime | None) -> str:
    """Return the time of day with its milliseconds, in UTC."""
    return "–" if at is None else at.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


def clock(at: datetime | None) -> str:
    """Return the time of day, in UTC."""
    return "–" if at is None else at.astimezone(UTC).strftime("%H:%M:%S")


def moment(at: datetime | None) -> str:
    """Return a date and its time, in UTC."""
    return "–" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def indented(value: Any) -> str:
    """Return JSON over several lines."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=dict), indent=2).decode()


def arguments_in_line(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call in one line, cut where it becomes long."""
    told = ", ".join(
        f"{name}={msgspec.json.encode(value, enc_hook=dict).decode()}" for name, value in arguments.items()
    )
    return shortened(told, _SHOWN_ARGUMENTS)


def shortened(text: str, most: int = 80) -> str:
    """Return the beginning of a text, in one line."""
    # Cut first, so that a huge text is not split as a whole.
    line = " ".join(text[: most * 4].split())
    return line if len(line) <= most else line[: most - 1] + "…"


def anchor(id: str) -> str:
    """Return a name for the place of something on a page: its id, or a digest of an id with odd characters."""
    return id if _PLAIN.fullmatch(id) else blake2b(id.encode("utf-8", "replace"), digest_size=12).hexdigest()


def bounded(text: str) -> str:
    """Return a text, cut at a length that nobody reads on a page."""
    left_out = len(text) - _LONGEST
    return text if left_out <= 0 else f"{text[:_LONGEST]}\n… and {left_out:,} more characters, which an export has."


FILTERS = {
    "bounded": bounded,
    "anchor": anchor,
    "whole": whole,
    "money": money,
    "seconds": seconds,
    "since": since,
    "clock": clock,
    "fine": fine,
    "moment": moment,
    "indented": indented,
    "in_line": arguments_in_line,
    "shortened": shortened,
}
"""The filters that templates can write a value with."""
