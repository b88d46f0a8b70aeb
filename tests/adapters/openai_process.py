"""A process that uses sessions of the OpenAI Agents SDK, as its arguments say."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
from agents.models.interface import Model
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from perdure.adapters.openai_agents import PerdureSession

set_tracing_disabled(True)


class Scripted(Model):
    """A model whose reply a function makes from its input: a text, or the name of a tool to call."""

    def __init__(self, say: Callable[[list[Any]], str]) -> None:
        self._say = say
        self.sent: list[list[Any]] = []

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        self.sent.append(list(input))
        said = self._say(input)
        number = len(input)
        output: Any
        if said.startswith("call "):
            name = said.removeprefix("call ")
            output = ResponseFunctionToolCall(
                type="function_call", call_id=f"call_{number}", name=name, arguments='{"word": "x"}', id=f"fc_{number}"
            )
        else:
            text = ResponseOutputText(type="output_text", text=said, annotations=[])
            output = ResponseOutputMessage(
                id=f"msg_{number}", type="message", role="assistant", status="completed", content=[text]
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


def calling_agent(tell: Callable[[str], object] = lambda line: None) -> Agent[Any]:
    """Return an agent that calls a tool and then answers."""

    @function_tool
    def look_up(word: str) -> str:
        """Look a word up."""
        tell("tool")
        return f"about {word}"

    def say(items: list[Any]) -> str:
        tell("model")
        return "done" if items[-1].get("type") == "function_call_output" else "call look_up"

    return Agent("helper", model=Scripted(say), tools=[look_up])


def pairs(name: str, count: int) -> Sequence[list[Any]]:
    """Return batches of two items that belong together."""
    return [
        [{"role": "user", "content": f"{name} {n} a"}, {"role": "assistant", "content": f"{name} {n} b"}]
        for n in range(count)
    ]


async def append(session: PerdureSession, name: str, count: int) -> None:
    for batch in pairs(name, count):
        await session.add_items(batch)


def _tell(line: str) -> None:
    print(line, flush=True)


def main(task: str, url: str, name: str, count: str) -> None:
    session = PerdureSession("chat", store=url)
    if task == "append":
        asyncio.run(append(session, name, int(count)))
    else:
        for number in range(int(count)):
            Runner.run_sync(calling_agent(_tell), f"Question {number}", session=session)
            _tell(f"answered {number}")


if __name__ == "__main__":
    main(*sys.argv[1:])
