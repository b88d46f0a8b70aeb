"""The steps of a run: each a model call and the tools that it led to, and what came between two of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perdure.model.lineage import ChildLoopRef
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    InputRejected,
    MessageEnd,
    MessageStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
    UnknownEvent,
)
from perdure.model.message import Message, ToolCall
from perdure.model.record import LoopRecord
from perdure.model.step import InferenceResponse, ToolExecution
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord
from perdure.server.pages.conversation import SaidBox, boxes_of
from perdure.server.pages.texts import arguments_in_line, counted, indented, money, seconds, shortened, whole
from perdure.server.pages.timeline import Bar, Timeline

_CUT = 2_000
"""The most characters of arguments and results that are shown of a step that is not opened."""
_DENIED, _UNKNOWN = "Denied", "OutcomeUnknown"


@dataclass(frozen=True)
class Note:
    """Something that happened between two steps, or in one: a line, and how it looks."""

    kind: str
    """"bad", "wait", "fold" or "plain"."""
    text: str
    at: datetime
    more: str = ""


@dataclass(frozen=True)
class Row:
    """One tool call: what it was given, and what came of it."""

    name: str
    line: str
    arguments: str
    state: str
    """"done", "failed", "unknown", "denied", "waits", "running" or "open"."""
    result: str = ""
    result_line: str = ""
    traceback: str = ""
    took: str = ""
    bar: Bar | None = None
    decided: str = ""
    """The decision of a person on it, or that it was answered from outside."""
    child: ChildLoopRef | None = None
    spent: str = ""


@dataclass(frozen=True)
class Step:
    """A model call, and the calls of tools that it asked for."""

    number: int
    step_id: str
    at: datetime
    took: str
    model: str
    figures: str
    """Tokens and cost of the model call."""
    finish: str
    said: SaidBox | None
    bar: Bar
    model_took: str
    lanes: tuple[Row | Note, ...]
    """The calls of tools, and what happened between them: a decision, a kill."""
    errors: tuple[ErrorRecord, ...]
    notes: tuple[Note, ...]
    """The notes before the step."""
    raw: str = ""

    @property
    def calls(self) -> int:
        return sum(isinstance(lane, Row) for lane in self.lanes)


@dataclass
class _Open:
    """A step while its events are gathered."""

    step_id: str
    begun: datetime
    asked_at: datetime | None = None
    answered_at: datetime | None = None
    ended_at: datetime | None = None
    message: Message | None = None
    response: InferenceResponse | None = None
    started: dict[str, ToolExecutionStart] = field(default_factory=dict)
    done: dict[str, ToolExecution] = field(default_factory=dict)
    children: dict[str, ChildLoopRef] = field(default_factory=dict)
    errors: tuple[ErrorRecord, ...] = ()
    notes: list[Note] = field(default_factory=list)
    """The notes before the step."""
    inside: list[Note] = field(default_factory=list)

    def began(self, call_id: str) -> datetime | None:
        """Return the time when a call was made, or None if it was not."""
        if call_id in self.started:
            return self.started[call_id].at
        return self.done[call_id].started_at if call_id in self.done else None


@dataclass(frozen=True)
class Story:
    """The steps of a run, in order."""

    asked: tuple[Message, ...]
    steps: tuple[Step, ...]
    notes: tuple[Note, ...]
    """The notes after the last step."""
    total: int
    """The number of steps in all."""


@dataclass(frozen=True)
class Standing:
    """The state of a run that its own events do not tell: calls that wait, and interruptions that were not crashes."""

    is_over: bool
    waiting: Collection[str] = ()
    """The ids of the calls that wait for a person, or for an answer from outside."""
    handed_over: Collection[int] = ()
    """The places on record of the starts before which a worker that was told to stop has handed the run over."""
    is_running: bool = False


class Reader:
    """A reader that turns a run's events into steps."""

    def __init__(self, loop: LoopRecord, standing: Standing, until: datetime) -> None:
        self._loop = loop
        self._standing = standing
        self._until = loop.ended_at or until
        self.line = Timeline(loop.events, self._until)
        self._asked: list[Message] = []
        self._steps: list[_Open] = []
        self._notes: list[Note] = []
        self._decided: dict[str, str] = {}
        before: AnyLoopEvent | None = None
        for event in loop.events:
            self._take(event, before)
            before = event

    def story(self, first: int, count: int, opened: int | None = None) -> Story:
        """Return a page of the steps, from number `first` on. `opened` is the number of the one that is shown whole."""
        chosen = list(enumerate(self._steps, 1))[first - 1 : first - 1 + count]
        steps = tuple(self._step(number, step, is_whole=number == opened) for number, step in chosen)
        is_last = first - 1 + count >= len(self._steps)
        return Story(tuple(self._asked), steps, tuple(self._notes if is_last else ()), len(self._steps))

    def step_id(self, number: int) -> str | None:
        """Return the id of a step by its number, which counts from 1, or None if there is none."""
        return self._steps[number - 1].step_id if 1 <= number <= len(self._steps) else None

    def _take(self, event: AnyLoopEvent, before: AnyLoopEvent | None) -> None:
        step = self._steps[-1] if self._steps else None
        match event:
            case AgentStart() if event.resumed:
                self._resume(event, before)
            case TurnStart():
                self._steps.append(_Open(event.step_id, event.at, notes=self._notes))
                self._notes = []
            case MessageStart() if event.role == "assistant" and step:
                step.asked_at = event.at
            case MessageEnd():
                self._hear(event, step)
            case ToolExecutionStart() if step:
                step.started[event.call.id] = event
            case ToolExecutionEnd() if step:
                step.done[event.execution.call.id] = event.execution
                if event.child is not None:
                    step.children[event.execution.call.id] = event.child
            case TurnEnd() if step:
                step.ended_at, step.errors = event.at, event.errors
            case Compaction():
                self._fold(event)
            case InputRejected():
                self._note("bad", "What was said was refused", event.at, event.reason)
            case UnknownEvent():
                self._note("plain", shortened(event.kind), event.at)
            case AgentEnd():
                self._end(event, step)

    def _note(self, kind: str, text: str, at: datetime, more: str = "") -> None:
        """Keep a note: in the step under way, or for the one to come."""
        note = Note(kind, text, at, more)
        if self._steps and self._steps[-1].ended_at is None:
            self._steps[-1].inside.append(note)
        else:
            self._notes.append(note)

    def _resume(self, event: AgentStart, before: AnyLoopEvent | None) -> None:
        lay = seconds(event.idle)
        self._decided |= dict.fromkeys(event.approved, "approved")
        self._decided |= {call: f"denied: {reason}" for call, reason in event.denied.items()}
        self._decided |= dict.fromkeys(event.answered, "answered from outside")
        decided = len({*event.approved, *event.denied, *event.answered})
        if decided:
            self._note("wait", f"{counted(decided, 'call')} decided on after {lay}", event.at, _reasons(event))
        # A start right after another one: a decision was put on record, and a worker has continued the run.
        elif isinstance(before, AgentStart) or event.cursor in self._standing.handed_over:
            self._note("plain", f"handed over, and continued by another process after {lay}", event.at)
        else:
            self._note("bad", f"killed, and recovered after {lay}", event.at)

    def _hear(self, event: MessageEnd, step: _Open | None) -> None:
        message = event.message
        if message.role == "assistant" and message.is_superseded:
            self._note("bad", "an answer was cut off by a kill, and the model was asked again", event.at, message.text)
        elif message.role == "assistant" and step is not None and step.message is None:
            step.message, step.response, step.answered_at = message, event.response, event.at
        elif message.role == "user" and step is None:
            self._asked.append(message)
        elif message.role in ("user", "system"):
            self._note("plain", f"{message.role} said in between: {shortened(message.text)}", event.at)

    def _fold(self, event: Compaction) -> None:
        block = event.block
        sizes = f"{block.tokens_before or 0:,} → {block.tokens_after or 0:,} tokens"
        text = f"{counted(block.covered, 'message')} folded by {block.by}, because of: {event.trigger}, {sizes}"
        self._note("fold", text, event.at, block.summary)

    def _end(self, event: AgentEnd, step: _Open | None) -> None:
        if step is not None and step.ended_at is None:
            step.ended_at = event.at
        for signal in event.stop_signals:
            told = " ".join(filter(None, (signal.message, signal.limit and f"(limit: {signal.limit})")))
            self._note("wait", f"stopped: {signal.reason.value.replace('_', ' ')}", event.at, told)

    def _step(self, place: int, step: _Open, *, is_whole: bool) -> Step:
        asked, answered = step.asked_at or step.begun, step.answered_at or step.ended_at or self._until
        response = step.response or InferenceResponse()
        kind = "" if step.message is not None else "not" if self._standing.is_running else "bad"
        return Step(
            number=place,
            step_id=step.step_id,
            at=step.begun,
            took=seconds(self.line.took(step.begun, step.ended_at or self._until)),
            model=response.model or (self._loop.config.model if self._loop.config else "model"),
            figures=figures_of(response.usage),
            finish=response.finish_reason or "",
            said=None if step.message is None else boxes_of([step.message])[0],
            bar=self.line.bar(asked, answered, kind),
            model_took=seconds(self.line.took(asked, answered)),
            lanes=tuple(self._lanes(step, is_whole=is_whole)),
            errors=_own_errors(step),
            notes=tuple(step.notes),
            raw=_raw(step) if is_whole else "",
        )

    def _lanes(self, step: _Open, *, is_whole: bool) -> Iterator[Row | Note]:
        """Yield the calls of a step, each note before the first call that was made after it."""
        notes = list(step.inside)
        asked_for = step.message.tool_calls if step.message is not None else ()
        calls: dict[str, ToolCall] = {call.id: call for call in asked_for}
        calls |= {each.call.id: each.call for each in step.started.values() if each.call.id not in calls}
        cut = None if is_whole else _CUT
        for call_id, call in calls.items():
            begun = step.began(call_id)
            while notes and begun is not None and notes[0].at <= begun:
                yield notes.pop(0)
            yield self._row(step, call_id, call, cut)
        yield from notes

    def _row(self, step: _Open, call_id: str, call: ToolCall, cut: int | None) -> Row:
        done, started = step.done.get(call_id), step.started.get(call_id)
        told: dict[str, Any] = {
            "name": call.name,
            "line": arguments_in_line(call.arguments),
            "arguments": _cut_at(indented(call.arguments), cut),
            "decided": self._decided.get(call_id, ""),
            "child": step.children.get(call_id),
        }
        if done is None:
            state = self._state_of(call_id, is_started=started is not None)
            bar = None if started is None else self.line.bar(started.at, self._until, "bad")
            return Row(**told, state=state, bar=bar)
        begun = started.at if started is not None else done.started_at
        stop = done.completed_at or begun
        state = _outcome(done)
        return Row(
            **told,
            **_result(done, cut),
            state=state,
            took=seconds(self.line.took(begun, stop)),
            bar=self.line.bar(begun, stop, "tool" if state == "done" else "bad"),
            spent="" if done.usage == Usage() else figures_of(done.usage),
        )

    def _state_of(self, call_id: str, *, is_started: bool) -> str:
        """Return the state of a call that has no outcome."""
        if call_id in self._standing.waiting:
            return "waits"
        if self._standing.is_running:
            return "running"
        return "unknown" if is_started else "open"


def _outcome(done: ToolExecution) -> str:
    if done.error is None:
        return "done"
    return {_UNKNOWN: "unknown", _DENIED: "denied"}.get(done.error.type, "failed")


def _result(done: ToolExecution, cut: int | None) -> dict[str, Any]:
    if done.error is not None:
        told = f"{done.error.type}: {done.error.message}"
        return {
            "result": _cut_at(told, cut),
            "result_line": shortened(told),
            "traceback": done.error.traceback or "",
        }
    if isinstance(done.result, str):
        return {"result": _cut_at(done.result, cut), "result_line": shortened(done.result)}
    text = indented(done.result)
    return {"result": _cut_at(text, cut), "result_line": shortened(text)}


def _cut_at(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[:most]}\n… {whole(len(text) - most)} characters more: open the step"


def _own_errors(step: _Open) -> tuple[ErrorRecord, ...]:
    """Return a step's errors, without those of its tools, which are in their rows."""
    of_tools = [done.error for done in step.done.values() if done.error is not None]
    return tuple(error for error in step.errors if error not in of_tools)


def _raw(step: _Open) -> str:
    said = None if step.message is None else step.message.to_dict()
    response = None if step.response is None else step.response.to_dict()
    return indented({"message": said, "response": response, "tools": [each.to_dict() for each in step.done.values()]})


def _reasons(event: AgentStart) -> str:
    return "\n".join(dict.fromkeys(event.denied.values()))


def figures_of(usage: Usage) -> str:
    """Return tokens and cost in a line."""
    if usage == Usage():
        return ""
    cached = f" ({whole(usage.cache_read_tokens)} cached)" if usage.cache_read_tokens else ""
    return f"{whole(usage.input_tokens)} in{cached}, {whole(usage.output_tokens)} out · {money(usage)}"
