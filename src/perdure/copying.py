"""Everything of one store into another, to be repeated after any interruption, and compared at the end."""

from __future__ import annotations

import msgspec

from perdure.archive import ArchivingStore, Progress, dump_for, in_order
from perdure.archive_lines import encode_session, message_count
from perdure.errors import SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.stores.jobs.archive.archived import is_same


class CopyReport(msgspec.Struct, frozen=True):
    """What a copy came to. Sessions that were there already, and the same, are `skipped`."""

    sessions: int = 0
    skipped: int = 0
    messages: int = 0
    bytes: int = 0
    verified: int = 0
    """How many sessions are the same on both sides."""
    differing: tuple[SessionId, ...] = ()
    """Those that have not: they were changed while the copy was made. Copy again when they are at rest."""


async def copy(source: ArchivingStore, target: ArchivingStore, *, progress: Progress | None = None) -> CopyReport:
    """Bring every session of one store into another: versions, records, links, idempotency keys, unfinished runs.

    It can be stopped at any instant and repeated: sessions that are over are not written twice. Nothing in the source
    is changed. SessionBusy if a session is being run, SessionConflict if another has its id in the target.
    """
    ids = await in_order(source)
    steps = 2 * len(ids)
    present: set[str] = set()
    sessions = messages = size = 0
    for done, session_id in enumerate(ids, 1):
        archived = await dump_for(source, session_id, present)
        if await target.restore(archived):
            sessions, messages = sessions + 1, messages + message_count(archived)
            size += len(encode_session(archived))
        present.add(session_id)
        _tell(progress, done, steps)
    differing: list[SessionId] = []
    for done, session_id in enumerate(ids, len(ids) + 1):
        if not await _is_same(source, target, session_id):
            differing.append(session_id)
        _tell(progress, done, steps)
    return CopyReport(sessions, len(ids) - sessions, messages, size, len(ids) - len(differing), tuple(differing))


def _tell(progress: Progress | None, done: int, steps: int) -> None:
    if progress is not None:
        progress(done, steps)


async def _is_same(source: ArchivingStore, target: ArchivingStore, session_id: SessionId) -> bool:
    """Whether a session, read again from both sides, is the same."""
    try:
        return is_same(await source.dump(session_id), await target.dump(session_id))
    except (SessionBusy, SessionNotFound):
        return False
