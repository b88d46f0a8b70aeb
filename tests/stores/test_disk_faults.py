"""Stores on a disk that is full, fails or is read-only, and in a process without file handles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from perdure.stores import folder
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import DiskFaultContract
from perdure.testing.disk import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="needs Linux and a C compiler")


class TestSqliteStore(DiskFaultContract):
    """Sessions in one SQLite file."""

    name = "SQLite"

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")


class TestFileStore(DiskFaultContract):
    """Sessions in a directory."""

    name = "files"

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")

    def controls(self) -> Mapping[str, tuple[str, type[DiskFaultContract]]]:
        return {
            "disk full": ("short writes are believed", BelievesShortWrites),
            "EIO at write": ("errors of write are ignored", IgnoresWrites),
            "fsync fails": ("errors of fsync are ignored", IgnoresSyncs),
        }


class BelievesShortWrites(DiskFaultContract):
    """The control: what a write returns is not looked at."""

    __test__ = False
    rounds = 40

    def open_store(self, where: Path) -> FileStore:
        folder._write_all = os.write  # type: ignore[assignment]  # in a process that ends with the rounds
        return FileStore(where / "sessions")


class IgnoresWrites(DiskFaultContract):
    """The control: a write that fails is taken for one that did not."""

    __test__ = False
    rounds = 40

    def open_store(self, where: Path) -> FileStore:
        def write(handle: int, body: bytes) -> None:
            with suppress(OSError):
                os.write(handle, body)

        folder._write_all = write
        return FileStore(where / "sessions")


class IgnoresSyncs(DiskFaultContract):
    """The control: a sync that fails is taken for one that did not."""

    __test__ = False
    rounds = 40

    def open_store(self, where: Path) -> FileStore:
        def sync(_: folder.Folder, handle: int) -> None:
            with suppress(OSError):
                os.fsync(handle)

        folder.Folder._sync = sync  # type: ignore[method-assign]  # in a process that ends with the rounds
        return FileStore(where / "sessions")
