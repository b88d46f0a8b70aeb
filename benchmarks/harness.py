"""How a figure is taken: both sides of a ratio in one run, turn by turn, and their medians compared."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Side = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Figure:
    """A figure, the bound it is held to, and how it came about."""

    name: str
    value: float
    bound: float
    at_least: bool = False
    unit: str = "x"
    detail: str = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        mark = "ok  " if self.is_met else "MISS"
        sign = ">=" if self.at_least else "<="
        return f"{mark}  {self.value:>10,.2f} {self.unit:<7} {sign} {self.bound:<8,g} {self.name}  ({self.detail})"


async def interleaved(*sides: Side, rounds: int = 60, warm_up: int = 5) -> list[float]:
    """The median seconds of each side. One call of each in turn, so that a noisy moment falls on all alike."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + warm_up):
        for taken, side in zip(times, sides, strict=True):
            gc.disable()
            start = time.perf_counter()
            await side()
            elapsed = time.perf_counter() - start
            gc.enable()
            if turn >= warm_up:
                taken.append(elapsed)
    return [statistics.median(taken) for taken in times]


async def rate(side: Callable[[int], Awaitable[int]], tasks: int, seconds: float = 2.0) -> float:
    """How many units a second some tasks do together; `side(n)` does one piece of work and says how many units."""
    stop = time.perf_counter() + seconds
    done = 0

    async def worker(number: int) -> None:
        nonlocal done
        while time.perf_counter() < stop:
            units = await side(number)  # not `done += await …`, which reads `done` before it waits
            done += units

    start = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(tasks)))
    return done / (time.perf_counter() - start)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"
