"""What somebody who is handed a session does: continue the run that was killed there, then send what waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from perdure.actions.inbox import Inbox, SendPosted
from perdure.actions.resume import ResumeExecution
from perdure.actions.send import posted_message
from perdure.errors import (
    ConfigurationError,
    OwnerBusy,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.model.ids import SessionId
from perdure.protocols import Action, Journal, JournalEntry, Outcome, Queue, is_queue
from perdure.runtime.runtime import SessionRuntime
from perdure.workers.parking import ParkSession, deaths

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

Apart = Callable[[SessionId], Awaitable[Outcome]]
"""Looks at a session where it can do no harm to others."""


async def advance(sessions: Sessions, session_id: str, *, tries: int = 3) -> Outcome:
    """Continue the run of a session that was killed, then send what waits in its inbox until nothing does.

    It may be called at any time, from anywhere, and twice at once: the claim on the session lets one through, and the
    other is told that it is `busy`. So a step of a workflow engine can call it, and call it again after a failure.
    `tries` is how often a run may die with its process until the session is parked. What fails for another reason than
    the run itself, such as a store that cannot be reached, is raised.
    """
    return await Advancing(sessions.runtime, sessions.loops, tries=tries)(SessionId(session_id))


def queue_of(runtime: SessionRuntime) -> tuple[Journal, Queue]:
    """Return the journal of a runtime's store, and its queue, which is the same object."""
    journal, queue = runtime.journal, runtime.journal
    if journal is None or not is_queue(queue):
        raise ConfigurationError("This store has no inboxes that workers could look into. Use one of perdure's own.")
    return journal, queue


class Advancing:
    """Looks at sessions, for one runtime. With `apart`, a run that died with its process is tried again there."""

    def __init__(
        self, runtime: SessionRuntime, loops: LoopFactory, *, tries: int = 3, apart: Apart | None = None
    ) -> None:
        self._journal, self._queue = queue_of(runtime)
        self._runtime = runtime
        self._loops = loops
        self._tries = tries
        self._apart = apart

    async def __call__(self, session_id: SessionId) -> Outcome:
        try:
            while (outcome := await self._once(session_id)) is None:
                pass
        except SessionNotFound:  # it was erased
            return Outcome.DONE
        except SessionNotActive:
            return Outcome.WAITS
        except RunInterrupted as error:
            if self._runtime.is_closing or error.session_id == session_id:
                return Outcome.BUSY  # it is handed over, or was killed just now: whoever looks next continues it
            raise
        except OwnerBusy:
            return Outcome.OWNER_BUSY
        except SessionBusy:
            return Outcome.BUSY
        return outcome

    async def _once(self, session_id: SessionId) -> Outcome | None:
        """Do the next thing that is to be done. Return None if there may be more."""
        if self._runtime.is_closing:
            return Outcome.BUSY
        if await self._journal.is_interrupted(session_id):
            return await self._recovered(session_id)
        inbox = Inbox(self._journal, session_id)
        try:
            if await inbox.first_waiting() is not None:
                await self._runtime.execute(session_id, SendPosted(inbox, self._send), on_conflict="retry")
                return None
            return await self._last_look(session_id, inbox)
        except SessionConflict:
            return None  # somebody has changed it since it was loaded

    def _send(self, item: JournalEntry) -> Action:
        return posted_message(item, self._loops)

    async def _last_look(self, session_id: SessionId, inbox: Inbox) -> Outcome | None:
        """Look once more, under the lock that a post takes: a message that was on its way is there by then."""
        if not await self._queue.has_waiting(session_id):
            return Outcome.DONE
        left = await inbox.items()
        if left and await inbox.first_waiting() is None:
            # Wishes to cancel a run that has ended, and steering that was delivered.
            await inbox.take(await self._runtime.get_session(session_id), left[-1].seq)
        return None

    async def _recovered(self, session_id: SessionId) -> Outcome | None:
        """Continue the run that was killed: apart, if it may be what has killed its process; not for ever."""
        died = await deaths(self._journal, session_id)
        if died >= self._tries:
            await self._runtime.execute(session_id, ParkSession(self._loops, died), on_conflict="retry")
            return Outcome.PARKED
        if died and self._apart is not None:
            return await self._apart(session_id)
        await self._runtime.execute(session_id, ResumeExecution(self._loops, alone=True), on_conflict="retry")
        return None
