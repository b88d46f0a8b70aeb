"""One run on record, and the session of such runs: what happened, from what, on which branch, at what cost.

A loop's record is folded from its events, one at a time; `ExecutionState` is the same run while it is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.execution import ExecutionStatus
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    CompactionBlock,
    ContinuationKind,
    InputRejected,
    LoopConfigSnapshot,
    LoopEvent,
    MessageEnd,
    ParallelLoopEnd,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
)
from perdure.model.message import Message
from perdure.model.step import ToolExecution
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, ErrorRecord, Value, freeze


class LoopStatus(StrEnum):
    """How a loop on record stands. Only branches of a parallel group are ever pending."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    REJECTED = "rejected"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in (LoopStatus.PENDING, LoopStatus.RUNNING)


STATUS_ON_RECORD: dict[ExecutionStatus, LoopStatus] = {
    ExecutionStatus.PENDING: LoopStatus.PENDING,
    ExecutionStatus.IN_PROGRESS: LoopStatus.RUNNING,
    ExecutionStatus.COMPLETED: LoopStatus.COMPLETED,
    ExecutionStatus.STOPPED: LoopStatus.COMPLETED,
    ExecutionStatus.FAILED: LoopStatus.FAILED,
}


class Turn(Value, frozen=True):
    """One step on record: what the model said, what the tools did, what it cost."""

    step_id: str
    index: int
    started_at: datetime
    ended_at: datetime | None = None
    message_ids: tuple[str, ...] = ()
    tool_executions: tuple[ToolExecution, ...] = ()
    usage: Usage = Usage()
    errors: tuple[ErrorRecord, ...] = ()


class ParallelGroupRecord(Value, frozen=True):
    """The group of branches that a loop belongs to, and which of them was selected."""

    all_loop_ids: tuple[str, ...]
    selected_loop_id: str | None = None
    selected_config_index: int | None = None
    evaluation_usage: Usage = Usage()
    is_selected: bool = False


class LoopRecord(Value, frozen=True, kw_only=True):
    """The complete record of one run."""

    loop_id: str
    session_id: str
    agent_id: str = ""
    parent_loop_id: str | None = None
    continuation_kind: ContinuationKind = ContinuationKind()
    started_at: datetime | None = None
    ended_at: datetime | None = None
    status: LoopStatus = LoopStatus.RUNNING
    rejection: str | None = None
    stop_reason: str | None = None
    config: LoopConfigSnapshot | None = None
    messages: tuple[Message, ...] = ()
    turns: tuple[Turn, ...] = ()
    usage: Usage = Usage()
    errors: tuple[ErrorRecord, ...] = ()
    metadata: Mapping[str, Any] = EMPTY
    events: tuple[AnyLoopEvent, ...] = ()
    children_loop_ids: tuple[str, ...] = ()
    child_loop_refs: tuple[ChildLoopRef, ...] = ()
    compaction_block: CompactionBlock | None = None
    parallel_group: ParallelGroupRecord | None = None

    def __post_init__(self) -> None:
        freeze(self, "metadata")

    def after(self, event: AnyLoopEvent, *, keep_event: bool = True) -> LoopRecord:
        """The record once an event has happened."""
        changed = _fold(self, event)
        return replace(changed, events=(*changed.events, event)) if keep_event else changed

    def aborted(self, at: datetime) -> LoopRecord:
        """The record of a loop that has not come to its end; it keeps the messages and usage it has reached."""
        if self.status.is_over:
            return self
        ended_at = self.ended_at or at
        return replace(self, status=LoopStatus.ABORTED, ended_at=ended_at, turns=_closed(self.turns, ended_at))

    def selected(self, event: ParallelLoopEnd) -> LoopRecord:
        """The record of a branch, once one of its group has been selected."""
        group = ParallelGroupRecord(
            event.loop_ids,
            event.selected_loop_id,
            event.selected_config_index,
            event.evaluation_usage,
            self.loop_id == event.selected_loop_id,
        )
        return replace(self, parallel_group=group)

    def with_child_ref(self, ref: ChildLoopRef) -> LoopRecord:
        known = any(
            each.tool_call_id == ref.tool_call_id and each.child_loop_id == ref.child_loop_id
            for each in self.child_loop_refs
        )
        return self if known else replace(self, child_loop_refs=(*self.child_loop_refs, ref))


def _fold(record: LoopRecord, event: LoopEvent) -> LoopRecord:
    match event:
        case AgentStart():
            return _started(record, event)
        case TurnStart():
            turn = Turn(event.step_id, event.index, event.at)
            return replace(record, turns=(*record.turns, turn))
        case MessageEnd():
            return _with_message(record, event)
        case ToolExecutionEnd():
            record = _with_turn(record, event.step_id, lambda turn: _with_tool(turn, event.execution))
            return record if event.child is None else record.with_child_ref(event.child)
        case TurnEnd():
            ended = {"ended_at": event.at, "usage": event.usage, "errors": event.errors}
            return _with_turn(record, event.step_id, lambda turn: replace(turn, **ended))
        case InputRejected():
            return replace(record, rejection=event.reason)
        case Compaction():
            return replace(record, compaction_block=event.block)
        case AgentEnd():
            return _ended(record, event)
    return record


def _started(record: LoopRecord, event: AgentStart) -> LoopRecord:
    if event.resumed and record.started_at is not None:
        answered = tuple(turn for turn in record.turns if turn.message_ids)
        return replace(record, status=LoopStatus.RUNNING, ended_at=None, turns=answered)
    group = record.parallel_group or (ParallelGroupRecord(event.group) if event.group else None)
    return replace(
        record,
        parallel_group=group,
        agent_id=event.agent_id,
        parent_loop_id=event.parent_loop_id,
        continuation_kind=event.continuation,
        started_at=event.at,
        status=LoopStatus.RUNNING,
        config=event.config,
        metadata=event.metadata,
    )


def _with_message(record: LoopRecord, event: MessageEnd) -> LoopRecord:
    record = replace(record, messages=(*record.messages, event.message))
    step_id = event.message.metadata.get("step_id")
    return _with_turn(record, step_id, lambda turn: _with_said(turn, event)) if step_id else record


def _with_said(turn: Turn, event: MessageEnd) -> Turn:
    used = event.response.usage if event.response is not None else Usage()
    return replace(turn, message_ids=(*turn.message_ids, event.message.id), usage=turn.usage + used)


def _with_tool(turn: Turn, done: ToolExecution) -> Turn:
    errors = turn.errors if done.error is None else (*turn.errors, done.error)
    return replace(turn, tool_executions=(*turn.tool_executions, done), usage=turn.usage + done.usage, errors=errors)


def _with_turn(record: LoopRecord, step_id: str, change: Callable[[Turn], Turn]) -> LoopRecord:
    """The record with one of its turns changed. Usage counts from the moment it is known: a loop may be aborted."""
    turns = tuple(change(turn) if turn.step_id == step_id else turn for turn in record.turns)
    return replace(record, turns=turns, usage=sum((turn.usage for turn in turns), start=Usage()))


def _closed(turns: Iterable[Turn], at: datetime) -> tuple[Turn, ...]:
    """The turns of a loop that is over: those the model has answered in, as the live state counts its steps."""
    return tuple(replace(turn, ended_at=turn.ended_at or at) for turn in turns if turn.message_ids)


def _all_messages(record: LoopRecord, event: AgentEnd) -> tuple[Message, ...]:
    """What the end says has been produced; of a loop that was resumed it tells only what came after that."""
    if not any(isinstance(each, AgentStart) and each.resumed for each in record.events):
        return event.messages
    told = {message.id for message in event.messages}
    return (*(message for message in record.messages if message.id not in told), *event.messages)


def _ended(record: LoopRecord, event: AgentEnd) -> LoopRecord:
    rejection = event.rejection or record.rejection
    reasons = sorted((signal.reason for signal in event.stop_signals), key=lambda reason: reason.priority)
    status = LoopStatus.REJECTED if rejection else STATUS_ON_RECORD[event.status]
    if record.parallel_group is not None and reasons[:1] == [StopReason.USER_REQUESTED]:
        status = LoopStatus.ABORTED  # another branch was quicker
    return replace(
        record,
        status=status,
        rejection=rejection,
        stop_reason=reasons[0].value if reasons else None,
        ended_at=event.at,
        messages=_all_messages(record, event),
        turns=_closed(record.turns, event.at),
        usage=event.usage,
        errors=event.errors,
    )


class SessionRecord(Value, frozen=True, kw_only=True):
    """All the loops of one session, with the links between them."""

    session_id: str
    agent_id: str = ""
    created_at: datetime | None = None
    last_active_at: datetime | None = None
    parent_spawn_ref: SpawnRef | None = None
    loops: tuple[LoopRecord, ...] = ()

    def get_loop(self, loop_id: str) -> LoopRecord | None:
        return next((loop for loop in self.loops if loop.loop_id == loop_id), None)

    def root_loops(self) -> tuple[LoopRecord, ...]:
        """Loops with no parent in this session."""
        known = {loop.loop_id for loop in self.loops}
        return tuple(loop for loop in self.loops if loop.parent_loop_id not in known)

    def children_of(self, loop_id: str) -> tuple[LoopRecord, ...]:
        return tuple(loop for loop in self.loops if loop.parent_loop_id == loop_id)

    def parallel_siblings(self, loop_id: str) -> tuple[LoopRecord, ...]:
        """The branches of a loop's parallel group, itself among them, in the order of their configs."""
        loop = self.get_loop(loop_id)
        if loop is None or loop.parallel_group is None:
            return ()
        found = (self.get_loop(each) for each in loop.parallel_group.all_loop_ids)
        return tuple(each for each in found if each is not None)

    def chain_to(self, loop_id: str) -> tuple[LoopRecord, ...]:
        """The loops from a root down to one, in order."""
        left = {loop.loop_id: loop for loop in self.loops}
        chain: list[LoopRecord] = []
        loop = left.pop(loop_id, None)
        while loop is not None:
            chain.append(loop)
            loop = left.pop(loop.parent_loop_id, None) if loop.parent_loop_id else None
        return tuple(reversed(chain))

    def total_usage(self) -> Usage:
        """What all loops have used, the judges of parallel groups included."""
        judged = {
            loop.parallel_group.all_loop_ids: loop.parallel_group.evaluation_usage
            for loop in self.loops
            if loop.parallel_group
        }
        return sum((*(loop.usage for loop in self.loops), *judged.values()), start=Usage())


def with_children(loops: Iterable[LoopRecord]) -> tuple[LoopRecord, ...]:
    """Loops that know their children, from those that know their parents."""
    ordered = tuple(loops)
    children: dict[str, list[str]] = {}
    for loop in ordered:
        if loop.parent_loop_id is not None:
            children.setdefault(loop.parent_loop_id, []).append(loop.loop_id)
    return tuple(
        msgspec.structs.replace(loop, children_loop_ids=tuple(children.get(loop.loop_id, ()))) for loop in ordered
    )
