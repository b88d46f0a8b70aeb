"""Sub-agents in sessions of their own: found by an id that the call determines, so that none is run twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from perdure.actions.children import child_session_id, pending_now
from perdure.actions.waiting import StopWaiting
from perdure.aio import finish_despite_cancel
from perdure.errors import (
    CorruptRecord,
    KeyUnavailable,
    PendingCallsChanged,
    PerdureError,
    SessionBusy,
    SessionConflict,
    SessionLocked,
    StoreError,
)
from perdure.loop.run_events import Unrecordable
from perdure.loop.subagents import SubagentTool, outcome_of
from perdure.loop.tool_use import AwaitsApproval, Outcome
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionStatus, PendingCall
from perdure.model.ids import SessionId, now
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.model.value import EMPTY, ErrorRecord
from perdure.protocols import Action, ActionContext, ToolContext

if TYPE_CHECKING:
    from perdure.loop.factory import LoopFactory
    from perdure.loop.tool_use import Decisions


INFRASTRUCTURE = (StoreError, SessionBusy, SessionConflict, SessionLocked, CorruptRecord, KeyUnavailable)
"""Errors that are not an agent's fault. They end the caller's run here, which can be resumed. No model is told."""


class Spawner:
    """The runner of sub-agents for one session's run. Without `waits`, one that needs an approval has no answer."""

    def __init__(
        self,
        parent: AgentSession,
        context: ActionContext,
        loops: LoopFactory,
        decisions: Decisions | None = None,
        *,
        waits: bool = True,
    ) -> None:
        self._parent = parent
        self._context = context
        self._loops = loops
        self._decisions = decisions
        self._waits = waits
        self._left: dict[str, Outcome] = {}

    async def __call__(self, tool: SubagentTool, prompt: str, call: ToolContext) -> Outcome:
        try:
            child = await self._ran(tool, prompt, call)
            pending = await pending_now(child, self._context)
        except INFRASTRUCTURE as error:
            raise Unrecordable(error) from error
        except asyncio.CancelledError:
            if not self._context.is_closing:
                await finish_despite_cancel(self._note_what_is_left(tool, call))
            raise
        except Exception as error:  # a controller may raise anything, and a resumption may be refused
            if await self._has_begun(call):
                raise Unrecordable(error) from error
            raise
        if not pending:
            return _outcome(tool.name, call.call_id, child)
        if self._waits:
            raise AwaitsApproval(child.id, pending)
        outcome = await self.abandon(tool.name, call) or _outcome(tool.name, call.call_id, child)
        wanted = ", ".join(each.name for each in pending)
        problem = f"Agent {tool.name} needs a person's approval ({wanted}), and nobody can be asked here."
        return replace(outcome, error=ErrorRecord("ApprovalImpossible", problem))

    async def _ran(self, tool: SubagentTool, prompt: str, call: ToolContext) -> AgentSession:
        """Return the child session once nothing more can be done in it for now."""
        child_id = self._child_id(call)
        child = await self._context.store.load(child_id)
        if child is None:
            child = await self._context.create(self._new_child(child_id, tool, call))
        elif self._context.journal is not None:
            child = await self._context.execute(child_id, _resumption(tool.loops, context=call.context))
        action = await self._next_action(child, tool, prompt, call)
        try:
            return child if action is None else await self._context.execute(child_id, action)
        except PendingCallsChanged:  # they changed since they were read: the child waits, and its caller shows them
            return await self._context.store.load(child_id) or child

    async def _has_begun(self, call: ToolContext) -> bool:
        """Tell whether the child has a run. Its caller must not end without it, and continues with it later."""
        child_id = self._child_id(call)
        if self._context.journal is not None and await self._context.journal.is_interrupted(child_id):
            return True
        child = await self._context.store.load(child_id)
        return child is not None and child.state.execution is not None

    async def abandon(self, name: str, call: ToolContext) -> Outcome | None:
        """End a child that waits for a person, or was killed, and whose answer is not needed. Return what it has used.

        Return None if the call has no child, or one that has not begun. The sub-agent itself need not be known here.
        """
        child_id = self._child_id(call)
        try:
            if not await self._context.store.exists(child_id):
                return None
            if self._context.journal is not None:
                await self._context.execute(child_id, _resumption(self._loops, give_up=True))
            child = await self._context.execute(child_id, StopWaiting())
        except Exception as error:  # also a controller's: its caller must not end while the child still waits
            raise Unrecordable(error) from error
        return None if child.state.execution is None else _outcome(name, call.call_id, child)

    def left_by(self, call_id: str) -> Outcome | None:
        """Return the outcome of a call that was cancelled, or None if there was nothing to note."""
        return self._left.pop(call_id, None)

    async def _note_what_is_left(self, tool: SubagentTool, call: ToolContext) -> None:
        with suppress(PerdureError):  # the cancellation continues, whether or not the child can be read
            child_id = self._child_id(call)
            if not await self._context.store.exists(child_id):
                return
            child = await self._context.execute(child_id, StopWaiting("its caller was cancelled"))
            if child.state.execution is not None:
                self._left[call.call_id] = _outcome(tool.name, call.call_id, child)

    def _child_id(self, call: ToolContext) -> SessionId:
        return child_session_id(self._parent.info, call.execution_id, call.call_id)

    def _new_child(self, child_id: SessionId, tool: SubagentTool, call: ToolContext) -> AgentSession:
        at = now()
        info = AgentSessionInfo(
            id=child_id,
            agent_name=tool.definition.name,
            created_at=at,
            updated_at=at,
            parent_id=self._parent.id,
            spawn_ref=SpawnRef(self._parent.id, call.execution_id, call.call_id, tool.name),
            owner=self._parent.info.owner,
        )
        state = AgentState.of(tool.definition).with_parent_agent(call.agent_id)
        return AgentSession(info, tool.definition, state.with_default_model(self._model_for(tool)))

    def _model_for(self, tool: SubagentTool) -> ModelConfig | None:
        """Return the model for a sub-agent that names none: the one chosen for the caller, here or at its creation."""
        parent = self._parent.state
        return parent.model or tool.loops.model or parent.default_model or self._parent.definition.model_config

    async def _next_action(
        self, child: AgentSession, tool: SubagentTool, prompt: str, call: ToolContext
    ) -> Action | None:
        """Return the action that the child session needs: to be sent the prompt, to have calls settled, or None."""
        from perdure.actions.approval import SettleToolCalls  # it spawns children itself
        from perdure.actions.send import SendMessage

        execution = child.state.execution
        if execution is None:
            given = {"context": call.context, "context_data": call.context_data}
            return SendMessage(prompt, tool.loops, depth=tool.depth, **given)
        if execution.pending_calls:
            shown = await pending_now(child, self._context)
            answers, errors = self._answers_to(shown)
            asked = PendingCall(tool.name, {"prompt": prompt}, call.call_id, session_id=child.id, waits_for=shown)
            approve = [each for each in shown if not each.external] if self._is_approved(asked) else []
            if not (approve or answers or errors):
                return None
            return SettleToolCalls(tool.loops, approve=approve, answers=answers, errors=errors, context=call.context)
        assert execution.status is not ExecutionStatus.PENDING
        return None

    def _is_approved(self, asked: PendingCall) -> bool:
        """Tell whether a person has approved a call with all that its sub-agent waits for now."""
        return self._decisions is not None and self._decisions.approved.get(asked.id) == asked.digest

    def _answers_to(self, calls: Sequence[PendingCall]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the answers to a child's pending calls: the results, and the reasons why calls failed."""
        given = EMPTY if self._decisions is None else self._decisions.answers
        found = {leaf.digest: given[leaf.digest] for call in calls for leaf in call.leaves if leaf.digest in given}
        results = {digest: each.result for digest, each in found.items() if not each.is_error}
        return results, {digest: each.result for digest, each in found.items() if each.is_error}


def _resumption(loops: LoopFactory, *, give_up: bool = False, context: object = None) -> Action:
    """Return the action that continues or ends a child that was killed during a run. It does nothing to any other."""
    from perdure.actions.resume import ResumeExecution  # it spawns children itself

    return ResumeExecution(loops, give_up=give_up, context=context)


def _outcome(name: str, call_id: str, child: AgentSession) -> Outcome:
    loop_id = child.state.execution.execution_id if child.state.execution else ""
    return replace(outcome_of(name, child.state), child=ChildLoopRef(call_id, name, loop_id, child.id))
