"""Everything of one store into another, to be repeated after any interruption, and compared at the end."""

from __future__ import annotations

from perdure.aio import aside
from perdure.archive.lines import Pages, encode_session
from perdure.archive.moving import MoveReport, Progress, dump_for, in_order
from perdure.errors import SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, ArchivingStore
from perdure.stores.jobs.archive.archived import is_same


class CopyReport(MoveReport, frozen=True):
    """What a copy came to. Sessions that were there already, and the same, are `skipped`."""

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
    tell = progress or _nobody
    report, present = MoveReport(), set[str]()
    for done, session_id in enumerate(ids, 1):
        archived = await dump_for(source, session_id, present)
        is_new = await target.restore(archived)
        size = await aside(_size, archived) if is_new else 0
        report = report.plus(archived, size, is_new=is_new)
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
    """Nobody asks how far it is."""


def _size(archived: ArchivedSession) -> int:
    """Return how many bytes a session would take in an export."""
    return sum(map(len, encode_session(archived)))


async def _is_same(source: ArchivingStore, target: ArchivingStore, session_id: SessionId) -> bool:
    """Whether a session, read again from both sides, is the same."""
    try:
        return await aside(is_same, await source.dump(session_id), await target.dump(session_id))
    except (SessionBusy, SessionNotFound):
        return False
