"""The page of the work that is left to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.html_page import CANARY, Form, Page
from tests.server.serving import Served, looking

import perdure
from perdure import AgentDefinition
from perdure.actions.parking import ParkSession
from perdure.model.message import Message, ToolCall
from perdure.protocols import ModelRequest
from perdure.testing import ScriptedDriver

LATER = datetime.now(UTC) + timedelta(days=3)


@perdure.tool
async def hang() -> str:
    """Never come back."""
    await asyncio.sleep(3600)
    return ""


def script(request: ModelRequest) -> Message:
    is_first = request.step == 0 and request.messages[-1].text == "hang"
    return Message.assistant(tool_calls=[ToolCall("hang")]) if is_first else Message.assistant("Done.")


def serving(tmp_path: Path) -> Any:
    return looking(f"sqlite:///{tmp_path}/s.db", driver=ScriptedDriver(script), tools=[hang])


@asynccontextmanager
async def left_over(tmp_path: Path, owner: str, name: str) -> AsyncIterator[None]:
    """Leave an interrupted run: its connection closes while it hangs."""
    url = f"sqlite:///{tmp_path}/s.db"
    async with perdure.connect(url, driver=ScriptedDriver(script), tools=[hang], grace=0.0) as sessions:
        chat = await sessions.of(owner).open(name)
        await chat.start("hang")
        async for event in sessions.events(chat.id, follow=True):
            if isinstance(event, perdure.ToolExecutionStart):
                break
    yield


def form(page: Page, action: str) -> Form:
    (found,) = [each for each in page.forms if each.action.startswith("/workers/") and action in each.action]
    return found


async def test_everything_that_is_left_is_shown(tmp_path: Path) -> None:
    """The page shows waiting messages by priority, held, delayed and repeated ones, and running sessions."""
    pytest.importorskip("cronsim")
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        for name, priority in (("low", 0), ("high", 5)):
            await ada.enqueue((await ada.open(name)).id, "work", priority=priority)
        await ada.enqueue((await ada.open("later")).id, "remind me", at=LATER, key="reminder")
        await ada.schedule("digest", "Write it.", cron="0 7 * * MON", timezone="Europe/Oslo")
        await (await ada.open("paused")).suspend(until=LATER)
        await ada.enqueue("paused", "held back")
        running = await ada.open("busy")
        await running.start("hang")
        await asyncio.sleep(0.05)
        page = await Page.get(served.ada, "/workers")
        await running.cancel()
    assert page.text.index(".high") < page.text.index(".low")
    for told in ("remind me", "reminder", "0 7 * * MON Europe/Oslo", "the session is opened again", "in 3 d"):
        assert told in page.text
    assert page.has("pill", "running") == 1
    assert "held 1" in page.text
    assert "delayed 3" in page.text


async def test_an_interrupted_run_is_shown(tmp_path: Path) -> None:
    async with left_over(tmp_path, "ada", "a"), serving(tmp_path) as served:
        page = await Page.get(served.ada, "/workers")
        theirs = await Page.get(served.bob, "/workers")
    assert "handed over" in page.text
    assert "gone" in page.text
    assert "No session is being run" in theirs.text


async def parked(served: Served, tmp_path: Path, owner: str, reason: str) -> None:
    sessions = served.sessions.of(owner)
    await sessions.execute("a", ParkSession(sessions.loops, 3, reason))
    await sessions.enqueue("a", "waits behind it")


async def test_a_parked_session_is_opened_again(tmp_path: Path) -> None:
    async with left_over(tmp_path, "ada", "a"), serving(tmp_path) as served:
        await parked(served, tmp_path, "ada", "it died each time")
        page = await Page.get(served.ada, "/workers")
        for told in ("3 tries", "it died each time", "1 message"):
            assert told in page.text
        retry = form(page, "/retry")
        sent = await served.ada.post(retry.action, data=retry.fields)
        assert (sent.status_code, sent.headers["location"]) == (303, "/workers?notice=opened")
        again = await served.ada.post(retry.action)
        assert again.status_code == 422
        after = await Page.get(served.ada, "/workers?notice=opened")
    assert "is open again" in after.text
    assert "it died each time" not in after.text
    assert "waiting 1" in after.text


async def test_what_waits_and_what_is_delayed_is_taken_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        await ada.enqueue((await ada.open("a")).id, "work")
        await ada.enqueue("a", "later", at=LATER, key="a key/with ?odd& signs")
        page = await Page.get(served.ada, "/workers")
        drop, timer = [each for each in page.forms if each.action.startswith("/workers/")]
        assert (await served.ada.post(drop.action)).headers["location"] == "/workers?notice=dropped"
        sent = await served.ada.post(timer.action, data=timer.fields)
        assert sent.headers["location"] == "/workers?notice=timer-dropped"
        again = await served.ada.post(timer.action, data=timer.fields)
        assert again.headers["location"] == "/workers?notice=nothing"
        backlog = await ada.queue()
        assert (list(backlog.waiting), list(backlog.delayed)) == ([], [])


async def test_only_work_within_reach_is_shown_and_changed(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        hers = await served.sessions.of("ada").open("a")
        await served.sessions.of("ada").enqueue(hers.id, "work", priority=3)
        assert hers.id not in (await Page.get(served.bob, "/workers")).text
        assert hers.id in (await Page.get(served.operator, "/workers")).text
        for verb, data in (("retry", {}), ("drop", {}), ("drop-timer", {"name": "x"})):
            there = await served.bob.post(f"/workers/{hers.id}/{verb}", data=data)
            missing = await served.bob.post(f"/workers/{hers.id}x/{verb}", data=data)
            assert there.status_code == missing.status_code == 404
            assert there.text == missing.text.replace(f"{hers.id}x", hers.id)
            assert (await served.reader.post(f"/workers/{hers.id}/{verb}", data=data)).status_code == 403
        reader = await Page.get(served.reader, "/workers")
        assert [each for each in reader.forms if each.action.startswith("/workers/")] == []
        assert len((await served.sessions.queue()).waiting) == 1


async def test_nothing_that_was_stored_runs_on_the_page(tmp_path: Path) -> None:
    owner = f"owner {CANARY}"
    async with left_over(tmp_path, owner, "a"), serving(tmp_path) as served:
        await parked(served, tmp_path, owner, f"reason {CANARY}")
        hers = served.sessions.of(owner)
        await hers.open("b", AgentDefinition(f"agent {CANARY}"))
        await hers.enqueue("b", f"text {CANARY}", at=LATER, key=f"key {CANARY}")
        page = await Page.get(served.operator, "/workers")
    for what in ("owner", "reason", "text", "key"):
        assert f"{what} {CANARY}" in page.text
    assert form(page, "/drop-timer").fields["name"] == f"key {CANARY}"
