"""The agent loop: the cost of a step and a run beside the model and the tools, with a short and a long history."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import perdure
from benchmarks.harness import Run, Side, interleaved, ms
from benchmarks.others.turns import TEXT
from benchmarks.setting import AGENT, BareFile, Saver, filled, json_size, make_steady, settled_size
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
from perdure.model.ids import new_id
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
    """Return loops for a run of two steps, whose four messages are those of a turn: a tool call, then an answer."""
    call = Message.assistant(tool_calls=[ToolCall("look_up", {"query": TEXT})])
    return LoopFactory(tools=[look_up], driver=ScriptedDriver([call, TEXT]))


class Answers:
    """A driver that answers at once. If it `looks`, its prompt is compiled, as for every provider, but not read."""

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


class BareRun:
    """The rows of a run on the same tables, through a thread of its own: the least code with a run's guarantees.

    It takes four transactions. The message is durable before the model is asked, the call before the tool is run, its
    result before the model is asked again, and the answer with the version.
    """

    def __init__(self, path: Path, session_id: str) -> None:
        self._file = BareFile(path)
        self.close = self._file.close
        self._id = session_id
        self._messages = self._file.last("msg", 4)
        self._batches = self._file.last("batch", 4)
        (self._head,) = self._file.last("head", 1)

    async def __call__(self) -> None:
        run = new_id()
        for place in range(4):
            await self._file.run(self._write, run, place)

    def _write(self, run: str, place: int) -> None:
        db, message, batch = self._file.db, self._messages[place], self._batches[place]
        db.execute("BEGIN IMMEDIATE")
        claim = "claim = NULL, expires = NULL, version = version + 1" if place == 3 else "claim = x'00', expires = 1.0"
        update = (
            f"UPDATE session SET {claim}, updated = ?, msg_end = msg_end + 1, evt_end = evt_end + 4"
            " WHERE id = ? RETURNING sid, log, version, msg_end, evt_end"
        )
        sid, log, version, end, told = db.execute(update, (time.time(), self._id)).fetchone()  # type: ignore[misc]
        reach = (
            "INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq, end_pos = excluded.end_pos"
            " RETURNING run"
        )
        number: Any = db.execute(reach, (sid, run, told - 3, told, log, end - 1, end)).fetchone()
        row = (sid, told, 4, number[0], zlib.crc32(batch), batch)
        db.execute("INSERT INTO batch (sid, last, count, run, crc, body) VALUES (?, ?, ?, ?, ?, ?)", row)
        row = (log, end - 1, zlib.crc32(message), message)
        db.execute("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", row)
        if place == 3:
            self._file.add_head(sid, version, self._head)
        db.execute("COMMIT")


async def durable(run: Run, folder: Path) -> None:
    path, bare_path = folder / "bench.db", folder / "bare.db"
    async with SqliteStore(path) as store, SqliteStore(bare_path) as idle:
        runtime = SessionRuntime(store)
        saver = Saver(store, await runtime.create(AGENT))
        session_id = (await runtime.create(AGENT)).id
        bare = await bare_run(idle, bare_path)
        await make_steady(store, path)

        async def send() -> None:
            await runtime.execute(session_id, SendMessage(TEXT, one_call()))

        sent, saved, least = await interleaved(send, saver, bare, rounds=150)
        bare.close()
        cpu = f"processor {ms(sent.cpu)} / {ms(saved.cpu)}"
        floor = f"its four transactions alone take {least.wall / saved.wall:.2f}×, processor {ms(least.cpu)}"
        run.report("loop.run", sent.wall / saved.wall, f"{ms(sent.wall)} / {ms(saved.wall)}; {cpu}; {floor}")

        before, known = settled_size(path), len((await runtime.get_session(session_id)).state.transcript)
        for _ in range(200):
            await send()
        grown = settled_size(path) - before
        said = list((await runtime.get_session(session_id)).state.transcript[known:])
    run.report("loop.bytes", grown / json_size(said), f"{grown / 200:,.0f} / {json_size(said) / 200:,.0f} bytes")


async def bare_run(store: SqliteStore, path: Path) -> BareRun:
    """Return the bare transactions of a run, in a file of their own that is in use, like the other side's."""
    runtime = SessionRuntime(store)
    session_id = (await runtime.create(AGENT)).id
    await make_steady(store, path)
    for _ in range(2):  # the usual run is the second one, whose version replaces a known one
        await runtime.execute(session_id, SendMessage(TEXT, one_call()))
    return BareRun(path, session_id)
