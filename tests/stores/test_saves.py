"""What a save leaves behind, in memory and in tables."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.model import ids
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.protocols import Key
from perdure.stores.engine import TABLES
from perdure.stores.file import FileStore
from perdure.stores.jobs.saving import Change, Draft, Keep
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, say


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_a_save_leaves_nothing_to_the_garbage_collector(kind: str, tmp_path: Path) -> None:
    """What was to be changed goes when the caller has its answer: where many save, cycles would cost a fifth."""
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
    """SQLite's short way for a plain save leaves the same rows as the way that every save can go."""
    short = await rows_of_varied_saves(tmp_path / "short.db", commit_in_loop)
    is_plain, plain = Keep.is_plain, set[bool]()

    def noted(self: Keep, draft: Draft) -> bool:
        plain.add(is_plain(self, draft))
        return False

    monkeypatch.setattr(Keep, "is_plain", noted)
    long = await rows_of_varied_saves(tmp_path / "long.db", commit_in_loop)
    assert plain == {True, False}, "both kinds of save are tried"
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
    forked = await store.create(two.forked(SessionId.generate(), two.state))
    forked = await store.save(say(forked, "in a fork"))
    await store.save(say(forked, "again in it"))


@contextmanager
def replaced_clock_and_ids() -> Iterator[None]:
    numbers = itertools.count(1)
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def clock() -> datetime:
        return start + timedelta(seconds=next(numbers))

    with ids.use(clock=clock, ids=lambda: f"id-{next(numbers):012}"):
        yield


def rows_in(path: Path) -> dict[str, list[Any]]:
    """Return all rows of all tables, without what differs from file to file or from process to process."""
    db = apsw.Connection(str(path))
    found = {}
    for name, table in TABLES.items():
        columns = ", ".join(table.columns)
        found[name] = db.execute(f"SELECT {columns} FROM {name} ORDER BY {columns}").fetchall()
    db.close()
    del found["meta"]
    return found
