"""A process that runs an agent whose tools write into a ledger, to be killed at any instant.

Run as `python agent_process.py ADDRESS LEDGER SESSION_ID [send|parallel]`; it prints a line before it begins and
one when it is done.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.crash.addresses import store_at

from perdure import (
    Action,
    AgentDefinition,
    LongestAnswer,
    LoopFactory,
    ModelRequest,
    SendMessage,
    SendParallel,
    SessionRuntime,
    ToolCall,
    tool,
)
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("worker", tools=("note", "charge"))


def write_ledger(path: str, line: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def tools(ledger: str) -> list[object]:
    """Return two tools that leave a mark when they begin: one that may be repeated, one that may not."""

    @tool(idempotent=True)
    async def note(text: str) -> str:
        """Write something down."""
        write_ledger(ledger, f"note {text}")
        await asyncio.sleep(0.001)
        return f"noted {text}"

    @tool
    async def charge(amount: int) -> str:
        """Take money."""
        write_ledger(ledger, f"charge {amount}")
        await asyncio.sleep(0.001)
        return f"charged {amount}"

    return [note, charge]


def script() -> list[object]:
    """Return five steps: single calls, parallel calls, an answer. Fixed ids let a ledger line name its call."""
    return [
        ToolCall("note", {"text": "one"}, id="c1"),
        ToolCall("charge", {"amount": 2}, id="c2"),
        [ToolCall("note", {"text": "three"}, id="c3"), ToolCall("charge", {"amount": 4}, id="c4")],
        ToolCall("charge", {"amount": 5}, id="c5"),
        "done",
    ]


def branch_reply(request: ModelRequest) -> object:
    """Reply in a branch of a parallel evaluation: each branch makes a charge of its own, then answers."""
    name, amount = request.model.name, {"a": 10, "b": 20}[request.model.name]
    replies: list[object] = [
        ToolCall("note", {"text": name}, id=f"{name}1"),
        ToolCall("charge", {"amount": amount}, id=f"{name}2"),
        f"done by {name}" + (", at length" if name == "b" else ""),
    ]
    return replies[request.step]


def loops(ledger: str, replies: object = None) -> LoopFactory:
    return LoopFactory(tools=tools(ledger), driver=ScriptedDriver(replies or script()))  # type: ignore[arg-type]


def action(how: str, ledger: str) -> Action:
    if how == "send":
        return SendMessage("Do it.", loops(ledger))
    return SendParallel("Do it.", loops(ledger, branch_reply), configs=["a", "b"], strategy=LongestAnswer())


async def main(database: str, ledger: str, session_id: str, how: str = "send") -> None:
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        print("ready", flush=True)
        sys.stdin.readline()
        await runtime.execute(session_id, action(how, ledger))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
