"""What the file store reads, in its thread: sessions, messages, entries, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionFile, SessionNotFound, UnreadableFile
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList
from perdure.model.transcript import LogRef
from perdure.protocols import Entry, JournalEntry, Key, RunOnRecord, SessionQuery
from perdure.stores.beginnings import Beginning
from perdure.stores.file_directory import Directory, cut_short
from perdure.stores.file_document import Header
from perdure.stores.file_log import LogKey, SessionLog
from perdure.stores.format.heads import StoredHead, decode_info
from perdure.stores.format.rows import ListPlace, Stretch, decode_row, runs_in
from perdure.stores.format.rows import page_start as list_start
from perdure.stores.jobs.listing import matches
from perdure.stores.tapes import TapeCache

T = TypeVar("T")

_UNREAD = (CorruptRecord, InvalidSessionFile, UnreadableFile)
"""What concerns one session, and stops nobody else's listing."""


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
    for name in head.hashes(log.values):
        if name not in log.values:
            raise CorruptRecord(log.stem, f"value {name}", "it is missing or damaged")
    shelf = TapeCache(directory.origin)
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


class Asked(NamedTuple):
    """Which entries are to be read."""

    after: int = 0
    limit: int | None = None
    last: int | None = None
    run: str | None = None
    inbox: bool = False


def entries(directory: Directory, session_id: str, asked: Asked) -> list[JournalEntry]:
    log = _existing(directory, session_id)
    kept, after = (log.inbox, max(asked.after, log.taken)) if asked.inbox else (log.events, max(asked.after, 0))
    numbered = list(enumerate(kept[after:], after + 1))
    if asked.run is None:
        return [_entry(seq, raw) for seq, raw in _some(numbered, asked)]
    return _some([entry for entry in (_entry(seq, raw) for seq, raw in numbered) if entry.run == asked.run], asked)


def _some(found: list[T], asked: Asked) -> list[T]:
    if asked.last is not None:
        return found[-asked.last :] if asked.last else []
    return found[: asked.limit]


def _entry(seq: int, raw: bytes) -> JournalEntry:
    entry = codec.decode(Entry, raw)
    return JournalEntry(seq, entry.kind, entry.body, entry.run)


def runs(
    directory: Directory, session_id: str, limit: int | None, before: int | None, run: str | None
) -> list[RunOnRecord]:
    log = _existing(directory, session_id)

    def stretch_of(loop: str) -> tuple[LogRef, int, int]:
        name = loop if loop in log.messages else ""
        return LogRef(directory.origin, log.key_of(name)), 0, log.end_of(name)

    entries = (_entry(seq, raw) for seq, raw in enumerate(log.events, 1))
    return runs_in(entries, stretch_of, limit=limit, before=before, run=run)


def log_of(directory: Directory, session_id: str, name: str) -> tuple[LogRef, int]:
    log = _existing(directory, session_id)
    if name and name not in log.messages:
        raise SessionNotFound(f"{session_id}/{name}")
    return LogRef(directory.origin, log.key_of(name)), log.end_of(name)


def lapsed(directory: Directory, at: float) -> list[SessionId]:
    """The sessions whose claim stands no longer, though nobody gave it back. Damaged ones are for a list to report."""
    found: list[_Place] = []
    for session_id in directory.ids():
        with suppress(*_UNREAD):
            header, log = _since_document(directory, session_id)
            place = header and _place_of(header)
            if place and log and log.held and not log.is_claimed(at):
                found.append(place)
    return [SessionId(place.session_id) for place in sorted(found)]


def find_key(directory: Directory, session_id: str, name: str) -> tuple[Key, int] | None:
    return _existing(directory, session_id).keys.get(name)


def is_claimed(directory: Directory, session_id: str, at: float) -> bool:
    return _existing(directory, session_id).is_claimed(at)


def is_interrupted(directory: Directory, session_id: str, at: float) -> bool:
    log = directory.surely(session_id, lambda: directory.existing(session_id))
    return log is not None and log.held is not None and not log.is_claimed(at)


def _existing(directory: Directory, session_id: str) -> SessionLog:
    """A session's log; SessionNotFound if there is none."""
    log = directory.surely(session_id, lambda: directory.existing(session_id))
    if log is None:
        raise SessionNotFound(session_id)
    return log


class _Place(NamedTuple):
    """A session's place in a list: by when it was created, which for one that was brought in was before its birth."""

    created: float
    birth: int
    session_id: str

    @property
    def next(self) -> str:
        return f"{ListPlace(self.created, self.birth).next}@{self.session_id}"


def list_sessions(directory: Directory, query: SessionQuery) -> SessionInfoList:
    before = page_start(query.after)
    found: list[tuple[_Place, AgentSessionInfo]] = []
    damaged: list[CorruptRecord | InvalidSessionFile | UnreadableFile] = []
    for session_id in directory.ids():
        if query.id not in (None, session_id):
            continue
        try:
            header = _newest_header(directory, session_id)
        except _UNREAD as error:
            damaged.append(error)
            continue
        place = header and _place_of(header)
        if header and place and (before is None or place < before) and matches(header.info, query):
            found.append((place, header.info))
    # A damaged session has no known place; it stands on the first page.
    return _page(found, query.limit, damaged if before is None else ())


def ids_with_prefix(directory: Directory, sought: Beginning) -> list[SessionId]:
    """Only the headers of those that begin so are read."""
    found: list[SessionId] = []
    for session_id in directory.ids():
        if session_id.startswith(sought.prefix) and _is_met(directory, session_id, sought):
            found.append(SessionId(session_id))
            if len(found) == sought.limit:
                break
    return found


def _is_met(directory: Directory, session_id: str, sought: Beginning) -> bool:
    try:
        header = _newest_header(directory, session_id)
    except _UNREAD:  # whose it is cannot be known
        return sought.owner is None and not sought.deleted
    return header is not None and sought.is_met_by(session_id, header.info)


def page_start(after: str | None) -> _Place | None:
    """Return the place that a page's `next` stands for."""
    if after is None:
        return None
    place, _, session_id = after.partition("@")
    start = list_start(place)
    if start is None or not session_id:
        raise InvalidData("$.after", f"{after!r} is not a page's `next`")
    return _Place(*start, session_id)


def _place_of(header: Header) -> _Place | None:
    found = LogKey.parse(header.key)
    created = header.info.created_at.timestamp()
    return None if found is None or found.name else _Place(created, found.birth, found.owner)


def _newest_header(directory: Directory, session_id: str) -> Header | None:
    try:
        return _look_at_header(directory, session_id)
    except (CorruptRecord, InvalidSessionFile):
        # It may have been deleted or renewed between two looks, and a listing waits for no lock.
        return _look_at_header(directory, session_id)


def _look_at_header(directory: Directory, session_id: str) -> Header | None:
    """The header as of the newest version, which the document has not if a writer was killed before its rename."""
    return _since_document(directory, session_id)[0]


def _since_document(directory: Directory, session_id: str) -> tuple[Header | None, SessionLog | None]:
    """A session's newest header, and its log from where the document was made: what came after its last version."""
    header = directory.header(session_id)
    log = directory.existing(session_id) if header is None else directory.since(session_id, header)
    if log is None or log.version == 0:
        return header, log
    return Header(decode_info(log.heads[log.version], session_id, log.version), log.key, *log.newest), log


def _page(
    found: list[tuple[_Place, AgentSessionInfo]],
    limit: int,
    damaged: Iterable[CorruptRecord | InvalidSessionFile | UnreadableFile],
) -> SessionInfoList:
    found.sort(key=lambda each: each[0], reverse=True)
    page = found[:limit]
    last = page[-1][0] if len(found) > limit else None
    more = last.next if last else None
    return SessionInfoList((info for _, info in page), next=more, damaged=damaged)
