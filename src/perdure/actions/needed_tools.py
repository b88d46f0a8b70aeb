"""The tools that a run cannot go on without: those of calls that are already decided on."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.errors import ConfigurationError
from perdure.loop.factory import LoopFactory
from perdure.model.message import ToolCall
from perdure.model.session import AgentSession


async def require_tools(
    loops: LoopFactory, session: AgentSession, depth: int, calls: Iterable[ToolCall], *, why: str, what_to_do: str
) -> None:
    """Raise ConfigurationError if a call is of a tool that is not here: the model would be told that there is none."""
    await loops.connect_tools(session.definition)
    known = {tool.name for tool in loops.all_tools(session.definition, depth)}
    for call in calls:
        if call.name not in known:
            what = f"{why.format(name=call.name)}, and no tool of that name is here."
            raise ConfigurationError(what, what_to_do, missing="tool", name=call.name)
