"""Workers erase sessions that were kept for long enough, one worker at a time, and delay nobody."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import address_of, store_at
from tests.waiting import until

from perdure import InvalidData, MemoryStore, Retention, Sessions, connect
from perdure.model.ids import now, use
from perdure.testing import FrozenClock
from perdure.workers import Worker, retaining
from perdure.workers.retaining import Retainer, SteadyClock

DAY = timedelta(days=1)


@asynccontextmanager
async def working(app: Sessions, **options: Any) -> AsyncIterator[Worker]:
    async with Worker(app, **{"retain_every": 0.3, "drain": 0.0, **options}) as worker:
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop(at_once=True)
            await task


async def old(app: Sessions, *names: str) -> None:
    """Begin sessions ten days ago."""
    with use(clock=FrozenClock(now() - 10 * DAY, tick=0.001)):
        for name in names:
            await (await app.open(name)).send("hello")


async def ids_in(app: Sessions) -> set[str]:
    return {str(info.id) for info in await app.headers()}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])
@pytest.mark.sample(2)
async def test_a_worker_obeys_rules(kind: str, tmp_path: Path) -> None:
    """It obeys the rules of its connection, and those that others have stored with a session."""
    store = MemoryStore() if kind == "memory" else store_at(address_of(kind, tmp_path))
    async with connect(store, model="offline", keep=Retention(idle=5 * DAY)) as app:
        await old(app, "old", "kept", "held")
        await app.open("young")
        await app.retain("kept", Retention())
        await app.hold("held")
        with use(clock=FrozenClock(now() - DAY, tick=0.001)):
            await app.open("brief")
            await app.retain("brief", Retention(idle=timedelta(hours=1)))
        async with working(app):
            await until(lambda: _equal(app, {"kept", "held", "young"}))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_of_two_workers_one_erases(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is erased twice, and no error is logged."""
    caplog.set_level(logging.INFO, "perdure.workers")
    address, keep = address_of(kind, tmp_path), Retention(idle=5 * DAY)
    names = [f"s{number:03}" for number in range(24)]
    async with (
        connect(store_at(address), model="offline", keep=keep) as one,
        connect(store_at(address), keep=keep) as other,
    ):
        await old(one, *names)
        async with working(one), working(other):
            await until(lambda: _equal(one, set()))
            await asyncio.sleep(0.8)  # the rounds after it find nothing
    told = [record for record in caplog.records if "retention erased" in record.message]
    assert sum(record.facts["erased"] for record in told) == len(names)  # type: ignore[attr-defined]  # of our own lines
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_what_stays_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the session and the reason, and does not repeat them each round."""
    caplog.set_level(logging.INFO, "perdure.workers")
    async with connect("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        await old(app, "queued", "held")
        with use(clock=FrozenClock(now() - 10 * DAY, tick=0.001)):
            await app.hold("held", "case-7")
            await app.suspend("queued")
            await app.enqueue("queued", "later")
        async with working(app, retain_every=0.05):
            await asyncio.sleep(1.5)
    told = [record.message for record in caplog.records if "leaves for now" in record.message]
    assert len(told) == 1
    assert "queued (queued)" in told[0]
    assert "held (hold)" in told[0]


async def test_a_round_that_was_cut_off_is_begun_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free when its lease has run out; until then, and after a whole round, no other begins."""
    async with connect("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        await old(app, "s")
        monkeypatch.setattr(retaining, "_LEASE", 0.3)
        queue: Any = app.store
        killed, other = (Retainer(app, queue, 50.0, asyncio.Event()) for _ in range(2))
        assert await killed._is_taken()  # and never comes back
        await other.look()
        assert await ids_in(app) == {"s"}
        await asyncio.sleep(0.35)
        await other.look()
        assert await ids_in(app) == set()
        await old(app, "t")
        third = Retainer(app, queue, 50.0, asyncio.Event())
        await third.look()
        assert await ids_in(app) == {"t"}


async def test_a_long_round_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It renews its place between two commits, so that nobody begins another round meanwhile."""
    monkeypatch.setattr(retaining, "_LEASE", 0.3)
    async with connect("memory://", model="offline") as app:
        first, second = (Retainer(app, app.store, 50.0, asyncio.Event()) for _ in range(2))  # type: ignore[arg-type]
        assert await first._is_taken()
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            await first._between()
            second._not_before = 0.0
            assert not await second._is_taken()


async def test_a_worker_that_is_stopped_leaves_the_round() -> None:
    """It erases no further sessions; the next round does."""
    async with connect("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        await old(app, *(f"s{number}" for number in range(60)))  # more than one commit takes
        stopped = asyncio.Event()
        stopped.set()
        await Retainer(app, app.store, 50.0, stopped).look()  # type: ignore[arg-type]  # a queue, too
        assert 0 < len(await ids_in(app)) < 60
        left = len(await ids_in(app))
        assert (await app.apply_retention()).sessions == left
        assert await ids_in(app) == set()


async def test_a_place_taken_by_a_wrong_clock_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the year 2030 does not make others wait until then, once the clock is right again."""
    async with connect("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        await old(app, "s")
        with use(clock=FrozenClock(now() + 1000 * DAY)):
            await app.store.reserve("perdure.retention", cost=600.0, burst=30.0)  # type: ignore[attr-defined]
        await Retainer(app, app.store, 600.0, asyncio.Event()).look()  # type: ignore[arg-type]
        assert await ids_in(app) == set()


async def test_a_clock_that_jumps_ahead_erases_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose clock is a year ahead for a while continues to count as before, and says so once."""
    clock = FrozenClock(datetime(2026, 1, 1, tzinfo=UTC))
    with use(clock=clock):
        async with connect("memory://", model="offline", keep=Retention(idle=30 * DAY)) as app:
            await app.open("s")
            retainer = Retainer(app, app.store, 0.0, asyncio.Event())  # type: ignore[arg-type]
            clock.advance(365 * 86_400)
            for _ in range(2):
                await retainer.look()
            assert await ids_in(app) == {"s"}
            clock.advance(-365 * 86_400)
            await retainer.look()
            assert await ids_in(app) == {"s"}
    assert [record.message.partition(" by")[0] for record in caplog.records] == ["the clock has jumped ahead"]


def test_a_steady_clock_believes_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump ahead counts once it has lasted for an hour, a jump back at once."""
    clock, steady = FrozenClock(datetime(2026, 1, 1, tzinfo=UTC)), [0.0]
    monkeypatch.setattr(retaining.time, "monotonic", lambda: steady[0])

    def pass_by(seconds: float, ahead: float = 0.0) -> datetime:
        steady[0] += seconds
        clock.advance(seconds + ahead)
        return told()

    with use(clock=clock):
        told: Callable[[], datetime] = SteadyClock()
        start = clock()
        assert pass_by(100) == start + timedelta(seconds=100)
        assert pass_by(100, ahead=30) == start + timedelta(seconds=230)
        assert pass_by(100, ahead=10_000) == start + timedelta(seconds=330)
        assert pass_by(3500) == start + timedelta(seconds=3830)
        assert pass_by(100) == clock() == start + timedelta(seconds=13_930)
        assert pass_by(0, ahead=-5_000) == clock()
        assert pass_by(10) == clock()


async def test_a_worker_may_leave_it_to_others() -> None:
    """Without a time between rounds it erases nothing; a wrong one is refused."""
    async with connect("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        await old(app, "s")
        async with working(app, retain_every=None):
            await asyncio.sleep(0.8)
        assert await ids_in(app) == {"s"}
        with pytest.raises(InvalidData, match="retain_every"):
            Worker(app, retain_every=-1.0)
        with pytest.raises(InvalidData, match="more than 0 seconds"):
            Worker(app, retain_every=0.0)


async def _equal(app: Sessions, expected: set[str]) -> bool:
    return await ids_in(app) == expected
