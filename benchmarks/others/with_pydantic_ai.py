"""Pydantic AI: no store of its own; its message history as JSON, written whole into a file of the session's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from benchmarks.others.library import NEXT_MESSAGE, Kind, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn


def messages(turn: Turn) -> list[ModelMessage]:
    return [
        ModelRequest([UserPromptPart(turn.question)]),
        ModelResponse([ToolCallPart(TOOL, turn.arguments, turn.call_id)]),
        ModelRequest([ToolReturnPart(TOOL, turn.result, turn.call_id)]),
        ModelResponse([TextPart(turn.answer)]),
    ]


def kind(message: ModelMessage) -> Kind:
    match message.parts[-1]:
        case UserPromptPart():
            return "question"
        case ToolCallPart():
            return "call"
        case ToolReturnPart():
            return "result"
    return "answer"


class JsonFile(Subject):
    name = "Pydantic AI, JSON file"
    packages = ("pydantic-ai-slim",)
    durability = "a file written anew for each turn: no fsync, not atomic"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.histories: dict[str, list[ModelMessage]] = {}

    async def close(self) -> None:
        self.histories.clear()

    def _write(self, session_id: str, history: list[ModelMessage]) -> None:
        (self.folder / f"{session_id}.json").write_bytes(ModelMessagesTypeAdapter.dump_json(history))

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        self.histories[session_id] = [message for turn in turns for message in messages(turn)]
        self._write(session_id, self.histories[session_id])

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        self.histories[session_id].extend(messages(turn))
        self._write(session_id, self.histories[session_id])

    async def load(self, session_id: str) -> Sequence[ModelMessage]:
        path = self.folder / f"{session_id}.json"
        return ModelMessagesTypeAdapter.validate_json(path.read_bytes()) if path.exists() else []

    def kind(self, message: ModelMessage) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        """There is no call for it, but the file can be copied: what is read is written under another name."""
        self._write(f"{session_id}-fork", list(await self.load(session_id)))

    async def writer(self, session_id: str) -> Write:
        history = list(await self.load(session_id))

        async def write(turn: Turn) -> None:
            self._write(session_id, [*history, *messages(turn)])

        return write

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        async def respond(history: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            if await model.next(kind(history[-1])) == "answer":
                return ModelResponse([TextPart(model.turn.answer)])
            return ModelResponse([ToolCallPart(TOOL, model.turn.arguments, model.turn.call_id)])

        agent = Agent(FunctionModel(respond), tools=[model.tool()])
        result = await agent.run(model.turn.question, message_history=list(await self.load(session_id)))
        (self.folder / f"{session_id}.json").write_bytes(result.all_messages_json())

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
        return "a next message is answered"


SUBJECTS = (JsonFile,)
