"""A posted message that can never be sent: it is refused on record, where its sender and others can find it."""

from __future__ import annotations

from typing import Any

from perdure.actions.inbox import messages_in, take
from perdure.loop.filters import refusal
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import AgentEnd, AgentStart, AnyLoopEvent, ContinuationKind, InputRejected, MessageEnd
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext, Journal, JournalEntry
from perdure.recording import entry_of, owner_here


async def refuse(
    session: AgentSession, context: ActionContext, journal: Journal, entry: JournalEntry, reason: str
) -> None:
    """Take an item out of the inbox; what it says stays in the log, with a loop that was rejected for this reason.

    The version does not move, and there is nothing to be resumed: the loop names no version that it set out from.
    """
    events = _story(session, entry, reason)
    await take(journal, session, owner_here(), entry.seq, messages_in(entry), [entry_of(event) for event in events])
    for event in events:
        await context.emit(event)


def _story(session: AgentSession, entry: JournalEntry, reason: str) -> list[AnyLoopEvent]:
    messages, execution = tuple(messages_in(entry)), session.state.execution
    common: dict[str, Any] = {"loop_id": new_id(), "session_id": session.id, "agent_id": session.state.agent_id}
    said = [MessageEnd(**common, seq=seq, message=message) for seq, message in enumerate(messages, 2)]
    return [
        AgentStart(
            **common,
            seq=1,
            parent_loop_id=execution.execution_id if execution else None,
            continuation=ContinuationKind("default" if execution else "initial"),
        ),
        *said,
        InputRejected(**common, seq=len(said) + 2, reason=reason),
        AgentEnd(
            **common,
            seq=len(said) + 3,
            status=ExecutionStatus.STOPPED,
            messages=messages,
            stop_signals=(refusal(reason),),
            rejection=reason,
        ),
    ]
