"""The agent of the tour: a cashier whose tools write into a ledger, a file that no recovery changes.

Run as `python -m perdure.cli.tour_agent STORE LEDGER SESSION MESSAGE`, it is the process that the tour kills.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import perdure
from perdure.loop.tools import tool
from perdure.model.definition import AgentDefinition
from perdure.protocols import Tool

CASHIER = AgentDefinition("cashier", system_prompt="You keep the till of a small shop.")

ORDERS = (("Ada", 12), ("Ben", 30), ("Cleo", 7))
TAKE_THE_MONEY = " then ".join(
    f'call charge {{"customer": "{customer}", "amount": {amount}}}' for customer, amount in ORDERS
)
"""The message to the offline model, which makes calls that are written out. `then` has it wait for each call."""


def tools_of(ledger: Path, *, pause: float) -> list[Tool]:
    """Return a tool that may be repeated, and one that may not. To take money lasts `pause` seconds."""

    @tool(idempotent=True)
    def multiply(a: float, b: float) -> float:
        """Multiply two numbers."""
        return a * b

    @tool
    async def charge(customer: str, amount: int) -> str:
        """Take money from a customer's card."""
        write(ledger, f"{customer} {amount} begun")
        await asyncio.sleep(pause)
        write(ledger, f"{customer} {amount} taken")
        return f"{customer} has paid {amount}"

    return [multiply, charge]


def write(ledger: Path, line: str) -> None:
    """Write one line with one call, so that a killed process leaves all of it or nothing."""
    handle = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


async def work(store: str, ledger: str, session_id: str, message: str) -> None:
    async with perdure.connect(store, model="offline", tools=tools_of(Path(ledger), pause=1.0)) as sessions:
        await sessions.send(session_id, message)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
