"""Toolsets of a user's own: read before every run, and closed with their factory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import perdure
from perdure import (
    AgentDefinition,
    AgentState,
    ConfigurationError,
    FunctionTool,
    LongestAnswer,
    LoopFactory,
    MemoryStore,
    Message,
    ModelRequest,
    SendParallel,
    SessionRuntime,
    Tool,
    ToolCall,
)
from perdure.testing import ScriptedDriver


def named(name: str) -> FunctionTool:
    return FunctionTool(lambda: f"{name} was called", name=name, description="Do it.")


class Shelf:
    """A toolset whose tools can be changed, and that counts how often it is read."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.asked = 0
        self.closed = 0
        self.problem: BaseException | None = None

    def open_tools(self) -> Shelf:
        return self

    async def tools(self) -> Sequence[Tool]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        return [named(name) for name in self.names]

    async def close(self) -> None:
        self.closed += 1


def offered(seen: list[list[str]], request: ModelRequest) -> str:
    seen.append([spec.name for spec in request.tools])
    return f"done, {len(seen)}"


async def test_tools_are_asked_for_before_every_run() -> None:
    """The next run has the changed tools; own tools stay first."""
    shelf, seen = Shelf("a"), list[list[str]]()
    driver = ScriptedDriver(lambda request: offered(seen, request))
    async with perdure.connect("memory://", tools=[named("own"), shelf], driver=driver) as app:
        chat = await app.open("s")
        assert shelf.asked == 0
        await chat.send("One.")
        shelf.names = ["b", "c"]
        await chat.send("Two.")
        assert (shelf.asked, shelf.closed) == (2, 0)
    assert seen == [["own", "a"], ["own", "b", "c"]]
    assert shelf.closed == 1


async def test_a_toolset_that_fails_stops_the_run_before_it_begins() -> None:
    """Nothing is kept; a toolset that fails does not keep others from being closed."""
    good, bad = Shelf("a"), Shelf("b")
    bad.problem = ConfigurationError("The shelf is locked.")
    async with perdure.connect("memory://", tools=[bad, good], driver=ScriptedDriver(["done"])) as app:
        chat = await app.open("s")
        with pytest.raises(ConfigurationError, match="locked"):
            await chat.send("One.")
        assert (await chat.session()).version == 1
        bad.problem = None
        assert (await chat.send("Two.")).text == "done"
    assert (good.closed, bad.closed) == (1, 1)


@pytest.mark.parametrize("taken", ["own", "helper"])
async def test_a_name_that_is_taken_is_refused(taken: str) -> None:
    """It is refused if an own tool or a sub-agent has the name."""
    loops = LoopFactory(
        tools=[named("own"), Shelf(taken)], subagents=[AgentDefinition("helper")], driver=ScriptedDriver(["done"])
    )
    with pytest.raises(ConfigurationError, match=f"another tool or agent are both named '{taken}'.*prefix="):
        await loops.connect_tools(AgentDefinition("a"))


async def test_a_loop_is_not_built_without_its_tools() -> None:
    """A loop built by hand raises until its tools are connected; an agent without such tools needs no connection."""
    agent, loops = (
        AgentDefinition("a"),
        LoopFactory(tools=[Shelf("a")], driver=ScriptedDriver([ToolCall("a", {}), "ok"])),
    )
    with pytest.raises(ConfigurationError, match="connect_tools"):
        loops.build(agent)
    loops.build(AgentDefinition("b", tools=()))
    await loops.connect_tools(agent)
    after = await loops.build(agent).run(AgentState.of(agent).with_messages(Message.user("Go.")))
    assert [result.content for message in after.messages for result in message.tool_results] == ["a was called"]
    await loops.aclose()
    with pytest.raises(ConfigurationError, match="connect_tools"):
        loops.build(agent)


async def test_sub_agents_and_branches_have_the_tools_too() -> None:
    """They have them in a session of their own, and beside each other."""
    seen: list[list[str]] = []

    def reply(request: ModelRequest) -> object:
        is_parent = any(spec.name == "helper" for spec in request.tools)
        if is_parent and request.step == 0:
            return ToolCall("helper", {"prompt": "Help."})
        return offered(seen, request)

    tools, helper = [Shelf("a")], AgentDefinition("helper", tools=("a",))
    async with perdure.connect("memory://", tools=tools, subagents=[helper], driver=ScriptedDriver(reply)) as app:
        await (await app.open("s")).send("Go.")
    assert seen == [["a"], ["a", "helper"]]

    seen.clear()
    loops = LoopFactory(tools=tools, driver=ScriptedDriver(lambda request: offered(seen, request)))
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AgentDefinition("s"))
    await runtime.execute(session.id, SendParallel("Go.", loops, configs=["x", "y"], strategy=LongestAnswer()))
    assert seen == [["a"], ["a"]]


def test_what_is_neither_a_tool_nor_a_toolset_is_refused() -> None:
    """A class of toolsets and a command are refused."""
    with pytest.raises(ConfigurationError):
        LoopFactory(tools=[Shelf])
    with pytest.raises(ConfigurationError):
        LoopFactory(tools=["uvx some-server"])  # type: ignore[list-item]  # as the test asks
