"""An agent whose tools are on an MCP server. What may destroy something waits for a person."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import perdure

SERVER = Path(__file__).parent / "servers" / "orders.py"
CLERK = perdure.AgentDefinition("clerk", system_prompt="Look orders up. Refund them if a customer asks for it.")


async def main() -> None:
    orders = perdure.mcp([sys.executable, SERVER], needs_approval="destructive")
    async with perdure.connect("sqlite:///orders.db", model="offline", tools=[orders]) as sessions:
        chat = await sessions.open(agent=CLERK)

        # The server is started here, before the model is asked, and ends with the connection.
        reply = await chat.send('call look_up {"order": "7"}')
        print(reply.text)

        # The server says that look_up only reads. It does not say so of refund: a person decides.
        reply = await chat.send('call refund {"order": "7"}')
        for call in reply.pending_calls:
            print(f"waits for approval: {call.name} {dict(call.arguments)}")
        reply = await chat.approve(reply.pending_calls)
        print(reply.text)


if __name__ == "__main__":
    asyncio.run(main())
