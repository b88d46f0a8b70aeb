"""The toolsets of a factory: opened when a run first needs them, asked before every run, closed with the factory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from perdure.errors import ConfigurationError
from perdure.protocols import OpenToolset, Tool, Toolset


class Toolsets:
    """Some toolsets, as the runs of one factory use them."""

    def __init__(self, toolsets: Sequence[Toolset]) -> None:
        self._open: list[tuple[Toolset, OpenToolset]] = [(each, each.open_tools()) for each in toolsets]
        self.are_connected = False

    def __str__(self) -> str:
        return ", ".join(repr(toolset) for toolset, _ in self._open)

    async def tools(self, taken: Iterable[str]) -> Sequence[Tool]:
        """Return the tools of all. Raise ConfigurationError if two have the same name, or a name is taken already."""
        # All are awaited: one that cannot be reached must not leave another half connected.
        asked = await asyncio.gather(*(each.tools() for _, each in self._open), return_exceptions=True)
        found: list[tuple[Toolset, Tool]] = []
        for (toolset, _), tools in zip(self._open, asked, strict=True):
            if isinstance(tools, BaseException):
                raise tools
            found += [(toolset, tool) for tool in tools]
        _require_own_names(found, taken)
        self.are_connected = True
        return [tool for _, tool in found]

    async def close(self) -> None:
        """Close all. One that fails does not keep the others open."""
        self.are_connected = False
        outcomes = await asyncio.gather(*(each.close() for _, each in self._open), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _require_own_names(found: Iterable[tuple[Toolset, Tool]], taken: Iterable[str]) -> None:
    by_name = dict.fromkeys(taken, "another tool or agent")
    for toolset, tool in found:
        if tool.name in by_name:
            raise ConfigurationError(
                f"A tool of {toolset!r} and {by_name[tool.name]} are both named {tool.name!r}. "
                f"Give one of them a prefix, perdure.mcp(…, prefix='…_'), or leave it out: leave_out=[{tool.name!r}].",
            )
        by_name[tool.name] = f"one of {toolset!r}"
