"""Rates that processes share: one number for each, the time up to which its places are taken (GCRA)."""

from __future__ import annotations

from perdure.stores.engine import Clock, Insert, Job, Select

_MICRO = 1_000_000


def reserve(name: str, cost: float, burst: float, most: float | None) -> Job[float]:
    """Take the next place in a rate, unless it is too far off, and return the seconds to wait for it."""
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
    """Return the seconds to wait for the last place taken. Places within `burst` seconds need no wait."""
    return max(0, until - micros(burst) - now) / _MICRO
