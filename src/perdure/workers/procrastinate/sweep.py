"""The sweep for lost jobs: those of workers that have died, and those that should exist and do not."""

from __future__ import annotations

import logging

from perdure.workers.procrastinate.database import Database
from perdure.workers.procrastinate.jobs import Jobs
from perdure.workers.procrastinate.presence import LOCK_OF_WORKER

_log = logging.getLogger("perdure.workers")
_AT_ONCE = 1_000
_SWEEPS_A_LOOK = 5
"""The number of sweeps after which the planner's statistics are looked at."""
# Shows that the worker lives, and asks whether it is its turn. One worker at a time sweeps, and no more often than one
# alone would. It is one statement, since idle workers ask every second.
_LIVES = """
    WITH lives AS (UPDATE procrastinate_workers SET last_heartbeat = now() WHERE id = %(worker)s),
    turn AS (
        UPDATE perdure_dispatcher SET swept = clock_timestamp()
        WHERE swept < clock_timestamp() - make_interval(secs => %(every)s) RETURNING 1
    )
    SELECT ARRAY(SELECT id FROM procrastinate_jobs WHERE worker_id = %(worker)s AND status = 'doing'),
        EXISTS (SELECT FROM turn)
"""
_STALLED = f"""
    SELECT job.id, job.worker_id, job.queueing_lock FROM procrastinate_jobs AS job
    LEFT JOIN procrastinate_workers AS worker ON worker.id = job.worker_id
    WHERE job.status = 'doing' AND (
        worker.id IS NULL OR worker.last_heartbeat < now() - make_interval(secs => %(lease)s)
        OR pg_try_advisory_xact_lock_shared({LOCK_OF_WORKER.format(worker="worker.id")})
    )
"""
# Some sessions at a time, in the order of their numbers, so that a sweep costs the same if many wait.
_FORGOTTEN = f"""
    WITH page AS MATERIALIZED (
        SELECT sid, status, since FROM waiting WHERE sid > %(after)s ORDER BY sid LIMIT {_AT_ONCE}
    )
    SELECT
        (SELECT CASE count(*) WHEN {_AT_ONCE} THEN max(sid) ELSE 0 END FROM page),
        ARRAY(
            SELECT session.id FROM page JOIN session ON session.sid = page.sid CROSS JOIN perdure_dispatcher
            WHERE page.status = 'active' AND session.claim IS NULL
                AND page.since < extract(epoch FROM clock_timestamp()) - %(lease)s
                AND NOT EXISTS (
                    SELECT 1 FROM procrastinate_jobs AS job WHERE job.queueing_lock = session.id AND job.status = 'todo'
                )
                AND NOT EXISTS (
                    SELECT 1 FROM procrastinate_jobs AS job WHERE job.queueing_lock = session.id
                        AND job.lock = perdure_lock(session.id, session.owner, perdure_dispatcher.per_owner)
                        AND job.status = 'doing'
                )
        )
"""
# If the queue was empty when it was analyzed, the planner still takes it for empty, and reads all jobs at each fetch.
_OUTDATED = """
    SELECT 1 FROM pg_stat_user_tables AS seen JOIN pg_class ON pg_class.oid = seen.relid
    WHERE seen.relid = 'procrastinate_jobs'::regclass AND seen.n_live_tup > 10 * greatest(pg_class.reltuples, 10)
"""
# A process that has the table locked is analyzing it too.
_ANALYZE = "ANALYZE (SKIP_LOCKED) procrastinate_jobs"


class Sweep:
    """A function that shows that a worker lives, and finds lost jobs. Without it nothing is lost, but work is late."""

    def __init__(self, database: Database, queue: str, jobs: Jobs, lease: float, every: float) -> None:
        self._database = database
        self._queue = queue
        self._jobs = jobs
        self._lease = lease
        self._every = every
        self._unknown: set[int] = set()
        """The jobs that belonged to this worker at the last sweep although it had not heard of them."""
        self._after = 0
        self._turns = 0
        """The number of turns that this worker had to sweep."""

    async def __call__(self) -> None:
        asked = {"worker": self._jobs.worker_id, "every": self._every * 0.9}
        ((own, is_its_turn),) = await self._database.rows(_LIVES, asked)
        await self._give_back_unknown({*own})
        if is_its_turn:
            if self._turns % _SWEEPS_A_LOOK == 0 and await self._database.rows(_OUTDATED):
                await self._database.rows(_ANALYZE)
            self._turns += 1
            await self._stalled()
            await self._forgotten()

    async def _give_back_unknown(self, own: set[int]) -> None:
        """Give back jobs that were fetched by a statement whose answer was lost."""
        # Only a job that was unknown at two sweeps: the answer to the first fetch may have been on its way.
        unknown = own - self._jobs.held
        for job_id in unknown & self._unknown:
            await self._jobs.give_back(job_id, self._jobs.worker_id, 0.0)
        self._unknown = unknown

    async def _stalled(self) -> None:
        asked = {"queue": self._queue, "lease": self._lease}
        for job_id, worker_id, session_id in await self._database.rows(_STALLED, asked):
            _log.info("the worker that had session %s has died", session_id, extra={"facts": {"session": session_id}})
            await self._jobs.give_back(job_id, worker_id, 0.0)

    async def _forgotten(self) -> None:
        """Wake sessions that have waited for longer than a lease and have no job."""
        asked = {"after": self._after, "lease": self._lease}
        ((self._after, forgotten),) = await self._database.rows(_FORGOTTEN, asked)
        for session_id in forgotten:
            await self._database.rows("SELECT perdure_wake(%s::text, NULL)", (session_id,))
