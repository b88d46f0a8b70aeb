"""The worker: a process, or a part of one, that runs sessions in which others have left messages."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from perdure.errors import ConfigurationError, PerdureError
from perdure.model.ids import SessionId
from perdure.protocols import RECOVERY, Dispatcher, Outcome, Terms, WorkerOptions
from perdure.runtime.runtime import SessionRuntime
from perdure.workers.advancing import Advancing, Apart, queue_of
from perdure.workers.choosing import dispatcher_of
from perdure.workers.inbox import InboxDispatcher
from perdure.workers.retaining import Retainer
from perdure.workers.timers import Bell

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

_log = logging.getLogger("perdure.workers")
_SWEEPS_A_LEASE = 6
_LONGEST_BETWEEN_SWEEPS = 1.0
"""The most seconds between two sweeps. A lapsed run has to be continued soon, even if the lease is long."""
_TICK = 0.5
"""Seconds between two looks at the timers. Timers that come due before the next look are rung in time. Only one that is
set after the look may be late, by at most this."""


class WorkerSettings(TypedDict, total=False):
    """The settings of a worker, the fields of `WorkerOptions`."""

    concurrency: int
    lease: float
    drain: float
    tries: int
    per_owner: int | None
    least_priority: int | None
    retain_every: float | None


class Worker:
    """A worker. It runs sessions in which others have left messages, and continues runs whose processes have died.

    Use it with `async with`, and await `run()`. After `stop()` it takes no further session, and runs have `drain`
    seconds to end. Runs that are left are handed over: they are not ended, and another worker continues them.

    `sessions` must be those of every owner. Without `per_owner`, their own limit counts. `dispatcher` hands sessions
    out. By default that is procrastinate on PostgreSQL, if it is installed, or else the store's own inboxes. A run
    that has died with its process is tried again in `apart`, such as a process of its own.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        dispatcher: Dispatcher | None = None,
        apart: Apart | None = None,
        **options: Unpack[WorkerSettings],
    ) -> None:
        options.setdefault("per_owner", sessions.runtime.terms.per_owner)
        self.options = WorkerOptions(**options)
        self._sessions = sessions
        if sessions.owner is not None:
            raise ConfigurationError("A worker runs the sessions of every owner. Connect without an owner.")
        self._journal, queue = queue_of(sessions.runtime)
        # The jobs of an engine cannot be filtered by urgency. The inboxes can, even beside workers that use the engine.
        is_choosy = self.options.least_priority is not None
        self.dispatcher = dispatcher or (InboxDispatcher(queue) if is_choosy else dispatcher_of(queue))
        self._runtime = self._own_runtime()
        self._advancing = Advancing(self._runtime, sessions.loops, tries=self.options.tries, apart=apart)
        self._bell = Bell(queue, self.dispatcher, self._runtime.execute)
        self._stopped = asyncio.Event()
        every = self.options.retain_every
        self._retainer = None if every is None else Retainer(sessions, queue, every, self._stopped)
        self._leaving: asyncio.Task[None] | None = None
        self._told: set[tuple[str, str]] = set()
        """The errors that were logged. Sessions that cannot be run here come up again and again."""

    def _own_runtime(self) -> SessionRuntime:
        """Return a runtime beside that of the sessions. To close it hands over the worker's runs, and no others."""
        terms = Terms(lease=self.options.lease, per_owner=self.options.per_owner)
        return self._sessions.runtime.beside(terms)

    async def __aenter__(self) -> Self:
        self._sessions._connection.require_open()
        self._sessions._connection.dispatcher = self.dispatcher
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sessions._connection.dispatcher = None
        await self._runtime.close(0.0)

    def stop(self, *, at_once: bool = False) -> None:
        """Begin no further run. `run` returns once those under way have ended, or were handed over.

        They have `drain` seconds to end. With `at_once` they have none. A later call may still ask for that.
        """
        self._stopped.set()
        self._advancing.is_over = True  # messages that wait behind a run under way are left to other workers
        if at_once and self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())

    @property
    def under_way(self) -> frozenset[SessionId]:
        """The sessions that it is running, or looking at."""
        return frozenset(self._advancing.under_way)

    @property
    def handed_over(self) -> frozenset[SessionId]:
        """The sessions whose runs it left to other workers when it was stopped."""
        return frozenset(self._advancing.handed_over)

    async def run(self) -> None:
        """Run sessions until `stop` is called."""
        beside = [self._every(_TICK, self._ring), self._every(self._sweep_every, self._sweep)]
        if self._retainer is not None:
            beside.append(self._every(_TICK, self._retainer.look))
        tasks = [asyncio.ensure_future(each) for each in beside]
        try:
            await self.dispatcher.work(self._advance, self.options, self._stopped)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()

    async def only(self, session_id: str) -> Outcome:
        """Look at one session, and return the outcome. `stop(at_once=True)` hands it over.

        `session_id` names the session.
        """
        try:
            return await self._tried(self._advancing.alone, session_id)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Hand over the runs under way. Runs that have not begun by now do not begin."""
        self._advancing.is_over = True
        await self._runtime.close(0.0)
        await self._advancing.idle.wait()  # the caller closes the store next, and a look may still be reading

    @property
    def _sweep_every(self) -> float:
        return min(self.options.lease / _SWEEPS_A_LEASE, _LONGEST_BETWEEN_SWEEPS)

    async def _advance(self, session_id: str) -> Outcome:
        return await self._tried(self._advancing, session_id)

    async def _tried(self, look: Callable[[SessionId], Awaitable[Outcome]], session_id: str) -> Outcome:
        try:
            return await look(SessionId(session_id))
        except Exception as error:  # a hook may raise anything, and the other sessions still have to be run
            self._tell(session_id, error)
            return Outcome.FAILED

    def _tell(self, session_id: str, error: Exception) -> None:
        """Log once why a session cannot be run here."""
        told = (str(session_id), str(error))
        if told not in self._told:
            self._told.add(told)
            # An error of perdure's says what to do. Any other is unexpected, and its traceback shows the place.
            trace = None if isinstance(error, PerdureError) else error
            facts = {"session": session_id, "error": str(error), "kind": type(error).__name__}
            _log.error(
                "session %s could not be run here: %s", session_id, error, exc_info=trace, extra={"facts": facts}
            )

    async def _every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something again and again until the worker is stopped. A store that fails may recover."""
        time = asyncio.get_running_loop().time
        while not self._stopped.is_set():
            # At random, so that workers which were started together do not all ask the store at the same moment.
            until = time() + seconds * random.uniform(0.8, 1.2)
            try:
                await work()
            except PerdureError as error:
                _log.warning("%s failed: %s", work.__qualname__, error)
            except Exception:  # a hook raised it: the timers and sweeps of all other sessions must continue
                _log.exception("%s failed", work.__qualname__)
            # At least a tenth of the pause, even if the work took longer than the pause.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), max(until - time(), seconds / 10))

    async def _ring(self) -> None:
        """Ring the timers that are due, and those that come due before the next look."""
        await self._bell.ring(ahead=_TICK)

    async def _sweep(self) -> None:
        """Have a worker look at sessions whose runs have died, in whichever process."""
        for session_id in await self._journal.lapsed():
            await self.dispatcher.wake(session_id, priority=RECOVERY)
