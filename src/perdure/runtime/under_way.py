"""The work that a runtime has begun and not ended, so that closing it leaves nothing half done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perdure.errors import PerdureError
from perdure.protocols import Sequel

_log = logging.getLogger("perdure.runtime")


class UnderWay:
    """Executions, the parts of them that can be cancelled, and what the runtime does in tasks of its own."""

    def __init__(self) -> None:
        self._executions: set[asyncio.Future[None]] = set()
        self._cancellable: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closing = False

    def begin(self) -> asyncio.Future[None]:
        """Count an execution as under way until it is given back to `end`."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._executions.add(over)
        return over

    def end(self, over: asyncio.Future[None]) -> None:
        self._executions.discard(over)
        if not over.done():  # a task that waited for it may have been cancelled, and the future with it
            over.set_result(None)

    @contextmanager
    def cancellable(self, work: asyncio.Future[Any]) -> Iterator[None]:
        """Cancel `work` if the runtime is closed while the block lasts, or at once if it is being closed already."""
        self._cancellable.add(work)
        if self.is_closing:
            work.cancel()
        try:
            yield
        finally:
            self._cancellable.discard(work)

    async def follow(self, sequel: Sequel) -> None:
        """Carry out the sequel of an action, if it is needed, in a task of its own. What fails there is logged."""
        task = asyncio.current_task()
        if self.is_closing:
            return
        if task is not None and task.cancelling():  # it may be cancelled again, and must not wait here
            self._begin(sequel)
            return
        try:
            if await sequel.is_needed():
                self._begin(sequel)
        except PerdureError as error:
            _log.warning("what follows an action could not be looked for: %s", error)

    def _begin(self, sequel: Sequel) -> None:
        # Kept in a set, since the event loop holds tasks weakly.
        task = asyncio.get_running_loop().create_task(sequel.carry_out())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("what followed an action has failed", exc_info=task.exception())

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while waiting := [*self._executions, *self._tasks]:
            await asyncio.wait(waiting)

    async def close(self, grace: float) -> None:
        """Wait for what is under way, for at most `grace` seconds. Then interrupt it, and wait until it has ended."""
        try:
            await asyncio.wait_for(self.idle(), grace)
        except TimeoutError:
            self.is_closing = True
            for work in self._cancellable:
                work.cancel()
            await self.idle()
        finally:
            self.is_closing = False
