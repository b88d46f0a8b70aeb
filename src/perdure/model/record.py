"""The record of a run, and of a session's runs: what happened, from what, on which branch, at what cost.

A loop's record is folded from its events, one at a time. `ExecutionState` is the same run while it is live.
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
    ParallelLoopStart,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
    UnknownEvent,
)
from perdure.model.message import Message
from perdure.model.step import ToolExecution
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, ErrorRecord, Value, freeze


class LoopStatus(StrEnum):
    """The status of a loop on record. Only branches of a parallel group are ever pending."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    REJECTED = "rejected"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True once the loop has ended, in whatever way."""
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
    """The step."""
    index: int
    """Its place in the run, from 0."""
    started_at: datetime
    """The time at which it began."""
    ended_at: datetime | None = None
    """The time at which it ended, or None."""
    message_ids: tuple[str, ...] = ()
    """The messages that it has added."""
    tool_executions: tuple[ToolExecution, ...] = ()
    """The tool calls that were carried out."""
    usage: Usage = Usage()
    """Tokens and money of the step."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the step and its tools."""


class ParallelGroupRecord(Value, frozen=True):
    """The group of branches that a loop belongs to, and which of them was selected."""

    all_loop_ids: tuple[str, ...]
    """The branches, in the order of their configs."""
    selected_loop_id: str | None = None
    """The branch that was selected, or None."""
    selected_config_index: int | None = None
    """The place of its config."""
    evaluation_usage: Usage = Usage()
    """Tokens and money of the judge."""
    is_selected: bool = False
    """True if this loop was selected."""


class LoopRecord(Value, frozen=True, kw_only=True):
    """The complete record of one run."""

    loop_id: str
    """The id of the run."""
    session_id: str
    """The session that it ran in."""
    agent_id: str = ""
    """The agent that ran."""
    parent_loop_id: str | None = None
    """The run that this one follows, or branches off from."""
    continuation_kind: ContinuationKind = ContinuationKind()
    """The relation to that run."""
    started_at: datetime | None = None
    """The time at which it began, or None."""
    ended_at: datetime | None = None
    """The time at which it ended, or None."""
    status: LoopStatus = LoopStatus.RUNNING
    """The status of the run."""
    rejection: str | None = None
    """The reason why an input filter has refused its input."""
    stop_reason: str | None = None
    """The reason why it stopped, as a `StopReason`."""
    config: LoopConfigSnapshot | None = None
    """The model, and how it was asked."""
    messages: tuple[Message, ...] = ()
    """The messages that it was sent and has produced, in order. In a header they are empty."""
    turns: tuple[Turn, ...] = ()
    """The steps, in order. A header has none."""
    usage: Usage = Usage()
    """Tokens and money of the whole run."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the run."""
    metadata: Mapping[str, Any] = EMPTY
    """The values that the sender has put on the record of the run."""
    events: tuple[AnyLoopEvent, ...] = ()
    """The events, in order. A header has none."""
    children_loop_ids: tuple[str, ...] = ()
    """The runs of this session that follow it."""
    child_loop_refs: tuple[ChildLoopRef, ...] = ()
    """The links to the loops of its sub-agents."""
    compaction_block: CompactionBlock | None = None
    """The last compaction during the run."""
    compaction_usage: Usage = Usage()
    """The part of `usage` that compactions took."""
    parallel_group: ParallelGroupRecord | None = None
    """The branches that ran side by side with it."""
    idle: float = 0.0
    """Seconds that the run waited for a person, or was down after a crash."""
    redactions: Mapping[str, int] = EMPTY
    """The number of replacements in the run's messages, for each redactor of `connect(redact=…)`."""

    def __post_init__(self) -> None:
        freeze(self, "metadata")
        freeze(self, "redactions")

    @classmethod
    def pending(cls, group: ParallelLoopStart, loop_id: str) -> LoopRecord:
        """Return the record of a branch, the `loop_id` of a `group`, that was announced and has not begun."""
        kind = ContinuationKind("branch", str(group.loop_ids.index(loop_id)))
        return cls(
            loop_id=loop_id,
            session_id=group.session_id or group.loop_id,
            agent_id=group.agent_id,
            parent_loop_id=group.parent_loop_id,
            continuation_kind=kind if group.parent_loop_id else ContinuationKind(),
            status=LoopStatus.PENDING,
            parallel_group=ParallelGroupRecord(group.loop_ids),
        )

    @property
    def duration(self) -> float | None:
        """Seconds that the run has worked, from start to end without `idle`; None until it has ended."""
        if self.started_at is None or self.ended_at is None:
            return None
        return max(0.0, (self.ended_at - self.started_at).total_seconds() - self.idle)

    def after(self, event: AnyLoopEvent, *, keep_event: bool = True) -> LoopRecord:
        """Return the record after an `event`. For many events, use `after_all`.

        `keep_event` is False to leave the event itself out.
        """
        return LoopFold(self).take(event, keep_event=keep_event).record()

    def after_all(self, events: Iterable[AnyLoopEvent]) -> LoopRecord:
        """Return the record after all these `events`, in their order."""
        fold = LoopFold(self)
        for event in events:
            fold.take(event)
        return fold.record()

    def aborted(self, at: datetime) -> LoopRecord:
        """Return the record of a loop that did not reach its end, and was given up `at` a time.

        It keeps the messages and usage it has reached.
        """
        if self.status.is_over:
            return self
        ended_at = self.ended_at or at
        return replace(self, status=LoopStatus.ABORTED, ended_at=ended_at, turns=_closed(self.turns, ended_at))

    def selected(self, event: ParallelLoopEnd) -> LoopRecord:
        """Return the record of a branch after the `event` that selects one of its group.

        A branch that never began is aborted.
        """
        group = ParallelGroupRecord(
            event.loop_ids,
            event.selected_loop_id,
            event.selected_config_index,
            event.evaluation_usage,
            self.loop_id == event.selected_loop_id,
        )
        if self.status is LoopStatus.PENDING:
            return replace(self, parallel_group=group, status=LoopStatus.ABORTED, ended_at=event.at)
        return replace(self, parallel_group=group)


def _link(ref: ChildLoopRef) -> tuple[str, str]:
    return ref.tool_call_id, ref.child_loop_id


class _TurnFold:
    """A turn while events are added to it."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.message_ids = list(turn.message_ids)
        self._tools = list(turn.tool_executions)
        self._errors = list(turn.errors)
        self.usage = turn.usage

    def say(self, event: MessageEnd) -> None:
        self.message_ids.append(event.message.id)
        if event.response is not None:
            self.usage = self.usage + event.response.usage

    def take(self, done: ToolExecution) -> None:
        self._tools.append(done)
        self.usage = self.usage + done.usage
        if done.error is not None:
            self._errors.append(done.error)

    @property
    def is_open(self) -> bool:
        return self._turn.ended_at is None

    def restart(self, at: datetime) -> None:
        """Count the turn's time from now, as the live step does: the pause is not work."""
        if self.is_open:
            self._turn = replace(self._turn, started_at=at)

    def end(self, event: TurnEnd) -> None:
        self._turn = replace(self._turn, ended_at=event.at)
        self.usage, self._errors = event.usage, list(event.errors)

    def turn(self, ended_at: datetime | None = None) -> Turn:
        return replace(
            self._turn,
            ended_at=self._turn.ended_at or ended_at,
            message_ids=tuple(self.message_ids),
            tool_executions=tuple(self._tools),
            usage=self.usage,
            errors=tuple(self._errors),
        )


class LoopFold:
    """A loop's record while events are added to it. Each costs the same, however many there were before."""

    def __init__(self, record: LoopRecord) -> None:
        self._record = record
        self._events = list(record.events)
        self._messages = list(record.messages)
        self._turns = {turn.step_id: _TurnFold(turn) for turn in record.turns}
        self._refs = {_link(ref): ref for ref in record.child_loop_refs}
        self._is_counted = True
        self._was_resumed = any(isinstance(event, AgentStart) and event.resumed for event in record.events)
        self._last_at = record.events[-1].at if record.events else None

    def is_late(self, event: LoopEvent) -> bool:
        """Tell whether an event comes after the loop's end, and so changes nothing.

        If the end of a run could not be saved, the run is resumed after it. The new start is not a late event.
        """
        ended_at = self._record.ended_at
        if ended_at is None or not self._record.status.is_over or isinstance(event, UnknownEvent):
            return False
        return not (isinstance(event, AgentStart) and event.resumed and event.at > ended_at)

    @property
    def session_id(self) -> str:
        return self._record.session_id

    def link(self, ref: ChildLoopRef) -> None:
        """Take a link to a child from another loop's event."""
        self._refs.setdefault(_link(ref), ref)

    def announce(self, group: ParallelGroupRecord) -> None:
        self._record = replace(self._record, parallel_group=group)

    def select(self, event: ParallelLoopEnd) -> None:
        self._record = self._record.selected(event)

    def rewrite(self, record: LoopRecord) -> None:
        """Take the texts of a record of the same loop in other words, as after a redaction."""
        self._record = record
        self._events = list(record.events)
        self._messages = list(record.messages)
        self._turns = {turn.step_id: _TurnFold(turn) for turn in record.turns}

    def record(self) -> LoopRecord:
        """Return the record as it is now."""
        turns = tuple(turn.turn() for turn in self._turns.values())
        # Usage counts from the moment it is known: a loop may be aborted.
        usage = self._record.usage
        if not self._is_counted:
            usage = sum((turn.usage for turn in turns), start=self._record.compaction_usage)
        return replace(
            self._record,
            messages=tuple(self._messages),
            turns=turns,
            usage=usage,
            events=tuple(self._events),
            child_loop_refs=tuple(self._refs.values()),
        )

    def take(self, event: AnyLoopEvent, *, keep_event: bool = True) -> LoopFold:
        if self.is_late(event):
            return self
        self._take(event)
        self._last_at = self._last_at if isinstance(event, UnknownEvent) else event.at
        if keep_event:
            self._events.append(event)
        return self

    def _take(self, event: LoopEvent) -> None:
        match event:
            case AgentStart():
                self._start(event)
            case TurnStart():
                self._turns[event.step_id] = _TurnFold(Turn(event.step_id, event.index, event.at))
            case MessageEnd():
                self._messages.append(event.message)
                self._in_turn(self._step_of(event.message), lambda turn: turn.say(event))
            case ToolExecutionEnd():
                self._in_turn(event.step_id, lambda turn: turn.take(event.execution))
                if event.child is not None:
                    self.link(event.child)
            case TurnEnd():
                self._in_turn(event.step_id, lambda turn: turn.end(event))
            case InputRejected():
                self._record = replace(self._record, rejection=event.reason)
            case Compaction():
                used = self._record.compaction_usage + event.usage
                self._record = replace(self._record, compaction_block=event.block, compaction_usage=used)
                self._is_counted = False
            case AgentEnd():
                self._end(event)

    def _step_of(self, message: Message) -> str | None:
        """Return the step that a message belongs to: the one it names or, for answers, the one under way.

        Streams that perdure did not make do not name steps in their messages.
        """
        named = message.metadata.get("step_id")
        if isinstance(named, str) and named in self._turns:
            return named
        last = next(reversed(self._turns), None)
        is_said_in_it = last is not None and self._turns[last].is_open and message.role in ("assistant", "tool")
        return last if is_said_in_it else None

    def _in_turn(self, step_id: str | None, change: Callable[[_TurnFold], None]) -> None:
        if step_id is not None and step_id in self._turns:
            change(self._turns[step_id])
            self._is_counted = False

    def _start(self, event: AgentStart) -> None:
        self._was_resumed = self._was_resumed or event.resumed
        if event.resumed and self._record.started_at is not None:
            self._resume(event)
            return
        group = self._record.parallel_group or (ParallelGroupRecord(event.group) if event.group else None)
        self._record = replace(
            self._record,
            parallel_group=group,
            agent_id=event.agent_id,
            parent_loop_id=event.parent_loop_id,
            continuation_kind=event.continuation,
            started_at=event.at,
            status=LoopStatus.RUNNING,
            config=event.config,
            metadata=event.metadata,
        )

    def _resume(self, event: AgentStart) -> None:
        self._turns = self._answered()
        for turn in self._turns.values():
            turn.restart(event.at)
        idle = event.idle
        if not idle and self._last_at is not None:  # an older release does not record it
            idle = max(0.0, (event.at - self._last_at).total_seconds())
        config = event.config or self._record.config  # the model may have been changed meanwhile
        idle += self._record.idle
        self._record = replace(self._record, status=LoopStatus.RUNNING, ended_at=None, idle=idle, config=config)

    def _answered(self) -> dict[str, _TurnFold]:
        """Return the turns in which the model has answered, as the live state counts its steps."""
        return {step_id: turn for step_id, turn in self._turns.items() if turn.message_ids}

    def _end(self, event: AgentEnd) -> None:
        rejection = event.rejection or self._record.rejection
        reasons = sorted((signal.reason for signal in event.stop_signals), key=lambda reason: reason.priority)
        status = LoopStatus.REJECTED if rejection else STATUS_ON_RECORD[event.status]
        if self._record.parallel_group is not None and reasons[:1] == [StopReason.USER_REQUESTED]:
            status = LoopStatus.ABORTED  # stopped, because another branch answered first
        self._messages = self._all_messages(event)
        for ref in event.children:
            self.link(ref)
        self._turns = {key: _TurnFold(turn.turn(event.at)) for key, turn in self._answered().items()}
        self._is_counted = True
        compacted = event.compaction_usage  # empty in older records
        self._record = replace(
            self._record,
            compaction_usage=self._record.compaction_usage if compacted == Usage() else compacted,
            status=status,
            rejection=rejection,
            stop_reason=reasons[0].value if reasons else None,
            ended_at=event.at,
            usage=event.usage,
            errors=event.errors,
            idle=max(self._record.idle, event.idle),  # a header has not seen the starts in between
            redactions=event.redactions,
        )

    def _all_messages(self, event: AgentEnd) -> list[Message]:
        """Return all messages of the run. In older records, the end of a resumed run has only the later ones."""
        if not self._was_resumed:
            return list(event.messages)
        told = {message.id for message in event.messages}
        return [*(message for message in self._messages if message.id not in told), *event.messages]


def _closed(turns: Iterable[Turn], at: datetime) -> tuple[Turn, ...]:
    """Return the turns of a loop that is over: those in which the model has answered."""
    return tuple(replace(turn, ended_at=turn.ended_at or at) for turn in turns if turn.message_ids)


class SessionRecord(Value, frozen=True, kw_only=True):
    """All the loops of one session, with the links between them."""

    session_id: str
    """The session."""
    agent_id: str = ""
    """Its agent."""
    created_at: datetime | None = None
    """The time at which the record begins."""
    last_active_at: datetime | None = None
    """The time at which something last ran."""
    parent_spawn_ref: SpawnRef | None = None
    """The call that has spawned the session, if it is a sub-agent's."""
    loops: tuple[LoopRecord, ...] = ()
    """The runs, in the order in which they began."""

    def get_loop(self, loop_id: str) -> LoopRecord | None:
        """Return the run `loop_id`, or None."""
        return next((loop for loop in self.loops if loop.loop_id == loop_id), None)

    def root_loops(self) -> tuple[LoopRecord, ...]:
        """Return the loops without a parent in this session."""
        known = {loop.loop_id for loop in self.loops}
        return tuple(loop for loop in self.loops if loop.parent_loop_id not in known)

    def children_of(self, loop_id: str) -> tuple[LoopRecord, ...]:
        """Return the runs that follow the run `loop_id`, or branch off from it."""
        return tuple(loop for loop in self.loops if loop.parent_loop_id == loop_id)

    def parallel_siblings(self, loop_id: str) -> tuple[LoopRecord, ...]:
        """Return the branches of a loop's parallel group, itself included, in the order of their configs.

        `loop_id` names the loop.
        """
        loop = self.get_loop(loop_id)
        if loop is None or loop.parallel_group is None:
            return ()
        found = (self.get_loop(each) for each in loop.parallel_group.all_loop_ids)
        return tuple(each for each in found if each is not None)

    def chain_to(self, loop_id: str) -> tuple[LoopRecord, ...]:
        """Return the loops from a root down to the loop `loop_id`, in order."""
        left = {loop.loop_id: loop for loop in self.loops}
        chain: list[LoopRecord] = []
        loop = left.pop(loop_id, None)
        while loop is not None:  # each is taken out once, so that a record with a cycle ends too
            chain.append(loop)
            loop = left.pop(loop.parent_loop_id, None) if loop.parent_loop_id else None
        return tuple(reversed(chain))

    def total_usage(self) -> Usage:
        """Return the usage of all loops, and of the judges of parallel groups."""
        # By group: each of its branches has the usage of the same judge.
        judged = {
            loop.parallel_group.all_loop_ids: loop.parallel_group.evaluation_usage
            for loop in self.loops
            if loop.parallel_group
        }
        return sum((*(loop.usage for loop in self.loops), *judged.values()), start=Usage())


def with_children(loops: Iterable[LoopRecord]) -> tuple[LoopRecord, ...]:
    """Return loops that know their children, from loops that know their parents."""
    ordered = tuple(loops)
    children: dict[str, list[str]] = {}
    for loop in ordered:
        if loop.parent_loop_id is not None:
            children.setdefault(loop.parent_loop_id, []).append(loop.loop_id)
    return tuple(
        msgspec.structs.replace(loop, children_loop_ids=tuple(children.get(loop.loop_id, ()))) for loop in ordered
    )
