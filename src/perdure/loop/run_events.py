"""Tells the events of a run: each is numbered, put on record first, and then sent to listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.loop.filters import rejection_in
from perdure.model.definition import ModelConfig
from perdure.model.lineage import ChildLoopRef
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    CompactionBlock,
    CompactionPart,
    ContinuationKind,
    InputRejected,
    LoopConfigSnapshot,
    LoopEvent,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
)
from perdure.model.message import Message, Role, ToolCall, redactions_in
from perdure.model.state import AgentState
from perdure.model.step import InferenceResponse, ToolExecution
from perdure.model.usage import Usage
from perdure.model.value import JSON
from perdure.protocols import Delta, EventHandler, OnDelta
from perdure.sketching import Unfinished

if TYPE_CHECKING:
    from perdure.redaction.texts import Redaction


class Record(Protocol):
    """A place that keeps a run's events while it runs. An error from it ends the run: no run continues unrecorded."""

    def wants(self, kind: type[LoopEvent]) -> bool:
        """Tell whether events of a kind are kept. An event that is neither kept nor sent is counted, and never made."""
        ...

    def put(self, event: LoopEvent) -> None:
        """Take an event. It need not be durable yet."""
        ...

    async def barrier(self) -> None:
        """Return once everything taken is durable. The run awaits it before each point of no return."""
        ...


class Sketching(Protocol):
    """A record that keeps the text of an answer while it is being written."""

    def begin_answer(self, run: str, answer: Unfinished) -> None: ...

    def end_answer(self) -> None: ...


def sketching_of(record: Record) -> Sketching | None:
    """Return the record if it keeps answers while they are being written; otherwise None."""
    return record if hasattr(record, "begin_answer") else None  # type: ignore[return-value]  # as was just asked


class Unrecordable(Exception):
    """An error of the record, which refused an event. It is not the run's: that could not be recorded either."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


class Unrecorded:
    """A record that keeps nothing."""

    def wants(self, kind: type[LoopEvent]) -> bool:
        return False

    def put(self, event: LoopEvent) -> None:
        return None

    async def barrier(self) -> None:
        return None


class ResumePoint(msgspec.Struct, frozen=True):
    """The point that a continued run had reached: its last event's number, its messages and children."""

    seq: int = 0
    messages: tuple[Message, ...] = ()
    children: tuple[ChildLoopRef, ...] = ()
    compactions: int = 0
    at: datetime | None = None
    """The time of the last event. No work was done on the run since."""
    trace: str | None = None
    """The span of the run, or of its last part that was traced."""

    @classmethod
    def of(cls, story: Sequence[AnyLoopEvent]) -> ResumePoint:
        """Return the point that a run has reached. `story` is all of its events."""
        return cls(
            max((event.seq for event in story), default=0),
            tuple(event.message for event in story if isinstance(event, MessageEnd)),
            tuple(event.child for event in story if isinstance(event, ToolExecutionEnd) and event.child is not None),
            sum(isinstance(event, Compaction) for event in story),
            max((event.at for event in story), default=None),
            last_trace(event.trace for event in story if isinstance(event, AgentStart)),
        )


def last_trace(traces: Iterable[str | None]) -> str | None:
    """Return the last span of a run. Each of its parts may have one."""
    return next((each for each in reversed([*traces]) if each is not None), None)


class Narrator:
    """The maker of one run's events."""

    def __init__(
        self,
        record: Record,
        events: EventHandler | None,
        session_id: str | None,
        told: ResumePoint,
        redaction: Redaction | None = None,
    ) -> None:
        self._record = record
        self._redaction = redaction
        self._events = events
        self._common: dict[str, Any] = {"session_id": session_id, "loop_id": ""}
        self._seq = told.seq
        self._is_on_record = False
        self._held: list[LoopEvent] = []
        self._telling = asyncio.Lock()
        self._messages: list[Message] = list(told.messages)
        self._children: list[ChildLoopRef] = list(told.children)
        self._compactions = told.compactions
        self._start: dict[str, Any] = {}

    def begin(
        self,
        state: AgentState,
        model: ModelConfig,
        facts: Mapping[str, Any],
        parent: str | None,
        *,
        resumed: bool,
    ) -> None:
        assert state.execution is not None
        self._common |= {"loop_id": state.execution.execution_id, "agent_id": state.agent_id}
        spawned_by = facts.get("spawn_ref") if state.execution_count == 1 else None
        self._start = {
            # The first loop of a sub-agent has its caller's as parent, in another session. In its own, it is initial.
            "parent_loop_id": spawned_by.parent_loop_id if spawned_by and parent is None else parent,
            "continuation": ContinuationKind("default" if parent else "initial"),
            "config": snapshot(model),
            "resumed": resumed,
            "response_format": state.execution.response_format,
            "external_tools": state.execution.external_tools,
            "instructions": state.execution.instructions,
            "model_options": state.execution.model_options,
            **facts,
        }

    async def _tell(self, event_type: type[LoopEvent], /, **facts: Any) -> None:
        """Put an event on record, then send it. Nothing of a run is sent before its session is claimed for it."""
        if self._events is None:
            self._note_if_wanted(event_type, facts)
        elif not self._is_on_record:
            self._held.append(self._note(event_type, facts))
        else:
            async with self._telling:  # tools in parallel send in parallel, and a listener may be slow
                await self._events.emit(self._note(event_type, facts))

    def _note(self, event_type: type[LoopEvent], facts: Mapping[str, Any]) -> LoopEvent:
        """Return the next event, once the record has taken it."""
        self._seq += 1
        event = event_type(seq=self._seq, **self._common, **facts)
        if self._redaction is not None and event_type in _TEXTS:
            event = self._redaction.value(event)
        try:
            self._record.put(event)
        except Exception as error:
            raise Unrecordable(error) from error
        return event

    def _note_if_wanted(self, event_type: type[LoopEvent], facts: Mapping[str, Any]) -> None:
        if self._record.wants(event_type):
            self._note(event_type, facts)
        else:
            self._seq += 1

    async def barrier(self) -> None:
        try:
            await self._record.barrier()
        except Exception as error:
            raise Unrecordable(error) from error
        self._is_on_record = True
        # The first barrier has claimed the session: what was held until then is sent now, in its order.
        while self._held and self._events is not None:
            await self._events.emit(self._held.pop(0))

    async def started(self) -> None:
        await self._tell(AgentStart, **self._start)

    async def rejected(self, reason: str, message_ids: tuple[str, ...] = ()) -> None:
        await self._tell(InputRejected, reason=reason, message_ids=message_ids)

    async def compacted(
        self, block: CompactionBlock, shown: tuple[CompactionPart, ...], usage: Usage, trigger: str
    ) -> None:
        self._compactions += 1
        await self._tell(Compaction, block=block, shown=shown, usage=usage, trigger=trigger)

    async def turn_started(self, step_id: str, index: int) -> None:
        await self._tell(TurnStart, step_id=step_id, index=index)

    async def message_started(self, message_id: str, role: Role) -> None:
        await self._tell(MessageStart, message_id=message_id, role=role)

    def deltas_of(self, message_id: str) -> OnDelta:
        async def on_delta(delta: Delta) -> None:
            await self._tell(
                MessageUpdate,
                message_id=message_id,
                kind=delta.kind,
                text=delta.text,
                call_id=delta.call_id,
                name=delta.name,
            )

        return on_delta

    async def message_ended(
        self, message: Message, response: InferenceResponse | None = None, *, posted: str | None = None
    ) -> None:
        self._messages.append(message)
        await self._tell(MessageEnd, message=message, response=response, posted=posted)

    def has_told(self, message_id: str) -> bool:
        """Tell whether a message of this id is among those of the run."""
        return any(message.id == message_id for message in self._messages)

    async def tool_started(self, call: ToolCall, step_id: str) -> None:
        await self._tell(ToolExecutionStart, call=call, step_id=step_id)

    async def tool_progress(self, call_id: str, progress: JSON) -> None:
        await self._tell(ToolExecutionUpdate, call_id=call_id, progress=progress)

    async def tool_ended(
        self, execution: ToolExecution, message: Message, step_id: str, child: ChildLoopRef | None
    ) -> None:
        """Tell an outcome, and the message that shows it to the model. Nothing comes between the two."""
        async with self._telling:
            self._messages.append(message)
            self._children += [] if child is None else [child]
            outcome = {"execution": execution, "step_id": step_id, "child": child}
            if self._events is None:
                self._note_if_wanted(ToolExecutionEnd, outcome)
                self._note_if_wanted(MessageEnd, {"message": message})
                return
            # Both on record before either is told: a barrier that comes between must not part them.
            ended, said = self._note(ToolExecutionEnd, outcome), self._note(MessageEnd, {"message": message})
            await self._events.emit(ended)
            await self._events.emit(said)

    async def turn_ended(self, state: AgentState) -> None:
        step = state.last_step
        assert step is not None
        await self._tell(TurnEnd, step_id=step.id, index=state.step_count - 1, usage=step.usage, errors=step.all_errors)

    async def ended(self, state: AgentState) -> None:
        """Tell the end, which becomes durable with the save. A run that made no call yet is put on record first."""
        if not self._is_on_record:
            await self.barrier()
        told = ResumePoint(self._seq, tuple(self._messages), tuple(self._children), self._compactions)
        await self._tell(AgentEnd, **end_of(state, told))


def end_of(state: AgentState, told: ResumePoint) -> dict[str, Any]:
    """Return the fields of a run's last event, apart from those of every event."""
    execution = state.execution
    assert execution is not None
    return {
        "status": execution.status,
        "messages": told.messages,
        "children": told.children,
        "stop_signals": execution.continuation.stop_signals,
        "usage": execution.usage,
        "compaction_usage": execution.compaction_usage,
        "discarded_usage": execution.discarded_usage,
        "compactions": told.compactions,
        "idle": execution.idle,
        "errors": execution.errors,
        "rejection": rejection_in(execution.continuation.stop_signals),
        "redactions": redactions_in(told.messages),
    }


_TEXTS = frozenset(
    {
        AgentStart,
        InputRejected,
        Compaction,
        ToolExecutionStart,
        ToolExecutionUpdate,
        ToolExecutionEnd,
        TurnEnd,
        AgentEnd,
    }
)
"""Events with texts that are not redacted yet. Messages and streamed pieces are."""


_APIS = {
    "anthropic": "anthropic_messages",
    "bedrock": "bedrock_converse",
    "google": "google_generative_ai",
    "google-gla": "google_generative_ai",
    "google-cloud": "google_vertex",
    "google-vertex": "google_vertex",
    "openai": "openai_responses",
    "openai-chat": "openai_completions",
    "openai-responses": "openai_responses",
}
"""The protocol for the models of each provider. An `openai` server with a URL of its own has the older one. For
providers that are not here, the client decides."""


def config_id(model: ModelConfig) -> str:
    """Return an id that equal configurations have in every process, whichever variable has their key."""
    return sha256(codec.encode(replace(model, api_key_env=None))).hexdigest()[:16]


def model_in(config: LoopConfigSnapshot) -> ModelConfig:
    """Return the model that a record names. What a snapshot leaves out, such as the key's variable, stays open."""
    name = config.model if config.provider == config.model else f"{config.provider}:{config.model}"
    return ModelConfig(
        name,
        base_url=config.base_url,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        thinking=config.thinking_level,
        context_window=config.context_window,
    )


_snapshots: dict[int, tuple[ModelConfig, LoopConfigSnapshot]] = {}
_MOST_SNAPSHOTS = 64


def snapshot(model: ModelConfig) -> LoopConfigSnapshot:
    """Return a model's configuration as it may be recorded: everything except the place of its key."""
    known = _snapshots.get(id(model))
    if known is not None and known[0] is model:
        return known[1]
    made = _snapshot(model)
    if len(_snapshots) >= _MOST_SNAPSHOTS:
        _snapshots.clear()
    _snapshots[id(model)] = model, made  # with the model itself: while it is kept here, no other object has its id
    return made


def _snapshot(model: ModelConfig) -> LoopConfigSnapshot:
    provider, _, name = model.name.partition(":")
    return LoopConfigSnapshot(
        model=name or model.name,
        provider=provider,
        config_id=config_id(model),
        name=model.name,
        api="openai_completions" if provider == "openai" and model.base_url else _APIS.get(provider),
        reasoning=None if model.thinking is None else model.thinking != "off",
        base_url=model.base_url,
        context_window=model.context_window,
        max_tokens=model.max_tokens,
        thinking_level=model.thinking,
        temperature=model.temperature,
    )
