"""A process that runs a Strands agent with a scripted model, or writes messages by number: to be raced, or killed."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any

from strands import Agent, tool
from strands.models.model import Model
from strands.types.exceptions import SessionException
from strands.types.session import SessionMessage

from perdure.adapters.strands import PerdureSessionManager, PerdureSessionRepository

Said = str | tuple[str, dict[str, Any]]


class ScriptedModel(Model):
    """Says what it is told to: texts, and calls of tools given by name and arguments."""

    stateful = False

    def __init__(self, said: Sequence[Said]) -> None:
        self.said = list(said)
        self.asked: list[list[Any]] = []

    def update_config(self, **_: Any) -> None: ...

    def get_config(self) -> Any: ...

    def structured_output(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise NotImplementedError

    async def stream(self, messages: Any, *_: Any, **__: Any) -> AsyncIterable[Any]:
        self.asked.append([*messages])
        said = self.said.pop(0)
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(said, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": said}}}
        else:
            name, arguments = said
            yield {"contentBlockStart": {"start": {"toolUse": {"name": name, "toolUseId": f"t-{len(messages)}"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(arguments)}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(said, str) else "tool_use"}}


@tool
def look_up(order: int) -> str:
    """Say where an order is."""
    return f"Order {order} is on its way."


def agent_of(url: Any, said: Sequence[Said], session_id: str = "s-1", **options: Any) -> Agent:
    """Return an agent that goes on with what is kept."""
    manager = PerdureSessionManager(session_id, store=url, **options)
    return Agent(model=ScriptedModel(said), tools=[look_up], session_manager=manager, callback_handler=None)


def turns(count: int) -> list[Said]:
    """Return what a model says in so many turns: a call of a tool, and an answer."""
    return [said for order in range(count) for said in (("look_up", {"order": order}), f"See above: {order}.")]


def run(url: str, count: str) -> None:
    """Ask an agent again and again, and say after each answer how many messages there have been."""
    agent = agent_of(url, turns(int(count)))
    print("begun", flush=True)
    for order in range(int(count)):
        agent(f"Where is order {order}?")
        print(4 * (order + 1), flush=True)


def write(url: str, name: str, count: str) -> None:
    """Write messages, each at the number that is free by then, and say which number each has got."""
    repository = PerdureSessionRepository(store=url)
    for number in range(int(count)):
        print(_written(repository, f"{name}-{number}"), flush=True)


def _written(repository: PerdureSessionRepository, text: str) -> int:
    while True:
        index = len(repository.list_messages("s-1", "default"))
        try:
            said: Any = {"role": "user", "content": [{"text": text}]}
            repository.create_message("s-1", "default", SessionMessage.from_message(said, index))
        except SessionException:
            continue
        return index


if __name__ == "__main__":
    {"run": run, "write": write}[sys.argv[1]](*sys.argv[2:])
