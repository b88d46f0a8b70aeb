"""Hypothesis strategies for the model's values: any that calls of the public API can make."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.model.definition import AgentDefinition, ModelConfig, refuse_secrets
from perdure.model.execution import ExecutionBudget, ExecutionState, ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.message import (
    Envelope,
    Media,
    Message,
    Opaque,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from perdure.model.session import STATUS_MOVES, AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, InferenceResponse, ToolExecution
from perdure.model.stop import StopReason, StopSignal
from perdure.model.transcript import Block, Transcript
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord

texts = st.text(max_size=12)
names = st.text(min_size=1, max_size=8).filter(str.strip)
counts = st.integers(0, 10**6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
unknown_fields = st.just({}) | st.dictionaries(texts.map("x_{}".format), json_values, min_size=1, max_size=2)
"""Fields of a newer release beside the known ones; mostly none."""

times = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
session_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True).map(SessionId)

tool_calls = st.builds(
    ToolCall, name=names, arguments=json_objects, provider=st.none() | names, opaque=json_values, unknown=unknown_fields
)


def tool_results(call_id: str) -> st.SearchStrategy[ToolResult]:
    return st.builds(
        ToolResult,
        call_id=st.just(call_id),
        content=json_values,
        name=st.none() | names,
        is_error=st.booleans(),
        unknown=unknown_fields,
    )


def parts() -> st.SearchStrategy[Part]:
    """Every kind of part that is not about tools, unknown kinds too."""
    return st.one_of(
        st.builds(Text, texts, unknown=unknown_fields),
        st.builds(Thinking, texts, st.none() | texts, st.none() | names, st.none() | names),
        st.builds(Media, names, data=st.binary(max_size=9)),
        st.builds(Media, names, url=texts, name=st.none() | names),
        st.builds(Opaque, names, json_values),
        st.builds(Envelope, names, json_values),
        json_objects.map(lambda body: UnknownPart({**body, "type": "hologram"})),
    )


@st.composite
def messages(draw: st.DrawFn, *, roles: tuple[str, ...] = ("user", "assistant", "tool", "system")) -> Message:
    """Any one message."""
    role = draw(st.sampled_from(roles))
    said: list[Part] = draw(st.lists(parts(), max_size=3))
    if role == "assistant":
        said += draw(st.lists(tool_calls, max_size=2))
    if role == "tool":
        said.append(draw(tool_results(draw(names))))
    return Message(role, tuple(said), metadata=draw(json_objects), unknown=draw(unknown_fields))


@st.composite
def exchanges(draw: st.DrawFn) -> list[Message]:
    """A few messages in a row as in a conversation: each tool call is followed by its result."""
    said = [draw(messages(roles=("user", "system")))] if draw(st.booleans()) else []
    for call in draw(st.lists(tool_calls, max_size=2)):
        said += [Message.assistant("looking", tool_calls=[call]), Message("tool", (draw(tool_results(call.id)),))]
    return said or [draw(messages(roles=("user", "assistant")))]


def _draw_cut(draw: st.DrawFn, transcript: Transcript) -> Transcript:
    start = draw(st.integers(0, len(transcript)))
    return transcript.cut(start, draw(st.integers(start, len(transcript))))


def _draw_cover(draw: st.DrawFn, transcript: Transcript) -> Transcript:
    edges = [0]
    for piece in transcript.pieces:
        end = edges[-1] + len(piece)
        edges += [end] if isinstance(piece, Block) else range(edges[-1] + 1, end + 1)
    edges = sorted(set(edges))
    if len(edges) < 2:
        return transcript
    start = draw(st.integers(0, len(edges) - 2))
    stop = draw(st.integers(start + 1, len(edges) - 1))
    summary = draw(st.lists(messages(roles=("user",)), max_size=2))
    return transcript.cover(edges[start], edges[stop], summary, by=draw(texts), tokens_before=draw(st.none() | counts))


def _draw_uncover(draw: st.DrawFn, transcript: Transcript) -> Transcript:
    blocks = [piece.id for piece in transcript.pieces if isinstance(piece, Block)]
    return transcript.uncover(draw(st.sampled_from(blocks))) if blocks else transcript


TRANSCRIPT_VERBS: dict[str, Callable[[st.DrawFn, Transcript], Transcript]] = {
    "append": lambda draw, transcript: transcript.append(*draw(exchanges())),
    "trim": lambda draw, transcript: transcript.trim(draw(st.integers(0, len(transcript) + 1))),
    "cut": _draw_cut,
    "cover": _draw_cover,
    "uncover": _draw_uncover,
    "reset": lambda draw, transcript: transcript.reset(),
}
_USUAL_VERBS = ["append"] * 4 + ["cover"] * 3 + ["trim", "cut", "uncover", "reset"]


@st.composite
def transcripts(draw: st.DrawFn, *, steps: int = 6) -> Transcript:
    """A transcript after a few verbs, some of them on an older value of it."""
    values = [Transcript()]
    for verb in draw(st.lists(st.sampled_from(_USUAL_VERBS), max_size=steps)):
        base = values[-1] if draw(st.integers(0, 3)) else draw(st.sampled_from(values))
        values.append(TRANSCRIPT_VERBS[verb](draw, base))
    return values[-1]


errors = st.builds(ErrorRecord, type=names, message=texts, traceback=st.none() | texts, unknown=unknown_fields)
usages = st.builds(Usage, counts, counts, counts, counts, counts, st.floats(0, 100), unknown=unknown_fields)
responses = st.builds(
    InferenceResponse, st.none() | names, usages, st.none() | names, st.none() | names, st.none() | names
)
stop_signals = st.builds(StopSignal, st.sampled_from(StopReason), texts, texts, st.none() | names)


def _is_open(mapping: dict[str, Any]) -> bool:
    try:
        refuse_secrets(mapping, "$")
    except ConfigurationError:
        return False
    return True


models = st.builds(
    ModelConfig,
    names,
    base_url=st.sampled_from([None, "https://models.example/v1"]),
    api_key_env=st.sampled_from([None, "MY_KEY", "_k1"]),
    temperature=st.none() | st.floats(0, 2),
    max_tokens=st.none() | counts,
    settings=st.dictionaries(st.sampled_from(["top_p", "seed", "stop"]), json_values, max_size=2).filter(_is_open),
    unknown=unknown_fields,
)
budgets = st.builds(
    ExecutionBudget,
    max_steps=st.none() | counts,
    max_tokens=st.none() | counts,
    max_seconds=st.none() | st.floats(0, 1e6),
    max_cost=st.none() | st.floats(0, 1e6),
    deadline=st.none() | times,
    unknown=unknown_fields,
)


def definitions() -> st.SearchStrategy[AgentDefinition]:
    """Any definition of an agent."""
    return st.builds(
        AgentDefinition,
        name=names,
        label=st.none() | texts,
        description=texts,
        system_prompt=texts,
        model=st.none() | names | models,
        tools=st.none() | st.lists(names, max_size=2),
        tools_deny=st.lists(names, max_size=2),
        capabilities=st.lists(names, max_size=2),
        budget=budgets,
        metadata=json_objects.filter(_is_open),
        output=st.none() | json_objects,
        unknown=unknown_fields,
    )


@st.composite
def tool_executions(draw: st.DrawFn) -> ToolExecution:
    return ToolExecution(
        call=draw(tool_calls),
        started_at=draw(times),
        completed_at=draw(st.none() | times),
        result=draw(json_values),
        error=draw(st.none() | errors),
        usage=draw(usages),
        unknown=draw(unknown_fields),
    )


@st.composite
def steps(draw: st.DrawFn, view: Transcript | None = None) -> AgentStep:
    """A step as a loop makes it: its output is not yet in any transcript."""
    return AgentStep.of(
        draw(st.lists(messages(roles=("assistant", "tool")), max_size=3)),
        input=view,
        response=draw(st.none() | responses),
        tool_executions=draw(st.lists(tool_executions(), max_size=2)),
        errors=draw(st.lists(errors, max_size=1)),
    )


def _draw_step(draw: st.DrawFn, state: AgentState) -> AgentState:
    state = state.with_current_step(draw(steps(state.transcript)))
    return state.with_current_step_completed() if draw(st.booleans()) else state


def _draw_more_output(draw: st.DrawFn, state: AgentState) -> AgentState:
    current = state.execution.current_step if state.execution else None
    if current is None:
        return state
    longer = current.output_messages.append(draw(messages(roles=("tool",))))
    return state.with_current_step(msgspec.structs.replace(current, output_messages=longer))


def _draw_end(draw: st.DrawFn, state: AgentState) -> AgentState:
    run = state.execution or ExecutionState()
    run = run.with_pending_calls(tuple(draw(st.lists(tool_calls, max_size=1))))
    run = run.with_error(draw(errors)) if draw(st.booleans()) else run
    return state.with_execution(run.ended(draw(st.sampled_from(ExecutionStatus))))


STATE_VERBS: dict[str, Callable[[st.DrawFn, AgentState], AgentState]] = {
    "messages": lambda draw, state: state.with_messages(*draw(exchanges())),
    "step": _draw_step,
    "more output": _draw_more_output,
    "end": _draw_end,
    "start": lambda draw, state: state.with_execution_started(),
    "output": lambda draw, state: state.with_execution(
        (state.execution or ExecutionState()).with_response_format(draw(st.none() | json_objects))
    ),
    "next": lambda draw, state: state.for_next_execution(),
    "stop": lambda draw, state: state.with_stop_signal(draw(stop_signals)),
    "go on": lambda draw, state: state.with_continuation_requested(draw(st.booleans())),
    "prompt": lambda draw, state: state.with_system_prompt(draw(texts)),
    "metadata": lambda draw, state: state.with_metadata(draw(texts), draw(json_values)),
    "format": lambda draw, state: state.with_response_format(draw(st.none() | json_objects)),
    "model": lambda draw, state: state.with_model(draw(st.none() | models)),
    "task": lambda draw, state: state.with_task(draw(st.none() | texts)),
    "parent": lambda draw, state: state.with_parent_agent(draw(st.none() | names)),
}
_USUAL_CHANGES = ["messages"] * 3 + ["step"] * 4 + [*_USUAL_VERBS] + [*STATE_VERBS]


@st.composite
def states(draw: st.DrawFn, *, start: AgentState | None = None, changes: int = 6) -> AgentState:
    """A state after a few changes of any kind."""
    state = start or AgentState(unknown=draw(unknown_fields))
    for change in draw(st.lists(st.sampled_from(_USUAL_CHANGES), max_size=changes)):
        if change in TRANSCRIPT_VERBS:
            state = state.with_transcript(TRANSCRIPT_VERBS[change](draw, state.transcript))
        else:
            state = STATE_VERBS[change](draw, state)
    return state


@st.composite
def sessions(draw: st.DrawFn) -> AgentSession:
    """A session that no store has seen yet: any definition, any state, any reachable status."""
    definition = draw(definitions())
    info = AgentSessionInfo(
        id=SessionId.generate(),
        agent_name=definition.name,
        parent_id=draw(st.none() | session_ids),
        spawn_ref=draw(st.none() | st.builds(SpawnRef, names, names, names, names)),
        owner=draw(st.none() | names),
        tags=tuple(draw(st.lists(names, max_size=2, unique=True))),
        name=draw(st.none() | texts),
        unknown=draw(unknown_fields),
    )
    state = draw(states(start=AgentState.of(definition)))
    session = AgentSession(info, definition, state, unknown=draw(unknown_fields))
    for _ in range(draw(st.integers(0, 2))):
        moves = sorted(STATUS_MOVES[session.status] | {session.status})
        session = session.with_status(draw(st.sampled_from(moves)))
    return session
