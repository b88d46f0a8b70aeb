"""Send the last message again: which one that is, and what takes its run out of the view."""

from __future__ import annotations

from perdure.actions.run import pending_in
from perdure.actions.undo_run import TakeBackRun
from perdure.errors import ConfigurationError, InvalidData, SessionNotActive
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import SessionManager


async def taken_back(session: AgentSession, runtime: SessionManager) -> tuple[list[Message], TakeBackRun]:
    """Return what the last run of a session was asked, as new messages, and the action that takes the run back.

    Raise InvalidData if there is no run, SessionNotActive if the session takes no messages.
    """
    journal = runtime.journal
    if journal is None:
        raise ConfigurationError("This store has no journal, so it does not know which run was the last.")
    if session.status is not SessionStatus.ACTIVE:
        raise SessionNotActive(session.id, session.status.value, pending_in(session))
    # Not the newest on record: that may be a compaction, which has answered nobody.
    ran = session.state.execution
    runs = [] if ran is None else await journal.runs(session.id, run=ran.execution_id)
    if not runs or runs[0].first.kind != "agent_start":
        raise InvalidData("$", f"session {session.id!r} has no run whose message could be sent again; use send()")
    (run,) = runs
    entries = await journal.read(session.id, run=run.loop_id)
    asked = [entry.body["message"]["id"] for entry in entries if entry.kind == "message_end"]
    stored = {message.id: message for message in await journal.messages(run.log, run.start, run.stop)}
    inputs = []
    for message_id in asked:
        message = stored.get(message_id)
        if message is None or message.role != "user":
            break
        inputs.append(Message(message.role, message.parts, metadata=message.metadata))
    if not inputs:
        raise InvalidData("$", f"the last run of session {session.id!r} answers no message of a user's; use send()")
    before = int(entries[0].body["base_version"])
    # Its save made the next version. What was trimmed, compacted or reset since then stays so.
    return inputs, TakeBackRun(run.loop_id, before, before + 1)
