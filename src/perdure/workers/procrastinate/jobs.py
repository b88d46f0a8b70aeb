"""The jobs that one worker has fetched. It can end them only while they are still its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager

from perdure.errors import PerdureError
from perdure.protocols import Outcome
from perdure.workers.procrastinate.connector import DatabaseConnector
from perdure.workers.procrastinate.database import Database

_log = logging.getLogger("perdure.workers")
_BUSY_AGAIN = 1.0
_LEFT_AGAIN = 0.2
"""Seconds until other workers look at a session that this one was told to let go of. By then it has done so."""
_FAILED_AGAIN = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_GIVE_BACK = "SELECT perdure_give_back(%s::bigint, %s::bigint, %s::double precision, %s::integer)"
_DROP = """
    DELETE FROM procrastinate_jobs AS job WHERE id = %s AND status = 'doing' AND worker_id = %s
    RETURNING EXISTS (SELECT 1 FROM procrastinate_jobs AS next WHERE next.lock = job.lock AND next.status = 'todo')
"""


class Jobs(JobManager):
    """The jobs of procrastinate, as one worker sees them.

    procrastinate itself would end a job that was given to another worker meanwhile. It would also fail to put a job
    back if another of the same session waits.
    """

    def __init__(self, connector: DatabaseConnector, database: Database, worker_id: int) -> None:
        super().__init__(connector)
        self._tell = connector.tell
        self._database = database
        self.worker_id = worker_id
        self.held: set[int] = set()
        """The jobs that were fetched and have not ended."""
        self.outcomes: dict[int, Outcome] = {}
        """The outcomes of jobs that are about to end."""

    async def register_worker(self) -> int:
        return self.worker_id

    async def fetch_job(self, queues: Iterable[str] | None, worker_id: int) -> Job | None:
        job = await super().fetch_job(queues, worker_id)
        if job is not None and job.id is not None:
            self.held.add(job.id)
        return job

    async def finish_job(self, job: Job, status: Status, delete_job: bool) -> None:
        assert job.id is not None
        unknown = Outcome.FAILED if status is Status.FAILED else None
        try:
            await self._end(job.id, self.outcomes.pop(job.id, unknown), job.attempts)
        except PerdureError as error:  # the job is not lost: a sweep finds it
            _log.warning("the job of session %s could not be ended: %s", job.queueing_lock, error)
        finally:
            self.held.discard(job.id)

    async def _end(self, job_id: int, outcome: Outcome | None, failures: int) -> None:
        match outcome:
            case None:
                await self.give_back(job_id, self.worker_id, _LEFT_AGAIN)
            case Outcome.BUSY | Outcome.OWNER_BUSY:
                await self.give_back(job_id, self.worker_id, _BUSY_AGAIN)
            case Outcome.FAILED:
                pause = _FAILED_AGAIN[min(failures, len(_FAILED_AGAIN) - 1)]
                await self.give_back(job_id, self.worker_id, pause, failures + 1)
            case _:
                ended = await self._database.rows(_DROP, (job_id, self.worker_id))
                if ended and ended[0][0]:
                    self._tell()  # the lock is free for the next job now, and PostgreSQL notifies nobody of that

    async def give_back(self, job_id: int, worker_id: int | None, pause: float, failures: int | None = None) -> None:
        """Put a job back, for any worker to do after a pause. Do nothing if it is not that worker's any more."""
        await self._database.rows(_GIVE_BACK, (job_id, worker_id, pause, failures))
        self._tell()  # another job of the same session may wait, and its lock is free now
        asyncio.get_running_loop().call_later(pause, self._tell)
