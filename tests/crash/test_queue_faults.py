"""A fault at every call of the store in turn, while a message is left, a timer rings, and a worker looks at a session.

The call fails before it is carried out, or its answer is lost. The process dies, or continues with what comes next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.crash import agent_process
from tests.crash.test_faults import MOST_CALLS, Ledger, opened

from perdure import PerdureError, Sessions, StoreError, connect
from perdure.archive import fsck
from perdure.model.ids import use
from perdure.protocols import Outcome
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver
from perdure.workers import InboxDispatcher, advance
from perdure.workers.timers import Bell

LEASE_AND_MORE = 60.0
KINDS = ("memory", "sqlite", "postgres")
pytestmark = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("after", [False, True], ids=["before", "after"]),
    pytest.mark.parametrize("dies", [False, True], ids=["goes-on", "dies"]),
]


class Faulty(FailingStore):
    """An open store whose n-th call fails: once, or with all that follow."""

    is_open = True

    def __init__(self, store: Any, call: int, *, after: bool, dies: bool) -> None:
        super().__init__(store)
        self._struck = (call, after)
        if dies:
            self.crash(call=call, after=after)
        self.has_struck = False

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        mine = self.calls.total() + 1
        self.has_struck = self.has_struck or mine == self._struck[0]
        if mine == self._struck[0] and not self._struck[1] and self._crash is None:
            self.calls[verb] += 1
            raise StoreError(f"This {verb} was told to fail.")
        answer = await super()._call(verb, *args, **kwargs)
        if mine == self._struck[0] and self._crash is None:
            raise StoreError(f"The answer to this {verb} was lost.")
        return answer


class Scene:
    """A session on a store that works, and another connection to the same store that fails."""

    def __init__(self, store: Any, clock: FrozenClock, ledger: Ledger, call: int, *, after: bool, dies: bool) -> None:
        self.id = ""
        self.clock = clock
        self.ledger = ledger
        self.faulty = Faulty(store, call, after=after, dies=dies)
        self.dies = dies
        self.sound = self._connected(store)
        self.struck = self._connected(self.faulty)

    def _connected(self, store: Any) -> Sessions:
        sessions = connect(store, driver=ScriptedDriver(agent_process.script()))
        sessions._connection.loops = self.ledger.loops()
        return sessions

    async def work(self) -> None:
        """Let sound workers look at the session until nothing is left to do."""
        for _ in range(6):
            if await advance(self.sound, self.id) is Outcome.DONE:
                break
            self.clock.advance(LEASE_AND_MORE)
        else:
            raise AssertionError("it is never done")

    async def check(self, times: int = 1) -> None:
        """Assert that the message was sent once, its tools were not repeated, and nothing is left behind."""
        session = await self.sound.session(self.id)
        assert [m.text for m in session.state.messages if m.role == "user"] == ["Do it."] * times
        if times == 1:
            self.ledger.check_send(session)
        store: Any = self.sound.store
        assert await store.read(self.id, inbox=True) == []
        assert await store.lapsed() == []
        assert not await store.is_claimed(self.id)


@asynccontextmanager
async def scene(store: Any, call: int, **how: bool) -> AsyncIterator[Scene]:
    clock, ledger = FrozenClock(tick=0.0001), Ledger()
    with use(clock=clock):
        made = Scene(store, clock, ledger, call, **how)
        async with made.sound:
            made.id = (await made.sound.open(agent=agent_process.AGENT)).id
            await made.struck.__aenter__()
            try:
                yield made
            finally:
                made.faulty.heal()
                await made.struck.__aexit__(StoreError, None, None)


async def everywhere(kind: str, path: Path, play: Any, *, least: int, **how: bool) -> None:
    """Play a scene with the fault at the first call, the second, and so on until no call is left to fail."""
    async with opened(kind, path) as store:
        for call in range(1, MOST_CALLS, 3 if kind == "postgres" else 1):
            async with scene(store, call, **how) as it:
                await play(it)
                has_struck = it.faulty.has_struck
            if not has_struck:
                break
        assert least < call < MOST_CALLS - 3
        assert (await fsck(store)).problems == ()


@pytest.mark.sample(3)
async def test_leaving_a_message(kind: str, after: bool, dies: bool, tmp_path: Path) -> None:
    """After an error, the sender leaves it again under the same key, and it is answered once."""

    async def play(it: Scene) -> None:
        with suppress(StoreError):
            await it.struck.enqueue(it.id, "Do it.", key="evt-1")
        queued = await it.sound.enqueue(it.id, "Do it.", key="evt-1")
        await it.work()
        await it.check()
        reply = await queued.reply(timeout=5)
        assert reply is not None
        assert reply.text == "done"

    await everywhere(kind, tmp_path, play, least=3, after=after, dies=dies)


@pytest.mark.sample(3)
async def test_leaving_a_message_for_later(kind: str, after: bool, dies: bool, tmp_path: Path) -> None:
    """Left again after an error, its timer is there once."""

    async def play(it: Scene) -> None:
        at = it.clock() + timedelta(seconds=5)
        for sessions in (it.struck, it.sound):
            with suppress(StoreError):
                await sessions.enqueue(it.id, "Do it.", key="evt-1", at=at)
        it.clock.advance(6)
        await bell(it.sound).ring()
        await it.work()
        await it.check()

    await everywhere(kind, tmp_path, play, least=1, after=after, dies=dies)


@pytest.mark.sample(3)
async def test_ringing(kind: str, after: bool, dies: bool, tmp_path: Path) -> None:
    """A message for later and one of a schedule are put in once each, at this ring or the next."""

    async def play(it: Scene) -> None:
        await it.sound.enqueue(it.id, "Do it.", at=it.clock() + timedelta(seconds=5))
        other = (await it.sound.open(agent=agent_process.AGENT)).id
        await it.sound.schedule("news", "Do it.", cron="* * * * *", session_id=other)
        it.clock.advance(60)
        for sessions in (it.struck, it.sound):
            with suppress(StoreError):
                await bell(sessions).ring()
        assert await it.sound.unschedule("news", other)
        store: Any = it.sound.store
        assert len(await store.read(other, inbox=True)) == 1
        await it.work()
        await it.check()

    await everywhere(kind, tmp_path, play, least=2, after=after, dies=dies)


@pytest.mark.sample(3)
async def test_a_worker_looks_at_a_session(kind: str, after: bool, dies: bool, tmp_path: Path) -> None:
    """The next worker continues a killed worker's run; a worker that lives looks again. Nothing is done twice."""

    async def play(it: Scene) -> None:
        await it.sound.enqueue(it.id, "Do it.")
        for _ in range(1 if it.dies else 2):
            with suppress(PerdureError):
                await advance(it.struck, it.id)
        it.clock.advance(LEASE_AND_MORE)
        await it.work()
        await it.check()

    await everywhere(kind, tmp_path, play, least=15, after=after, dies=dies)


@pytest.mark.sample(3)
async def test_a_pause_ends(kind: str, after: bool, dies: bool, tmp_path: Path) -> None:
    """A session that was suspended until a time is opened then, at this ring or the next."""

    async def play(it: Scene) -> None:
        await it.sound.suspend(it.id, until=it.clock() + timedelta(seconds=5))
        await it.sound.enqueue(it.id, "Do it.")
        it.clock.advance(60)
        for sessions in (it.struck, it.sound):
            with suppress(PerdureError):
                await bell(sessions).ring()
        await it.work()
        await it.check()

    await everywhere(kind, tmp_path, play, least=2, after=after, dies=dies)


def bell(sessions: Sessions) -> Bell:
    store: Any = sessions.store
    return Bell(store, InboxDispatcher(store), sessions.runtime.execute)
