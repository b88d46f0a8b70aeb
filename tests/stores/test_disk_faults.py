"""Stores on a disk that is full, fails or is read-only, and in a process without file handles."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from perdure.errors import StoreError
from perdure.stores import folder
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore, schema
from perdure.testing import DiskFaultContract
from perdure.testing.disk import is_available
from perdure.testing.samples import new_session, say

ROUNDS = 50 if os.environ.get("PERDURE_TORTURE") else 12
"""How often a control is played."""
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


@pytest.mark.sample(4)
class TestFileStore(DiskFaultContract):
    """Sessions in a directory."""

    name = "files"

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")

    def controls(self) -> Mapping[str, tuple[str, type[DiskFaultContract]]]:
        return {
            "no space at write, sync or rename": ("short writes are believed", BelievesShortWrites),
            "EIO at write": ("errors of write are ignored", IgnoresWrites),
            "fsync fails": ("errors of fsync are ignored", IgnoresSyncs),
        }


class BelievesShortWrites(DiskFaultContract):
    """The control: what a write returns is not looked at."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        folder._write_all = os.write  # type: ignore[assignment]  # in a process that ends with the rounds
        return FileStore(where / "sessions")


class IgnoresWrites(DiskFaultContract):
    """The control: a write that fails is taken for one that did not."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        def write(handle: int, body: bytes) -> None:
            with suppress(OSError):
                os.write(handle, body)

        folder._write_all = write
        return FileStore(where / "sessions")


class IgnoresSyncs(DiskFaultContract):
    """The control: a sync that fails is taken for one that did not."""

    __test__ = False
    rounds = ROUNDS

    def open_store(self, where: Path) -> FileStore:
        def sync(_: folder.Folder, handle: int) -> None:
            with suppress(OSError):
                os.fsync(handle)

        folder.Folder._sync = sync  # type: ignore[method-assign]  # in a process that ends with the rounds
        return FileStore(where / "sessions")


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
