"""What it costs to record a run, and to read one back from a session with many."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bench_core import AGENT, settled_size, store_in
from benchmarks.bench_loop import STEPS, add, loops
from benchmarks.harness import Figure, interleaved, ms
from perdure import LoopFactory, MemoryStore, Message, SendMessage, SessionRuntime, ToolCall
from perdure.stores.sqlite.worker import WritingWorker
from perdure.testing import ScriptedDriver

TEXT = "The quick brown fox jumps over the lazy dog. " * 11


def one_tool_call() -> LoopFactory:
    """A run of two steps: one tool call, then an answer of ordinary length."""
    script: list[Any] = [Message.assistant(TEXT, tool_calls=[ToolCall("add", {"a": 1, "b": 2})]), TEXT]
    return LoopFactory(tools=[add], driver=ScriptedDriver(script))


class Commits:
    """Counts what a store commits."""

    def __init__(self) -> None:
        self.count = 0
        self._original: Callable[..., None] = WritingWorker._carry_out

    def __enter__(self) -> Commits:
        original = self._original

        def counting(worker: WritingWorker, connection: Any, batch: Any) -> None:
            self.count += 1
            original(worker, connection, batch)

        WritingWorker._carry_out = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        WritingWorker._carry_out = self._original  # type: ignore[method-assign]


async def commit_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        with Commits() as commits:
            await runtime.execute(session.id, SendMessage(TEXT, one_tool_call()))
    return [Figure("commits of a run with one tool call, beyond one save", commits.count - 1, 3, unit="commits")]


async def disk_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        session = await runtime.execute(session.id, SendMessage(TEXT, one_tool_call()))
        before, known = await settled_size(store, folder), len(session.state.messages)
        for _ in range(100):
            session = await runtime.execute(session.id, SendMessage(TEXT, one_tool_call()))
        grown = (await settled_size(store, folder) - before) / 100
    size = sum(len(msgspec.json.encode(message)) for message in session.state.transcript[known:]) / 100
    detail = f"{grown:,.0f} over {size:,.0f} bytes a turn"
    return [Figure("disk of a recorded turn over the JSON of its messages", grown / size, 1.8, detail=detail)]


class Unrecorded:
    """A MemoryStore without its journal: runs on it are not recorded."""

    def __init__(self) -> None:
        store = MemoryStore()
        self.create, self.save, self.load = store.create, store.save, store.load
        self.exists, self.delete, self.list = store.exists, store.delete, store.list


async def overhead_figures() -> list[Figure]:
    runtimes = [SessionRuntime(MemoryStore()), SessionRuntime(Unrecorded())]
    sessions = [await runtime.create(AGENT) for runtime in runtimes]

    async def run(index: int) -> None:
        await runtimes[index].execute(sessions[index].id, SendMessage("go", loops()))

    recorded, plain = await interleaved(lambda: run(0), lambda: run(1), rounds=60)
    more = (recorded - plain) / STEPS * 1000
    bound = max(0.05, 0.25 * plain / STEPS * 1000)
    detail = f"{ms(recorded / STEPS)} over {ms(plain / STEPS)} a step"
    return [Figure("milliseconds a step that recording adds, MemoryStore", more, bound, unit="ms", detail=detail)]


async def reading_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        few, many = [await _with_runs(runtime, count) for count in (20, 2000)]
        found: list[Figure] = []
        for name, read in (
            ("a page of 20 loops", lambda key: runtime.record(key, limit=20)),
            ("one loop", lambda key: _one_loop(runtime, key)),
            ("the last 50 events", lambda key: _last_events(runtime, key)),
        ):
            short, long = await interleaved(lambda read=read: read(few), lambda read=read: read(many), rounds=60)  # type: ignore[misc]
            detail = f"{ms(long)} over {ms(short)}"
            found.append(Figure(f"{name}: 2,000 runs over 20", long / short, 1.5, detail=detail))
    return found


async def _with_runs(runtime: SessionRuntime, count: int) -> str:
    session = await runtime.create(AGENT)
    for _ in range(count):
        await runtime.execute(session.id, SendMessage("go", LoopFactory(driver=ScriptedDriver(["done"]))))
    return session.id


async def _one_loop(runtime: SessionRuntime, session_id: str) -> None:
    (last,) = (await runtime.record(session_id, limit=1)).loops
    await runtime.loop(session_id, last.loop_id)


async def _last_events(runtime: SessionRuntime, session_id: str) -> None:
    async for _ in runtime.events(session_id, last=50):
        pass


async def figures() -> list[Figure]:
    found = await overhead_figures()
    for part in (commit_figures, disk_figures, reading_figures):
        folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        try:
            found += await part(folder)
        finally:
            shutil.rmtree(folder)
    return found
