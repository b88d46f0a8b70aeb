"""The lock between processes: waiting has a time-out and is fair, and no process keeps the lock without using it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import SessionLocked
from perdure.stores.file import FileStore
from perdure.stores.file_lock import FileLock
from perdure.stores.folder import lock_file
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, say

HOLD = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
FORK = """
import os, signal, sys
from pathlib import Path
from perdure.stores.file import FileStore
from perdure.stores.file_lock import FileLock
from perdure.stores.folder import lock_file

with FileLock(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        sys.stdout.write("forked\\n")
        sys.stdout.flush()
        signal.pause()
    sys.stdout.write(f"{child}\\n")  # in one piece, since both write
    sys.stdout.flush()
    signal.pause()
"""
FORK_OF_FILES = FORK.replace("file_lock import FileLock", "folder import Folder").replace(
    "with FileLock(Path(sys.argv[1])):", "with Folder(Path(sys.argv[1])).locked(['s'], 5):"
)


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock until it is told to release it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.communicate(timeout=30)


def test_a_lock_that_is_not_let_go_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """After the time-out SessionLocked says which file and how long. Once the lock is free, it can be taken."""
    lock = FileLock(tmp_path / "lock", 0.05)
    with held(tmp_path / "lock"):
        for _ in range(3):
            with pytest.raises(SessionLocked, match=r"0\.05 s .*lock\)"), lock:
                pass
        assert sum(thread.name == "perdure lock lock" for thread in threading.enumerate()) == 1
    with FileLock(tmp_path / "lock", 30), FileLock(tmp_path / "other"):
        assert not lock.try_once()
    lock = FileLock(tmp_path / "lock", 30)
    with lock:
        assert not FileLock(tmp_path / "lock").try_once()
    assert FileLock(tmp_path / "lock").try_once()


def test_a_lock_that_comes_in_time_is_had(tmp_path: Path) -> None:
    """A waiting process gets the lock when it is released, even if an earlier attempt timed out."""
    lock = FileLock(tmp_path / "lock", 0.01)
    with held(tmp_path / "lock") as other:
        with pytest.raises(SessionLocked), lock:
            pass
        lock._timeout = 30
        threading.Timer(0.05, other.kill).start()
        with lock:
            assert not FileLock(tmp_path / "lock").try_once()
        assert FileLock(tmp_path / "lock").try_once()


@contextmanager
def orphan(script: str, path: Path) -> Iterator[None]:
    """Fork a child of a process that holds the lock, and kill the process; the child lives."""
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (child,) = (int(line) for line in lines - {"forked"})
    try:
        process.kill()
        process.wait()
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The child of a process that was killed while it held the lock does not block others."""
    with orphan(FORK, tmp_path / "lock"), FileLock(tmp_path / "lock", 5):
        pass


async def test_a_forked_child_does_not_keep_a_sessions_lock(tmp_path: Path) -> None:
    """The same holds for the lock of one session in a directory."""
    with orphan(FORK_OF_FILES, tmp_path):
        async with FileStore(tmp_path, lock_timeout=1) as store:
            await store.create(new_session("Hello", id="s"))


async def test_a_writer_that_was_stopped_stops_nobody_for_ever(tmp_path: Path) -> None:
    """Saves, erasures, opening and closing end with SessionLocked while another process holds the lock."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path, lock_timeout=0.1) as store:
        session = await store.create(new_session("Hello"))
        await store.claim((await store.create(new_session("Run", id="run"))).id, version=1, owner="ann")
        with held(tmp_path / "sessions.db-lock"):
            for verb in (store.save(say(session, "more")), store.delete(session.id), store.gc()):
                with pytest.raises(SessionLocked, match="The store stayed locked"):
                    await verb
            assert await store.load(session.id) == session
            with pytest.raises(SessionLocked):
                await SqliteStore(path, lock_timeout=0.1).__aenter__()
        assert (await store.save(say(session, "more"))).version == 2
        closing = SqliteStore(path, lock_timeout=0.1)
        await closing.__aenter__()
        await closing.claim(session.id, version=2, owner="ben")
        with held(tmp_path / "sessions.db-lock"):
            before = time.monotonic()
            await closing.__aexit__()
            assert time.monotonic() < before + 5


async def test_a_forked_child_leaves_the_store_at_once(tmp_path: Path) -> None:
    """Closing in a child of os.fork() ends nothing of the parent's, and does not wait for threads it does not have."""
    store = SqliteStore(tmp_path / "sessions.db")
    async with store:
        session = await store.create(new_session("Hello"))
        opened = store._engine.opened
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                opened.close().send(None)
            except StopIteration:
                os._exit(0)
            os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert (await store.save(say(session, "more"))).version == 2


def test_the_lock_is_flock(tmp_path: Path) -> None:
    """An unrelated close of the file would drop another kind of lock."""
    with FileLock(tmp_path / "lock"):
        os.close(os.open(tmp_path / "lock", os.O_RDWR))
        handle = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)


class _Late(queue.SimpleQueue[Any]):
    """A queue on a busy machine: CPython 3.11 waits for ever in `get` if a time-out is over before the wait begins."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block)


async def test_a_job_that_waits_for_a_lock_is_tried_again_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SimpleQueue", _Late)
    async with FileStore(tmp_path) as store:
        session = await store.create(new_session("one"))
        handle = os.open(tmp_path / lock_file(session.id), os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
        saving = asyncio.ensure_future(store.save(say(session, "two")))
        await asyncio.sleep(0.1)
        assert not saving.done()
        os.close(handle)
        async with asyncio.timeout(5):
            assert (await saving).version == 2
