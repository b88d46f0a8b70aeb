"""Session records as files, one JSON document each: for those who record runs without a session store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from perdure import codec
from perdure.errors import InvalidData, InvalidSessionFile, InvalidSessionId, SessionNotFound
from perdure.model.ids import SessionId, new_id
from perdure.model.record import SessionRecord
from perdure.stores.file_folder import Folder, NotAFile

_Where = str | os.PathLike[str]


def save_session(record: SessionRecord, directory: _Where) -> None:
    """Write `{directory}/{session_id}.json`: whole or not at all, and durable."""
    body = msgspec.json.format(codec.encode(codec.to_dict(record)), indent=2)
    name = _file(record.session_id)
    with _opened(directory) as folder:
        staged = f"{name}.{new_id()}.tmp"  # its own, so that of two who write at once neither publishes half a file
        try:
            folder.write_new(staged, body + b"\n")
            os.rename(folder.path / staged, folder.path / name)
        finally:
            folder.remove(staged)
        folder.sync()


def load_session(session_id: str, directory: _Where) -> SessionRecord:
    """The record of a session; SessionNotFound, or InvalidSessionFile, if there is none that can be read."""
    with _opened(directory) as folder:
        return _load(folder, SessionId(session_id))


def list_session_ids(directory: _Where) -> list[SessionId]:
    """The sessions that have a record, the one written last first."""
    with _opened(directory) as folder:
        found = [(_written_at(folder, name), name) for name in folder.names() if _is_record(name)]
    return [SessionId(name.removesuffix(".json")) for at, name in sorted(found, reverse=True) if at]


def load_sessions_for_agent(agent_id: str, directory: _Where) -> list[SessionRecord]:
    """The records of an agent's sessions, the one written last first."""
    records = [load_session(session_id, directory) for session_id in list_session_ids(directory)]
    return [record for record in records if record.agent_id == agent_id]


def delete_session(session_id: str, directory: _Where) -> None:
    """Remove a session's record; SessionNotFound if there is none."""
    with _opened(directory) as folder:
        if folder.size(_file(session_id)) is None:
            raise SessionNotFound(session_id)
        folder.remove(_file(session_id))
        folder.sync()


class FileRecordStore:
    """The same, one writer at a time: who comes while another writes a session's record gets SessionLocked."""

    def __init__(self, directory: _Where) -> None:
        self._directory = Path(directory)

    async def save(self, record: SessionRecord) -> None:
        await asyncio.to_thread(self._save, record)

    def _save(self, record: SessionRecord) -> None:
        with _opened(self._directory) as folder, folder.locked([SessionId(record.session_id)], 0.0):
            save_session(record, self._directory)

    async def load(self, session_id: str) -> SessionRecord:
        return await asyncio.to_thread(load_session, session_id, self._directory)

    async def list_ids(self) -> list[SessionId]:
        return await asyncio.to_thread(list_session_ids, self._directory)

    async def delete(self, session_id: str) -> None:
        await asyncio.to_thread(self._delete, session_id)

    def _delete(self, session_id: str) -> None:
        with _opened(self._directory) as folder, folder.locked([SessionId(session_id)], 0.0):
            delete_session(session_id, self._directory)


@contextmanager
def _opened(directory: _Where) -> Iterator[Folder]:
    folder = Folder(Path(directory))
    try:
        yield folder
    finally:
        folder.close()


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
    try:
        body = folder.read(_file(session_id))
    except NotAFile as error:
        raise InvalidSessionFile(folder.path / _file(session_id), str(error.strerror)) from None
    if body is None:
        raise SessionNotFound(session_id)
    try:
        record = codec.from_dict(SessionRecord, codec.decode_plain(body))
    except InvalidData as error:
        raise InvalidSessionFile(folder.path / _file(session_id), str(error)) from None
    if record.session_id != session_id:
        raise InvalidSessionFile(folder.path / _file(session_id), f"it is the record of {record.session_id!r}")
    return record
