"""The page of what runs have cost: by day and model as a picture, and by agent, owner and session in tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response

from perdure.model.ids import SessionId, now
from perdure.model.usage import Usage
from perdure.server.call import Call
from perdure.server.pages.render import page
from perdure.server.pages.texts import counted, money, whole
from perdure.server.pages.titles import title_of
from perdure.server.service import Service
from perdure.sessions.sessions import Sessions
from perdure.sessions.spending import Part, RunCost, Spending, Sum, spending_of, summed

_SESSIONS = 1_000
"""The number of sessions that are counted: those that were changed last."""
_KEPT_FOR = 30.0
"""Seconds after which it is counted again."""
_TOP = 20
_TABLE = 50
_COLOURS = 5
"""The number of models with a colour of their own. The rest share one."""
_HEIGHT = 100.0


class CostQuery(msgspec.Struct, kw_only=True):
    days: Literal[7, 30, 90] = 30


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a table."""

    name: str
    runs: str
    input: str
    output: str
    cost: str
    share: float
    """Its share of the greatest row of its table, in hundredths."""
    link: str | None = None


class Slice(msgspec.Struct, frozen=True):
    """A piece of a column: what one model cost on one day."""

    colour: int
    y: float
    height: float
    words: str


class Column(msgspec.Struct, frozen=True):
    """A day of the picture."""

    day: str
    x: float
    slices: tuple[Slice, ...]


class Plot(msgspec.Struct, frozen=True):
    """The spending day by day, in one colour for each model. Heights are hundredths."""

    columns: tuple[Column, ...]
    width: float
    legend: tuple[tuple[int, str], ...]
    most: str
    unit: str
    words: str
    """The same in a sentence."""


async def get_cost(call: Call) -> Response:
    """Show what was spent in the last days."""
    days = int(call.query.days)
    first = now().date() - timedelta(days=days - 1)
    found, at = await _counted(call, first)
    total = summed(None, found.runs)
    return page(
        call,
        "cost.html",
        days=days,
        total=_facts(total),
        plot=_plot(found.runs, first, days) if found.runs else None,
        tables=_tables(found, is_operator=call.caller.owner is None),
        days_table=_by_day(found),
        top=await _top(call.sessions, found),
        at=at,
        is_whole=found.is_whole,
        damaged=found.damaged,
        looked_at=whole(_SESSIONS),
    )


_Counts = dict[tuple[str | None, date], tuple[Spending, datetime]]
# Weak, so that a service takes its counts with it when it is gone.
_COUNTS: WeakKeyDictionary[Service, _Counts] = WeakKeyDictionary()
"""The last counts of each service, by owner and first day."""


async def _counted(call: Call, first: date) -> tuple[Spending, datetime]:
    """Return what was spent since a day, and the time of the count. A recent count will do: each reads every run."""
    known, key, at = _COUNTS.setdefault(call.service, {}), (call.caller.owner, first), now()
    # A list, since the dict changes in the loop.
    for stale in [each for each, (_, then) in known.items() if (at - then).total_seconds() > _KEPT_FOR]:
        del known[stale]
    if key not in known:
        since = datetime.combine(first, time.min, UTC)
        known[key] = await spending_of(call.sessions, since, limit=_SESSIONS), at
    return known[key]


def _facts(total: Sum) -> list[tuple[str, str]]:
    usage = total.usage
    unpriced = whole(usage.unpriced_tokens) if usage.unpriced_tokens else "–"
    return [
        ("cost", money(usage)),
        ("runs", whole(total.runs)),
        ("tokens in", whole(usage.input_tokens)),
        ("of these from a cache", whole(usage.cache_read_tokens)),
        ("tokens out", whole(usage.output_tokens)),
        ("without a known price", unpriced),
    ]


def _tables(found: Spending, *, is_operator: bool) -> list[tuple[str, list[Line], int]]:
    """Return the tables: a title, the rows that cost most, and how many more there are."""
    parts: list[tuple[str, Part]] = [("Model", "model"), ("Agent", "agent")]
    parts += [("Owner", "owner")] if is_operator else []
    tables = [(title, _sorted(found.by(part))) for title, part in parts]
    return [(title, _lines(rows[:_TABLE]), max(0, len(rows) - _TABLE)) for title, rows in tables]


def _by_day(found: Spending) -> list[Line]:
    """Return what was spent each day, the last day first."""
    return _lines(sorted(found.by("day"), key=lambda each: each.key or "", reverse=True))


def _weight(usage: Usage) -> tuple[float, int]:
    """Return the sort key of rows: the cost, then the tokens, for models without a known price."""
    return usage.cost, usage.total_tokens


def _sorted(rows: Sequence[Sum]) -> list[Sum]:
    return sorted(rows, key=lambda each: _weight(each.usage), reverse=True)


def _lines(rows: Sequence[Sum]) -> list[Line]:
    costs = any(row.usage.cost for row in rows)
    most = max((_amount(row.usage, costs) for row in rows), default=0.0) or 1.0  # shares are divided by it
    return [_line(row, row.key or "–", _amount(row.usage, costs) / most) for row in rows]


def _amount(usage: Usage, costs: bool) -> float:
    return usage.cost if costs else float(usage.total_tokens)


def _line(row: Sum, name: str, share: float, link: str | None = None) -> Line:
    return Line(
        name=name,
        runs=whole(row.runs),
        input=whole(row.usage.input_tokens),
        output=whole(row.usage.output_tokens),
        cost=money(row.usage),
        share=round(100 * share, 1),
        link=link,
    )


async def _top(sessions: Sessions, found: Spending) -> list[Line]:
    """Return the sessions that cost most, by the titles that lists show."""
    rows = _sorted(found.by("session_id"))[:_TOP]
    costs = any(row.usage.cost for row in rows)
    most = max((_amount(row.usage, costs) for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        title = await title_of(sessions, SessionId(row.key or ""), row.key or "–")
        lines.append(_line(row, title, _amount(row.usage, costs) / most, f"/sessions/{row.key}"))
    return lines


def _plot(runs: Sequence[RunCost], first: date, days: int) -> Plot:
    costs = any(each.usage.cost for each in runs)
    by_day: dict[str, dict[str, Usage]] = {}
    for each in runs:
        of_day = by_day.setdefault(each.day, {})
        of_day[each.model] = of_day.get(each.model, Usage()) + each.usage
    names = [str(row.key) for row in _sorted(Spending(list(runs), True).by("model"))]
    colours = {name: min(place, _COLOURS) for place, name in enumerate(names)}
    most = max((sum(_amount(used, costs) for used in models.values()) for models in by_day.values()), default=0.0)
    all_days = [(first + timedelta(days=place)).isoformat() for place in range(days)]
    step = 100 / days
    columns = [
        Column(day, round(place * step, 3), _slices(by_day.get(day, {}), colours, most or 1.0, costs))
        for place, day in enumerate(all_days)
    ]
    legend = [(colour, name) for name, colour in colours.items() if colour < _COLOURS]
    legend += [(_COLOURS, counted(len(names) - _COLOURS, "other model"))] if len(names) > _COLOURS else []
    told = f"${most:,.4f}" if costs else counted(round(most), "token")
    words = (
        f"Spent day by day from {all_days[0]} to {all_days[-1]}; at most {told} on a day. The table by day tells all."
    )
    return Plot(tuple(columns), round(step * 0.72, 3), tuple(legend), told, "cost" if costs else "tokens", words)


def _slices(models: dict[str, Usage], colours: dict[str, int], most: float, costs: bool) -> tuple[Slice, ...]:
    """Return what each model cost on a day, the first one at the bottom."""
    slices, top = [], _HEIGHT
    for name in sorted(models, key=lambda name: colours[name]):
        height = _HEIGHT * _amount(models[name], costs) / most
        top -= height
        words = f"{name}: {money(models[name])}, {counted(models[name].total_tokens, 'token')}"
        slices.append(Slice(colours[name], round(top, 2), round(height, 2), words))
    return tuple(slices)
