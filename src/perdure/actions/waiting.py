"""Runs whose question to a person is obsolete: they end on record, and their sub-agents with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypedDict

from perdure.actions.children import child_session_id
from perdure.actions.claimed_work import ClaimedWork
from perdure.actions.run import past_of
from perdure.aio import finish_despite_cancel
from perdure.errors import SessionNotActive
from perdure.loop.run_events import ResumePoint, end_of
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.loop_events import AgentEnd
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.model.state import AgentState
from perdure.model.stop import StopReason, StopSignal
from perdure.protocols import PARKED, ActionContext, ActionResult, Answer, Next


def is_waiting(session: AgentSession) -> bool:
    """Tell whether a session's run waits for a person."""
    execution = session.state.execution
    return execution is not None and bool(execution.pending_calls)


class WaitingNames(TypedDict):
    """The names of pending calls, in the form that errors take."""

    pending: list[str]
    outside: list[str]


def names_of_waiting(session: AgentSession) -> WaitingNames:
    """Return the names of a session's pending calls: those to approve, and those whose results come from outside."""
    calls = session.state.execution.pending_calls if session.state.execution else ()
    return {
        "pending": [call.name for call in calls if not all(leaf.external for leaf in call.leaves)],
        "outside": [leaf.name for call in calls for leaf in call.leaves if leaf.external],
    }


def not_active(session: AgentSession) -> SessionNotActive:
    """Explain why a session takes no message: its status, and what its calls wait for."""
    is_parked = session.status is SessionStatus.SUSPENDED and PARKED in session.info.tags
    return SessionNotActive(session.id, session.status.value, **names_of_waiting(session), is_parked=is_parked)


async def end_waiting(
    before: AgentSession, after: AgentSession, context: ActionContext | None, why: str
) -> AgentSession | Next:
    """Return a session as an action has left it, with the run that waited in it ended.

    Its sub-agents end first. The run's end is put on record in the commit that saves the session. The session is then
    active, unless the action has closed it. A session that did not wait is returned as the action has left it.
    """
    if not is_waiting(before):
        return after
    assert before.state.execution is not None
    ended = _stopped(before.state, why)
    if after.state.execution is not None:  # if it is None, the action has removed the run
        after = after.with_state(ended)
    if after.status is SessionStatus.SUSPENDED:
        after = after.activated()
    if context is None:
        return after
    if context.journal is None:
        await _end_children(before.info, before.state.execution, context, why)
        return after
    return await _ended_on_record(before, ended, after, context, why)


@dataclass(frozen=True, slots=True)
class StopWaiting:
    """An action that ends the waiting run of a sub-agent's session, and closes the session as failed.

    Sub-agents that its calls wait for end too. A session that waits for nothing is left as it is.
    """

    may_be_repeated: ClassVar[bool] = True

    why: str = "what it waited for was denied"

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if not is_waiting(session):
            return session if context is None else Answer(session)
        is_open = session.status in (SessionStatus.ACTIVE, SessionStatus.SUSPENDED)
        return await end_waiting(session, session.failed() if is_open else session, context, self.why)


def _stopped(state: AgentState, why: str) -> AgentState:
    """Return the state with its run stopped where it is."""
    signal = StopSignal(StopReason.USER_REQUESTED, why, source="given_up")
    execution = state.with_current_step_completed().with_stop_signal(signal).execution
    assert execution is not None
    return state.with_execution(execution.with_pending_calls(()).ended(ExecutionStatus.STOPPED))


async def _ended_on_record(
    before: AgentSession, ended: AgentState, after: AgentSession, context: ActionContext, why: str
) -> AgentSession | Next:
    """Claim the session, so that nobody decides meanwhile, end its sub-agents, and end its run with the save."""
    work = ClaimedWork(before, context)
    assert work.record is not None
    assert before.state.execution is not None
    await work.record.barrier()
    await finish_despite_cancel(_end_children(before.info, before.state.execution, context, why))
    past = await past_of(before, before.state, context)
    end = _end(before, ended, past.told)
    work.record.put(end)
    return work.next(after, tells=(end,))


def _end(session: AgentSession, ended: AgentState, told: ResumePoint) -> AgentEnd:
    facts = end_of(ended, told)
    loop_id = ended.execution.execution_id if ended.execution else ""
    return AgentEnd(seq=told.seq + 1, loop_id=loop_id, session_id=session.id, agent_id=session.state.agent_id, **facts)


async def _end_children(parent: AgentSessionInfo, execution: ExecutionState, context: ActionContext, why: str) -> None:
    for call in execution.pending_calls:
        child_id = child_session_id(parent, execution.execution_id, call.id)
        if await context.store.exists(child_id):
            await context.execute(child_id, StopWaiting(why))
