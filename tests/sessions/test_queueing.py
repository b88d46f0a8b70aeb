"""Messages that are left to workers: the keys that they may have, and the processes that send them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure import (
    InputRefused,
    InvalidData,
    RunFailed,
    SessionNotActive,
    Sessions,
    Worker,
    connect,
    external_tool,
    tool,
)
from perdure.model.ids import now
from perdure.testing import Chunks, Delay, ScriptedDriver
from perdure.workers.inbox import InboxDispatcher
from perdure.workers.timers import Bell

VERBS: dict[str, Callable[[Sessions], Awaitable[object]]] = {
    "rename": lambda sessions: sessions.rename("a", "renamed"),
    "inject": lambda sessions: sessions.inject("a", "By the way."),
    "send": lambda sessions: sessions.send("a", "And you?"),
    "compact": lambda sessions: sessions.compact("a", compact_strategy="truncate", keep_last=1),
    "resume": lambda sessions: _suspended_and_resumed(sessions),
    "recover": lambda sessions: sessions.recover(),
}


async def _suspended_and_resumed(sessions: Sessions) -> None:
    await sessions.suspend("a")
    await sessions.resume("a")


async def waiting_in(sessions: Sessions) -> int:
    """Return how many messages wait, once nothing is under way in this process."""
    await sessions.runtime.idle()
    return sum(each.count for each in (await sessions.queue()).waiting)


async def answered(sessions: Sessions, texts: int) -> list[str]:
    """Let a worker answer everything that waits. Return what users said."""
    async with Worker(sessions) as worker:
        running = asyncio.create_task(worker.run())
        # A running session is not listed as waiting, though more messages may wait in it.
        while (backlog := await sessions.queue()).waiting or backlog.running:  # noqa: ASYNC110  # nothing tells its end
            await asyncio.sleep(0.01)
        worker.stop()
        await running
    said = [message.text for message in await sessions.history("a") if message.role == "user"]
    assert len(said) == texts
    return said


@pytest.mark.parametrize("key", ["until", "schedule:digest"])
async def test_a_key_that_a_pause_or_a_schedule_would_take_for_its_own_is_refused(key: str) -> None:
    """The end of a pause or a schedule would remove the message. Sent at once, it may have any key."""
    later = now() + timedelta(hours=1)
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        with pytest.raises(InvalidData, match="use another key"):
            await sessions.enqueue("a", "Hello", key=key, at=later)
        assert await sessions.timers("a") == []
        await sessions.enqueue("a", "Hello", key=f"my-{key}", at=later)
        await sessions.suspend("a", until=later)
        await sessions.resume("a")
        assert not await sessions.unschedule("digest", "a")
        assert [timer.name for timer in await sessions.timers("a")] == [f"my-{key}"]
        assert await sessions.enqueue("a", "Hello", key=key) is not None


@pytest.mark.parametrize("verb", ["send", "start", "stream", "enqueue"])
async def test_an_empty_key_is_refused(verb: str) -> None:
    """It would be taken for no key, and the message sent twice."""
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        begun = getattr(sessions, verb)("a", "Hello", key="")
        with pytest.raises(InvalidData, match="1 to 500 characters"):
            await (anext(begun) if verb == "stream" else begun)
        assert not await sessions.history("a")
        assert not (await sessions.queue()).waiting


@pytest.mark.parametrize("cron", ["*/5 * * * * *", "0 7 * *", "", "@daily", None])
async def test_a_schedule_has_five_fields(cron: str) -> None:
    """A sixth would mean seconds, and nobody who writes one for cron means that."""
    async with connect("memory://", model="offline") as sessions:
        with pytest.raises(InvalidData, match="5 fields"):
            await sessions.schedule("digest", "Write it.", cron=cron)
        assert not await sessions.exists("digest")


@pytest.mark.parametrize("verb", VERBS)
async def test_no_other_verb_sends_what_is_left_to_workers(tmp_path: Path, verb: str) -> None:
    """The process that leaves a message may lack the tools for it. It may still rename the session, or talk in it."""
    model = ScriptedDriver(["yes"] * 9)
    async with connect(f"sqlite:///{tmp_path / 'a.db'}", driver=model, compaction=None) as sessions:
        await sessions.open("a")
        await sessions.send("a", "Hello")
        await sessions.enqueue("a", "Ship it.")
        await VERBS[verb](sessions)
        assert await waiting_in(sessions) == 1
        assert "Ship it." in await answered(sessions, texts=3 if verb in ("inject", "send") else 2)


async def test_a_message_that_is_queued_behind_one_for_workers_keeps_its_place(tmp_path: Path) -> None:
    """Both wait for a worker, which sends them in their order."""
    async with connect(f"sqlite:///{tmp_path / 'a.db'}", driver=ScriptedDriver(["yes"] * 9)) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "first")
        assert (await sessions.send("a", "second", when_busy="queue")).queued
        assert await waiting_in(sessions) == 2
        assert await answered(sessions, texts=2) == ["first", "second"]


async def test_what_a_timer_has_put_into_an_inbox_is_for_workers(tmp_path: Path) -> None:
    """A worker sends it, even if another process rings the timer."""
    async with connect(f"sqlite:///{tmp_path / 'a.db'}", driver=ScriptedDriver(["yes"] * 9)) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "later", at=now() - timedelta(seconds=1))
        queue = sessions._queue()
        await Bell(queue, InboxDispatcher(queue), sessions.runtime.execute).ring()
        await sessions.rename("a", "renamed")
        assert await waiting_in(sessions) == 1
        assert await answered(sessions, texts=1) == ["later"]


async def test_a_key_that_was_left_for_later_keeps_its_time() -> None:
    """Leaving the message again, for another time or for now, changes nothing and returns the time that counts."""
    first, second = (now() + timedelta(hours=hours) for hours in (1, 2))
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "Hello", key="k", at=first)
        for at in (second, None):
            again = await sessions.enqueue("a", "Hello", key="k", at=at)
            assert again.at is not None
            assert abs(again.at - first) < timedelta(milliseconds=1)
            with pytest.raises(InvalidData, match="another"):
                await sessions.enqueue("a", "Bye", key="k", at=at)
        assert (len(await sessions.timers("a")), await waiting_in(sessions)) == (1, 0)
        assert await again.drop()
        assert await sessions.timers("a") == []


async def test_one_who_waits_for_a_message_that_is_taken_back_is_told() -> None:
    """Waiting raises InputRefused, whether it began before the message was dropped or after it."""
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        left = await sessions.enqueue("a", "Hello", key="k", at=now() + timedelta(hours=1))
        waiting = asyncio.create_task(left.reply())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await sessions.drop_timer("a", "k")
        with pytest.raises(InputRefused, match="taken back"):
            await waiting
        with pytest.raises(InputRefused, match="taken back"):
            await left.reply()


async def test_one_who_waits_for_a_later_message_gets_its_answer() -> None:
    async with connect("memory://", model="offline") as sessions, Worker(sessions) as worker:
        await sessions.open("a")
        left = await sessions.enqueue("a", "what is 2 + 3?", key="k", at=now() + timedelta(seconds=0.5))
        running = asyncio.create_task(worker.run())
        reply = await left.reply(timeout=30)
        worker.stop()
        await running
        assert reply is not None
        assert "5" in reply.text


async def test_a_time_that_cannot_be_shown_is_refused() -> None:
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        with pytest.raises(InvalidData, match="too far away"):
            await sessions.enqueue("a", "Hello", at=datetime.max.replace(tzinfo=UTC))
        with pytest.raises(InvalidData, match="too far away"):
            await sessions.suspend("a", until=datetime.max.replace(tzinfo=UTC))
        assert (await sessions.queue()).delayed == []


async def test_a_schedule_that_is_not_there_is_not_ended() -> None:
    async with connect("memory://", model="offline") as sessions:
        assert not await sessions.unschedule("digest")
        await sessions.open("digest")
        assert not await sessions.unschedule("digest")


async def test_a_message_that_brings_a_tool_which_the_agent_has_is_refused() -> None:
    """It could never be sent, and would block all messages behind it."""

    @tool
    def weather() -> str:
        """Look out."""
        return "rain"

    async with connect("memory://", model="offline", tools=[weather]) as sessions:
        await sessions.open("a")
        wrong = await sessions.enqueue("a", "Hello", external_tools=[external_tool("weather")])
        right = await sessions.enqueue("a", "And you?")
        async with Worker(sessions) as worker:
            await worker.only("a")
        with pytest.raises(InputRefused, match="has a tool named 'weather'"):
            await wrong.reply(timeout=5)
        assert "And you?" in (await right.reply(timeout=5)).text


async def test_nothing_is_left_with_a_session_that_is_deleted() -> None:
    """It would wait until somebody restores the session. A message that was left before is found by its key."""
    later = now() + timedelta(hours=1)
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        left = await sessions.enqueue("a", "Hello", key="k")
        await sessions.delete("a")
        for at in (None, later):
            with pytest.raises(SessionNotActive, match="restore"):
                await sessions.enqueue("a", "And you?", at=at)
        assert (await sessions.enqueue("a", "Hello", key="k")).session_id == left.session_id
        journal = sessions.runtime.journal
        assert journal is not None
        assert len(await journal.read(left.session_id, inbox=True)) == 1
        assert await sessions.timers("a") == []


async def test_the_answer_of_a_worker_is_streamed_where_its_message_was_left(tmp_path: Path) -> None:
    """A connection without a model or tools shows it while it is written; a second request shows it from the start."""
    store, words = f"sqlite:///{tmp_path / 'a.db'}", [f"word {number} " for number in range(5)]
    model = ScriptedDriver([Chunks([Delay(0.1, word) for word in words])])
    async with connect(store) as web, connect(store, driver=model) as desk, Worker(desk) as worker:
        await web.open("a")
        queued = await web.enqueue("a", "Well?", key="one")
        running = asyncio.create_task(worker.run())
        chunks = [chunk async for chunk in queued.stream()]
        again = [chunk async for chunk in (await web.enqueue("a", "Well?", key="one")).stream()]
        worker.stop()
        await running
        assert "".join(chunks) == "".join(again) == "".join(words)
        assert len(chunks) > 3
        assert [chunk.offset for chunk in chunks[:2]] == [0, len(chunks[0])]
        assert chunks[-1].reply is not None
        assert not chunks[-1].reply.queued
        left = [chunk async for chunk in web.follow("a", after=chunks[1].cursor)]
        assert "".join(chunks[:2]) + "".join(left) == "".join(words)
        assert [*(await anext(aiter(web.follow("a", after=chunks[-1].cursor))))] == []


async def test_a_stream_of_a_message_that_failed_raises(tmp_path: Path) -> None:
    """A page that shows the stream gets the error, and does not wait."""
    store = f"sqlite:///{tmp_path / 'a.db'}"
    async with connect(store) as web, connect(store, driver=ScriptedDriver([])) as desk, Worker(desk) as worker:
        await web.open("a")
        queued = await web.enqueue("a", "Well?")
        running = asyncio.create_task(worker.run())
        with pytest.raises(RunFailed):
            _ = [chunk async for chunk in queued.stream()]
        worker.stop()
        await running
