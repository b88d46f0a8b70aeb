"""A tool of an MCP server, as a model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perdure.loop.schema_check import SchemaCheck
from perdure.model.value import JSON

if TYPE_CHECKING:
    from perdure.loop.mcp.connection import McpConnection
    from perdure.loop.mcp.server import McpServer
    from perdure.loop.tools import OnUnknown
    from perdure.protocols import ToolContext


class McpTool:
    """A `Tool` whose calls go to a server."""

    def __init__(self, name: str, listed: Mapping[str, Any], server: McpServer, connection: McpConnection) -> None:
        self.name = name
        self.name_there: str = listed["name"]
        self.description: str = listed.get("description") or listed.get("title") or ""
        self.parameters: dict[str, Any] = {"type": "object", "properties": {}, **listed["inputSchema"]}
        self.timeout = server.timeout
        hints = listed.get("annotations") or {}
        is_read_only = hints.get("readOnlyHint") is True
        self.idempotent = is_read_only or hints.get("idempotentHint") is True
        # The protocol's default: a tool without hints may destroy something.
        self.may_destroy = not is_read_only and hints.get("destructiveHint") is not False
        self.on_unknown: OnUnknown = server.on_unknown_of(self.name_there, idempotent=self.idempotent)
        self.check = SchemaCheck(name, self.parameters)
        self._server = server
        self._connection = connection

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether a person must agree to a call with these arguments."""
        return self._server.waits(self, arguments)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> JSON:
        """Send the call to the server, and return its result."""
        return await self._connection.call(self.name_there, arguments, context)

    def __repr__(self) -> str:
        return f"<tool {self.name} of {self._server!r}>"
