"""Pydantic AI: its message history as JSON, written whole into a file, and perdure's store of its conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.conversation import Conversation
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

from benchmarks.others.library import NEXT_MESSAGE, ON_PERDURE, Kind, OnPerdure, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.pydantic_ai import PerdureConversationStore


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


def agent(model: ScriptedModel) -> Agent:
    async def respond(history: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if await model.next(kind(history[-1])) == "answer":
            return ModelResponse([TextPart(model.turn.answer)])
        return ModelResponse([ToolCallPart(TOOL, model.turn.arguments, model.turn.call_id)])

    return Agent(FunctionModel(respond), tools=[model.tool()])


class JsonFile(Subject):
    name = "Pydantic AI, JSON file"
    packages = ("pydantic-ai-slim",)
    durability = "a file written again for each turn: no fsync, not atomic"

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
        if session_id not in self.histories:
            self.histories[session_id] = list(await self.load(session_id))
        self.histories[session_id].extend(messages(turn))
        self._write(session_id, self.histories[session_id])

    async def load(self, session_id: str) -> Sequence[ModelMessage]:
        path = self.folder / f"{session_id}.json"
        return ModelMessagesTypeAdapter.validate_json(path.read_bytes()) if path.exists() else []

    def kind(self, message: ModelMessage) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        """Copy the file, since the library has no call for it: the history is read and written under another name."""
        self._write(f"{session_id}-fork", list(await self.load(session_id)))

    async def writer(self, session_id: str) -> Write:
        history = list(await self.load(session_id))

        async def write(turn: Turn) -> None:
            self._write(session_id, [*history, *messages(turn)])

        return write

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        result = await agent(model).run(model.turn.question, message_history=list(await self.load(session_id)))
        (self.folder / f"{session_id}.json").write_bytes(result.all_messages_json())

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
        return "a next message is answered"


class Kept(OnPerdure, Subject):
    name = "Pydantic AI, PerdureConversationStore"
    packages = ("pydantic-ai-slim", "perdure")
    durability = f"{ON_PERDURE}; one commit a turn"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.store = PerdureConversationStore(store=self.url)
        self.conversations: dict[str, Conversation] = {}

    async def _load(self, session_id: str) -> Conversation:
        return await self.store.load(session_id) or Conversation(conversation_id=session_id)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        said = [message for turn in turns for message in messages(turn)]
        await self.store.save(Conversation(messages=said, conversation_id=session_id))
        self.conversations[session_id] = await self._load(session_id)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        if session_id not in self.conversations:
            self.conversations[session_id] = await self._load(session_id)
        await self._append(self.conversations[session_id], turn)

    async def _append(self, conversation: Conversation, turn: Turn) -> None:
        conversation.messages.extend(messages(turn))
        await self.store.save(conversation)

    async def load(self, session_id: str) -> Sequence[ModelMessage]:
        return (await self._load(session_id)).messages

    def kind(self, message: ModelMessage) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        await self.store.chat(session_id).fork()

    async def writer(self, session_id: str) -> Write:
        conversation = await self._load(session_id)
        return lambda turn: self._append(conversation, turn)

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        conversation = await self._load(session_id)
        await self.store.save(await agent(model).run(model.turn.question, conversation=conversation))

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
        return "a next message is answered"


SUBJECTS = (JsonFile, Kept)
