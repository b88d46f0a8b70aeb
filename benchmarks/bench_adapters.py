"""Other frameworks' turns on perdure, beside the same turns on the framework's own store."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path

from benchmarks.harness import Run, interleaved, ms
from benchmarks.others.library import Store
from benchmarks.others.turns import MESSAGES, Turn

SESSION = "bench"
SIZES = {"1k": 1_000, "10k": 10_000}


@dataclass(frozen=True)
class Pair:
    """A framework's own store, and perdure's in its place."""

    key: str
    module: str
    theirs: str
    ours: str = "Kept"
    rounds: int = 20
    sizes: tuple[str, ...] = tuple(SIZES)
    turns: int = 100
    """The number of turns over which the growth of the files is measured."""

    @property
    def kinds(self) -> tuple[type[Store], type[Store]]:
        found = import_module(f"benchmarks.others.with_{self.module}")
        return getattr(found, self.theirs), getattr(found, self.ours)


PAIRS = (
    Pair("openai", "openai_agents", "PlainRun", "KeptRun", rounds=60),
    Pair("openai_calls", "openai_agents", "Plain", rounds=60),
    Pair("langgraph", "langgraph", "Run", "KeptRun", rounds=8, turns=20),
    Pair("adk", "google_adk", "Database"),
    Pair("adk_sqlite", "google_adk", "Sqlite"),
    Pair("claude", "claude", "Lines", sizes=()),
    Pair("pydantic", "pydantic_ai", "JsonFile"),
    Pair("strands", "strands", "Files"),
)


async def measure(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' deprecations are not measured
        for pair in PAIRS:
            try:
                kinds = pair.kinds
            except ImportError as error:
                for what in (*pair.sizes, "bytes"):
                    run.skip(f"adapters.{pair.key}_{what}", f"{error}; `make bench` installs it")
                continue
            for name in pair.sizes:
                await times(run, pair, kinds, name)
            await bytes_of(run, pair, kinds)


async def times(run: Run, pair: Pair, kinds: tuple[type[Store], type[Store]], name: str) -> None:
    """Compare the processor's time, which depends little on the machine's disk."""
    numbers, size = count(1_000_001), SIZES[name]
    with run.folder() as folder:
        async with filled(kinds[0], folder / "theirs", size) as theirs, filled(kinds[1], folder / "ours", size) as ours:
            sides = (lambda store=store: store.turn(SESSION, Turn(next(numbers))) for store in (theirs, ours))
            their_cost, our_cost = await interleaved(*sides, rounds=pair.rounds)
    clock = f"on the clock {ms(our_cost.wall)} / {ms(their_cost.wall)}"
    detail = f"{ms(our_cost.cpu)} / {ms(their_cost.cpu)}; {clock}"
    run.report(f"adapters.{pair.key}_{name}", our_cost.cpu / their_cost.cpu, detail)


async def bytes_of(run: Run, pair: Pair, kinds: tuple[type[Store], type[Store]]) -> None:
    """Compare the bytes that a turn adds to the files, with no log left beside them."""
    theirs, ours = [await growth(run, kind, pair.turns) for kind in kinds]
    run.report(f"adapters.{pair.key}_bytes", ours / theirs, f"{ours:,.0f} / {theirs:,.0f} bytes")


async def growth(run: Run, kind: type[Store], turns: int) -> float:
    with run.folder() as folder:
        async with filled(kind, folder / "store", SIZES["1k"]) as store:
            pass
        before = size_of(folder)
        await store.open(folder / "store")
        for number in range(turns):
            await store.turn(SESSION, Turn(2_000_001 + number))
        await store.close()
        return (size_of(folder) - before) / turns


@asynccontextmanager
async def filled(kind: type[Store], folder: Path, size: int) -> AsyncIterator[Store]:
    store = kind()
    await store.open(made(folder))
    await store.fill(SESSION, [Turn(number) for number in range(1, size // MESSAGES + 1)])
    yield store
    await store.close()


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
