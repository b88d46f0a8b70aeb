"""The inbox during a run: an item posted at an awkward moment is handled once, and by the right run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import perdure
from perdure import MemoryStore, StoreError, ToolCall
from perdure.protocols import Entry, ModelRequest
from perdure.testing import ScriptedDriver
from perdure.testing.scripted import Delay


async def look() -> str:
    """Look."""
    return "seen"


class Scene:
    """A model that calls a tool first and then answers slowly; `is_asked` is set once it has been asked."""

    def __init__(self, *, before: float, after: float) -> None:
        self.is_asked = asyncio.Event()
        self._before, self._after = before, after
        self.driver = ScriptedDriver(self._script)

    def _script(self, request: ModelRequest) -> Any:
        self.is_asked.set()
        is_first = request.messages[-1].text == "Work."
        return Delay(self._before, ToolCall("look")) if is_first else Delay(self._after, "the answer")


async def said(chat: Any) -> list[str]:
    return [message.text for message in (await chat.session()).state.messages]


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/s.db"])
async def test_a_cancel_that_a_step_meets_first_ends_the_run(url: str, tmp_path: Path) -> None:
    """A read between two steps finds it before the watch does, and the run still ends."""
    scene = Scene(before=0.08, after=5.0)
    async with perdure.connect(url.format(tmp_path), driver=scene.driver, tools=[look]) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await scene.is_asked.wait()
        assert await chat.cancel()
        reply = await asyncio.wait_for(run, 3)
        assert "the answer" not in reply.text


class _SlowInbox(MemoryStore):
    """An inbox that takes a while to be read, as over a network."""

    never_waits = False

    async def read(self, session_id: str, **options: Any) -> Any:
        found = await super().read(session_id, **options)
        await asyncio.sleep(0.5 if options.get("inbox") else 0)
        return found


async def test_a_steering_message_that_is_seen_twice_is_delivered_once() -> None:
    """The watch and the run look at the same time."""
    scene = Scene(before=0.22, after=0.0)
    async with perdure.connect(_SlowInbox(), driver=scene.driver, tools=[look]) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await scene.is_asked.wait()
        await chat.send("Left!", when_busy="steer")
        await run
        await sessions.runtime.idle()
        assert (await said(chat)).count("Left!") == 1


class _FailsOnce(MemoryStore):
    """An inbox that cannot be read once."""

    is_failing = False

    async def read(self, session_id: str, **options: Any) -> Any:
        if options.get("inbox") and self.is_failing:
            self.is_failing = False
            raise StoreError("busy for a moment")
        return await super().read(session_id, **options)


async def test_an_inbox_that_cannot_be_read_once_ends_no_run() -> None:
    """The next look finds the item."""
    scene, store = Scene(before=0.05, after=0.3), _FailsOnce()
    async with perdure.connect(store, driver=scene.driver, tools=[look]) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await scene.is_asked.wait()
        store.is_failing = True
        await store.post("s", Entry("note"))
        assert (await run).text == "the answer"
        assert not store.is_failing


class _TellsNothing:
    """A journal of another author that does not return the inbox's end. It calls `when_claimed` before it answers."""

    def __init__(self, store: MemoryStore, when_claimed: Callable[[], Any]) -> None:
        self._store, self._when_claimed = store, when_claimed
        verbs = (
            name for name in dir(store) if not name.startswith("_") and name not in ("is_waited_for", "never_waits")
        )
        for name in verbs:
            if name not in ("claim", "append"):
                setattr(self, name, getattr(store, name))

    async def __aenter__(self) -> _TellsNothing:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def claim(self, *given: Any, **options: Any) -> Any:
        claim, appended = await self._store.claim(*given, **options)
        self._when_claimed()
        await asyncio.sleep(0.05)
        return claim, replace(appended, posted=None)

    async def append(self, *given: Any, **options: Any) -> Any:
        return replace(await self._store.append(*given, **options), posted=None)


async def test_a_cancel_right_after_the_claim_is_for_this_run_in_any_journal() -> None:
    """This holds also for a journal that does not return the inbox's end at the claim."""
    is_claimed = asyncio.Event()
    store = _TellsNothing(MemoryStore(), is_claimed.set)
    driver = ScriptedDriver(lambda request: Delay(5.0, "the answer"))
    async with perdure.connect(store, driver=driver) as sessions:  # type: ignore[arg-type]  # it is one by its verbs
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await is_claimed.wait()
        assert await chat.cancel()
        assert (await asyncio.wait_for(run, 3)).text == ""


async def test_an_inbox_that_was_dealt_with_costs_later_runs_one_look() -> None:
    """They read it once, not at each step."""
    reads: list[str] = []

    class Counting(MemoryStore):
        async def read(self, session_id: str, **options: Any) -> Any:
            reads.extend(["inbox"] if options.get("inbox") else [])
            return await super().read(session_id, **options)

    def script(request: ModelRequest) -> Any:
        steps = [message.role for message in request.messages][::-1].index("user")
        return ToolCall("look") if request.messages[-steps - 1].text == "Work." and steps < 10 else Delay(0.02, "ok")

    async with perdure.connect(Counting(), driver=ScriptedDriver(script), tools=[look]) as sessions:
        chat = await sessions.open("s")
        await chat.send("Work.")
        assert reads == []
        run = asyncio.ensure_future(chat.send("x"))
        await asyncio.sleep(0.005)
        await chat.send("y", when_busy="queue")
        await run
        await sessions.runtime.idle()
        reads.clear()
        await chat.send("Work.")
        assert len(reads) == 1


async def test_a_queued_message_whose_run_was_given_up_is_not_sent_again(tmp_path: Path) -> None:
    """Its run was killed, and then ended by cancel()."""
    url = f"sqlite:///{tmp_path}/s.db"
    slow = ScriptedDriver(lambda request: Delay(30 if request.messages[-1].text == "Two." else 0.1, "Re."))
    async with perdure.connect(url, driver=slow, grace=0) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("One."))
        await asyncio.sleep(0.05)
        await chat.send("Two.", when_busy="queue")
        await run
        await asyncio.sleep(0.2)
    async with perdure.connect(url, driver=ScriptedDriver(lambda request: "Again.")) as sessions:
        chat = await sessions.open("s")
        assert await chat.cancel()
        await sessions.runtime.idle()
        assert (await said(chat)).count("Two.") == 1
