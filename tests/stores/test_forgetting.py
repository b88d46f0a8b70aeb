"""Forgetting, seen from beneath: no byte is left, a failure changes nothing, and space is used again."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.files import ENVIRONMENT
from tests.stores.test_erasure import bytes_of

from perdure import (
    AgentDefinition,
    FileStore,
    LoopFactory,
    MemoryStore,
    SendMessage,
    SessionRuntime,
    SqliteStore,
    StoreError,
    ToolCall,
    TrimTranscript,
    VersionForgotten,
    tool,
)
from perdure.archive import fsck
from perdure.protocols import Entry
from perdure.stores.engine import Statement
from perdure.stores.memory import MemoryEngine
from perdure.stores.sqlite.erasure import _NotingRows
from perdure.testing import ScriptedDriver
from perdure.testing.samples import fork, new_session, note, say, show, texts

pytestmark = pytest.mark.sample(2)  # make torture runs all

SECRET = "hunter2-4111-1111"
STORES: dict[str, Any] = {
    "memory": lambda where: MemoryStore(),
    "sqlite": lambda where: SqliteStore(where / "sessions.db"),
    "file": lambda where: FileStore(where / "sessions"),
}


@tool
def pay(card: str) -> str:
    """Pay by card."""
    return f"paid with {card}"


@pytest.mark.parametrize("kind", STORES)
async def test_nothing_of_a_real_run_is_left(tmp_path: Path, kind: str) -> None:
    """Requests, calls and results are gone from versions, the record, the inbox and the index."""
    script: list[Any] = [[ToolCall("pay", {"card": SECRET})], f"It is paid with {SECRET}.", "Good day.", "Good night."]
    async with STORES[kind](tmp_path) as store:
        runtime = SessionRuntime(store)
        loops = LoopFactory(tools=[pay], driver=ScriptedDriver(lambda request: script.pop(0)))
        session = await runtime.create(AgentDefinition("payer"))
        await store.post(session.id, Entry("note", {"text": SECRET}))
        session = await runtime.execute(session.id, SendMessage(f"Pay with {SECRET}, please", loops))
        await store.search(SECRET)
        session = await runtime.execute(session.id, SendMessage("Hello", loops))
        session = await runtime.execute(session.id, TrimTranscript(2))
        session = await store.save(session, taken=1)
        session = await runtime.execute(session.id, SendMessage("Hello again", loops))
        session = await runtime.execute(session.id, TrimTranscript(2))
        if kind != "memory":
            assert SECRET.encode() in bytes_of(tmp_path)
        # The steps of the last run still name the messages that it was given.
        assert (await store.forget(session.id, before=session.version)).messages == 4
        assert SECRET.encode() not in bytes_of(tmp_path)
        assert await store.search(SECRET) == []
        record = await runtime.record(session.id)
        assert len(record.loops) == 2
        events = [event async for event in runtime.events(session.id)]
        assert {event.loop_id for event in events} == {loop.loop_id for loop in record.loops}
        assert (await fsck(store)).problems == ()


async def _told(store: Any) -> str:
    """Create a session with forks, a fork's fork, metadata and a compaction. Return its id; most can be forgotten."""
    session = await store.create(new_session("one", "two", id="s"))
    child = await store.create(say(fork(session, id="child"), "three"))
    await store.create(fork(child, id="grandchild"))
    session = await store.save(note(say(session, "four"), "state", "x" * 400))
    session = await store.save(show(session, session.state.transcript.reset()))
    await store.save(say(session, "five"))
    return "s"


async def _everything(store: Any) -> list[Any]:
    return [await store.dump(info.id, alone=True) for info in await store.list()]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_failure_at_any_statement_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Wherever it fails, every session is unchanged; once nothing fails, all is done."""
    place = (MemoryEngine, "_answer") if kind == "memory" else (_NotingRows, "answer_unindexed")
    real = getattr(*place)
    async with STORES[kind](tmp_path) as store:
        session_id = await _told(store)
        before = await _everything(store)
        failed, done = 0, None
        while done is None:
            left = failed + 1

            def answer(self: Any, statement: Statement) -> list[Any]:
                nonlocal left
                left -= 1
                if left == 0:
                    raise StoreError("the disk is full")
                return real(self, statement)  # type: ignore[no-any-return]  # what the engine answers

            with monkeypatch.context() as failing:
                failing.setattr(*place, answer)
                try:
                    done = await store.forget(session_id, before=4)
                except StoreError:
                    failed += 1
            if done is None:
                assert await _everything(store) == before
        assert failed > 40
        assert (done.versions, done.messages) == (3, 1)
        assert texts(await store.load("grandchild")) == ["one", "two", "three"]
        assert [*await store.check()] == []


def test_files_are_whole_wherever_a_process_is_killed(tmp_path: Path) -> None:
    """The versions are all there, or all forgotten; forks show what they showed, and gc clears up the rest."""
    asyncio.run(_prepare(tmp_path / "before"))
    command = [sys.executable, "-m", "tests.stores.killed", "forget", str(tmp_path)]
    steps = int(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    assert steps > 10
    outcomes = [asyncio.run(_outcome(tmp_path / str(step))) for step in range(1, steps + 1)]
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {False, True}


async def _prepare(where: Path) -> None:
    async with FileStore(where) as store:
        parent = await store.create(new_session("one", "two", id="parent"))
        child = await store.create(say(fork(parent, id="child"), "three"))
        await store.create(fork(child, id="grandchild"))
        gone = await store.create(new_session("elsewhere", id="gone"))
        parent = await store.save(show(parent, gone.state.transcript))
        await store.delete("gone")
        await store.save(say(show(parent, parent.state.transcript.reset()), "four"))


async def _outcome(where: Path) -> bool:
    """Return whether the first version was forgotten. Everything else is unchanged in either case."""
    async with FileStore(where) as store:
        assert texts(await store.load("parent", 3)) == ["four"]
        assert texts(await store.load("parent", 2)) == ["elsewhere"]
        assert texts(await store.load("grandchild")) == ["one", "two", "three"]
        try:
            assert texts(await store.load("parent", 1)) == ["one", "two"]
            is_forgotten = False
        except VersionForgotten:
            is_forgotten = True
        await store.gc()
        assert (await fsck(store)).problems == ()
        assert (await store.forget("parent", before=2)).versions == (0 if is_forgotten else 1)
        await store.delete("child")
        assert texts(await store.load("grandchild")) == ["one", "two", "three"]
        return is_forgotten


def test_what_a_log_has_for_others_is_erased_after_them(tmp_path: Path) -> None:
    """A fork whose erasure was killed shows all that it did, or is gone."""
    asyncio.run(_prepare(tmp_path / "before"))
    asyncio.run(_forget_before(tmp_path / "before"))
    command = [sys.executable, "-m", "tests.stores.killed", "delete-child", str(tmp_path)]
    steps = int(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    for step in range(1, steps + 1):
        asyncio.run(_is_whole(tmp_path / str(step)))


async def _forget_before(where: Path) -> None:
    async with FileStore(where) as store:
        await store.delete("grandchild")
        await store.forget("parent", before=3)


async def _is_whole(where: Path) -> None:
    async with FileStore(where) as store:
        if await store.exists("child"):
            assert texts(await store.load("child")) == ["one", "two", "three"]
        else:
            await store.gc()
            assert await store.search("one") == []
        assert texts(await store.load("parent")) == ["four"]
        assert (await fsck(store)).problems == ()


async def test_gc_removes_the_traces_that_a_killed_process_has_left_in_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between its commit and the scrubbing leaves text in the write-ahead log and the index."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session(f"code {SECRET}", "ok", id="s"))
        await store.save(show(session, session.state.transcript.trim(1)))
        await store.search(SECRET)
        with monkeypatch.context() as killing:

            async def die(*_: object) -> None:
                raise KeyboardInterrupt

            killing.setattr("perdure.stores.sqlite.engine.SqliteEngine._leave_no_trace", die)
            with pytest.raises(KeyboardInterrupt):
                await store.forget("s", before=2)
        assert SECRET.encode() in bytes_of(tmp_path)
        await store.gc()
        assert SECRET.encode() not in bytes_of(tmp_path)
        assert texts(await store.load("s")) == ["ok"]


async def test_a_session_that_forgets_needs_no_more_space(tmp_path: Path) -> None:
    """The pages of what was forgotten are used again, so the file does not grow."""
    path = tmp_path / "sessions.db"
    sizes = []
    async with SqliteStore(path) as store:
        session = await store.create(new_session(id="s"))
        for _ in range(6):
            for number in range(50):
                view = session.state.transcript.trim(4)
                session = await store.save(note(say(show(session, view), "x" * 500), "state", f"{number}" * 300))
            await store.forget("s", before=session.version)
            loaded = await store.load("s")
            assert loaded is not None
            session = loaded
            db = apsw.Connection(str(path))
            sizes.append(db.pragma("page_count") - db.pragma("freelist_count"))
            db.close()
    assert max(sizes[1:]) <= sizes[0] + 2


_KEPT = "log = (SELECT log FROM session WHERE id = 's')"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (f"DELETE FROM msg WHERE {_KEPT} AND pos = 3", "it is missing|they are missing"),
        (f"UPDATE ref SET start = 4 WHERE {_KEPT} AND child = (SELECT sid FROM session WHERE id = 's')", "not noted"),
        ("DELETE FROM head WHERE version = 3", "not numbered from 3 on|head 3"),
    ],
)
async def test_damage_is_told_from_what_was_forgotten(tmp_path: Path, damage: str, told: str) -> None:
    """A missing version or message that was not forgotten is still reported as damage."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await _told(store)
        await store.forget("s", before=3)
    db = apsw.Connection(str(path))
    db.execute(damage)
    db.close()
    async with SqliteStore(path) as store:
        problems = [f"{each.where}: {each.what}" for each in (await fsck(store)).problems]
        assert [each for each in problems if re.search(told, each)], problems


async def test_gc_erases_what_is_left_of_forgotten_versions(tmp_path: Path) -> None:
    """A process may be killed before it has erased messages that a fork was the last to show."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await _told(store)
        await store.forget("s", before=4)
        db = apsw.Connection(str(path))
        db.execute(f"DELETE FROM ref WHERE {_KEPT} AND child <> (SELECT sid FROM session WHERE id = 's')")
        db.execute("DELETE FROM session WHERE id <> 's'")
        db.close()
        assert "nobody shows them" in str([*await store.check()])
        assert await store.gc() == 2
        assert "nobody shows them" not in str([*await store.check()])
        assert texts(await store.load("s")) == ["five"]
