"""Answers in the form of a type: on a send, in a stream, and of an agent. The schema is stored, never the type."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, field_validator
from tests.loop.drivers import wire
from tests.loop.drivers.asking import KEY, KEY_ENV
from tests.loop.drivers.loopback import Loopback, Stream
from tests.waiting import until

import perdure
from perdure import AgentDefinition, ExecutionBudget, InvalidData, Message, ModelConfig, ToolCall, tool
from perdure.errors import RunFailed, RunInterrupted
from perdure.loop.response_format import is_complaint
from perdure.testing import Delay, ScriptedDriver

GOOD = '{"name": "Bern", "people": 134591}'
PLAIN = {"name": "Bern", "people": 134591}


class City(msgspec.Struct):
    name: str
    people: int


@dataclass
class Town:
    name: str
    people: int


class Place(TypedDict):
    name: str
    people: int


class Village(BaseModel):
    name: str
    people: int

    @field_validator("name")
    @classmethod
    def _is_short(cls, name: str) -> str:
        if len(name) > 4:
            raise ValueError("a name has at most four letters")
        return name


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
}


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/sessions"}
    return urls[request.param]


@pytest.fixture
def lasting(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


@pytest.mark.parametrize(
    ("output", "answer", "value"),
    [
        (City, GOOD, City("Bern", 134591)),
        (Town, GOOD, Town("Bern", 134591)),
        (Place, GOOD, PLAIN),
        (Village, GOOD, Village(name="Bern", people=134591)),
        (list[Village], f"[{GOOD}]", [Village(name="Bern", people=134591)]),
        (SCHEMA, GOOD, PLAIN),
        ({}, "[1, null]", [1, None]),
        (list[int], "[1, 2]", [1, 2]),
        (dict[int, str], '{"1": "a"}', {1: "a"}),
        (Literal["yes", "no"], '"yes"', "yes"),
        (City | None, "null", None),
        (bool, "```json\ntrue\n```", True),
    ],
    ids=repr,
)
async def test_the_value_has_the_type_that_was_asked_for(output: Any, answer: str, value: Any) -> None:
    """It works for every kind of type; for a JSON schema the value is plain data."""
    async with perdure.connect("memory://", driver=ScriptedDriver([answer])) as sessions:
        reply = await (await sessions.open()).send("Which city?", output=output)
        asked_once = await sessions.run("Which city?", output=output)
    assert (reply.value, type(reply.value)) == (value, type(value))
    assert asked_once.value == value


async def test_an_output_holds_for_one_run_only(url: str) -> None:
    """The next send asks for no form, and the form is not kept in the session's context."""
    driver = ScriptedDriver([GOOD])
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        await chat.send("Which city?", output=City)
        during = await chat.session()
        await chat.send("And now?")
        after = await chat.session()
    assert [request.response_format is None for request in driver.requests] == [False, True]
    assert during.state.context.response_format is None
    assert after.state.response_format is None


async def test_a_stream_has_a_value_too() -> None:
    """The last chunk's reply has it."""
    async with perdure.connect("memory://", driver=ScriptedDriver([GOOD])) as sessions:
        chunks = [chunk async for chunk in (await sessions.open()).stream("Which city?", output=City)]
    assert chunks[-1].reply is not None
    assert chunks[-1].reply.value == City("Bern", 134591)


async def test_blocking_verbs_have_a_value_too() -> None:
    """The blocking face passes the type on."""
    with perdure.connect_blocking("memory://", driver=ScriptedDriver([GOOD])) as sessions:
        assert sessions.open().send("Which city?", output=City).value == City("Bern", 134591)


async def test_one_repair_then_the_run_fails_with_the_problem() -> None:
    """The first bad answer is repaired; after the second, RunFailed says what is wrong and where."""
    async with perdure.connect("memory://", driver=ScriptedDriver(['{"name": 5}', GOOD])) as sessions:
        assert (await (await sessions.open()).send("Which city?", output=City)).value.name == "Bern"
    script = ["Bern!", '{"name": "Bern", "people": "many"}', GOOD]
    driver = ScriptedDriver(script)
    async with perdure.connect("memory://", driver=driver) as sessions:
        with pytest.raises(RunFailed, match=r"'many' is not of type 'integer' \(at \$\.people\)"):
            await (await sessions.open()).send("Which city?", output=City)
    assert len(driver.requests) == 2


async def test_what_only_the_type_can_check_is_mended_as_well() -> None:
    """A validator of a pydantic model, which is not in its schema, counts as much as the schema."""
    driver = ScriptedDriver(['{"name": "Geneva", "people": 1}', GOOD])
    async with perdure.connect("memory://", driver=driver) as sessions:
        reply = await (await sessions.open()).send("Which city?", output=Village)
    assert reply.value == Village(name="Bern", people=134591)
    assert "a name has at most four letters (at $.name)" in driver.requests[1].messages[-1].text


async def test_a_run_is_mended_once_also_if_it_was_killed_in_between(lasting: str) -> None:
    """The form and the complaint are on record with the run: after a recovery it does not complain again."""
    first = ScriptedDriver(["no", Delay(60, "never")])
    async with perdure.connect(lasting, driver=first, grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("Which city?", output=City, key="k"))
        await until(lambda: len(first.requests) == 2)
    with pytest.raises(RunInterrupted):
        await run
    second = ScriptedDriver(["", "still no", GOOD])
    async with perdure.connect(lasting, driver=second) as sessions:
        assert (await sessions.recover()).resumed == ("s",)
        session = await sessions.session("s")
    assert second.requests[0].response_format == first.requests[0].response_format is not None
    assert (len(second.requests), sum(map(is_complaint, session.state.messages))) == (1, 1)
    assert "not JSON" in session.state.errors[-1].message


async def test_a_recovered_run_has_the_value_that_was_asked_for(lasting: str) -> None:
    """Its key returns the value in the type of the caller that asks again."""
    slow = ScriptedDriver([Delay(60, "never")])
    async with perdure.connect(lasting, driver=slow, grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("Which city?", output=City, key="k"))
        await until(lambda: bool(slow.requests))
    with pytest.raises(RunInterrupted):
        await run
    async with perdure.connect(lasting, driver=ScriptedDriver([GOOD])) as sessions:
        reply = await sessions.send("s", "Which city?", output=City, key="k")
        assert reply.value == City("Bern", 134591)
        assert (await sessions.send("s", "Which city?", output=City, key="k")).session.version == reply.session.version
        for other in (None, Town, {**SCHEMA, "title": "Town"}):
            with pytest.raises(InvalidData, match="used for another message or output"):
                await sessions.send("s", "Which city?", output=other, key="k")


async def test_a_schema_is_the_same_whatever_the_order_of_its_keys(lasting: str) -> None:
    """A key recognises its request if an equal schema has its keys in another order."""
    turned = dict(reversed(SCHEMA.items()))
    driver = ScriptedDriver([GOOD])
    async with perdure.connect(lasting, driver=driver) as sessions:
        chat = await sessions.open("s")
        await chat.send("Which city?", output=SCHEMA, key="k")
        await chat.send("Which city?", output=turned, key="k")
    assert len(driver.requests) == 1


async def test_an_approved_run_goes_on_with_its_output(url: str) -> None:
    """The form waits with the run; after the approval the value is plain data, since no type was given there."""

    @tool(needs_approval=True)
    def count() -> int:
        return 134591

    driver = ScriptedDriver([ToolCall("count"), "no", GOOD])
    async with perdure.connect(url, driver=driver, tools=[count]) as sessions:
        chat = await sessions.open("s")
        waiting = await chat.send("Which city?", output=City, key="k")
        with pytest.raises(InvalidData, match="no final response"):
            _ = waiting.value
        assert (await chat.approve()).value == PLAIN
        assert (await chat.send("Which city?", output=City, key="k")).value == City("Bern", 134591)
    assert all(request.response_format == perdure.schema_of(City) for request in driver.requests)


async def test_a_queued_message_keeps_its_output(lasting: str) -> None:
    """It is sent when the run before it ends, in the form that was asked for."""
    go = asyncio.Event()

    async def wait() -> str:
        await go.wait()
        return "done"

    def script(request: Any) -> Any:
        if request.messages[-1].text == "first":
            return ToolCall("wait")
        return GOOD if request.response_format else "Done."

    driver = ScriptedDriver(script)
    async with perdure.connect(lasting, driver=driver, tools=[wait]) as sessions:
        chat = await sessions.open("s")
        first = asyncio.ensure_future(chat.send("first"))
        await until(lambda: bool(driver.requests))
        left = await chat.send("Which city?", output=City, when_busy="queue", key="k")
        assert left.queued
        with pytest.raises(InvalidData, match="it has no answer yet"):
            _ = left.value
        with pytest.raises(InvalidData, match=r"\$\.output"):
            await chat.send("Which city?", output=City, when_busy="steer")
        go.set()
        await first
        await sessions.runtime.idle()  # the queued message is being sent
        assert (await chat.send("Which city?", output=City, key="k")).value == City("Bern", 134591)
    assert [request.response_format is None for request in driver.requests] == [True, True, False]


async def test_an_agent_has_an_output_of_its_own(url: str) -> None:
    """Every run of it has the form, unless a send asks for another; the value has the type it was opened with."""
    agent = AgentDefinition("guide", output=City)
    driver = ScriptedDriver(lambda request: GOOD if "properties" in repr(request.response_format) else "[1]")
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s", agent)
        assert (await chat.send("Which city?")).value == City("Bern", 134591)
        assert (await chat.send("Which numbers?", output=list[int])).value == [1]
        assert (await chat.send("Which city?")).value == City("Bern", 134591)
        assert (await sessions.run("Which city?", agent)).value == City("Bern", 134591)


async def test_after_a_restart_the_value_is_plain_data_until_the_type_is_given_again(lasting: str) -> None:
    """The store keeps the schema of an agent's output alone."""
    agent = AgentDefinition("guide", output=City)
    for _ in range(2):
        async with perdure.connect(lasting, driver=ScriptedDriver([GOOD])) as sessions:
            await sessions.open("s", agent)
        async with perdure.connect(lasting, driver=ScriptedDriver([GOOD])) as sessions:
            chat = await sessions.open("s")
            assert (await chat.send("Which city?")).value == PLAIN
            assert (await chat.session()).definition == agent
            await sessions.open("s", agent)
            assert (await chat.send("Which city?")).value == City("Bern", 134591)


async def test_a_type_that_is_known_is_not_forgotten_for_its_schema() -> None:
    """Another caller may open the agent as it is stored, or as a file defines it."""
    agent = AgentDefinition("guide", output=City)
    async with perdure.connect("memory://", driver=ScriptedDriver([GOOD])) as sessions:
        chat = await sessions.open("s", agent)
        await sessions.open("s", AgentDefinition.from_dict(agent.to_dict()))
        assert (await chat.send("Which city?")).value == City("Bern", 134591)


async def test_another_output_is_another_definition(lasting: str) -> None:
    """Opening a session with another output than before raises an error."""
    async with perdure.connect(lasting, driver=ScriptedDriver(["[1]"])) as sessions:
        await sessions.open("s", AgentDefinition("guide", output=City))
        with pytest.raises(perdure.SessionConflict, match="output differ"):
            await sessions.open("s", AgentDefinition("guide", output=list[int]))
        chat = await sessions.open("s", AgentDefinition("guide", output=list[int]), on_change="take")
        assert (await chat.send("Which?")).value == [1]


def test_a_definition_with_an_output_is_a_value() -> None:
    """A type and its schema make the same definition, which comes back from JSON without the type."""
    agent = AgentDefinition("guide", output=City)
    assert agent == AgentDefinition("guide", output=perdure.schema_of(City)) != AgentDefinition("guide")
    assert AgentDefinition.from_dict(agent.to_dict()) == agent
    assert msgspec.structs.replace(agent, label="Guide").output.kind is City
    assert not hasattr(AgentDefinition.from_dict(agent.to_dict()).output, "kind")
    with pytest.raises(TypeError, match="frozen"):
        agent.output["type"] = "string"


async def test_an_agent_with_a_broken_schema_is_refused_before_anything_is_asked(lasting: str) -> None:
    """It is refused when it is opened, or at the first send if an earlier release has accepted it."""
    driver = ScriptedDriver([GOOD])
    broken = AgentDefinition("guide", output={"type": "objekt"})
    async with perdure.connect(lasting, driver=driver) as sessions:
        with pytest.raises(InvalidData, match=r"not a JSON schema.*\$\.output"):
            await sessions.open("s", broken)
        await sessions.runtime.create(broken, session_id="t")
        with pytest.raises(perdure.ConfigurationError, match="not a JSON schema"):
            await sessions.send("t", "Which city?")
        assert (await sessions.info("t")).version == 1
    assert driver.requests == []


async def test_a_schema_is_never_fetched() -> None:
    """A schema that refers to another one elsewhere is refused: checking an answer asks no server."""
    async with perdure.connect("memory://", driver=ScriptedDriver([GOOD])) as sessions:
        chat = await sessions.open()
        for reference in ("http://127.0.0.1:9/schema.json", "file:///etc/passwd", "other.json"):
            with pytest.raises(InvalidData, match=r"\$defs"):
                await chat.send("Which city?", output={"properties": {"a": {"$ref": reference}}})
        with pytest.raises(RunFailed, match="not in it"):
            await chat.send("Which city?", output={"$ref": "#/$defs/City"})


async def test_a_subagent_answers_its_caller_in_its_own_form() -> None:
    """The sub-agent's answer does not have the form of its caller's, nor the other way round."""
    guide = AgentDefinition("guide", description="Knows cities.", output=City)
    seen: dict[str, Mapping[str, Any] | None] = {}

    def script(request: Any) -> Any:
        if request.messages[0].text == "Sum up.":
            seen["caller"] = request.response_format
            return ToolCall("guide", {"prompt": "Which city?"}) if request.step == 0 else "[1]"
        seen["guide"] = request.response_format
        return GOOD

    async with perdure.connect("memory://", driver=ScriptedDriver(script), subagents=[guide]) as sessions:
        assert (await (await sessions.open()).send("Sum up.", output=list[int])).value == [1]
    assert seen == {"caller": perdure.schema_of(list[int]), "guide": perdure.schema_of(City)}


async def test_a_repair_keeps_to_the_budget_of_the_agent() -> None:
    """A run that is stopped before its repair has no value, and says why."""
    agent = AgentDefinition("guide", output=City, budget=ExecutionBudget(max_steps=1))
    async with perdure.connect("memory://", driver=ScriptedDriver(["no", GOOD])) as sessions:
        reply = await (await sessions.open("s", agent)).send("Which city?")
    assert reply.stop_reason == "steps_limit_reached"
    with pytest.raises(InvalidData, match="not JSON"):
        _ = reply.value


async def test_a_fork_does_not_inherit_a_runs_output(url: str) -> None:
    """The form belonged to the run; the fork's next run asks for none."""
    driver = ScriptedDriver([GOOD])
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        await chat.send("Which city?", output=City)
        await (await chat.fork("t")).send("Go on.")
    assert driver.requests[1].response_format is None


async def test_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider is sent the schema for this run alone; a bad answer goes back to it with the complaint."""
    monkeypatch.setenv(KEY_ENV, KEY)
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    replies = [Stream(wire.chat({"content": text}, usage=usage)) for text in ('{"name": "Bern"}', GOOD, "Bye.")]
    async with Loopback(*replies) as server:
        model = ModelConfig("openai:gpt-5", base_url=f"{server.url}/v1", api_key_env=KEY_ENV)
        async with perdure.connect("memory://", model=model) as sessions:
            chat = await sessions.open()
            reply = await chat.send("Which city?", output=City)
            await chat.send("Bye.")
        first, second, third = (request.body for request in server.requests)
    assert reply.value == City("Bern", 134591)
    assert first["response_format"]["json_schema"]["schema"]["properties"].keys() == {"name", "people"}
    assert "'people' is a required property" in second["messages"][-1]["content"]
    assert "response_format" not in third


async def test_the_offline_model_repeats_json() -> None:
    """The offline model only repeats, so it answers in a form only if the message contains the JSON."""
    async with perdure.connect("memory://", model="offline") as sessions:
        chat = await sessions.open()
        assert (await chat.send(f"Repeat this: {GOOD}", output=City)).value == City("Bern", 134591)
        with pytest.raises(RunFailed, match="answers in no response format"):
            await chat.send("Which city?", output=City)


async def test_what_was_sent_and_said_is_stored_as_json(lasting: str) -> None:
    """The run's record names the schema, and the answer is a message like any other."""
    async with perdure.connect(lasting, driver=ScriptedDriver([GOOD])) as sessions:
        chat = await sessions.open("s")
        await chat.send("Which city?", output=City)
        [start] = [event async for event in chat.events() if isinstance(event, perdure.AgentStart)]
        assert start.response_format == perdure.schema_of(City)
        assert [message.text for message in await chat.history()] == ["Which city?", GOOD]


@pytest.mark.parametrize("output", [5, "City", [City], ("a",), b"", {"a": {1}}, {"type": "objekt"}, {1: 2}], ids=repr)
async def test_what_is_no_output_changes_nothing(output: Any) -> None:
    """InvalidData names the argument, and nothing is sent."""
    async with perdure.connect("memory://", driver=ScriptedDriver([GOOD])) as sessions:
        chat = await sessions.open()
        with pytest.raises(InvalidData, match=r"\$\.output"):
            await chat.send(Message.user("Which city?"), output=output)
        assert await chat.length() == 0


async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """`examples/structured_output.py` prints the sentence about Bern; mypy checks the types in it."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "structured_output.py"))
    await example["main"]()
    assert "Bern has 134,591 people" in capsys.readouterr().out
