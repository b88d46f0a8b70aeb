"""Settling calls by several names: no call is settled in two ways, and wrong forms are refused."""

from __future__ import annotations

from typing import Any

import pytest

import perdure
from perdure import InvalidData, ToolCall
from perdure.testing import ScriptedDriver

WEATHER = perdure.external_tool("weather")


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


CALLS = [ToolCall("weather", {}, id="w"), ToolCall("refund", {"order": 7}, id="r")]


async def waiting(sessions: perdure.Sessions) -> perdure.Reply[Any]:
    chat = await sessions.open("a")
    return await chat.send("go")


def connected() -> perdure.Sessions:
    return perdure.connect("memory://", driver=ScriptedDriver([CALLS, "done"]), tools=[WEATHER, refund])


@pytest.mark.parametrize(
    "given",
    [
        {"answers": {"w": 1}, "errors": {"w": "no"}},
        {"answers": {"w": 1, "DIGEST": 2}},
        {"answers": {"w": 1}, "errors": {"DIGEST": "no"}},
        {"answers": {"w": 1}, "deny": {"w": "no"}},
        {"approve": ["r"], "deny": {"r": "no"}},
        {"deny": ["r"]},
        {"deny": {"r": " "}},
        {"deny": {7: "no"}},
        {"approve": "r"},
    ],
)
async def test_a_call_is_settled_in_one_way(given: dict[str, Any]) -> None:
    async with connected() as sessions:
        reply = await waiting(sessions)
        digest = next(call.digest for call in reply.pending_calls if call.name == "weather")
        for name, value in given.items():
            if isinstance(value, dict):
                given[name] = {digest if call == "DIGEST" else call: result for call, result in value.items()}
        with pytest.raises(InvalidData):
            await sessions.settle("a", **given)
        assert (await sessions.info("a")).version == reply.session.version
        assert (await sessions.settle("a", approve=["r"], answers={"w": 1})).text == "done"


async def test_an_answer_by_two_names_is_refused() -> None:
    async with connected() as sessions:
        reply = await waiting(sessions)
        digest = next(call.digest for call in reply.pending_calls if call.name == "weather")
        with pytest.raises(InvalidData):
            await sessions.answer("a", {"w": 1, digest: 2})
