"""Google ADK: DatabaseSessionService on SQLite, SqliteSessionService, and perdure's service for it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps.app import App, ResumabilityConfig
from google.adk.events import Event
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, DatabaseSessionService, Session
from google.adk.sessions.schemas.v1 import StorageEvent
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from benchmarks.others.library import NEXT_MESSAGE, ON_PERDURE, Kind, OnPerdure, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.google_adk import PerdureSessionService
from perdure.adapters.google_adk_events import message_of

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

    service: Any

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.service = self._service()
        self.loaded: dict[str, Session] = {}

    def _service(self) -> BaseSessionService:
        return DatabaseSessionService(f"sqlite+aiosqlite:///{self.folder / 'sessions.db'}")

    async def close(self) -> None:
        await self.service.close()

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Write in one commit: a commit an event would take minutes."""
        session = await self.service.create_session(app_name=APP, user_id=USER, session_id=session_id)
        await self._fill(session, [event for turn in turns for event in events(turn)])
        filled = await self._load(session_id)
        assert filled is not None
        self.loaded[session_id] = filled

    async def _fill(self, session: Session, said: Sequence[Event]) -> None:
        async with self.service.database_session_factory() as sql:
            sql.add_all([StorageEvent.from_event(session, event) for event in said])
            await sql.commit()

    async def _append(self, session: Session, turn: Turn) -> None:
        for said in events(turn):
            await self.service.append_event(session, said)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._append(self.loaded[session_id], turn)

    async def turn(self, session_id: str, turn: Turn) -> None:
        """Read the session, and write each of four events."""
        session = await self._load(session_id)
        assert session is not None
        await self._append(session, turn)

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
            await self._append(session, turn)

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


class Sqlite(Database):
    name = "Google ADK, SqliteSessionService"
    packages = ("google-adk", "aiosqlite")
    run_settings = ()

    def _service(self) -> BaseSessionService:
        return SqliteSessionService(str(self.folder / "sessions.db"))

    async def close(self) -> None:
        """It opens the file for each call."""

    async def _fill(self, session: Session, said: Sequence[Event]) -> None:
        rows = [
            (e.id, APP, USER, session.id, e.invocation_id, e.timestamp, e.model_dump_json(exclude_none=True))
            for e in said
        ]
        with closing(sqlite3.connect(self.folder / "sessions.db")) as file, file:
            file.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


class Kept(OnPerdure, Database):
    name = "Google ADK, PerdureSessionService"
    packages = ("google-adk", "perdure")
    durability = f"{ON_PERDURE}; four commits a turn, one an event"

    def _service(self) -> BaseSessionService:
        return PerdureSessionService(store=self.url)

    async def _fill(self, session: Session, said: Sequence[Event]) -> None:
        messages = [message_of(event) for event in said]
        home, key = self.service._home, self.service.id_of(APP, USER, session.id)
        await home.run(home.change(key, lambda each: each.with_state(each.state.with_messages(*messages))))

    async def fork(self, session_id: str) -> None:
        await self.service.chat(APP, USER, session_id).fork()


SUBJECTS = (Database, Sqlite, Kept)
