"""The agent loop: what a step costs beside the model and the tools, and that history makes it no dearer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_core import AGENT, filled, settled_size, store_in
from benchmarks.harness import Figure, interleaved, ms
from perdure import AgentState, LoopFactory, MemoryStore, Message, SendMessage, SessionRuntime, ToolCall, tool
from perdure.testing import ScriptedDriver

STEPS = 20


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def loops() -> LoopFactory:
    calls: list[Any] = [ToolCall("add", {"a": 1, "b": step}, id=f"call-{step}") for step in range(STEPS - 1)]
    return LoopFactory(tools=[add], driver=ScriptedDriver([*calls, "done"]))


class Runner:
    """Runs a script of twenty steps on a session, again and again, always from the same version of history."""

    def __init__(self, runtime: SessionRuntime, session_id: str) -> None:
        self.runtime = runtime
        self.session_id = session_id

    async def __call__(self) -> None:
        await self.runtime.execute(self.session_id, SendMessage("go", loops()))


async def step_figures() -> list[Figure]:
    runtime = SessionRuntime(MemoryStore())
    empty = Runner(runtime, (await runtime.create(AGENT)).id)
    long = Runner(runtime, (await filled(runtime, 10_000)).id)
    state = AgentState.of(AGENT).with_messages(Message.user("go"))
    alone, short, many = await interleaved(lambda: loops().build(AGENT).run(state), empty, long, rounds=60)
    detail = f"0: {ms(short / STEPS)} a step, 10k: {ms(many / STEPS)} a step"
    return [
        Figure("milliseconds a step, the loop alone", alone / STEPS * 1000, 0.3, unit="ms"),
        Figure(
            "milliseconds a step, with runtime, record and MemoryStore",
            short / STEPS * 1000,
            0.3,
            unit="ms",
            detail=detail,
        ),
        Figure("a step at 10,000 messages over a step at 0", many / short, 1.5, detail=detail),
    ]


async def disk_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        grown = []
        for count in (0, 10_000):
            runner = Runner(runtime, (await filled(runtime, count)).id)
            await runner()
            before = await settled_size(store, folder)
            for _ in range(10):
                await runner()
            grown.append((await settled_size(store, folder) - before) / 10 / STEPS)
    detail = f"0: {grown[0]:,.0f} bytes a step, 10k: {grown[1]:,.0f}"
    return [Figure("bytes a step at 10,000 messages over 0", grown[1] / grown[0], 1.1, detail=detail)]


async def figures() -> list[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
    try:
        return [*await step_figures(), *await disk_figures(folder)]
    finally:
        shutil.rmtree(folder)
