"""What the file store writes, in its thread: versions, claims and the journal. Each is one operation in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import NamedTuple, TypeVar

import msgspec

from perdure import codec
from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    InvalidSessionFile,
    PerdureError,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Entry, Key, StoredAt
from perdure.stores.claims import Holder
from perdure.stores.file_directory import Directory
from perdure.stores.file_document import document_file, encode_document
from perdure.stores.file_folder import Turn, read_from, temporary
from perdure.stores.file_log import Held, Line, LogKey, SessionLog, line, opening
from perdure.stores.file_reads import assembled
from perdure.stores.format.heads import decode_info, encode_head
from perdure.stores.format.placement import Placement, foreign_stretches, is_at_hand
from perdure.stores.format.rows import Stretch, another_session

T = TypeVar("T")
Row = tuple[str, bytes]


class Write(msgspec.Struct, frozen=True):
    """A save or a create, with everything done that can be done before the lock is taken."""

    session: AgentSession
    placement: Placement
    at: datetime
    op: str
    claim: Claim | None = None
    entries: Sequence[bytes] = ()
    taken: int = 0
    key: Key | None = None


def encode_entries(entries: Iterable[Entry]) -> list[bytes]:
    """Entries as bytes; InvalidData before anything is written."""
    return [codec.encode(entry) for entry in entries]


def create(directory: Directory, write: Write) -> AgentSession:
    def fresh() -> SessionLog:
        log = directory.log(write.session.id)
        if directory.exists(write.session.id):
            raise SessionConflict(write.session.id, 0, log.version or None)
        return log

    return _write_version(directory, write, fresh)


def save(directory: Directory, write: Write) -> AgentSession:
    session = write.session

    def current() -> SessionLog:
        log = _find(directory, session.id)
        if write.claim is not None:
            _require_claim(log, write.claim)
        else:
            _require_unclaimed(log, write.at.timestamp())
        if log.version != session.version:
            raise SessionConflict(session.id, session.version, log.version)
        if decode_info(log.heads[log.version], session.id, log.version).created_at != session.info.created_at:
            raise another_session(session)
        return log

    kept = _write_version(directory, write, current)
    if write.claim is not None:
        directory.claims.discard(write.claim)
    return kept


class _Draft(NamedTuple):
    """A version about to be kept: the session as it will be, the lines that make it so, and what it is new to show."""

    session: AgentSession
    lines: list[Line]
    refs: list[Stretch]


def _write_version(directory: Directory, write: Write, log_for: Callable[[], SessionLog]) -> AgentSession:
    """Keep a version. Whoever is shown for the first time is locked too, so that no deletion comes between."""
    ids: set[str] = {write.session.id}
    while True:
        with directory.locked(ids):
            log = log_for()
            draft = _draft(directory, write, log)
            owners = {_owner(write.session, key) for key, _, _ in draft.refs}
            if owners <= ids:
                for key, start, stop in draft.refs:
                    rows = directory.rows(key)
                    if not all(position in rows for position in range(start, stop)):
                        raise _erased(write.session, key)
                session = _commit_version(directory, log, draft.lines, draft.session)
                return draft.session if is_at_hand(draft.session) else session
        ids |= owners


def _draft(directory: Directory, write: Write, log: SessionLog) -> _Draft:
    key = log.key or new_key(write.session.id)
    own, start = LogRef(directory.origin, key), log.end_of("")
    settled = write.placement.settle(own, start)
    kept = AgentSession.reconstitute(settled, version=write.session.version + 1, updated_at=write.at)
    raw, values = encode_head(kept, write.op)
    foreign = sorted(foreign_stretches(kept, own), key=str)
    refs = [each for each in foreign if not log.owns(each[0]) and not log.notes(each)]
    lines = [] if log.key else [opening(key)]
    lines += _message_lines("", start, write.placement.new)
    lines += [line("value", name, body=body) for name, body in values.items() if name not in log.values]
    lines += [line("ref", str(name), body=msgspec.json.encode([start, stop])) for name, start, stop in refs]
    lines += _entry_lines("event", len(log.events), write.entries)
    lines += _taken_lines(write.taken)
    if write.key is not None:
        lines += [line("key", write.key.name, kept.version, msgspec.json.encode(write.key.digest))]
    lines += [line("release", at=log.epoch)] if log.held else []
    lines += [line("head", at=kept.version, body=raw)]
    return _Draft(kept, lines, refs)


def new_key(session_id: str) -> str:
    """A key that no log has had: its birth is the machine's time, whatever the clock in use says."""
    return f"{session_id}@{time.time_ns()}"


def _owner(session: AgentSession, key: int | str) -> str:
    found = LogKey.parse(key)
    if found is None:
        raise _erased(session, key)
    return found.owner


def _erased(session: AgentSession, key: int | str) -> SessionNotFound:
    return SessionNotFound(session.info.parent_id or f"log {key}")


def claim(
    directory: Directory,
    session_id: SessionId,
    version: int,
    holder: Holder,
    lease: float,
    at: float,
    rows: Sequence[Row],
    entries: Sequence[bytes],
    take_over: bool,
) -> tuple[Claim, Appended]:
    with directory.locked({session_id}):
        log = _find(directory, session_id)
        _require_unclaimed(log, at, take_over)
        if log.version != version:
            raise SessionConflict(session_id, version, log.version)
        taken = Claim(session_id, log.epoch + 1, version, holder.owner, lease)
        held = line("claim", at=taken.epoch, body=msgspec.json.encode(Held(holder, at + lease)))
        appended = _put(directory, log, [held], "", rows, entries)
    directory.claims.add(taken)
    return taken, appended


def append(
    directory: Directory,
    claim: Claim,
    at: float,
    name: str,
    rows: Sequence[Row],
    entries: Sequence[bytes],
    taken: int,
) -> Appended:
    with directory.locked({claim.session_id}):
        log = _require_claim(directory.existing(claim.session_id), claim)
        return _put(directory, log, [_beat(claim, at), *_taken_lines(taken)], name, rows, entries)


def _put(
    directory: Directory, log: SessionLog, first: list[Line], name: str, rows: Sequence[Row], entries: Sequence[bytes]
) -> Appended:
    start = log.end_of(name)
    messages = _message_lines(name, start, [body for _, body in rows])
    _commit(directory, log, [*first, *messages, *_entry_lines("event", len(log.events), entries)])
    ref = LogRef(directory.origin, log.key_of(name))
    written = {message_id: StoredAt(ref, place) for place, (message_id, _) in enumerate(rows, start)}
    return Appended(written, len(log.events))


def heartbeat(directory: Directory, claim: Claim, at: float) -> None:
    with directory.locked({claim.session_id}):
        log = _require_claim(directory.existing(claim.session_id), claim)
        _commit(directory, log, [_beat(claim, at)])


def lapse_all(directory: Directory, at: float) -> None:
    """Have the claims lapse that were taken here and not given back: their runs cannot write any more."""
    for claim in sorted(directory.claims, key=lambda claim: claim.session_id):
        # Where the lock is not free at once, the claim lapses when its lease has run out.
        with suppress(PerdureError, OSError), directory.folder.taking(Turn(deadline=0.0)):
            log = directory.log(claim.session_id)
            if log.epoch == claim.epoch and log.is_claimed(at):
                release(directory, claim, interrupted=True)


def release(directory: Directory, claim: Claim, interrupted: bool) -> None:
    directory.claims.discard(claim)
    with directory.locked({claim.session_id}):
        log = directory.existing(claim.session_id)
        if log is not None and log.held is not None and log.epoch == claim.epoch:
            given_back = line("release", at=claim.epoch)
            _commit(directory, log, [_beat(claim, -claim.lease) if interrupted else given_back])


def post(directory: Directory, session_id: str, entry: bytes) -> int:
    with directory.locked({session_id}):
        log = _find(directory, session_id)
        _commit(directory, log, _entry_lines("inbox", len(log.inbox), [entry]))
        return len(log.inbox)


def _find(directory: Directory, session_id: str) -> SessionLog:
    log = directory.existing(session_id)
    if log is None:
        raise SessionNotFound(session_id)
    return log


def require_free(log: SessionLog, at: float) -> None:
    """Raise SessionBusy while somebody's claim on a session stands."""
    if log.held is not None and log.is_claimed(at):
        raise SessionBusy(log.stem, log.held.holder.owner)


def _require_unclaimed(log: SessionLog, at: float, take_over: bool = False) -> None:
    """Raise for a claim that lies on a session; one that has lapsed may be taken over."""
    require_free(log, at)
    if log.held is not None and not take_over:
        raise RunInterrupted(log.stem)


def _require_claim(log: SessionLog | None, claim: Claim) -> SessionLog:
    if log is None or log.held is None or log.epoch != claim.epoch:
        raise ClaimLost(claim.session_id, claim.epoch)
    return log


def _message_lines(name: str, start: int, bodies: Iterable[bytes]) -> list[Line]:
    return [line("message", name, at, body) for at, body in enumerate(bodies, start)]


def _entry_lines(kind: str, after: int, bodies: Iterable[bytes]) -> list[Line]:
    return [line(kind, at=seq, body=body) for seq, body in enumerate(bodies, after + 1)]


def _taken_lines(taken: int) -> list[Line]:
    return [line("taken", at=taken)] if taken else []


def _beat(claim: Claim, at: float) -> Line:
    return line("beat", at=claim.epoch, body=msgspec.json.encode(at + claim.lease))


def _commit(directory: Directory, log: SessionLog, lines: Sequence[Line]) -> None:
    """Append an operation that makes no version. It renews a document that a killed writer has left behind."""
    if _is_behind(directory, log):
        _commit_version(directory, log, lines)
    else:
        _append(directory, log, lines, lambda: None)


def _commit_version(
    directory: Directory, log: SessionLog, lines: Sequence[Line], kept: AgentSession | None = None
) -> AgentSession:
    """Append an operation. The document that goes with it is ready before, and put in place after."""
    document = document_file(log.stem)

    def stage() -> AgentSession:
        session = _newest(directory, log, kept)
        directory.folder.stage(document, encode_document(session, log))
        return session

    with ExitStack() as undo:
        undo.callback(directory.folder.discard, temporary(document))
        session = _append(directory, log, lines, stage)
        undo.pop_all()
    # What was appended is kept, whatever becomes of the document: the next write makes it anew.
    with suppress(OSError):
        directory.folder.put_in_place(document)
    return session


def _newest(directory: Directory, log: SessionLog, kept: AgentSession | None) -> AgentSession:
    """The newest version as a load would give it."""
    try:
        return assembled(directory, log, log.version)
    except CorruptRecord:
        # A session that this one points into is damaged; what is at hand is saved all the same.
        if kept is None or not is_at_hand(kept):
            raise
        return kept


def _append(directory: Directory, log: SessionLog, lines: Sequence[Line], prepare: Callable[[], T]) -> T:
    """Append an operation, after `prepare` has seen the log as it is going to be."""
    if log.torn:
        _set_aside(directory, log)
    end, body = log.end, log.encode(lines)
    with ExitStack() as undo:
        undo.callback(directory.forget, log)
        log.feed(body)
        prepared = prepare()
        directory.folder.append(log.file, end, body)
        undo.pop_all()
    directory.remember(log)
    return prepared


def _is_behind(directory: Directory, log: SessionLog) -> bool:
    """Whether a writer was killed before it could put the document of the newest version in place."""
    try:
        header = directory.header(log.stem)
    except InvalidSessionFile:
        return False
    return header is None or header.info.version < log.version


def _set_aside(directory: Directory, log: SessionLog) -> None:
    """Move a torn tail out of the log, to where it can be looked at."""
    with directory.folder.reading(log.file) as handle:
        assert handle is not None
        tail = read_from(handle, log.end)
    directory.folder.write_new(_torn_file(directory, log), tail)
    directory.folder.sync()
    directory.folder.cut(log.file, log.end)
    log.torn = False


def _torn_file(directory: Directory, log: SessionLog) -> str:
    taken = set(directory.folder.names())
    names = (f"{log.stem}.torn-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
