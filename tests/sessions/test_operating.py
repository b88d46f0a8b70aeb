"""Verbs by which operators see and change the work that is left to workers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import InputRefused, InvalidData, SessionBusy, TagSession, connect
from perdure.sessions.sessions import Sessions
from perdure.testing import ScriptedDriver
from perdure.workers import advance

LATER = datetime.now(UTC) + timedelta(days=3)


def sessions_in(where: Path) -> Sessions:
    return connect(f"sqlite:///{where}/sessions.db", model="offline", driver=ScriptedDriver(lambda request: "yes"))


class Hanging(ScriptedDriver):
    """A model that never answers."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.is_asked = asyncio.Event()

    async def respond(self, request: Any, on_delta: Any) -> Any:
        self.is_asked.set()
        await asyncio.sleep(60)


async def parked(sessions: Sessions, session_id: str) -> None:
    """Leave a session in the state of a parked one."""
    chat = await sessions.open(session_id)
    await chat.send("one")
    await sessions.execute(session_id, TagSession("parked"))
    await sessions.suspend(session_id)


async def test_what_there_is_to_do(tmp_path: Path) -> None:
    """Operators see what waits, by urgency, what is delayed, by time, and who runs what."""
    async with sessions_in(tmp_path) as sessions:
        for name in ("a", "b", "c"):
            await sessions.open(name)
        await sessions.enqueue("a", "one")
        await sessions.enqueue("b", "two", priority=5)
        await sessions.enqueue("c", "three", at=LATER, key="k")
        claim, _ = await sessions.store.claim("c", version=1, owner="host:1", lease=60.0)  # type: ignore[attr-defined]
        found = await sessions.queue()
        assert [(each.session_id, each.count) for each in found.waiting] == [("b", 1), ("a", 1)]
        assert [(each.session_id, each.holder, each.lapsed) for each in found.running] == [("c", "host:1", False)]
        assert [(each.session_id, each.name) for each in found.delayed] == [("c", "k")]
        assert found.parked == []
        await sessions.store.release(claim)  # type: ignore[attr-defined]


async def test_what_waits_behind_a_pause_or_a_person_is_held(tmp_path: Path) -> None:
    """It is not ready for workers, and operators see it. A parked session is listed with its waiting messages."""
    async with sessions_in(tmp_path) as sessions:
        for owner in ("ann", "ben"):
            await sessions.of(owner).open("a")
            await sessions.of(owner).enqueue("a", "one")
            await sessions.of(owner).suspend("a")
        await parked(sessions, "p")
        await sessions.enqueue("p", "two")
        found = await sessions.queue()
        assert (len(found.held), found.waiting) == (2, [])
        assert [(each.session_id, each.waiting) for each in found.parked] == [("p", 1)]
        assert [each.owner for each in (await sessions.of("ann").queue()).held] == ["ann"]


async def test_an_interrupted_run_is_told_once(tmp_path: Path) -> None:
    """Its message does not wait any more; those behind it do. A run that was handed over was not killed."""
    model = Hanging(lambda request: "never")
    async with connect(f"sqlite:///{tmp_path}/sessions.db", model="offline", driver=model) as sessions:
        await sessions.open("a")
        for text in ("one", "two"):
            await sessions.enqueue("a", text, key=text)
        work = asyncio.ensure_future(advance(sessions, "a"))
        await model.is_asked.wait()
        assert (await sessions.queue()).waiting == []
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        found = await sessions.queue()
        assert [(each.session_id, each.count) for each in found.waiting] == [("a", 1)]
        assert [each.lapsed for each in found.running] == [True]
        assert found.handed_over == {"a"}


async def test_an_owner_sees_nobody_elses(tmp_path: Path) -> None:
    """An owner sees only its own waiting, running, delayed and parked sessions."""
    async with sessions_in(tmp_path) as sessions:
        for owner in ("ann", "ben"):
            hers = sessions.of(owner)
            for name in ("a", "b", "c"):
                await hers.open(name)
            await hers.enqueue("a", "one")
            await hers.enqueue("b", "two", at=LATER)
            await parked(hers, "c")
        found = await sessions.of("ann").queue()
        assert [each.owner for each in found.waiting] == ["ann"]
        assert [each.owner for each in found.parked] == ["ann"]
        assert len(found.delayed) == 1


async def test_what_is_dropped_is_refused_on_record(tmp_path: Path) -> None:
    """Waiting for its answer raises InputRefused, and the session takes the next message."""
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        asked = [await sessions.enqueue("a", text, key=text) for text in ("one", "two")]
        dropped = await sessions.drop_waiting("a", "the order was cancelled")
        assert [(each.key, each.text) for each in dropped] == [("one", "one"), ("two", "two")]
        for each in asked:
            with pytest.raises(InputRefused, match="the order was cancelled"):
                await each.reply(timeout=5)
        assert (await sessions.queue()).waiting == []
        assert [await sessions.drop_waiting("a")] == [[]]
        assert (await sessions.send("a", "three")).text == "yes"


async def test_what_waits_in_a_closed_session_can_be_dropped(tmp_path: Path) -> None:
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "one")
        await sessions.suspend("a")
        assert len(await sessions.drop_waiting("a")) == 1


async def test_nothing_is_dropped_beside_a_run(tmp_path: Path) -> None:
    """The run may be answering that very message."""
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "one")
        claim, _ = await sessions.store.claim("a", version=1, owner="host:1", lease=60.0)  # type: ignore[attr-defined]
        with pytest.raises(SessionBusy):
            await sessions.drop_waiting("a")
        await sessions.store.release(claim)  # type: ignore[attr-defined]
        assert [each.count for each in (await sessions.queue()).waiting] == [1]


async def test_a_blank_reason_is_refused(tmp_path: Path) -> None:
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "one")
        with pytest.raises(InvalidData):
            await sessions.drop_waiting("a", " ")
        assert len((await sessions.queue()).waiting) == 1


async def test_a_timer_can_be_dropped(tmp_path: Path) -> None:
    """It is dropped by its key; a missing timer raises no error."""
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "one", at=LATER, key="k")
        assert await sessions.drop_timer("a", "k")
        assert not await sessions.drop_timer("a", "k")
        assert (await sessions.queue()).delayed == []


async def test_a_parked_session_is_opened_and_nothing_is_sent_from_here(tmp_path: Path) -> None:
    """Its messages may be the ones that took processes down: only a worker sends them."""
    async with sessions_in(tmp_path) as sessions:
        await parked(sessions, "a")
        with pytest.raises(InvalidData, match="not parked"):
            await sessions.unpark((await sessions.open("b")).id)
        await sessions.enqueue("a", "two")
        (found,) = (await sessions.queue()).parked
        assert (found.session_id, found.waiting) == ("a", 1)
        await sessions.unpark("a")
        await sessions.runtime.idle()
        after = await sessions.queue()
        assert after.parked == []
        assert [(each.session_id, each.count) for each in after.waiting] == [("a", 1)]
        assert (await sessions.info("a")).tags == ()
