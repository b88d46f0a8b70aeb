"""A tool of an MCP server, as a model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.errors import ToolError
from perdure.model.value import JSON, thawed

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
        # The protocol's default: a tool that says nothing of itself may destroy something.
        self.may_destroy = not is_read_only and hints.get("destructiveHint") is not False
        self.on_unknown: OnUnknown = server.on_unknown_of(self.name_there, idempotent=self.idempotent)
        self._server = server
        self._connection = connection

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether a person must agree to a call with these arguments."""
        return self._server.waits(self, arguments)

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments. Raise ToolError, with what is wrong and where, if they do not fit the schema."""
        given: dict[str, Any] = thawed(arguments)
        problem = self._problem(given)
        if problem is not None:
            schema = msgspec.json.encode(self.parameters).decode()[:2000]
            where = f"{problem.message[:500]} at {problem.json_path}"
            raise ToolError(f"The arguments do not fit {self.name}: {where}. Its schema: {schema}")
        return given

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> JSON:
        """Have the server call the tool."""
        return await self._connection.call(self.name_there, arguments, context)

    def __repr__(self) -> str:
        return f"<tool {self.name} of {self._server!r}>"

    def _problem(self, arguments: Mapping[str, Any]) -> Any:
        """Return the first thing that does not fit. A schema that cannot be applied here is left to the server."""
        from referencing.exceptions import Unresolvable

        try:
            return None if self._validator is None else next(self._validator.iter_errors(arguments), None)
        except Unresolvable:
            return None

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        kind = validator_for(self.parameters, default=Draft202012Validator)
        try:
            kind.check_schema(self.parameters)
        except SchemaError:
            return None
        return kind(self.parameters, registry=Registry())  # empty: a schema must not make us fetch an address
