"""Recover, move and erase sessions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, BinaryIO, Literal, overload

import msgspec

from perdure.actions.children import spawned_by
from perdure.actions.inbox import CANCEL
from perdure.aio import aside
from perdure.errors import (
    ConfigurationError,
    InvalidData,
    KeyUnavailable,
    PerdureError,
    SessionBusy,
    SessionHeld,
    SessionNotFound,
)
from perdure.model.checks import expect, expect_function, expect_method, expect_several, expect_wait
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, now
from perdure.model.session import SessionStatus, check_owner
from perdure.paging import all_infos, pages, unread_ids
from perdure.protocols import (
    ArchivingStore,
    BulkErasure,
    Entry,
    Erasure,
    Filters,
    Forgets,
    Forgotten,
    Journal,
    Retains,
    SealedStore,
    is_token_book,
    keys_of,
)
from perdure.sessions.looking import Looking
from perdure.sessions.reach import cannot
from perdure.sessions.talking import ASSISTANT

if TYPE_CHECKING:
    from perdure.actions.resume import RecoveryReport
    from perdure.archive.backups import BackupReport
    from perdure.archive.moving import MoveReport, Progress
    from perdure.sessions.conversations import Format, ImportReport


_PAUSE = 0.05
"""Seconds between two checks whether a run has stopped."""
_ASK_AGAIN = 0.25
"""Seconds until a run that has not stopped, or the next run of its session, is asked again."""


class ErasureReceipt(msgspec.Struct, frozen=True):
    """The outcome of erasing an owner."""

    owner: str
    """The owner."""
    erased: tuple[SessionId, ...]
    """The sessions that are gone, sub-agents' included."""
    left: tuple[SessionId, ...]
    """The sessions that are still there, since their runs have not stopped, or they are under hold."""
    at: datetime
    """The time of the erasure."""
    held: Mapping[SessionId, str] = {}
    """The sessions among these that are under a legal hold, each with its tag.

    With `forget_key`, also sessions of other owners under hold that cannot be read without the owner's keys.
    """
    keys_forgotten: int = 0
    """The number of data keys that were destroyed. While sessions are left, none is."""

    @property
    def is_complete(self) -> bool:
        """True if nothing of the owner is left."""
        return not self.left and not self.held


class Keeping(Looking):
    """The verbs about whole sessions: recover, move, erase, redact, forget, back up."""

    async def recover(self, session_id: str | None = None) -> RecoveryReport:
        """Continue runs that were killed: that of one session, or all of them without a `session_id`."""
        from perdure.actions.resume import RecoveryReport, recover

        self._require_open()
        if session_id is not None or self.owner is None:
            key = None if session_id is None else (await self.info(session_id)).id
            return await recover(self.runtime, self.loops, session_id=key)
        return RecoveryReport.joined([await self._recover_one(each) for each in await self._lapsed()])

    async def _lapsed(self) -> Sequence[SessionId]:
        """Return the sessions within reach whose run was killed, children first."""
        lapsed = await self.runtime.journal.lapsed() if self.runtime.journal is not None else ()
        # Looked up by their whole ids: an owner's session may have another session's id as its name.
        return [each for each in reversed(lapsed) if self.owner is None or await self._is_own(each)]

    async def _is_own(self, session_id: SessionId) -> bool:
        page = await self.store.list(id=session_id, owner=self.owner, limit=1)
        return bool(page or page.damaged)  # a session that cannot be read is reported by its recovery

    async def _recover_one(self, session_id: SessionId) -> RecoveryReport:
        from perdure.actions.resume import recover

        return await recover(self.runtime, self.loops, session_id=session_id)

    async def _root_of(self, session_id: SessionId) -> SessionId:
        """Return the session that has called a sub-agent's, over all levels. Any other session is its own root."""
        while True:
            try:
                info = await self.runtime.get_session_info(session_id)
            except PerdureError:  # it is gone, or cannot be read, which its recovery tells
                return session_id
            if info.parent_id is None or info.spawn_ref is None:  # a fork has a parent, and no caller
                return session_id
            session_id = info.parent_id

    async def export(
        self,
        target: str | os.PathLike[str] | BinaryIO,
        session_ids: Iterable[str] | None = None,
        *,
        format: Format = "perdure",
        history: bool = False,
        progress: Progress | None = None,
    ) -> MoveReport:
        """Write sessions, by default all, with their versions and runs to one file of JSON Lines.

        `target` is a path or a binary file. `session_ids` are the sessions. `progress` is called with the number of
        sessions that are done and of all sessions, or 0 if that is not known.

        In the `format` "openai" or "markdown" only what they show is written, or with `history` all that was said. As
        "openai", one session is a list of messages. Several are a line `{"messages": […]}` each.
        """
        _check_moving(target, "write", "$.target", progress)
        _check_written_as(format, history)
        wanted = None if session_ids is None else expect_several(session_ids, "$.session_ids")
        chosen = None if wanted is None else [(await self.info(each)).id for each in wanted]
        if chosen is None and (self.owner is not None or format != "perdure"):
            chosen = await self._sound_ids(with_hidden=format == "perdure")
        if format != "perdure":
            from perdure.sessions.conversations import export_conversations

            single, chosen = wanted is not None and len(wanted) == 1, chosen or []
            return await export_conversations(
                self, target, chosen, format, history=history, is_single=single, progress=progress
            )
        from perdure.archive.moving import export_sessions

        return await export_sessions(self._archive(), target, chosen, progress=progress)

    async def _sound_ids(self, *, with_hidden: bool) -> list[SessionId]:
        """Return the ids of all sessions within reach. Raise the error of the first that cannot be read."""
        found: list[SessionId] = []
        for filters in (Filters(), Filters(status=SessionStatus.DELETED))[: 1 + with_hidden]:
            async for page in pages(self.headers, **filters):
                for damage in page.damaged:
                    raise damage
                found += [info.id for info in page]
        return found

    @overload
    async def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["openai"],
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> ImportReport: ...

    @overload
    async def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["perdure", "openai"] = "perdure",
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> MoveReport: ...

    async def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["perdure", "openai"] = "perdure",
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> MoveReport:
        """Import the sessions of a file that `export` has written. Sessions that exist already are skipped.

        `source` is a path or a binary file. `progress` is called as by `export`.

        In the `format` "openai", a list of messages, or one message a line, makes one session. Lines `{"messages":
        […]}` make one session each. Each has a new id, which the report names, and this `agent`.
        """
        _check_moving(source, "read", "$.source", progress)
        if format != "perdure" or agent is not None:
            return await self._import_conversations(source, format, agent, progress)
        from perdure.archive.moving import import_sessions

        return await import_sessions(self._archive(), source, owner=self.owner, progress=progress)

    async def _import_conversations(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        format: str,
        agent: AgentDefinition | None,
        progress: Progress | None,
    ) -> MoveReport:
        from perdure.sessions.conversations import check_format, import_conversations

        check_format(format, "perdure", "openai")
        if format == "perdure":
            raise InvalidData("$.agent", "sessions that perdure has exported have agents of their own")
        self._require_open()
        who = ASSISTANT if agent is None else expect(agent, AgentDefinition, "$.agent")
        self.loops.learn_output(who)
        return await import_conversations(self, source, who, progress=progress)

    def _archive(self) -> ArchivingStore:
        self._require_open()
        if not isinstance(self.store, ArchivingStore):
            raise cannot(self.store, "move sessions")
        return self.store

    def _erasure(self) -> Erasure:
        self._require_open()
        if not isinstance(self.store, Erasure):
            raise cannot(self.store, "erase single messages")
        return self.store

    async def purge(
        self, *, older_than: timedelta | datetime | None = None, status: SessionStatus | str | None = None
    ) -> int:
        """Erase sessions for good, and those of their sub-agents with them. What forks show stays.

        `older_than` bounds their last update: by an age, or by a time. `status` narrows them to one status. Return how
        many were erased, sub-agents' sessions included. Sessions that are being run, or are under a legal hold, are
        left alone.
        """
        if older_than is None and status is None:
            raise InvalidData("$", "name what is to be erased: older_than, status, or both")
        if not isinstance(older_than, timedelta | datetime | None):
            given = type(older_than).__name__
            raise InvalidData("$.older_than", f"expected a timedelta, or a datetime with a time zone; got {given}")
        before = now() - older_than if isinstance(older_than, timedelta) else older_than
        if before is not None and before.tzinfo is not None and before > now():
            raise InvalidData("$.older_than", "this is in the future, so every session would be erased")
        erased = 0
        # A list without a status leaves deleted sessions out, so each status is listed by itself.
        for each in (status,) if status is not None else SessionStatus:
            filters: Filters = {"status": each}
            if before is not None:
                filters |= {"updated_before": before, "order": "updated"}  # so that no page contains sessions that stay
            erased += len(await self._erase([info.id for info in await all_infos(self.headers, **filters)]))
        return erased

    async def _erase(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Erase sessions with those of their sub-agents, except for those that run or that somebody else has erased.

        Return the ids erased.
        """
        session_ids = await self._with_children(session_ids)
        store = self.store
        erased = await (store.delete_many(session_ids) if isinstance(store, BulkErasure) else self._each(session_ids))
        self._close(erased)
        return erased

    async def _each(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Erase sessions one by one, as `BulkErasure` does at once."""
        erased: list[SessionId] = []
        for session_id in session_ids:
            with suppress(SessionBusy, SessionHeld, SessionNotFound):
                await self.store.delete(session_id)
                erased.append(session_id)
        return erased

    async def erase(self, session_id: str) -> Sequence[SessionId]:
        """Erase a session for good, and the sessions of its sub-agents with it. What its forks show stays.

        Return the ids erased. Raise SessionBusy while one of them is being run, and SessionHeld if a legal hold is on
        one of them; then nothing is erased.
        """
        try:
            key = (await self.info(session_id)).id
        except KeyUnavailable as error:  # it exists, and may be erased without the key that opens it
            if error.session_id is None:
                raise
            # Not by the given name: an owner's session has another id, and another owner may use that name.
            key = SessionId(error.session_id)
        erased = await (self.store.delete_tree(key) if isinstance(self.store, BulkErasure) else self._each_of_tree(key))
        self._close(erased)
        return erased

    async def _each_of_tree(self, session_id: SessionId) -> Sequence[SessionId]:
        """Erase a session and those of its sub-agents one by one, as `BulkErasure` does at once."""
        *children, _ = await self._with_children([session_id])
        # All are looked at first, so that nothing is erased if one of them is being run.
        for each in (session_id, *children):
            if self.runtime.journal is not None and await self.runtime.journal.is_claimed(each):
                raise SessionBusy(each)
        erased = await self._each(children)
        await self.store.delete(session_id)
        return [*erased, session_id]

    def _close(self, erased: Iterable[SessionId]) -> None:
        for session_id in erased:
            self.live.close(session_id)

    async def erase_owner(
        self, owner: str | None = None, *, wait: float = 10.0, forget_key: bool = False
    ) -> ErasureReceipt:
        """Erase a person: every session of an `owner`, hidden ones and forks too, with records, keys and index.

        The owner's access tokens go first, so that no service accepts them any more. Raise CorruptRecord, and erase
        nothing, if one of them is damaged.

        Runs under way are asked to stop. Those that have not stopped after `wait` seconds are named in the receipt:
        erase again once they have ended. Sessions under a legal hold stay, and are named too. On a connection of one
        owner, that owner is erased.

        With `forget_key`, the owner's data keys are destroyed at the end. From then on nothing of the owner can be
        read in backups of a sealed store, and neither can the owner's messages that forks of others show.
        """
        ring = keys_of(self.store) if expect(forget_key, bool, "$.forget_key") else None
        if forget_key and ring is None:
            raise ConfigurationError("This store was opened without keys, so it has no key to forget.")
        expect_wait(wait, "$.wait")
        whose = self.owner if owner is None else owner
        check_owner(whose)
        if whose is None:
            raise InvalidData("$.owner", "name the owner whose sessions are to be erased")
        if self.owner not in (None, whose):
            raise ConfigurationError(f"These are the sessions of {self.owner!r}, who can erase nobody else's.")
        if is_token_book(self.store):
            for token in await self.store.tokens(whose):
                await self.store.drop_token(token.id)
        erased: list[SessionId] = []
        deadline = time.monotonic() + wait
        while found := await self._all_of(whose):
            unheld = await self._unheld(found)
            were_running = await self._stop(unheld, deadline)
            gone = await self._erase(found)
            erased += gone
            # A message that was queued behind a run that stopped may have begun a run of its own since: it is stopped
            # in the next round. What is left otherwise has not stopped in time, is held, or cannot be read.
            if not gone and (time.monotonic() >= deadline or not (were_running or await self._running(unheld))):
                break
        left = tuple(await self._all_of(whose))
        held = await self.store.holds(left) if left and isinstance(self.store, Retains) else {}
        if ring is not None and isinstance(self.store, SealedStore):
            held = {**held, **await self.store.held_beside(whose)}
        # The keys stay while a session that needs them is left: nobody could read it without them.
        forgotten = 0 if ring is None or left or held else await aside(ring.forget, whose)
        return ErasureReceipt(whose, tuple(dict.fromkeys(erased)), left, now(), held, forgotten)

    async def _unheld(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Return the sessions without a legal hold: stopping a run in any other would be pointless."""
        if not isinstance(self.store, Retains):
            return session_ids
        held = await self.store.holds(session_ids)
        return [each for each in session_ids if each not in held]

    async def _all_of(self, owner: str) -> list[SessionId]:
        """Return the ids of an owner's sessions, including deleted ones."""
        found: list[SessionId] = []
        for filters in (Filters(owner=owner), Filters(owner=owner, status=SessionStatus.DELETED)):
            async for page in pages(self.store.list, **filters):
                found += [*(info.id for info in page), *unread_ids(page)]
        return found

    async def _running(self, session_ids: Sequence[SessionId]) -> list[SessionId]:
        """Return the sessions that are being run."""
        journal = self.runtime.journal
        return [] if journal is None else [each for each in session_ids if await journal.is_claimed(each)]

    async def _stop(self, session_ids: Sequence[SessionId], deadline: float) -> bool:
        """Ask the runs of sessions to stop, and wait until they have, or until the deadline.

        Return False if none of them was being run.
        """
        journal = self.runtime.journal
        running = await self._running(session_ids)
        if journal is None or not running:
            return False
        asked = -_ASK_AGAIN  # so that the first round asks at once, whatever the clock says
        while running and time.monotonic() < deadline:
            if time.monotonic() - asked >= _ASK_AGAIN:  # if messages are queued, another run begins when one stops
                asked = time.monotonic()
                await self._ask_to_stop(journal, running)
            await asyncio.sleep(_PAUSE)
            running = await self._running(running)
        return True

    async def _ask_to_stop(self, journal: Journal, session_ids: Sequence[SessionId]) -> None:
        for each in session_ids:
            with suppress(SessionNotFound):
                await journal.post(each, Entry(CANCEL))

    async def _with_children(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Return ids, each once and after those of its sub-agents' sessions."""
        every: dict[SessionId, None] = {}
        for session_id in session_ids:
            every |= dict.fromkeys(info.id for info in await spawned_by(self.store, session_id, deleted=True))
            every[session_id] = None
        return tuple(every)

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace what messages say, for good and everywhere. Return how many were replaced.

        A sub-agent's session and its caller's have copies of each other's texts in messages of their own. These stay,
        and `search` finds them. Subscribers of the session, and of its forks that are open here, hear of the redaction
        once it is done. `message_ids` are the messages, and `replacement` is what is read in their place.
        """
        from perdure.sessions.redacting import tell_of_redaction

        key, began = await self._reach(session_id), now()
        replaced = await self._erasure().redact(key, message_ids, replacement=replacement)
        if self.runtime.journal is not None:
            await tell_of_redaction(self.runtime.journal, self._connection.events, (key, *self.live), began)
        return replaced

    async def forget(self, session_id: str, *, before: int) -> Forgotten:
        """Erase the versions of a session that are older than `before`, for good. The newest always stays.

        What only they show is erased with them: messages, files, runs, words in the search index. Everything that a
        kept version shows or covers stays, and so do messages that forks show, and idempotency keys. Return how much
        was erased.

        The session gets one more version. Loading a version older than `info.first_version` raises VersionForgotten.
        """
        key, store = await self._reach(session_id), self.store
        if not isinstance(store, Forgets):
            raise cannot(store, "forget versions")
        return await store.forget(key, before=before)

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        keep: int | None = None,
        full: bool = False,
        gentle: bool = True,
        progress: Progress | None = None,
    ) -> BackupReport:
        """Add a backup of the whole store to a directory, the `target`, while others read and write. Not for one owner.

        Only what the directory does not have is written. With `keep`, that many backups of this store are left. `full`
        writes everything again. A `gentle` backup pauses for others in this process. `progress` is called with the
        bytes that are done and the bytes in all. `perdure.backups.restore` puts a store back.
        """
        from perdure.archive.backups import backup

        self._require_no_owner("A backup is of the whole store; export an owner's sessions instead.")
        return await backup(self.store, target, keep=keep, full=full, gentle=gentle, progress=progress)

    async def gc(self) -> int:
        """Erase leftovers of erased sessions that nothing points to. Return how many messages. Not for one owner."""
        self._require_no_owner("Clearing up goes through the whole store, for all owners.")
        return await self._erasure().gc()


def _check_written_as(format: object, history: object) -> None:
    expect(history, bool, "$.history")
    if format == "perdure":
        if history:
            raise InvalidData("$.history", "this format has all that was said in any case")
        return
    from perdure.sessions.conversations import check_format

    check_format(format)


def _check_moving(file: object, method: str, path: str, progress: object) -> None:
    if not isinstance(file, str | os.PathLike):
        expect_method(file, method, path)
    if progress is not None:
        expect_function(progress, "$.progress")
