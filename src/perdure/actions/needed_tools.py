"""The tools that a run needs: those that have to be connected to, and those of calls that are already decided on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext

from perdure.aio import is_cancelled
from perdure.errors import ConfigurationError
from perdure.loop.factory import LoopFactory
from perdure.model.definition import AgentDefinition
from perdure.model.message import ToolCall
from perdure.model.session import AgentSession
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
    """Raise ConfigurationError if a call is of a tool that is not here: the model would be told that there is none."""
    await connect_tools(loops, session.definition, context)
    known = {tool.name for tool in loops.all_tools(session.definition, depth)}
    known |= {tool.name for tool in session.state.execution.external_tools} if session.state.execution else set()
    for call in calls:
        if call.name not in known:
            what = f"{why.format(name=call.name)}, and no tool of that name is here."
            raise ConfigurationError(what, what_to_do, missing="tool", name=call.name)
