"""Several pending calls are settled at once: some approved, some denied, some answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import (
    Chat,
    InvalidData,
    PendingCallsChanged,
    ToolCall,
    Worker,
    connect,
    external_tool,
    tool,
)
from perdure.testing import ScriptedDriver

CALLS = [ToolCall("pay", {"amount": 3}, "p1"), ToolCall("pay", {"amount": 4}, "p2"), ToolCall("weather", {}, "w")]


@asynccontextmanager
async def waiting(url: str, paid: list[int], **options: Any) -> AsyncIterator[Chat]:
    """Open a session with two calls that wait for a person, and one that waits for an answer."""

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return f"paid {amount}"

    driver = ScriptedDriver([CALLS, "Done."])
    tools = [pay, external_tool("weather")]
    async with connect(url, driver=driver, model="scripted", tools=tools, **options) as sessions:
        chat = await sessions.open("a")
        await chat.send("Pay, and look out.")
        yield chat


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/a.db"])
async def test_all_are_settled_in_one_step(url: str, tmp_path: Path) -> None:
    paid: list[int] = []
    async with waiting(url.format(tmp_path), paid) as chat:
        reply = await chat.settle(approve=["p1"], deny={"p2": "Too much."}, answers={"w": "it snows"})
        assert reply.text == "Done."
        results = {each.call_id: each.text for said in await chat.history() for each in said.tool_results}
    assert paid == [3]
    assert (results["p1"], results["w"]) == ("paid 3", "it snows")
    assert "Too much." in results["p2"]


async def test_what_is_not_settled_waits_on() -> None:
    async with waiting("memory://", []) as chat:
        reply = await chat.settle(deny={"p2": "Too much."}, errors={"w": "no window"})
        assert [call.id for call in reply.pending_calls] == ["p1"]


async def test_a_worker_continues(tmp_path: Path) -> None:
    """The decisions are on record in one commit; a second decision is refused."""
    paid: list[int] = []
    async with waiting(f"sqlite:///{tmp_path}/a.db", paid) as chat:
        left = await chat.settle(approve=["p1"], deny={"p2": "No."}, answers={"w": 1}, wait=False)
        assert (left.queued, paid) == (True, [])
        with pytest.raises(PendingCallsChanged, match="somebody has decided already"):
            await chat.settle(approve=["p1"], wait=False)
        async with Worker(chat._sessions) as worker:
            await worker.only("a")
        assert paid == [3]
        assert (await chat.session()).state.final_response.text == "Done."


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, InvalidData),
        ({"approve": ["p1"], "deny": {"p1": "No."}}, InvalidData),
        ({"approve": ["w"]}, InvalidData),
        ({"approve": ["p1"], "answers": {"p2": 1}}, InvalidData),
        ({"approve": ["p1"], "deny": {"other": "No."}}, InvalidData),
        ({"deny": {"p1": " "}}, InvalidData),
        ({"approve": ["p1"], "deny": {"0" * 64: "No."}}, PendingCallsChanged),
    ],
)
async def test_nothing_changes_if_one_cannot_be_settled(given: dict[str, Any], error: type[Exception]) -> None:
    paid: list[int] = []
    async with waiting("memory://", paid) as chat:
        with pytest.raises(error):
            await chat.settle(**given)
        assert paid == []
        assert len((await chat.view()).pending_calls) == 3
