"""One store for a process: any event loop, any thread, a fork, and the interpreter's exit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

import perdure
from perdure import ConfigurationError, SessionConflict
from perdure.model.ids import use
from perdure.protocols import Ear, Names, Opened, is_immediate
from perdure.sessions import shared as module
from perdure.testing import Delay, ScriptedDriver
from perdure.testing.clock import FrozenClock
from perdure.testing.contract import ChronicleContract, JournalContract, NamesContract, SketchContract, StoreContract
from perdure.testing.samples import new_session, say, texts

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

KINDS = ["memory", "file", "sqlite", "postgres"]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    yield url_of(request.param, tmp_path)
    close_all()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty directory without settings."""
    for name in ("PERDURE_STORE", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    close_all()


def url_of(kind: str, where: Path) -> str:
    match kind:
        case "memory":
            return "memory://"
        case "file":
            return f"file://{where}/sessions"
        case "sqlite":
            return f"sqlite:///{where}/s.db"
    return postgres_server.url_of(where)


def close_all() -> None:
    for each in module._shared.values():
        each.close()
    module._shared.clear()


def test_any_loop_and_any_thread_may_use_it(url: str) -> None:
    """Four event loops in threads and four plain threads write to one session: nothing is lost or doubled."""
    store = perdure.shared(url)
    store.wait(store.create(new_session("Hello", id="s")))

    async def turn(text: str) -> None:
        while True:
            session = await store.load("s")
            assert session is not None
            assert len(texts(session)) == len(set(texts(session))) == session.version
            try:
                await store.save(say(session, text))
                return
            except SessionConflict:
                await asyncio.sleep(0)

    async def turns(who: int) -> None:
        for number in range(5):
            await turn(f"{who}/{number}")

    def blocking(who: int) -> None:
        for number in range(5):
            store.wait(turn(f"{who}/{number}"))

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(asyncio.run, turns(who)) for who in range(4)]
        work += [pool.submit(blocking, who) for who in range(4, 8)]
        for each in work:
            each.result(120)
    session = store.wait(store.load("s"))
    assert session is not None
    assert sorted(texts(session)) == sorted(["Hello", *(f"{who}/{number}" for who in range(8) for number in range(5))])


def test_two_names_of_one_file_are_one_store(here: Path) -> None:
    """The path may be relative or a link, with or without options; another file is another store."""
    (here / "real").mkdir()
    (here / "link").symlink_to(here / "real")
    one = perdure.shared("sqlite:///real/s.db")
    for other in (
        f"sqlite:///{here}/real/s.db",
        "sqlite:///link/../real/./s.db",
        "sqlite:///link/s.db?commit_in_loop=on",
    ):
        assert perdure.shared(other) is one
    assert perdure.shared("sqlite:///real/t.db") is not one
    assert perdure.shared("file://real/s") is perdure.shared(f"file://{here}/link/s")
    assert perdure.shared("memory://") is perdure.shared("memory://")
    os.chdir(here / "real")
    assert perdure.shared("sqlite:///s.db") is one
    one.wait(one.create(new_session(id="s")))  # the path at the time of the request
    assert (here / "real" / "s.db").exists()


def test_nothing_happens_before_it_is_used(here: Path) -> None:
    before = threading.active_count()
    store = perdure.shared("sqlite:///s.db")
    assert (threading.active_count(), list(here.iterdir())) == (before, [])
    assert store.wait(store.exists("s")) is False
    assert (here / "s.db").exists()
    store.close()
    deadline = time.monotonic() + 5  # the thread that waited for the store's to end takes a moment to end itself
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before, threading.enumerate()


@pytest.mark.parametrize("by", ["data directory", "perdure.toml", "PERDURE_STORE"])
def test_the_default_is_the_store_of_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """`perdure ls` lists what a program keeps with `perdure.shared()`."""
    if by == "perdure.toml":
        (here / "perdure.toml").write_text('store = "sqlite:///mine.db"\n')
        (here / "deep").mkdir()
        monkeypatch.chdir(here / "deep")
    elif by == "PERDURE_STORE":
        monkeypatch.setenv("PERDURE_STORE", "elsewhere.db")
    store = perdure.shared()
    store.wait(store.create(new_session("Hello", id="chat-1")))
    expected = {
        "data directory": here.parent / "home/.local/share/perdure/sessions.db",
        "perdure.toml": here / "mine.db",
        "PERDURE_STORE": here / "elsewhere.db",
    }
    assert expected[by].exists()
    listed = subprocess.run(
        [sys.executable, "-m", "perdure", "ls", "--json"], capture_output=True, text=True, timeout=60
    )
    assert json.loads(listed.stdout)["id"] == "chat-1"


@pytest.mark.parametrize("by", ["perdure.toml", "PERDURE_KEYS"])
def test_the_default_is_sealed_with_the_keys_of_the_command_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A program's sessions there are as unreadable as those of the commands."""
    monkeypatch.setenv("PERDURE_MASTER_KEY", "6b" * 32)
    perdure.FileKeyRing(here / "ring.json", master="PERDURE_MASTER_KEY", create=True)
    monkeypatch.setenv("PERDURE_STORE", "sealed.db")
    if by == "perdure.toml":
        (here / "perdure.toml").write_text('keys = "ring.json"\n')
    else:
        monkeypatch.setenv("PERDURE_KEYS", "ring.json")
    store = perdure.shared()
    store.wait(store.create(new_session("Hello, treasure", id="chat-1")))
    store.close()
    written = b"".join(path.read_bytes() for path in here.glob("sealed.db*"))
    assert written
    assert b"treasure" not in written


def test_an_empty_name_of_a_key_ring_seals_nothing_and_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have forgotten to set the variable."""
    monkeypatch.setenv("PERDURE_KEYS", "")
    with pytest.raises(ConfigurationError, match="PERDURE_KEYS is empty"):
        perdure.shared()


@pytest.mark.parametrize("wrong", ["nonsense", "sqlite://", "sqlite:///s.db?x=1", "file://", "memory://x", "s.db"])
def test_what_is_no_url_is_refused_at_once(here: Path, wrong: str) -> None:
    with pytest.raises(ConfigurationError):
        perdure.shared(wrong)
    assert not module._shared


def test_a_store_that_could_not_be_opened_is_tried_again(here: Path) -> None:
    """Each caller gets the reason; once the file is mended, the same store works."""
    (here / "s.db").write_text("this is no database, and it is longer than any header would be" * 20)
    store = perdure.shared("sqlite:///s.db")
    for _ in range(2):
        with pytest.raises(perdure.PerdureError):
            store.wait(store.exists("s"))
    (here / "s.db").unlink()
    assert store.wait(store.exists("s")) is False


def test_it_can_do_what_its_kind_can(url: str) -> None:
    """It has the same abilities as a store of that kind, except that its calls wait."""
    store, kind = perdure.shared(url), perdure.store_of(url)
    assert isinstance(store, perdure.SessionStore)
    assert isinstance(store, Opened)
    assert isinstance(store, Names)
    assert isinstance(store, Ear) is isinstance(kind, Ear)
    assert not is_immediate(store)
    assert url not in repr(store)


async def test_a_connection_on_it_works_in_every_loop(url: str) -> None:
    """Agents run in the caller's loop, on the one store; closing a connection leaves the store open to others."""

    async def converse(name: str) -> str:
        async with perdure.connect(perdure.shared(url), driver=ScriptedDriver([f"Hello, {name}"])) as sessions:
            chat = await sessions.open(name)
            async for _ in chat.stream("Hi"):
                pass
            return (await chat.session()).state.messages[-1].text

    answers = [asyncio.to_thread(asyncio.run, converse(name)) for name in ("ada", "ben")]
    assert await asyncio.gather(converse("eve"), *answers) == ["Hello, eve", "Hello, ada", "Hello, ben"]
    store = perdure.shared(url)
    assert {info.id for info in await store.list()} == {"ada", "ben", "eve"}


def test_followers_hear_across_loops(url: str) -> None:
    """`follow` in one loop returns the text of a run in another."""

    async def follow() -> str:
        async with perdure.connect(perdure.shared(url)) as sessions:
            chat = await sessions.open("s")
            replies = [chunk.reply async for chunk in chat.follow() if chunk.reply is not None]
            return str(replies[-1].text)

    driver = ScriptedDriver([Delay(1.0, "Hello")])
    with perdure.connect_blocking(perdure.shared(url), driver=driver) as sessions:
        run = sessions.open("s").start("Hi")
        assert asyncio.run(follow()) == "Hello"
        assert run.result().text == "Hello"


async def test_a_caller_that_is_cancelled_cancels_no_work(here: Path) -> None:
    store, begun, go_on, done = perdure.shared("memory://"), threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.to_thread(go_on.wait, 60)
        done.set()

    task = asyncio.ensure_future(store.run(work()))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(done.wait, 60)


async def test_who_waits_while_it_is_closed_is_told(here: Path) -> None:
    """It raises an error, and the caller is not cancelled. The next call opens the store again."""
    store, begun = perdure.shared("sqlite:///s.db"), threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.ensure_future(store.run(work()))
    await asyncio.to_thread(begun.wait)
    await asyncio.to_thread(store.close)
    with pytest.raises(ConfigurationError, match="closed while it was used"):
        await task
    assert await store.exists("s") is False


def test_waiting_inside_its_own_loop_is_refused(here: Path) -> None:
    """It would wait for itself, for ever."""
    store = perdure.shared("memory://")

    async def wrong() -> None:
        store.wait(store.exists("s"))

    with pytest.raises(ConfigurationError, match="use await"):
        store.wait(wrong())


def test_the_callers_clock_counts(here: Path) -> None:
    """A clock that a caller has set for its task is used in the store's loop too."""
    store, clock = perdure.shared("memory://"), FrozenClock()
    session = store.wait(store.create(new_session(id="s")))
    with use(clock=clock):
        saved = store.wait(store.save(say(session, "Hello")))
    assert saved.info.updated_at == clock()


def script(text: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, for which warnings are errors."""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", textwrap.dedent(text), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    # A loop in development mode reports every callback of 0.1 s, which any may take on a machine with other work.
    done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("Executing <"))
    return done


FORK = """
    import asyncio, os, signal, sys
    import perdure
    from perdure.testing.samples import new_session, say, texts

    url = sys.argv[1]
    store = perdure.shared(url)
    store.wait(store.create(new_session("parent", id="s")))
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            async def speak():
                await store.save(say(await store.load("s"), f"child {number}"))
            asyncio.run(speak())
            sys.exit(0)  # an exit like any other: what the child has opened is closed
        assert os.waitpid(pid, 0)[1] == 0
        session = store.wait(store.load("s"))
        store.wait(store.save(say(session, f"after {number}")))
    print(texts(store.wait(store.load("s"))))
"""


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_forked_child_opens_its_own(kind: str, tmp_path: Path) -> None:
    """Parent and children write in turn, and neither closes what is the other's."""
    done = script(FORK, url_of(kind, tmp_path))
    said = [f"{who} {number}" for number in range(3) for who in ("child", "after")]
    assert (done.stdout.strip(), done.stderr, done.returncode) == (str(["parent", *said]), "", 0)


BUSY_FORK = """
    import os, signal, sys, threading
    import perdure
    from perdure.testing.samples import new_session, say, texts

    store = perdure.shared(sys.argv[1])
    for who in range(3):
        store.wait(store.create(new_session(id=f"s{who}")))
    ended = threading.Event()
    def work(who):
        while not ended.is_set():
            store.wait(store.save(say(store.wait(store.load(f"s{who}")), "x")))
            store.wait(store.list())
    threads = [threading.Thread(target=work, args=(who,)) for who in range(3)]
    for each in threads: each.start()
    for number in range(20):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            mine = perdure.shared(sys.argv[1])
            mine.wait(mine.create(new_session("child", id=f"child-{number}")))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, number
    ended.set()
    for each in threads: each.join()
    assert len(store.wait(store.list(limit=100))) == 23
    for who in range(3):
        session = store.wait(store.load(f"s{who}"))
        assert texts(session) == ["x"] * (session.version - 1)
    assert store.wait(store.check()) == []
"""


def test_a_process_that_is_busy_may_be_forked(tmp_path: Path) -> None:
    """Locks that other threads hold at the moment of the fork block nobody in the child."""
    done = script(BUSY_FORK, url_of("sqlite", tmp_path))
    assert (done.stderr, done.returncode) == ("", 0)


STUCK_FORK = """
    import asyncio, os, signal, sys
    import perdure
    from perdure.sessions import shared

    shared._PATIENCE = 0.5
    store = perdure.shared(sys.argv[1])
    store.wait(store.exists("s"))

    def child():
        signal.alarm(60)
        try:
            store.wait(store.exists("s"))
        except perdure.StoreError as error:
            print(error, flush=True)
        os._exit(0)

    async def fork():
        return os.fork() or child()

    os.waitpid(store.wait(fork()), 0)
    print(store.wait(store.exists("s")))
"""


def test_a_child_that_cannot_be_made_safe_is_told(tmp_path: Path) -> None:
    """A child that was forked by the store's own thread raises an error. The parent works on."""
    done = script(STUCK_FORK, url_of("sqlite", tmp_path))
    first, second = done.stdout.splitlines()
    assert "Fork before the store is used" in first
    assert (second, done.stderr, done.returncode) == ("False", "", 0)


CLAIM_FORK = """
    import asyncio, os, signal, sys
    import perdure
    from perdure.testing.samples import new_session, say

    store = perdure.shared(sys.argv[1])

    async def run():
        session = await store.create(new_session("Hello", id="s"))
        claim, _ = await store.claim("s", version=1, owner="me")
        if os.fork() == 0:
            signal.alarm(60)
            os._exit(0)
        os.wait()
        assert await store.is_claimed("s")
        return await store.save(say(session, "still mine"), claim=claim)

    assert asyncio.run(run()).version == 2
"""


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_fork_leaves_runs_under_way_their_claims(kind: str, tmp_path: Path) -> None:
    """The file is closed for the moment of the fork; the store is not."""
    done = script(CLAIM_FORK, url_of(kind, tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


EXIT = """
    import atexit, asyncio, sys, threading
    import perdure
    from perdure.testing.samples import new_session

    def none_starts(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def forbid():
        threading.Thread.start = none_starts

    store = perdure.shared(sys.argv[1])
    atexit.register(forbid)  # as newer releases of Python do
    async def claim():
        await store.create(new_session("Hello", id="s"))
        await store.search("Hello")
        await store.claim("s", version=1, owner="elsewhere", lease=3600)
    asyncio.run(claim())
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_the_interpreters_exit_closes_it(kind: str, tmp_path: Path) -> None:
    """It closes without a warning, though no thread or executor can be used any more; claims lapse as usual."""
    done = script(EXIT, url_of(kind, tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    if kind != "memory":
        async with perdure.store_of(url_of(kind, tmp_path)) as store:  # type: ignore[attr-defined]  # ours are
            assert list(await store.lapsed()) == ["s"]


@pytest.mark.sample(3)
class TestSharedStore(StoreContract, JournalContract, NamesContract, ChronicleContract, SketchContract):
    """A shared store keeps the contracts of its kind."""

    def open_store(self, where: Path) -> Any:
        return _closed_at_the_end(f"sqlite:///{where}/sessions.db")

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        """A shared store does not: its next use opens it again."""
        store = perdure.shared(f"sqlite:///{tmp_path}/sessions.db")
        store.wait(store.create(new_session("Hello", id="s")))
        store.close()
        assert store.wait(store.exists("s"))
        store.close()


@asynccontextmanager
async def _closed_at_the_end(url: str) -> AsyncIterator[perdure.SharedStore]:
    store = perdure.shared(url)
    try:
        yield store
    finally:
        store.close()
        module._shared.clear()
