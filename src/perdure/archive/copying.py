"""A copy of one store into another, which can be repeated after any interruption, and is compared at the end."""

from __future__ import annotations

from perdure.aio import aside
from perdure.archive.given_store import checked_archive
from perdure.archive.lines import Pages, encode_session
from perdure.archive.moving import MoveReport, Progress, dump_for, in_order
from perdure.errors import SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, ArchivingStore
from perdure.stores.jobs.archive.archived import is_same


class CopyReport(MoveReport, frozen=True):
    """The result of a copy. Sessions that the target already has unchanged are `skipped`."""

    verified: int = 0
    """The number of sessions that are the same on both sides."""
    differing: tuple[SessionId, ...] = ()
    """The sessions that differ, since they were changed during the copy. Copy again when they are not being run."""


async def copy(source: ArchivingStore, target: ArchivingStore, *, progress: Progress | None = None) -> CopyReport:
    """Copy every session of one store into another: versions, records, links, idempotency keys, unfinished runs.

    It can be stopped at any instant and repeated: sessions that were copied are not written twice. Nothing in the
    `source` is changed. Raise SessionBusy if a session is being run, and SessionConflict if another session has its id
    in the `target`. `progress` is called after each session.
    """
    checked_archive(target, "$.target")
    ids = await in_order(checked_archive(source, "$.source"))
    tell = progress or _nobody
    report, present = MoveReport(), set[str]()
    for done, session_id in enumerate(ids, 1):
        archived = await dump_for(source, session_id, present)
        is_new = await target.restore(archived)
        size = await aside(_size, archived) if is_new else 0
        report = report.plus(archived, size, is_new=is_new)
        # A long session is freed page by page: freed at once, it would stop every thread for a moment.
        pages = await aside(Pages, archived)
        del archived
        await pages.let_go()
        present.add(session_id)
        tell(done, 2 * len(ids))
    differing: list[SessionId] = []
    for done, session_id in enumerate(ids, len(ids) + 1):
        if not await _is_same(source, target, session_id):
            differing.append(session_id)
        tell(done, 2 * len(ids))
    counts = (report.sessions, report.skipped, report.messages, report.bytes)
    return CopyReport(*counts, len(ids) - len(differing), tuple(differing))


def _nobody(done: int, steps: int) -> None:
    """Ignore the progress, if the caller does not ask for it."""


def _size(archived: ArchivedSession) -> int:
    """Return the number of bytes that a session would take in an export."""
    return sum(map(len, encode_session(archived)))


async def _is_same(source: ArchivingStore, target: ArchivingStore, session_id: SessionId) -> bool:
    """Tell whether a session is the same on both sides when it is read again."""
    try:
        return await aside(is_same, await source.dump(session_id), await target.dump(session_id))
    except (SessionBusy, SessionNotFound):
        return False
