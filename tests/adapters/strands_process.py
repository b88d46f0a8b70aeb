"""A process that runs a Strands agent with a scripted model, or writes messages by number: to be raced, or killed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import Any

from strands import Agent, tool
from strands.models.model import Model
from strands.types.exceptions import SessionException
from strands.types.session import SessionMessage
from tests.adapters.processes import Tell

from perdure.adapters.strands import PerdureSessionManager, PerdureSessionRepository

Said = str | tuple[str, dict[str, Any]]


class ScriptedModel(Model):
    """Replies from a script: texts, and calls of tools given by name and arguments."""

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
    """Return an agent that continues with the stored messages."""
    manager = PerdureSessionManager(session_id, store=url, **options)
    return Agent(model=ScriptedModel(said), tools=[look_up], session_manager=manager, callback_handler=None)


def turns(count: int) -> list[Said]:
    """Return a model's replies for that number of turns: a call of a tool, and an answer."""
    return [said for order in range(count) for said in (("look_up", {"order": order}), f"See above: {order}.")]


def run(tell: Tell, url: str, count: int) -> None:
    """Ask an agent again and again, and report after each answer how many messages there are."""
    agent = agent_of(url, turns(count))
    tell(0)
    for order in range(count):
        agent(f"Where is order {order}?")
        tell(4 * (order + 1))


def begin_at_once(tell: Tell, wait: Callable[[], object], url: str, name: str) -> None:
    """Begin one agent of a session at once with other processes that begin theirs, and say its name there."""
    wait()
    said: Any = {"role": "user", "content": [{"text": name}]}
    manager = PerdureSessionManager("s-1", store=url)
    Agent(model=ScriptedModel([]), agent_id=name, session_manager=manager, messages=[said], callback_handler=None)
    tell(name)


def write_at_once(tell: Tell, wait: Callable[[], object], url: str, name: str, count: int, rounds: int) -> None:
    """Write messages to one session after the other, at once with other processes, and report their numbers."""
    repository = PerdureSessionRepository(store=url)
    for number in range(rounds):
        wait()
        tell([_written(repository, f"s-{number}", f"{name}-{place}") for place in range(count)])


def _written(repository: PerdureSessionRepository, session_id: str, text: str) -> int:
    """Write a message at the next free number."""
    while True:
        index = len(repository.list_messages(session_id, "default"))
        try:
            said: Any = {"role": "user", "content": [{"text": text}]}
            repository.create_message(session_id, "default", SessionMessage.from_message(said, index))
        except SessionException:
            continue
        return index
