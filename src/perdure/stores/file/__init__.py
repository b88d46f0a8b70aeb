"""Sessions as files in a directory, which people can read and any number of processes may share.

`{id}.json` is the current session. `{id}.jsonl` is its log, the truth for every version. `{id}.lock` separates writers.
`{id}.sketch` exists while an answer is being written, `.waiting/{id}` and `.timers/{id}` while the session has any.
`.rates` and `.tokens` belong to no session.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from perdure.errors import (
    CorruptRecord,
    InvalidData,
    InvalidSessionFile,
    InvalidSessionId,
    SessionBusy,
    SessionNotFound,
    StoreError,
)
from perdure.model.checks import expect_wait
from perdure.model.ids import SessionId, now
from perdure.model.session import AgentSessionInfo, SessionInfoList
from perdure.protocols import Claim, Due, Erased, Filters, Forgotten, SessionQuery
from perdure.stores import checked
from perdure.stores.engine import Job, Lock, Pledge, T
from perdure.stores.file.engine import FileEngine
from perdure.stores.jobs import claiming
from perdure.stores.jobs.listing import Page
from perdure.stores.store import Store

if TYPE_CHECKING:
    from perdure.stores.jobs.redaction import Request


class FileStore(Store):
    """A store in a directory. Each session has its own files, which survive a power cut and are readable by people.

    `lock_timeout` is how many seconds a writer waits for another one before it raises SessionLocked.
    """

    _engine: FileEngine

    def __init__(self, directory: str | os.PathLike[str], *, lock_timeout: float = 10.0) -> None:
        if not isinstance(directory, str | os.PathLike) or not str(directory):
            raise InvalidData("$.directory", "a FileStore needs the name of a directory; '.' is the current one")
        timeout = expect_wait(lock_timeout, "$.lock_timeout")
        super().__init__(FileEngine(Path(directory).absolute(), timeout), cache=0)

    @property
    def is_open(self) -> bool:
        return self._engine.is_open

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._take_up_redactions()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _take_up_redactions(self) -> None:
        """Finish the redactions that a killed process has left, as far as their sessions are free and sound.

        A redaction that is still under way holds its locks. Those that cannot be finished now are left to the next
        open, and to gc.
        """
        with suppress(StoreError):  # if the directory cannot be read now, it is opened anyway
            for session_id in await self._engine.hinted():
                with suppress(InvalidSessionId):
                    await self._engine.run_if_free(partial(self._redaction, SessionId(session_id), now()), "erase")

    async def _lapse(self, claims: Sequence[Claim]) -> None:
        # After all jobs that still wait for a lock. If a lock is not free, its claim lapses when the lease ends.
        self._engine.last_jobs = [partial(claiming.lapse, [claim]) for claim in claims]

    async def exists(self, session_id: str) -> bool:
        return await self._engine.exists(SessionId(session_id))

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        return await self._engine.list(Page(SessionQuery.of(filters)))

    async def _past_damage(self, job: Callable[[], Job[T]]) -> T:
        return await self._engine.run_past_damage(job)

    async def delete(self, session_id: str, *, expected: AgentSessionInfo | None = None) -> None:
        """Erase a session. What forks show of it stays, so a redaction of it that was cut short is finished first."""
        key = SessionId(session_id)
        with suppress(CorruptRecord, InvalidSessionFile):  # a damaged session can be erased, too
            await self._finish_redaction(key)
        async with self._sweeping(key):
            await super().delete(key, expected=expected)

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        keys = checked.session_ids(session_ids)
        await self._finish_redactions(keys)
        return await super().delete_many(keys)

    async def forget(self, session_id: str, *, before: int) -> Forgotten:
        """Forget versions. An interrupted redaction of the session is finished first."""
        await self._finish_redaction(SessionId(session_id))
        return await super().forget(session_id, before=before)

    async def retire(self, due: Sequence[Due]) -> Erased:
        from perdure.stores.jobs.erasing import tree_of

        checked.retire(due)
        for each in due:
            await self._finish_redactions(await self._engine.run(partial(tree_of, each.session_id)))
        return await super().retire(due)

    async def prune(self, due: Due, *, before: int) -> Erased:
        checked.prune(due, before)
        await self._finish_redactions([due.session_id])
        return await super().prune(due, before=before)

    async def delete_tree(self, session_id: str) -> Sequence[SessionId]:
        from perdure.stores.jobs.erasing import tree_of

        key = SessionId(session_id)
        await self._finish_redactions(await self._engine.run(partial(tree_of, key)))
        async with self._sweeping(key):
            return await super().delete_tree(key)

    async def _finish_redactions(self, session_ids: Iterable[SessionId]) -> None:
        for each in session_ids:
            with suppress(CorruptRecord, InvalidSessionFile, SessionBusy):
                await self._finish_redaction(each)

    @asynccontextmanager
    async def _sweeping(self, session_id: SessionId) -> AsyncIterator[None]:
        """Remove the remains of a session, if the block finds out that the session does not exist."""
        try:
            yield
        except SessionNotFound:
            await self._engine.sweep(session_id)
            await super().gc()
            raise

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        from perdure.stores.jobs.redaction import Request

        return await self._redact(Request.of(session_id, message_ids, replacement))

    async def gc(self) -> int:
        """Finish what was cut short, as far as its sessions are free and sound, and erase what no session shows."""
        fresh = 0
        for session_id in await self._engine.pledged():
            with suppress(SessionBusy, CorruptRecord, InvalidSessionFile):
                fresh += await self._finish_redaction(session_id)
        await self._engine.forget_survey()
        return fresh + await super().gc()

    async def _finish_redaction(self, session_id: str) -> int:
        try:
            return await self._redact(SessionId(session_id)) if session_id in await self._engine.pledged() else 0
        except (SessionNotFound, InvalidData):  # its files were removed, or replaced by older ones
            await self._engine.run(partial(_forget_pledge, session_id), "write")
            return 0

    async def _redact(self, asked: Request | SessionId) -> int:
        self._forget_all()
        try:
            return await self._engine.run(partial(self._redaction, asked, now()), "erase", long=True)
        finally:
            self._forget_all()

    def _redaction(self, asked: Request | SessionId, at: datetime) -> Job[int]:
        """Redact, or finish what was begun. An earlier redaction is done too, since its note is replaced."""
        from perdure.stores.jobs.redaction import Request, redact

        session_id = asked.session_id if isinstance(asked, Request) else asked
        yield Lock((session_id,), "alone")
        pledge = self._engine.pledge_of(session_id)
        begun = None if pledge is None else Request.of_pledge(session_id, pledge)
        if not isinstance(asked, Request):
            if begun is None:
                yield Pledge(session_id, b"")  # only the hint is left, which the commit then removes
                return 0
            request = begun
        else:
            request = asked if begun is None else asked._replace(ids=tuple(dict.fromkeys((*asked.ids, *begun.ids))))
        yield Pledge(session_id, request.pledge)
        # What was begun before a hold was placed is finished: some of the logs have been written.
        return (yield from redact(request, at, self._pack, is_begun=not isinstance(asked, Request)))


def _forget_pledge(session_id: str) -> Job[None]:
    yield Lock((session_id,))
    yield Pledge(session_id, b"")
