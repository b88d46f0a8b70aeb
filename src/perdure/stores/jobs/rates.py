"""Rates that processes share: one number for each, up to when its places are taken."""

from __future__ import annotations

from perdure.stores.engine import Clock, Insert, Job, Select

_MICRO = 1_000_000


def reserve(name: str, cost: float, burst: float, most: float | None) -> Job[float]:
    """Take the next place in a rate, unless it is too far off, and return how many seconds to wait for it."""
    rows = yield Select("rate", ("until",), {"name": name})
    ((time,),) = yield Clock()
    now = micros(time)
    until = max(rows[0][0] if rows else 0, now) + micros(cost)
    wait = wait_of(until, now, burst)
    if most is None or wait <= most:
        yield Insert("rate", ("name", "until"), [(name, until)], or_set=("until",))
    return wait


def micros(seconds: float) -> int:
    return round(seconds * _MICRO)


def wait_of(until: int, now: int, burst: float) -> float:
    """Return how many seconds to wait for the last place taken: as many as it is ahead of what may come at once."""
    return max(0, until - micros(burst) - now) / _MICRO
