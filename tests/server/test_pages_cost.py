"""The page of the costs of runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.html_page import CANARY, Page
from tests.server.serving import looking

from perdure import AgentDefinition
from perdure.model.ids import use
from perdure.model.message import Message, ToolCall
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.protocols import ModelReply, ModelRequest
from perdure.server.pages import cost
from perdure.testing import ScriptedDriver

HELPER = AgentDefinition("helper", description="Helps.", model="x:small")


def script(request: ModelRequest) -> ModelReply:
    usage = Usage(1000, 10, cost=0.25) if request.model.name != "x:free" else Usage(7, 3, unpriced_tokens=10)
    asked = [each for each in request.messages if each.role == "user"][-1].text
    calls = [ToolCall("helper", {"prompt": "help"})] if asked == "delegate" and request.step == 0 else []
    return ModelReply(Message.assistant("Done.", tool_calls=calls), InferenceResponse("stop", usage))


def serving(tmp_path: Path) -> Any:
    return looking(f"sqlite:///{tmp_path}/s.db", driver=ScriptedDriver(script), subagents=[HELPER])


async def test_sums_by_day_model_agent_and_session(tmp_path: Path) -> None:
    """A sub-agent's usage counts as the sub-agent's. Only an operator sees owners."""
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        await (await ada.open("a", AgentDefinition("clerk", model="x:large"))).send("delegate")
        await (await served.sessions.of("bob").open("b", AgentDefinition("porter", model="x:large"))).send("hello")
        hers, all_of_it = await Page.get(served.ada, "/cost"), await Page.get(served.operator, "/cost")
    assert "$0.7500" in hers.text  # two calls of the clerk's, one of its helper's
    assert "helper 1 1,000 10 $0.2500" in hers.text
    assert "clerk 1 2,000 20 $0.5000" in hers.text
    assert "porter" not in hers.text
    assert "bob" not in hers.text
    assert "owner" not in hers.text
    assert "$1.00" in all_of_it.text
    assert "bob 1 1,000 10 $0.2500" in all_of_it.text
    assert datetime.now(UTC).date().isoformat() in hers.text
    assert sum(each.tag == "g" for each in hers.elements) == 30


async def test_a_window_of_days(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        long_ago = datetime.now(UTC) - timedelta(days=20)
        with use(clock=lambda: long_ago):
            await (await ada.open("old", AgentDefinition("elder", model="x:large"))).send("hello")
        week, month = await Page.get(served.ada, "/cost?days=7"), await Page.get(served.ada, "/cost?days=30")
        odd = await served.ada.get("/cost?days=8")
    assert "Nothing ran in these 7 days." in week.text
    assert "elder" in month.text
    assert long_ago.date().isoformat() in month.text
    assert odd.status_code == 422


async def test_what_has_no_price_is_not_called_free(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await (await served.sessions.of("ada").open("a", AgentDefinition("clerk", model="x:free"))).send("hello")
        page = await Page.get(served.ada, "/cost")
    assert "without a known price 10" in page.text
    assert "tokens · at most 10 tokens on a day" in page.text
    assert "$0" not in page.text


async def test_a_large_store_is_counted_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions changed last are counted, and the page says so."""
    monkeypatch.setattr(cost, "_SESSIONS", 2)
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        for name in ("a", "b", "c"):
            await (await ada.open(name, AgentDefinition(f"agent-{name}", model="x:large"))).send("hello")
        page = await Page.get(served.ada, "/cost")
    assert "Only the 2 sessions that were changed last are counted." in page.text
    assert "agent-a" not in page.text
    assert "agent-c" in page.text


async def test_nothing_that_was_stored_runs_on_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        hers = served.sessions.of(f"owner {CANARY}")
        chat = await hers.open("a", AgentDefinition(f"agent {CANARY}", model=f"model {CANARY}"))
        await chat.rename(f"name {CANARY}")
        await chat.send("hello")
        page = await Page.get(served.operator, "/cost")
    for what in ("owner", "agent", "name", "model"):
        assert f"{what} {CANARY}" in page.text, what
