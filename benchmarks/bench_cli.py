"""The start-up cost of the command line, and the cost of a list in stores of two sizes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.harness import Run, Side, interleaved, ms
from perdure import SqliteStore
from perdure.testing.samples import new_session

MANY, FEW = 10_000, 10
ROUNDS = 9


def command(*arguments: str, store: Path | None = None) -> Side:
    """Return a call that runs this Python in a process of its own, from its start to its end."""
    environment = os.environ | ({"PERDURE_STORE": f"sqlite:///{store}"} if store else {})

    async def side() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        if await process.wait() != 0:
            raise RuntimeError(f"{arguments} failed")

    return side


async def filled(path: Path, count: int) -> Path:
    async with SqliteStore(path) as store:
        for start in range(0, count, 500):
            await asyncio.gather(*(store.create(new_session("hello")) for _ in range(start, min(start + 500, count))))
    return path


async def measure(run: Run) -> None:
    # Like the installed command, and no more: `-m` would look for the package first.
    shown = command("-c", "from perdure.cli.main import main; main()", "--help")
    await compared(run, "cli.help", shown, command("-c", "import click"))
    with run.folder() as folder:
        many, few = [
            command("-m", "perdure.cli", "ls", store=await filled(folder / f"{count}.db", count))
            for count in (MANY, FEW)
        ]
        await compared(run, "cli.list", many, few)


async def compared(run: Run, key: str, costly: Side, cheap: Side) -> None:
    dear, base = await interleaved(costly, cheap, rounds=ROUNDS, warm_up=1)
    run.report(key, dear.wall / base.wall, f"{ms(dear.wall)} / {ms(base.wall)}")
