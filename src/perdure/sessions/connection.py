"""The connection that the sessions of every owner share: an open store, the agents' loops, and the runs under way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

from perdure.actions.given import require_loops
from perdure.errors import ConfigurationError
from perdure.loop.factory import LoopFactory
from perdure.model.checks import expect_wait
from perdure.model.definition import ModelConfig
from perdure.model.retention import Retention, RetentionPolicy
from perdure.protocols import DEFAULT_TERMS, Dispatcher, Opened, SessionController, SessionStore, Terms, is_queue
from perdure.runtime.bus import EventBus
from perdure.runtime.runtime import SessionRuntime
from perdure.sessions.open_sessions import LiveSet
from perdure.sessions.started_run import StartedRun

if TYPE_CHECKING:
    from perdure.actions.model_change import ModelFor
    from perdure.sessions.recovering import Recovering
    from perdure.telemetry.meters import Depths

_MOST_WAITING = 10_000
"""The number of waiting sessions that are counted for a metric. Beyond that the exact number is of no use."""
_LEAVE_AGAIN = 0.5
"""Seconds after which waits are cancelled again when the connection is closed: a store may lose a cancellation."""


class Connection:
    """A store, opened once, with one runtime and one cache for however many owners use it."""

    def __init__(
        self,
        store: SessionStore,
        loops: LoopFactory,
        *,
        events: EventBus,
        live: int = 128,
        model: ModelConfig | None = None,
        controller: SessionController | None = None,
        grace: float = 5.0,
        filters: Iterable[str] = (),
        terms: Terms = DEFAULT_TERMS,
        keep: Retention | RetentionPolicy | None = None,
    ) -> None:
        self.retention = RetentionPolicy.of(keep)
        """The rules about how long sessions are kept, unless they have a rule of their own."""
        self.store = store
        self.loops = require_loops(loops)
        self.events = events
        self.model = model
        self.model_for: ModelFor | None = None
        """A function that names sessions' models, also for runs that wait for approval. The command line sets it."""
        self.controller = controller
        self.runtime = SessionRuntime(
            store, controller=controller, events=events, filters=filters, terms=terms, telemetry=loops.telemetry
        )
        self._runs: set[StartedRun[Any]] = set()
        self.alone: set[SessionRuntime] = set()
        """The runtimes of agents that are asked once, without a session."""
        self.recovers = False
        """True if killed runs are continued in the background while it is open."""
        self.recovering: Recovering | None = None
        self.dispatcher: Dispatcher | None = None
        """The dispatcher that is told at once when a message waits. Without one, workers find it by polling."""
        self._live = LiveSet(store, live)
        self._grace = expect_wait(grace, "$.grace")
        self._is_open = False
        self._exits = AsyncExitStack()

    @property
    def live(self) -> LiveSet:
        """The sessions that somebody has open here."""
        self.require_open()
        return self._live

    def require_open(self) -> None:
        if not self._is_open:
            raise ConfigurationError(
                "This connection is not open: nothing would be heard or kept. Use it inside "
                "`async with perdure.connect(…) as sessions:`."
            )

    async def open(self) -> None:
        """Open the store, unless it is open already: then the code that opened it closes it."""
        is_shared = isinstance(self.store, Opened) and self.store.is_open
        if isinstance(self.store, AbstractAsyncContextManager) and not is_shared:
            await self._exits.enter_async_context(self.store)
        self.begin()

    def begin(self) -> None:
        """Use a store that is open, or that opens itself."""
        # Exits run in reverse, so this is the last before the store is closed. A verb may have begun after `end_runs`,
        # and still hold a claim.
        self._exits.push_async_callback(self.runtime.close, 0.0)
        self._exits.push_async_callback(self.loops.aclose)
        self._exits.callback(self.events.wiretap(self._live.emit).cancel)
        if self.loops.telemetry is not None:
            self.loops.telemetry.watch(self)
            self._exits.callback(self.loops.telemetry.unwatch, self)
        self._is_open = True

    async def close(self, *, at_once: bool = False) -> None:
        """Let runs end before the store is closed. With `at_once`, after an error, they are interrupted instead."""
        try:
            await self.end_runs(at_once=at_once)
        finally:
            self._is_open = False
            await self._exits.aclose()

    def recover_soon(self) -> None:
        """Recover killed runs now, if this connection recovers at all."""
        if self.recovering is not None:
            self.recovering.look_soon()

    async def end_runs(self, *, at_once: bool = False) -> None:
        """Stop the runs of streams that were left, and wait for others, which are interrupted after their grace."""
        # First of all: a recovery that begins now would have to be interrupted, too.
        if self.recovering is not None:
            self.recovering.stop()
        for run in self._runs:
            if not run.is_detached:
                run.work.cancel()
        grace = 0.0 if at_once else self._grace
        await asyncio.gather(*(each.close(grace) for each in (self.runtime, *self.alone)))
        while self._runs:  # their sessions are saved: only their listeners still have to be told
            for run in self._runs:
                run.leave()
            await asyncio.wait({run.work for run in self._runs}, timeout=_LEAVE_AGAIN)
        if self.recovering is not None:
            await self.recovering.end()
            self.recovering = None

    async def depths(self) -> Depths | None:
        """Return the numbers of what waits in the store and of what is claimed, or None if it has no inboxes."""
        from perdure.telemetry.meters import Depths

        queue = self.runtime.journal
        if not is_queue(queue):
            return None
        waiting = await queue.waiting(_MOST_WAITING, idle_only=False)
        running = await queue.running()
        lapsed = sum(each.lapsed for each in running)
        kind = type(self.store).__name__
        return Depths(kind, sum(each.count for each in waiting), len(running) - lapsed, lapsed)

    def keep(self, run: StartedRun[Any]) -> None:
        """Hold a reference to a run until it is over: asyncio itself does not."""
        self._runs.add(run)
        run.work.add_done_callback(lambda _: self._runs.discard(run))
