"""Stores on a disk that is full, fails or is read-only, and in a process without file handles."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from perdure.errors import CorruptRecord, StoreError, UnreadableFile
from perdure.stores import folder
from perdure.stores.file import FileStore, directory
from perdure.stores.sqlite import SqliteStore, engine, schema, worker
from perdure.testing import DiskFaultContract
from perdure.testing.disk import is_available
from perdure.testing.samples import new_session, say

ROUNDS = 50 if os.environ.get("PERDURE_TORTURE") else 6
"""The number of rounds of a control."""
ON_A_LYING_DISK = "what fails is reported as done"
pytestmark = pytest.mark.skipif(not is_available(), reason="needs Linux and a C compiler")


@pytest.mark.sample(4)
class TestSqliteStore(DiskFaultContract):
    """Sessions in one SQLite file."""

    name = "SQLite"
    synced = (
        "*/sessions.db*"  # the directory is synced by us when it is opened, and then by SQLite, which does not look
    )

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")

    def controls(self) -> Mapping[str, tuple[str, type[DiskFaultContract]]]:
        return {
            "disk full": (ON_A_LYING_DISK, SqliteOnALyingDisk),
            "no space at write, sync or rename": (ON_A_LYING_DISK, SqliteOnALyingDisk),
            "EIO at write": (ON_A_LYING_DISK, SqliteOnALyingDisk),
            "EIO at read": ("errors of SQLite are passed on", PassesErrorsOn),
            "fsync fails": (ON_A_LYING_DISK, SqliteOnALyingDisk),
            "no file handles": ("errors of SQLite are passed on", PassesErrorsOn),
            "read-only": (ON_A_LYING_DISK, SqliteOnALyingDisk),
        }


@pytest.mark.sample(4)
class TestFileStore(DiskFaultContract):
    """Sessions in a directory."""

    name = "files"

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")

    def controls(self) -> Mapping[str, tuple[str, type[DiskFaultContract]]]:
        return {
            "disk full": (ON_A_LYING_DISK, FilesOnALyingDisk),
            "no space at write, sync or rename": ("short writes are believed", BelievesShortWrites),
            "EIO at write": ("errors of write are ignored", IgnoresWrites),
            "EIO at read": ("a read that failed is taken for lasting damage", TakesUnreadForDamage),
            "fsync fails": ("errors of fsync are ignored", IgnoresSyncs),
            "no file handles": ("errors of the system are passed on", PassesSystemErrorsOn),
            "read-only": ("errors of the system are passed on", PassesSystemErrorsOn),
        }


class SqliteOnALyingDisk(TestSqliteStore):
    """The control: no store can withstand a disk that reports success for what failed."""

    __test__ = False
    lies = True
    rounds = ROUNDS


class FilesOnALyingDisk(TestFileStore):
    """The control: no store can withstand a disk that reports success for what failed."""

    __test__ = False
    lies = True
    rounds = ROUNDS


# What those below take away is taken from a process that ends with the rounds.


class PassesErrorsOn(TestSqliteStore):
    """The control: errors of SQLite and the system are not turned into StoreError."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> SqliteStore:
        engine.as_store_error = worker.as_store_error = lambda error: error
        schema._sync_for_good = schema.sync_directory
        return super().open_store(where)


class BelievesShortWrites(TestFileStore):
    """The control: the return value of a write is ignored."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        folder._write_all = os.write
        return super().open_store(where)


class IgnoresWrites(TestFileStore):
    """The control: a failed write counts as done."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        def write(handle: int, body: bytes) -> None:
            with suppress(OSError):
                os.write(handle, body)

        folder._write_all = write
        return super().open_store(where)


_reading = folder.Folder.reading


class TakesUnreadForDamage(TestFileStore):
    """The control: a file that could not be read is reported as damaged."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        @contextmanager
        def reading(self: folder.Folder, name: str) -> Iterator[int | None]:
            try:
                with _reading(self, name) as handle:
                    yield handle
            except UnreadableFile as error:
                self.broken = CorruptRecord(None, name, str(error))
                raise self.broken from None

        folder.Folder.reading = reading
        return super().open_store(where)


class IgnoresSyncs(TestFileStore):
    """The control: a failed sync counts as done."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        def sync(_: folder.Folder, handle: int) -> None:
            with suppress(OSError):
                os.fsync(handle)

        folder.Folder._sync = sync
        return super().open_store(where)


class PassesSystemErrorsOn(TestFileStore):
    """The control: errors of the system are not turned into StoreError."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        directory.store_error = lambda error, path: error
        return super().open_store(where)


async def test_a_directory_whose_sync_failed_is_not_believed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of SQLite's log may be lost: the store refuses to write until it is opened again."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello."))

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(schema, "sync_directory", fail)
        async with SqliteStore(path) as store:
            with pytest.raises(StoreError, match="refuses more"):
                await store.save(say(session, "lost?"))
            disk.undo()
            with pytest.raises(StoreError, match="refuses more"):
                await store.save(say(session, "lost?"))
            assert await store.load(session.id) == session
    async with SqliteStore(path) as store:
        assert (await store.save(say(session, "kept"))).version == 2
