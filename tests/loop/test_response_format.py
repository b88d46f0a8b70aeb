"""The requested form of an answer: from a type or a schema, checked, repaired once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from perdure import (
    AgentState,
    ConfigurationError,
    ExecutionBudget,
    ExecutionStatus,
    InvalidData,
    MessageEnd,
    StopReason,
    ToolCall,
    final_value,
    schema_of,
    tool,
)
from perdure.testing.scripted import ScriptedDriver

from .scenes import Heard, answer_of, asked, loop_of


class City(msgspec.Struct):
    name: str
    people: int


@dataclass
class Town:
    name: str
    people: int


class Village(BaseModel):
    name: str
    people: int


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}
GOOD = '{"name": "Bern", "people": 134591}'


async def answer(script: list[Any] | ScriptedDriver, wanted: object = City, *tools: Any, **options: Any) -> AgentState:
    loop = loop_of(script, *tools, **options)
    return await loop.run(asked("A city?").with_response_format(schema_of(wanted)))


@pytest.mark.parametrize("wanted", [City, Town, Village, SCHEMA])
async def test_an_answer_in_the_form_is_a_value(wanted: Any) -> None:
    """A type of any kind, or a JSON schema, goes to the driver as a schema, and the answer comes back as a value."""
    driver = ScriptedDriver([GOOD])
    state = await answer(driver, wanted)
    assert driver.requests[0].response_format == schema_of(wanted)
    assert (state.status, final_value(state)) == (ExecutionStatus.COMPLETED, {"name": "Bern", "people": 134591})
    if isinstance(wanted, type):
        assert final_value(state, wanted) == wanted(name="Bern", people=134591)


async def test_json_in_a_code_fence_is_read_as_well() -> None:
    """Models often wrap their JSON in a fence, and that is accepted."""
    state = await answer([f"```json\n{GOOD}\n```"])
    assert final_value(state, City) == City("Bern", 134591)


@pytest.mark.parametrize("bad", ["Bern, I think.", '{"name": "Bern"}', '{"name": "Bern", "people": "many"}', "", "NaN"])
async def test_a_bad_answer_is_mended_once(bad: str) -> None:
    """The model gets the problem, and answers again in the same run."""
    driver = ScriptedDriver([bad, GOOD])
    heard = Heard()
    state = await answer(driver, events=heard)
    assert (state.status, state.step_count) == (ExecutionStatus.COMPLETED, 2)
    assert final_value(state, City) == City("Bern", 134591)
    complaint = driver.requests[1].messages[-1]
    assert complaint.role == "user"
    assert "does not fit the form" in complaint.text
    assert complaint in [event.message for event in heard.of(MessageEnd)], "it is on record like everything said"


async def test_the_complaint_is_shown_without_traces_too() -> None:
    """It is a trace of this run, so leaving out earlier runs' traces does not drop it."""
    driver = ScriptedDriver(["no", GOOD])
    await answer(driver, keep_traces=False)
    assert "does not fit" in driver.requests[1].messages[-1].text


async def test_a_second_bad_answer_fails_the_run() -> None:
    """There is only one repair round; then the run is failed and has no value."""
    state = await answer(["no", "still no", GOOD])
    assert (state.status, state.stop_reason) == (ExecutionStatus.FAILED, StopReason.ERROR_FORBADE)
    assert "not JSON" in state.errors[0].message
    with pytest.raises(InvalidData, match="not JSON"):
        final_value(state)


async def test_tools_come_before_the_form() -> None:
    """Only a final answer is checked against the form; steps that call tools are not."""

    @tool
    def count() -> int:
        return 134591

    state = await answer([ToolCall("count"), GOOD], City, count)
    assert (state.status, state.step_count) == (ExecutionStatus.COMPLETED, 2)


async def test_a_repair_keeps_to_the_budget() -> None:
    """A repair round counts as a step, and does not exceed the limit."""
    state = await answer(["no", GOOD], agent={"budget": ExecutionBudget(max_steps=1)})
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STEPS_LIMIT_REACHED)


async def test_without_a_form_any_answer_will_do() -> None:
    """Without a form nothing is checked, and a value can still be read."""
    state = await answer(["Bern"], None)
    assert answer_of(state) == "Bern"
    state = await answer(["[1, 2]"], None)
    assert final_value(state, list[int]) == [1, 2]


def test_what_has_no_schema_is_refused() -> None:
    """A type that JSON cannot express is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="neither a JSON schema nor a type"):
        schema_of(object)


async def test_a_form_that_is_no_schema_fails_the_run() -> None:
    """A broken schema is a ConfigurationError of the run."""
    state = await answer([GOOD], {"type": "objekt"})
    assert (state.status, state.errors[0].type) == (ExecutionStatus.FAILED, "ConfigurationError")


def test_a_state_without_an_answer_has_no_value() -> None:
    """Reading the value of a run without an answer raises an error that says so."""
    with pytest.raises(InvalidData, match="no final response"):
        final_value(asked())


async def test_a_value_that_does_not_fit_the_type_is_invalid() -> None:
    """The caller's own type is checked too, beyond the form."""
    state = await answer([GOOD], {"type": "object"})
    with pytest.raises(InvalidData, match="mayor"):
        final_value(state, msgspec.defstruct("Other", [("mayor", str)]))
