"""A store that fails on demand, and a clock that stands still."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from perdure.errors import InvalidData, StoreError
from perdure.model import ids
from perdure.protocols import Journal, SessionStore
from perdure.stores.memory import MemoryStore
from perdure.testing import FailingStore, FrozenClock
from perdure.testing.samples import new_session, say


async def test_a_fault_strikes_the_call_it_was_meant_for() -> None:
    """The n-th call after it was set fails, before anything is done; those before and after pass."""
    async with FailingStore(MemoryStore()) as store:
        session = await store.create(new_session("Hello"))
        store.fail("save", call=2)
        session = await store.save(session)
        with pytest.raises(StoreError, match="told to fail"):
            await store.save(session)
        assert (await store.save(session)).version == 3
        assert store.calls == {"create": 1, "save": 3}


async def test_a_fault_may_strike_after_the_fact() -> None:
    """The work is done, and its answer is lost."""
    async with FailingStore(MemoryStore()) as store:
        session = await store.create(new_session("Hello"))
        store.fail("save", error=ConnectionResetError("gone"), after=True)
        with pytest.raises(ConnectionResetError):
            await store.save(say(session, "more"))
        loaded = await store.load(session.id)
        assert loaded is not None
        assert loaded.version == 2


async def test_every_call_may_fail_until_the_store_is_healed() -> None:
    """`call=None` means each call, and `heal` ends it."""
    async with FailingStore(MemoryStore()) as store:
        store.fail("exists", call=None)
        for _ in range(3):
            with pytest.raises(StoreError):
                await store.exists("anything")
        store.heal()
        assert await store.exists("anything") is False


async def test_a_call_may_take_longer() -> None:
    """A delayed call can be overtaken."""
    async with FailingStore(MemoryStore()) as store:
        session = await store.create(new_session("Hello"))
        store.delay("load", 0.05)
        order = []

        async def load(name: str) -> None:
            await store.load(session.id)
            order.append(name)

        await asyncio.gather(load("first"), load("second"))
        assert order == ["second", "first"]


def test_it_is_what_it_stands_before() -> None:
    """It is a journal if the store is one, and a verb that the store lacks cannot be made to fail."""

    class Plain:
        create = save = load = exists = delete = list = MemoryStore.exists

    store = FailingStore(Plain())
    assert isinstance(store, SessionStore)
    assert not isinstance(store, Journal)
    assert isinstance(FailingStore(MemoryStore()), Journal)
    with pytest.raises(InvalidData, match="append"):
        store.fail("append")


def test_a_frozen_clock_moves_when_told() -> None:
    """It moves only with `advance`, and by a tick at each reading if it has one."""
    clock = FrozenClock()
    start = datetime(2025, 1, 1, tzinfo=UTC)
    assert [clock(), clock(), clock.advance(60), clock()] == [start, start, *[start + timedelta(seconds=60)] * 2]
    ticking = FrozenClock(start, tick=0.5)
    assert [ticking(), ticking()] == [start + timedelta(seconds=0.5), start + timedelta(seconds=1)]
    with ids.use(clock=clock):
        assert new_session().info.created_at == clock()
