"""The changes of a job, written to files: each log's share whole or not at all, and the document beside it.

An operation is appended to a log. Where lines have changed, the log is written again. Only those messages of an erased
session stay that others show. They are kept in a remainder, a log under the erased session's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, TypeVar

from perdure.errors import CorruptRecord, InvalidSessionFile
from perdure.model.session import AgentSession
from perdure.stores.cache import CachedSession
from perdure.stores.file import hints
from perdure.stores.file.blobs import LOCK
from perdure.stores.file.changes import Changes, Rewriting, changes_of, lines_of, session_rows, shown_owners, whole_log
from perdure.stores.file.desk import Desk, MoreLocks
from perdure.stores.file.directory import Directory, owner_of
from perdure.stores.file.document import document_file, encode_document
from perdure.stores.file.group import Growth, Removal, Step, decided
from perdure.stores.file.log import (
    Line,
    SessionLog,
    encode_operation,
    line,
    log_file,
    opening,
    rewritten,
)
from perdure.stores.file.pledge import intent_file, remove_intent, write_intent
from perdure.stores.file.sketches import encode_sketches, sketch_file
from perdure.stores.folder import Folder, read_from, temporary
from perdure.stores.format.placement import is_at_hand
from perdure.stores.format.rows import operation_id

T = TypeVar("T")


def commit(desk: Desk, result: object) -> None:
    """Write what a job has changed. Raise MoreLocks if it concerns sessions that are not locked."""
    changes = changes_of(desk)
    needed = {owner_of(each.stem) for each in changes}.union(*(shown_owners(each, desk) for each in changes))
    if not needed <= desk.held:
        raise MoreLocks(needed)
    for table in desk.small.values():
        if table.is_changed:
            table.write()
    if desk.blobs.is_changed:
        _commit_with_files(desk, changes, result)
    else:
        _commit(desk, changes, result)


def _commit_with_files(desk: Desk, changes: Sequence[Changes], result: object) -> None:
    """Write images and files before the logs that name them, and remove others after the logs that named them."""
    directory = desk.directory
    with directory.folder.locked([LOCK], directory.lock_timeout):
        with ExitStack() as undo:
            undo.callback(desk.blobs.take_back, directory.folder)
            desk.blobs.write()
            _commit(desk, changes, result)
            undo.pop_all()
        desk.blobs.remove(directory.folder)


def _commit(desk: Desk, changes: Sequence[Changes], result: object) -> None:
    erased = [(each.stem, _left_of(desk, each.stem)) for each in changes if each.is_erasure]
    trimmed = [(each.stem, _left_of(desk, each.stem)) for each in changes if each.is_trim]
    forgetting = [(each.stem, whole_log(each.stem, desk)) for each in changes if each.is_forgetting]
    written = [each for each in changes if not (each.is_erasure or each.is_trim or each.is_forgetting)]
    if erased or forgetting:
        # A damaged fork of an erased session stays as it is, for its owner to mend. Its heads say what it shows.
        written = [each for each in written if not desk.look(each.stem).log.damage]
    is_rewrite = any(each.is_rewrite for each in written)
    rewrites = [_Rewrite.of(each, desk) for each in written if is_rewrite]
    operations = {each.stem: [*filter(None, lines_of(each, desk))] for each in written if not is_rewrite}
    sketches = [write for each in changes if not each.is_erasure for write in _sketch_writes(desk, each)]
    settled = [hint for each in changes for hint in _give_hints(desk, each)]
    # The rows go back to what the files say. What was changed is in lines by now.
    desk.tables.take_back()
    if rewrites:
        _rewrite(desk, rewrites)
    # Before the erasures: if this is killed in between, the session still exists, and its log counts.
    for stem, left in erased:
        _keep_left(desk, stem, left)
    appends = [(stem, each) for stem, each in operations.items() if each]
    _append_and_erase(desk, appends, [stem for stem, _ in erased], _kept_in(result))
    # After all erasures: a log keeps what only others show until these are gone.
    if forgetting:
        _rewrite(desk, [_Rewrite(stem, _whole(*lines), is_session=True) for stem, lines in forgetting])
    if erased or trimmed:
        trim(desk, trimmed)
    for write in sketches:  # after the answer itself: killed in between, it leaves pieces that are void
        write(desk.directory.folder)
    # Hints are removed after the lines they point to: a stale hint costs one read, a missing one would lose a session.
    for kind, stem in settled:
        hints.take(desk.directory.folder, kind, stem)
    for session_id in desk.pledges:
        remove_intent(desk.directory.folder, session_id)


def _sketch_writes(desk: Desk, changes: Changes) -> Iterator[Callable[[Folder], None]]:
    """Yield the writes for the file of an answer under way. Its rows already have their new values."""
    name, added = sketch_file(changes.stem), changes.added.get("sketch", [])
    replaced = [*changes.removed.get("sketch", ()), *(row for row, _ in changes.changed.get("sketch", ()))]
    if replaced:
        left = encode_sketches(desk.rows_of("sketch").find({"sid": replaced[0]["sid"]}))
        # Without a sync: if the file comes back after a power cut, it is void.
        yield (lambda folder: folder.replace(name, left)) if left else (lambda folder: folder.remove(name))
    elif added:
        yield lambda folder: folder.append(name, folder.size(name) or 0, encode_sketches(added))


def _give_hints(desk: Desk, changes: Changes) -> Iterator[tuple[str, str]]:
    """Give the hints that something waits in a session, or that it has timers, before that is written.

    Yield the hints that can be removed once all is written.
    """
    before, after = session_rows(changes)
    did, does = (row is not None and row["inbox_end"] > row["taken"] for row in (before, after))
    if does and not did:
        hints.give(desk.directory.folder, hints.WAITING, changes.stem)
    elif (did and not does) or changes.is_erasure:
        yield hints.WAITING, changes.stem
    if changes.added.get("timer") and not changes.is_erasure:
        hints.give(desk.directory.folder, hints.TIMERS, changes.stem)
    elif (gone := changes.removed.get("timer")) and not desk.rows_of("timer").find({"sid": gone[0]["sid"]}):
        yield hints.TIMERS, changes.stem


def _left_of(desk: Desk, stem: str) -> list[Line]:
    """Return the messages of a log that others still show, as lines of a separate log."""
    rows, found = desk.look(stem), list[Line]()
    rows.make("msg")
    for name in rows.log.messages if rows.key else ():
        left = desk.rows_of("msg").find({"log": rows.log.key_of(name)})
        found += [line("message", name, row["pos"], row["body"]) for row in sorted(left, key=lambda row: row["pos"])]
    return [opening(rows.key), *found] if found else []


def _keep_left(desk: Desk, session_id: str, left: list[Line]) -> None:
    """Write what others show of a session that is about to be erased. While the session exists, its own log counts."""
    rows = desk.look(session_id)
    if rows.key:
        _keep(desk.directory, rows.key, left)


def _erase(desk: Desk, session_id: str) -> None:
    """Erase a session's files."""
    folder = desk.directory.folder
    *beside, log = _files_of(desk, session_id)
    folder.remove(*beside)
    folder.sync()
    # The session is gone when its log is gone. Killed before that, a deletion can be repeated. If killed after it, gc
    # erases the rest, and so does the next deletion that finds nothing to delete.
    folder.remove(log)
    folder.sync()
    desk.forget(session_id)


def _files_of(desk: Desk, session_id: str) -> list[str]:
    """Return the names of a session's files, with its log last."""
    leftovers = desk.directory.leftovers(session_id)
    return [document_file(session_id), intent_file(session_id), *leftovers, log_file(session_id)]


def trim(desk: Desk, remainders: Iterable[tuple[str, list[Line]]]) -> None:
    """Erase from remainders what no session shows."""
    for stem, left in remainders:
        _keep(desk.directory, stem, left)
        desk.forget(stem)
    desk.directory.folder.sync()


def _keep(directory: Directory, base: str, lines: list[Line]) -> None:
    if lines:
        directory.folder.replace(log_file(base), encode_operation(lines, 1))
    else:
        directory.folder.remove(log_file(base), temporary(log_file(base)))


class _Rewrite(NamedTuple):
    """A log that has to be written again."""

    stem: str
    body: bytes
    is_session: bool

    @classmethod
    def of(cls, changes: Changes, desk: Desk) -> _Rewrite:
        log = desk.look(changes.stem).log
        if log.damage:
            raise log.damage[0]
        with desk.directory.folder.reading(log.file) as handle:
            assert handle is not None, "it has just been read"
            raw = read_from(handle, 0)[: log.end]  # without a torn tail
        body = rewritten(raw, operation_id(), Rewriting(changes, desk))
        lines, _ = lines_of(changes, desk)
        return cls(changes.stem, body + (log.encode(lines) if lines else b""), not changes.is_remainder)


def _whole(lines: Sequence[Line], behind: Sequence[Line]) -> bytes:
    """Return a log of one operation, or of two."""
    return encode_operation(lines, 1) + (encode_operation(behind, len(lines) + 1) if behind else b"")


def _rewrite(desk: Desk, rewrites: Sequence[_Rewrite]) -> None:
    """Replace logs, one after the other. If there are several, write down first what is being done."""
    folder = desk.directory.folder
    if len(rewrites) > 1:
        for session_id, body in desk.pledges.items():
            write_intent(folder, session_id, body)
    sessions = [each.stem for each in rewrites if each.is_session]
    for session_id in sessions:
        # Without a document, a session is read from its log. A document of the old log would make it look damaged.
        folder.remove(document_file(session_id), *desk.directory.leftovers(session_id))
    folder.sync()
    for each in rewrites:
        folder.replace(log_file(each.stem), each.body)
    desk.forget_all()
    for session_id in sessions:
        session = desk.assembled(session_id)
        folder.replace(document_file(session_id), encode_document(session, desk.look(session_id).log))


Operations = Sequence[tuple[str, Sequence[Sequence[Line]]]]
"""The operations to append to logs, for each stem."""


def _append_and_erase(desk: Desk, appends: Operations, erased: Sequence[str], kept: Mapping[str, AgentSession]) -> None:
    """Append operations to logs and erase sessions, all or nothing.

    The documents are written before, and put in place afterwards.
    """
    folder, documents = desk.directory.folder, dict[str, None]()
    with ExitStack() as undo:
        # If an append fails, the documents that were written for it are removed.
        undo.callback(lambda: folder.discard(*map(temporary, documents)))
        with _together(desk, appends, erased):
            for stem, operations in appends:
                for lines in operations:
                    _append(desk, desk.look(stem).log, lines, kept.get(stem), documents)
            # After all appends: by then forks have noted what they show by the line of an erased session.
            for stem in erased:
                _erase(desk, stem)
        undo.pop_all()
    for document in documents:
        # The append is durable even if the document fails: the next write makes a new one.
        with suppress(OSError):
            folder.put_in_place(document)


@contextmanager
def _together(desk: Desk, appends: Operations, erased: Sequence[str]) -> Iterator[None]:
    """Make the block change all logs, or none. A change of a single log is atomic by itself."""
    if len(appends) < 2 and len(erased) < 2:
        yield
        return
    with ExitStack() as undo:
        for stem, _ in appends:
            undo.callback(desk.forget, stem)
        steps = [_step(desk, *each) for each in appends]
        steps += [Removal(stem, name) for stem in erased for name in _files_of(desk, stem)]
        with decided(desk.directory.folder, steps, desk.directory.lock_timeout):
            yield
        undo.pop_all()


def _step(desk: Desk, stem: str, operations: Iterable[Sequence[Line]]) -> Step:
    log, body = desk.look(stem).log, b""
    if log.torn:
        _set_aside(desk.directory, log)
    first = log.lines + 1
    for lines in operations:
        body += encode_operation(lines, first)
        first += len(lines)
    return Growth(owner_of(stem), log.file, log.end, body)


def _append(
    desk: Desk, log: SessionLog, lines: Sequence[Line], kept: AgentSession | None, documents: dict[str, None]
) -> None:
    """Append an operation. Renew the document if it makes a version, or if a killed writer has left the old one."""
    document = document_file(log.stem)

    def stage() -> None:
        desk.directory.folder.stage(document, encode_document(_newest(desk, log, kept), log))

    if any(each.kind == "head" for each in lines) or _is_behind(desk.directory, log):
        documents[document] = None
        _append_lines(desk, log, lines, stage)
    else:
        _append_lines(desk, log, lines, lambda: None)


def _kept_in(result: object) -> dict[str, AgentSession]:
    """Return the sessions that a job has saved."""
    found = result if isinstance(result, list) else [result]
    return {each.session.id: each.session for each in found if isinstance(each, CachedSession)}


def _newest(desk: Desk, log: SessionLog, kept: AgentSession | None) -> AgentSession:
    """Return the newest version as a load would give it."""
    try:
        return desk.assembled(log.stem)
    except CorruptRecord:
        # A session that this one shows a part of is damaged. The state in memory is saved anyway.
        if kept is None or not is_at_hand(kept):
            raise
        return kept


def _append_lines(desk: Desk, log: SessionLog, lines: Sequence[Line], prepare: Callable[[], None]) -> None:
    """Append an operation. Before the write, `prepare` sees the log as it is going to be."""
    if log.torn:
        _set_aside(desk.directory, log)
    end, body = log.end, log.encode(lines)
    with ExitStack() as undo:
        undo.callback(desk.forget, log.stem)
        # In memory first: the document is made from the log with this operation, and must not fail after the append.
        log.feed(body)
        desk.grown(log)
        prepare()
        desk.directory.folder.append(log.file, end, body)
        undo.pop_all()


def _is_behind(directory: Directory, log: SessionLog) -> bool:
    """Tell whether a killed writer did not put the document of the newest version in place."""
    try:
        header = directory.header(log.stem)
    except InvalidSessionFile:
        return False
    return header is None or header.info.version < log.version


def _set_aside(directory: Directory, log: SessionLog) -> None:
    """Move a torn tail out of the log into a file of its own, where it can be examined."""
    with directory.folder.reading(log.file) as handle:
        assert handle is not None
        tail = read_from(handle, log.end)
    # The copy is on the disk before the log is cut.
    directory.folder.write_new(_torn_file(directory, log), tail)
    directory.folder.sync()
    directory.folder.cut(log.file, log.end)
    log.torn = False


def _torn_file(directory: Directory, log: SessionLog) -> str:
    taken = set(directory.folder.names())
    names = (f"{log.stem}.torn-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
