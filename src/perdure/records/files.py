"""Session records as files of JSON, for programs that record runs without a session store.

A document begins with a checksum of all that follows. A file of an older release begins with its format, and has none.
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
    """A list of `records` that were loaded together. `damaged` has an error for each file that could not be read."""

    def __init__(
        self, records: Iterable[SessionRecord] = (), *, damaged: Iterable[InvalidSessionFile | UnreadableFile] = ()
    ) -> None:
        super().__init__(records)
        self.damaged = tuple(damaged)


def save_session(record: SessionRecord, directory: _Where) -> None:
    """Write a `record` to `{directory}/{session_id}.json`, as a whole and durably.

    Raise StoreError if the disk refuses it.
    """
    body = msgspec.json.format(codec.encode(_with_checksum(codec.to_dict(record))), indent=2)
    name = _file(record.session_id)
    with _opened(directory) as folder, _writing(folder, name):
        staged = f"{name}.{new_id()}.tmp"  # a name of its own: another writer must not publish half of this file
        try:
            folder.write_new(staged, body + b"\n")
            os.rename(folder.path / staged, folder.path / name)
        finally:
            folder.discard(staged)
        folder.sync()  # the directory: without it, a power cut could undo the rename


def load_session(session_id: str, directory: _Where) -> SessionRecord:
    """Return the record of a session. Raise SessionNotFound if there is none, InvalidSessionFile if it is damaged.

    `session_id` names the session, and `directory` has the records.
    """
    checked = SessionId(session_id)
    if not os.path.lexists(directory):
        raise SessionNotFound(checked)
    with _opened(directory) as folder:
        return _load(folder, checked)


def list_session_ids(directory: _Where) -> list[SessionId]:
    """Return the ids of sessions that have a record in a `directory`, the one written last first."""
    if not os.path.lexists(directory):
        return []
    with _opened(directory) as folder:
        found = [(_written_at(folder, name), name) for name in folder.names() if _is_record(name)]
    return [SessionId(name.removesuffix(".json")) for at, name in sorted(found, reverse=True) if at]


def load_sessions_for_agent(agent_id: str, directory: _Where) -> SessionRecordList:
    """Return the records of the sessions of an agent, `agent_id`, in a `directory`, the one written last first.

    A file that cannot be read does not stop the others. It is logged, and its error is in the list's `damaged`,
    whichever agent the session belongs to.
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
            continue  # it was deleted since it was listed
    return SessionRecordList((record for record in records if record.agent_id == agent_id), damaged=damaged)


def redact_session(session_id: str, directory: _Where, message_ids: Sequence[str]) -> bool:
    """Replace the content of messages in a session's record. Return True if the record had any of it.

    `session_id` names the session, `directory` has the records, and `message_ids` are the messages. Everything else in
    the record that may quote the messages is replaced too. Every summary is replaced, even if the record has none of
    the messages: it may cover a message that no loop has told. The file is written as by `save_session`. Raise
    SessionNotFound if the session has no record.
    """
    ids = Request.of(session_id, message_ids, REPLACEMENT).ids
    record = load_session(session_id, directory)
    loops = tuple(RecordRedaction().redact(record.loops, ids))
    if loops != record.loops:
        save_session(replace(record, loops=loops), directory)
    return loops != record.loops


def delete_session(session_id: str, directory: _Where) -> None:
    """Remove a session's record. Raise SessionNotFound if there is none.

    `session_id` names the session, and `directory` has the records.
    """
    name = _file(session_id)
    if not os.path.lexists(directory):
        raise SessionNotFound(session_id)
    with _opened(directory) as folder, _writing(folder, name):
        if folder.size(name) is None:
            raise SessionNotFound(session_id)
        folder.remove(name)
        folder.sync()


class FileRecordStore:
    """A `directory` of session records with one writer at a time.

    Its methods do the same as the functions of this module. If another writer has a session's record, they raise
    SessionLocked.
    """

    def __init__(self, directory: _Where) -> None:
        self._directory = Path(directory)

    async def save(self, record: SessionRecord) -> None:
        """Write a `record`, as `save_session` does."""
        await asyncio.to_thread(self._save, record)

    def _save(self, record: SessionRecord) -> None:
        with self._locked(record.session_id):
            save_session(record, self._directory)

    async def load(self, session_id: str) -> SessionRecord:
        """Return the record of the session `session_id`, as `load_session` does."""
        return await asyncio.to_thread(load_session, session_id, self._directory)

    async def list_ids(self) -> list[SessionId]:
        """Return the ids of sessions that have a record, as `list_session_ids` does."""
        return await asyncio.to_thread(list_session_ids, self._directory)

    async def redact(self, session_id: str, message_ids: Sequence[str]) -> bool:
        """Replace what the messages `message_ids` of the session `session_id` say, as `redact_session` does."""
        return await asyncio.to_thread(self._redact, session_id, message_ids)

    def _redact(self, session_id: str, message_ids: Sequence[str]) -> bool:
        self._require_directory(session_id)
        with self._locked(session_id):
            return redact_session(session_id, self._directory, message_ids)

    async def delete(self, session_id: str) -> None:
        """Remove the record of the session `session_id`, as `delete_session` does."""
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
    """Raise StoreError if the disk refuses a change: it is full, read-only or broken."""
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
    """Tell whether `save_session` may have written a file of this name. Other files may be in the directory too."""
    try:
        return name == _file(name.removesuffix(".json"))
    except InvalidSessionId:
        return False


def _written_at(folder: Folder, name: str) -> int:
    """Return the time at which a file was last written. Return 0 if it was removed meanwhile."""
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
    """Return a document without its checksum. Raise InvalidData if the checksum does not match."""
    if not isinstance(document, dict) or not document:
        return document
    # The first key tells whether the checksum counts. An older release that rewrites a file keeps the checksum, as it
    # keeps every unknown field, but after the format. It may have changed the rest, so such a checksum is ignored.
    first, (given, rest) = next(iter(document)), (document.pop(_CHECKSUM, None), document)
    if first == "format":
        return rest
    if first != _CHECKSUM or given != _checksum_of(rest):
        raise InvalidData(f"$.{_CHECKSUM}", "the checksum does not match what the file says")
    return rest


def _checksum_of(document: Mapping[str, Any]) -> str:
    """Return a checksum of a document's content, which does not depend on its layout."""
    return f"crc32:{zlib.crc32(codec.encode(document)):08x}"
