"""Commits in the event loop's own thread: as durable as others, and the loop never waits for a lock."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.waiting import until

import perdure
from perdure.errors import ConfigurationError, InvalidData, SessionConflict, SessionLocked, StoreError
from perdure.model.message import Message
from perdure.stores.file_lock import FileLock
from perdure.stores.sqlite import SqliteStore, schema
from perdure.stores.sqlite import worker as workers
from perdure.stores.sqlite.schema import lock_path
from perdure.testing.samples import new_session, say, texts


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which batches were committed, in order."""
    committed: list[threading.Thread] = []
    original = workers.WritingWorker._commit

    def noted(self: Any, connection: apsw.Connection, batch: Any) -> None:
        original(self, connection, batch)
        committed.append(threading.current_thread())

    monkeypatch.setattr(workers.WritingWorker, "_commit", noted)
    return committed


def here(path: Path, **options: Any) -> SqliteStore:
    return SqliteStore(path / "sessions.db", commit_in_loop=True, **options)


async def test_what_is_brief_is_committed_in_the_loop(tmp_path: Path, threads: list[threading.Thread]) -> None:
    """A save, a claim and an append commit in the loop; the saves of one turn of the loop share a commit."""
    async with here(tmp_path) as store:
        await until(lambda: store._engine.opened.writer._connection is not None)
        one, two = await asyncio.gather(store.create(new_session("Hello")), store.create(new_session("Hi")))
        assert threads == [threading.current_thread()]
        claim, _ = await store.claim(one.id, version=1, owner="me")
        await store.append(claim, messages=[Message.user("ahead")])
        await store.save(one, claim=claim)
        await store.save(say(two, "again"))
        assert set(threads) == {threading.current_thread()}
    async with SqliteStore(tmp_path / "sessions.db") as other:
        assert texts(await other.load(two.id)) == ["Hi", "again"]


async def test_without_the_setting_the_thread_commits(tmp_path: Path, threads: list[threading.Thread]) -> None:
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await store.create(new_session("Hello"))
    assert threads
    assert threading.current_thread() not in threads


async def test_a_large_change_goes_to_the_thread(tmp_path: Path, threads: list[threading.Thread]) -> None:
    async with here(tmp_path) as store:
        await until(lambda: store._engine.opened.writer._connection is not None)
        session = await store.create(new_session(*map(str, range(65))))
        assert threading.current_thread() not in threads
        assert len((await store.save(say(session, "more"))).state.transcript) == 66
        assert threads[-1] is threading.current_thread()


async def test_a_lock_that_is_held_does_not_hold_up_the_loop(tmp_path: Path, threads: list[threading.Thread]) -> None:
    """The save goes to the thread, which waits; meanwhile other tasks continue."""
    async with here(tmp_path, lock_timeout=20.0) as store:
        session = await store.create(new_session("Hello"))
        threads.clear()
        other = FileLock(lock_path(tmp_path / "sessions.db"), 1.0)
        with other:
            saving = asyncio.ensure_future(store.save(say(session, "again")))
            longest = await longest_stall(0.3)
            assert not saving.done()
        await saving
        other.close()
    assert longest < 0.2
    assert threads
    assert threading.current_thread() not in threads


async def test_a_lock_that_is_never_given_back_is_told(tmp_path: Path) -> None:
    async with here(tmp_path, lock_timeout=0.1) as store:
        session = await store.create(new_session("Hello"))
        other = FileLock(lock_path(tmp_path / "sessions.db"), 1.0)
        with other, pytest.raises(SessionLocked):
            await store.save(say(session, "again"))
        await store.save(say(session, "again"))
        other.close()


async def test_a_stranger_that_writes_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    """Another program may hold SQLite's own lock without knowing of the lock beside the file."""
    async with here(tmp_path) as store:
        session = await store.create(new_session("Hello"))
        stranger = apsw.Connection(str(tmp_path / "sessions.db"))
        stranger.execute("BEGIN IMMEDIATE")
        saving = asyncio.ensure_future(store.save(say(session, "again")))
        longest = await longest_stall(0.3)
        assert not saving.done()
        stranger.execute("ROLLBACK")
        stranger.close()
        assert texts(await saving) == ["Hello", "again"]
    assert longest < 0.2


async def longest_stall(seconds: float) -> float:
    """Return the longest time that the loop stood still within the given seconds."""
    longest, last = 0.0, time.monotonic()
    end = last + seconds
    while last < end:
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def test_loops_in_two_threads_share_a_store(tmp_path: Path) -> None:
    """Two loops save to one store: no save is lost, and each makes a version."""
    async with here(tmp_path) as store:
        ids = [(await store.create(new_session("Hello"))).id for _ in range(2)]

        async def talk(session_id: str) -> None:
            for number in range(60):
                session = await store.load(session_id)
                assert session is not None
                await store.save(say(session, str(number)))

        await asyncio.gather(talk(ids[0]), asyncio.to_thread(asyncio.run, talk(ids[1])))
        for session_id in ids:
            loaded = await store.load(session_id)
            assert loaded is not None
            assert loaded.version == 61
            assert texts(loaded) == ["Hello", *map(str, range(60))]


async def test_a_save_that_is_refused_fails_alone(tmp_path: Path) -> None:
    async with here(tmp_path) as store:
        session = await store.create(new_session("Hello"))
        good, late = await asyncio.gather(
            store.save(say(session, "one")), store.save(say(session, "two")), return_exceptions=True
        )
        assert isinstance(late, SessionConflict)
        assert not isinstance(good, BaseException)
        assert good.version == 2


async def test_a_sync_that_fails_closes_the_store_to_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the thread, the store refuses saves afterwards: no success could be trusted."""

    def fails(self: Any, connection: apsw.Connection, batch: Any) -> bool:
        raise apsw.IOError("disk I/O error")

    async with here(tmp_path) as store:
        session = await store.create(new_session("Hello"))
        with monkeypatch.context() as patched:
            patched.setattr(workers.WritingWorker, "_done_together", fails)
            with pytest.raises(StoreError, match="refuses more"):
                await store.save(say(session, "again"))
        with pytest.raises(StoreError, match="refuses more"):
            await store.save(say(session, "again"))


async def test_an_interruption_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come in the middle of a commit, since the commit is in the main thread."""

    def interrupted(self: Any, connection: apsw.Connection, batch: Any) -> bool:
        raise KeyboardInterrupt

    async with here(tmp_path) as store:
        session = await store.create(new_session("Hello"))
        writer = store._engine.opened.writer
        await until(lambda: not writer._left and not writer._using.locked())
        request = workers.Request(lambda db: None, None, asyncio.get_running_loop(), brief=True)
        with monkeypatch.context() as patched:
            patched.setattr(workers.WritingWorker, "_done_together", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer._accept([request])
        assert texts(await store.save(say(session, "again"))) == ["Hello", "again"]


async def test_the_log_is_emptied_in_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long write-ahead log is emptied, and so is an idle one; no loop waits for it."""
    monkeypatch.setattr(schema, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.05)
    emptied: list[threading.Thread] = []
    original = workers.WritingWorker._empty_log

    def noted(self: Any, connection: apsw.Connection) -> None:
        emptied.append(threading.current_thread())
        original(self, connection)

    monkeypatch.setattr(workers.WritingWorker, "_empty_log", noted)
    async with here(tmp_path) as store:
        session = await store.create(new_session("Hello"))
        for number in range(10):
            session = await store.save(say(session, str(number)))
        writer = store._engine.opened.writer
        await until(lambda: bool(emptied) and not writer._is_behind)
        assert threading.current_thread() not in emptied
        session = await store.save(say(session, "after"))
        await until(lambda: not writer._is_behind)
        assert texts(session)[-1] == "after"


CHILD = """
import asyncio, sys
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, say

async def main():
    async with SqliteStore(sys.argv[1], commit_in_loop=True) as store:
        session = await store.create(new_session("Hello"))
        print(session.id, flush=True)
        for number in range(100_000):
            session = await store.save(say(session, str(number)))
            print(number, flush=True)

asyncio.run(main())
"""


def saving_child(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    child = saving_child(path)
    assert child.stdout is not None
    session_id = child.stdout.readline().strip()
    for _ in range(50):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    told = [50, *map(int, child.stdout.read().split())][-1]
    child.stdout.close()
    child.wait()
    async with SqliteStore(path) as store:
        session = await store.load(session_id)
        assert session is not None
        said = texts(session)
        assert said == ["Hello", *map(str, range(len(said) - 1))]
        assert len(said) - 1 >= told


async def test_two_processes_that_commit_in_their_loops_lose_nothing(tmp_path: Path) -> None:
    """The child saves as fast as it can; what is saved here in between is kept too."""
    path = tmp_path / "sessions.db"
    child = saving_child(path)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        async with here(tmp_path) as store:
            session = await store.create(new_session("Hello"))
            for number in range(50):
                session = await store.save(say(session, str(number)))
            store.evict(session.id)
            loaded = await store.load(session.id)
            assert loaded is not None
            assert texts(loaded) == ["Hello", *map(str, range(50))]
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


@pytest.mark.parametrize(
    ("option", "commits"), [("", False), ("?commit_in_loop=on", True), ("?commit_in_loop=off", False)]
)
def test_the_setting_in_a_url(tmp_path: Path, option: str, commits: bool) -> None:
    store: Any = perdure.store_of(f"sqlite:///{tmp_path}/sessions.db{option}")
    assert store._engine._commits_in_loop is commits


@pytest.mark.parametrize("option", ["?commit_in_loop", "?commit_in_loop=maybe", "?cache=5", "?", "#x"])
def test_another_option_in_a_url_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigurationError):
        perdure.store_of(f"sqlite:///{tmp_path}/sessions.db{option}")


@pytest.mark.parametrize(
    "made",
    [
        lambda path: SqliteStore(path, commit_in_loop="yes"),
        lambda path: perdure.store_of(f"sqlite:///{path}", commit_in_loop=1),  # type: ignore[arg-type]
    ],
)
def test_the_setting_is_yes_or_no(tmp_path: Path, made: Callable[[Path], object]) -> None:
    with pytest.raises(InvalidData, match="commit_in_loop"):
        made(tmp_path / "sessions.db")


def test_blocking_sessions_commit_in_their_loop(tmp_path: Path, threads: list[threading.Thread]) -> None:
    """They commit in their loop unless their URL turns that off."""
    for option, is_writers in (("", False), ("?commit_in_loop=off", True)):
        with perdure.connect_blocking(f"sqlite:///{tmp_path}/sessions.db{option}", model="offline") as sessions:
            chat = sessions.open()
            threads.clear()
            chat.send("Hello")
        assert threads[0].name.startswith("perdure writer") is is_writers
