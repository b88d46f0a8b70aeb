"""Sessions for the contracts to keep: small ones, long ones, and one with a run in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId, now
from perdure.model.message import Message, ToolCall
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, InferenceResponse, ToolExecution
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage

SUPPORT = AgentDefinition("support", system_prompt="Be brief.", metadata={"team": "north"})


def new_session(*texts: str, id: str | None = None, definition: AgentDefinition = SUPPORT, **info: Any) -> AgentSession:
    """A session of version 0 in which these texts were said, by turns."""
    named = AgentSessionInfo(SessionId.generate() if id is None else SessionId(id), definition.name, **info)
    return say(AgentSession(named, definition, AgentState.of(definition)), *texts)


def say(session: AgentSession, *texts: str) -> AgentSession:
    """The session with more texts said, by turns."""
    turns = (Message.user, Message.assistant)
    count = len(session.state.transcript)
    return tell(session, *(turns[(count + place) % 2](text) for place, text in enumerate(texts)))


def tell(session: AgentSession, *messages: Message) -> AgentSession:
    return session.with_state(session.state.with_messages(*messages))


def note(session: AgentSession, key: str, value: Any) -> AgentSession:
    """The session with one more thing in its metadata."""
    return session.with_state(session.state.with_metadata(key, value))


def show(session: AgentSession, transcript: Transcript) -> AgentSession:
    """The session with another view."""
    return session.with_state(session.state.with_transcript(transcript))


def fork(session: AgentSession, *, id: str | None = None) -> AgentSession:
    """A session of version 0 that begins where this one stands."""
    at = now()
    key = SessionId.generate() if id is None else SessionId(id)
    info = AgentSessionInfo(key, session.info.agent_name, created_at=at, updated_at=at, parent_id=session.id)
    return replace(session, info=info)


def texts(session: AgentSession | None) -> list[str]:
    """What a session shows."""
    assert session is not None, "the session is not there"
    return [message.text for message in session.state.messages]


def seen(session: AgentSession | None) -> AgentSession:
    """All of a session but what its view covers and its steps were given: a load may leave those in the store."""
    assert session is not None, "the session is not there"
    state, run = session.state, session.state.execution
    if run is not None:
        done = tuple(replace(each, step=_seen_step(each.step)) for each in run.step_executions)
        run = replace(run, step_executions=done, current_step=run.current_step and _seen_step(run.current_step))
    context = replace(state.context, transcript=Transcript.of(state.transcript))
    return replace(session, state=replace(state, context=context, execution=run))


def _seen_step(step: AgentStep) -> AgentStep:
    return replace(step, input_messages=Transcript(), output_messages=Transcript.of(step.output_messages))


def run_of(session: AgentSession) -> AgentSession:
    """The session after a run of two steps: a tool was called, and the model answered."""
    call = ToolCall("look_up", {"order": 7}, id="call-1")
    found = ToolExecution(call, now(), now(), result={"state": "sent"}, usage=Usage(output_tokens=3))
    asked = AgentStep.of(
        [Message.assistant("Let me see.", tool_calls=[call]), Message.tool("call-1", {"state": "sent"})],
        input=session.state.transcript,
        response=InferenceResponse("tool_calls", Usage(input_tokens=20, output_tokens=5, cost=0.25), "m-1"),
        tool_executions=[found],
    )
    state = session.state.with_execution_started().with_current_step(asked).with_current_step_completed()
    answer = AgentStep.of([Message.assistant("It was sent.")], input=state.transcript)
    state = state.with_current_step(answer).with_current_step_completed()
    assert state.execution is not None
    return session.with_state(state.with_execution(state.execution.ended(ExecutionStatus.COMPLETED)))


def ids_of(sessions: Iterable[Any]) -> list[str]:
    return [session.id for session in sessions]
