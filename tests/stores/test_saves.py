"""The effects of a save, in memory and in tables."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import apsw
import pytest

from perdure.model import ids
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.value import ErrorRecord
from perdure.protocols import Entry, Key
from perdure.stores.engine import TABLES
from perdure.stores.file import FileStore
from perdure.stores.jobs.saving import Append, Change, Draft, Keep
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, run_of, say, seen


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_a_save_leaves_nothing_to_the_garbage_collector(kind: str, tmp_path: Path) -> None:
    """A change is freed when the caller has its answer: with many saves, cycles would cost a fifth of the time."""
    makers = {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path / "sessions"),
        "sqlite": lambda: SqliteStore(tmp_path / "sessions.db"),
    }
    gc.collect()
    gc.disable()
    try:
        async with makers[kind]() as store:
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=session.version, owner="me")
            await store.append(claim)
            await store.save(say(session, "Hello again"), claim=claim)
        assert not [each for each in gc.get_objects() if isinstance(each, Change)]
    finally:
        gc.enable()


@pytest.mark.parametrize("commit_in_loop", [False, True])
async def test_what_is_written_out_is_what_the_job_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_in_loop: bool
) -> None:
    """SQLite's short ways for plain saves and appends leave the same rows as the general way."""
    short = await rows_of_varied_saves(tmp_path / "short.db", commit_in_loop)
    is_plain, plain = Keep.is_plain, set[bool]()
    is_plain_append, plain_appends = cast(property, Append.is_plain).fget, set[bool]()
    assert is_plain_append is not None

    def noted(self: Keep, draft: Draft) -> bool:
        plain.add(is_plain(self, draft))
        return False

    def noted_append(self: Append) -> bool:
        plain_appends.add(is_plain_append(self))
        return False

    monkeypatch.setattr(Keep, "is_plain", noted)
    monkeypatch.setattr(Append, "is_plain", property(noted_append))
    long = await rows_of_varied_saves(tmp_path / "long.db", commit_in_loop)
    assert plain == plain_appends == {True, False}, "both kinds of each are tried"
    assert short == long


async def rows_of_varied_saves(path: Path, commit_in_loop: bool) -> dict[str, list[Any]]:
    with replaced_clock_and_ids():
        async with SqliteStore(path, commit_in_loop=commit_in_loop) as store:
            await varied_saves(store)
    return rows_in(path)


async def varied_saves(store: SqliteStore) -> None:
    one, two = await asyncio.gather(store.create(new_session("Hello")), store.create(new_session("Hi")))
    for number in range(3):
        one, two = await asyncio.gather(store.save(say(one, str(number), "more")), store.save(say(two, str(number))))
    one = await store.save(one)
    one = await store.save(one.with_tags(["new"]))
    one = await store.save(one.with_status(SessionStatus.SUSPENDED))
    store.evict(two.id)
    loaded = await store.load(two.id)
    assert loaded is not None
    two = await store.save(say(loaded, "after a load"))
    two = await store.save(say(two, "with a key"), key=Key("name", "digest"))
    claim, _ = await store.claim(two.id, version=two.version, owner="me")
    two = await store.save(say(two, "under a claim"), claim=claim)
    two = await recorded_run(store, two)
    forked = await store.create(two.forked(SessionId.generate(), two.state))
    forked = await store.save(say(forked, "in a fork"))
    await store.save(say(forked, "again in it"))


async def recorded_run(store: SqliteStore, session: AgentSession) -> AgentSession:
    """Return a session with a run that was written ahead: with its messages and entries, neither, or beside others."""
    begun = [Entry("agent_start", {"seq": 1}, "run-1"), Entry("turn_start", {"seq": 2}, "run-1")]
    asked = Message.user("And now?")
    claim, first = await store.claim(session.id, version=session.version, owner="me", messages=[asked], entries=begun)
    await store.append(claim, entries=[Entry("turn_end", {"seq": 3}, "run-1")])
    second = await store.append(claim, messages=[Message.assistant("It is late.")])
    await store.append(claim, entries=[Entry("note", {}), Entry("turn_start", {}, "run-1"), Entry("note", {}, "other")])
    await store.append(claim, messages=[Message.user("In a branch")], entries=begun[:1], log="branch")
    ended = [Entry("agent_end", {"seq": 4}, "run-1")]
    written = {**first.written, **second.written}
    return await store.save(say(session, "The end"), claim=claim, written=written, entries=ended)


async def test_a_new_run_stands_in_its_version_and_later_versions_name_it(tmp_path: Path) -> None:
    """A run gets a row of its own only when a second version has it. Each version loads with it."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        created = await store.create(new_session("Where is order 7?"))
        ran = await store.save(run_of(created))
        assert values_of(path) == 1, "the definition"
        later = await store.save(say(ran, "Thanks"))
        await store.save(say(later, "Bye"))
        assert values_of(path) == 2, "and the run, once for both"
    async with SqliteStore(path) as store:
        loaded = [await store.load(created.id, version) for version in (2, 3, 4)]
    runs = [each.state.execution for each in map(seen, loaded)]
    assert runs[0] is not None
    assert runs == [seen(ran).state.execution] * 3


async def test_what_a_run_said_is_redacted_where_it_stands_in_its_version(tmp_path: Path) -> None:
    """A redaction reaches a run within a head, as it reaches a run that is named by hash."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("The code is 4711"))
        state = session.state.with_execution_started()
        assert state.execution is not None
        failed = state.execution.with_error(ErrorRecord("ToolError", "cannot read: The code is 4711"))
        await store.save(session.with_state(state.with_execution(failed.ended(ExecutionStatus.FAILED))))
        assert values_of(path) == 1, "the run stands in its head"
        await store.redact(session.id, [session.state.messages[0].id])
        loaded = [await store.load(session.id, version) for version in (1, 2, 3)]
    assert all(each is not None and "4711" not in str(each.to_dict()) for each in loaded)


def values_of(path: Path) -> int:
    db = apsw.Connection(str(path))
    ((count,),) = db.execute("SELECT count(*) FROM value").fetchall()
    db.close()
    return int(count)  # type: ignore[arg-type]  # as SQLite counts


@contextmanager
def replaced_clock_and_ids() -> Iterator[None]:
    numbers = itertools.count(1)
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def clock() -> datetime:
        return start + timedelta(seconds=next(numbers))

    with ids.use(clock=clock, ids=lambda: f"id-{next(numbers):012}"):
        yield


def rows_in(path: Path) -> dict[str, list[Any]]:
    """Return all rows of all tables, without the parts that differ from file to file or from process to process."""
    db = apsw.Connection(str(path))
    found = {}
    for name, table in TABLES.items():
        columns = ", ".join(table.columns)
        found[name] = db.execute(f"SELECT {columns} FROM {name} ORDER BY {columns}").fetchall()
    db.close()
    del found["meta"]
    return found
