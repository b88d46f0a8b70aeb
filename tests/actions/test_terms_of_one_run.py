"""Options of a single run, a message taken back by its key, and tools of a run without a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure import InputRefused, InvalidData, ModelOptions, ToolCall, connect, external_tool, tool
from perdure.testing import ScriptedDriver

WEATHER = external_tool("weather", "Look at the weather.")
CALLS = [ToolCall("pay", {"amount": 3}, id="p1"), ToolCall("pay", {"amount": 9}, id="p2"), ToolCall("weather", id="w1")]


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def _reply(request: Any) -> Any:
    if request.step == 0:
        return CALLS
    return " | ".join(message.text for message in request.messages if message.role == "tool")


async def test_a_message_is_taken_back_by_its_key() -> None:
    """It must be the next: a message behind another stays in the inbox."""
    async with connect("memory://", driver=ScriptedDriver(["Hello."])) as sessions:
        chat = await sessions.open("a")
        first = await sessions.enqueue("a", "one", key="k1")
        await sessions.enqueue("a", "two", key="k2")
        assert await sessions.drop_waiting("a", key="k2") == []
        assert [each.key for each in await sessions.drop_waiting("a", key="k1")] == ["k1"]
        with pytest.raises(InputRefused):
            await first.reply(timeout=5)
        assert [each.key for each in await sessions.drop_waiting(chat.id)] == ["k2"]


async def test_a_run_without_a_session_has_tools_and_instructions() -> None:
    """It ends with the call, and no session waits for it."""
    driver = ScriptedDriver([ToolCall("weather", id="w1")])
    async with connect("memory://", driver=driver) as sessions:
        history = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Weather?"}]
        reply = await sessions.run(history, any_role=True, external_tools=[WEATHER], instructions="Be brief.")
        assert [call.id for call in reply.pending_calls] == ["w1"]
        assert driver.requests[0].system_prompt.endswith("Be brief.")
        assert len(await sessions.headers()) == 0


async def test_one_run_asks_the_model_in_its_own_way(tmp_path: Path) -> None:
    """The options hold also when another process continues the run, and for a resend; not for the next run."""
    url, driver = f"sqlite:///{tmp_path / 's.db'}", ScriptedDriver(_reply)
    options = ModelOptions(temperature=0.2, top_p=0.9, max_tokens=77, thinking="low")
    async with connect(url, driver=driver, tools=[WEATHER, pay]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go", model_options=options, key="k")
        with pytest.raises(InvalidData, match="used for another"):
            await chat.send("Go", key="k")
    async with connect(url, driver=driver, tools=[WEATHER, pay]) as sessions:
        chat = await sessions.open("a")
        await chat.settle(approve=["p1", "p2"], answers={"w1": "rain"})
        await chat.retry()
        await chat.deny("no")
        await chat.send("And now?")
    models = [request.model for request in driver.requests]
    asked = [(each.temperature, each.settings.get("top_p"), each.max_tokens, each.thinking) for each in models]
    assert asked == [(0.2, 0.9, 77, "low")] * 4 + [(None,) * 4]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"max_tokens": 0}, {"thinking": " "}, 7])
async def test_options_that_no_model_takes_are_refused(wrong: Any) -> None:
    async with connect("memory://", driver=ScriptedDriver(["Hello."])) as sessions:
        await sessions.open("a")
        with pytest.raises(InvalidData):
            await sessions.enqueue("a", "one", model_options=wrong)
