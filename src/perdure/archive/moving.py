"""Sessions as one file of JSON Lines for another store: versions, logs, records, keys and links.

The first line says what the file is. Each session is a `session` line, its parts, and an `end` line with their number
and checksum. The last line says how many sessions there are. A file that was cut short or altered is refused at the
line where that shows. Each session is taken in whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import msgspec

from perdure.aio import aside
from perdure.archive.given_store import checked_archive
from perdure.archive.lines import Found, Pages, encode_session, first_line, last_line, message_count, read_sessions
from perdure.archive.whole_file import checked_path, whole_file
from perdure.errors import InvalidData, SessionNotFound, StoreError
from perdure.model.ids import SessionId, mark_of
from perdure.model.session import AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.paging import pages
from perdure.protocols import Archive, ArchivedSession, ArchivingStore, Filters, SessionStore
from perdure.stores.format.heads import decode_info
from perdure.stores.jobs.archive.archived import check, split_name

Progress = Callable[[int, int], None]
"""A function that is called with the number of sessions done and the number of all, or 0 if that is not known."""
# Python releases the GIL for each read. If the read is shorter than the wake-up of another thread, this thread has the
# GIL again by then. The event loop may then wait for long: up to 170 ms with reads of 8 KB.
_READ_AT_ONCE = 1 << 20


class MoveReport(msgspec.Struct, frozen=True):
    """The result of an export or an import. Sessions that the store already has unchanged are `skipped`."""

    sessions: int = 0
    """The number of sessions that were moved."""
    skipped: int = 0
    messages: int = 0
    """The number of their messages."""
    bytes: int = 0
    """The size of the file, or of what was read of it."""

    def plus(self, archived: ArchivedSession, size: int, *, is_new: bool = True) -> MoveReport:
        """Return the report with one more session.

        `archived` is the session, `size` the number of its bytes, and `is_new` False if it was skipped.
        """
        messages = self.messages + (message_count(archived) if is_new else 0)
        return MoveReport(self.sessions + is_new, self.skipped + (not is_new), messages, self.bytes + size)


async def export_sessions(
    store: ArchivingStore,
    target: str | os.PathLike[str] | BinaryIO,
    session_ids: Iterable[str] | None = None,
    *,
    progress: Progress | None = None,
) -> MoveReport:
    """Write sessions into a file, all of them by default. A file at a path appears when it is complete.

    `store` has the sessions, and `session_ids` names them. `target` is a path or a binary file. `progress` is called
    after each session.
    """
    checked_archive(store, "$.store")
    if isinstance(target, str | os.PathLike):
        return await _export_to_path(store, checked_path(target, "$.target"), session_ids, progress)
    ids = await in_order(store, session_ids)
    head, tail = first_line(), last_line(len(ids))
    report, exported = MoveReport(bytes=len(head) + len(tail)), set[str]()
    await asyncio.to_thread(target.write, head)
    for done, session_id in enumerate(ids, 1):
        archived = await dump_for(store, session_id, exported)
        report = report.plus(archived, await _write(archived, target))
        pages = await aside(Pages, archived)
        del archived
        await pages.let_go()
        exported.add(session_id)
        if progress is not None:
            progress(done, len(ids))
    await asyncio.to_thread(target.write, tail)
    return report


async def _write(archived: ArchivedSession, target: BinaryIO) -> int:
    """Write a session's lines, and return the number of bytes. A cancelled caller waits for one page at most."""
    pages, size = encode_session(archived), 0
    while written := await aside(_write_page, pages, target):
        size += written
    return size


def _write_page(pages: Iterator[bytes], target: BinaryIO) -> int:
    page = next(pages, b"")
    if page:
        target.write(page)
    return len(page)


async def import_sessions(
    store: ArchivingStore,
    source: str | os.PathLike[str] | BinaryIO,
    *,
    owner: str | None = None,
    progress: Progress | None = None,
) -> MoveReport:
    """Take in the sessions of a file, each in one commit. Sessions that the store already has unchanged are skipped.

    `source` is a path or a binary file, and `store` takes the sessions in. `progress` is called after each.

    Raise InvalidData with the line at which a file was altered, or SessionConflict if another session has the same id.
    The sessions before that line are taken in. Import the file again to take in the rest; nothing is taken in twice.
    With an `owner`, sessions of other owners are refused, and so are ids that any owner could have.
    """
    checked_archive(store, "$.store")
    if isinstance(source, str | os.PathLike):
        with await opened(checked_path(source, "$.source")) as file:
            return await import_sessions(store, file, owner=owner, progress=progress)
    report, present = MoveReport(), set[str]()
    reading = read_sessions(source)
    while (found := await aside(next, reading, None)) is not None:
        await _check_owner(store, found, owner)
        is_new = await _take_in(store, found, present)
        present.add(found.archived.session_id)
        report = report.plus(found.archived, found.size, is_new=is_new)
        pages = await aside(Pages, found.archived)
        del found
        await pages.let_go()
        if progress is not None:
            progress(report.sessions + report.skipped, 0)
    return report


async def opened(path: str) -> BinaryIO:
    """Open a file for reading."""
    try:
        return await asyncio.to_thread(open, path, "rb", _READ_AT_ONCE)
    except OSError as error:
        raise StoreError(f"{path} could not be read: {error.strerror}.", "Name another file.") from None


async def _check_owner(store: SessionStore, found: Found, owner: str | None) -> None:
    """Raise InvalidData unless a session may be taken in for an owner.

    Its id must be one that no other owner can have. Otherwise the answer would tell whether another owner's id is used.
    """
    archived = found.archived
    if owner is None or not archived.heads:
        return
    if decode_info(archived.heads[-1], archived.session_id, len(archived.heads)).owner != owner:
        advice = "a session keeps its owner when it moves, so take the file in without one"
        raise InvalidData(found.where, f"session {archived.session_id!r} is not one of {owner!r}'s: {advice}")
    if not archived.session_id.startswith(mark_of(owner)) and not await _is_owned(store, archived.session_id, owner):
        problem = f"the id {archived.session_id!r} has no owner's mark; take the file in without an owner"
        raise InvalidData(found.where, problem)


async def _is_owned(store: SessionStore, session_id: SessionId, owner: str) -> bool:
    return any(info.owner == owner for info in await store.list(id=session_id, limit=1))


async def _take_in(store: Archive, found: Found, present: set[str]) -> bool:
    archived = found.archived
    try:
        missing = await aside(_not_in_the_file, archived, present)
        if not missing:
            return await store.restore(archived)
    except InvalidData as error:
        raise InvalidData(found.where, f"session {archived.session_id!r} is not whole: {error}") from None
    names = ", ".join(sorted(missing))
    raise InvalidData(found.where, f"session {archived.session_id!r} shows parts of {names}, not in the file")


def _not_in_the_file(archived: ArchivedSession, present: set[str]) -> set[str]:
    """Return the sessions that a session shows without bringing their messages.

    Linked to a session that is in the store already, it would show that session's messages.
    """
    absent = archived.owners.keys() - present
    if not absent:
        return set()
    carried = archived.logs.keys() | archived.lent.keys()
    shown = {str(name) for name, _, _ in check(archived)}
    return {owner for owner, _ in map(split_name, shown - carried)} & absent


async def _export_to_path(
    store: ArchivingStore, path: str, session_ids: Iterable[str] | None, progress: Progress | None
) -> MoveReport:
    async with whole_file(path) as file:
        return await export_sessions(store, file, session_ids, progress=progress)


async def dump_for(store: Archive, session_id: str, present: set[str]) -> ArchivedSession:
    """Return a session for a place that has the sessions `present`. What it shows of any others is carried along."""
    archived = await store.dump(session_id)
    if archived.owners.keys() <= present:
        return archived
    return await store.dump(session_id, alone=True)


async def in_order(store: SessionStore, session_ids: Iterable[str] | None = None) -> list[SessionId]:
    """Return the ids of sessions, all by default: parents before their children, otherwise in order of creation."""
    infos = await _all_infos(store) if session_ids is None else [await _info(store, each) for each in session_ids]
    waiting = {info.id: info for info in sorted(infos, key=lambda info: (info.created_at, info.id))}
    ordered: dict[SessionId, None] = {}
    for info in waiting.values():
        line: list[SessionId] = []
        at: SessionId | None = info.id
        while at is not None and at in waiting and at not in ordered and at not in line:
            line.append(at)
            at = waiting[at].parent_id
        ordered.update(dict.fromkeys(reversed(line)))
    return list(ordered)


async def _all_infos(store: SessionStore) -> list[AgentSessionInfo]:
    wanted: tuple[Filters, ...] = ({}, {"status": SessionStatus.DELETED})
    return [info for each in wanted async for page in pages(store.list, **each) for info in _sound(page)]


async def _info(store: SessionStore, session_id: str) -> AgentSessionInfo:
    for info in _sound(await store.list(id=SessionId(session_id))):
        return info
    raise SessionNotFound(session_id)


def _sound(page: SessionInfoList) -> SessionInfoList:
    """Return a page. Raise the error of its first damaged header."""
    if page.damaged:
        raise page.damaged[0]
    return page
