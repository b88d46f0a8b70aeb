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
    """Return a session of version 0 in which user and assistant have said these texts in turn."""
    named = AgentSessionInfo(SessionId.generate() if id is None else SessionId(id), definition.name, **info)
    return say(AgentSession(named, definition, AgentState.of(definition)), *texts)


def say(session: AgentSession, *texts: str) -> AgentSession:
    """Return the session with more texts, said by user and assistant in turn."""
    turns = (Message.user, Message.assistant)
    # Counted from the transcript, so that the roles alternate across several calls, too.
    count = len(session.state.transcript)
    return tell(session, *(turns[(count + place) % 2](text) for place, text in enumerate(texts)))


def tell(session: AgentSession, *messages: Message) -> AgentSession:
    return session.with_state(session.state.with_messages(*messages))


def note(session: AgentSession, key: str, value: Any) -> AgentSession:
    """Return the session with one more value in its metadata."""
    return session.with_state(session.state.with_metadata(key, value))


def show(session: AgentSession, transcript: Transcript) -> AgentSession:
    """Return the session with another view."""
    return session.with_state(session.state.with_transcript(transcript))


def fork(session: AgentSession, *, id: str | None = None) -> AgentSession:
    """Return a session of version 0 that begins with what this one shows."""
    at = now()
    key = SessionId.generate() if id is None else SessionId(id)
    info = AgentSessionInfo(key, session.info.agent_name, created_at=at, updated_at=at, parent_id=session.id)
    return replace(session, info=info)


def texts(session: AgentSession | None) -> list[str]:
    """Return the texts that a session shows."""
    assert session is not None, "the session is not there"
    return [message.text for message in session.state.messages]


def seen(session: AgentSession | None) -> AgentSession:
    """Return a session without the messages that its view covers or that its steps were given.

    A load may leave those in the store, so two sessions can only be compared without them.
    """
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
    """Return the session after a run of two steps: the model has called a tool, then answered."""
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
