"""An MCP server for the tests, run in a process of its own: over its standard streams, or on a loopback port.

Run as `python served.py LEDGER [PORT]`. Its tools add lines to a ledger, a file that is only appended to.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, TypedDict

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, TextContent, TextResourceContents, ToolAnnotations

READ_ONLY = ToolAnnotations(read_only_hint=True)
HARMLESS = ToolAnnotations(destructive_hint=False)
IDEMPOTENT = ToolAnnotations(idempotent_hint=True)

LEDGER = sys.argv[1] if len(sys.argv) > 1 else os.devnull
server = MCPServer("served", log_level="ERROR")


class Weather(TypedDict):
    city: str
    degrees: int


def mark(line: str) -> None:
    handle = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


@server.tool(annotations=READ_ONLY)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=IDEMPOTENT)
async def note(text: str) -> str:
    """Write something down."""
    mark(f"note {text}")
    await asyncio.sleep(0.001)
    return f"noted {text}"


@server.tool()
async def charge(amount: int) -> str:
    """Take money."""
    mark(f"charge {amount}")
    await asyncio.sleep(0.001)
    return f"charged {amount}"


@server.tool(annotations=HARMLESS)
def greet(name: str = "you") -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


@server.tool()
def weather(city: str) -> Weather:
    """Tell the weather."""
    return {"city": city, "degrees": 7}


@server.tool()
def names() -> list[str]:
    """List some names."""
    return ["ada", "bob"]


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Draw a picture."""
    return ["a dot", Image(data=b"x" * 3000, format="png")]


@server.tool(structured_output=False)
def page() -> EmbeddedResource:
    """Return a page."""
    return EmbeddedResource(
        type="resource", resource=TextResourceContents(uri="file:///page.txt", text="the page", mime_type="text/plain")
    )


@server.tool(structured_output=False)
def secret_of(name: str) -> TextContent:
    """Tell what an environment variable has."""
    return TextContent(type="text", text=os.environ.get(name, "nothing"))


@server.tool()
async def slow(seconds: float, ctx: Context) -> str:
    """Take a while, and tell how far it is."""
    mark("slow begun")
    try:
        for step in range(10):
            await ctx.report_progress(step, 10, f"step {step}")
            await asyncio.sleep(seconds / 10)
    except asyncio.CancelledError:
        mark("slow cancelled")
        raise
    mark("slow done")
    return "done at last"


@server.tool()
def die() -> str:
    """End the server."""
    mark("die")
    os._exit(3)


@server.tool()
async def learn(name: str, ctx: Context) -> str:
    """Give the server a new tool."""

    def learned() -> str:
        return f"I know {name}"

    server.add_tool(learned, name=name, description="A tool that was learned.")
    await ctx.session.send_tool_list_changed()
    return "learned"


@server.tool()
def pid() -> int:
    """Tell the server's process id."""
    return os.getpid()


def serve_http(port: int) -> None:
    """Serve callers that have the token; without SERVED_TOKEN, everybody."""
    import uvicorn
    from starlette.responses import PlainTextResponse

    app, token = server.streamable_http_app(), os.environ.get("SERVED_TOKEN")

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if token and scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {token}".encode():
            await PlainTextResponse("who are you?", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    uvicorn.run(guarded, port=port, log_level="error")


if __name__ == "__main__":
    print("served: on its way", file=sys.stderr, flush=True)
    if len(sys.argv) > 2:
        serve_http(int(sys.argv[2]))
    else:
        server.run()
