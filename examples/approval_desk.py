"""Two processes on one store: an agent that pays, and a person at a desk who decides what is paid.

python approval_desk.py agent        # asks for two payments, and ends: both sessions wait
python approval_desk.py desk         # shows what waits, approves the small one, denies the large one
"""

from __future__ import annotations

import asyncio
import sys

import perdure

STORE = "sqlite:///payments.db"
CASHIER = perdure.AgentDefinition("cashier")


@perdure.tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return f"{to} has {amount}"


async def agent() -> None:
    async with perdure.connect(STORE, model="offline", tools=[pay]) as sessions:
        for name, amount in (("ben", 20), ("eve", 5000)):
            chat = await sessions.open(f"bill-of-{name}", agent=CASHIER)
            reply = await chat.send(f'call pay {{"to": "{name}", "amount": {amount}}}', key="pay")
            print(f"{chat.id}: waits for {[call.name for call in reply.pending_calls]}")


async def desk() -> None:
    async with perdure.connect(STORE, model="offline", tools=[pay]) as sessions:
        for info in await sessions.list(status="suspended"):
            chat = await sessions.open(info.id)
            shown = (await chat.view()).pending_calls
            for call in shown:
                print(f"{info.id}: {call.name} {dict(call.arguments)}")
            # What is decided about is what was shown: if the agent wants something else by now, nothing is made.
            if all(int(str(call.arguments["amount"])) <= 100 for call in shown):
                reply = await chat.approve(shown)
            else:
                reply = await chat.deny("More than 100 needs a second signature.", shown)
            print(f"{info.id}: {reply.text}")


if __name__ == "__main__":
    what = sys.argv[1:]
    if what == ["agent"]:
        asyncio.run(agent())
    elif what == ["desk"]:
        asyncio.run(desk())
    else:  # one after the other, to see it all
        asyncio.run(agent())
        asyncio.run(desk())
