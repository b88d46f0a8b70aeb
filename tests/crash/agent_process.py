"""A process that runs an agent whose tools write into a ledger, to be killed at any instant.

Run as `python agent_process.py DATABASE LEDGER SESSION_ID`; it prints a line before it begins and one when it is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from perdure import AgentDefinition, LoopFactory, SendMessage, SessionRuntime, SqliteStore, ToolCall, tool
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("worker", tools=("note", "charge"))


def write_ledger(path: str, line: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def tools(ledger: str) -> list[object]:
    """Two tools that leave a mark when they begin: one that may be repeated, one that may not."""

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
    """Five steps: single calls, parallel calls, and an answer. Ids are fixed so that a ledger line names its call."""
    return [
        ToolCall("note", {"text": "one"}, id="c1"),
        ToolCall("charge", {"amount": 2}, id="c2"),
        [ToolCall("note", {"text": "three"}, id="c3"), ToolCall("charge", {"amount": 4}, id="c4")],
        ToolCall("charge", {"amount": 5}, id="c5"),
        "done",
    ]


def loops(ledger: str) -> LoopFactory:
    return LoopFactory(tools=tools(ledger), driver=ScriptedDriver(script()))  # type: ignore[arg-type]


async def main(database: str, ledger: str, session_id: str) -> None:
    async with SqliteStore(database) as store:
        runtime = SessionRuntime(store)
        print("ready", flush=True)
        sys.stdin.readline()
        time.sleep(0)
        await runtime.execute(session_id, SendMessage("Do it.", loops(ledger)))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
