"""The inbox: an item is sent once, even if its client, run or view is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.loop.scenes import HeldDriver
from tests.waiting import until

import perdure
from perdure import Chat, Entry, MemoryStore, Message, StoreError, ToolCall
from perdure.actions.inbox import Inbox, RunInbox, item_of
from perdure.testing import FailingStore
from perdure.testing.scripted import Delay, ScriptedDriver


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 0.005)


def echo(request: Any) -> str:
    return f"Re: {request.messages[-1].text}"


async def texts(chat: Chat) -> list[str]:
    return [message.text for message in (await chat.session()).state.messages]


async def test_a_client_is_answered_when_its_answer_is_there() -> None:
    """It does not wait for the messages that others have queued behind it, and its task does not run them."""
    release = asyncio.Event()

    class Slow(ScriptedDriver):
        async def respond(self, request: Any, on_delta: Any) -> Any:
            if request.messages[-1].text == "Two.":
                await release.wait()
            return await super().respond(request, on_delta)

    async with perdure.connect("memory://", driver=Slow(lambda r: Delay(0.02, echo(r)))) as sessions:
        chat = await sessions.open("s")
        first = asyncio.ensure_future(chat.send("One."))
        await asyncio.sleep(0.01)
        assert (await chat.send("Two.", when_busy="queue")).queued
        assert (await asyncio.wait_for(first, 5)).text == "Re: One."
        release.set()
        await sessions.runtime.idle()
        assert await texts(chat) == ["One.", "Re: One.", "Two.", "Re: Two."]


@pytest.mark.parametrize("how", ["cancelled", "compacted"])
async def test_what_is_queued_behind_anything_that_holds_the_session_is_sent(how: str) -> None:
    """It is sent behind a run whose client is gone, and behind a compaction."""
    is_asked = asyncio.Event()

    async def summarise(messages: Any) -> str:
        is_asked.set()
        await asyncio.sleep(0.03)
        return "It was said."

    driver = HeldDriver(echo)
    async with perdure.connect("memory://", driver=driver) as sessions:
        chat = await sessions.open("s")
        driver.may_answer.set()
        for number in range(4):
            await chat.send(f"{number}")
        if how == "cancelled":
            driver.may_answer.clear()
            driver.is_asked.clear()
            holder = asyncio.ensure_future(chat.send("One."))
            await driver.is_asked.wait()
        else:
            holder = asyncio.ensure_future(
                chat.compact(compact_strategy="llm", compress_callback=summarise, keep_last=2)
            )
            await is_asked.wait()
        assert (await chat.send("Two.", when_busy="queue")).queued
        if how == "cancelled":
            holder.cancel()
        driver.may_answer.set()
        await asyncio.gather(holder, return_exceptions=True)
        await sessions.runtime.idle()
        assert (await texts(chat))[-2:] == ["Two.", "Re: Two."]


async def test_the_same_message_may_be_queued_twice() -> None:
    """An item is delivered once, not a message: no old answer is taken for the new item's."""
    async with perdure.connect("memory://", driver=ScriptedDriver(lambda r: Delay(0.02, echo(r)))) as sessions:
        chat = await sessions.open("s")
        for _ in range(2):
            run = asyncio.ensure_future(chat.send("Busy."))
            await asyncio.sleep(0.005)
            await chat.send("Again.", when_busy="queue")
            await run
            await sessions.runtime.idle()
        assert await texts(chat) == ["Busy.", "Re: Busy.", "Again.", "Re: Again."] * 2


async def test_a_steering_message_is_not_delivered_again_after_a_reset() -> None:
    """An item queued before it keeps the inbox from being emptied; the record says that the message was delivered."""
    may_go_on, is_in = asyncio.Event(), asyncio.Event()

    async def pause() -> str:
        """Wait."""
        is_in.set()
        await may_go_on.wait()
        return "rested"

    def script(request: Any) -> Any:
        last = request.messages[-1].text
        if last == "Work.":
            return ToolCall("pause")
        return Delay(30, "never") if last == "Queued." else echo(request)

    async with perdure.connect("memory://", driver=ScriptedDriver(script), tools=[pause], grace=0) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await is_in.wait()
        await chat.send("Queued.", when_busy="queue")
        await chat.send("Left!", when_busy="steer")
        await asyncio.sleep(0.03)
        may_go_on.set()
        assert (await run).text == "Re: Left!"
        await until(chat.cancel)
        await sessions.runtime.idle()
        await chat.reset()
        await chat.send("After.")
        await sessions.runtime.idle()
        assert await texts(chat) == ["After.", "Re: After."]
        said = [message.text for message in await chat.history() if message.role == "user"]
        assert said == ["Work.", "Left!", "Queued.", "After."]


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/s.db", "file://{}/s"])
async def test_a_steering_message_with_the_id_of_the_input_loses_nobodys_text(url: str, tmp_path: Path) -> None:
    """View, history and record show both texts, in every store."""
    may_go_on, is_in = asyncio.Event(), asyncio.Event()

    async def pause() -> str:
        """Wait."""
        is_in.set()
        await may_go_on.wait()
        return "rested"

    def script(request: Any) -> Any:
        return ToolCall("pause") if request.messages[-1].text == "Work." else echo(request)

    async with perdure.connect(url.format(tmp_path), driver=ScriptedDriver(script), tools=[pause]) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send(Message.user("Work.", id="m")))
        await is_in.wait()
        for text in ("Left!", "Right!"):
            await chat.send(Message.user(text, id="m"), when_busy="steer")
        await asyncio.sleep(0.03)
        may_go_on.set()
        loop_id = (await run).session.state.execution.execution_id  # type: ignore[union-attr]
        said = ["Work.", "", "rested", "Left!", "Right!", "Re: Right!"]
        assert await texts(chat) == said
        assert [message.text for message in await chat.history()] == said
        assert [message.text for message in (await sessions.loop("s", loop_id)).messages] == said


async def test_an_inbox_that_cannot_be_read_after_the_answer_is_saved_fails_nobody() -> None:
    """An error after the commit is logged: the caller has the answer."""
    store = FailingStore(perdure.MemoryStore())
    async with perdure.connect(store, driver=ScriptedDriver(echo)) as sessions:
        chat = await sessions.open("s")
        save = store.save

        async def save_and_break(*given: Any, **named: Any) -> Any:
            kept = await save(*given, **named)
            store.fail("read")
            return kept

        store.save = save_and_break
        assert (await chat.send("Hi")).text == "Re: Hi"


@pytest.mark.parametrize("when", ["claim", "append", "save"])
async def test_a_store_that_fails_once_sends_a_queued_message_once(when: str) -> None:
    """The item stays in the inbox until its message is on record, and never after that."""
    store = FailingStore(perdure.MemoryStore())
    called: list[int] = []

    def note() -> str:
        """Note something."""
        called.append(1)
        return "noted"

    def script(request: Any) -> Any:
        asked = next(message.text for message in reversed(request.messages) if message.role == "user")
        return ToolCall("note") if asked == "Queued." and request.step == 0 else Delay(0.02, "So.")

    async with perdure.connect(store, driver=ScriptedDriver(script), tools=[note]) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("First."))
        await asyncio.sleep(0.005)
        await chat.send("Queued.", when_busy="queue")
        await run
        store.fail(when, error=StoreError("no room"))
        await sessions.runtime.idle()
        await chat.send("Last.")
        await sessions.runtime.idle()
        said = [message.text for message in await chat.history() if message.role == "user"]
        assert sorted(said) == ["First.", "Last.", "Queued."]
        assert called == [1]
        assert await store.read("s", inbox=True) == []


async def test_a_queued_message_comes_behind_one_that_was_queued_before() -> None:
    """A run whose save failed leaves its queued message; one queued later does not overtake it."""
    store = FailingStore(perdure.MemoryStore())
    async with perdure.connect(store, driver=ScriptedDriver(lambda request: Delay(0.2, "So."))) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("First."))
        await asyncio.sleep(0.005)
        await chat.send("Second.", when_busy="queue")
        store.fail("save")
        with pytest.raises(StoreError):
            await run
        await chat.send("Third.", when_busy="queue")  # it recovers the first
        await sessions.runtime.idle()
        assert [message.text for message in await chat.history() if message.role == "user"] == [
            "First.",
            "Second.",
            "Third.",
        ]


async def test_a_posted_item_of_an_older_release_is_sent() -> None:
    """It has no delivery id: its message tells whether it was delivered."""
    async with perdure.connect("memory://", driver=ScriptedDriver(echo)) as sessions:
        chat = await sessions.open("s")
        old = Message.user("Old.").to_dict()
        await sessions.store.post("s", perdure.Entry("steer", {"messages": [old], "key": None}))  # type: ignore[attr-defined]
        await chat.send("New.")
        await sessions.runtime.idle()
        await chat.send("Newer.")
        await sessions.runtime.idle()
        assert [t for t in await texts(chat) if not t.startswith("Re:")] == ["New.", "Old.", "Newer."]


async def test_a_wish_to_cancel_reaches_a_recovery_that_has_just_claimed_the_session() -> None:
    """The run has read nothing yet: the request came after its claim, so it is meant for this run."""
    store = FailingStore(MemoryStore())
    is_asked = asyncio.Event()

    def hangs(request: Any) -> Any:
        is_asked.set()
        return Delay(60, "Never.")

    async with perdure.connect(store, driver=ScriptedDriver(hangs), grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("Go."))
        await is_asked.wait()
    await asyncio.gather(run, return_exceptions=True)
    await store.post("s", Entry("cancel"))  # for a run that has ended: it does not count
    async with perdure.connect(store, driver=ScriptedDriver([Delay(5, "Went on.")])) as sessions:
        store.delay("read", 0.1, call=2)
        recovery = asyncio.ensure_future(sessions.recover())
        await until(lambda: store.is_claimed("s"))
        assert await sessions.cancel("s")
        await recovery
        (loop,) = (await sessions.record("s")).loops
        assert (loop.status, loop.stop_reason) == ("completed", "user_requested")


async def test_a_wish_to_cancel_from_before_does_not_reach_a_recovery() -> None:
    store = MemoryStore()
    is_asked = asyncio.Event()

    def hangs(request: Any) -> Any:
        is_asked.set()
        return Delay(60, "Never.")

    async with perdure.connect(store, driver=ScriptedDriver(hangs), grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("Go."))
        await is_asked.wait()
    await asyncio.gather(run, return_exceptions=True)
    await store.post("s", Entry("cancel"))
    async with perdure.connect(store, driver=ScriptedDriver(["Went on."])) as sessions:
        await sessions.recover()
        assert (await sessions.session("s")).state.messages[-1].text == "Went on."


async def test_a_wish_to_cancel_from_before_does_not_reach_a_run_whose_claim_takes_its_time() -> None:
    """The inbox is read only after the claim, which tells which items are older than the run."""
    store = FailingStore(MemoryStore())
    async with perdure.connect(store, driver=ScriptedDriver(echo)) as sessions:
        chat = await sessions.open("s")
        await store.post("s", Entry("cancel"))
        store.delay("claim", 0.05)  # ten times as long as the watch waits between two looks
        assert (await chat.send("One.")).text == "Re: One."


async def test_a_run_that_is_over_soon_is_never_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run ends before its watch would start, so it costs no task; a long run is watched."""
    watched: list[str] = []
    watch = RunInbox._watch

    async def counting(inbox: RunInbox, *args: Any) -> None:
        watched.append(inbox._record.session_id)
        await watch(inbox, *args)

    monkeypatch.setattr(RunInbox, "_watch", counting)
    driver = ScriptedDriver(lambda request: Delay(0.05, "Late.") if request.messages[-1].text == "Slow." else "Soon.")
    async with perdure.connect("memory://", driver=driver) as sessions:
        quick, slow = await sessions.open("quick"), await sessions.open("slow")
        assert (await quick.send("Quick.")).text == "Soon."
        assert (await slow.send("Slow.")).text == "Late."
    assert watched == ["slow"]


async def test_a_look_that_is_cancelled_between_its_reads_loses_no_message() -> None:
    """The first read sees what was queued before the claim, even if the watch ends during the second."""
    is_reading = asyncio.Event()

    class Slow(MemoryStore):
        async def read(self, session_id: str, *, after: int = 0, **options: Any) -> Any:
            if options.get("inbox") and after:
                is_reading.set()
                await asyncio.sleep(3600)
            return await super().read(session_id, after=after, **options)

    async with Slow() as store, perdure.connect(store, driver=ScriptedDriver(echo)) as sessions:
        chat = await sessions.open("s")
        await Inbox(store, chat.id).post("queue", item_of([Message.user("Wait.")]))
        record = SimpleNamespace(session_id=chat.id, claim=object(), taken=0, posted=1, posted_at_claim=1)
        inbox = RunInbox(None, cast(Any, record), Inbox(store, chat.id))
        look = asyncio.create_task(inbox._look(newer=True))
        await is_reading.wait()
        look.cancel()
        await asyncio.wait({look})
        await inbox.deliver()
        assert record.taken == 0
