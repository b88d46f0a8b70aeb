"""Unattended runs. Calls that a person would have to approve are refused, and the model is told so."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from perdure.errors import ConfigurationError
from perdure.loop.interceptors import Blocked, Interceptor
from perdure.loop.tools import ToolRegistry
from perdure.model.execution import PendingCall
from perdure.model.message import ToolCall
from perdure.model.state import AgentState

LAST = float("-inf")
"""The priority of an interceptor that comes last: it sees calls as they would be made."""


def require_nothing_pending(pending: Sequence[PendingCall]) -> None:
    """Raise ConfigurationError if calls wait for a person, who cannot be asked: the rest of their run is dropped."""
    wanted = ", ".join(dict.fromkeys(leaf.name for call in pending for leaf in call.leaves))
    if pending:
        raise ConfigurationError(
            f"The agent wants to call {wanted}, which needs a person's approval, and run() keeps no session that waits "
            "for one. The call was not made. Use `chat = await sessions.open(agent=…)`, `chat.send(…)` and "
            "`chat.approve()`."
        )


class RefuseApprovals(Interceptor):
    """An interceptor that blocks calls that need an approval, or that ask a person because of an unknown outcome."""

    def __init__(self, tools: ToolRegistry, unknown: Container[str], where: str) -> None:
        self._tools = tools
        self._unknown = unknown
        self._where = where

    def before_tool_use(self, call: ToolCall, state: AgentState) -> Any:
        if call.id in self._unknown:
            waits = self._asks_if_unknown(call)
            why = "it was interrupted, and it may or may not have taken effect"
        else:
            waits, why = self._needs_approval(call), "it needs a person's approval"
        if not waits:
            return call
        return Blocked(f"{why}, which nobody can be asked about {self._where}. Continue without it.")

    def _asks_if_unknown(self, call: ToolCall) -> bool:
        tool = self._tools.get(call.name)
        if tool is None or tool.on_unknown == "error":
            return False
        return tool.on_unknown == "ask" or self._needs_approval(call)

    def _needs_approval(self, call: ToolCall) -> bool:
        tool = self._tools.get(call.name)
        try:
            return tool is not None and tool.needs_approval(tool.check(call.arguments))
        except Exception:  # around a tool: what is wrong with the call is told when it is made
            return False
