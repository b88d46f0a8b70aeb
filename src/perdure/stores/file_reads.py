"""What the file store reads, in its thread: sessions, messages, entries, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionFile, SessionNotFound
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList
from perdure.protocols import Entry, JournalEntry, Key, SessionQuery
from perdure.stores.file_directory import Directory, cut_short
from perdure.stores.file_document import Header
from perdure.stores.file_log import LogKey, SessionLog
from perdure.stores.memory import matches
from perdure.stores.rows import Shelf, StoredHead, Stretch, decode_info, decode_row


def load(directory: Directory, session_id: str, version: int | None) -> AgentSession | None:
    return directory.surely(session_id, lambda: _load(directory, session_id, version))


def _load(directory: Directory, session_id: str, version: int | None) -> AgentSession | None:
    header = directory.document(session_id) if version is None else None
    log = directory.log(session_id)
    if version in log.heads:
        return assembled(directory, log, version)
    _require_whole(directory, log, header or directory.document(session_id))
    return assembled(directory, log, log.version) if version is None and log.version else None


def _require_whole(directory: Directory, log: SessionLog, header: Header | None) -> None:
    """Raise unless a log and the document made from it are sound and belong together."""
    if log.damage:
        raise log.damage[0]
    if header is None:
        return
    if log.version and log.key != header.key:
        raise InvalidSessionFile(directory.path_of(log.stem), f"it was made from another log, {header.key}")
    if header.info.version > log.version or header.end > log.end:
        raise cut_short(log, header)


def assembled(directory: Directory, log: SessionLog, version: int) -> AgentSession:
    """A version put together from its session's log, which may be ahead of the file, and those it points into."""
    head = StoredHead(log.heads[version], log.stem, version)
    for name in head.hashes():
        if name not in log.values:
            raise CorruptRecord(log.stem, f"value {name}", "it is missing or damaged")
    shelf = Shelf(directory.origin)
    for key, start, stop in shelf.missing(head.wanted(log.values)):
        rows = log.rows(key) if log.owns(key) else directory.rows(key)
        shelf.put(key, start, _decoded(rows, log.stem, (key, start, stop)))
    return head.session(log.values, shelf.span)


def _decoded(rows: Mapping[int, bytes], session_id: str, stretch: Stretch) -> list[Message]:
    key, start, stop = stretch
    for position in range(start, stop):
        if position not in rows:
            raise CorruptRecord(session_id, f"message {position} of log {key}", "it is missing or damaged")
    return [decode_row(rows[at], session_id, f"message {at} of log {key}") for at in range(start, stop)]


def messages(directory: Directory, key: int | str, start: int, stop: int) -> list[Message]:
    log = directory.log_of(key)
    if log is None:
        raise SessionNotFound(f"log {key}")
    rows = log.rows(key)
    if not all(position in rows for position in range(start, stop)):
        raise log.damage[0] if log.damage else SessionNotFound(f"log {key}")
    return _decoded(rows, log.stem, (key, start, stop))


def entries(directory: Directory, session_id: str, after: int, limit: int | None, inbox: bool) -> list[JournalEntry]:
    log = _existing(directory, session_id)
    kept = log.inbox if inbox else log.events
    after = max(after, log.taken if inbox else 0)
    stop = len(kept) if limit is None else after + limit
    found = [codec.decode(Entry, raw) for raw in kept[after:stop]]
    return [JournalEntry(seq, entry.kind, entry.body, entry.run) for seq, entry in enumerate(found, after + 1)]


def find_key(directory: Directory, session_id: str, name: str) -> tuple[Key, int] | None:
    return _existing(directory, session_id).keys.get(name)


def is_claimed(directory: Directory, session_id: str, at: float) -> bool:
    return _existing(directory, session_id).is_claimed(at)


def _existing(directory: Directory, session_id: str) -> SessionLog:
    """A session's log; SessionNotFound if there is none."""
    log = directory.surely(session_id, lambda: directory.existing(session_id))
    if log is None:
        raise SessionNotFound(session_id)
    return log


class _Place(NamedTuple):
    """A session's place in the order of creation."""

    birth: int
    session_id: str


def list_sessions(directory: Directory, query: SessionQuery) -> SessionInfoList:
    before = page_start(query.after)
    found: list[tuple[_Place, AgentSessionInfo]] = []
    damaged: list[CorruptRecord | InvalidSessionFile] = []
    for session_id in directory.ids():
        if query.id not in (None, session_id):
            continue
        try:
            header = _newest_header(directory, session_id)
        except (CorruptRecord, InvalidSessionFile) as error:
            damaged.append(error)
            continue
        place = header and _place_of(header.key)
        if header and place and (before is None or place < before) and matches(header.info, query):
            found.append((place, header.info))
    # A damaged session has no known place; it stands on the first page.
    return _page(found, query.limit, damaged if before is None else ())


def page_start(after: str | None) -> _Place | None:
    """The place that a page's `next` stands for."""
    if after is None:
        return None
    place = _place_of(after)
    if place is None:
        raise InvalidData("$.after", f"{after!r} is not a page's `next`")
    return place


def _place_of(key: str) -> _Place | None:
    found = LogKey.parse(key)
    return None if found is None or found.name else _Place(found.birth, found.owner)


def _newest_header(directory: Directory, session_id: str) -> Header | None:
    try:
        return _look_at_header(directory, session_id)
    except (CorruptRecord, InvalidSessionFile):
        # It may have been deleted or renewed between two looks, and a listing waits for no lock.
        return _look_at_header(directory, session_id)


def _look_at_header(directory: Directory, session_id: str) -> Header | None:
    """The header as of the newest version, which the document has not if a writer was killed before its rename."""
    header = directory.header(session_id)
    log = directory.existing(session_id) if header is None else directory.since(session_id, header)
    if log is None or log.version == 0:
        return header
    return Header(decode_info(log.heads[log.version], session_id, log.version), log.key, log.end)


def _page(
    found: list[tuple[_Place, AgentSessionInfo]],
    limit: int,
    damaged: Iterable[CorruptRecord | InvalidSessionFile],
) -> SessionInfoList:
    found.sort(key=lambda each: each[0], reverse=True)
    page = found[:limit]
    last = page[-1][0] if len(found) > limit else None
    more = f"{last.session_id}@{last.birth}" if last else None
    return SessionInfoList((info for _, info in page), next=more, damaged=damaged)
