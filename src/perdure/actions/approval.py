"""What a person decides about the tool calls that a suspended session waits with."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.actions.given import require_loops
from perdure.actions.needed_tools import require_tools
from perdure.actions.running import RunOptions, run_agent
from perdure.actions.send import send_leftovers_after
from perdure.actions.spawning import Spawner
from perdure.errors import InvalidData
from perdure.loop.factory import LoopFactory
from perdure.loop.tool_use import Decisions, call_hash
from perdure.model.checks import expect_several
from perdure.model.message import ToolCall
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext


class ApproveToolCalls:
    """Let pending calls (all of them, unless some are named) be made, and the run go on."""

    runs_model = True

    def __init__(self, loops: LoopFactory, *, call_ids: Iterable[str] | None = None, depth: int = 0) -> None:
        self._loops = require_loops(loops)
        self._call_ids = _checked_ids(call_ids)
        self._depth = depth

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        calls = _pending(session, self._call_ids)
        require_tools(
            self._loops,
            session,
            self._depth,
            calls,
            why="A call of {name!r} is to be approved",
            what_to_do="Approve it where its tools are (tools=[…], or --tools FILE.py), or deny it.",
        )
        decisions = Decisions(approved={call.id: call_hash(call) for call in calls})
        return await _go_on(session, self._loops, context, decisions, self._depth)


class DenyToolCalls:
    """Keep pending calls (all of them, unless some are named) from being made; the model is told why, and goes on."""

    runs_model = True

    def __init__(
        self, loops: LoopFactory, *, reason: str, call_ids: Iterable[str] | None = None, depth: int = 0
    ) -> None:
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidData("$.reason", "a denial needs a reason that the model can be told")
        self._loops = require_loops(loops)
        self._reason = reason
        self._call_ids = _checked_ids(call_ids)
        self._depth = depth

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        calls = _pending(session, self._call_ids)
        decisions = Decisions(denied={call.id: self._reason for call in calls})
        return await _go_on(session, self._loops, context, decisions, self._depth)


async def _go_on(
    session: AgentSession, loops: LoopFactory, context: ActionContext | None, decisions: Decisions, depth: int
) -> AgentSession:
    assert session.state.execution is not None
    state = session.state.with_execution(session.state.execution.with_pending_calls(()))
    spawn = Spawner(session, context, decisions) if context is not None else None
    options = RunOptions(decisions=decisions, depth=depth)
    after = await run_agent(session.activated(), state, loops, context, options, spawn)
    send_leftovers_after(context, loops, depth)
    return after


def _checked_ids(call_ids: Iterable[str] | None) -> tuple[str, ...] | None:
    if isinstance(call_ids, str):
        raise InvalidData("$.call_ids", "expected several ids, got one text; write ('…',)")
    return None if call_ids is None else expect_several(call_ids, "$.call_ids")


def _pending(session: AgentSession, call_ids: tuple[str, ...] | None) -> list[ToolCall]:
    execution = session.state.execution
    waiting = {call.id: call for call in execution.pending_calls} if execution else {}
    if not waiting:
        raise InvalidData("$.call_ids", f"no tool call of session {session.id!r} waits for a decision")
    for call_id in call_ids or ():
        if call_id not in waiting:
            raise InvalidData("$.call_ids", f"{call_id!r} does not wait for a decision; these do: {', '.join(waiting)}")
    return [call for call in waiting.values() if call_ids is None or call.id in call_ids]
