"""An answer that is cut off: its text so far is kept, marked as incomplete, with its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import AgentDefinition, DriverError, ExecutionBudget, RunFailed, StopReason
from perdure.testing.scripted import Chunks, Delay, ScriptedDriver

HALF = Chunks(["Once upon ", "a time", Delay(60, "there was more")])


async def told(stream: AsyncIterator[str], pieces: int) -> list[str]:
    return [await anext(stream) for _ in range(pieces)]


async def assert_kept(chat: Any, driver: ScriptedDriver) -> None:
    """Assert that the half answer is the last message, counted, and shown to the model on its next call."""
    session = await chat.session()
    last = session.state.messages[-1]
    assert (last.role, last.text, last.metadata["incomplete"]) == ("assistant", "Once upon a time", True)
    assert session.state.usage.output_tokens > 0
    assert session.state.usage.input_tokens > 0
    assert [message.text for message in await chat.history()] == ["Tell me.", "Once upon a time"]
    (loop,) = (await chat.record()).loops
    assert (await chat._sessions.loop(chat.id, loop.loop_id)).messages[-1] == last
    assert (await chat.send("Go on.")).text == "The end."
    assert [message.text for message in driver.requests[-1].messages][:2] == ["Tell me.", "Once upon a time"]


def tells_half(request: Any) -> Any:
    return HALF if len(request.messages) == 1 else "The end."


@pytest.mark.parametrize("how", ["cancel", "task", "left"])
async def test_what_was_streamed_before_a_stop_is_kept(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped from elsewhere, cancelled with its task, or abandoned by its listener."""
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 0.01)
    driver = ScriptedDriver(tells_half)
    async with perdure.connect("memory://", driver=driver) as sessions:
        chat = await sessions.open("s")
        stream = chat.stream("Tell me.")
        assert await told(stream, 2) == ["Once upon ", "a time"]
        if how == "cancel":
            await chat.cancel()
            (last,) = [chunk async for chunk in stream]
            assert (last.reply.text, last.reply.stop_reason) == ("Once upon a time", StopReason.USER_REQUESTED)
        elif how == "task":
            rest = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
        else:
            await stream.aclose()  # type: ignore[attr-defined]
        await assert_kept(chat, driver)


async def test_what_was_streamed_before_the_time_limit_is_kept() -> None:
    """The budget's time ends the call, and the reply has the text so far."""
    driver = ScriptedDriver(tells_half)
    agent = AgentDefinition("agent", budget=ExecutionBudget(max_seconds=0.2))
    async with perdure.connect("memory://", driver=driver) as sessions:
        chat = await sessions.open("s", agent)
        reply = await chat.send("Tell me.")
        assert (reply.text, reply.stop_reason) == ("Once upon a time", StopReason.TIME_LIMIT_REACHED)
        await assert_kept(chat, driver)


async def test_what_was_streamed_before_a_failure_is_kept() -> None:
    """A provider fails for good in the middle of its answer."""
    broken = Chunks(["Once upon ", "a time", DriverError("the line is dead")])
    driver = ScriptedDriver(lambda request: broken if len(request.messages) == 1 else "The end.")
    async with perdure.connect("memory://", driver=driver) as sessions:
        chat = await sessions.open("s")
        with pytest.raises(RunFailed, match="the line is dead"):
            await chat.send("Tell me.")
        await assert_kept(chat, driver)


async def test_nothing_is_kept_of_an_answer_that_had_not_begun() -> None:
    """A stop before the first word leaves no empty message."""
    driver = ScriptedDriver(lambda request: Delay(60, "never"))
    async with perdure.connect("memory://", driver=driver) as sessions:
        chat = await sessions.open("s")
        task = asyncio.ensure_future(chat.send("Tell me."))
        await until(lambda: driver.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [message.text for message in (await chat.session()).state.messages] == ["Tell me."]
