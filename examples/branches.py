"""One past, three futures: two forks that part, and a question that two configurations answer side by side."""

from __future__ import annotations

import asyncio

import perdure
from perdure.parallel import FewestTokens

BY_HEAD = perdure.AgentDefinition("cashier", system_prompt="Work it out in your head.", tools=())
WITH_TOOLS = perdure.AgentDefinition("cashier", system_prompt="Use your tools.")


@perdure.tool(idempotent=True)
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    async with perdure.connect("memory://", model="offline", tools=[multiply]) as sessions:
        chat = await sessions.open(agent=perdure.AgentDefinition("cashier"))
        await chat.send("My name is Ada.")

        left, right = await chat.fork(), await chat.fork()
        await left.send("My favourite colour is teal.")
        await right.send("What is 30 * 2?")
        diff = await left.diff(right)
        print(f"{len(diff.common)} messages in common, then {len(diff.left)} on the left and {len(diff.right)} right")

        question = perdure.SendParallel(
            "What is 19 * 21?",
            sessions.loops,
            configs=[WITH_TOOLS, BY_HEAD],
            strategy=FewestTokens(),
        )
        await sessions.execute(chat.id, question)
        for loop in (await chat.record()).loops:
            if loop.parallel_group is not None:
                print(f"{loop.usage.total_tokens} tokens", "selected" if loop.parallel_group.is_selected else "")


if __name__ == "__main__":
    asyncio.run(main())
