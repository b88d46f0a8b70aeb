"""A process that was stopped while it was writing: others can read, and learn which process holds them up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.stores.files import ENVIRONMENT, needs_proc

from perdure.errors import SessionLocked
from perdure.stores.file import FileStore
from perdure.stores.lock_holder import Holder, holder_of
from perdure.stores.sqlite import SqliteStore, schema
from perdure.testing.samples import new_session, say

pytestmark = needs_proc
# The thread stops itself: a signal to the process may reach another thread first, and this one would continue a while.
STOP = "signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)"
WRITER = f"""
import asyncio, signal, sys, threading
from perdure.stores.sqlite import SqliteStore

def stop(db):
    db.execute("BEGIN IMMEDIATE")
    {STOP}
    db.execute("ROLLBACK")

async def main():
    async with SqliteStore(sys.argv[1]) as store:
        await store._engine.opened.writer.run(stop, alone=True)

asyncio.run(main())
"""
HOLDER = f"""
import signal, sys, threading
from pathlib import Path
from perdure.stores.folder import Folder

with Folder(Path(sys.argv[1])).locked(["s"], 5):
    {STOP}
"""
STRANGER = f"""
import signal, sys, threading
import apsw

db = apsw.Connection(sys.argv[1])
db.execute("BEGIN IMMEDIATE")
{STOP}
"""


@contextmanager
def stopped(script: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that stops itself in the middle of a write."""
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], env=ENVIRONMENT)
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.wait(30)


async def refused(save: Any, pid: int) -> SessionLocked:
    with pytest.raises(SessionLocked, match=f"kill -CONT {pid}") as caught:
        await save
    assert (caught.value.holder, caught.value.is_stopped) == (pid, True)
    return caught.value


async def test_a_sqlite_store_is_read_while_its_writer_is_stopped(tmp_path: Path) -> None:
    """It is opened, loaded and searched; a save is refused and names the process, until that resumes."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello", id="s"))
    with stopped(WRITER, path) as process:
        async with SqliteStore(path, lock_timeout=0.2) as store:
            assert await store.load("s") == session
            assert [info.id for info in await store.list()] == ["s"]
            await refused(store.save(say(session, "more")), process.pid)
            await refused(store.claim("s", version=1, owner="me"), process.pid)
            process.send_signal(signal.SIGCONT)
            process.wait(30)
            assert (await store.save(say(session, "more"))).version == 2


async def test_a_session_is_locked_by_a_stopped_process_and_others_are_not(tmp_path: Path) -> None:
    """In a directory, only the session that it was writing waits for it."""
    async with FileStore(tmp_path) as store:
        session, other = [await store.create(new_session("Hello", id=name)) for name in ("s", "t")]
    with stopped(HOLDER, tmp_path) as process:
        async with FileStore(tmp_path, lock_timeout=0.2) as store:
            assert await store.load("s") == session
            assert (await store.save(say(other, "more"))).version == 2
            error = await refused(store.save(say(session, "more")), process.pid)
            assert error.session_id == "s"


async def test_somebody_who_uses_the_file_without_us_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a transaction has SQLite's lock and not perdure's: SessionLocked names its process."""
    monkeypatch.setattr(schema, "BUSY_MS", 100)
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello", id="s"))
        with stopped(STRANGER, path) as process:
            await refused(store.save(say(session, "more")), process.pid)


async def test_a_store_that_nobody_else_has_open_is_not_opened_without_its_lock(tmp_path: Path) -> None:
    """The first store to open the file reads its log, and needs the lock for that."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("Hello", id="s"))
    lock = (
        f"import os, signal, sys, fcntl, threading; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); {STOP}"
    )
    with stopped(lock, schema.lock_path(path)) as process:
        await refused(SqliteStore(path, lock_timeout=0.1).__aenter__(), process.pid)


def test_who_holds_a_lock(tmp_path: Path) -> None:
    """A running process is distinguished from a stopped one, and without a holder nobody is named."""
    path = tmp_path / "lock"
    path.touch()
    assert holder_of(path) is None
    assert holder_of(tmp_path / "missing") is None
    script = "import os, sys, fcntl; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); print(); input()"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=-1, stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    found = holder_of(path)
    process.communicate(b"\n", timeout=30)
    assert found is not None
    assert found == Holder(process.pid, found.command, is_stopped=False)
    assert holder_of(path) is None
