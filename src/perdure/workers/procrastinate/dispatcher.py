"""The dispatcher itself: waiting sessions are jobs, which procrastinate hands out to workers on many machines."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from procrastinate import App, JobContext
from procrastinate.exceptions import ProcrastinateException
from procrastinate.worker import Worker

from perdure.errors import ConfigurationError, PerdureError
from perdure.protocols import Advance, Outcome, WorkerOptions
from perdure.workers.procrastinate.connector import DatabaseConnector
from perdure.workers.procrastinate.database import database_of, queue_of
from perdure.workers.procrastinate.jobs import Jobs
from perdure.workers.procrastinate.presence import Presence
from perdure.workers.procrastinate.schema import prepare
from perdure.workers.procrastinate.sweep import Sweep

_log = logging.getLogger("perdure.workers")
TASK = "perdure.advance"
"""The name of the task in jobs.sql."""
_SWEEPS_A_LEASE = 6
_LONGEST_BETWEEN_SWEEPS = 1.0
_LOOK_EVERY = 1.0
"""Seconds between two looks for jobs without a notification: those that were put back for a while."""
_FORGET_WORKERS_AFTER = 86_400.0
"""Seconds until procrastinate drops a worker without a heartbeat. It is long, since a stopped worker may come back."""
_START_AGAIN = (0.5, 1.0, 2.0, 5.0, 10.0)
# While a job of the session is being done, no other is needed: it looks to the end, under the lock that a post takes.
_WAKE = """
    SELECT perdure_wake(session.id, %(priority)s::bigint) FROM session CROSS JOIN perdure_dispatcher
    WHERE session.id = %(id)s AND NOT EXISTS (
        SELECT 1 FROM procrastinate_jobs AS job WHERE job.queueing_lock = session.id AND job.status = 'doing'
            AND job.lock = perdure_lock(session.id, session.owner, perdure_dispatcher.per_owner)
    )
"""


class ProcrastinateDispatcher:
    """A dispatcher that hands out sessions by procrastinate, whose tables are in the schema of a PostgresStore.

    A trigger makes the job in the commit of the message, whichever process posts it. The tables and the trigger are
    made when the dispatcher is first used, or by `prepare`.
    """

    def __init__(self, store: object) -> None:
        self._database = database_of(store)
        self._queue = queue_of(self._database.schema)
        self._is_prepared = False

    async def prepare(self) -> None:
        """Put procrastinate's tables and the trigger into the schema, or bring them up to date."""
        if not self._is_prepared:
            await prepare(self._database)
            self._is_prepared = True

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        await self.prepare()
        await self._database.rows(_WAKE, {"id": str(session_id), "priority": priority})

    def look(self) -> None:
        """Do nothing: the trigger has made a job in the commit of the message, and notified the workers."""

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        if options.least_priority is not None:
            raise ConfigurationError(
                "procrastinate hands out messages of every priority. Leave least_priority out, or use InboxDispatcher."
            )
        await self.prepare()
        await self._database.rows("UPDATE perdure_dispatcher SET per_owner = %s", (options.per_owner,))
        failures = 0
        # procrastinate stops its worker for good when one of its side tasks fails.
        while not stopped.is_set():
            began = asyncio.get_running_loop().time()
            try:
                await _Shift(self, advance, options).work(stopped)
                why = "it has stopped"
            except (PerdureError, ProcrastinateException) as error:
                why = str(error)
            if stopped.is_set():
                return
            # A shift of a minute or more was a success, so the pauses begin at the shortest one again.
            failures = 0 if asyncio.get_running_loop().time() > began + 60 else failures + 1
            pause = _START_AGAIN[min(failures, len(_START_AGAIN)) - 1]
            _log.warning("procrastinate is started again in %g s: %s", pause, why)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), pause)


class _Shift:
    """One worker of procrastinate, from its start to its end."""

    def __init__(self, dispatcher: ProcrastinateDispatcher, advance: Advance, options: WorkerOptions) -> None:
        self._database = dispatcher._database
        self._queue = dispatcher._queue
        self._advance = advance
        self._options = options
        self._connector = DatabaseConnector(self._database)
        self._looking: set[asyncio.Task[object]] = set()

    async def work(self, stopped: asyncio.Event) -> None:
        async with Presence(self._database, self._queue, self._connector.tell) as presence:
            self._jobs = Jobs(self._connector, self._database, presence.worker_id)
            every = min(self._options.lease / _SWEEPS_A_LEASE, _LONGEST_BETWEEN_SWEEPS)
            sweep = Sweep(self._database, self._queue, self._jobs, self._options.lease, every)
            worker = self._worker()
            beside = [
                asyncio.create_task(_again_and_again(sweep, every)),
                asyncio.create_task(_stop_with(worker, stopped)),
            ]
            try:
                await self._run(worker)
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)

    def _worker(self) -> Worker:
        app = App(connector=self._connector)
        app.job_manager = self._jobs
        app.task(name=TASK, pass_context=True)(self._look)
        return Worker(
            app,
            queues=[self._queue],
            name=None,
            concurrency=self._options.concurrency,
            fetch_job_polling_interval=_LOOK_EVERY,
            shutdown_graceful_timeout=self._options.drain,
            install_signal_handlers=False,
            update_heartbeat_interval=self._options.lease,  # rare, since the sweep updates the heartbeat more often
            stalled_worker_timeout=_FORGET_WORKERS_AFTER,
        )

    async def _run(self, worker: Worker) -> None:
        """Run the worker to its end. If this is cancelled, let go of all jobs at once."""
        running = asyncio.create_task(worker.run())  # type: ignore[no-untyped-call]  # procrastinate leaves it untyped
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            worker.stop()  # type: ignore[no-untyped-call]
            for task in self._looking:
                task.cancel()
            await asyncio.wait({running})
            raise

    async def _look(self, context: JobContext, session_id: str) -> None:
        """Do a job. If it has to be let go of, its run is left to the worker, which hands it over."""
        task = asyncio.current_task()
        assert task is not None
        assert context.job.id is not None
        self._looking.add(task)
        run = asyncio.ensure_future(self._advance(session_id))
        try:
            await asyncio.wait({run})  # not awaited itself: a cancelled job must not cancel the run
        finally:
            self._looking.discard(task)
            if not run.done():
                run.add_done_callback(_log_failure)
        self._jobs.outcomes[context.job.id] = run.result()


def _log_failure(run: asyncio.Future[Outcome]) -> None:
    if not run.cancelled() and (error := run.exception()) is not None:
        _log.error("a run that was let go of has failed: %r", error)


async def _stop_with(worker: Worker, stopped: asyncio.Event) -> None:
    await stopped.wait()
    worker.stop()  # type: ignore[no-untyped-call]


async def _again_and_again(work: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Do something again and again, at random pauses, so that workers do not act at the same moment."""
    while True:
        try:
            await work()
        except PerdureError as error:  # the store may answer again
            _log.warning("lost jobs could not be looked for: %s", error)
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))
