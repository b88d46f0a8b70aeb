"""An idempotency key protects a result: it follows its run, and a run without a result may run again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import DriverError, InvalidData, RunFailed, SessionBusy, StopReason, ToolCall, tool
from perdure.testing.scripted import Delay, ScriptedDriver


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/d"}
    return places[request.param]


async def test_a_key_follows_its_run_through_an_approval(url: str) -> None:
    """Before the decision it returns the waiting calls, and after it the run's answer."""
    paid: list[int] = []
    pay = tool(name="pay", needs_approval=True)(lambda: paid.append(1))

    def script(request: Any) -> Any:
        return ToolCall("pay") if request.step == 0 else "Paid."

    async with perdure.connect(url, driver=ScriptedDriver(script), tools=[pay]) as sessions:
        chat = await sessions.open("s")
        for _ in range(2):
            assert [call.name for call in (await chat.send("Pay.", key="k")).pending_calls] == ["pay"]
        await chat.approve()
        for _ in range(2):
            reply = await chat.send("Pay.", key="k")
            assert (reply.text, reply.pending_calls) == ("Paid.", ())
        assert paid == [1]
        with pytest.raises(InvalidData, match="another message"):
            await chat.send("Pay twice.", key="k")


async def test_a_key_whose_run_failed_runs_again(url: str) -> None:
    """The error says to send again. After that the key keeps its result."""
    fails = [DriverError("no"), DriverError("not yet")]
    driver = ScriptedDriver(lambda request: fails.pop() if fails else "Done.")
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        for _ in range(2):
            with pytest.raises(RunFailed):
                await chat.send("Go.", key="k")
        for _ in range(2):
            assert (await chat.send("Go.", key="k")).text == "Done."
        assert len(driver.requests) == 3


async def test_a_key_whose_run_was_cancelled_runs_again(url: str) -> None:
    """A cancelled run has no result to keep."""
    driver = ScriptedDriver(lambda request: Delay(30, "never") if len(driver.requests) == 1 else "Done.")
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Go.", key="k"))
        await until(lambda: driver.requests)
        with pytest.raises(SessionBusy):
            await chat.send("Go.", key="another")
        second = asyncio.ensure_future(chat.send("Go.", key="k"))  # it waits for the same run
        await asyncio.sleep(0.1)
        await chat.cancel()
        assert (await run).stop_reason is (await second).stop_reason is StopReason.USER_REQUESTED
        assert (await chat.send("Go.", key="k")).text == "Done."


async def test_a_message_beside_an_injection_is_sent(url: str) -> None:
    """Nothing was spent when the version moved: the session is loaded again."""
    async with perdure.connect(url, driver=ScriptedDriver(lambda request: "Yes.")) as sessions:
        chat = await sessions.open("s")
        for number in range(20):
            note = {"role": "user", "content": f"By the way {number}."}
            reply, _ = await asyncio.gather(chat.send(f"Well {number}?"), chat.inject(note), return_exceptions=True)
            assert isinstance(reply, perdure.Reply), reply
