"""Sessions of a file store given out and taken in whole, in its thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.file_directory import Directory
from perdure.stores.file_document import document_file, encode_document
from perdure.stores.file_folder import temporary
from perdure.stores.file_log import Held, Line, LogKey, SessionLog, encode_operation, line, opening
from perdure.stores.file_reads import assembled
from perdure.stores.file_writes import encode_entries, new_key
from perdure.stores.format.heads import decode_info
from perdure.stores.landing import Landing, check, require_same
from perdure.stores.moving import MOVED, Material, Owner, Rows, archive, busy, split_name


def dump(directory: Directory, session_id: SessionId, at: float, alone: bool) -> ArchivedSession:
    return directory.surely(session_id, lambda: _dump(directory, session_id, at, alone))


def _dump(directory: Directory, session_id: SessionId, at: float, alone: bool) -> ArchivedSession:
    log = directory.existing(session_id)
    if log is None:
        raise SessionNotFound(session_id)
    if log.held is not None and log.is_claimed(at):
        raise busy(session_id, log.held.holder.owner)
    material = Material(
        session_id,
        log.heads,
        _values_of(log),
        log.messages,
        tuple(codec.decode(Entry, raw) for raw in log.events),
        tuple(codec.decode(Entry, raw) for raw in log.inbox[log.taken :]),
        {name: (key.digest, version) for name, (key, version) in log.keys.items()},
        log.held is not None,
        log.version,
    )
    return archive(material, FileLogs(directory), alone=alone)


def _values_of(log: SessionLog) -> Callable[[str], bytes]:
    def value_of(name: str) -> bytes:
        if name not in log.values:
            raise CorruptRecord(log.stem, f"value {name}", "it is missing or damaged")
        return log.values[name]

    return value_of


class FileLogs:
    """The logs of a directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.origin = directory.origin

    def owner_of(self, log: int | str) -> Owner | None:
        key = LogKey.parse(log)
        if key is None:
            return None
        found = self._directory.log(key.owner)
        return Owner(key.owner, key.name, _created(found)) if found.key == key.base and found.version else None

    def log_of(self, owner: str, branch: str, created: float) -> int | str | None:
        found = self._directory.existing(owner)
        return found.key_of(branch) if found is not None and _created(found) == created else None

    def rows(self, log: int | str, start: int, stop: int) -> Rows:
        rows = self._directory.rows(log)
        return {at: rows[at] for at in range(start, stop) if at in rows}

    def holds(self, log: int | str, start: int, stop: int) -> bool:
        rows = self._directory.rows(log)
        return all(at in rows for at in range(start, stop))


def _created(log: SessionLog) -> float:
    return decode_info(log.heads[log.version], log.stem, log.version).created_at.timestamp()


def restore(directory: Directory, archived: ArchivedSession, at: float) -> bool:
    """Write a session as one operation. Whoever it shows is locked too, so that no deletion comes between."""
    owners = {split_name(str(name))[0] for name, _, _ in check(archived)} & archived.owners.keys()
    with directory.locked({archived.session_id, *owners}):
        landing = Landing(archived, FileLogs(directory))
        if directory.exists(archived.session_id):
            require_same(archived, _dump(directory, archived.session_id, at, bool(archived.lent)))
            return False
        _write(directory, directory.log(archived.session_id), landing)
    return True


def _write(directory: Directory, log: SessionLog, landing: Landing) -> None:
    archived = landing.archived
    lines = [opening(new_key(archived.session_id))]
    lines += _lines(landing, lines[0].name)
    body = encode_operation(lines, 1)
    if archived.interrupted:
        # An operation of its own behind the versions, where those look who look for lapsed claims.
        held = line("claim", at=_birth(lines[0].name) + 1, body=msgspec.json.encode(Held(MOVED, 0.0)))
        body += encode_operation([held], len(lines) + 1)
    if log.torn:  # a writer of an earlier session of this id was killed before it had written anything that counts
        directory.folder.cut(log.file, 0)
    log = SessionLog(archived.session_id)
    log.feed(body)
    document = document_file(archived.session_id)
    with ExitStack() as undo:
        undo.callback(directory.folder.discard, temporary(document))
        directory.folder.stage(document, encode_document(assembled(directory, log, log.version), log))
        directory.folder.append(log.file, 0, body)
        undo.pop_all()
    with suppress(OSError):  # what was appended is kept; the next write makes the document anew
        directory.folder.put_in_place(document)


def _birth(key: str) -> int:
    found = LogKey.parse(key)
    assert found is not None
    return found.birth


def _lines(landing: Landing, key: str) -> Iterator[Line]:
    archived, values = landing.archived, dict[str, bytes]()
    for branch, rows in landing.own.items():
        yield from (line("message", branch, at, rows[at]) for at in sorted(rows))
    heads: list[bytes] = []
    for raw, named in landing.heads(lambda branch: f"{key}/{branch}" if branch else key):
        heads.append(raw)
        values |= named
    yield from (line("value", name, body=body) for name, body in values.items())
    for name, start, stop in landing.shown_of_others():
        yield line("ref", str(name), body=msgspec.json.encode([start, stop]))
    for kind, entries in (("event", archived.entries), ("inbox", archived.inbox)):
        yield from (line(kind, at=seq, body=body) for seq, body in enumerate(encode_entries(entries), 1))
    for name, (digest, version) in archived.keys.items():
        yield line("key", name, version, msgspec.json.encode(digest))
    yield from (line("head", at=version, body=raw) for version, raw in enumerate(heads, 1))
