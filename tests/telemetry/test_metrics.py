"""The metrics of runs and refusals, and when stores are read for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.telemetry.watching import Watching
from tests.waiting import until

import perdure
from perdure import ChangeModel, DriverError, InferenceResponse, Message, ModelReply, RunFailed, ToolCall, Usage, tool
from perdure.testing import Delay, ScriptedDriver


@tool
async def note() -> str:
    """Write something down."""
    return "noted"


def by(points: list[Any], name: str) -> dict[Any, Any]:
    """Return points by one of their attributes."""
    return {point.attributes.get(name): point for point in points}


async def test_tokens_and_durations_of_model_calls() -> None:
    """Every model call is a measurement of its tokens and of its time, by provider and model."""
    seen = Watching()
    reply = ModelReply(Message.assistant("done"), InferenceResponse("stop", Usage(100, 7, cost=0.5), "gpt-5-2026"))
    driver = ScriptedDriver([ToolCall("note"), reply])
    async with perdure.connect(
        "memory://", driver=driver, model="openai:gpt-5", tools=[note], telemetry=seen.telemetry
    ) as sessions:
        await (await sessions.open()).send("go")
    tokens = seen.points("gen_ai.client.token.usage")
    answered = [each for each in tokens if each.attributes["gen_ai.response.model"] == "gpt-5-2026"]
    assert {each.attributes["gen_ai.token.type"]: each.sum for each in answered} == {"input": 100, "output": 7}
    assert dict(answered[0].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.response.model": "gpt-5-2026",
        "gen_ai.token.type": "input",
    }
    assert answered[0].explicit_bounds[:3] == (1, 4, 16)
    durations = by(seen.points("gen_ai.client.operation.duration"), "gen_ai.operation.name")
    assert durations.keys() == {"chat"}
    assert durations["chat"].explicit_bounds[0] == 0.01
    (cost,) = seen.points("perdure.cost")
    assert cost.value == 0.5
    (run,) = seen.points("perdure.run.duration")
    assert run.count == 1
    assert dict(run.attributes) == {"gen_ai.agent.name": "assistant", "perdure.run.status": "completed"}


async def test_failures_are_measured_by_their_type() -> None:
    """A model call that fails has a duration with the error's type, and no tokens."""
    seen = Watching()
    driver = ScriptedDriver([DriverError("no")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        with pytest.raises(RunFailed):
            await (await sessions.open()).send("go")
    assert by(seen.points("gen_ai.client.operation.duration"), "error.type").keys() == {"DriverError"}
    assert by(seen.points("perdure.run.duration"), "error.type").keys() == {"DriverError"}
    assert seen.points("gen_ai.client.token.usage") == []


async def test_refusals_are_counted_once_each() -> None:
    """A caller that does not get a session is counted: refused, queued, or too late with a change."""
    seen = Watching()
    driver = ScriptedDriver([Delay(0.3, "x")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        run = await chat.start("go")
        await until(lambda: driver.requests)
        with pytest.raises(perdure.SessionBusy):
            await chat.send("too early")
        await chat.send("later", when_busy="queue")
        await run.result()
        await sessions.runtime.idle()
        with pytest.raises(perdure.SessionConflict):
            await sessions.expecting(1).execute(chat.id, ChangeModel("openai:gpt-5"))
    counts = {kind: point.value for kind, point in by(seen.points("perdure.session.refusals"), "error.type").items()}
    assert counts == {"SessionBusy": 2, "SessionConflict": 1}


async def test_the_store_is_asked_only_when_metrics_are_collected() -> None:
    """The queue's depth is read from the store at collection, from any thread, and at no other time."""
    seen = Watching()
    async with perdure.connect("memory://", driver=ScriptedDriver(["x"]), telemetry=seen.telemetry) as sessions:
        chat = await sessions.open("a")
        store: Any = sessions.store
        asked = 0
        waiting = store.waiting

        async def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return await waiting(*arguments, **options)

        store.waiting = counted
        await chat.send("go")
        await sessions.enqueue("a", "one")
        await sessions.enqueue("a", "two")
        assert asked == 0
        (depth,) = await asyncio.to_thread(seen.points, "perdure.queue.depth")
        assert (depth.value, dict(depth.attributes)) == (2, {"perdure.store": "MemoryStore"})
        assert asked == 1
    assert seen.points("perdure.queue.depth") == [], "a store that is closed is not asked"


async def test_the_store_is_not_waited_for_in_its_own_loop() -> None:
    """Collected in the loop's own thread, the depth is the last one found, since that thread cannot wait."""
    seen = Watching()
    async with perdure.connect("memory://", driver=ScriptedDriver(["x"]), telemetry=seen.telemetry) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "one")
        assert seen.points("perdure.queue.depth") == []
        await asyncio.sleep(0.05)
        (depth,) = seen.points("perdure.queue.depth")
        assert depth.value == 1


async def test_claims_are_told_by_their_state() -> None:
    """Sessions that are running are counted apart from those whose claim has lapsed."""
    seen = Watching()
    driver = ScriptedDriver([Delay(0.3, "x")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        run = await chat.start("go")
        await until(lambda: driver.requests)
        claims = by(await asyncio.to_thread(seen.points, "perdure.claims"), "perdure.claim.state")
        await run.result()
    assert {state: point.value for state, point in claims.items()} == {"held": 1, "lapsed": 0}
