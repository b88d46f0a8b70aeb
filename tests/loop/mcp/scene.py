"""MCP servers for tests: real ones in processes of their own, and listed tools without a server."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import perdure
from perdure import AgentSession
from perdure.loop.mcp.server import McpServer
from perdure.loop.mcp.tool import McpTool

HERE = Path(__file__).parent
SECONDS = 20.0


def served(ledger: Path | str = os.devnull, **options: Any) -> McpServer:
    """Return a server of the official package, over its standard streams."""
    return perdure.mcp([sys.executable, HERE / "served.py", str(ledger)], **options)


def old_served(**options: Any) -> McpServer:
    """Return a server of 2025 that was written by hand; it starts quickly."""
    return perdure.mcp([sys.executable, HERE / "old_served.py"], **options)


@contextmanager
def serving_http(ledger: Path, port: int, token: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run a server of the official package on a port, until the block is left."""
    command = [sys.executable, str(HERE / "served.py"), str(ledger), str(port)]
    with subprocess.Popen(command, env={**os.environ, "SERVED_TOKEN": token}, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port)
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def wait_for_port(port: int) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < until, "the server does not come up"
            time.sleep(0.05)


async def marked(ledger: Path, line: str) -> None:
    """Wait until a line is in the ledger."""
    await until(lambda: line in lines_of(ledger))


def lines_of(ledger: Path) -> list[str]:
    return ledger.read_text().splitlines() if ledger.exists() else []


async def gone(pid: int) -> None:
    """Wait until a process is gone, and reaped."""
    await until(lambda: not is_alive(pid))


async def until(is_so: Callable[[], bool]) -> None:
    last = time.monotonic() + SECONDS
    while not is_so():  # another process changes it, without a signal
        assert time.monotonic() < last
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Tell whether a process exists, also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def results(session: AgentSession) -> list[tuple[str | None, Any, bool]]:
    """Return the results in a transcript: the tool's name, its result, and whether that is an error."""
    found = [result for message in session.state.messages for result in message.tool_results]
    return [(result.name, result.content, result.is_error) for result in found]


def listed(name: str, **hints: bool) -> Mapping[str, Any]:
    """Return a tool as a server lists it."""
    return {"name": name, "inputSchema": {"type": "object"}, "annotations": hints}


def tools_of(server: McpServer, *tools: Mapping[str, Any]) -> dict[str, McpTool]:
    """Return the tools made from a server's list. No server is started."""
    return {tool.name: tool for tool in server.tools_in(tools, server.open_tools())}
