"""Loops made from definitions: their model, driver, tools and capabilities."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from perdure import (
    AgentDefinition,
    AgentState,
    ConfigurationError,
    ExecutionBudget,
    ExecutionStatus,
    Interceptor,
    LoopFactory,
    LoopSetup,
    ModelConfig,
    OfflineDriver,
    RetryingDriver,
    StopReason,
    ToolCall,
    UseGuards,
    tool,
)
from perdure.testing.scripted import ScriptedDriver

from .scenes import answer_of, asked


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def drop() -> None:
    """Drop everything."""


@pytest.mark.parametrize(
    ("override", "definition", "created_with", "default", "expected"),
    [
        ("a:state", "b:definition", "c:created", "d:default", "a:state"),
        (None, "b:definition", "c:created", "d:default", "b:definition"),
        (None, None, "c:created", "d:default", "c:created"),
        (None, None, None, "d:default", "d:default"),
        (None, None, None, "offline", "offline"),
    ],
)
def test_the_model_nearest_to_the_state_wins(
    override: str | None, definition: str | None, created_with: str | None, default: str | None, expected: str
) -> None:
    """The state's override wins, then the definition's, then the one given at the creation, then the factory's."""
    loops = LoopFactory(model=default)
    agent = AgentDefinition("agent", model=definition)
    state = AgentState(
        model=override and ModelConfig(override), default_model=created_with and ModelConfig(created_with)
    )
    setup = loops.build(agent, state).setup
    assert setup.model.name == expected
    assert isinstance(setup.driver, OfflineDriver if expected == "offline" else RetryingDriver)


def test_without_a_model_no_loop_is_built() -> None:
    """A model answers only if it was named; the error says what to set."""
    with pytest.raises(ConfigurationError, match=r"No model is named for the agent 'agent'. Name one: connect\("):
        LoopFactory().build(AgentDefinition("agent"))


def test_a_driver_of_ones_own_stands_on_record_by_its_name() -> None:
    """Its runs are not taken for those of a model."""
    setup = LoopFactory(driver=ScriptedDriver([])).build(AgentDefinition("agent")).setup
    assert setup.model.name == "driver:ScriptedDriver"


async def test_an_explicit_driver_overrides_all() -> None:
    """The given driver is asked whatever the model's name, and told which model was meant."""
    driver = ScriptedDriver(["Hello."])
    loop = LoopFactory(driver=driver).build(AgentDefinition("agent", model="openai:gpt-5", system_prompt="Be brief."))
    state = await loop.run(asked())
    assert answer_of(state) == "Hello."
    assert driver.requests[0].model.name == "openai:gpt-5"


async def test_the_offline_model_answers_where_it_is_named() -> None:
    """It needs no key and no network, and calls the tools it has."""
    state = await LoopFactory(tools=[add], model="offline").build(AgentDefinition("agent")).run(asked("What is 2 + 3?"))
    assert "5" in answer_of(state)
    assert [call.name for message in state.messages for call in message.tool_calls] == ["add"]


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        ({}, ["add", "drop"]),
        ({"tools": ()}, []),
        ({"tools": ("drop",)}, ["drop"]),
        ({"tools_deny": ("drop",)}, ["add"]),
    ],
)
async def test_a_model_is_offered_the_tools_of_its_agent(fields: dict[str, Any], offered: list[str]) -> None:
    """None allows all, () none; the model gets names, descriptions and schemas."""
    driver = ScriptedDriver(["Hello."])
    await LoopFactory(driver=driver, tools=[add, drop]).build(AgentDefinition("agent", **fields)).run(asked())
    assert [spec.name for spec in driver.requests[0].tools] == offered
    assert all(spec.description and spec.parameters["type"] == "object" for spec in driver.requests[0].tools)


def test_an_unknown_tool_is_told_when_the_loop_is_built() -> None:
    """A definition that names an unregistered tool is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match=r"No tool is named 'fly'\. Registered are: add\."):
        LoopFactory(tools=[add], model="offline").build(AgentDefinition("agent", tools=("fly",)))


class Polite(Interceptor):
    def before_execution(self, state: AgentState) -> AgentState:
        return state.with_system_prompt("Say please.")


class Courtesy:
    """A capability that adds an interceptor and a tool."""

    def install(self, setup: LoopSetup) -> LoopSetup:
        setup.tools.add(drop)
        return replace(setup, interceptors=(*setup.interceptors, Polite()))


async def test_a_capability_adds_to_the_loop() -> None:
    """Tools, interceptors and guards of a capability work for the agents that name it, and for no others."""
    driver = ScriptedDriver(["Hello."])
    loops = LoopFactory(driver=driver, tools=[add], capabilities={"courtesy": Courtesy()})
    await loops.build(AgentDefinition("polite", capabilities=("courtesy",))).run(asked())
    await loops.build(AgentDefinition("plain")).run(asked())
    polite, plain = driver.requests
    assert (polite.system_prompt, [spec.name for spec in polite.tools]) == ("Say please.", ["add", "drop"])
    assert (plain.system_prompt, [spec.name for spec in plain.tools]) == ("", ["add"])


async def test_use_guards_keeps_to_a_budget_beside_the_agents_own() -> None:
    """The narrower of the two budgets stops the run."""
    script = ScriptedDriver(lambda request: ToolCall("drop"))
    guards = UseGuards(ExecutionBudget(max_steps=2))
    agent = AgentDefinition("agent", budget=ExecutionBudget(max_steps=5), capabilities=("guards",))
    state = await LoopFactory(driver=script, tools=[drop], capabilities={"guards": guards}).build(agent).run(asked())
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STEPS_LIMIT_REACHED)
    assert state.step_count == 2


def test_an_unknown_capability_is_told() -> None:
    """An unregistered capability is a ConfigurationError that lists the registered ones."""
    with pytest.raises(ConfigurationError, match=r"No capability is named 'x'\. Registered are: y\."):
        LoopFactory(capabilities={"y": Courtesy()}, model="offline").build(
            AgentDefinition("agent", capabilities=("x",))
        )


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": "paralel"},
        {"max_result_chars": 0},
        {"tools": [add, add]},
        {"tools": [add], "subagents": [AgentDefinition("add")]},
        {"subagents": [AgentDefinition("my agent"), AgentDefinition("my_agent")]},
        {"interceptors": [Polite]},
    ],
)
def test_a_wrong_setup_is_told_at_once(options: dict[str, Any]) -> None:
    """Mistakes are found when the factory is made, not when an agent runs into them."""
    with pytest.raises(ConfigurationError):
        LoopFactory(**options)


def test_a_function_is_made_a_tool_once_and_no_loop_changes_what_others_have() -> None:
    """Its schema is made with the factory; each loop still has its own registry."""

    def work(hours: int) -> int:
        return hours

    loops = LoopFactory(tools=[work], driver=ScriptedDriver([]), subagents=[AgentDefinition("helper")])
    definition = AgentDefinition("agent")
    first, second = loops.tools_of(definition, 0), loops.tools_of(definition, 0)
    assert first.get("work") is second.get("work") is not None
    assert [each.name for each in first] == ["work", "helper"]
    plain = LoopFactory(tools=[work], driver=ScriptedDriver([]))
    plain.tools_of(definition, 0).add(add)
    assert [each.name for each in plain.tools_of(definition, 0)] == ["work"]
