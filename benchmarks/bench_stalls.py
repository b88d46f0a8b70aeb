"""The longest stall of an event loop during a large operation beside it, with a session of 100,000 messages."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import perdure
from benchmarks.harness import Run
from benchmarks.setting import checkpoint, filled
from perdure import AgentSession, SessionRuntime, Sessions, SqliteStore
from perdure.archive import fsck
from perdure.testing import ScriptedDriver

MESSAGES = 100_000
ROUNDS = 3
TICK = 0.001


class Ticker:
    """A task that wakes up every millisecond, and notes its longest delay."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.late = 0
        """The number of times it was more than 20 ms late."""

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(TICK * 5)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(TICK * 2)  # so that a stall at the very end is noted
        self._task.cancel()

    async def _tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before - TICK)
            self.late += now - before - TICK > 0.02
            before = now


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Sessions]:
    driver = ScriptedDriver(lambda request: "They spoke of a fox and a dog.")
    async with perdure.connect(SqliteStore(path), driver=driver, compaction=None) as sessions:
        yield sessions


@dataclass(frozen=True)
class Scene:
    """An open store with a long session that has not been read."""

    sessions: Sessions
    session_id: str
    message_id: str
    folder: Path


async def load(scene: Scene) -> None:
    await scene.sessions.session(scene.session_id)


async def compact(scene: Scene) -> None:
    await scene.sessions.compact(scene.session_id, compact_strategy="truncate", keep_last=12)


async def history(scene: Scene) -> None:
    assert len(await scene.sessions.history(scene.session_id)) == MESSAGES


async def export(scene: Scene) -> None:
    await scene.sessions.export(scene.folder / "exported.jsonl", [scene.session_id])


async def redact(scene: Scene) -> None:
    assert await scene.sessions.redact(scene.session_id, [scene.message_id]) == 1


async def check(scene: Scene) -> None:
    assert not (await fsck(scene.sessions.store)).problems


async def import_(scene: Scene) -> None:
    await scene.sessions.import_(scene.folder / "session.jsonl")


async def search(scene: Scene) -> None:
    assert await scene.sessions.search("fox")


OPERATIONS = (load, compact, history, export, redact, check, import_, search)


async def measure(run: Run) -> None:
    with run.folder() as folder:
        path = folder / "filled.db"
        async with SqliteStore(path) as store:
            session = await filled(SessionRuntime(store), MESSAGES)
        checkpoint(path)
        async with opened(path) as sessions:
            await sessions.export(folder / "session.jsonl", [session.id])
            async with Ticker() as idle:
                await asyncio.sleep(2)
        noise = f"an idle loop {idle.longest * 1000:.0f} ms"
        for operation in OPERATIONS:
            start = time.perf_counter()
            tickers = [await stalled(operation, path, session, folder) for _ in range(ROUNDS)]
            seconds = (time.perf_counter() - start) / ROUNDS
            longest = statistics.median(each.longest for each in tickers)
            often = statistics.median(each.late for each in tickers)
            detail = f"median of {ROUNDS}; over 20 ms {often:.0f} times; {seconds:.1f} s each; {noise}"
            run.report(f"stalls.{operation.__name__.strip('_')}", longest * 1000, detail)


async def stalled(
    operation: Callable[[Scene], Awaitable[None]], path: Path, session: AgentSession, folder: Path
) -> Ticker:
    """Carry an operation out on a copy of the file; an import is into a new one."""
    with TemporaryDirectory(dir=folder) as beside:
        copy = Path(beside) / "copy.db"
        if operation is not import_:
            shutil.copyfile(path, copy)
        async with opened(copy) as sessions:
            scene = Scene(sessions, session.id, session.state.transcript[-1].id, folder)
            async with Ticker() as ticker:
                await operation(scene)
        return ticker
