"""Work that must not stop half-way is finished, even if its caller is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.aio import finish_despite_cancel


class Work:
    """Work that waits until it may end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_done = False
        self._error = error

    async def __call__(self) -> str:
        self.has_begun.set()
        await self.may_end.wait()
        self.is_done = True
        if self._error is not None:
            raise self._error
        return "done"


async def begun(work: Work) -> asyncio.Task[str]:
    task = asyncio.ensure_future(finish_despite_cancel(work()))
    await work.has_begun.wait()
    return task


async def test_what_is_awaited_to_the_end_returns_or_raises_as_ever() -> None:
    work, failing = Work(), Work(ValueError("no"))
    tasks = [await begun(work), await begun(failing)]
    work.may_end.set()
    failing.may_end.set()
    assert await tasks[0] == "done"
    with pytest.raises(ValueError, match="no"):
        await tasks[1]


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_a_cancellation_waits_for_the_end(error: Exception | None) -> None:
    """This holds for any number of cancellations; the caller is cancelled after the work, whose outcome is dropped."""
    work = Work(error)
    task = await begun(work)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_done
    assert task.cancelled()


async def test_a_time_out_waits_for_the_end() -> None:
    work = Work()
    asyncio.get_running_loop().call_later(0.02, work.may_end.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await finish_despite_cancel(work())
    assert work.is_done


async def test_work_that_is_cancelled_itself_is_waited_for_no_longer() -> None:
    """A loop that closes does this: it cancels every task, also one that has not begun."""
    mine = asyncio.current_task()
    work = Work()
    task = await begun(work)
    (inner,) = asyncio.all_tasks() - {task, mine}
    inner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def nothing() -> None:
        raise AssertionError("it was cancelled before it began")

    outer: asyncio.Task[Any] = asyncio.ensure_future(finish_despite_cancel(made := nothing()))
    while not (inner_tasks := asyncio.all_tasks() - {outer, mine}):
        asyncio.get_running_loop().call_soon(lambda: [each.cancel() for each in asyncio.all_tasks() - {outer, mine}])
        await asyncio.sleep(0)
    await asyncio.wait([*inner_tasks, outer])
    assert outer.cancelled()
    made.close()
