"""Strands: FileSessionManager, and perdure's session manager for it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models import Model
from strands.session.file_session_manager import FileSessionManager
from strands.session.repository_session_manager import RepositorySessionManager
from strands.types.content import Message

from benchmarks.others.library import NEXT_MESSAGE, ON_PERDURE, Kind, OnPerdure, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.strands import PerdureSessionManager

AGENT = "bench"


def messages(turn: Turn) -> list[Message]:
    use = {"toolUseId": turn.call_id, "name": TOOL, "input": turn.arguments}
    result = {"toolUseId": turn.call_id, "status": "success", "content": [{"text": turn.result}]}
    said: list[Any] = [
        {"role": "user", "content": [{"text": turn.question}]},
        {"role": "assistant", "content": [{"toolUse": use}]},
        {"role": "user", "content": [{"toolResult": result}]},
        {"role": "assistant", "content": [{"text": turn.answer}]},
    ]
    return said


def kind(message: Message) -> Kind:
    part = message["content"][-1]
    if "toolUse" in part:
        return "call"
    if "toolResult" in part:
        return "result"
    return "question" if message["role"] == "user" else "answer"


class Scripted(Model):
    """The script as a model of Strands."""

    def __init__(self, script: ScriptedModel) -> None:
        self.script = script

    def update_config(self, **model_config: Any) -> None:
        pass

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        turn = self.script.turn
        done = await self.script.next(kind(messages[-1])) == "answer"
        use = {"toolUse": {"toolUseId": turn.call_id, "name": TOOL}}
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {} if done else use}}
        said: Any = {"text": turn.answer} if done else {"toolUse": {"input": json.dumps(turn.arguments)}}
        yield {"contentBlockDelta": {"delta": said}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if done else "tool_use"}}


class Files(Subject):
    name = "Strands, FileSessionManager"
    packages = ("strands-agents",)
    durability = "a file a message, renamed into place: no fsync"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, tuple[RepositorySessionManager, Agent]] = {}

    async def close(self) -> None:
        self.agents.clear()

    def _manager(self, session_id: str) -> RepositorySessionManager:
        return FileSessionManager(session_id, str(self.folder))

    def _load(self, session_id: str, model: ScriptedModel | None = None) -> tuple[RepositorySessionManager, Agent]:
        """Return an agent with its session. It keeps the whole history; the default would keep the last 40 messages."""
        manager = self._manager(session_id)
        script = model or ScriptedModel(NEXT_MESSAGE)
        agent = Agent(
            model=Scripted(script),
            tools=[tool(script.tool())],
            agent_id=AGENT,
            session_manager=manager,
            conversation_manager=NullConversationManager(),
            callback_handler=None,
        )
        return manager, agent

    def _append(self, manager: RepositorySessionManager, agent: Agent, turn: Turn, *, sync: bool = True) -> None:
        """Make the manager's calls when an agent adds its messages."""
        for message in messages(turn):
            agent.messages.append(message)
            manager.append_message(message, agent)
            if sync:
                manager.sync_agent(agent)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        self.agents[session_id] = manager, agent = self._load(session_id)
        for turn in turns:
            self._append(manager, agent, turn, sync=False)
        manager.sync_agent(agent)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        if session_id not in self.agents:
            self.agents[session_id] = self._load(session_id)
        self._append(*self.agents[session_id], turn)

    async def load(self, session_id: str) -> Sequence[Message]:
        return self._load(session_id)[1].messages

    def kind(self, message: Message) -> Kind:
        return kind(message)

    async def writer(self, session_id: str) -> Write:
        manager, agent = self._load(session_id)

        async def write(turn: Turn) -> None:
            self._append(manager, agent, turn)

        return write

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        await self._load(session_id, model)[1].invoke_async(model.turn.question)

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
        return "a next message is answered"


class Kept(OnPerdure, Files):
    name = "Strands, PerdureSessionManager"
    packages = ("strands-agents", "perdure")
    durability = f"{ON_PERDURE}; a commit a message, and one for what has changed of the agent"

    def _manager(self, session_id: str) -> RepositorySessionManager:
        return PerdureSessionManager(session_id, store=self.url)

    async def fork(self, session_id: str) -> None:
        manager, _ = self.agents[session_id]
        assert isinstance(manager, PerdureSessionManager)
        manager.chat.fork()


SUBJECTS = (Files, Kept)
