"""Messages that are left with a session, for a worker to answer now or at a set time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Unpack

from perdure.actions.inbox import QUEUE, Inbox, left_to_workers, under_way
from perdure.actions.send import SendMessage, used_for_another
from perdure.errors import ConfigurationError, InputRefused, InvalidData, SessionNotActive
from perdure.model.checks import expect_text, expect_wait
from perdure.model.ids import SessionId, new_id, now
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.paging import all_infos
from perdure.protocols import SCHEDULE, Entry, Journal, JournalEntry, Timer, check_priority, tell_of
from perdure.sessions.attaching import Sent
from perdure.sessions.reply import Chunk, Reply
from perdure.sessions.started_run import last_chunks
from perdure.sessions.talking import SendOptions, Talking
from perdure.sessions.timing import UNTIL, due_at, next_time

MOST_WAITING = 100
"""The number of messages that may wait in one session."""
MOST_OF_OWNER = 10_000
"""The number of messages that may wait in all sessions of an owner."""
_PAGE = 500
_LOOK_AT_TIMER = 2.0
"""Seconds between two checks whether a message for later was taken back."""


class Queued:
    """A message that was left with a session. Its answer is there once a worker has run the session."""

    def __init__(
        self, sessions: Queueing, session_id: SessionId, key: str, item: JournalEntry | None, at: datetime | None
    ) -> None:
        self._sessions = sessions
        self._item = item
        self.session_id = session_id
        """The session that it was left with."""
        self.key = key
        """The key by which `result` finds its answer, also from another process."""
        self.at = at
        """The time at which it is sent, or None for as soon as a worker can."""

    def __repr__(self) -> str:
        return f"<a message to session {self.session_id!r} under the key {self.key!r}>"

    async def reply(self, timeout: float | None = None) -> Reply[Any] | None:  # noqa: ASYNC109  # None, and no error
        """Wait for the answer, for as long as it takes or for `timeout` seconds. Return None after that time.

        Raise RunFailed if its run ended without an answer, and InputRefused if it can never be sent, for example
        because it was taken back.
        """
        if timeout is not None:
            expect_wait(timeout, "$.timeout")
        reply: Reply[Any] | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                async for chunk in self.stream():
                    reply = chunk.reply
        return reply

    async def stream(self) -> AsyncIterator[Chunk]:
        """Yield the answer's text, from its beginning, as a worker writes it. The last chunk has the `reply`.

        It waits until a worker takes the message. If you stop listening, the run continues. The errors are those of
        `reply`.
        """
        async for chunk in self._sessions._answer_to(
            self.session_id, self.key, self._item, is_delayed=self.at is not None
        ):
            yield chunk

    async def drop(self) -> bool:
        """Take the message back. Return False if its time has come: it waits in the inbox, or has been answered."""
        if self.at is None:
            return False
        return await self._sessions._queue().drop_timer(self.session_id, self.key)


class Queueing(Talking):
    """The verbs that leave messages to workers."""

    async def enqueue(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        priority: int = 0,
        at: datetime | None = None,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> Queued:
        """Leave a message with a session, and return at once. A worker sends it, after the earlier ones.

        With `at` it is sent at that time. Sessions whose messages have a higher `priority` are run first. The same
        `key` again leaves nothing new: it returns the message that waits, or its answer. Raise QueueFull if too much
        waits, and SessionNotActive if the session is deleted. The other options are those of `send`. A `context` cannot
        be left, but `context_data` can.
        """
        check_priority(priority)
        if options.get("context") is not None:
            problem = "it would not be there when the message is sent; leave context_data, for connect(context=…)"
            raise InvalidData("$.context", problem)
        if options.get("when_busy") not in (None, QUEUE):
            raise InvalidData("$.when_busy", "a message that is left with a session always waits for its turn")
        due = None if at is None else due_at(at)
        given = options.get("key")
        key = new_id() if given is None else given
        action = await self._sending(message, parts, output, {**options, "key": key, "when_busy": "queue"})
        info = await self.info(session_id)
        found = info.id
        if given is not None:  # it may have been left before
            item = await self._posted_before(found, action)
            if item is not None or await self._has_answer_to(found, action):
                return Queued(self, found, key, item, None)
            timer = await self._delayed_before(found, action)
            if timer is not None:
                return Queued(self, found, key, None, _moment(timer.due))
        if info.status is SessionStatus.DELETED:  # the message would wait until somebody restores the session
            raise SessionNotActive(found, info.status.value)
        if due is not None:
            timer = await self._set_timer(found, action, due, priority)
            return Queued(self, found, key, None, at if timer.due == due else _moment(timer.due))
        return Queued(self, found, key, await self._post(info, action, priority), None)

    async def _posted_before(self, session_id: SessionId, action: SendMessage) -> JournalEntry | None:
        return await self._under_way(session_id, action, may_wait=True)

    async def _delayed_before(self, session_id: SessionId, action: SendMessage) -> Timer | None:
        """Return the timer that sends the same message under the same key. Raise InvalidData if it sends another."""
        assert action.key is not None
        for timer in await self._timers_of(session_id):
            if timer.name == action.key.name and timer.entry is not None and timer.cron is None:
                if timer.entry.body.get("digest") != action.key.digest:
                    raise used_for_another(timer.name)
                return timer
        return None

    async def _has_answer_to(self, session_id: SessionId, action: SendMessage) -> bool:
        """Tell whether a key has its answer. Raise InvalidData if that answers another message."""
        assert action.key is not None
        found = await self._journal().find_key(session_id, action.key.name)
        if found is not None and found[0].digest != action.key.digest:
            raise used_for_another(action.key.name)
        return found is not None

    async def _post(self, info: AgentSessionInfo, action: SendMessage, priority: int) -> JournalEntry:
        self._queue()  # raises if the store keeps nothing for workers: the message would wait for ever
        # An owner stays the same. Counting what waits for one costs a transaction in PostgreSQL.
        of_owner = None if info.owner is None else MOST_OF_OWNER
        limits = {"priority": priority, "most": MOST_WAITING, "most_of_owner": of_owner}
        item = await Inbox(self._journal(), info.id).post(QUEUE, left_to_workers(action.item()), **limits)
        if self._connection.dispatcher is not None:
            await tell_of(self._connection.dispatcher, info.id, priority=priority, owner=self.owner)
        return item

    async def _set_timer(self, session_id: SessionId, action: SendMessage, due: float, priority: int) -> Timer:
        """Set a timer that sends a message. Return it, or the one that another has set for the same message."""
        assert action.key is not None
        name = action.key.name
        if name == UNTIL or name.startswith(SCHEDULE):  # `suspend` and `unschedule` would treat it as their own
            raise InvalidData("$.key", f"pauses and schedules have such names: use another key than {name!r}")
        timer = Timer(session_id, action.key.name, due, Entry(QUEUE, left_to_workers(action.item())), priority)
        try:
            return await self._queue().set_timer(timer)
        except InvalidData:  # set just now by another caller. Its item differs: a message gets a new id each time
            there = await self._delayed_before(session_id, action)
            if there is None:
                raise
            return there

    async def schedule(
        self,
        name: str,
        message: object,
        *parts: Sent,
        cron: str,
        timezone: str | None = None,
        session_id: str | None = None,
        priority: int = 0,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> Timer:
        """Leave a message with a session again and again: `cron="0 7 * * MON", timezone="Europe/Oslo"`.

        Without a `session_id` it is the session with the schedule's `name`, which is created if it does not exist. A
        schedule of the same name in that session is replaced. If no worker ran when it was due, it is sent once later.

        Sessions whose messages have a higher `priority` are run first. The other options are those of `send`, except
        for `key` and `context`.
        """
        expect_text(name, "$.name", blank=False)
        for unfit in ("key", "context"):
            if options.get(unfit) is not None:
                raise InvalidData(f"$.{unfit}", "a message that is sent again and again cannot have one")
        action = await self._sending(message, parts, output, {**options, "when_busy": "queue"})
        due = next_time(cron, timezone, now()).timestamp()
        found = (await self.open(name)).id if session_id is None else (await self.info(session_id)).id  # type: ignore[attr-defined]
        timer = Timer(
            found, SCHEDULE + name, due, Entry(QUEUE, left_to_workers(action.item())), priority, cron, timezone
        )
        return await self._queue().set_timer(timer, replace=True)

    async def schedules(self, session_id: str | None = None) -> Sequence[Timer]:
        """Return the schedules of a session, or of all sessions within reach."""
        return [timer for timer in await self.timers(session_id) if timer.cron is not None]

    async def unschedule(self, name: str, session_id: str | None = None) -> bool:
        """End the schedule of a `name`. Return False if the session has none of that name."""
        if session_id is None and not await self.exists(name):
            return False
        found = (await self.info(name if session_id is None else session_id)).id
        return await self._queue().drop_timer(found, SCHEDULE + name)

    async def timers(self, session_id: str | None = None) -> Sequence[Timer]:
        """Return the timers: schedules, and messages that wait for their time."""
        if session_id is not None:
            return await self._timers_of((await self.info(session_id)).id)
        found = await self._timers_of(None)
        if self.owner is None or not found:
            return found
        # Timers are few compared with sessions: two lists cost less than to ask for the timers of each session.
        own = {info.id for info in await all_infos(self.store.list, owner=self.owner)}
        return [timer for timer in found if timer.session_id in own]

    async def _timers_of(self, session_id: SessionId | None) -> list[Timer]:
        found: list[Timer] = []
        while page := await self._queue().timers(session_id, limit=_PAGE, after=found[-1].id if found else 0):
            found += page
        return found

    async def _answer_to(
        self, session_id: SessionId, key: str, item: JournalEntry | None, *, is_delayed: bool
    ) -> AsyncIterator[Chunk]:
        """Yield the answer to a key, and wait for it. Runs that were killed are left to workers."""
        from perdure.sessions.following import listening
        from perdure.sessions.joining import Joining

        journal, found, place, is_silent = self._journal(), item, None, True
        async with listening(journal, session_id) as news:
            while True:
                if found is not None:
                    joining = Joining(journal, session_id, found, _left_to_workers)
                    async for chunk in joining.chunks():
                        is_silent = False
                        yield chunk
                    place = joining.follower.place if joining.follower else place
                reply = await self.result(session_id, key)
                if reply is not None and not reply.queued:
                    for chunk in last_chunks(reply, place, is_silent=is_silent):
                        yield chunk
                    return
                found = await under_way(journal, session_id, key)
                if found is not None:
                    continue
                if is_delayed and not await self._is_still_delayed(session_id, key):
                    is_delayed = False
                    continue
                with suppress(TimeoutError):  # nothing on the record tells that a timer was dropped
                    async with asyncio.timeout(_LOOK_AT_TIMER if is_delayed else None):
                        await news()

    async def _is_still_delayed(self, session_id: SessionId, key: str) -> bool:
        """Tell whether a message still waits for its time. Raise InputRefused if it was taken back before that."""
        if any(timer.name == key for timer in await self._timers_of(session_id)):
            return True
        is_sent = await under_way(self._journal(), session_id, key) or await self.result(session_id, key)
        if not is_sent:
            version = (await self.info(session_id)).version
            raise InputRefused(session_id, version, "the message was taken back before its time came")
        return False

    def _journal(self) -> Journal:
        journal = self.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so nothing can be left for a worker.")
        return journal


def _moment(due: float) -> datetime:
    return datetime.fromtimestamp(due, UTC)


async def _left_to_workers(session_id: SessionId) -> None:
    """Do nothing about a run that was killed: a worker continues it."""
