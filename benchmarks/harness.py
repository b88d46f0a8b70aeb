"""Measuring a figure: both sides of a ratio in one run, in turn, and their medians compared."""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Side = Callable[[], Awaitable[object]]


class Cost(NamedTuple):
    """Seconds on the clock, and seconds of the processor in this process, all threads included."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Reading:
    """The value of a figure. Without a value it was not measured, and the detail says why."""

    value: float | None
    detail: str = ""


@dataclass
class Run:
    """One run of the benchmarks: its settings, and its readings so far."""

    full: bool = False
    """True to use the largest sizes, which take long to set up."""
    readings: dict[str, Reading] = field(default_factory=dict)

    def report(self, key: str, value: float, detail: str = "") -> None:
        self.readings[key] = Reading(value, detail)
        self.say(f"{key}: {number(value)}" + (f" ({detail})" if detail else ""))

    def skip(self, key: str, reason: str) -> None:
        """Note that a figure cannot be measured here."""
        self.readings[key] = Reading(None, reason)
        self.say(f"{key}: not measured ({reason})")

    def say(self, what: str) -> None:
        """Show progress."""
        print(f"  {what}", file=sys.stderr, flush=True)

    def size(self, usual: int, largest: int) -> int:
        return largest if self.full else usual

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="perdure-bench-", ignore_cleanup_errors=True) as name:
            yield Path(name)


async def interleaved(*sides: Side, rounds: int = 60, warm_up: int = 5) -> list[Cost]:
    """Return the median cost of each side.

    Every round calls each side once, so that a noisy moment affects all alike. A different side begins each round, so
    that none is always the one that runs after another.
    """
    samples: list[list[Cost]] = [[] for _ in sides]
    for turn in range(rounds + warm_up):
        for place in range(len(sides)):
            number = (turn + place) % len(sides)
            cost = await timed(sides[number])
            if turn >= warm_up:
                samples[number].append(cost)
    return [median(taken) for taken in samples]


async def timed(side: Side) -> Cost:
    """Return the cost of one call. The garbage collector is off: it would charge one call for the garbage of many."""
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        await side()
        return Cost(time.perf_counter() - wall, time.process_time() - cpu)
    finally:
        gc.enable()


def median(samples: list[Cost]) -> Cost:
    return Cost(statistics.median(each.wall for each in samples), statistics.median(each.cpu for each in samples))


class Rate(NamedTuple):
    """Units a second, and the processor time of each."""

    a_second: float
    cpu: float


async def rate(side: Callable[[int], Awaitable[object]], tasks: int, seconds: float = 1.5) -> Rate:
    """Return how often some tasks together do a piece of work; `side(n)` does one piece as task `n`."""
    done = 0
    start, cpu = time.perf_counter(), time.process_time()
    stop = start + seconds

    async def worker(number: int) -> None:
        nonlocal done
        while time.perf_counter() < stop:
            await side(number)
            done += 1

    await asyncio.gather(*(worker(number) for number in range(tasks)))
    return Rate(done / (time.perf_counter() - start), (time.process_time() - cpu) / done)


async def rates(*sides: Callable[[int], Awaitable[object]], tasks: int, rounds: int = 5) -> list[Rate]:
    """Return the median rate of each side, measured in turn."""
    samples: list[list[Rate]] = [[] for _ in sides]
    for side in sides:
        await rate(side, tasks, seconds=0.3)
    for turn in range(rounds):
        for place in range(len(sides)):
            number = (turn + place) % len(sides)
            samples[number].append(await rate(sides[number], tasks))
    return [
        Rate(statistics.median(each.a_second for each in taken), statistics.median(each.cpu for each in taken))
        for taken in samples
    ]


def number(value: float) -> str:
    if abs(value) < 0.095:
        return f"{value:.2g}"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
