"""A backup is one state of a whole store; what is restored is that state, and damage never passes for a backup."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server, stories
from tests.stories import opened

from perdure import (
    AgentDefinition,
    ConfigurationError,
    FileStore,
    InjectMessage,
    InvalidData,
    MemoryStore,
    Message,
    PostgresStore,
    SessionConflict,
    SessionRuntime,
    SqliteStore,
    StoreError,
    connect,
)
from perdure.archive import fsck
from perdure.archive.backups import packs
from perdure.backups import Backup, backup, list_backups, restore, verify_backups
from perdure.errors import BackupDamaged, BackupNotFound, RestoreUnfinished, StoreNotEmpty
from perdure.model.ids import SessionId, use
from perdure.model.session import SessionStatus
from perdure.protocols import Change
from perdure.stores.jobs.archive.archived import is_same
from perdure.testing import FrozenClock
from perdure.testing.samples import new_session

KINDS = ("file", "sqlite", "postgres")


def closed(kind: str, where: Path) -> Any:
    """Return a store that is not open."""
    if kind == "sqlite":
        return SqliteStore(where / "sessions.db")
    if kind == "postgres":
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
    return FileStore(where / "sessions")


async def told(kind: str, where: Path) -> None:
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(kind, where) as store:
            await stories.tell(store, clock)


async def ids(store: Any) -> set[str]:
    pages = [await store.list(limit=1000), await store.list(limit=1000, status=SessionStatus.DELETED)]
    return {info.id for page in pages for info in page}


async def say(store: Any, session_id: str, *texts: str) -> int:
    runtime = SessionRuntime(store)
    return (await runtime.execute(session_id, InjectMessage(*map(Message.user, texts)))).version


async def begun(store: Any, session_id: str, *texts: str) -> None:
    await SessionRuntime(store).create(AgentDefinition("talker"), session_id=session_id)
    await say(store, session_id, *texts)


async def texts(store: Any, session_id: str) -> list[str]:
    session = await store.load(session_id)
    assert session is not None
    return [message.text for message in session.state.messages]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_store_has_every_session_as_it_was(kind: str, tmp_path: Path) -> None:
    """Versions, forks, hidden and interrupted sessions, keys, timers, tokens and files come back, and nothing is wrong."""
    await told(kind, tmp_path / "a")
    async with opened(kind, tmp_path / "a") as store:
        made = (await backup(store, tmp_path / "backups")).backup
        expected = {each: await store.dump(each) for each in await ids(store) if not await store.is_claimed(each)}
        tokens, timers, running = await store.tokens(), await store.timers(), {run.session_id for run in await store.running()}
    report = await restore(tmp_path / "backups", closed(kind, tmp_path / "b"), verify=True)
    assert (report.backup, report.is_verified, report.problems) == (made, True, ())
    assert report.lapsed == len(running) > 0
    async with opened(kind, tmp_path / "b") as store:
        assert await ids(store) >= expected.keys()
        for session_id, archived in expected.items():
            assert is_same(archived, await store.dump(session_id)), session_id
        assert list(await store.tokens()) == list(tokens)
        assert [(each.name, each.due) for each in await store.timers()] == [(each.name, each.due) for each in timers]
        assert {*await store.lapsed()} >= running
        await say(store, "talk", "It goes on.")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_backup_adds_what_has_changed(kind: str, tmp_path: Path) -> None:
    """Each backup is whole by itself, though the second writes little; a restore by id or time gives each state."""
    async with opened(kind, tmp_path / "a") as store:
        for number in range(20):
            await begun(store, f"s{number}", *(os.urandom(2000).hex() for _ in range(10)))
        first = (await backup(store, tmp_path / "backups")).backup
        await say(store, "s3", "one turn")
        second = (await backup(store, tmp_path / "backups")).backup
        await begun(store, "later", "hello")
        third = (await backup(store, tmp_path / "backups")).backup
    assert 0 < second.added < first.added / 5
    assert [each.id for each in await list_backups(tmp_path / "backups")] == [first.id, second.id, third.id]
    for number, (at, version, is_there) in enumerate(
        [(first.id, 2, False), (second.id, 3, False), (second.at + timedelta(microseconds=1), 3, False), (None, 3, True)]
    ):
        where = tmp_path / f"restored-{number}"
        await restore(tmp_path / "backups", closed(kind, where), at=at)
        async with opened(kind, where) as store:
            session = await store.load("s3")
            assert session is not None
            assert session.version == version
            assert await store.exists("later") is is_there


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_store_can_be_backed_up_again(kind: str, tmp_path: Path) -> None:
    """It is the same store: its backups go on in the same series, and share what is the same."""
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "x" * 100_000)
        first = (await backup(store, tmp_path / "backups")).backup
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"))
    async with opened(kind, tmp_path / "b") as store:
        await say(store, "s", "after")
        second = (await backup(store, tmp_path / "backups")).backup
    assert second.store == first.store
    await restore(tmp_path / "backups", closed(kind, tmp_path / "c"), verify=True)
    async with opened(kind, tmp_path / "c") as store:
        assert (await texts(store, "s"))[-1] == "after"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restore_writes_over_nothing(kind: str, tmp_path: Path) -> None:
    """A store that has sessions is refused and stays as it is; an empty one is filled."""
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "old")
        await backup(store, tmp_path / "backups")
        await say(store, "s", "new")
    with pytest.raises(StoreNotEmpty) as refused:
        await restore(tmp_path / "backups", closed(kind, tmp_path / "a"))
    assert refused.value.sessions == 1
    async with opened(kind, tmp_path / "a") as store:
        assert await texts(store, "s") == ["old", "new"]
    async with opened(kind, tmp_path / "b") as store:
        assert await ids(store) == set()
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"))
    async with opened(kind, tmp_path / "b") as store:
        assert await texts(store, "s") == ["old"]
