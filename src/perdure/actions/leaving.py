"""Decisions that are left to a worker: they are put on record, and nothing is run here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from perdure.actions.needed_model import recorded_config
from perdure.actions.run import past_of, require_journal
from perdure.aio import finish_despite_cancel
from perdure.errors import ClaimConflict, PerdureError, SessionConflict
from perdure.loop.run_events import snapshot
from perdure.loop.tool_use import Decisions
from perdure.model.ids import now
from perdure.model.loop_events import AgentStart
from perdure.model.session import AgentSession
from perdure.model.value import EMPTY
from perdure.protocols import ActionContext, Answer, Entry, Journal
from perdure.run_journal import HANDED_OVER, entry_of, owner_here
from perdure.runtime.record_reader import last_of_run

_NO_LEASE = 0.0
"""The lease of a claim that is lapsed from the start: it needs no release that a crash could prevent."""


async def left_to_worker(session: AgentSession, context: ActionContext | None, decisions: Decisions) -> Answer:
    """Put on record that a run continues with these decisions, and leave the run to a worker or to `recover`.

    One commit claims the session, as a run does. It raises SessionBusy if the session is being run, and RunInterrupted
    if its run waits to be continued already. The same commit says that the run was handed over, so that it does not
    count as a run whose process has died.
    """
    journal = require_journal(context, "wait=False")
    start = await _start(session, context, decisions)
    await finish_despite_cancel(_handed_over(journal, session, [entry_of(start), Entry(HANDED_OVER, EMPTY)]))
    return Answer(session)


async def is_decided(journal: Journal, session: AgentSession, names: Collection[str] | None) -> bool:
    """Return whether it is on record that the run which waits in this version continues with a decision.

    Return False if a decision is about a call that will wait again. `names` are the ids and digests of its calls, or
    None for all.
    """
    newest = await last_of_run(journal, session.id)
    if newest is None or newest.run is None:
        return False
    starts = [entry.body for entry in await journal.read(session.id, run=newest.run) if entry.kind == "agent_start"]
    continued = [body for body in starts if body.get("base_version") == session.version]
    decided = {name for body in continued for fact in ("approved", "denied", "answered") for name in body.get(fact, ())}
    left = _left_by(session, decided)
    return bool(decided) and (left.isdisjoint(names) if names is not None else not left)


def _left_by(session: AgentSession, decided: Collection[str]) -> set[str]:
    """Return the names of the calls that wait, and are not among those that were decided about."""
    left: set[str] = set()
    for call in session.state.execution.pending_calls if session.state.execution else ():
        for leaf in call.leaves:
            if not {call.id, leaf.id, leaf.digest} & {*decided}:
                left |= {call.id, call.digest, leaf.id, leaf.digest}
    return left


async def _handed_over(journal: Journal, session: AgentSession, entries: Sequence[Entry]) -> None:
    try:
        claim, _ = await journal.claim(
            session.id, version=session.version, owner=owner_here(), lease=_NO_LEASE, entries=entries
        )
    except SessionConflict as conflict:  # nothing is decided yet, so the action may be applied again
        raise ClaimConflict(conflict.session_id, conflict.expected, conflict.found) from None
    with suppress(PerdureError):  # the store need not remember a claim that has lapsed
        await journal.release(claim, interrupted=True)


async def _start(session: AgentSession, context: ActionContext | None, decisions: Decisions) -> AgentStart:
    """Return the start of the run, as it would be put on record if the run continued here."""
    execution = session.state.execution
    assert execution is not None
    past, at = await past_of(session, session.state, context), now()
    model = session.state.model_for(session.definition)
    recorded = await recorded_config(session, context, execution.execution_id)
    return AgentStart(
        loop_id=execution.execution_id,
        session_id=session.id,
        agent_id=session.state.agent_id,
        seq=past.told.seq + 1,
        at=at,
        config=recorded if model is None else snapshot(model),
        spawn_ref=session.info.spawn_ref,
        base_version=session.version,
        resumed=True,
        idle=max(0.0, (at - (past.told.at or at)).total_seconds()),
        key=(past.key.name, past.key.digest) if past.key else None,
        context_data=past.context_data,
        approved=decisions.approved,
        denied=decisions.denied,
        answered=tuple(decisions.answers),
        answers=tuple(decisions.answers.values()),
        response_format=execution.response_format,
        external_tools=execution.external_tools,
        instructions=execution.instructions,
        model_options=execution.model_options,
    )
