"""What the command line costs before it does anything, and whether a list costs what the store holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Figure, Side, interleaved, ms
from perdure import SqliteStore
from perdure.testing.samples import new_session

MANY, FEW = 10_000, 10
ROUNDS = 15


def command(*arguments: str, folder: Path | None = None) -> Side:
    """One process of this Python, from its start to its end."""
    environment = os.environ | ({"PERDURE_STORE": f"sqlite:///{folder / 'sessions.db'}"} if folder else {})

    async def side() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        if await process.wait() != 0:
            raise RuntimeError(f"{arguments} failed")

    return side


async def filled(folder: Path, count: int) -> Path:
    await asyncio.to_thread(folder.mkdir)
    async with SqliteStore(folder / "sessions.db") as store:
        for start in range(0, count, 500):
            await asyncio.gather(*(store.create(new_session("hello")) for _ in range(start, min(start + 500, count))))
    return folder


async def ratio(name: str, costly: Side, cheap: Side, bound: float) -> Figure:
    dear, base = await interleaved(costly, cheap, rounds=ROUNDS, warm_up=2)
    return Figure(name, dear / base, bound, detail=f"{ms(dear)} / {ms(base)}")


async def list_figure(folder: Path) -> Figure:
    listing: Callable[[Path], Side] = lambda store: command("-m", "perdure.cli", "ls", folder=store)  # noqa: E731
    many, few = await filled(folder / "many", MANY), await filled(folder / "few", FEW)
    return await ratio(f"perdure ls on {MANY:,} sessions, over on {FEW}", listing(many), listing(few), 1.5)


async def figures() -> list[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
    # As the installed command does, and no more: `-m` would look for the package first.
    shown = command("-c", "from perdure.cli.main import main; main()", "--help")
    try:
        return [
            await ratio("perdure --help, over python -c 'import click'", shown, command("-c", "import click"), 1.5),
            await list_figure(folder),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
