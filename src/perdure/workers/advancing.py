"""The work on a session that was handed out: its killed run is continued, then waiting messages are sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from perdure.actions.inbox import Inbox, SendPosted
from perdure.actions.parking import ParkSession, deaths
from perdure.actions.resume import ResumeExecution
from perdure.actions.send import posted_message
from perdure.aio import finish_despite_cancel, finished
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
from perdure.model.session import SessionStatus
from perdure.protocols import Action, Journal, JournalEntry, Outcome, Queue, is_queue
from perdure.runtime.runtime import SessionRuntime
from perdure.workers.room import Room

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

Apart = Callable[[SessionId], Awaitable[Outcome | None]]
"""A function that looks at a session in a place where it can do no harm to others.

It returns None if the run has died there, or could not begin."""
_log = logging.getLogger("perdure.workers")


async def advance(sessions: Sessions, session_id: str, *, tries: int = 3) -> Outcome:
    """Continue the killed run of a session, then send the messages in its inbox until none is left.

    `sessions` are those of `connect`, and `session_id` names the session. You may call it at any time, from any
    process, and twice at once: the claim on the session lets one call through. The other returns `busy`. So a step of a
    workflow engine can call it, and call it again after a failure.

    `tries` is the number of times that a run may die with its process until the session is parked. Errors that are not
    the run's own, such as a store that cannot be reached, are raised. If the call is cancelled, the run is handed over:
    it is not ended, and the next call continues it at once.
    """
    runtime = sessions.runtime.beside(sessions.runtime.terms)  # of its own: to close it hands over this run alone
    advancing = Advancing(runtime, sessions.loops, tries=tries)
    sessions._connection.alone.add(runtime)
    work = asyncio.ensure_future(advancing.alone(SessionId(session_id)))
    try:
        # Shielded: a cancellation of the work itself would end the run, and it has to be handed over.
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        advancing.is_over = True
        await finish_despite_cancel(_hand_over(runtime, work))
        raise
    finally:
        sessions._connection.alone.discard(runtime)


async def _hand_over(runtime: SessionRuntime, work: asyncio.Future[Outcome]) -> None:
    await runtime.close(0.0)
    await asyncio.gather(work, return_exceptions=True)  # the caller has cancelled it, and asks for no result


def queue_of(runtime: SessionRuntime) -> tuple[Journal, Queue]:
    """Return the journal and the queue of a runtime's store. They are the same object."""
    journal, queue = runtime.journal, runtime.journal
    if journal is None or not is_queue(queue):
        raise ConfigurationError("This store has no inboxes that workers could look into. Use one of perdure's own.")
    return journal, queue


class Advancing:
    """A function that looks at sessions, for one runtime.

    With `apart`, a run that died with its process is tried again there. Without it, the last try is made while no other
    session is run here. So no session is parked because another one has killed their process.
    """

    def __init__(
        self, runtime: SessionRuntime, loops: LoopFactory, *, tries: int = 3, apart: Apart | None = None
    ) -> None:
        self._journal, self._queue = queue_of(runtime)
        self._runtime = runtime
        self._loops = loops
        self._tries = tries
        self._apart = apart
        self._room = Room()
        self.under_way: set[SessionId] = set()
        """The sessions that are being looked at."""
        self.idle = asyncio.Event()
        """An event that is set while no session is being looked at."""
        self.idle.set()
        self.handed_over: set[SessionId] = set()
        """The sessions whose runs were left to others when the runtime was closed."""
        self.is_over = False
        """True once nothing more may be begun."""

    async def __call__(self, session_id: SessionId) -> Outcome:
        self.under_way.add(session_id)
        self.idle.clear()
        try:
            return await self._looked_at(session_id)
        finally:
            self.under_way.discard(session_id)
            if not self.under_way:
                self.idle.set()

    async def alone(self, session_id: SessionId) -> Outcome:
        """Look at a session for a caller who asks about this one. One that waits for a person is not done.

        Workers are only given sessions in which messages wait, and need not ask.
        """
        outcome = await self(session_id)
        if outcome is not Outcome.DONE:
            return outcome
        with suppress(SessionNotFound):  # it was erased
            info = await self._runtime.get_session_info(session_id)
            return Outcome.WAITS if info.status is SessionStatus.SUSPENDED else outcome
        return outcome

    async def _looked_at(self, session_id: SessionId) -> Outcome:
        try:
            while (outcome := await self._once(session_id)) is None:
                pass
        except SessionNotFound:  # it was erased
            return Outcome.DONE
        except SessionNotActive:
            return Outcome.WAITS
        except RunInterrupted as error:
            if self._runtime.is_closing:
                self.handed_over.add(session_id)
            if self._runtime.is_closing or error.session_id == session_id:
                return Outcome.BUSY  # it was handed over, or killed just now: the next look continues it
            raise  # the run of another session, such as a sub-agent's: the caller reports it
        except OwnerBusy:
            return Outcome.OWNER_BUSY
        except SessionBusy:
            return Outcome.BUSY
        return outcome

    async def _once(self, session_id: SessionId) -> Outcome | None:
        """Do the next step for a session. Return None if there may be more to do."""
        if self.is_over or self._runtime.is_closing:
            return Outcome.BUSY
        # First: nothing can be sent in a session whose killed run still waits.
        if await self._journal.is_interrupted(session_id):
            return await self._recovered(session_id)
        inbox = Inbox(self._journal, session_id)
        try:
            if (outcome := await self._sent(session_id, inbox)) is not None:
                return outcome
            return await self._last_look(session_id, inbox)
        except SessionConflict:
            return None  # it was changed since it was loaded: look again

    async def _sent(self, session_id: SessionId, inbox: Inbox) -> Outcome | None:
        async with self._room.beside():
            if self.is_over:  # looked at again: to wait for room may have taken long
                return Outcome.BUSY
            await self._runtime.execute(session_id, SendPosted(inbox, self._send, by_worker=True), on_conflict="retry")
            return None

    def _send(self, item: JournalEntry) -> Action:
        return posted_message(item, self._loops)

    async def _last_look(self, session_id: SessionId, inbox: Inbox) -> Outcome | None:
        """Look once more, under the lock that a post takes. Without it, a message being posted would be missed."""
        if not await self._queue.has_waiting(session_id):
            return Outcome.DONE
        if await inbox.first_waiting() is None:
            await self._take_remains(session_id, inbox)
        return None

    async def _take_remains(self, session_id: SessionId, inbox: Inbox) -> None:
        """Mark items as taken that are not sent: requests to cancel a run that has ended, and delivered steering."""
        remains = await inbox.items()
        # Looked at again after they were read: a message that was posted meanwhile may be among them.
        if remains and await inbox.first_waiting() is None:
            session = await self._runtime.get_session(session_id)
            await inbox.take(session, remains[-1].seq, terms=self._runtime.terms)

    async def _recovered(self, session_id: SessionId) -> Outcome | None:
        """Continue a killed run: apart, if it may have killed its process. Park the session after too many tries."""
        died = await deaths(self._journal, session_id)
        if died >= self._tries:
            await self._runtime.execute(session_id, ParkSession(self._loops, died), on_conflict="retry")
            facts = {"session": session_id, "tries": died}
            often = f"{died} time" if died == 1 else f"{died} times"
            _log.warning("session %s is parked: its process has died %s", session_id, often, extra={"facts": facts})
            return Outcome.PARKED
        if died and self._apart is not None:
            return await self._tried_apart(self._apart, session_id, died)
        # The last try is made alone, so that a death is surely this run's own and not a neighbour's.
        async with self._room.alone() if died and died == self._tries - 1 else self._room.beside():
            if self.is_over:
                return Outcome.BUSY
            await self._runtime.execute(session_id, ResumeExecution(self._loops, alone=True), on_conflict="retry")
            return None

    async def _tried_apart(self, apart: Apart, session_id: SessionId, died: int) -> Outcome | None:
        """Have a run tried apart. To close the runtime cancels that, and waits until the run is handed over."""
        work = asyncio.ensure_future(apart(session_id))
        with self._runtime.attending(work):
            await finished(work)
        if work.cancelled():
            self.handed_over.add(session_id)
            return Outcome.BUSY
        outcome = work.result()
        if outcome is None and await deaths(self._journal, session_id) == died:
            return Outcome.FAILED  # no further death is on record, so it has not begun there
        return outcome
