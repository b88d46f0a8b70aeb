"""The tools that a run needs: toolsets to connect to, and the tools of calls that have begun or are pending."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext

from perdure.aio import is_cancelled
from perdure.errors import ConfigurationError
from perdure.loop.factory import LoopFactory
from perdure.loop.tool_use import Decisions
from perdure.loop.tools import ToolRegistry
from perdure.model.definition import AgentDefinition
from perdure.model.message import ToolCall
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.protocols import ActionContext


async def connect_tools(loops: LoopFactory, definition: AgentDefinition, context: ActionContext | None) -> None:
    """Connect to the toolsets of an agent before its run begins. Closing the runtime ends the wait for them."""
    if not loops.needs_toolsets(definition):
        return
    work = asyncio.ensure_future(loops.connect_tools(definition))
    with context.under_way.cancellable(work) if context is not None else nullcontext():
        try:
            await work
        except asyncio.CancelledError:
            # Closing the runtime cancels only the work. If this task is cancelled itself, its caller has asked for it.
            if is_cancelled():
                raise
            raise ConfigurationError(
                "The connection was closed while its tools were connected to. The run has not begun, and nothing of it "
                "is kept."
            ) from None


async def require_tools(
    loops: LoopFactory,
    session: AgentSession,
    context: ActionContext | None,
    depth: int,
    calls: Iterable[ToolCall],
    *,
    why: str,
    what_to_do: str,
) -> None:
    """Raise ConfigurationError if the tool of a call is not here: the model would be told that it does not exist."""
    await connect_tools(loops, session.definition, context)
    known = {tool.name for tool in loops.all_tools(session.definition, depth)}
    known |= {tool.name for tool in session.state.execution.external_tools} if session.state.execution else set()
    for call in calls:
        if call.name not in known:
            what = f"{why.format(name=call.name)}, and no tool of that name is here."
            raise ConfigurationError(what, what_to_do, missing="tool", name=call.name)


def require_tools_of_waiting(
    session: AgentSession, state: AgentState, decisions: Decisions, known: ToolRegistry
) -> None:
    """Raise ConfigurationError if the tool of a pending call is not here, where the run is continued.

    The call was approved, or stays pending. Without its tool the model would be told that the tool does not exist, and
    would not call it again.
    """
    step = state.execution.current_step if state.execution else None
    unsettled = {call.id for call in step.calls_without_outcome} if step else set()
    unsettled -= decisions.denied.keys() | decisions.answers.keys()
    for call in session.state.execution.pending_calls if session.state.execution else ():
        if call.id in unsettled and call.name not in known:
            what = f"The run of session {session.id!r} waits with a call of {call.name!r}, and no such tool is here."
            advice = "Continue it where its tools are: tools=[…], or --tools FILE.py."
            raise ConfigurationError(what, advice, missing="tool", name=call.name)
