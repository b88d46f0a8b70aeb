"""Behaviour of the SQLite store alone: its file, its commits, its cache, and its errors about damage."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidData,
    PerdureError,
    SessionConflict,
    SessionNotFound,
    StoreError,
)
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Entry, Key
from perdure.stores.engine import Select
from perdure.stores.format import packing
from perdure.stores.jobs import loading
from perdure.stores.sqlite import SqliteStore, schema
from perdure.stores.sqlite.engine import Rows
from perdure.testing.samples import fork, new_session, note, run_of, say, show, texts

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return every row as plain text, so that a test can look for words in a file."""
    monkeypatch.setattr(packing, "pack", bytes)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def raw(path: Path) -> apsw.Connection:
    return apsw.Connection(str(path))


async def in_writer(store: SqliteStore, job: Callable[[apsw.Connection], Any]) -> Any:
    """Return the result of a job on the connection that the store writes with."""
    return await store._engine.opened.writer.run(job, alone=True)


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start another process that runs some code, with `say`, `note` and other helpers imported."""
    prelude = (
        "import asyncio, sys\n"
        "from perdure.stores.sqlite import SqliteStore\n"
        "from perdure.testing.samples import new_session, say\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


# The file


@pytest.fixture
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_open_umask")
async def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Files are 0600 and the directories made for them 0700, whatever the umask."""
    path = tmp_path / "made" / "here" / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("Hello"))
        found = {each.name: mode(each) for each in path.parent.iterdir()}
    names = ("sessions.db", "sessions.db-wal", "sessions.db-shm", "sessions.db-lock", "sessions.db-mark")
    assert found == dict.fromkeys(names, 0o600)
    assert mode(path.parent) == mode(path.parent.parent) == 0o700


async def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    """Neither the database nor its lock may be a link to something else."""
    target = tmp_path / "target"
    target.write_bytes(b"")
    for name in ("link.db", "other.db-lock"):
        (tmp_path / name).symlink_to(target)
        with pytest.raises((ConfigurationError, StoreError)):
            async with SqliteStore(tmp_path / name.removesuffix("-lock")):
                pass
    assert target.read_bytes() == b""


@pytest.mark.parametrize("kind", ["foreign", "text", "directory", "newer"])
async def test_what_is_not_a_store_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    """Another program's database, another kind of file, and a newer release's store stay as they are."""
    path = tmp_path / "thing"
    if kind == "foreign":
        with raw(path) as db:
            db.execute("CREATE TABLE recipes (name); INSERT INTO recipes VALUES ('soup')")
        db.close()
    elif kind == "text":
        path.write_text("Dear diary, " * 100)
    elif kind == "directory":
        path.mkdir()
    else:
        async with SqliteStore(path) as store:
            await store.create(new_session("Hello"))
        with raw(path) as db:
            db.pragma("user_version", 99)
        db.close()
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match="perdure import --from" if kind == "foreign" else None):
        async with SqliteStore(path):
            pass
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_store_is_a_file(path: str) -> None:
    """Sessions in memory have another store."""
    with pytest.raises(InvalidData, match="MemoryStore"):
        SqliteStore(path)


async def test_a_store_is_used_while_it_is_open(tmp_path: Path) -> None:
    """Before `async with` it raises an error; opening it twice is refused; it can be opened again once it is closed."""
    store = SqliteStore(tmp_path / "sessions.db")
    with pytest.raises(StoreError, match="not open"):
        await store.load("anything")
    async with store:
        session = await store.create(new_session("Hello"))
        with pytest.raises(StoreError, match="open already"):
            await store.__aenter__()
    async with store:
        assert await store.load(session.id) == session


async def test_every_commit_is_synced(tmp_path: Path) -> None:
    """The file is in WAL mode, and the connection that writes syncs at each commit and overwrites what it deletes."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        found = await in_writer(store, lambda db: [db.pragma(name) for name in ("synchronous", "secure_delete")])
        other = raw(tmp_path / "sessions.db")
        assert (found, other.pragma("journal_mode")) == ([2, 1], "wal")
        other.close()


async def test_a_refused_pragma_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite does not say when it ignores a setting, so the store reads every setting back."""
    setting = schema._set
    monkeypatch.setattr(schema, "_set", lambda db, pragma, _: setting(db, pragma, "nonsense"))
    with pytest.raises(StoreError, match="would not set"):
        async with SqliteStore(tmp_path / "sessions.db"):
            pass


async def test_a_forked_process_is_told(tmp_path: Path) -> None:
    """A store that was opened before os.fork() raises an error that says so."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("Hello"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork with threads: that is the point
            child = os.fork()
        if child == 0:
            os._exit(0 if all(_refuses(verb) for verb in (store.load, store.exists, store.delete)) else 1)
        assert _exit_status(child) == 0
        assert await store.load(session.id) == session


def _exit_status(child: int) -> int:
    return os.waitpid(child, 0)[1]


def _refuses(verb: Callable[[str], Any]) -> bool:
    coroutine = verb("anything")
    try:
        coroutine.send(None)
    except StoreError as error:
        return "another process" in str(error)
    except BaseException:
        return False
    return False


# Several at once


def test_processes_that_open_an_empty_path_at_once(tmp_path: Path) -> None:
    """The file is set up once, and every process's session is in it."""
    code = (
        "async def main(path, name):\n"
        "    async with SqliteStore(path) as store:\n"
        "        await store.create(new_session('Hello', id=name))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    path = tmp_path / "new" / "sessions.db"
    started = [python(code, path, f"s{number}") for number in range(8)]
    for process in started:
        process.communicate(timeout=60)
    assert [process.returncode for process in started] == [0] * 8

    async def look() -> list[str]:
        async with SqliteStore(path) as store:
            return sorted(info.id for info in await store.list())

    assert asyncio.run(look()) == [f"s{number}" for number in range(8)]
    with raw(path) as db:
        assert db.execute("SELECT count(*) FROM meta").get == 2
    db.close()


def test_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two processes, eight sessions each, every message there in order."""
    code = (
        "async def converse(store, name):\n"
        "    session = await store.create(new_session(id=name))\n"
        "    for turn in range(15):\n"
        "        session = await store.save(say(session, f'{name}/{turn}'))\n"
        "async def main(path, name):\n"
        "    async with SqliteStore(path) as store:\n"
        "        await asyncio.gather(*(converse(store, f'{name}{n}') for n in range(8)))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    started = [python(code, tmp_path / "sessions.db", name) for name in "ab"]
    for process in started:
        process.communicate(timeout=60)
    assert [process.returncode for process in started] == [0, 0]

    async def look() -> dict[str, list[str]]:
        async with SqliteStore(tmp_path / "sessions.db") as store:
            return {info.id: texts(await store.load(info.id)) for info in await store.list()}

    names = [f"{name}{number}" for name in "ab" for number in range(8)]
    assert asyncio.run(look()) == {name: [f"{name}/{turn}" for turn in range(15)] for name in names}


LOCKS = Path("/proc/locks")


@pytest.mark.skipif(not LOCKS.exists(), reason="locks can only be seen where there is /proc/locks")
async def test_the_file_stays_locked_while_it_is_open(tmp_path: Path) -> None:
    """Opening it again in the same process, or erasing, keeps SQLite's locks: others see that it is in use."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        before = _locks(path)
        async with SqliteStore(path):
            assert _locks(path) >= before > 0
        assert _locks(path) >= before
        await store.delete((await store.create(new_session("Hello"))).id)
        assert _locks(path) >= before


def _locks(path: Path) -> int:
    return LOCKS.read_text().count(f":{path.stat().st_ino} ")


async def test_saves_that_wait_together_share_a_commit(tmp_path: Path) -> None:
    """64 saves at once take far fewer commits than saves, and a refused one does not affect the others."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        sessions = [await store.create(new_session(id=f"s{number}")) for number in range(64)]
        await store.save(sessions[7])
        commits: list[int] = []
        await in_writer(store, lambda db: db.set_commit_hook(lambda: bool(commits.append(1))))
        saved = await asyncio.gather(*(store.save(say(each, "Hello")) for each in sessions), return_exceptions=True)
        assert len(commits) <= 16
        assert [type(each) for each in saved] == [SessionConflict if n == 7 else AgentSession for n in range(64)]
        for number in range(64):
            assert texts(await store.load(f"s{number}")) == ([] if number == 7 else ["Hello"])


async def traced(store: SqliteStore) -> list[str]:
    """Return the list of the statements of the store's writer, from now on."""
    statements: list[str] = []

    def note(_: apsw.Cursor, sql: str, bindings: object) -> bool:
        statements.append(sql)
        return True

    def listen(db: apsw.Connection) -> None:
        db.exec_trace = note

    await in_writer(store, listen)
    return statements


async def test_saves_that_share_a_commit_need_no_savepoints(tmp_path: Path) -> None:
    """Their rows are written together, table by table, and a refused save does not make the others begin again."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        sessions = [await store.create(new_session(id=f"s{number}")) for number in range(8)]
        await store.save(sessions[3])
        statements = await traced(store)
        await asyncio.gather(*(store.save(say(each, "Hello")) for each in sessions), return_exceptions=True)
        assert not [sql for sql in statements if "SAVEPOINT" in sql]
        rows = [sql.split()[2] for sql in statements if sql.startswith("INSERT")]
        assert rows == ["msg"] * 7 + ["head"] * 7


async def test_one_that_fails_after_it_has_written_is_parted_from_the_others(tmp_path: Path) -> None:
    """The other saves of its commit are made again, each with a savepoint, and nothing of the failed one is kept."""

    def fails_late(db: apsw.Connection) -> None:
        db.execute("DELETE FROM session WHERE id = 'a'")
        raise KeyError("a bug")

    async with SqliteStore(tmp_path / "sessions.db") as store:
        first, second = [await store.create(new_session(id=name)) for name in ("a", "b")]
        made = await asyncio.gather(
            store.save(say(first, "Hello")),
            store._engine.opened.writer.run(fails_late),
            store.save(first),
            store.save(say(second, "Hi")),
            return_exceptions=True,
        )
        assert [type(each) for each in made] == [AgentSession, KeyError, SessionConflict, AgentSession]
        store.evict("a")
        store.evict("b")
        assert texts(await store.load("a")) == ["Hello"]
        assert texts(await store.load("b")) == ["Hi"]
        assert not await store.check()


async def test_a_row_that_is_refused_fails_its_own_save_alone(tmp_path: Path) -> None:
    """Rows are written at the end of a commit. A row that fails is found there, and the other saves are kept."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        first, second = [await store.create(new_session("Hello", id=name)) for name in ("a", "b")]
        await in_writer(store, lambda db: db.execute("INSERT INTO msg VALUES (1, 1, 0, x'')").fetchall())
        made = await asyncio.gather(
            store.save(say(first, "Hello")), store.save(say(second, "Hi")), return_exceptions=True
        )
        assert [type(each) for each in made] == [StoreError, AgentSession]
        assert texts(await store.load("b")) == ["Hello", "Hi"]
        assert (await store.load("a")).version == 1


async def test_a_save_sets_no_column_that_stays_as_it_is(tmp_path: Path) -> None:
    """Setting an indexed column costs a page of its index, whether or not the value changes."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("Hello"))
        statements = await traced(store)
        session = await store.save(say(session, "Hi"))
        await store.save(session.suspended())
        assert [sql for sql in statements if sql.startswith("UPDATE session")] == [
            "UPDATE session SET version = ?, updated = ?, msg_end = ? WHERE sid = ?",
            "UPDATE session SET version = ?, updated = ?, status = ? WHERE sid = ?",
        ]
        assert [info.id for info in await store.list(status="suspended")] == [session.id]


async def test_a_job_that_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    """Whatever fails in one request, its caller gets an error, and the store continues."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("Hello"))

        def broken(db: apsw.Connection) -> None:
            db.execute("DELETE FROM session")
            raise KeyError("a bug")

        for worker in (store._engine.opened.writer, store._engine.opened.readers):
            with pytest.raises((KeyError, StoreError)):
                await worker.run(broken)
        odd: list[Any] = [
            lambda: store.load(session.id, 2**80),
            lambda: store.list(owner="half \ud800"),
            lambda: store.claim(session.id, version=1, owner="half \ud800"),
            lambda: store.save(AgentSession.reconstitute(session, version=2**80, updated_at=session.info.updated_at)),
        ]
        for call in odd:
            with suppress(PerdureError, OverflowError):
                assert await asyncio.wait_for(call(), 10) is None
        assert await store.load(session.id) == session
        assert (await store.save(session)).version == 2


async def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    """A save without space raises an error and keeps nothing; when there is space again, the store continues."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("Hello"))
        full = await in_writer(store, lambda db: db.pragma("page_count"))
        await in_writer(store, lambda db: db.pragma("max_page_count", full))
        large = say(session, "x" * 100_000)
        failed = await asyncio.gather(store.save(large), store.create(large_session()), return_exceptions=True)
        assert [type(each) for each in failed] == [StoreError, StoreError]
        assert "disk is full" in str(failed[0])
        assert await store.load(session.id) == session
        await in_writer(store, lambda db: db.pragma("max_page_count", 1_000_000))
        assert texts(await store.save(large)) == ["Hello", "x" * 100_000]
    async with SqliteStore(tmp_path / "sessions.db") as store:
        assert [info.version for info in await store.list()] == [2]


def large_session() -> AgentSession:
    return new_session("y" * 100_000)


WRITER = """
async def main(path, name):
    async with SqliteStore(path) as store:
        session = await store.create(new_session(id=name))
        for turn in range(100000):
            session = await store.save(say(session, f"{turn}", "x" * (turn * 37 % 5000)))
            print(session.version, flush=True)
asyncio.run(main(*sys.argv[1:]))
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """A writer killed at any moment leaves every acknowledged version, whole."""
    path, rng = tmp_path / "sessions.db", random.Random(7)
    for round in range(50 if TORTURE else 10):
        process = python(WRITER, path, f"s{round}")
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        complete = (line + rest).rsplit("\n", 1)[0].split("\n")
        asyncio.run(_check_acknowledged(path, f"s{round}", int(complete[-1])))


async def _check_acknowledged(path: Path, name: str, acknowledged: int) -> None:
    async with SqliteStore(path) as store:
        session = await store.load(name)
        assert session is not None
        assert acknowledged <= session.version <= acknowledged + 1
        assert texts(session)[::2] == [str(turn) for turn in range(session.version - 1)]
        older = await store.load(name, acknowledged)
        assert len(texts(older)) == 2 * (acknowledged - 1)
        assert (await store.save(say(session, "goes on"))).version == session.version + 1


# The cache


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the number of messages that each read of a log has returned."""
    counts: list[int] = []
    read = loading.decoded

    def counting(*args: Any, **kwargs: Any) -> list[Message]:
        found = read(*args, **kwargs)
        counts.append(len(found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(loading, "decoded", counting)
        yield counts


async def test_what_is_at_hand_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second load reads nothing; after another instance wrote, only the new messages are read."""
    async with SqliteStore(tmp_path / "sessions.db") as one, SqliteStore(tmp_path / "sessions.db") as two:
        session = await one.create(new_session(*map(str, range(200))))
        with counted_reads(monkeypatch) as reads:
            assert await one.load(session.id) == session
            assert sum(reads) == 0
            assert await two.load(session.id) == session
            assert sum(reads) == 200
            assert await two.load(session.id) == session
            assert sum(reads) == 200
            session = await one.save(run_of(say(session, "a", "b", "c")))
            assert await two.load(session.id) == session
            assert sum(reads) == 200 + 6
            loaded = await two.load(session.id)
            assert loaded is not None
            session = await two.save(say(loaded, "d"))
            assert await one.load(session.id) == session
            assert sum(reads) == 200 + 6 + 1
            session = await one.save(note(session, "key", "value"))
            assert await two.load(session.id) == session
            assert sum(reads) == 200 + 6 + 1


async def test_a_redaction_that_comes_before_a_queued_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that checks the cache before a redaction by another process, and reads after it, shows no old text."""
    monkeypatch.setattr("perdure.stores.sqlite.readers.MOST_READERS", 1)
    monkeypatch.setattr("perdure.stores.sqlite.glimpse.FEW", -1)  # as if the view were long: short views do not wait
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        session = await store.create(new_session("a secret", "more", id="s"))
        session = await other.save(say(session, "from elsewhere"))
        begun, go_on = threading.Event(), threading.Event()

        def hold_up(_: apsw.Connection) -> None:
            begun.set()
            go_on.wait(30)

        held = asyncio.ensure_future(store._engine.opened.readers.run(hold_up))
        await asyncio.to_thread(begun.wait)
        loading = asyncio.ensure_future(store.load("s"))
        await asyncio.sleep(0)  # it has compared its cache with the file, and waits for the reader
        await asyncio.sleep(0)
        await other.redact("s", [session.state.messages[0].id])
        go_on.set()
        await held
        for loaded in (await loading, await store.load("s"), await store.load("s", 3)):
            assert texts(loaded) == ["[redacted]", "more", "from elsewhere"]


def test_event_loops_that_share_a_store_see_each_message_once(tmp_path: Path) -> None:
    """Four event loops in threads save and load the same sessions, and every load shows what the file has."""
    names, turns, wrong = [f"s{number}" for number in range(3)], 60, list[object]()

    async def converse(store: SqliteStore, writing: SqliteStore, loop: int) -> None:
        rng = random.Random(loop)
        for turn in range(turns):
            name = rng.choice(names)
            session = await store.load(name)
            assert session is not None
            said = texts(session)
            if len(said) != len(set(said)) or len(said) != 2 * session.version - 1:
                wrong.append((loop, turn, session.version, said))
            with suppress(SessionConflict):
                await (store, writing)[turn % 2].save(say(session, f"{loop}/{turn}", f"{loop}/{turn} too"))

    async def main() -> None:
        path = tmp_path / "sessions.db"
        async with SqliteStore(path, cache=2) as store, SqliteStore(path) as writing:
            for name in names:
                await store.create(new_session("Hello", id=name))
            loops = [asyncio.to_thread(asyncio.run, converse(store, writing, loop)) for loop in range(4)]
            await asyncio.gather(*loops)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(main())
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


async def test_a_cache_of_few_sessions_still_serves_all(tmp_path: Path) -> None:
    """Sessions that the cache has no room for are read again."""
    async with SqliteStore(tmp_path / "sessions.db", cache=2) as store:
        kept = [await store.create(new_session(str(number))) for number in range(5)]
        for session in kept * 2:
            assert await store.load(session.id) == session
        kept = [await store.save(say(session, "more")) for session in kept]
        for session in kept:
            assert await store.load(session.id) == session
            assert (await store.load(session.id, 1) or session).version == 1


async def test_a_load_reads_what_the_view_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve messages over a long log are twelve rows, whether the view was cut or compacted."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        full = await store.create(new_session(*map(str, range(500)), id="trimmed"))
        await store.save(show(full, full.state.transcript.trim(12)))
        view = full.state.transcript.cover(0, 489, [Message.assistant("a summary")], by="test")
        await store.create(show(fork(full, id="covered"), view))
        await store.create(show(fork(full, id="forked"), full.state.transcript.cut(100, 112)))
    for name in ("trimmed", "covered", "forked"):
        async with SqliteStore(tmp_path / "sessions.db") as store:
            with counted_reads(monkeypatch) as reads:
                session = await store.load(name)
            assert session is not None
            assert (len(session.state.messages), sum(reads)) == (12, 12)
            assert len(texts(session)) == 12


async def test_lists_read_no_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list reads headers, even of sessions whose messages are damaged."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello"))
    with raw(path) as db:
        db.execute("DELETE FROM msg; DELETE FROM value")
    db.close()
    async with SqliteStore(path) as store:
        assert (await store.list()).all() == (session.info,)
        with pytest.raises(CorruptRecord):
            await store.load(session.id)


async def test_a_fork_costs_a_head(tmp_path: Path) -> None:
    """A fork of a long session writes one head and no message."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        parent = await store.create(new_session(*map(str, range(1000))))

        def sizes(db: apsw.Connection) -> tuple[int, int, int]:
            count = "SELECT (SELECT count(*) FROM msg), (SELECT count(*) FROM head), (SELECT count(*) FROM value)"
            return tuple(db.execute(count).fetchone())  # type: ignore[return-value]

        messages, heads, values = await in_writer(store, sizes)
        for _ in range(10):
            await store.create(fork(parent))
        assert await in_writer(store, sizes) == (messages, heads + 10, values)


# Damage


async def furnish(path: Path) -> None:
    """A small store with something of everything in it, all of it in the database file."""
    async with SqliteStore(path) as store:
        first = await store.create(new_session("one", "two " * 300, id="alpha", owner="ann", tags=("vip", "late")))
        first = await store.save(run_of(first))
        first = await store.save(note(say(first, "three"), "k", "v" * 600))
        first = await store.save(first.suspended())
        second = await store.save(say(await store.create(say(fork(first, id="beta"), "four")), "five"))
        for number in range(6):
            definition = AgentDefinition(f"agent{number}")
            await store.create(new_session(f"hello {number}", id=f"gamma{number}", owner="ben", definition=definition))
        claim, _ = await store.claim(second.id, version=2, owner="me", entries=[Entry("start", 1, "r"), Entry("go", 2)])
        await store.append(claim, entries=[Entry("end", 3, "r")], messages=[Message.user("ahead")])
        await store.release(claim)
        for word in ("left", "right"):
            await store.post("alpha", Entry("steer", word))


IDS = ("alpha", "beta", "gamma0", "gamma5", "nobody")
VERSIONS = [("alpha", version) for version in range(1, 6)] + [("beta", version) for version in range(1, 4)]


async def answers(path: Path) -> dict[str, Any]:
    """Return the store's answers to many questions: a value, or an error."""
    found: dict[str, Any] = {}

    async def ask(question: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            found[question] = await verb(*args, **kwargs)
        except PerdureError as error:
            found[question] = error

    store = SqliteStore(path)
    try:
        await store.__aenter__()
    except PerdureError as error:
        return {"open": error}
    try:
        for name in IDS:
            await ask(f"load {name}", store.load, name)
            await ask(f"exists {name}", store.exists, name)
        for name, version in VERSIONS:
            await ask(f"load {name} {version}", store.load, name, version)
        for name in ("alpha", "beta"):
            await ask(f"read {name}", store.read, name)
            await ask(f"inbox {name}", store.read, name, inbox=True)
        await ask("list", store.list)
    finally:
        await store.__aexit__()
    return found


def wrong_answers(right: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Return the questions whose answer is neither right nor an error that names the damage."""
    for question, answer in found.items():
        if isinstance(answer, PerdureError):
            if not isinstance(answer, CorruptRecord | StoreError):
                yield f"{question}: {answer!r}"
        elif question == "list":
            expected = right["list"].all()
            shown = [info for info in expected if info in answer]
            if shown != [*answer] or len(expected) - len(shown) > len(answer.damaged):
                yield f"{question}: {[info.id for info in answer]} and {answer.damaged}"
        elif answer != right[question]:
            yield f"{question}: {answer!r}"[:300]


async def test_a_flipped_bit_is_never_a_wrong_answer(tmp_path: Path) -> None:
    """Whichever bit of the file is flipped, a read returns what was written, or raises an error.

    A checksum of records cannot show that a whole row has vanished from the table of sessions: lists are excepted.
    """
    path, rng = tmp_path / "sessions.db", random.Random(11)
    await furnish(path)
    intact = path.read_bytes()
    right = await answers(path)
    rows_of_sessions = _pages_of(path, "session")
    used = [place for place, byte in enumerate(intact) if byte]
    for place in rng.choices(used, k=20_000 if TORTURE else 120):
        damaged = bytearray(intact)
        damaged[place] ^= 1 << rng.randrange(8)
        wrong = [*wrong_answers(right, await answers(_replaced(tmp_path / "copy.db", damaged)))]
        if place // 4096 + 1 in rows_of_sessions:
            wrong = [each for each in wrong if not each.startswith("list")]
        assert wrong == [], place


async def test_an_index_that_finds_another_head_is_damage(tmp_path: Path) -> None:
    """The row is whole and its checksum is right, but it is not the row that was asked for."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("one", id="s"))
        for text in ("two", "three"):
            session = await store.save(say(session, text))

    def misled(rows: Rows, statement: Select) -> Any:
        is_of_head = statement.table == "head" and "body" in statement.columns
        return select(rows, Select("head", statement.columns, order="version", limit=1) if is_of_head else statement)

    select = Rows._select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "_select", misled)
        patch.setattr("perdure.stores.sqlite.glimpse.FEW", -1)  # a read in the event loop does not use `Rows`
        async with SqliteStore(path) as store:
            for version in (3, None):
                with pytest.raises(CorruptRecord, match="head 3"):
                    await store.load("s", version)


def _replaced(path: Path, content: bytes) -> Path:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    path.write_bytes(content)
    return path


def _pages_of(path: Path, table: str) -> set[int]:
    db = raw(path)
    found = {page for (page,) in db.execute("SELECT pageno FROM dbstat WHERE name = ?", (table,))}
    db.close()
    return found


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(
    ("damage", "hurt"),
    [
        ("UPDATE head SET body = CAST(replace(body, 'ann', 'bob') AS BLOB) WHERE sid = 1 AND version = 4", {"alpha"}),
        ("UPDATE head SET crc = crc + 1 WHERE sid = 1 AND version = 4", {"alpha"}),
        ("DELETE FROM head WHERE sid = 1 AND version = 4", {"alpha"}),
        ("UPDATE head SET body = (SELECT body FROM head WHERE sid = 3) WHERE sid = 4", {"gamma1"}),
        ("UPDATE session SET version = 3 WHERE sid = 1", {"alpha"}),
        ("UPDATE session SET version = 9 WHERE sid = 1", {"alpha"}),
        ("UPDATE session SET status = CAST(x'61ff' AS TEXT) WHERE sid = 1", {"alpha"}),
    ],
)
async def test_one_bad_session_stops_nobody_elses_listing(tmp_path: Path, damage: str, hurt: set[str]) -> None:
    """A session whose header is damaged is named beside the good ones."""
    path = tmp_path / "sessions.db"
    await furnish(path)
    db = raw(path)
    db.execute(damage)
    db.close()
    async with SqliteStore(path) as store:
        page = await store.list()
        assert {error.session_id for error in page.damaged} | {info.id for info in page} == {
            *("alpha", "beta"),
            *(f"gamma{number}" for number in range(6)),
        }
        bad = {error.session_id for error in page.damaged}
        assert bad == hurt or (bad == set() and "version = 3" in damage)
        for name in hurt - {"alpha"} if "status" in damage else hurt:
            with pytest.raises(CorruptRecord) as caught:
                await store.load(name)
            assert caught.value.session_id == name


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(
    ("damage", "readable"),
    [
        ("UPDATE msg SET body = CAST(replace(body, 'three', 'eerht') AS BLOB) WHERE log = 1 AND pos = 5", [1, 2]),
        ("UPDATE msg SET body = (SELECT body FROM msg WHERE log = 1 AND pos = 0) WHERE log = 1 AND pos = 5", [1, 2]),
        ("DELETE FROM msg WHERE log = 1 AND pos = 5", [1, 2]),
        ("UPDATE msg SET pos = 77 WHERE log = 1 AND pos = 5", [1, 2]),
        ("DELETE FROM value WHERE length(body) > 500 AND instr(CAST(body AS TEXT), 'vvv')", [1, 2]),
        ("UPDATE value SET body = x'7b7d' WHERE instr(CAST(body AS TEXT), 'vvv')", [1, 2]),
        ("DELETE FROM head WHERE sid = 1 AND version = 3", [1, 2, 4]),
    ],
)
async def test_a_session_stays_readable_up_to_the_damage(tmp_path: Path, damage: str, readable: list[int]) -> None:
    """A damaged record affects the versions that show it, and no other."""
    path = tmp_path / "sessions.db"
    await furnish(path)
    async with SqliteStore(path) as store:
        right = [await store.load("alpha", version) for version in range(1, 5)]
    db = raw(path)
    db.execute(damage)
    assert db.changes() > 0
    db.close()
    async with SqliteStore(path) as store:
        for version in range(1, 5):
            if version in readable:
                assert await store.load("alpha", version) == right[version - 1]
            else:
                with pytest.raises(CorruptRecord):
                    await store.load("alpha", version)


LOSSES = {
    "the newest version": "DELETE FROM head WHERE version = 3 AND sid = 1",
    "a version": "DELETE FROM head WHERE version = 2 AND sid = 1",
    "the last message": "DELETE FROM msg WHERE log = 1 AND pos = 5",
    "a message": "DELETE FROM msg WHERE log = 1 AND pos = 2",
    "a message that no version shows": "DELETE FROM msg WHERE log = 1 AND pos = 4",
    "the last message of a branch": "DELETE FROM msg WHERE log = 2 AND pos = 1",
    "the first message of a branch": "DELETE FROM msg WHERE log = 2 AND pos = 0",
    "a branch": "DELETE FROM log WHERE log = 2",
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
async def test_a_dump_that_would_lack_something_is_refused(tmp_path: Path, loss: str) -> None:
    """An export or a copy is whole, or it is not made: every repair begins with a backup."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await _with_a_branch(store)
        assert (await store.dump(SessionId("s"))).heads
        db = raw(path)
        db.execute(loss)
        db.close()
        with pytest.raises(CorruptRecord, match=r"missing|last one"):
            await store.dump(SessionId("s"))


async def _with_a_branch(store: SqliteStore) -> None:
    session = await store.save(say(await store.create(new_session("one", id="s")), "two", "three"))
    claim, _ = await store.claim("s", version=2, owner="ann", messages=[Message.user("four")])
    await store.append(claim, messages=[Message.user("five")])
    branch = [Message.user("in a branch"), Message.user("and more")]
    await store.append(claim, messages=branch, entries=[Entry("k", 1, "loop")], log="loop")
    await store.save(say(session, "six"), claim=claim, key=Key("key", "digest"))


KEY_DAMAGE = {
    "name": "UPDATE key SET name = 'kez'",
    "digest": "UPDATE key SET digest = 'digesu'",
    "version": "UPDATE key SET version = 2",
}


@pytest.mark.parametrize("damage", KEY_DAMAGE.values(), ids=KEY_DAMAGE.keys())
async def test_a_damaged_key_is_never_taken_for_another(tmp_path: Path, damage: str) -> None:
    """A damaged key does not make a request refused, answered wrongly, or run again."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await _with_a_branch(store)
        assert await store.find_key("s", "key") == (Key("key", "digest"), 3)
        assert await store.find_key("s", "another") is None
        db = raw(path)
        db.execute("PRAGMA writable_schema = ON")  # otherwise the index would be changed along with the table
        if "name" in damage:
            db.execute("CREATE TEMP TABLE kept AS SELECT rootpage, sql FROM sqlite_schema WHERE name = 'key_again'")
            db.execute("DELETE FROM sqlite_schema WHERE name = 'key_again'")
            db.pragma("schema_version", db.pragma("schema_version") + 1)
            db.execute(damage)
            db.execute("INSERT INTO sqlite_schema SELECT 'index', 'key_again', 'key', rootpage, sql FROM temp.kept")
            db.pragma("schema_version", db.pragma("schema_version") + 1)
        else:
            db.execute(damage)
        db.close()
        with pytest.raises(CorruptRecord, match="key 'key'"):
            await store.find_key("s", "key")


async def test_a_key_whose_neighbour_rotted_is_not_answered_by_it(tmp_path: Path) -> None:
    """Rows that are out of order lead a search to another row, whose checksum is sound."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        for _ in range(2):  # SQLite stores the numbers 0 and 1 without a byte
            await store.create(new_session("other"))
        session = await store.create(new_session("one", id="s"))
        for number in range(4):
            claim, _ = await store.claim("s", version=session.version, owner="me")
            key = Key(f"key-{number}", f"digest {number}")
            session = await store.save(say(session, "more"), claim=claim, key=key)
    sound = path.read_bytes()
    before_names = [
        each.start() - 1 for each in re.finditer(rb"key-\ddigest", sound)
    ]  # the byte of the session's number
    assert len(before_names) == 4
    for place in before_names:
        for bit in range(8):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
            async with SqliteStore(path) as store:
                for number in range(4):
                    with suppress(CorruptRecord):
                        found = await store.find_key("s", f"key-{number}")
                        assert found == (Key(f"key-{number}", f"digest {number}"), number + 2)


async def test_a_run_that_an_index_has_lost_is_damage(tmp_path: Path) -> None:
    """Its record alone would seem empty, and a recovery would drop what was done."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await _with_a_branch(store)
        assert len(await store.runs("s")) == 1
        assert len(await store.read("s", run="loop")) == 1
        assert await store.read("s", run="unknown") == []
        db = raw(path)
        root = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_run_1'").get
        size = db.pragma("page_size")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        page = file.read(size)
        file.seek((root - 1) * size + page.index(b"loop"))
        file.write(b"look")
    async with SqliteStore(path) as store:
        with pytest.raises(CorruptRecord, match="loop"):
            await store.read("s", run="loop")


async def test_a_damaged_log_row_shows_nobody_anothers_text(tmp_path: Path) -> None:
    """A message that a flipped bit has put under another owner's session is not found by a search."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("a secret of ann's", id="a", owner="ann"))
        await store.create(new_session("something else", id="b", owner="ben"))
        assert [hit.session_id for hit in await store.search("secret")] == ["a"]
        db = raw(path)
        db.execute("UPDATE log SET sid = 2, name = 'x' WHERE log = 1")
        db.close()
        for owner in (None, "ann", "ben"):
            assert await store.search("secret", owner=owner) == []


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
async def test_a_file_that_is_gone_takes_no_saves(tmp_path: Path, how: str) -> None:
    """A save to a file that no longer has its name is refused with the reason, and so is a load."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello"))
        os.rename(path, tmp_path / "elsewhere.db")
        if how == "replaced":
            path.write_bytes((tmp_path / "elsewhere.db").read_bytes())
        if how == "removed":
            os.unlink(tmp_path / "elsewhere.db")
        for verb in (store.save(say(session, "more")), store.load(session.id), store.list(), store.delete(session.id)):
            with pytest.raises(StoreError, match="removed, renamed or replaced"):
                await verb
        if how != "removed":
            os.replace(tmp_path / "elsewhere.db", path)
            assert (await store.save(say(session, "more"))).version == 2


async def test_claims_lapse_when_the_store_is_closed_over_them(tmp_path: Path) -> None:
    """A claim that is still held can be recovered at once; released claims are left alone."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        for name in ("held", "released", "saved", "taken over"):
            await store.create(new_session("Hello", id=name.replace(" ", "-")))
        await store.claim("held", version=1, owner="ann")
        claim, _ = await store.claim("released", version=1, owner="ann")
        await store.release(claim)
        claim, _ = await store.claim("saved", version=1, owner="ann")
        saved = await store.load("saved")
        assert saved is not None
        await store.save(saved, claim=claim)
        assert [*await store.lapsed()] == []
        await store.claim("taken-over", version=1, owner="ann", lease=0)
        async with SqliteStore(path) as other:
            await other.claim("taken-over", version=1, owner="ben", take_over=True)
            await store.__aexit__()
            assert [*await other.lapsed()] == ["held"]
            assert await other.is_interrupted("held")
            assert await other.is_claimed("taken-over")
            for name in ("released", "saved"):
                assert not await other.is_claimed(name)


async def test_a_new_store_outlasts_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new directory is synced into the one above it, and the file into its directory."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    async with SqliteStore(tmp_path / "a" / "b" / "sessions.db"):
        assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


@pytest.mark.parametrize("part", ["x" * 300, "no"])
async def test_a_path_that_cannot_be_reached_is_a_store_error(tmp_path: Path, part: str) -> None:
    """A name that is too long, or a directory that may not be entered, is reported as such."""
    (tmp_path / "no").mkdir()
    path = tmp_path / part / "deeper" / "sessions.db"
    if part == "no" and os.geteuid() == 0:
        code = (
            "import os\nfrom pathlib import Path\nfrom perdure import StoreError\n"
            "from perdure.stores.sqlite.schema import prepare_directory\nos.setuid(65534)\n"
            "try:\n    prepare_directory(Path(sys.argv[1]))\nexcept StoreError as error:\n    print(error)\n"
        )
        os.chmod(tmp_path / "no", 0o700)
        os.chmod(tmp_path, 0o711)
        said = python(code, path).communicate(timeout=60)[0]
        assert "Permission denied" in said
        return
    os.chmod(tmp_path / "no", 0)
    with pytest.raises(StoreError, match=r"too long|Permission denied"):
        await SqliteStore(path).__aenter__()


# Erasure


def traces(directory: Path, *words: str) -> list[str]:
    """Return which of the words are in which file of a directory."""
    found = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        found += [f"{word} in {path.name}" for word in words if word.encode() in content]
    return found


@pytest.mark.usefixtures("unpacked")
async def test_what_is_erased_is_in_no_file(tmp_path: Path) -> None:
    """No file has its messages, metadata, prompts, definitions, headers, records or branches; nor has the log."""
    places = ("said", "noted", "noted-large", "prompt", "task", "agent", "description", "owner", "tag", "name")
    places += ("entry", "item", "ahead", "branch", "holder", "covered", "summary", "run")
    words = {place: f"secret-{place}-word" for place in places}
    async with SqliteStore(tmp_path / "sessions.db") as store:
        other = await store.create(new_session("a bystander's words"))
        await fill(store, words)
        assert {trace.partition(" ")[0] for trace in traces(tmp_path, *words.values())} == {*words.values()}
        await store.delete("doomed")
        assert traces(tmp_path, *words.values()) == []
        assert texts(await store.load(other.id)) == ["a bystander's words"]
        assert traces(tmp_path, "a bystander's words") == ["a bystander's words in sessions.db"]
    assert traces(tmp_path, *words.values()) == []


async def fill(store: SqliteStore, words: dict[str, str]) -> None:
    """Create a session `doomed` with a word of its own in each place."""
    definition = AgentDefinition(words["agent"], description=words["description"] * 100)
    header = {"owner": words["owner"], "tags": (words["tag"],), "name": words["name"]}
    session = await store.create(
        new_session(words["said"], words["covered"], definition=definition, id="doomed", **header)
    )
    session = note(note(session, "noted", words["noted"]), "large", words["noted-large"] * 100)
    session = session.with_state(session.state.with_system_prompt(words["prompt"] * 100).with_task(words["task"]))
    view = session.state.transcript.cover(1, 2, [Message.assistant(words["summary"])], by="test")
    session = await store.save(show(session, view))
    claim, _ = await store.claim(
        "doomed",
        version=2,
        owner=words["holder"],
        messages=[Message.user(words["ahead"])],
        entries=[Entry("k", words["entry"], words["run"])],
    )
    await store.append(claim, messages=[Message.user(words["branch"])], log="branch")
    await store.post("doomed", Entry("k", words["item"]))
    await store.heartbeat(claim)
    await store.release(claim)


@pytest.mark.usefixtures("unpacked")
async def test_what_a_fork_shows_stays_and_the_rest_goes(tmp_path: Path) -> None:
    """The files keep what forks show of an erased parent, until the last of them is erased too."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        parent = await store.create(new_session("first-secret", "second-secret", "third-secret"))
        child = await store.create(show(fork(parent), parent.state.transcript.cut(1, 2)))
        await store.delete(parent.id)
        words = ("first-secret", "second-secret", "third-secret")
        assert traces(tmp_path, *words) == ["second-secret in sessions.db"]
        await store.delete(child.id)
        assert traces(tmp_path, *words) == []


async def test_no_copy_is_left_behind_when_rows_move(tmp_path: Path) -> None:
    """Two instances let sessions grow and erase them beside each other: no trace of an erased one stays."""
    rng, path = random.Random(5), tmp_path / "sessions.db"
    sessions: dict[str, AgentSession] = {}
    gone: list[str] = []
    async with SqliteStore(path) as one, SqliteStore(path) as two:
        for step in range(2000 if TORTURE else 220):
            store = rng.choice((one, two))
            choice = rng.random()
            if choice < 0.25 or not sessions:
                word = f"secret{step:05}"
                sessions[word] = await store.create(new_session(word, id=f"{rng.random()}-{word}", tags=(word,)))
            elif choice < 0.8:
                word = rng.choice([*sessions])
                sessions[word] = await store.save(_grown(rng, sessions[word], word))
            else:
                word = rng.choice([*sessions])
                await store.delete(sessions.pop(word).id)
                gone.append(word)
                assert traces(tmp_path, *gone) == [], (step, word)
        for session in sessions.values():
            assert await one.load(session.id) == session


def _grown(rng: random.Random, session: AgentSession, word: str) -> AgentSession:
    more = word * rng.choice((1, 5, 40, 200, 800))
    match rng.randrange(4):
        case 0:
            return note(session, word, more)
        case 1:
            return session.with_tags([f"{word}{rng.random()}" for _ in range(rng.randrange(4))]).with_name(word)
        case 2:
            return session.with_state(session.state.with_system_prompt(more).with_task(word))
        case _:
            return say(session, *[f"{word}{rng.random()}", more][: rng.randrange(1, 3)])


async def test_an_erasure_that_a_reader_holds_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another program keeps a read open, the text may still be in the log; the next erasure removes it."""
    monkeypatch.setattr(schema, "BUSY_MS", 50)
    async with SqliteStore(tmp_path / "sessions.db") as store:
        first = await store.create(new_session("first-secret"))
        second = await store.create(new_session("second-secret"))
        reader = raw(tmp_path / "sessions.db")
        cursor = reader.execute("SELECT * FROM msg")
        next(cursor)
        with pytest.raises(StoreError, match="reading"):
            await store.delete(first.id)
        assert await store.load(first.id) is None
        reader.close()
        await store.delete(second.id)
        assert traces(tmp_path, "first-secret", "second-secret") == []


async def test_a_copy_of_the_file_is_a_store(tmp_path: Path) -> None:
    """After closing, the database file alone holds everything."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(run_of(new_session("Hello")))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "sessions.db", tmp_path / "elsewhere" / "copy.db")
    async with SqliteStore(tmp_path / "elsewhere" / "copy.db") as store:
        assert await store.load(session.id) == session
        with pytest.raises(SessionNotFound):
            await store.delete("nobody")


async def test_a_column_of_another_type_is_damage_wherever_it_is_read(tmp_path: Path) -> None:
    """The tables are strict, so only damage can cause it; the value that it is compared with shows it."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("one", id="s"))
        await store.claim("s", version=1, owner="ann")
    db = raw(path)
    db.execute("PRAGMA writable_schema = ON")
    db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE name = 'session'")
    db.close()
    db = raw(path)
    db.execute("UPDATE session SET expires = x'00'")
    db.close()
    async with SqliteStore(path) as store:
        with pytest.raises(CorruptRecord, match="type"):
            await store.is_claimed(session.id)


async def test_closing_waits_for_a_look_from_another_thread(tmp_path: Path) -> None:
    """Another event loop may be reading the file at that moment: it gets its answer, and later requests are refused."""
    store = SqliteStore(tmp_path / "sessions.db")
    await store.__aenter__()
    opened, begun = store._engine.opened, threading.Event()

    def look(db: apsw.Connection) -> int:
        db.create_scalar_function("begun", begun.set, 0)
        rows = "WITH RECURSIVE n(x) AS (SELECT begun() IS NULL UNION ALL SELECT x + 1 FROM n LIMIT 1000000)"
        return int(db.execute(f"{rows} SELECT max(x) FROM n").get)

    looking = asyncio.create_task(asyncio.to_thread(opened.look, look))
    await asyncio.to_thread(begun.wait)
    await store.__aexit__()
    assert await looking == 1_000_000
    with pytest.raises(StoreError):
        opened.look(look)
