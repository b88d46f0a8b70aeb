"""The place of a new run in the tree of a session's loops: which loop it continues from, and how."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from perdure.model.execution import ExecutionStatus
from perdure.model.loop_events import ContinuationKind
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext, Journal, RunOnRecord
from perdure.run_journal import loops_on_record

MESSAGES_LOOKED_AT = 100
ENTRIES_LOOKED_AT = 100
"""The number of messages of a view, and of entries of a record, that are searched at most.

So a long session costs no more than a short one.
"""


async def parent_of(session: AgentSession, context: ActionContext | None) -> str | None:
    """Return the loop that the next one continues from, or None if the next one is the first.

    It is the last run. If an undo or a rewind took that back, it is the run of this session that put the last shown
    message on record. That message may be no more than what the run was asked.
    """
    if session.state.execution is not None:
        return session.state.execution.execution_id
    if context is None or context.journal is None or not session.state.transcript:
        return None
    return await _last_shown(context.journal, session)


async def _last_shown(journal: Journal, session: AgentSession) -> str | None:
    """Return the run that put the last message of a view on record, if it is a run of this session.

    An answer names its run. For a question, the record knows which run it began.
    """
    entries = await journal.read(session.id, last=ENTRIES_LOOKED_AT)
    told = {entry.body["message"]["id"]: entry.run for entry in entries if entry.kind == "message_end"}
    met: set[str] = set()
    for message in islice(reversed(session.state.transcript), MESSAGES_LOOKED_AT):
        loop_id = told.get(message.id) or message.metadata.get("execution_id")
        if isinstance(loop_id, str) and loop_id not in met:
            met.add(loop_id)
            if await journal.runs(session.id, run=loop_id):  # not a run of the session that this was forked from
                return loop_id
    return None


async def continuation_of(
    session: AgentSession, inputs: Sequence[Message], context: ActionContext | None
) -> dict[str, Any]:
    """Return the fields of AgentStart that say how a run continues, as far as the state does not tell that by itself.

    A run is a rerun if the same was sent before from the same place, and was taken back or failed. The tag names the
    loop that is repeated.
    """
    if context is None or context.journal is None or not inputs:
        return {}
    journal, execution = context.journal, session.state.execution
    if execution is not None:
        failed = await journal.runs(session.id, run=execution.execution_id) if _has_failed(session) else ()
        repeated = await _repeated(journal, session, failed, inputs)
        return {} if repeated is None else {"continuation": ContinuationKind("rerun", repeated)}
    parent = await parent_of(session, context)
    if parent is None:
        return {}
    # Imported here: most sends return above, and a process that only sends need not load the reader of records.
    from perdure.runtime.record_reader import RUNS_AT_ONCE, parent_in

    recent = await loops_on_record(journal, session.id, limit=RUNS_AT_ONCE)
    siblings = [run for run in recent if parent_in(run) == parent]
    repeated = await _repeated(journal, session, siblings, inputs)
    kind = ContinuationKind("default") if repeated is None else ContinuationKind("rerun", repeated)
    return {"parent_loop_id": parent, "continuation": kind}


def _has_failed(session: AgentSession) -> bool:
    return session.state.status is ExecutionStatus.FAILED


async def _repeated(
    journal: Journal, session: AgentSession, runs: Sequence[RunOnRecord], inputs: Sequence[Message]
) -> str | None:
    """Return the newest of these runs that was sent the same messages."""
    sent = [(each.role, each.parts) for each in inputs]
    for run in reversed(runs):
        asked = await _asked(journal, session, run)  # the warnings of filters may follow it
        if [(each.role, each.parts) for each in asked[: len(sent)]] == sent:
            return run.loop_id
    return None


async def _asked(journal: Journal, session: AgentSession, run: RunOnRecord) -> list[Message]:
    """Return the messages that a run was sent: those on its record before its first turn."""
    entries = await journal.read(session.id, run=run.loop_id, limit=ENTRIES_LOOKED_AT)
    before = takewhile(lambda entry: entry.kind != "turn_start", entries)
    asked = [entry.body["message"]["id"] for entry in before if entry.kind == "message_end"]
    stored = await journal.messages(run.log, run.start, run.stop) if asked and run.start < run.stop else ()
    known = {message.id: message for message in stored}
    return [known[each] for each in asked if each in known]
