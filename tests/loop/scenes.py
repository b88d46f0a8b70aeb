"""Helpers for the loop's tests: an agent that follows a script, and a listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from perdure import AgentDefinition, AgentLoop, AgentState, LoopFactory, Message, ModelReply, ModelRequest, ToolResult
from perdure.protocols import OnDelta
from perdure.testing.scripted import Reply, ScriptedDriver

Script = ScriptedDriver | Sequence[Reply] | Callable[..., Reply]


class Heard(list[Any]):
    """Takes a run's events and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Condition()

    async def emit(self, event: object) -> None:
        async with self._news:
            self.append(event)
            self._news.notify_all()

    async def event_of(self, kind: type, number: int) -> None:
        """Wait until that number of events of a kind have been heard."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.of(kind)) >= number)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self]


def loops_of(script: Script, *tools: Any, **options: Any) -> LoopFactory:
    driver = script if isinstance(script, ScriptedDriver) else ScriptedDriver(script)
    return LoopFactory(driver=driver, tools=tools, **options)


def loop_of(script: Script, *tools: Any, agent: dict[str, Any] | None = None, **options: Any) -> AgentLoop:
    """Return a loop that follows a script; `agent` has the definition's fields, `options` are the factory's."""
    return loops_of(script, *tools, **options).build(AgentDefinition("agent", **(agent or {})))


def asked(*texts: str) -> AgentState:
    """Return a state with a user's message."""
    return AgentState().with_messages(*map(Message.user, texts or ("Hi",)))


async def run(script: Script, *tools: Any, agent: dict[str, Any] | None = None, **options: Any) -> AgentState:
    """Return the state at the end of a run."""
    return await loop_of(script, *tools, agent=agent, **options).run(asked())


def results_in(state: AgentState) -> list[ToolResult]:
    """Return the results that the model got, in their order."""
    return [result for message in state.messages for result in message.tool_results]


def answer_of(state: AgentState) -> str:
    assert state.final_response is not None
    return state.final_response.text


class HeldDriver(ScriptedDriver):
    """A scripted driver that waits, at its first request, until it is released."""

    def __init__(self, script: Sequence[Reply] | Callable[..., Reply]) -> None:
        super().__init__(script)
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.is_asked.set()
        await self.may_answer.wait()
        return await super().respond(request, on_delta)
