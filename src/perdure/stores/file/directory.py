"""A directory of sessions: the files of each session, their content now, and the locks for writing them.

Writers hold the lock of the session. Readers hold none: they see the operations that are complete, and look again
under the lock before they call anything damaged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from perdure import codec
from perdure.errors import (
    CorruptRecord,
    InvalidData,
    InvalidSessionFile,
    RestoreUnfinished,
    StoreError,
    UnreadableFile,
)
from perdure.stores.engine import unfinished
from perdure.stores.file import group
from perdure.stores.file.blobs import Blobs
from perdure.stores.file.document import HEADER_LINES, Header, check_document, document_file, read_header
from perdure.stores.file.log import SessionLog, log_file
from perdure.stores.folder import Folder, NotAFile, Turn, first_lines, lock_file, read_from
from perdure.stores.format.rows import checksum

T = TypeVar("T")

IDENTITY = ".perdure"
_SESSION = re.compile(r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,199})\.jsonl?")
_REMAINDER = re.compile(r"(?P<base>[^@/]+@[0-9]+)\.jsonl")
_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}(@[0-9]{1,20})?")


class Directory:
    """An open directory, for the use of one thread."""

    def __init__(self, path: Path, lock_timeout: float) -> None:
        is_unfinished = False
        with suppress(OSError):  # `Folder` reports a path that cannot be looked at
            is_unfinished = unfinished(path).exists()
        if is_unfinished:
            raise RestoreUnfinished(path, unfinished(path))
        self.folder = Folder(path)
        self.blobs = Blobs(path)
        self.lock_timeout = lock_timeout
        self.changing: frozenset[str] = frozenset()
        """The sessions that another process was changing together when this job began."""
        self.unclaimed: dict[str, tuple[int, int, int]] = {}
        """The stamps of logs without a claim. A log that still has the same stamp need not be read for one."""
        with ExitStack() as undo:
            undo.callback(self.folder.close)
            try:
                self.origin = _identity(self.folder, lock_timeout)
            except OSError as error:
                raise store_error(error, path) from None
            undo.pop_all()

    def close(self) -> None:
        self.blobs.close()
        self.folder.close()

    def run(self, job: Callable[[Directory], T], turn: Turn | None = None) -> T:
        """Run a job here. An error of the system becomes a StoreError that says what it means."""
        if self.folder.broken is not None:
            raise self.folder.broken
        try:
            self.folder.require_in_place()
            with self.folder.taking(turn):
                self.settle()
                return job(self)
        except OSError as error:
            raise store_error(error, self.folder.path) from None

    def settle(self) -> None:
        """Finish a group of changes whose writer was killed. If its writer is alive, note the group's sessions."""
        self.changing = group.members(self.folder)
        # A live writer holds this lock for as long as the file exists.
        if self.changing and self.folder.is_free(group.GROUP):
            with self.locked(self.changing):
                group.finish(self.folder, self.lock_timeout)
            self.changing = frozenset()

    def ids(self) -> list[str]:
        """Return the ids with a file that may be a session's."""
        found = map(_SESSION.fullmatch, self.folder.names())
        return sorted({match["id"] for match in found if match})

    def remainders(self) -> set[str]:
        """Return the keys of deleted sessions' logs of which others still show something."""
        found = map(_REMAINDER.fullmatch, self.folder.names())
        return {match["base"] for match in found if match}

    def erasures(self) -> int:
        """Return the count of erasures here: the size of a file that grows by one byte each time."""
        return self.folder.size(ERASURES) or 0

    def note_erasure(self) -> None:
        with self.folder.locked([ERASURES], self.lock_timeout):
            self.folder.append(ERASURES, self.erasures(), b".")

    def exists(self, session_id: str) -> bool:
        """Tell whether there is a session, sound or damaged."""
        return self.folder.size(document_file(session_id)) is not None or self.has(self.log(session_id))

    def has(self, log: SessionLog) -> bool:
        """Tell whether a log belongs to a session, sound or damaged."""
        return log.version > 0 or bool(log.damage) or self.folder.size(document_file(log.stem)) is not None

    def leftovers(self, session_id: str) -> list[str]:
        """Return the names of files that killed writers of a session may have left, and of torn tails."""
        left = re.compile(rf"{re.escape(session_id)}(\.torn-[0-9]+|\.jsonl?\.tmp|@[0-9]+\.jsonl\.tmp|\.sketch(\.tmp)?)")
        return [name for name in self.folder.names() if left.fullmatch(name)]

    def sound(self, log: SessionLog) -> SessionLog | None:
        """Return a session's log; None if the session does not exist. Raise CorruptRecord if it is damaged."""
        if log.damage:
            raise log.damage[0]
        if log.version > 0:
            return log
        if self.folder.size(document_file(log.stem)) is not None:
            raise CorruptRecord(log.stem, log.file, "the session's log is missing, though its document is there")
        return None

    def log(self, stem: str, known: SessionLog | None = None) -> SessionLog:
        """Return a log as it is now, with its damage; an empty one if it has no file. `known` may be its beginning."""
        try:
            with self.folder.reading(log_file(stem)) as handle:
                if handle is None:
                    return SessionLog(stem)
                log = known if known is not None and known.is_beginning_of(handle) else SessionLog(stem)
                log.feed(read_from(handle, log.end))
        except NotAFile as error:
            raise CorruptRecord(stem, log_file(stem), str(error.strerror)) from None
        if log.torn and not log.damage and owner_of(stem) == stem:
            self._require_torn(log)
        return log

    def _require_torn(self, log: SessionLog) -> None:
        """Note damage if what seems torn was whole once, since a document was made from it."""
        with suppress(InvalidSessionFile, UnreadableFile):  # a load or a check reports these
            header = self.header(log.stem)
            if header is not None and header.key == log.key and header.end > log.end:
                log.damage.append(cut_short(log, header))

    def since(self, session_id: str, header: Header) -> SessionLog:
        """Return the part of a log that is newer than its document. Nothing before that is read."""
        log = SessionLog.from_middle(session_id, header.key, header.end, header.lines)
        try:
            with self.folder.reading(log.file) as handle:
                if handle is None or os.fstat(handle).st_size < header.end:
                    raise cut_short(log, header)
                log.feed(read_from(handle, header.end))
        except NotAFile as error:
            raise CorruptRecord(session_id, log.file, str(error.strerror)) from None
        if log.damage:
            raise log.damage[0]
        return log

    def document(self, session_id: str) -> Header | None:
        """Return the header of a session's document, after a check of the whole document. None if it has none."""
        return self._header(session_id, lambda handle, path: check_document(read_from(handle, 0), path))

    def header(self, session_id: str) -> Header | None:
        """Return the same header from the first lines alone."""
        return self._header(session_id, lambda handle, path: read_header(first_lines(handle, HEADER_LINES), path))

    def _header(self, session_id: str, read: Callable[[int, Path], Header]) -> Header | None:
        path = self.path_of(session_id)
        try:
            with self.folder.reading(document_file(session_id)) as handle:
                header = None if handle is None else read(handle, path)
        except NotAFile as error:
            raise InvalidSessionFile(path, str(error.strerror)) from None
        if header is not None and header.info.id != session_id:
            raise InvalidSessionFile(path, f"it is the document of session {header.info.id!r}")
        return header

    def path_of(self, session_id: str) -> Path:
        return self.folder.path / document_file(session_id)

    @contextmanager
    def locked(self, ids: Iterable[str]) -> Iterator[None]:
        """Hold the locks of sessions. The lock file of a session that does not exist is removed by its last holder."""
        held = set(ids)
        with self.folder.locked(held, self.lock_timeout):
            try:
                yield
            finally:
                for session_id in held:
                    files = (log_file(session_id), document_file(session_id))
                    if all(self.folder.size(name) is None for name in files):
                        self.folder.discard(lock_file(session_id))


def is_stem(name: str) -> bool:
    """Tell whether a log's file may have this name, without its ending. Such a name never leaves the directory."""
    return _STEM.fullmatch(name) is not None


def owner_of(stem: str) -> str:
    """Return the session whose lock protects a log."""
    return stem.partition("@")[0]


def store_error(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"The file store failed at {path / str(error.filename or '')}: {error.strerror}. "
        "Nothing of this was kept; repeat it when that is fixed."
    )


def cut_short(log: SessionLog, header: Header) -> CorruptRecord:
    missing = f"{log.file} does not hold all that the session file was made from"
    return CorruptRecord(log.stem, f"head {header.info.version}", missing)


ERASURES = ".erasures"
"""The file with one byte for each erasure."""


def _identity(folder: Folder, timeout: float) -> str:
    """Return the store's own id. The first process that opens the directory makes it."""
    raw = folder.read(IDENTITY)
    if raw is None:
        with folder.locked([IDENTITY], timeout):
            if folder.size(IDENTITY) is None:  # another process may have made it meanwhile
                folder.replace(IDENTITY, _encode_identity(os.urandom(16).hex()))
            raw = folder.read(IDENTITY)
    uid = _uid_in(raw or b"")
    if uid is None:
        raise StoreError(
            f"{folder.path / IDENTITY} is damaged. Restore it, or remove it: the sessions beside it stay as they are, "
            "and the store gets a new identity."
        )
    return uid


def _uid_in(raw: bytes) -> str | None:
    try:
        plain: Any = codec.decode_plain(raw)
        uid = plain["uid"]
        return uid if _encode_identity(uid) == raw else None
    except (InvalidData, KeyError, TypeError, AttributeError):
        return None


def _encode_identity(uid: str) -> bytes:
    return b'{"format":%d,"uid":"%b","crc":"%08x"}\n' % (codec.FORMAT, uid.encode(), checksum(uid.encode()))
