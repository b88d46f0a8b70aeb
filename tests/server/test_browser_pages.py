"""The pages about work, used as a person uses them in a real Chromium."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.browser import browsing, chromium, site_of

import perdure
from perdure import AgentDefinition
from perdure.model.ids import now
from perdure.model.message import Message, ToolCall
from perdure.protocols import ModelRequest
from perdure.server.pages.static_site import write_site
from perdure.testing import ScriptedDriver
from perdure.workers.worker import Worker

CLERK = AgentDefinition("clerk", system_prompt="Ask before you refund.")
LONG = "an-id-that-is-as-long-as-ids-get-when-programs-make-them-and-nobody-thinks-of-telephones"


@pytest.fixture(autouse=True)
def _needs_browser() -> None:
    chromium()


@perdure.tool(needs_approval=True)
def refund(order: int, note: str) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


def script(request: ModelRequest) -> Message:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    if asked == "refund" and request.step == 0:
        return Message.assistant(tool_calls=[ToolCall("refund", {"order": 7, "note": "x" * 300})])
    return Message.assistant(f"You said: {asked}")


def connected(tmp_path: Path) -> Any:
    return perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=ScriptedDriver(script), tools=[refund])


async def test_a_call_that_another_process_waits_for_is_approved(tmp_path: Path) -> None:
    """It works without scripts in the browser: a worker elsewhere continues the run, and the run's page shows it."""
    async with connected(tmp_path) as elsewhere, Worker(elsewhere) as worker:
        chat = await elsewhere.open("order-7", CLERK)
        await chat.send("refund")
        work = asyncio.ensure_future(worker.run())
        async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
            site = await site_of(sessions)
            async with site.up(), browsing(site.base, site.secret, script=False) as seen:
                await seen.go("/approvals")
                run = await seen.page.get_attribute(".panel a[href*='/runs/']", "href")
                await seen.page.click("text=Approve refund")
                assert "A worker continues the run." in await seen.page.inner_text(".notice")
                async for event in elsewhere.events("order-7", follow=True):
                    if isinstance(event, perdure.AgentEnd):
                        break
                await seen.go(run)
                assert "1 call decided on" in await seen.page.inner_text(".steps")
                assert "order 7 is refunded" in await seen.page.inner_text(".steps")
                await seen.page.click("text=What was sent in step 2")
                assert "Ask before you refund." in await seen.page.inner_text(".sent-whole")
        worker.stop()
        await work


async def test_pages_fit_a_telephone(tmp_path: Path) -> None:
    """They fit with long ids, long arguments and long names, in both colours."""
    async with connected(tmp_path) as sessions:
        chat = await sessions.open(LONG, CLERK)
        await chat.send("hello")
        await sessions.fork(LONG, f"{LONG}-again")
        await sessions.rename(LONG, "A name without end " * 8)
        await chat.send("refund")
        await sessions.enqueue(LONG, "and then")
        await sessions.enqueue((await sessions.open("waits")).id, "work on it")
        await sessions.enqueue("waits", "And tomorrow?", at=now() + timedelta(days=1))
        run = (await sessions.record(LONG)).loops[-1].loop_id
        site = await site_of(sessions)
        paths = (f"/sessions/{LONG}/runs/{run}?step=1", f"/diff?left={LONG}@1&right={LONG}-again", "/approvals")
        for width in (390, 800, 1200) if os.environ.get("PERDURE_TORTURE") else (390, 800):
            async with site.up(), browsing(site.base, site.secret, width=width) as seen:
                for path in (*paths, "/workers", "/cost", f"/diff?left={LONG}"):
                    await seen.go(path)
                    assert not await seen.is_wider_than_its_window(), (path, width)
                for path in ("/", "/?q=hello", "/workers"):
                    await seen.go(path)
                    widths = "every => every.map(it => it.scrollWidth - it.clientWidth)"
                    assert set(await seen.page.eval_on_selector_all(".scroll", widths)) == {0}, (path, width)


async def test_two_sessions_are_compared_by_the_keyboard(tmp_path: Path) -> None:
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("a")
        await chat.send("hello")
        await (await sessions.fork("a", "b")).send("and then")
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            await seen.go("/diff")
            await seen.page.focus("[name=left]")
            for key in ("a", "Tab", "b", "Enter"):
                await seen.page.keyboard.press(key)
            await seen.page.wait_for_selector(".beside")
            assert "2 messages in common" in await seen.page.inner_text(".common")
            await seen.page.click("text=Swap")
            await seen.page.wait_for_url("**/diff?left=b&right=a")


async def test_a_site_of_files_is_walked(tmp_path: Path) -> None:
    """A person goes from the index to a session, a run, and what was sent in one of its steps, all from the disk."""
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("a", CLERK)
        await chat.send("hello")
        await write_site(sessions, ["a"], tmp_path / "site")
    async with browsing(f"file://{tmp_path}/site", None) as seen:
        await seen.go("/index.html")
        await seen.page.click("td a")
        assert "You said: hello" in await seen.page.inner_text(".said")
        await seen.page.click("text=Steps, and what was sent")
        await seen.page.click("text=What was sent in step 1")
        assert "Ask before you refund." in await seen.page.inner_text(".sent-whole")
        ground = await seen.page.evaluate("getComputedStyle(document.querySelector('.panel')).borderRadius")
        assert ground == "9px"  # the style sheet was found
