"""Agno: SqliteDb."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from agno.agent import Agent
from agno.db.base import SessionType
from agno.db.sqlite import SqliteDb
from agno.models.base import Model
from agno.models.message import Message
from agno.models.response import ModelResponse
from agno.run.agent import RunOutput
from agno.run.base import RunStatus
from agno.session import AgentSession
from sqlalchemy import event

from benchmarks.others.library import NEXT_MESSAGE, Kind, ScriptedModel, Subject, Write
from benchmarks.others.turns import TOOL, Turn

AGENT = "bench"
CHECKPOINTS = "checkpoint='tool-batch'"


def tool_call(turn: Turn) -> dict[str, Any]:
    function = {"name": TOOL, "arguments": json.dumps(turn.arguments)}
    return {"id": turn.call_id, "type": "function", "function": function}


def run_of(turn: Turn, session_id: str) -> RunOutput:
    said = [
        Message(role="user", content=turn.question),
        Message(role="assistant", tool_calls=[tool_call(turn)]),
        Message(role="tool", tool_call_id=turn.call_id, tool_name=TOOL, content=turn.result),
        Message(role="assistant", content=turn.answer),
    ]
    return RunOutput(
        run_id=f"{session_id}-{turn.number}",
        agent_id=AGENT,
        session_id=session_id,
        messages=said,
        content=turn.answer,
        status=RunStatus.completed,
    )


def kind(message: Message) -> Kind:
    if message.role == "user":
        return "question"
    if message.role == "tool":
        return "result"
    return "call" if message.tool_calls else "answer"


class Scripted(Model):
    """The script as a model of Agno."""

    script: Any = None

    async def ainvoke(self, messages: list[Message], *args: Any, **kwargs: Any) -> ModelResponse:
        turn = self.script.turn
        if await self.script.next(kind(messages[-1])) == "answer":
            return ModelResponse(role="assistant", content=turn.answer)
        return ModelResponse(role="assistant", tool_calls=[tool_call(turn)])

    def invoke(self, *args: Any, **kwargs: Any) -> ModelResponse:
        raise NotImplementedError

    def invoke_stream(self, *args: Any, **kwargs: Any) -> Iterator[ModelResponse]:
        raise NotImplementedError

    def ainvoke_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ModelResponse]:
        raise NotImplementedError

    def _parse_provider_response(self, response: Any, **kwargs: Any) -> ModelResponse:
        raise NotImplementedError

    def _parse_provider_response_delta(self, response: Any) -> ModelResponse:
        raise NotImplementedError


class Sqlite(Subject):
    name = "Agno, SqliteDb"
    packages = ("agno", "sqlalchemy")
    durability = "SQLite, WAL, synchronous=FULL (SQLite's default): two commits a turn, the session's row and the run's"
    run_settings = ("default", CHECKPOINTS)

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.db = SqliteDb(db_file=str(folder / "sessions.db"))
        self.loaded: dict[str, AgentSession] = {}

    async def close(self) -> None:
        self.db.close()

    def _save(self, session: AgentSession, turn: Turn) -> None:
        """Make an agent's calls at the end of a run."""
        run = run_of(turn, session.session_id)
        session.upsert_run(run)
        self.db.upsert_session(session)
        self.db.upsert_run(run, session.session_id, run_index=len(session.runs or ()) - 1)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Without fsync, so that 2,500 commits do not take minutes."""
        db = SqliteDb(db_file=str(self.folder / "sessions.db"))
        event.listen(db.db_engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        session = AgentSession(session_id, agent_id=AGENT, session_data={}, runs=[])
        db.upsert_session(session)
        for index, turn in enumerate(turns):
            run = run_of(turn, session_id)
            session.runs.append(run)  # type: ignore[union-attr]  # a new session has a list of runs
            db.upsert_run(run, session_id, run_index=index)
        db.close()
        self.loaded[session_id] = session

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        self._save(self.loaded[session_id], turn)

    def _load(self, session_id: str) -> AgentSession | None:
        found = self.db.get_session(session_id, SessionType.AGENT)
        assert found is None or isinstance(found, AgentSession)
        return found

    async def load(self, session_id: str) -> Sequence[Message]:
        session = self._load(session_id)
        runs = session.runs or [] if session else []
        return [message for run in runs for message in run.messages or ()]

    def kind(self, message: Message) -> Kind:
        return kind(message)

    async def fork(self, session_id: str) -> None:
        Agent(id=AGENT, model=Scripted(id="scripted"), db=self.db).fork_session(source_session_id=session_id)

    async def writer(self, session_id: str) -> Write:
        session = self._load(session_id)
        assert session is not None

        async def write(turn: Turn) -> None:
            self._save(session, turn)

        return write

    def _agent(self, session_id: str, setting: str, model: ScriptedModel) -> Agent:
        scripted = Scripted(id="scripted")
        scripted.script = model
        checkpoint: Any = "tool-batch" if setting == CHECKPOINTS else None
        return Agent(
            id=AGENT,
            model=scripted,
            db=self.db,
            tools=[model.tool()],
            session_id=session_id,
            add_history_to_context=True,
            checkpoint=checkpoint,
            telemetry=False,
        )

    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        await self._agent(session_id, setting, model).arun(model.turn.question)

    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        session = self._load(session_id)
        if setting != CHECKPOINTS or session is None or not session.runs:
            await self.run(session_id, setting, ScriptedModel(NEXT_MESSAGE))
            return "a next message is answered"
        killed = session.runs[-1].run_id
        await self._agent(session_id, setting, model).acontinue_run(run_id=killed, session_id=session_id)
        return "the run is finished"


SUBJECTS = (Sqlite,)
