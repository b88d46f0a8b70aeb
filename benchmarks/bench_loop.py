"""The agent loop: what a step and a run cost beside the model and the tools, and that history makes them no dearer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import perdure
from benchmarks.harness import Run, Side, interleaved, ms
from benchmarks.others.turns import TEXT
from benchmarks.setting import AGENT, Saver, filled, json_size, settled_size
from perdure import (
    AgentState,
    InferenceResponse,
    LoopFactory,
    MemoryStore,
    Message,
    ModelReply,
    SendMessage,
    SessionRuntime,
    SqliteStore,
    ToolCall,
    tool,
)
from perdure.testing import ScriptedDriver

STEPS = 20


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look_up(query: str) -> str:
    """Look something up."""
    return TEXT


def twenty_steps() -> LoopFactory:
    calls: list[Any] = [ToolCall("add", {"a": 1, "b": step}, id=f"call-{step}") for step in range(STEPS - 1)]
    return LoopFactory(tools=[add], driver=ScriptedDriver([*calls, "done"]))


def one_call() -> LoopFactory:
    """A run of two steps, whose four messages are those of a turn: a tool call, then an answer."""
    call = Message.assistant(tool_calls=[ToolCall("look_up", {"query": TEXT})])
    return LoopFactory(tools=[look_up], driver=ScriptedDriver([call, TEXT]))


class Answers:
    """A driver that answers at once. If it `looks`, its prompt is compiled, as for every provider, and not read."""

    def __init__(self, *, looks: bool) -> None:
        self._looks = looks

    async def respond(self, request: Any, on_delta: object) -> ModelReply:
        if self._looks:
            assert len(request.messages) > 0
        return ModelReply(Message.assistant("yes"), InferenceResponse("stop"))


async def measure(run: Run) -> None:
    await steps(run)
    await prompts(run)
    with run.folder() as folder:
        await durable(run, folder)


def running(runtime: SessionRuntime, session_id: str, loops: Any) -> Side:
    return lambda: runtime.execute(session_id, SendMessage("go", loops()))


async def steps(run: Run) -> None:
    runtime = SessionRuntime(MemoryStore())
    empty = running(runtime, (await runtime.create(AGENT)).id, twenty_steps)
    long = running(runtime, (await filled(runtime, 10_000)).id, twenty_steps)
    state = AgentState.of(AGENT).with_messages(Message.user("go"))
    alone, short, many = await interleaved(lambda: twenty_steps().build(AGENT).run(state), empty, long, rounds=60)
    run.report("loop.alone", alone.cpu / STEPS * 1000, f"{ms(alone.wall / STEPS)} on the clock")
    run.report("loop.recorded", short.cpu / STEPS * 1000, f"{ms(short.wall / STEPS)} on the clock")
    run.report("loop.10k", many.cpu / short.cpu, f"{ms(many.cpu / STEPS)} / {ms(short.cpu / STEPS)}")


async def prompts(run: Run) -> None:
    (looked, detail), (unseen, _) = [await sends(Answers(looks=looks)) for looks in (True, False)]
    detail += f" of the processor; {unseen:.2f}× if the driver does not even ask how long its prompt is"
    run.report("loop.prompt", looked, detail)


async def sends(driver: Answers) -> tuple[float, str]:
    """Compare a send of one step at 10,000 messages with one at 100, through the face and in memory."""
    store = MemoryStore()
    few, many = [(await filled(SessionRuntime(store), count)).id for count in (100, 10_000)]
    async with perdure.connect(store, driver=driver) as sessions:
        short, long = await interleaved(
            lambda: sessions.send(few, "And now?"), lambda: sessions.send(many, "And now?"), rounds=40
        )
    return long.cpu / short.cpu, f"{ms(long.cpu)} / {ms(short.cpu)}"


async def durable(run: Run, folder: Path) -> None:
    path = folder / "bench.db"
    async with SqliteStore(path) as store:
        runtime = SessionRuntime(store)
        saver = Saver(store, await runtime.create(AGENT))
        session_id = (await runtime.create(AGENT)).id

        async def send() -> None:
            await runtime.execute(session_id, SendMessage(TEXT, one_call()))

        sent, saved = await interleaved(send, saver, rounds=150)
        cpu = f"processor {ms(sent.cpu)} / {ms(saved.cpu)}"
        run.report("loop.run", sent.wall / saved.wall, f"{ms(sent.wall)} / {ms(saved.wall)}; {cpu}")

        before, known = settled_size(path), len((await runtime.get_session(session_id)).state.transcript)
        for _ in range(200):
            await send()
        grown = settled_size(path) - before
        said = list((await runtime.get_session(session_id)).state.transcript[known:])
    run.report("loop.bytes", grown / json_size(said), f"{grown / 200:,.0f} / {json_size(said) / 200:,.0f} bytes")
