"""Session records as files, one JSON document each: for those who record runs without a session store.

A document begins with a checksum of all that follows. Files of older releases begin with their format, and have none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import (
    InvalidData,
    InvalidSessionFile,
    InvalidSessionId,
    SessionNotFound,
    StoreError,
    UnreadableFile,
)
from perdure.model.ids import SessionId, new_id
from perdure.model.record import SessionRecord
from perdure.redaction.records import REPLACEMENT, RecordRedaction
from perdure.stores.folder import Folder, NotAFile
from perdure.stores.jobs.redaction import Request

_log = logging.getLogger("perdure.stores")

_ADVICE = "Restore it from a backup, save the session's record again, or remove it with delete_session()."
_CHECKSUM = "checksum"

_Where = str | os.PathLike[str]


class SessionRecordList(list[SessionRecord]):
    """Records that were loaded together. `damaged` has an error for each file that could not be read."""

    def __init__(
        self, records: Iterable[SessionRecord] = (), *, damaged: Iterable[InvalidSessionFile | UnreadableFile] = ()
    ) -> None:
        super().__init__(records)
        self.damaged = tuple(damaged)


def save_session(record: SessionRecord, directory: _Where) -> None:
    """Write `{directory}/{session_id}.json`: whole or not at all, and durable. StoreError if the disk refuses it."""
    body = msgspec.json.format(codec.encode(_with_checksum(codec.to_dict(record))), indent=2)
    name = _file(record.session_id)
    with _opened(directory) as folder, _writing(folder, name):
        staged = f"{name}.{new_id()}.tmp"  # its own, so that of two who write at once neither publishes half a file
        try:
            folder.write_new(staged, body + b"\n")
            os.rename(folder.path / staged, folder.path / name)
        finally:
            folder.discard(staged)
        folder.sync()


def load_session(session_id: str, directory: _Where) -> SessionRecord:
    """Return the record of a session. Raise SessionNotFound if there is none, InvalidSessionFile if it is damaged."""
    checked = SessionId(session_id)
    if not os.path.lexists(directory):
        raise SessionNotFound(checked)
    with _opened(directory) as folder:
        return _load(folder, checked)


def list_session_ids(directory: _Where) -> list[SessionId]:
    """Return the sessions that have a record, the one written last first."""
    if not os.path.lexists(directory):
        return []
    with _opened(directory) as folder:
        found = [(_written_at(folder, name), name) for name in folder.names() if _is_record(name)]
    return [SessionId(name.removesuffix(".json")) for at, name in sorted(found, reverse=True) if at]


def load_sessions_for_agent(agent_id: str, directory: _Where) -> SessionRecordList:
    """Return the records of an agent's sessions, the one written last first.

    A file that cannot be read stops none of the others. It is logged, and its error is in `damaged` of what is
    returned, whichever agent's it was.
    """
    records: list[SessionRecord] = []
    damaged: list[InvalidSessionFile | UnreadableFile] = []
    for session_id in list_session_ids(directory):
        try:
            records.append(load_session(session_id, directory))
        except (InvalidSessionFile, UnreadableFile) as error:
            _log.warning("a session record is left out: %s", error)
            damaged.append(error)
        except SessionNotFound:
            continue  # somebody has deleted it since it was listed
    return SessionRecordList((record for record in records if record.agent_id == agent_id), damaged=damaged)


def redact_session(session_id: str, directory: _Where, message_ids: Sequence[str]) -> bool:
    """Replace what messages say in a session's record, and return whether it has said it.

    Everything in the record that may tell of them is replaced too. Every summary is, also if the record holds none of
    the messages: a summary may cover a message that no loop has told. The file is written as by `save_session`. Raise
    SessionNotFound if there is none.
    """
    ids = Request.of(session_id, message_ids, REPLACEMENT).ids
    record = load_session(session_id, directory)
    loops = tuple(RecordRedaction().redact(record.loops, ids))
    if loops != record.loops:
        save_session(replace(record, loops=loops), directory)
    return loops != record.loops


def delete_session(session_id: str, directory: _Where) -> None:
    """Remove a session's record. Raise SessionNotFound if there is none."""
    name = _file(session_id)
    if not os.path.lexists(directory):
        raise SessionNotFound(session_id)
    with _opened(directory) as folder, _writing(folder, name):
        if folder.size(name) is None:
            raise SessionNotFound(session_id)
        folder.remove(name)
        folder.sync()


class FileRecordStore:
    """The same, one writer at a time: who comes while another writes a session's record gets SessionLocked."""

    def __init__(self, directory: _Where) -> None:
        self._directory = Path(directory)

    async def save(self, record: SessionRecord) -> None:
        await asyncio.to_thread(self._save, record)

    def _save(self, record: SessionRecord) -> None:
        with self._locked(record.session_id):
            save_session(record, self._directory)

    async def load(self, session_id: str) -> SessionRecord:
        return await asyncio.to_thread(load_session, session_id, self._directory)

    async def list_ids(self) -> list[SessionId]:
        return await asyncio.to_thread(list_session_ids, self._directory)

    async def redact(self, session_id: str, message_ids: Sequence[str]) -> bool:
        return await asyncio.to_thread(self._redact, session_id, message_ids)

    def _redact(self, session_id: str, message_ids: Sequence[str]) -> bool:
        self._require_directory(session_id)
        with self._locked(session_id):
            return redact_session(session_id, self._directory, message_ids)

    async def delete(self, session_id: str) -> None:
        await asyncio.to_thread(self._delete, session_id)

    def _delete(self, session_id: str) -> None:
        self._require_directory(session_id)
        with self._locked(session_id):
            delete_session(session_id, self._directory)

    def _require_directory(self, session_id: str) -> None:
        """Raise SessionNotFound if the directory is missing: a lock would make it."""
        checked = SessionId(session_id)
        if not os.path.lexists(self._directory):
            raise SessionNotFound(checked)

    @contextmanager
    def _locked(self, session_id: str) -> Iterator[None]:
        checked = SessionId(session_id)
        with _opened(self._directory) as folder, _writing(folder, _file(checked)), folder.locked([checked], 0.0):
            yield


@contextmanager
def _opened(directory: _Where) -> Iterator[Folder]:
    folder = Folder(Path(directory))
    try:
        yield folder
    finally:
        folder.close()


@contextmanager
def _writing(folder: Folder, name: str) -> Iterator[None]:
    """Raise StoreError where the disk refuses a change: it is full, read-only or broken."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder.path / name} could not be written ({error.strerror or error}), and is as it was. Make room on "
            "the disk, or name another directory, and save again."
        ) from None


def _file(session_id: str) -> str:
    return f"{SessionId(session_id)}.json"


def _is_record(name: str) -> bool:
    """Whether a file is one that `save_session` may have written; others may stand beside them."""
    try:
        return name == _file(name.removesuffix(".json"))
    except InvalidSessionId:
        return False


def _written_at(folder: Folder, name: str) -> int:
    """When a file was written last; 0 if it has been removed meanwhile."""
    try:
        return os.stat(folder.path / name, follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return 0


def _load(folder: Folder, session_id: SessionId) -> SessionRecord:
    path = folder.path / _file(session_id)
    try:
        body = folder.read(_file(session_id))
    except NotAFile as error:
        raise InvalidSessionFile(path, str(error.strerror), _ADVICE) from None
    except OSError as error:
        raise StoreError(f"{path} could not be read ({error.strerror}). Check its permissions and the disk.") from None
    if body is None:
        raise SessionNotFound(session_id)
    try:
        record = codec.from_dict(SessionRecord, _without_checksum(codec.decode_plain(body)))
    except InvalidData as error:
        raise InvalidSessionFile(path, str(error), _ADVICE) from None
    if record.session_id != session_id:
        raise InvalidSessionFile(path, f"it is the record of {record.session_id!r}", _ADVICE)
    return record


def _with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    return {_CHECKSUM: _checksum_of(document), **document}


def _without_checksum(document: Any) -> Any:
    """Return a document without its checksum, which is compared.

    Its first key tells whether there is one. An older release that rewrites a file keeps the checksum, as it keeps
    each field that it does not know, but behind the format; it may have changed the rest, so that says nothing.
    """
    if not isinstance(document, dict) or not document:
        return document
    first, (given, rest) = next(iter(document)), (document.pop(_CHECKSUM, None), document)
    if first == "format":
        return rest
    if first != _CHECKSUM or given != _checksum_of(rest):
        raise InvalidData(f"$.{_CHECKSUM}", "the checksum does not match what the file says")
    return rest


def _checksum_of(document: Mapping[str, Any]) -> str:
    """Return a checksum of what a document says, however it is laid out."""
    return f"crc32:{zlib.crc32(codec.encode(document)):08x}"
