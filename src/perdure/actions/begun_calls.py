"""The calls that a run has begun before it was stopped or failed. A run in its place is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import msgspec

from perdure.model.execution import ExecutionStatus
from perdure.model.message import CONTINUES, Message, ToolCall
from perdure.model.session import AgentSession
from perdure.model.value import thawed
from perdure.protocols import Journal, JournalEntry, RunOnRecord

MOST_SHOWN = 500
"""The number of characters of a call's arguments that a note shows."""

BEFORE_CALLS = "The run that answered the user's last message ended early, after these tool calls:"
BEHIND_CALLS = (
    "Continue from there. Do not repeat a call that is done. Check before you repeat one whose outcome is unknown."
)


class InPlace(msgspec.Struct, frozen=True):
    """The beginning of a run in place of another one."""

    messages: Sequence[Message]
    """The messages that it answers."""
    takes_back: str | None
    """The run that leaves the view, or None if its words stay."""


async def in_place_of(journal: Journal, session: AgentSession, loop_id: str, messages: Sequence[Message]) -> InPlace:
    """Return how `messages` are answered again, in place of the run `loop_id` of a session.

    A run that has begun no call, or was completed, is taken back. Otherwise its words stay, and a note lists its calls.
    If the run itself has continued another one, the new run is given that note again.
    """
    runs = await journal.runs(session.id, run=loop_id)
    if not runs:
        return InPlace(messages, loop_id)
    entries = await journal.read(session.id, run=loop_id)
    stored = await _stored(journal, runs[0])
    calls = [] if _is_completed(runs[0]) else list(_begun_calls(entries, stored))
    asked = _inputs(stored, entries)
    earlier = tuple(message for message in asked if message.is_note)
    if not calls:
        return InPlace(asked if earlier else messages, loop_id)
    note = _note(loop_id, calls)
    if _is_last_shown(session, loop_id, entries):
        return InPlace((note,), None)
    said = (message for message in messages if not message.is_note)
    return InPlace((*said, *earlier, note), None)


async def inputs_of(journal: Journal, run: RunOnRecord, entries: Iterable[JournalEntry]) -> tuple[Message, ...]:
    """Return what a run was asked, as new messages: a user's, and the note about the run that it has continued."""
    return _inputs(await _stored(journal, run), entries)


async def _stored(journal: Journal, run: RunOnRecord) -> dict[str, Message]:
    return {message.id: message for message in await journal.messages(run.log, run.start, run.stop)}


def _inputs(stored: Mapping[str, Message], entries: Iterable[JournalEntry]) -> tuple[Message, ...]:
    found = (stored.get(message_id) for message_id in _told(entries))
    asked = takewhile(lambda message: message is not None and (message.role == "user" or message.is_note), found)
    return tuple(Message(each.role, each.parts, metadata=each.metadata) for each in asked if each is not None)


def _is_completed(run: RunOnRecord) -> bool:
    return run.last.kind == "agent_end" and run.last.body.get("status") == ExecutionStatus.COMPLETED


def _told(entries: Iterable[JournalEntry]) -> list[str]:
    return [entry.body["message"]["id"] for entry in entries if entry.kind == "message_end"]


def _begun_calls(entries: Iterable[JournalEntry], stored: Mapping[str, Message]) -> Iterator[str]:
    """Yield a line about each call that may have taken effect. The record has the outcomes, and messages the calls."""
    outcomes: dict[str, str] = {}
    for entry in entries:
        if entry.kind == "tool_execution_start":
            outcomes[entry.body["call"]["id"]] = "its outcome is unknown"
        elif entry.kind == "tool_execution_end":
            execution = entry.body["execution"]
            call_id, error = execution["call"]["id"], execution.get("error")
            if error is None:
                outcomes[call_id] = "done"
            elif call_id in outcomes:  # all others were refused, and never made
                outcomes[call_id] = error["type"]
    for call in (call for message in stored.values() for call in message.tool_calls):
        if call.id in outcomes:
            yield f"{_said(call)}: {outcomes[call.id]}"


def _said(call: ToolCall) -> str:
    arguments = msgspec.json.encode(thawed(call.arguments)).decode()
    return f"{call.name} {arguments if len(arguments) <= MOST_SHOWN else f'{arguments[:MOST_SHOWN]}…'}"


def _note(loop_id: str, calls: Iterable[str]) -> Message:
    lines = (f"- {line}" for line in calls)
    text = "\n".join((BEFORE_CALLS, *lines, BEHIND_CALLS))
    return Message.system(text, metadata={CONTINUES: loop_id})


def _is_last_shown(session: AgentSession, loop_id: str, entries: Sequence[JournalEntry]) -> bool:
    """Tell whether a session shows a run last, with what it was asked."""
    execution = session.state.execution
    if execution is None or execution.execution_id != loop_id:
        return False
    asked = set(_told(takewhile(lambda entry: entry.kind != "turn_start", entries)))
    return asked <= {message.id for message in session.state.messages}
