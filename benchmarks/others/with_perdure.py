"""perdure: a SQLite file, through `perdure.connect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import perdure
from benchmarks.others.library import NEXT_MESSAGE, Kind, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn
from perdure import (
    InferenceResponse,
    InjectMessage,
    Message,
    ModelReply,
    ModelRequest,
    SessionId,
    SqliteStore,
    ToolCall,
)
from perdure.protocols import OnDelta

BATCH = 1_000


def messages(turn: Turn) -> tuple[Message, ...]:
    return (
        Message.user(turn.question),
        Message.assistant(tool_calls=[ToolCall(TOOL, turn.arguments, turn.call_id)]),
        Message.tool(turn.call_id, turn.result, name=TOOL),
        Message.assistant(turn.answer),
    )


def kind(message: Message) -> Kind:
    if message.role == "user":
        return "question"
    if message.role == "tool":
        return "result"
    return "call" if message.tool_calls else "answer"


class ScriptedDriver:
    """The script as perdure's driver; the script may change from run to run."""

    def __init__(self) -> None:
        self.model = ScriptedModel(NEXT_MESSAGE)

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        turn = self.model.turn
        if await self.model.next(kind(request.messages[-1])) == "answer":
            return ModelReply(Message.assistant(turn.answer), InferenceResponse("stop"))
        call = ToolCall(TOOL, turn.arguments, turn.call_id)
        return ModelReply(Message.assistant(tool_calls=[call]), InferenceResponse("tool_call"))


class OneSave(Subject):
    name = "perdure"
    packages = ("perdure",)
    durability = "SQLite, WAL, synchronous=FULL: fsync at every commit; one commit a turn"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.driver = ScriptedDriver()

        def look_up(query: str) -> str:
            """Look something up."""
            return self.driver.model.tool()(query)

        self.store = SqliteStore(folder / "sessions.db")
        self.sessions = perdure.connect(self.store, driver=self.driver, tools=[look_up], compaction=None)
        await self.sessions.__aenter__()

    async def close(self) -> None:
        await self.sessions.__aexit__(None, None, None)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        await self.sessions.open(session_id)
        for start in range(0, len(turns), BATCH):
            many = [message for turn in turns[start : start + BATCH] for message in messages(turn)]
            await self.sessions.execute(session_id, InjectMessage(*many))

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self.sessions.execute(session_id, InjectMessage(*messages(turn)))

    async def load(self, session_id: str) -> Sequence[Message]:
        return list((await self.sessions.session(session_id)).state.transcript)

    def kind(self, message: Message) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        await self.sessions.fork(session_id)

    async def writer(self, session_id: str) -> Write:
        loaded = await self.store.load(SessionId(session_id))
        assert loaded is not None

        async def write(turn: Turn) -> None:
            await self.store.save(loaded.with_state(loaded.state.with_messages(*messages(turn))))

        return write

    async def on_record(self, session_id: str) -> Sequence[Message]:
        running = [loop.loop_id for loop in (await self.sessions.record(session_id)).loops if loop.status == "running"]
        return [said for loop_id in running for said in (await self.sessions.loop(session_id, loop_id)).messages]

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        self.driver.model = model
        await (await self.sessions.open(session_id)).send(model.turn.question)

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        self.driver.model = model
        report = await self.sessions.recover()
        return "the run is finished" if session_id in report.resumed else f"not resumed: {report}"


class Run(OneSave):
    name = "perdure, as a run"
    durability = "the same; every step of the run is on record before the next begins: four commits a turn"
    run_settings = ()

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        self.driver.model = ScriptedModel(turn)
        await self.sessions.send(session_id, turn.question)


SUBJECTS = (OneSave, Run)
