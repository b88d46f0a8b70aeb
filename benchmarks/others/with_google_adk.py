"""Google ADK: DatabaseSessionService on SQLite."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps.app import App, ResumabilityConfig
from google.adk.events import Event
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService, Session
from google.genai import types
from sqlalchemy import event

from benchmarks.others.library import NEXT_MESSAGE, Kind, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn

APP = "bench"
USER = "user"
RESUMABLE = "App with ResumabilityConfig(is_resumable=True)"


def text(role: str, said: str) -> types.Content:
    return types.Content(role=role, parts=[types.Part(text=said)])


def call(turn: Turn) -> types.Content:
    asked = types.FunctionCall(id=turn.call_id, name=TOOL, args=dict(turn.arguments))
    return types.Content(role="model", parts=[types.Part(function_call=asked)])


def events(turn: Turn) -> list[Event]:
    answered = types.FunctionResponse(id=turn.call_id, name=TOOL, response={"result": turn.result})
    result = types.Content(role="user", parts=[types.Part(function_response=answered)])
    said = [("user", text("user", turn.question)), (APP, call(turn)), (APP, result), (APP, text("model", turn.answer))]
    return [Event(author=author, invocation_id=f"turn-{turn.number}", content=content) for author, content in said]


def kind_of(content: types.Content | None) -> Kind:
    part = (content.parts or [types.Part()])[-1] if content else types.Part()
    if part.function_call:
        return "call"
    if part.function_response:
        return "result"
    return "question" if content and content.role == "user" else "answer"


class Scripted(BaseLlm):
    """The script as a model of the ADK."""

    script: Any

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        turn = self.script.turn
        done = await self.script.next(kind_of(llm_request.contents[-1])) == "answer"
        yield LlmResponse(content=text("model", turn.answer) if done else call(turn))


class Database(Subject):
    name = "Google ADK, DatabaseSessionService"
    packages = ("google-adk", "sqlalchemy", "aiosqlite")
    durability = "SQLite, rollback journal, synchronous=FULL (SQLite's defaults): four commits a turn, one an event"
    run_settings = ("default", RESUMABLE)

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite+aiosqlite:///{folder / 'sessions.db'}"
        self.service = DatabaseSessionService(self.url)
        self.loaded: dict[str, Session] = {}

    async def close(self) -> None:
        await self.service.close()

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Without fsync, so that 10,000 commits do not take minutes."""
        quick = DatabaseSessionService(self.url)
        engine = quick.db_engine.sync_engine
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        session = await quick.create_session(app_name=APP, user_id=USER, session_id=session_id)
        for turn in turns:
            await self._append(quick, session, turn)
        await quick.close()
        self.loaded[session_id] = session

    async def _append(self, service: DatabaseSessionService, session: Session, turn: Turn) -> None:
        for said in events(turn):
            await service.append_event(session, said)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._append(self.service, self.loaded[session_id], turn)

    async def _load(self, session_id: str) -> Session | None:
        return await self.service.get_session(app_name=APP, user_id=USER, session_id=session_id)

    async def load(self, session_id: str) -> Sequence[Event]:
        session = await self._load(session_id)
        return [said for said in session.events if said.content] if session else []

    def kind(self, message: Event) -> Kind:
        return kind_of(message.content)

    async def writer(self, session_id: str) -> Write:
        session = await self._load(session_id)
        assert session is not None

        async def write(turn: Turn) -> None:
            await self._append(self.service, session, turn)

        return write

    def _runner(self, setting: str, model: ScriptedModel) -> Runner:
        agent = LlmAgent(name=APP, model=Scripted(model="scripted", script=model), tools=[model.tool()])
        resumable = ResumabilityConfig(is_resumable=setting == RESUMABLE)
        app = App(name=APP, root_agent=agent, resumability_config=resumable)
        return Runner(app=app, session_service=self.service)

    async def _run(self, runner: Runner, session_id: str, **what: Any) -> None:
        async for _ in runner.run_async(user_id=USER, session_id=session_id, **what):
            pass

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        if await self._load(session_id) is None:
            await self.service.create_session(app_name=APP, user_id=USER, session_id=session_id)
        message = text("user", model.turn.question)
        await self._run(self._runner(setting, model), session_id, new_message=message)

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        if setting != RESUMABLE:
            await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
            return "a next message is answered"
        killed = (await self.load(session_id))[-1].invocation_id
        await self._run(self._runner(setting, model), session_id, invocation_id=killed)
        return "the run is finished"


SUBJECTS = (Database,)
