"""Recovery in the background: a connection continues killed runs while it is open, without holding anybody up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from perdure.actions.resume import RecoveryReport
from perdure.errors import PerdureError
from perdure.model.ids import SessionId

_log = logging.getLogger("perdure.recovery")


class Recovering:
    """A search for killed runs, at once and then at intervals: on other machines a claim lapses only with its lease.

    It is stopped by `stop`, never by a cancellation. That would end the run that it is continuing, and cut its answer
    off. When the connection is left, such a run is interrupted like any other, and waits for the next process.
    """

    def __init__(
        self,
        lapsed: Callable[[], Awaitable[Sequence[SessionId]]],
        recover: Callable[[SessionId], Awaitable[RecoveryReport]],
        every: float,
    ) -> None:
        self._lapsed = lapsed
        self._recover = recover
        self._every = every
        self._is_stopped = False
        self._awake = asyncio.Event()
        self._told: set[tuple[str, str]] = set()
        """The failures that were logged: a run that cannot be continued is met again at every look."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> None:
        """Begin no other recovery."""
        self._is_stopped = True
        self._awake.set()

    def look_soon(self) -> None:
        """Look for killed runs now, and not at the end of the interval: somebody has met one."""
        self._awake.set()

    async def end(self) -> None:
        """Wait until nothing is being recovered. Call `stop` first."""
        await asyncio.wait({self._task})
        if not self._task.cancelled() and self._task.exception() is not None:
            _log.error("the recovery of killed runs has failed", exc_info=self._task.exception())

    async def _watch(self) -> None:
        while not self._is_stopped:
            self._awake.clear()
            try:
                await self._look()
            except PerdureError as error:  # the store may work again at the next look
                _log.warning("killed runs could not be looked for: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), self._every)

    async def _look(self) -> None:
        for session_id in await self._lapsed():
            if self._is_stopped:
                return
            for failed, reason in (await self._recover(session_id)).failed:
                if (failed, reason) not in self._told:
                    self._told.add((failed, reason))
                    _log.error("the killed run of session %s could not be recovered: %s", failed, reason)
