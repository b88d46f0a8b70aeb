"""A process that runs a workflow of two stages; the second one's tool waits, so that it can be killed there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import perdure
from perdure import AgentDefinition, Stage, ToolCall, Workflow
from perdure.testing import ScriptedDriver


async def main(url: str, ledger: Path, mode: str) -> None:
    def note(line: str) -> None:
        with ledger.open("a") as file:
            file.write(line + "\n")

    def first() -> str:
        note("first")
        return "did the first"

    def second() -> str:
        note("second")
        return "did the second"

    async def third() -> str:
        note("third")
        if mode == "wait":
            await asyncio.sleep(60)
        return "did the third"

    def reply(request: Any) -> Any:
        asked = next(message.text for message in reversed(request.messages) if message.role == "user")
        script = (
            [ToolCall(name="first"), "drafted"]
            if asked == "begin"
            else [
                ToolCall(name="second"),
                ToolCall(name="third"),
                "reviewed",
            ]
        )
        return script[request.step]

    stages = [Stage("draft", agent=AgentDefinition("writer")), Stage("review", agent=AgentDefinition("critic"))]
    tools = [first, second, perdure.tool(idempotent=True)(third)]
    async with perdure.connect(url, driver=ScriptedDriver(reply), tools=tools) as sessions:
        result = await Workflow("book", stages).run(sessions, "begin")
        print(result["draft"].text, result.text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
