"""A run is cancelled by its id, and no other run is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import perdure
from perdure.actions.inbox import CANCEL
from perdure.model.stop import StopReason
from perdure.protocols import Entry


async def test_a_wish_that_comes_late_stops_no_other_run(tmp_path: Path) -> None:
    """The run may have ended, and another begun, between the look and the request to cancel."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    @perdure.tool(idempotent=True)
    async def hold() -> str:
        """Wait."""
        begun.set()
        await go_on.wait()
        return "held"

    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", model="offline", tools=[hold]) as sessions:
        chat = await sessions.open("a")
        first = await chat.send("hello")
        assert first.session.state.execution is not None
        old = first.session.state.execution.execution_id
        assert not await chat.cancel(run=old)
        run = await chat.start("hold()")
        await begun.wait()
        assert not await chat.cancel(run=old)
        assert sessions.runtime.journal is not None
        await sessions.runtime.journal.post(chat.id, Entry(CANCEL, {"run": old}))
        await asyncio.sleep(0.5)  # it looks several times a second
        assert not run.is_done
        go_on.set()
        assert (await run.result()).stop_reason is StopReason.COMPLETED


async def test_the_run_that_is_meant_is_stopped(tmp_path: Path) -> None:
    begun = asyncio.Event()

    @perdure.tool(idempotent=True)
    async def hold() -> str:
        """Wait without end."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    url = f"sqlite:///{tmp_path}/a.db"
    async with perdure.connect(url, model="offline", tools=[hold]) as sessions, perdure.connect(url) as elsewhere:
        run = await (await sessions.open("a")).start("hold()")
        await begun.wait()
        (loop,) = (await elsewhere.record("a")).loops
        assert await elsewhere.cancel("a", run=loop.loop_id)
        assert (await run.result()).stop_reason is not StopReason.COMPLETED
        assert not await elsewhere.cancel("a", run=loop.loop_id)
