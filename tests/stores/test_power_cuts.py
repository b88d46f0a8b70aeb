"""The power fails while sessions are written to a file or a directory: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import PowerCutContract
from perdure.testing.disk import is_available

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.skipif(not is_available(), reason="needs Linux and a C compiler")


@pytest.mark.sample(5)
class TestSqliteStore(PowerCutContract):
    """Sessions in one SQLite file."""

    name = "SQLite"
    shared = True

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")

    def put_older(self, where: Path) -> bool:
        shutil.copy(GOLDEN / "format-1-head-2-schema-4" / "sessions.sqlite", where / "sessions.db")
        return True

    def test_a_log_that_is_not_synced_loses(self) -> None:
        """The control: the same with `synchronous=NORMAL`, as SQLite alone would do it."""
        self.lose("plain", "the -wal file is not synced", lambda path, is_directory: path.endswith("-wal"))

    def test_a_new_store_whose_directories_are_not_synced_is_lost(self) -> None:
        """The control: the file was synced, but its name was not."""
        self.lose("creation", "directories are not synced", lambda path, is_directory: is_directory)


@pytest.mark.sample(5)
class TestFileStore(PowerCutContract):
    """Sessions in a directory."""

    name = "files"
    shared = True

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")

    def put_older(self, where: Path) -> bool:
        shutil.copytree(GOLDEN / "format-1-head-2-schema-4" / "files", where / "sessions")
        return True

    @pytest.mark.skipif(not os.environ.get("PERDURE_TORTURE"), reason="slow, and a directory has hardly a migration")
    def test_migration(self) -> None:
        """A directory of an older release is migrated."""
        super().test_migration()

    def test_a_directory_that_is_not_synced_loses(self) -> None:
        """The control: files are synced, and their names are not."""
        self.lose("plain", "directories are not synced", lambda path, is_directory: is_directory)
