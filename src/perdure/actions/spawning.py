"""Sub-agents in sessions of their own: found by an id that the call determines, so that none is run twice."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perdure.loop.subagents import SubagentTool, outcome_of
from perdure.loop.tool_use import AwaitsApproval, Outcome
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId, now
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.protocols import Action, ActionContext, ToolContext

if TYPE_CHECKING:
    from perdure.loop.tool_use import Decisions


class Spawner:
    """Runs sub-agents for one session's run."""

    def __init__(self, parent: AgentSession, context: ActionContext, decisions: Decisions | None = None) -> None:
        self._parent = parent
        self._context = context
        self._decisions = decisions

    async def __call__(self, tool: SubagentTool, prompt: str, call: ToolContext) -> Outcome:
        child_id = child_session_id(call.execution_id, call.call_id)
        child = await self._context.store.load(child_id)
        if child is None:
            child = await self._context.store.create(self._new_child(child_id, tool, call))
        elif self._context.journal is not None:
            child = await self._context.execute(child_id, self._resumption(tool))
        action = self._next_action(child, tool, prompt, call)
        if action is not None:
            child = await self._context.execute(child_id, action)
        execution = child.state.execution
        if execution is not None and execution.pending_calls:
            raise AwaitsApproval
        outcome = outcome_of(tool.name, child.state)
        loop_id = execution.execution_id if execution else ""
        return replace(outcome, child=ChildLoopRef(call.call_id, tool.name, loop_id, child_id))

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
        return AgentSession(info, tool.definition, state)

    def _resumption(self, tool: SubagentTool) -> Action:
        """What goes on with a child that was killed in the middle of a run, and does nothing to any other."""
        from perdure.actions.resume import ResumeExecution  # it spawns children itself

        return ResumeExecution(tool.loops, depth=tool.depth)

    def _next_action(self, child: AgentSession, tool: SubagentTool, prompt: str, call: ToolContext) -> Action | None:
        """What is left to be done in a child session: everything, what a person has allowed, or nothing."""
        from perdure.actions.approval import ApproveToolCalls  # these actions spawn children themselves
        from perdure.actions.send import SendMessage

        execution = child.state.execution
        if execution is None:
            return SendMessage(prompt, tool.loops, depth=tool.depth)
        if execution.pending_calls:
            approved = self._decisions is not None and call.call_id in self._decisions.approved
            return ApproveToolCalls(tool.loops, depth=tool.depth) if approved else None
        assert execution.status is not ExecutionStatus.PENDING
        return None


def child_session_id(execution_id: str, call_id: str) -> SessionId:
    """The id of the session that a tool call spawns: the same whenever the call is made again."""
    digest = hashlib.blake2b(f"{execution_id}/{call_id}".encode(), digest_size=16)
    return SessionId(f"sub-{digest.hexdigest()}")
