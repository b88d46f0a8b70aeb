"""Lists of sessions, from the headers of their documents and the newer lines of their logs. Little else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from perdure.errors import CorruptRecord, InvalidSessionFile, UnreadableFile
from perdure.model.session import AgentSessionInfo, SessionInfoList
from perdure.stores.engine import Where
from perdure.stores.file.directory import Directory
from perdure.stores.file.document import Header
from perdure.stores.file.log import LogKey, SessionLog, log_file
from perdure.stores.file.rows import number_of
from perdure.stores.format.heads import decode_info
from perdure.stores.format.rows import ListPlace, Order
from perdure.stores.jobs.listing import Page, matches, time_in
from perdure.stores.jobs.saving import info_columns, update_columns
from perdure.stores.tables import Record

T = TypeVar("T")

ROW_OF_HEADER = {
    *("sid", "id", "version", "status", "agent", "owner", "parent", "spawned", "created", "updated", "recent"),
    *("claim", "expires"),
}
"""The columns of a session that are known from its header alone."""
_UNREAD = (CorruptRecord, InvalidSessionFile, UnreadableFile)
"""The errors of a single session, which do not stop the listing of others."""


def list_sessions(directory: Directory, page: Page) -> SessionInfoList:
    found: list[tuple[ListPlace, AgentSessionInfo]] = []
    damaged: list[CorruptRecord | InvalidSessionFile | UnreadableFile] = []
    for session_id in directory.ids():
        if page.query.id not in (None, session_id):
            continue
        try:
            header = _newest(directory, session_id)[0]
        except _UNREAD as error:
            damaged.append(error)
            continue
        place = header and _place_of(header, page.query.order)
        if header and place and (page.start is None or place < page.start) and matches(header.info, page.query):
            found.append((place, header.info))
    found.sort(key=lambda each: each[0], reverse=True)
    chosen = found[: page.query.limit]
    more = chosen[-1][0].next(page.query.order) if len(found) > page.query.limit else None
    # The place of a damaged session is not known, so it is listed on the first page.
    return SessionInfoList((info for _, info in chosen), next=more, damaged=damaged if page.start is None else ())


def _place_of(header: Header, order: Order = "created") -> ListPlace | None:
    found = LogKey.parse(header.key)
    return None if found is None or found.name else ListPlace(time_in(header.info, order), found.birth)


def header_rows(directory: Directory, where: Where) -> Iterator[Record]:
    """Yield the rows of sessions, as far as headers tell. For a damaged session only its id is known."""
    low, high, end = where.get("id >=", ""), where.get("id <", "~"), where.get("id ends", "")
    for session_id in directory.ids():
        if not low <= session_id < high or not session_id.endswith(end):
            continue
        # The stamp is taken before the log is read: a log that grows in between is read again the next time.
        stamp = directory.folder.stamp(log_file(session_id)) if "claim !=" in where else None
        if stamp is not None and directory.unclaimed.get(session_id) == stamp:
            continue
        row = {"sid": number_of(session_id), "id": session_id}
        try:
            header, log = _newest(directory, session_id)
        except _UNREAD:
            yield row
            continue
        if stamp is not None:
            _note_claim(directory, session_id, stamp, log)
        place = header and _place_of(header)
        if header and place:
            row |= {**info_columns(header.info), "sid": place.number, "version": header.info.version}
            row |= update_columns(header.info.updated_at)
            if log and log.held:
                row |= {"claim": msgspec.json.encode(log.held.holder), "expires": log.held.expires}
            yield row


def _note_claim(directory: Directory, session_id: str, stamp: tuple[int, int, int], log: SessionLog | None) -> None:
    """Note that a session is not claimed, or forget it."""
    if log is not None and log.held is None:
        directory.unclaimed[session_id] = stamp
    else:
        directory.unclaimed.pop(session_id, None)


def _newest(directory: Directory, session_id: str) -> tuple[Header | None, SessionLog | None]:
    return _twice(lambda: _since_document(directory, session_id))


def _twice(look: Callable[[], T]) -> T:
    try:
        return look()
    except (CorruptRecord, InvalidSessionFile):
        # It may have been deleted or renewed between two looks, and a listing does not wait for locks.
        return look()


def _since_document(directory: Directory, session_id: str) -> tuple[Header | None, SessionLog | None]:
    """Return a session's newest header, and the part of its log that is newer than the document."""
    header = directory.header(session_id)
    log = directory.sound(directory.log(session_id)) if header is None else directory.since(session_id, header)
    if log is None or log.version == 0:
        return header, log
    return Header(decode_info(log.heads[log.version], session_id, log.version), log.key, *log.newest), log
