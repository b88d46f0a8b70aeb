"""Work that is long: others have their turns meanwhile, whichever way it is done."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from tests.turns import counted_turns

from perdure.aio import aside, in_slices

WHO: ContextVar[str] = ContextVar("who")


async def test_others_have_a_turn_after_every_slice() -> None:
    """A sequence comes whole and in order, a few items at a time."""
    async with counted_turns() as turns:
        slices = [list(some) async for some in in_slices(range(10), 3)]
        assert slices == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert turns.count >= len(slices)


async def test_work_aside_is_done_in_another_thread_in_the_caller_s_context() -> None:
    """It returns what the function returns, and raises what it raises."""
    WHO.set("me")
    assert await aside(lambda: (WHO.get(), threading.get_ident() != threading.main_thread().ident)) == ("me", True)
    with pytest.raises(ZeroDivisionError):
        await aside(divmod, 1, 0)


async def test_work_aside_does_not_wait_for_tools_that_block() -> None:
    """The loop's executor may be full of functions that wait: this goes on all the same."""
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocked = asyncio.create_task(asyncio.to_thread(go_on.wait, 30))
    await asyncio.sleep(0)
    try:
        assert await aside(sum, [1, 2]) == 3
        assert not blocked.done()
    finally:
        go_on.set()
        await blocked
