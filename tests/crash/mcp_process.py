"""A process that runs an agent whose tools are on an MCP server, to be killed at any instant.

Run as `python mcp_process.py ADDRESS LEDGER SESSION_ID [send|slow]`; it prints a line once the server is up, and one
when it is done.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.crash.addresses import store_at
from tests.crash.agent_process import script
from tests.loop.mcp.scene import served

from perdure import AgentDefinition, LoopFactory, SendMessage, SessionRuntime, ToolCall
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("worker", tools=("note", "charge", "slow"))
SLOW = ToolCall("slow", {"seconds": 30}, id="c1")


def loops(ledger: str, how: str = "send", **options: Any) -> LoopFactory:
    replies = script() if how == "send" else [SLOW, "done"]
    return LoopFactory(tools=[served(ledger, **options)], driver=ScriptedDriver(replies))  # type: ignore[arg-type]


async def main(database: str, ledger: str, session_id: str, how: str = "send") -> None:
    async with store_at(database) as store:
        made = loops(ledger, how)
        await made.connect_tools(AGENT)
        print("ready", flush=True)
        sys.stdin.readline()
        await SessionRuntime(store).execute(session_id, SendMessage("Do it.", made))
        print("done", flush=True)
        await made.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
