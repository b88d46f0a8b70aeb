"""A backup of a SQLite file: beside a copy of the file, an increment beside a full one, and a save beside a backup."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from itertools import count
from pathlib import Path

from benchmarks.harness import Run, ms, timed
from benchmarks.setting import AddTurn, filled
from perdure import AgentSession, SessionRuntime, SqliteStore
from perdure.backups import backup

_SESSIONS = 8
_MESSAGES = 10_000


async def measure(run: Run) -> None:
    with run.folder() as folder:
        path = folder / "bench.db"
        async with SqliteStore(path) as store:
            runtime = SessionRuntime(store)
            sessions = [await filled(runtime, _MESSAGES) for _ in range(_SESSIONS)]
            await asyncio.sleep(2)  # an idle writer empties the log: all of it is in the file
            await sizes(run, store, path)
            await increments(run, store, runtime, folder, sessions[0])
            await beside(run, store, runtime, folder, sessions[1])


async def sizes(run: Run, store: SqliteStore, path: Path) -> None:
    """Compare a first backup with a copy of the file that is on the disk when it is done."""
    numbers = count()

    async def full() -> None:
        target = path.parent / f"full-{next(numbers)}"
        await backup(store, target, gentle=False)
        await asyncio.to_thread(shutil.rmtree, target)

    def copied() -> None:
        copy = path.with_name("copy.db")
        shutil.copyfile(path, copy)
        handle = os.open(copy, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        copy.unlink()

    # The quickest of each: other load on the machine slows the side that computes, and not the other.
    taken = [[(await timed(side)).wall for side in (full, lambda: asyncio.to_thread(copied))] for _ in range(25)]
    made, copying = (min(each) for each in zip(*taken, strict=True))
    size = (await asyncio.to_thread(os.path.getsize, path)) / 1e6
    run.report("backup.full", made / copying, f"{ms(made)} / {ms(copying)}, best of 25, {size:.0f} MB")


async def increments(
    run: Run, store: SqliteStore, runtime: SessionRuntime, folder: Path, session: AgentSession
) -> None:
    """Compare backups after one turn with full ones, in time and bytes: with the log continued, or restarted."""
    target, numbers = folder / "increments", count()
    first = (await backup(store, target)).backup
    taken: dict[str, list[float]] = {"increment": [], "anew": [], "full": []}
    added = []
    for _ in range(6):
        for kind, pause in (("increment", 0.0), ("full", 0.0), ("anew", 1.5)):
            await asyncio.sleep(pause)  # the idle writer empties the log, and the next commit restarts it
            await runtime.execute(session.id, AddTurn())
            place = folder / f"whole-{next(numbers)}" if kind == "full" else target
            began = time.perf_counter()
            made = (await backup(store, place, gentle=False)).backup
            taken[kind].append(time.perf_counter() - began)
            if kind == "full":
                shutil.rmtree(place)
            else:
                added.append(made.added / first.added)
    middle = {kind: statistics.median(each) for kind, each in taken.items()}
    for kind in ("increment", "anew"):
        told = f"{ms(middle[kind])} / {ms(middle['full'])}"
        run.report(f"backup.{kind}", middle[kind] / middle["full"], told)
    run.report("backup.bytes", max(added), f"most of {len(added)}")


async def beside(run: Run, store: SqliteStore, runtime: SessionRuntime, folder: Path, session: AgentSession) -> None:
    """Compare saves while backups are made one after the other with saves at other times, in turns."""
    alone: list[float] = []
    during: list[float] = []
    for number in range(8):
        is_over = asyncio.Event()

        async def backups(number: int = number, is_over: asyncio.Event = is_over) -> None:
            for again in range(3):
                await backup(store, folder / f"beside-{number}-{again}")
            is_over.set()

        for _ in range(40):
            alone.append(await _save(runtime, session))
        making = asyncio.create_task(backups())
        while not is_over.is_set():
            during.append(await _save(runtime, session))
        await making
        for again in range(3):
            shutil.rmtree(folder / f"beside-{number}-{again}")
    ratio = statistics.median(during) / statistics.median(alone)
    told = f"{ms(statistics.median(during))} / {ms(statistics.median(alone))}, {len(during)} saves"
    run.report("backup.beside", ratio, told)


async def _save(runtime: SessionRuntime, session: AgentSession) -> float:
    began = time.perf_counter()
    await runtime.execute(session.id, AddTurn())
    return time.perf_counter() - began
