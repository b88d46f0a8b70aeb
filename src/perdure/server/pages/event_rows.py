"""Events of runs, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from perdure.model.ids import SessionId
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    InputRejected,
    MessageEnd,
    ParallelLoopEnd,
    ParallelLoopStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
    UnknownEvent,
)
from perdure.server.pages.texts import arguments_in_line, shortened
from perdure.sessions.graphs import WRITES, told_of_writes
from perdure.sessions.sessions import Sessions

LAST = 40
"""The number of events that a page begins with."""


@dataclass(frozen=True)
class EventRow:
    """An event."""

    place: int
    at: datetime
    name: str
    told: str
    is_bad: bool


async def last_events(sessions: Sessions, session_id: SessionId) -> list[EventRow]:
    """Return the last events on record, the newest first."""
    if sessions.runtime.journal is None:
        return []
    rows = [row_of(event) async for event in sessions.runtime.events(session_id, last=LAST)]
    return rows[::-1]


def row_of(event: AnyLoopEvent) -> EventRow:
    """Return an event as a line."""
    name = event.kind if isinstance(event, UnknownEvent) else type(event).__name__
    return EventRow(event.cursor or 0, event.at, name, _told(event), _is_bad(event))


def _is_bad(event: AnyLoopEvent) -> bool:
    match event:
        case AgentEnd():
            return event.status.value == "failed"
        case ToolExecutionEnd():
            return event.execution.error is not None
    return isinstance(event, InputRejected)


def _told(event: AnyLoopEvent) -> str:
    match event:
        case AgentStart():
            model = event.config.model if event.config else ""
            return f"continues, {model}" if event.resumed else model
        case TurnStart():
            return f"step {event.index}"
        case TurnEnd():
            return f"step {event.index}, {event.usage.total_tokens:,} tokens"
        case MessageEnd():
            said = event.message.text or ", ".join(call.name for call in event.message.tool_calls)
            return f"{event.message.role}: {shortened(said, 60)}"
        case ToolExecutionStart():
            return f"{event.call.name}({shortened(arguments_in_line(event.call.arguments), 60)})"
        case ToolExecutionEnd():
            error = event.execution.error
            return event.execution.call.name + (f": {error.type}" if error is not None else "")
        case AgentEnd():
            return f"{event.status.value}, {event.usage.total_tokens:,} tokens"
        case Compaction():
            return f"{event.block.covered} covered, by {event.block.by}"
        case InputRejected():
            return shortened(event.reason, 60)
        case ParallelLoopStart():
            return f"{len(event.loop_ids)} branches"
        case ParallelLoopEnd():
            return f"{len(event.loop_ids)} branches" + ("" if event.selected_loop_id else ", none selected")
        case UnknownEvent(kind=kind) if kind == WRITES:
            return shortened(told_of_writes(event.body), 60)
    return ""
