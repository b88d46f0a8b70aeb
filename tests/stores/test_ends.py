"""Loads of the end of a view, and what a store has in memory without waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

from perdure import (
    AgentDefinition,
    AgentSession,
    FileStore,
    ForkSession,
    InvalidData,
    MemoryStore,
    Message,
    NotLoaded,
    SessionRuntime,
    SqliteStore,
)
from perdure.archive import fsck
from perdure.stores.postgres import PostgresStore
from perdure.stores.store import Store


@pytest.fixture(params=["memory", "file", "sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        kept = MemoryStore()
        return lambda: kept
    if request.param == "file":
        return lambda: FileStore(tmp_path / "store")
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "store.db")
    return lambda: PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path))


@asynccontextmanager
async def filled(make: Any, count: int) -> AsyncIterator[Store]:
    """Yield a store with a session "a" of `count` messages, none of which is in memory."""
    async with make() as store:
        session = await SessionRuntime(store).create(AgentDefinition("toy"), session_id="a")
        for start in range(0, count, 10):
            session = await store.save(added(session, *range(start, min(count, start + 10))))
        store.evict("a")
        yield store


def added(session: AgentSession, *numbers: int) -> AgentSession:
    return session.with_state(session.state.with_messages(*(Message.user(str(number)) for number in numbers)))


def texts(session: AgentSession | None) -> list[str]:
    assert session is not None
    return [message.text for message in session.state.messages]


async def loaded(store: Store, last: int | None) -> AgentSession:
    session = await store.load("a", last=last)
    assert session is not None
    return session


async def test_the_end_is_read_and_the_rest_is_not(make: Any) -> None:
    """The view has its length. Its last messages can be read, and the others raise NotLoaded."""
    async with filled(make, 40) as store:
        view = (await loaded(store, 5)).state.transcript
        assert (len(view), [message.text for message in view[-5:]]) == (40, ["35", "36", "37", "38", "39"])
        with pytest.raises(NotLoaded):
            list(view)
        assert texts(await store.load("a")) == [str(number) for number in range(40)]
        if not isinstance(store, FileStore):  # which keeps nothing in memory
            assert texts(await loaded(store, 5)) == [str(number) for number in range(40)]


async def test_a_longer_end_is_read_without_the_rest(make: Any) -> None:
    """A longer end is read even if a shorter one is in memory, also for a fork whose messages are in another's log."""
    async with filled(make, 40) as store:
        fork = await ForkSession(dst="b").execute_on(await loaded(store, None))
        await store.create(fork)
        for name in ("a", "b"):
            store.evict(name)
            for last in (1, 5):
                session = await store.load(name, last=last)
                assert session is not None
                view = session.state.transcript
                assert [message.text for message in view[-last:]] == [str(number) for number in range(40 - last, 40)]
                with pytest.raises(NotLoaded):
                    list(view)


async def test_what_is_appended_to_an_end_is_saved(make: Any) -> None:
    """A save puts new messages behind those that were never read, in any number of versions."""
    async with filled(make, 40) as store:
        for number in range(40, 45):
            kept = await store.save(added(await loaded(store, number % 3), number), whole=False)
            assert len(kept.state.transcript) == number + 1
        store.evict("a")
        assert texts(await store.load("a")) == [str(number) for number in range(45)]
        assert (await fsck(store)).problems == ()


async def test_a_save_returns_the_whole_session_unless_told_otherwise(make: Any) -> None:
    """A save reads the messages that were not loaded, and returns all of them."""
    async with filled(make, 20) as store:
        assert texts(await store.save(added(await loaded(store, 0), 20))) == [str(number) for number in range(21)]


async def test_an_end_that_begins_in_a_block_is_read_with_all_before_it(make: Any) -> None:
    """A compaction's summary is read as a whole, so that the caller gets at least the number asked for."""
    async with filled(make, 20) as store:
        session = await loaded(store, None)
        shown = [Message.user(f"short {number}") for number in range(4)]
        view = session.state.transcript.cover(5, 18, shown, by="test")
        await store.save(session.with_state(session.state.with_transcript(view)))
        for last in range(12):
            store.evict("a")
            found = (await loaded(store, last)).state.transcript
            assert [message.text for message in found[11 - min(last, 11) :]] == (
                [*map(str, range(5)), *(f"short {number}" for number in range(4)), "18", "19"][11 - min(last, 11) :]
            )


async def test_ends_and_wholes_agree(make: Any) -> None:
    """Changes made through ends of a view give the same view as a full load, whether they append, cut or fork."""
    chance = random.Random(7)
    async with filled(make, 30) as store:
        expected = [str(number) for number in range(30)]
        for step in range(30):
            if chance.random() < 0.4:
                store.evict("a")
            session = await loaded(store, chance.randrange(4))
            if chance.random() < 0.3 and len(expected) > 5:
                view = session.state.transcript
                session = session.with_state(session.state.with_transcript(view.cut(0, len(view) - 2)))
                expected = expected[:-2]
            else:
                session = added(session, 100 + step)
                expected.append(str(100 + step))
            await store.save(session, whole=False)
            if chance.random() < 0.3:
                assert texts(await store.load("a")) == expected
        fork = await ForkSession(dst="b").execute_on(await loaded(store, 2))
        await store.create(fork)
        store.evict("b")
        assert texts(await store.load("b")) == expected
        assert (await fsck(store)).problems == ()


async def test_what_was_erased_is_not_at_hand(make: Any) -> None:
    """After an erasure in the store, an end is read again."""
    async with filled(make, 20) as store:
        session = await loaded(store, 3)
        await store.redact("a", [session.state.transcript[-1].id], replacement="gone")
        assert store.glance("a", last=3) is None or texts(store.glance("a"))[-1] == "gone"
        assert (await loaded(store, 3)).state.transcript[-1].text == "gone"


async def test_a_number_that_is_none_is_refused(make: Any) -> None:
    """`last` has to be a whole number of 0 or more."""
    async with filled(make, 1) as store:
        for last in (-1, 1.5, "3"):
            with pytest.raises(InvalidData):
                await store.load("a", last=last)  # type: ignore[arg-type]


async def test_a_glance_is_of_the_newest_version(tmp_path: Path) -> None:
    """It returns what is in memory as long as nobody else has saved, and never waits."""
    async with (
        filled(lambda: SqliteStore(tmp_path / "store.db"), 10) as store,
        SqliteStore(tmp_path / "store.db") as other,
    ):
        assert store.glance("a") is None
        session = await loaded(store, 4)
        assert store.glance("a") is None
        assert store.glance("a", last=4) is session
        assert await asyncio.to_thread(store.glance, "a", last=2) is session
        there = await other.load("a")
        assert there is not None
        await other.save(added(there, 10))
        assert store.glance("a", last=2) is None
        assert texts(await store.load("a"))[-1] == "10"
        assert texts(store.glance("a"))[-1] == "10"
    assert store.glance("a") is None
