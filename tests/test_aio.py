"""Long work: other tasks get their turns during it, in slices or in a thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from tests.turns import counted_turns

from perdure import aio
from perdure.aio import aside, in_slices, in_turns

WHO: ContextVar[str] = ContextVar("who")


async def test_others_have_a_turn_after_every_slice() -> None:
    """A sequence comes whole and in order, a few items at a time."""
    async with counted_turns() as turns:
        slices = [list(some) async for some in in_slices(range(10), 3)]
        assert slices == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert turns.count >= len(slices)


async def test_work_aside_is_done_in_another_thread_in_the_caller_s_context() -> None:
    """It returns the function's value, and raises its exception."""
    WHO.set("me")
    assert await aside(lambda: (WHO.get(), threading.get_ident() != threading.main_thread().ident)) == ("me", True)
    with pytest.raises(ZeroDivisionError):
        await aside(divmod, 1, 0)


async def test_work_aside_does_not_wait_for_tools_that_block() -> None:
    """The loop's executor may be full of functions that wait: the work is done without it."""
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


async def test_a_thread_pauses_between_items_and_the_loop_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items come whole and in order. A pause in the loop's own thread would keep all tasks waiting."""
    paused_in: list[int] = []
    monkeypatch.setattr(aio, "_TURN", -1)
    monkeypatch.setattr(aio, "sleep", lambda _: paused_in.append(threading.get_ident()))
    assert list(in_turns(range(5))) == [0, 1, 2, 3, 4]
    assert paused_in == []
    assert await asyncio.to_thread(lambda: list(in_turns(range(5)))) == [0, 1, 2, 3, 4]
    assert len(paused_in) == 5
    assert threading.get_ident() not in paused_in


def test_a_thread_that_is_not_due_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that fits in a turn is not slowed down."""
    monkeypatch.setattr(aio, "_TURN", 60)
    monkeypatch.setattr(aio, "sleep", lambda _: pytest.fail("it has paused"))
    assert list(in_turns(range(100))) == list(range(100))
