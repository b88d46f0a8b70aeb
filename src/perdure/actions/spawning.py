"""Sub-agents in sessions of their own: found by an id that the call determines, so that none is run twice."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perdure.actions.needed_model import known_model
from perdure.actions.running import RunOptions, run_agent
from perdure.errors import CorruptRecord, PerdureError, SessionBusy, SessionConflict, SessionLocked, StoreError
from perdure.loop.narrator import Unrecordable
from perdure.loop.subagents import SubagentTool, outcome_of
from perdure.loop.tool_use import AwaitsApproval, Outcome
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.ids import SessionId, now
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.model.stop import StopReason, StopSignal
from perdure.model.value import ErrorRecord
from perdure.protocols import Action, ActionContext, ToolContext
from perdure.recording import see_through

if TYPE_CHECKING:
    from perdure.loop.factory import LoopFactory
    from perdure.loop.tool_use import Decisions


INFRASTRUCTURE = (StoreError, SessionBusy, SessionConflict, SessionLocked, CorruptRecord)
"""What is no fault of an agent: it ends the caller's run here, which can be resumed, and is not told to a model."""


class Spawner:
    """Runs sub-agents for one session's run. Without `waits`, one that needs an approval has come to no answer."""

    def __init__(
        self, parent: AgentSession, context: ActionContext, decisions: Decisions | None = None, *, waits: bool = True
    ) -> None:
        self._parent = parent
        self._context = context
        self._decisions = decisions
        self._waits = waits
        self._left: dict[str, Outcome] = {}

    async def __call__(self, tool: SubagentTool, prompt: str, call: ToolContext) -> Outcome:
        try:
            child = await self._ran(tool, prompt, call)
        except INFRASTRUCTURE as error:
            raise Unrecordable(error) from error
        except asyncio.CancelledError:
            await see_through(self._note_what_is_left(tool, call))
            raise
        pending = child.state.execution.pending_calls if child.state.execution is not None else ()
        if not pending:
            return _outcome(tool, call.call_id, child)
        if self._waits:
            raise AwaitsApproval
        outcome = await self.abandon(tool, call) or _outcome(tool, call.call_id, child)
        wanted = ", ".join(each.name for each in pending)
        problem = f"Agent {tool.name} needs a person's approval ({wanted}), and nobody can be asked here."
        return replace(outcome, error=ErrorRecord("ApprovalImpossible", problem))

    async def _ran(self, tool: SubagentTool, prompt: str, call: ToolContext) -> AgentSession:
        """The child session once there is nothing more to be done in it for now."""
        child_id = child_session_id(call.execution_id, call.call_id)
        child = await self._context.store.load(child_id)
        if child is None:
            child = await self._context.store.create(self._new_child(child_id, tool, call))
        elif self._context.journal is not None:
            child = await self._context.execute(child_id, self._resumption(tool))
        action = self._next_action(child, tool, prompt, call)
        return child if action is None else await self._context.execute(child_id, action)

    async def abandon(self, tool: object, call: ToolContext) -> Outcome | None:
        """End a child that waits for a person and will not be waited for; what it has used. None if there is none."""
        if not isinstance(tool, SubagentTool):
            return None
        child_id = child_session_id(call.execution_id, call.call_id)
        try:
            if await self._context.store.load(child_id) is None:
                return None
            child = await self._context.execute(child_id, StopWaiting(tool.loops, depth=tool.depth))
        except INFRASTRUCTURE as error:
            raise Unrecordable(error) from error
        return _outcome(tool, call.call_id, child)

    def left_by(self, call_id: str) -> Outcome | None:
        """What a call has come to that was cancelled."""
        return self._left.pop(call_id, None)

    async def _note_what_is_left(self, tool: SubagentTool, call: ToolContext) -> None:
        with suppress(PerdureError):  # the cancellation goes on, whether or not the child can be read
            child = await self._context.store.load(child_session_id(call.execution_id, call.call_id))
            if child is not None and child.state.execution is not None:
                self._left[call.call_id] = _outcome(tool, call.call_id, child)

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
        """Return the model of a sub-agent that names none: what is chosen for the caller, here or at its creation."""
        parent = self._parent.state
        return parent.model or tool.loops.model or parent.default_model or self._parent.definition.model_config

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


class StopWaiting:
    """End a run that waits for approvals which will not come, and the session with it, as failed.

    Sub-agents that its calls wait for end too. A session that waits for nothing is left as it is.
    """

    runs_model = True

    def __init__(self, loops: LoopFactory, *, depth: int = 0) -> None:
        self._loops = loops
        self._depth = depth

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        execution = session.state.execution
        if execution is None or not execution.pending_calls:
            if context is not None:
                context.answer = session
            return session
        if context is not None:
            await self._end_children(session, execution, context)
        signal = StopSignal(StopReason.USER_REQUESTED, "what it waited for was denied", source="denied")
        waiting = session.state.with_execution(execution.with_pending_calls(()))
        state = waiting.with_current_step_completed().with_stop_signal(signal)
        model = await known_model(self._loops, session, context, execution.execution_id)
        options = RunOptions(depth=self._depth, model=model)
        return (await run_agent(session.activated(), state, self._loops, context, options)).failed()

    async def _end_children(self, session: AgentSession, execution: ExecutionState, context: ActionContext) -> None:
        tools = self._loops.all_tools(session.definition, self._depth)
        for call in execution.pending_calls:
            called = ToolContext(call.id, execution.execution_id, session.state.agent_id, session.id)
            await Spawner(session, context).abandon(tools.get(call.name), called)


def _outcome(tool: SubagentTool, call_id: str, child: AgentSession) -> Outcome:
    loop_id = child.state.execution.execution_id if child.state.execution else ""
    return replace(outcome_of(tool.name, child.state), child=ChildLoopRef(call_id, tool.name, loop_id, child.id))


def child_session_id(execution_id: str, call_id: str) -> SessionId:
    """The id of the session that a tool call spawns: the same whenever the call is made again."""
    digest = hashlib.blake2b(f"{execution_id}/{call_id}".encode(), digest_size=16)
    return SessionId(f"sub-{digest.hexdigest()}")
