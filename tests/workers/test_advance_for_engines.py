"""`advance` as a step of a workflow engine calls it: cancelled, twice at once, and after a lost step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.waiting import until

from perdure import MemoryStore, Sessions, StoreError, connect, tool
from perdure.protocols import Outcome, SessionStore
from perdure.sessions.queueing import Queued
from perdure.testing import FailingStore
from perdure.workers import advance


class Desk:
    """A tool that waits until the test lets it go, and the number of calls of each."""

    def __init__(self) -> None:
        self.packed: list[int] = []
        self.shipped: list[int] = []
        self.may_ship = asyncio.Event()

    @asynccontextmanager
    async def sessions(self, url: str | SessionStore) -> AsyncIterator[Sessions]:
        @tool
        def pack(order: int) -> str:
            """Pack an order."""
            self.packed.append(order)
            return "packed"

        @tool(idempotent=True)
        async def ship(order: int) -> str:
            """Ship an order."""
            self.shipped.append(order)
            await self.may_ship.wait()
            return "shipped"

        async with connect(url, model="offline", tools=[pack, ship], grace=0.0) as sessions:
            yield sessions

    async def asked(self, sessions: Sessions) -> Queued:
        await sessions.open("order-7")
        return await sessions.enqueue("order-7", "pack(order=7) then ship(order=7)", key="evt-1")


async def test_a_step_that_is_cancelled_hands_its_run_over() -> None:
    """As at an engine's shutdown: the run is not ended, and the next call continues it without a completed tool."""
    desk = Desk()
    async with desk.sessions("memory://") as sessions:
        asked = await desk.asked(sessions)
        step = asyncio.create_task(advance(sessions, "order-7"))
        await until(lambda: desk.shipped)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert await sessions.store.is_interrupted("order-7")  # type: ignore[attr-defined]
        desk.may_ship.set()
        assert await advance(sessions, "order-7") is Outcome.DONE
        reply = await asked.reply(timeout=5)
        assert reply is not None
        assert "shipped" in reply.text
    assert (desk.packed, desk.shipped) == ([7], [7, 7])


async def test_a_step_that_is_cancelled_disturbs_no_other() -> None:
    """Steps of one connection are cancelled one by one."""
    desk = Desk()
    async with desk.sessions("memory://") as sessions:
        await desk.asked(sessions)
        await sessions.open("order-8")
        other = await sessions.enqueue("order-8", "ship(order=8)")
        steps = [asyncio.create_task(advance(sessions, name)) for name in ("order-7", "order-8")]
        await until(lambda: len(desk.shipped) == 2)
        steps[0].cancel()
        await asyncio.wait(steps[:1])
        desk.may_ship.set()
        assert await steps[1] is Outcome.DONE
        reply = await other.reply(timeout=5)
        assert reply is not None
        assert "shipped" in reply.text


async def test_a_connection_that_is_left_hands_over_what_steps_run(tmp_path: Path) -> None:
    """Such a step gets the outcome that the session is busy: it has to be tried again."""
    desk = Desk()
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    async with desk.sessions(url) as sessions:
        await desk.asked(sessions)
        step = asyncio.create_task(advance(sessions, "order-7"))
        await until(lambda: desk.shipped)
    assert await step is Outcome.BUSY
    desk.may_ship.set()
    async with desk.sessions(url) as sessions:
        assert await advance(sessions, "order-7") is Outcome.DONE
    assert desk.packed == [7]


async def test_a_second_step_beside_the_first_is_told_that_it_is_busy(tmp_path: Path) -> None:
    """An engine may run a step twice: the tools do not run twice."""
    desk = Desk()
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    async with desk.sessions(url) as sessions, desk.sessions(url) as others:
        await desk.asked(sessions)
        step = asyncio.create_task(advance(sessions, "order-7"))
        await until(lambda: desk.shipped)
        assert await advance(others, "order-7") is Outcome.BUSY
        desk.may_ship.set()
        assert await step is Outcome.DONE
        assert await advance(others, "order-7") is Outcome.DONE
    assert (desk.packed, desk.shipped) == ([7], [7])


async def test_a_store_that_fails_is_raised_and_the_step_can_be_repeated() -> None:
    """An engine retries it; nothing is lost or done twice."""
    desk = Desk()
    desk.may_ship.set()
    failing = FailingStore(MemoryStore())
    async with desk.sessions(failing) as sessions:
        asked = await desk.asked(sessions)
        failing.fail("append")
        with pytest.raises(StoreError):
            await advance(sessions, "order-7")
        assert await advance(sessions, "order-7") is Outcome.DONE
        assert await asked.reply(timeout=5) is not None
    assert (desk.packed, desk.shipped) == ([7], [7])
