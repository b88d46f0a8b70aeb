"""The list of sessions and the page of a session, used as a person uses them in a real Chromium."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.server.browser import browsing, chromium, site_of

import perdure
from perdure.model.message import Message
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta
from perdure.workers.worker import Worker


@pytest.fixture(autouse=True)
def _needs_browser() -> None:
    chromium()


async def _talked(sessions: perdure.Sessions) -> None:
    """Leave a session whose beginning was compacted away."""
    chat = await sessions.open("talk")
    for text in ("The marmalade is in the cupboard.", "What is 2 + 3?", "What is 3 + 4?", "Good night."):
        await chat.send(text)
    await sessions.compact("talk", compact_strategy="truncate", keep_last=2)


async def test_a_word_that_was_compacted_away_is_found(tmp_path: Path) -> None:
    """With the keyboard alone: search, go to the message in the whole history, then unfold what covers it."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await _talked(sessions)
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            page = seen.page
            await seen.go("/")
            await page.keyboard.press("/")
            await page.keyboard.type("marmalade")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("mark")
            assert await page.inner_text("mark") == "marmalade"
            await page.click("a.hit")
            await page.wait_for_selector(".message:target")
            assert "marmalade is in the cupboard" in await page.inner_text(".message:target")
            await seen.go("/sessions/talk")
            assert "marmalade" not in await page.inner_text(".said")
            await page.click(".block > details > summary")
            await page.wait_for_selector(".covered .message")
            assert "marmalade is in the cupboard" in await page.inner_text(".covered")


async def test_rows_and_versions_by_the_keyboard(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await _talked(sessions)
        await (await sessions.open("newer")).send("hello")
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            page = seen.page
            await seen.go("/")
            for key in ("j", "j", "k", "j", "Enter"):
                await page.keyboard.press(key)
            await page.wait_for_url("**/sessions/talk")
            await page.keyboard.press("[")
            await page.wait_for_url("**/sessions/talk?version=5")
            assert "You look at version 5" in await page.inner_text(".past")
            assert "marmalade" in await page.inner_text(".said")
            await page.keyboard.press("[")
            await page.wait_for_url("**?version=4")
            await page.keyboard.press("]")
            await page.wait_for_url("**?version=5")
            await page.keyboard.press("]")
            await page.wait_for_url("**/sessions/talk")
            assert await page.locator(".past").count() == 0
            await page.keyboard.press("?")
            assert await page.is_visible("#keys dl")


async def test_a_session_is_forked_and_rewound(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await _talked(sessions)
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            page = seen.page
            await seen.go("/sessions/talk?version=3")
            await page.click("text=Fork from here")
            await page.wait_for_selector("text=forked from")
            assert await page.locator(".message").count() == 4
            await page.click(".family a")
            await page.wait_for_url("**/sessions/talk")
            assert await page.get_attribute(".family .diff", "href") is not None
            await seen.go("/sessions/talk?version=2")
            await page.click("text=Rewind to here")
            await page.wait_for_url("**/sessions/talk")
            assert "rewound" in await page.inner_text(".track [aria-current]")


_WORKER = """
import asyncio, sys
import perdure
from perdure.workers.worker import Worker

@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    "Give the money back."
    return f"order {order} is refunded"

async def main():
    async with perdure.connect(sys.argv[1], model="offline", tools=[refund]) as sessions, Worker(sessions) as worker:
        working = asyncio.ensure_future(worker.run())
        await sessions.open("order")
        print("ready", flush=True)
        queued = await sessions.enqueue("order", 'call refund {"order": 7}', key="k")
        while True:
            reply = await queued.reply()
            if reply is not None and not reply.pending_calls:
                break
            await asyncio.sleep(0.05)
        print(reply.text, flush=True)
        worker.stop()
        await working

asyncio.run(main())
"""


async def test_a_call_is_approved_that_another_process_waits_for(tmp_path: Path) -> None:
    """The service has neither the tool nor a worker: the decision is recorded, and the page shows what follows."""
    url = f"sqlite:///{tmp_path}/a.db"
    async with perdure.connect(url, model="offline") as sessions:
        site = await site_of(sessions)
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", _WORKER, url, stdout=asyncio.subprocess.PIPE)
        async with site.up(), browsing(site.base, site.secret) as seen:
            page = seen.page
            assert other.stdout is not None
            await asyncio.wait_for(other.stdout.readline(), 20)
            await seen.go("/sessions/order")
            await page.wait_for_selector(".asks")
            assert '"order": 7' in await page.inner_text(".asks")
            await page.click("text=Approve")
            await page.wait_for_selector(".message >> text=order 7 is refunded")
            await page.wait_for_selector(".asks", state="detached")
        said, _ = await asyncio.wait_for(other.communicate(), 20)
        assert b"order 7 is refunded" in said


class _SlowDriver:
    """A driver that writes its answer in two pieces, and waits for a sign before the second."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        await on_delta(Delta("text", "The first half, "))
        await self.may_go_on.wait()
        await on_delta(Delta("text", "and the second."))
        return ModelReply(Message.assistant("The first half, and the second."))


async def test_a_run_is_watched_as_it_writes(tmp_path: Path) -> None:
    """A message from the box is queued, a worker runs it, and pieces of the answer come before it is whole."""
    driver = _SlowDriver()
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=driver) as sessions, Worker(sessions) as worker:
        working = asyncio.ensure_future(worker.run())
        await sessions.open("live")
        site = await site_of(sessions)
        async with site.up(runs_here=True), browsing(site.base, site.secret) as seen:
            page = seen.page
            await seen.go("/sessions/live")
            await page.fill(".write textarea", "Tell me in two halves.")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("#writing >> text=The first half,")
            assert "second" not in await page.inner_text("#writing")
            await page.wait_for_selector(".pill.running")
            driver.may_go_on.set()
            await page.wait_for_selector(".message >> text=The first half, and the second.")
            await page.wait_for_selector(".pill.running", state="detached")
            assert await page.inner_text("#writing") == ""
            assert await page.locator("text=The first half, and the second.").count() == 1 + 1  # and its event
        worker.stop()
        await working


async def test_a_lost_connection_comes_back(tmp_path: Path) -> None:
    """The server is gone for a while. Once it is back, the page has every event of that time, each once."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        chat = await sessions.open("lost")
        await chat.send("What is 1 + 1?")
        site = await site_of(sessions)
        async with browsing(site.base, site.secret) as seen:
            page = seen.page
            async with site.up():
                await seen.go("/sessions/lost")
                await page.wait_for_selector("#events li")
                before = await page.locator("#events li").count()
            await page.wait_for_selector("#live.off")
            await chat.send("What is 20 + 22?")
            async with site.up():
                await page.wait_for_selector(".message >> text=The answer is 42.")
                await page.wait_for_selector("#live:not(.off)")
                places = await page.locator("#events .seq").all_inner_texts()
                assert len(places) > before
                assert len(set(places)) == len(places)
            seen.errors[:] = [each for each in seen.errors if "ERR_CONNECTION_REFUSED" not in each]


async def test_new_sessions_come_into_the_list(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            await seen.go("/")
            await seen.page.wait_for_selector("text=There are no sessions yet")
            await (await sessions.open("new")).send("Good morning.")
            await seen.page.wait_for_selector("tr >> text=Good morning.")


async def test_pages_fit_their_window(tmp_path: Path) -> None:
    """Only tables and texts scroll, each inside itself, however long a word is; in light and in dark."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await _talked(sessions)
        await (await sessions.open("x" * 100)).send("w" * 3_000)
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            for width, scheme in ((390, "dark"), (800, "light"), (1440, "dark")):
                await seen.page.set_viewport_size({"width": width, "height": 844})
                await seen.page.emulate_media(color_scheme=scheme)
                for path in ("/", "/?q=www*", "/sessions/talk", "/sessions/talk?version=2", f"/sessions/{'x' * 100}"):
                    await seen.go(path)
                    assert not await seen.is_wider_than_its_window(), (path, width)


async def test_all_of_it_works_without_scripts(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await _talked(sessions)
        site = await site_of(sessions)
        async with site.up(), browsing(site.base, site.secret, script=False) as seen:
            page = seen.page
            await seen.go("/?q=marmalade")
            await page.click("a.hit")
            await seen.go("/sessions/talk")
            await page.click(".block > details > summary")
            await page.click("text=Show them")
            assert "marmalade" in await page.inner_text(".said")
            await seen.go("/sessions/talk")
            await page.click(".actions >> text=Fork")
            await page.fill(".write textarea", "Are you there?")
            await page.click("text=Send")
            assert "Are you there?" in await page.inner_text(".queued")
