"""An agent with tools: its answer is streamed, and a call that takes money waits for a person."""

from __future__ import annotations

import asyncio

import perdure


@perdure.tool(idempotent=True)
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@perdure.tool(needs_approval=lambda arguments: arguments["amount"] > 20)
def charge(customer: str, amount: int) -> str:
    """Take money from a customer's card."""
    return f"{customer} has paid {amount}"


async def main() -> None:
    async with perdure.connect("memory://", model="offline", tools=[multiply, charge]) as sessions:
        chat = await sessions.open(agent=perdure.AgentDefinition("cashier"))

        async for chunk in chat.stream("What is 12.5 * 4?"):
            print(chunk, end="", flush=True)
        print()

        reply = await chat.send('call charge {"customer": "Ben", "amount": 30}')
        for call in reply.pending_calls:
            print(f"waits for approval: {call.name} {dict(call.arguments)}")
        reply = await chat.approve(reply.pending_calls)  # what was shown, and nothing else
        print(reply.text)


if __name__ == "__main__":
    asyncio.run(main())
