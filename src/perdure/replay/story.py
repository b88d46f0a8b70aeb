"""Turns read from the events of a run: the question, the model's answers step by step, and the outcomes of its calls.

The same code reads a stored run and its replay, so that the two differ only where the runs do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from perdure.loop.cut_off import INCOMPLETE
from perdure.loop.response_format import is_complaint
from perdure.model.execution import ExecutionStatus
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    InputRejected,
    MessageEnd,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
)
from perdure.model.message import Message, ToolCall
from perdure.model.step import InferenceResponse, ToolExecution
from perdure.model.stop import StopReason, cut_off_by
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord, thawed

_MODELS_OWN = {StopReason.STEPS_LIMIT_REACHED, StopReason.TOKEN_LIMIT_REACHED, StopReason.ERROR_FORBADE}
"""Stop reasons that a replay reaches by itself, besides those of an answer that was cut off."""


class Call(msgspec.Struct, frozen=True):
    """A tool call and its outcome."""

    id: str
    """The id of the call."""
    name: str
    """The name of the tool."""
    arguments: Mapping[str, Any]
    """The arguments."""
    outcome: ToolExecution | None = None
    """The result or error, or None if there is none."""

    @property
    def key(self) -> tuple[str, bytes]:
        """Return the tool and the arguments in one form, which are the same for equal calls."""
        return key_of(self.name, self.arguments)

    @property
    def is_unknown(self) -> bool:
        """Tell whether there was no tool of this name."""
        return self.outcome is not None and self.outcome.error is not None and self.outcome.error.type == "UnknownTool"

    @property
    def result(self) -> object:
        """Return the result that the model was told, or None if the call has no outcome."""
        if self.outcome is None:
            return None
        error = self.outcome.error
        return thawed(self.outcome.result) if error is None else f"{error.type}: {error.message}"


class Step(msgspec.Struct, frozen=True):
    """One answer of the model, and the calls that it asked for."""

    message: Message
    """The answer."""
    response: InferenceResponse
    """The facts about it."""
    calls: tuple[Call, ...] = ()
    """The calls that it asked for."""
    seconds: float | None = None
    """Seconds that the step took, if that is known."""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.message.text

    @property
    def usage(self) -> Usage:
        """Return the usage of the model. The usage of sub-agents counts for their own sessions."""
        return self.response.usage

    @property
    def is_incomplete(self) -> bool:
        """Tell whether a cancel or an error cut the answer off. Its tokens are an estimate then."""
        return self.response.finish_reason == INCOMPLETE


class Steering(msgspec.Struct, frozen=True):
    """Messages that reached a run behind one of its steps."""

    after: int
    messages: tuple[Message, ...]


class PlayedTurn(msgspec.Struct, frozen=True):
    """One run of an agent: the question, the steps and the end. A recovered run is one turn, too."""

    loop_id: str
    """The run."""
    start: AgentStart
    """The event that began it."""
    asked: tuple[Message, ...]
    """The messages that it was sent."""
    steps: tuple[Step, ...]
    """The answers, in order."""
    steering: tuple[Steering, ...] = ()
    """The messages that were taken in between its steps."""
    compactions: tuple[tuple[int, Compaction], ...] = ()
    """Compactions made during the run, each with the index of the step that it came before."""
    status: ExecutionStatus = ExecutionStatus.IN_PROGRESS
    """The status that it has ended with."""
    stop_reason: StopReason | None = None
    """The reason why it stopped."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the run."""
    events: tuple[AnyLoopEvent, ...] = ()
    """Its events."""

    @property
    def text(self) -> str:
        """Return the text of the question."""
        return "\n".join(message.text for message in self.asked)

    @property
    def brought(self) -> frozenset[str]:
        """Return the names of the tools that came with the message for this run only."""
        return frozenset(spec.name for spec in self.start.external_tools)

    @property
    def is_cut(self) -> bool:
        """Tell whether the run ended for a reason that a replay does not reach by itself.

        For example, somebody cancelled it, it waits for a person, its time was up, a tool stopped it, or it was killed.
        """
        if self.status is ExecutionStatus.IN_PROGRESS:
            return True
        reason = self.stop_reason
        is_own = reason is None or not reason.was_force_stopped or reason in _MODELS_OWN or self._ended_by_answer
        return self.status is ExecutionStatus.STOPPED and not is_own

    @property
    def _ended_by_answer(self) -> bool:
        return bool(self.steps) and cut_off_by(self.steps[-1].response.finish_reason) is self.stop_reason

    @property
    def complete(self) -> tuple[Step, ...]:
        """Return the steps that are compared: all of them, except for the unfinished answer of a run that was cut."""
        return tuple(step for step in self.steps if not step.is_incomplete) if self.is_cut else self.steps

    @property
    def end(self) -> str:
        """Describe how the run ended, in a few words."""
        if self.status is ExecutionStatus.IN_PROGRESS:
            return "unfinished"
        error = self.errors[-1] if self.errors else None
        if error is not None:
            return f"{self.status.value}: {error.type}: {error.message}"
        is_forced = self.stop_reason is not None and self.stop_reason.was_force_stopped
        return f"{self.status.value}: {self.stop_reason.value}" if is_forced and self.stop_reason else self.status.value

    @property
    def usage(self) -> Usage:
        """The usage of all steps."""
        return sum((step.usage for step in self.steps), start=Usage())

    @property
    def seconds(self) -> float:
        """Seconds of all steps whose times are known."""
        return sum(step.seconds or 0.0 for step in self.steps)


def key_of(name: str, arguments: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a call in one form, since models write the same arguments in different orders, or 1 as 1.0."""
    return name, msgspec.json.encode(_plain(thawed(arguments)), order="deterministic")


def turn_of(events: Sequence[AnyLoopEvent]) -> PlayedTurn | None:
    """Return the turn that the events of one run describe, or None if they do not say how it began."""
    return _Reading().read(events)


def joined(turns: Sequence[PlayedTurn]) -> PlayedTurn:
    """Return several runs as one turn. A message that came too late to steer a run was answered by the next run."""
    first, last = turns[0], turns[-1]
    if first is last:
        return first
    steps = tuple(step for turn in turns for step in turn.steps)
    return msgspec.structs.replace(
        first, steps=steps, status=last.status, stop_reason=last.stop_reason, errors=last.errors
    )


class _Reading:
    """A turn while its events are read."""

    def __init__(self) -> None:
        self._start: AgentStart | None = None
        self._end: AgentEnd | None = None
        self._asked: list[Message] = []
        self._steps: dict[str, _Step] = {}
        self._steering: list[Steering] = []
        self._compactions: list[tuple[int, Compaction]] = []
        self._refused: set[str] = set()
        self._open: _Step | None = None
        self._has_begun = False

    def read(self, events: Sequence[AnyLoopEvent]) -> PlayedTurn | None:
        for event in events:
            self._take(event)
        if self._start is None:
            return None
        end, steps = self._end, self._answered()
        reasons = sorted((signal.reason for signal in end.stop_signals), key=lambda each: each.priority) if end else []
        return PlayedTurn(
            self._start.loop_id,
            self._start,
            tuple(self._asked),
            tuple(step.made() for step in steps),
            tuple(self._steering),
            tuple(self._compactions),
            end.status if end else ExecutionStatus.IN_PROGRESS,
            reasons[0] if reasons else None,
            end.errors if end else (),
            tuple(events),
        )

    def _answered(self) -> list[_Step]:
        return [step for step in self._steps.values() if step.message is not None]

    def _take(self, event: AnyLoopEvent) -> None:
        match event:
            case AgentStart():
                # A recovered run starts again on record: the first start has the question, and only the last end
                # counts.
                self._start, self._end = self._start or event, None
                if self._open is not None:
                    self._open.started_at = event.at  # nobody worked on it meanwhile
            case TurnStart():
                self._has_begun = True
                self._open = self._steps[event.step_id] = _Step(event.at)
            case MessageEnd():
                self._say(event)
            case ToolExecutionEnd() if event.step_id in self._steps:
                self._steps[event.step_id].outcomes[event.execution.call.id] = event.execution
            case TurnEnd() if event.step_id in self._steps:
                self._steps[event.step_id].ended_at, self._open = event.at, None
            case InputRejected():
                self._refused.update(event.message_ids)
            case Compaction():
                self._compactions.append((self._done, event))
            case AgentEnd():
                self._end = event

    @property
    def _done(self) -> int:
        """Return the number of steps that the model has answered so far."""
        return len(self._answered())

    def _say(self, event: MessageEnd) -> None:
        message = event.message
        step = self._steps.get(str(message.metadata.get("step_id")))
        if message.is_superseded or message.id in self._refused:
            return
        if step is not None:
            if message.role == "assistant":
                step.message, step.response = message, event.response or InferenceResponse()
        elif message.role == "system" and message.metadata.get("is_trace"):
            return  # a filter's warning, which the replay's own filters would give
        elif not self._has_begun:
            self._asked.append(message)
        elif not is_complaint(message):
            self._steering.append(Steering(max(0, self._done - 1), (message,)))


class _Step:
    """A step while its events are read."""

    def __init__(self, started_at: datetime) -> None:
        self.started_at = started_at
        self.ended_at: datetime | None = None
        self.message: Message | None = None
        self.response = InferenceResponse()
        self.outcomes: dict[str, ToolExecution] = {}

    def made(self) -> Step:
        assert self.message is not None
        calls = tuple(self._call(call) for call in self.message.tool_calls)
        seconds = None if self.ended_at is None else max(0.0, (self.ended_at - self.started_at).total_seconds())
        return Step(self.message, self.response, calls, seconds)

    def _call(self, call: ToolCall) -> Call:
        return Call(call.id, call.name, call.arguments, self.outcomes.get(call.id))


def by_loop(events: Iterable[AnyLoopEvent]) -> dict[str, list[AnyLoopEvent]]:
    """Return the events of each run, in the order in which the runs began."""
    found: dict[str, list[AnyLoopEvent]] = {}
    for event in events:
        if event.loop_id:
            found.setdefault(event.loop_id, []).append(event)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
