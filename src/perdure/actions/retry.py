"""Send the last message again, in place of the run that answered it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.actions.begun_calls import inputs_of
from perdure.actions.continuing import parent_of
from perdure.actions.given import require_loops
from perdure.actions.run import require_journal
from perdure.actions.send import SendMessage
from perdure.actions.waiting import not_active
from perdure.errors import InvalidData
from perdure.loop.factory import LoopFactory
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import ActionContext, ActionResult, Journal, Key


class RetryLastRun:
    """An action that sends the last message that is shown again.

    What its run was asked and has said leaves the view in one commit with the new answer. Log, record and history keep
    it. A run that was stopped or has failed after it has begun calls stays shown, and the new run continues from these.

    The options are those of `SendMessage`. Without a `key`, the answer is kept under the key of the run, if it had
    one. Without an `output`, external tools, instructions or model options, it has those of the run.
    """

    def __init__(self, loops: LoopFactory, **options: Any) -> None:
        self._loops = require_loops(loops)
        self._options = options
        SendMessage("a message", loops, **options)  # which refuses what is wrong with the options
        self.sent: SendMessage | None = None
        """The action that sends the message, once it is known."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        journal = require_journal(context, "RetryLastRun")
        if session.status is not SessionStatus.ACTIVE:
            raise not_active(session)
        asked = await _asked_last(session, journal, context)
        options = {**asked.terms, **self._options, "any_role": True}
        sent = SendMessage(asked.messages, self._loops, **options)
        self.sent = sent.in_place_of(asked.loop_id, asked.key, asked.messages)
        return await self.sent.execute_on(session, context)


class Asked(msgspec.Struct, frozen=True):
    """The messages that a run was asked, as new messages, and the terms of the run."""

    loop_id: str
    messages: tuple[Message, ...]
    key: Key | None
    terms: Mapping[str, Any]
    """The form of answer, the tools, the instructions and the model options that the run alone had."""


async def _asked_last(session: AgentSession, journal: Journal, context: ActionContext | None) -> Asked:
    """Return what the last shown run was asked. Raise InvalidData if no run is shown."""
    # Not the newest on record: that may be a compaction, which answers no message.
    loop_id = await parent_of(session, context)
    runs = [] if loop_id is None else await journal.runs(session.id, run=loop_id)
    if not runs or runs[0].first.kind != "agent_start":
        raise InvalidData("$", f"session {session.id!r} has no run whose message could be sent again; use send()")
    (run,) = runs
    messages = await inputs_of(journal, run, await journal.read(session.id, run=run.loop_id))
    if not messages:
        raise InvalidData("$", f"the last run of session {session.id!r} answers no message of a user's; use send()")
    said = run.first.body
    terms = {"output": said.get("response_format")}
    terms |= {name: said.get(name) for name in ("external_tools", "instructions", "model_options")}
    return Asked(run.loop_id, messages, Key(*said["key"]) if said.get("key") else None, terms)
