"""The work that is left to workers, for operators to see and change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from msgspec.structs import replace

from perdure.actions.inbox import QUEUE, DropWaiting, Inbox, messages_in
from perdure.errors import KeyUnavailable
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.paging import all_infos
from perdure.protocols import PARKED, JournalEntry, Parked, Running, Timer, Waiting
from perdure.sessions.queueing import Queueing

# Parking is imported where it is used: a process that opens a session and sends does not need it.
TAKEN_BACK = "it was taken back before it was sent"
_MOST = 10_000
"""The number of waiting sessions that are looked through for those of one owner."""


class ParkedSession(msgspec.Struct, frozen=True):
    """A session that is closed because its runs crashed their processes."""

    session_id: SessionId
    owner: str | None
    why: Parked | None
    """The reason that is on record, or None."""
    waiting: int
    """The number of messages that wait in its inbox."""


class Backlog(msgspec.Struct, frozen=True):
    """The work that waits or runs, and the processes that run it."""

    waiting: Sequence[Waiting]
    """Sessions whose messages wait for a worker, the most urgent first, then the longest waiting."""
    running: Sequence[Running]
    """Sessions that are being run, and those whose run was interrupted and waits to be continued."""
    delayed: Sequence[Timer]
    """The timers, the earliest first: messages to send later, schedules, and the ends of pauses."""
    parked: Sequence[ParkedSession]
    """The sessions that were closed because their runs kept dying."""
    held: Sequence[Waiting] = ()
    """Sessions that are closed, in which messages wait behind a person's decision or the end of a pause."""
    handed_over: frozenset[SessionId] = frozenset()
    """The sessions whose interrupted run was handed over by a worker that was told to stop: it was not killed."""


class Dropped(msgspec.Struct, frozen=True):
    """A message that was taken back."""

    key: str | None
    """The key of the message, if it had one."""
    text: str
    """Its text."""


class Operating(Queueing):
    """The verbs of operators."""

    async def queue(self, *, limit: int = 100) -> Backlog:
        """Return what waits, what is being run, what is delayed and what is parked.

        At most `limit` waiting sessions are returned. With an owner, only what belongs to that owner is.
        """
        queue, owner = self._queue(), self.owner
        waiting = await queue.waiting(limit if owner is None else _MOST)
        running = await queue.running()
        timers = sorted(await self.timers(), key=lambda timer: timer.due)
        if owner is not None:
            waiting = [each for each in waiting if each.owner == owner][:limit]
            running = [each for each in running if each.owner == owner]
        held = await queue.held(limit if owner is None else _MOST)
        parked = await self._parked()
        closed = {each.session_id for each in parked}
        held = [each for each in held if owner in (None, each.owner) and each.session_id not in closed][:limit]
        # A session whose run was decided on stays suspended until the run is saved, but does not wait for a person.
        decided = {each.session_id for each in running}
        waiting = [*waiting, *(each for each in held if each.session_id in decided)]
        held = [each for each in held if each.session_id not in decided]
        begun, handed_over = await self._interrupted(running)
        waiting = [each for each in map(partial(_without_begun, begun=begun), waiting) if each.count]
        return Backlog(waiting, running, timers, parked, held, handed_over)

    async def _interrupted(self, running: Sequence[Running]) -> tuple[set[SessionId], frozenset[SessionId]]:
        """Return the sessions whose interrupted run answers a message of the inbox, and those that were handed over."""
        from perdure.runtime.record_reader import was_handed_over

        begun, handed_over = set(), set()
        for each in (each.session_id for each in running if each.lapsed):
            with suppress(KeyUnavailable):  # it is listed as running, and its recovery tells which key is not there
                if await self._answers_posted(each):
                    begun.add(each)
                if await was_handed_over(self._journal(), each):
                    handed_over.add(each)
        return begun, frozenset(handed_over)

    async def _answers_posted(self, session_id: SessionId) -> bool:
        """Tell whether the newest run of a session answers a message of the inbox."""
        from perdure.runtime.record_reader import last_of_run

        journal = self._journal()
        newest = await last_of_run(journal, session_id)
        runs = await journal.runs(session_id, run=newest.run) if newest and newest.run else ()
        return bool(runs and runs[0].first.body.get("posted"))

    async def _parked(self) -> list[ParkedSession]:
        filters = {} if self.owner is None else {"owner": self.owner}
        infos = await all_infos(self.store.list, tag=PARKED, status=SessionStatus.SUSPENDED, **filters)  # type: ignore[arg-type]
        return [await self._as_parked(info) for info in infos]

    async def _as_parked(self, info: AgentSessionInfo) -> ParkedSession:
        from perdure.actions.parking import why_parked

        journal = self._journal()
        items = await Inbox(journal, info.id).items()
        waiting = sum(item.kind == QUEUE for item in items)
        return ParkedSession(info.id, info.owner, await why_parked(journal, info.id), waiting)

    async def unpark(self, session_id: str) -> None:
        """Open a session that was parked. A worker sends what waits there. Raise InvalidData if it is not parked.

        The message whose run was ended is not sent again. `retry` does that, or the same message under its key.
        """
        from perdure.actions.parking import UnparkSession

        found = (await self.info(session_id)).id
        # Not by execute(), which then sends what waits from here: it may take this process down, too.
        await self.runtime.execute(found, UnparkSession(), on_conflict="retry")
        if self._connection.dispatcher is not None:
            await self._connection.dispatcher.wake(found, owner=self.owner)

    async def drop_waiting(
        self, session_id: str, reason: str = TAKEN_BACK, *, key: str | None = None
    ) -> Sequence[Dropped]:
        """Take back every message that waits in a session's inbox, and return them.

        With a `key`, only the message of that key is taken back, and only if it is the next to be sent. Each is on
        record as refused for the `reason`, and `Queued.reply` raises InputRefused. Raise SessionBusy while the session
        is being run, and RunInterrupted if its run was killed.
        """
        action = DropWaiting(reason, key=key)
        await self.runtime.execute((await self.info(session_id)).id, action, on_conflict="retry")
        return [_dropped(item) for item in action.dropped]

    async def drop_timer(self, session_id: str, name: str) -> bool:
        """Take back what is sent later, by its `name`: a message's key or a timer's. Return False if there is none."""
        return await self._queue().drop_timer((await self.info(session_id)).id, name)


def _without_begun(each: Waiting, begun: Collection[SessionId]) -> Waiting:
    """Return what waits in a session, less the message that an interrupted run has begun to answer."""
    return replace(each, count=each.count - 1) if each.session_id in begun else each


def _dropped(item: JournalEntry) -> Dropped:
    return Dropped(item.body.get("key"), " ".join(message.text for message in messages_in(item)))
