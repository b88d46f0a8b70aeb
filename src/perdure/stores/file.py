"""Sessions as files in a directory, which people can read and any number of processes may share.

`{id}.json` is the current session; `{id}.jsonl` its log, the truth for every version; `{id}.lock` keeps writers apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self, Unpack

from perdure import codec
from perdure.aio import finish_despite_cancel
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionFile, SessionNotFound, StoreError
from perdure.model.checks import expect_wait
from perdure.model.ids import SessionId, new_id, now
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionInfoList
from perdure.model.transcript import LogRef
from perdure.protocols import (
    NOTHING_WRITTEN,
    Appended,
    ArchivedSession,
    Claim,
    Entry,
    Filters,
    JournalEntry,
    Key,
    Problem,
    RunOnRecord,
    SearchHit,
    SessionQuery,
    StoredAt,
    checked_version,
)
from perdure.stores import (
    checked,
    file_archive,
    file_check,
    file_erasure,
    file_reads,
    file_redaction,
    file_search,
    file_writes,
)
from perdure.stores.beginnings import Beginning
from perdure.stores.claims import Holder
from perdure.stores.file_directory import Directory
from perdure.stores.file_thread import FileThread
from perdure.stores.file_writes import Write, encode_entries
from perdure.stores.format.placement import Placement
from perdure.stores.redaction import Request
from perdure.stores.search import Query, rank
from perdure.stores.tapes import consolidate


class FileStore:
    """Keeps each session in files of its own: durable to a power cut, readable by people.

    `lock_timeout` is how many seconds a writer waits for another one before it raises SessionLocked.
    """

    def __init__(self, directory: str | os.PathLike[str], *, lock_timeout: float = 10.0) -> None:
        if not isinstance(directory, str | os.PathLike) or not str(directory):
            raise InvalidData("$.directory", "a FileStore needs the name of a directory; '.' is the current one")
        self._given = Path(directory)
        self._timeout = expect_wait(lock_timeout, "$.lock_timeout")
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise StoreError("This store is open already.")
        self._open = await _Open.at(self._given.absolute(), self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            await opened.close()

    @property
    def _files(self) -> _Open:
        if self._open is None:
            raise StoreError("This store is not open. Use it inside `async with FileStore(directory) as store:`.")
        self._open.check_process()
        return self._open

    async def create(self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> AgentSession:
        checked.create(session, written)
        write = Write(session, Placement(session, self._files.origin, written), now(), new_id())
        return consolidate(await self._files.run(lambda files: file_writes.create(files, write)))

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
    ) -> AgentSession:
        checked.save(session, claim, written, entries, taken, key)
        if key is not None:
            codec.check_text(f"{key.name}/{key.digest}", "$.key")
        placement = Placement(session, self._files.origin, written)
        write = Write(session, placement, now(), new_id(), claim, encode_entries(entries), taken, key)
        return consolidate(await self._files.run(lambda files: file_writes.save(files, write)))

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        key = SessionId(session_id)
        checked_version(version)
        return await self._files.run(lambda files: file_reads.load(files, key, version))

    async def exists(self, session_id: str) -> bool:
        key = SessionId(session_id)
        return await self._files.run(lambda files: files.exists(key))

    async def delete(self, session_id: str) -> None:
        key, at = SessionId(session_id), now()
        await self._files.run(lambda files: _delete(files, key, at))

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        request, at = Request.of(session_id, message_ids, replacement), now()
        return await self._files.run(lambda files: file_redaction.redact(files, request, at))

    async def gc(self) -> int:
        at = now()
        return await self._files.run(lambda files: file_redaction.finish_all(files, at) + file_erasure.gc(files))

    async def claim(
        self,
        session_id: str,
        *,
        version: int,
        owner: str,
        lease: float = 30.0,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        take_over: bool = False,
    ) -> tuple[Claim, Appended]:
        checked.claim(version, owner, lease, messages, entries, take_over)
        key, holder, at = SessionId(session_id), Holder.here(owner), now().timestamp()
        rows, events = _encoded(messages), encode_entries(entries)
        return await self._files.run(
            lambda files: file_writes.claim(files, key, version, holder, lease, at, rows, events, take_over)
        )

    async def heartbeat(self, claim: Claim) -> None:
        checked.held(claim)
        at = now().timestamp()
        await self._files.run(lambda files: file_writes.heartbeat(files, claim, at))

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        checked.release(claim, interrupted)
        await self._files.run(lambda files: file_writes.release(files, claim, interrupted))

    async def append(
        self,
        claim: Claim,
        *,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        log: str = "",
        taken: int = 0,
    ) -> Appended:
        checked.append(claim, messages, entries, log, taken)
        at, rows, events = now().timestamp(), _encoded(messages), encode_entries(entries)
        return await self._files.run(lambda files: file_writes.append(files, claim, at, log, rows, events, taken))

    async def read(
        self,
        session_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        last: int | None = None,
        run: str | None = None,
        inbox: bool = False,
    ) -> Sequence[JournalEntry]:
        checked.read(after, limit, last, run, inbox)
        key, asked = SessionId(session_id), file_reads.Asked(after, limit, last, run, inbox)
        return await self._files.run(lambda files: file_reads.entries(files, key, asked))

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        checked.runs(limit, before, run)
        key = SessionId(session_id)
        return await self._files.run(lambda files: file_reads.runs(files, key, limit, before, run))

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        checked.log_of(name)
        key = SessionId(session_id)
        return await self._files.run(lambda files: file_reads.log_of(files, key, name))

    async def lapsed(self) -> Sequence[SessionId]:
        at = now().timestamp()
        return await self._files.run(lambda files: file_reads.lapsed(files, at))

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        checked.messages(log, start, stop, self._files.origin)
        return await self._files.run(lambda files: file_reads.messages(files, log.key, start, stop))

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        checked.find_key(name)
        key = SessionId(session_id)
        with suppress(SessionNotFound):
            return await self._files.run(lambda files: file_reads.find_key(files, key, name))
        return None

    async def is_claimed(self, session_id: str) -> bool:
        key, at = SessionId(session_id), now().timestamp()
        return await self._files.run(lambda files: file_reads.is_claimed(files, key, at))

    async def is_interrupted(self, session_id: str) -> bool:
        key, at = SessionId(session_id), now().timestamp()
        return await self._files.run(lambda files: file_reads.is_interrupted(files, key, at))

    async def post(self, session_id: str, entry: Entry) -> int:
        checked.post(entry)
        key, (encoded,) = SessionId(session_id), encode_entries([entry])
        return await self._files.run(lambda files: file_writes.post(files, key, encoded))

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        query = Query.of(text, owner, session_id, limit)
        return await self._files.run(lambda files: rank(file_search.places(files, query), query))

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        query = SessionQuery.of(filters)
        file_reads.page_start(query.after)
        return await self._files.run(lambda files: file_reads.list_sessions(files, query))

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        sought = Beginning.of(prefix, owner, deleted, limit)
        return await self._files.run(lambda files: file_reads.ids_with_prefix(files, sought))

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        checked.dump(alone)
        key, at = SessionId(session_id), now().timestamp()
        return await self._files.run(lambda files: file_archive.dump(files, key, at, alone))

    async def restore(self, archived: ArchivedSession) -> bool:
        checked.restore(archived)
        at = now().timestamp()
        return await self._files.run(lambda files: file_archive.restore(files, archived, at))

    async def check(self) -> Sequence[Problem]:
        return await self._files.run(file_check.check, patient=True)


class _Open:
    """An open directory, and the one thread that works in it."""

    def __init__(self, thread: FileThread, directory: Directory) -> None:
        self._thread = thread
        self.origin = directory.origin
        self.run = thread.run
        self.check_process = thread.check_process

    @classmethod
    async def at(cls, path: Path, lock_timeout: float) -> _Open:
        thread = FileThread(f"perdure files {path.name}")
        return cls(thread, await thread.open(path, lock_timeout))

    async def close(self) -> None:
        """Carry out what is waiting, have the claims lapse that are left, and let go of directory and thread."""
        if self._thread.is_inherited:
            self._thread.let_go()
            return
        at = now().timestamp()
        await finish_despite_cancel(self._thread.close(lambda files: file_writes.lapse_all(files, at)))


def _delete(files: Directory, session_id: str, at: datetime) -> None:
    """Erase a session. What forks show of it stays, so a redaction of it that was cut short is finished first."""
    with suppress(CorruptRecord, InvalidSessionFile):  # what is damaged can be erased, too
        file_redaction.finish(files, session_id, at)
    file_erasure.delete(files, session_id, at.timestamp())


def _encoded(messages: Sequence[Message]) -> list[tuple[str, bytes]]:
    return [(message.id, codec.encode_message(message)) for message in messages]
