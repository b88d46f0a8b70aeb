"""Redaction in a directory: the logs of all sessions concerned are written again, each whole or not at all.

The logs that hold the messages come last. Killed before, a redaction can be repeated: what it looks for is still there.
Where there are several logs, a note of it is written first, from which `finish_all` does what is left to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionFile, SessionBusy, SessionNotFound
from perdure.protocols import Entry
from perdure.stores import redaction
from perdure.stores.file_directory import Directory
from perdure.stores.file_document import document_file, encode_document
from perdure.stores.file_erasure import leftovers
from perdure.stores.file_folder import read_from
from perdure.stores.file_intent import read_intent, remove_intent, sessions_with_intent, write_intent
from perdure.stores.file_log import Line, LogKey, SessionLog, encode_operation, line, log_file, rewritten
from perdure.stores.file_reads import assembled
from perdure.stores.file_writes import require_free
from perdure.stores.format.heads import StoredHead, decode_info
from perdure.stores.format.rows import operation_id
from perdure.stores.redaction import Log, Places, Redone, Request, Row, Version, next_version


def redact(directory: Directory, request: Request, at: datetime) -> int:
    """Replace the content of messages; how many were not replaced before. All sessions concerned are locked."""
    ids: set[str] = {request.session_id}
    while True:
        with directory.locked(ids):
            whole = _with_unfinished(directory, request)
            try:
                fresh = redaction.redact(_Bench(directory, ids, whole, at), whole, at)
            except _MoreLocks as more:
                ids |= more.needed
            else:
                remove_intent(directory.folder, request.session_id)
                return fresh


def _with_unfinished(directory: Directory, request: Request) -> Request:
    """Add the messages of a redaction that was cut short: its note is about to be written over."""
    begun = read_intent(directory.folder, request.session_id)
    return request if begun is None else request._replace(ids=tuple(dict.fromkeys((*request.ids, *begun.ids))))


def finish(directory: Directory, session_id: str, at: datetime) -> int:
    """Finish a session's redaction that was cut short. Return how many messages were not replaced before."""
    begun = read_intent(directory.folder, session_id)
    try:
        return 0 if begun is None else redact(directory, begun, at)
    except (SessionNotFound, InvalidData):  # somebody has removed the session's files, or put older ones in their place
        with directory.locked({session_id}):
            remove_intent(directory.folder, session_id)
        return 0


def finish_all(directory: Directory, at: datetime) -> int:
    """Finish what was cut short, as far as its sessions are free and sound. Return how many messages were replaced."""
    fresh = 0
    for session_id in sessions_with_intent(directory.folder):
        with suppress(SessionBusy, CorruptRecord, InvalidSessionFile):
            fresh += finish(directory, session_id, at)
    return fresh


class _MoreLocks(Exception):
    """Sessions are concerned that are not locked yet."""

    def __init__(self, needed: set[str]) -> None:
        super().__init__(needed)
        self.needed = needed


class _Bench:
    """The logs of a directory, some of whose sessions are locked."""

    def __init__(self, directory: Directory, locked: Collection[str], request: Request, at: datetime) -> None:
        self._directory = directory
        self._request = request
        self._locked = locked
        self._at = at

    def _log(self, session_id: str) -> SessionLog:
        log = self._directory.existing(session_id)
        if log is None:
            raise SessionNotFound(session_id)
        return log

    def history(self, session_id: str) -> Iterator[Row]:
        log = self._log(session_id)
        for name, rows in log.messages.items():
            yield from (Row(log.key_of(name), position, body) for position, body in rows.items())
        for key, start, stop in log.refs:
            held = self._directory.rows(key)
            yield from (Row(key, position, held[position]) for position in range(start, stop) if position in held)

    def row(self, log: Log, position: int) -> bytes:
        held = self._directory.rows(log)
        if position not in held:
            raise CorruptRecord(None, f"message {position} of log {log}", "it is missing")
        return held[position]

    def concerned(self, places: Places) -> Collection[str]:
        found: set[str] = set()
        parents: dict[str, str | None] = {}
        for session_id in self._directory.ids():
            log = self._directory.log(session_id)
            if not log.version:
                continue
            parents[session_id] = decode_info(log.heads[log.version], session_id, log.version).parent_id
            is_shown = any(start <= at < stop for key, start, stop in log.shown() for at in places.get(key, ()))
            if is_shown or any(map(log.owns, places)):
                found.add(session_id)
        while forks := {session_id for session_id, parent in parents.items() if parent in found} - found:
            found |= forks
        owners = {owner.owner for owner in map(LogKey.parse, places) if owner}
        if not found | owners <= set(self._locked):
            raise _MoreLocks(found | owners)
        return found

    def require_free(self, session_id: str) -> None:
        require_free(self._log(session_id), self._at.timestamp())

    def versions(self, session_id: str) -> Iterator[Version]:
        log = self._log(session_id)
        for number, raw in list(log.heads.items()):
            yield Version(number, raw, StoredHead(raw, session_id, number).gathered(log.values.__getitem__))

    def entries(self, session_id: str) -> list[Entry]:
        return [codec.decode(Entry, raw) for raw in self._log(session_id).events]

    def inbox(self, session_id: str) -> list[Entry]:
        return [codec.decode(Entry, raw) for raw in self._log(session_id).inbox]

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        messages: dict[str, dict[tuple[str, int], bytes]] = {}
        for row in rows:
            key, log = LogKey.parse(row.log), self._directory.log_of(row.log)
            assert key is not None
            assert log is not None
            messages.setdefault(log.stem, {})[key.name, row.position] = row.body
        redone = {each.session_id: each for each in sessions}
        asked = {row.log for row in rows if codec.decode_plain(row.body)["id"] in self._request.ids}
        stems = sorted({*redone, *messages}, key=lambda stem: any(map(self._directory.log(stem).owns, asked)))
        bodies = {stem: self._rewritten(stem, messages.get(stem, {}), redone.get(stem)) for stem in stems}
        folder = self._directory.folder
        if len(bodies) > 1:
            write_intent(folder, self._request)
        for session_id in redone:
            # Without its document a session is read from its log; with one that tells of the old log it is not.
            folder.remove(document_file(session_id), *leftovers(self._directory, session_id))
        folder.sync()
        for stem, body in bodies.items():
            folder.replace(log_file(stem), body)
        self._directory.forget_all()
        for session_id in redone:
            log = self._log(session_id)
            folder.replace(
                document_file(session_id), encode_document(assembled(self._directory, log, log.version), log)
            )

    def _rewritten(self, stem: str, messages: Mapping[tuple[str, int], bytes], redone: Redone | None) -> bytes:
        log = self._directory.log(stem)
        if log.damage:
            raise log.damage[0]
        with self._directory.folder.reading(log.file) as handle:
            assert handle is not None, "it has just been read"
            raw = read_from(handle, 0)[: log.end]
        change = _Change(messages, redone, log)
        return rewritten(raw, operation_id(), change) + (self._told(log, redone) if redone else b"")

    def _told(self, log: SessionLog, redone: Redone) -> bytes:
        """The operation that tells of it, with a version that nobody who has loaded an earlier one can save over."""
        lines = [line("event", at=len(log.events) + 1, body=codec.encode(redone.told))]
        if log.held is None:
            changed = {version.number: version.raw for version in redone.versions}
            newest = changed.get(log.version, log.heads[log.version])
            lines.append(line("head", at=log.version + 1, body=next_version(newest, self._at)))
        return encode_operation(lines, log.lines + 1)


class _Change:
    """The lines of a log as they are to be."""

    def __init__(self, messages: Mapping[tuple[str, int], bytes], redone: Redone | None, log: SessionLog) -> None:
        self._messages = messages
        self._heads = {version.number: version.raw for version in redone.versions} if redone else {}
        self._values = dict(_exchanged(redone.versions, log)) if redone else {}
        self._entries = (
            {
                kind: {place + 1: codec.encode(entry) for place, entry in entries.items()}
                for kind, entries in (("event", redone.entries), ("inbox", redone.inbox))
            }
            if redone
            else {}
        )

    def __call__(self, each: Line) -> Line:
        match each.kind:
            case "message":
                return _with_body(each, self._messages.get((each.name, each.at)))
            case "head":
                return _with_body(each, self._heads.get(each.at))
            case "event" | "inbox":
                return _with_body(each, self._entries.get(each.kind, {}).get(each.at))
            case "value" if each.name in self._values:
                name, body = self._values[each.name]
                return replace(each, name=name, body=msgspec.Raw(body))
        return each


def _with_body(each: Line, body: bytes | None) -> Line:
    return each if body is None else replace(each, body=msgspec.Raw(body))


def _exchanged(versions: Sequence[Version], log: SessionLog) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """The values that heads named before, each with the one that they name in its place.

    A part that has become short stands in its head; its value is then an empty one, so that no line is missing.
    """
    for version in versions:
        before = codec.decode_plain(log.heads[version.number]).get("hashed", {})
        after = codec.decode_plain(version.raw).get("hashed", {})
        for part, key in before.items():
            if after.get(part) != key:
                name = after.get(part, "")
                yield key, (name, version.values[name] if name else b"null")
