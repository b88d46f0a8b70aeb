"""OpenAI Agents SDK: SQLiteSession, AdvancedSQLiteSession, which has branches, and perdure's session for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from agents import (
    Agent,
    ModelResponse,
    RunConfig,
    Runner,
    SessionSettings,
    SQLiteSession,
    Usage,
    function_tool,
    set_tracing_disabled,
)
from agents.extensions.memory import AdvancedSQLiteSession
from agents.models.interface import Model
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from benchmarks.others.library import (
    NEXT_MESSAGE,
    ON_PERDURE,
    CannotFork,
    Kind,
    OnPerdure,
    ScriptedModel,
    Subject,
    Write,
)
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.openai_agents import PerdureSession

SHOWN = 50
"""The number of items a bounded turn reads."""
BOUNDED = RunConfig(session_settings=SessionSettings(limit=SHOWN))
Item = dict[str, Any]


def items(turn: Turn) -> list[Item]:
    arguments = json.dumps(turn.arguments)
    return [
        {"role": "user", "content": turn.question},
        {"type": "function_call", "call_id": turn.call_id, "name": TOOL, "arguments": arguments},
        {"type": "function_call_output", "call_id": turn.call_id, "output": turn.result},
        {"role": "assistant", "content": turn.answer},
    ]


def kind(item: Item) -> Kind:
    if item.get("type") == "function_call":
        return "call"
    if item.get("type") == "function_call_output":
        return "result"
    return "question" if item["role"] == "user" else "answer"


class Scripted(Model):
    """The script as a model of the SDK."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        turn = self.model.turn
        last = kind(input[-1]) if isinstance(input, list) else "question"
        said: Any
        if await self.model.next(last) == "answer":
            text = ResponseOutputText(type="output_text", text=turn.answer, annotations=[])
            said = ResponseOutputMessage(
                id="answer", type="message", role="assistant", status="completed", content=[text]
            )
        else:
            arguments = json.dumps(turn.arguments)
            said = ResponseFunctionToolCall(type="function_call", call_id=turn.call_id, name=TOOL, arguments=arguments)
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


class Plain(Subject):
    name = "OpenAI Agents, SQLiteSession"
    packages = ("openai-agents",)
    durability = "SQLite, WAL, synchronous=FULL (SQLite's default): fsync at every commit; one commit for add_items"

    async def open(self, folder: Path) -> None:
        set_tracing_disabled(True)
        self.folder = folder
        self.open_sessions: dict[str, Any] = {}

    def _new(self, session_id: str) -> Any:
        return SQLiteSession(session_id, self.folder / "sessions.db")

    def _session(self, session_id: str) -> Any:
        if session_id not in self.open_sessions:
            self.open_sessions[session_id] = self._new(session_id)
        return self.open_sessions[session_id]

    async def close(self) -> None:
        for session in self.open_sessions.values():
            session.close()

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        await self._session(session_id).add_items([item for turn in turns for item in items(turn)])

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._session(session_id).add_items(items(turn))

    async def turn(self, session_id: str, turn: Turn) -> None:
        """Read the newest items, and write three times: the question, a step with its result, the answer."""
        session, said = self._session(session_id), items(turn)
        await session.get_items(limit=SHOWN)
        for step in (said[:1], said[1:3], said[3:]):
            await session.add_items(step)

    async def load(self, session_id: str) -> Sequence[Any]:
        return await self._session(session_id).get_items()

    def kind(self, message: Any) -> Kind:
        return kind(message)

    async def writer(self, session_id: str) -> Write:
        session = self._session(session_id)
        await session.get_items()

        async def write(turn: Turn) -> None:
            await session.add_items(items(turn))

        return write

    async def run(self, session_id: str, setting: str, model: ScriptedModel, config: RunConfig | None = None) -> None:
        agent = Agent("bench", model=Scripted(model), tools=[function_tool(model.tool())])
        await Runner.run(agent, model.turn.question, session=self._session(session_id), run_config=config)

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
        return "a next message is answered"

    async def fork(self, session_id: str) -> None:
        raise CannotFork


class PlainRun(Plain):
    """A turn by the SDK's own runner, with the newest items as its history."""

    async def turn(self, session_id: str, turn: Turn) -> None:
        await self.run(session_id, "default", ScriptedModel(turn), BOUNDED)


class Advanced(Plain):
    name = "OpenAI Agents, AdvancedSQLiteSession"
    run_settings = ()

    def _new(self, session_id: str) -> Any:
        return AdvancedSQLiteSession(session_id=session_id, db_path=self.folder / "sessions.db", create_tables=True)

    async def fork(self, session_id: str) -> None:
        """Branch from the last turn, within the session; the branch holds the items before that turn."""
        session = self._session(session_id)
        assert isinstance(session, AdvancedSQLiteSession)
        last = (await session.get_conversation_turns())[-1]["turn"]
        await session.create_branch_from_turn(last)
        await session.switch_to_branch("main")


class Kept(OnPerdure, Plain):
    name = "OpenAI Agents, PerdureSession"
    packages = ("openai-agents", "perdure")
    durability = f"{ON_PERDURE}; one commit for add_items"

    def _new(self, session_id: str) -> PerdureSession:
        return PerdureSession(session_id, store=self.url)

    async def fork(self, session_id: str) -> None:
        await self._session(session_id).fork(f"{session_id}-{uuid4().hex}")


class KeptRun(Kept):
    turn = PlainRun.turn


SUBJECTS = (Plain, Advanced, Kept)
