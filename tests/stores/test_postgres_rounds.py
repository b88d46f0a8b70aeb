"""How often the PostgreSQL store goes to the server, and that nobody waits for what does not concern him."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.stores.test_postgres import cut_off, schema, sql, store_in

from perdure import PostgresStore
from perdure.errors import SessionConflict, StoreError
from perdure.protocols import Entry
from perdure.stores.postgres import link, parcel
from perdure.testing.samples import fork, new_session, note, say, texts

__all__ = ["schema"]


@contextmanager
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The exchanges with the server within the block: statements, and where transactions begin and end."""
    made: list[object] = []

    def counting(kind: Any) -> Any:
        wait = kind.wait

        def counted(self: Any, gen: Any, *args: Any, **options: Any) -> Any:
            made.append(gen)
            return wait(self, gen, *args, **options)

        return counted

    with monkeypatch.context() as patch:
        for kind in (link.Impatient, link.ImpatientJob):
            patch.setattr(kind, "wait", counting(kind))
        yield made


async def test_waiting_looks_go_out_together(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many warm loads at once the first goes at once, and all others share the next round trip."""
    async with store_in(schema) as store, store_in(schema) as other:
        sessions = [await store.create(new_session(f"{n}", id=f"s{n}")) for n in range(20)]
        with round_trips(monkeypatch) as made:
            loaded = await asyncio.gather(*(store.load(session.id) for session in sessions))
        assert all(one is session for one, session in zip(loaded, sessions, strict=True))
        assert len(made) == 2
        await other.save(say(sessions[3], "moved on"))
        await other.delete("s4")
        loaded = await asyncio.gather(*(store.load(session.id) for session in sessions), store.load("nobody"))
        assert texts(loaded[3]) == ["3", "moved on"]
        assert [loaded[4], loaded[-1]] == [None, None]
        assert all(loaded[n] == sessions[n] for n in range(5, 20))


async def test_a_look_sees_what_was_written_before_it(schema: str) -> None:
    """However many are under way: a load after a save by another store sees that save."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session(id="s"))

        async def look() -> None:
            for _ in range(30):
                await store.load("s")

        looking = [asyncio.create_task(look()) for _ in range(8)]
        for turn in range(20):
            session = await other.save(say(session, f"{turn}"))
            seen = await store.load("s")
            assert seen is not None
            assert seen.version == session.version
        await asyncio.gather(*looking)


async def test_a_cancelled_look_takes_no_other_with_it(schema: str) -> None:
    """Neither the one that went first, nor one of those that wait together."""
    async with store_in(schema) as store:
        sessions = [await store.create(new_session(f"{n}")) for n in range(6)]
        for cancelled in (0, 3):
            loads = [asyncio.create_task(store.load(session.id)) for session in sessions]
            await asyncio.sleep(0)
            loads[cancelled].cancel()
            answers = await asyncio.gather(*loads, return_exceptions=True)
            assert isinstance(answers.pop(cancelled), asyncio.CancelledError)
            assert all(texts(answer) for answer in answers)
        assert texts(await store.load(sessions[0].id)) == ["0"]


async def test_looks_on_a_cut_connection_are_made_again(schema: str) -> None:
    """All that wait get their answer from a new connection."""
    async with store_in(schema) as store, sql(schema) as execute:
        sessions = [await store.create(new_session(f"{n}")) for n in range(6)]
        for _ in range(3):
            await cut_off(execute)
            loaded = await asyncio.gather(*(store.load(session.id) for session in sessions))
            assert loaded == sessions


async def test_a_failed_look_is_told_to_all_that_wait(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one looks again."""
    async with store_in(schema) as store, sql(schema) as execute:
        sessions = [await store.create(new_session(f"{n}")) for n in range(3)]
        await execute("ALTER TABLE meta RENAME TO away")
        answers = await asyncio.gather(*(store.load(each.id) for each in sessions), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreError] * 3
        await execute("ALTER TABLE away RENAME TO meta")
        assert await asyncio.gather(*(store.load(each.id) for each in sessions)) == sessions


@pytest.mark.parametrize("pool", [1, 2, 3])
async def test_a_small_pool_does_all_the_same(schema: str, pool: int) -> None:
    """With one connection for everything, and no more of them than were asked for."""
    async with store_in(schema, pool=pool) as store, sql(schema) as execute:
        parent = await store.create(new_session("a"))
        saves = [store.create(fork(parent)) for _ in range(4)]
        loads = [store.load(parent.id) for _ in range(4)]
        await asyncio.gather(
            *saves, *loads, store.save(say(parent, "b")), store.list(), store.post(parent.id, Entry("x"))
        )
        assert texts(await store.load(parent.id)) == ["a", "b"]
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure ' || current_schema()"
        assert await execute(asked) == [(pool,)]


async def test_new_sessions_are_one_round_trip_each(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for now and then one, which fetches numbers for some more."""
    async with store_in(schema) as store:
        with round_trips(monkeypatch) as made:
            for n in range(34):
                await store.create(new_session(id=f"s{n}"))
        assert len(made) == 34 + 2
        assert len(await store.list()) == 34


async def test_a_batch_does_not_wait_for_a_session_that_is_locked(schema: str) -> None:
    """The saves beside it are made at once; it waits by itself, and is made when it can be."""
    async with store_in(schema) as store, sql(schema) as execute:
        locked, *others = [await store.create(new_session(id=f"s{n}")) for n in range(5)]
        await execute("BEGIN")
        await execute("SELECT 1 FROM session WHERE id = 's0' FOR UPDATE")
        waiting = asyncio.create_task(store.save(say(locked, "waits")))
        async with asyncio.timeout(20):
            saved = await asyncio.gather(*(store.save(say(each, "goes")) for each in others))
            child = await store.create(fork(saved[0]))
            assert texts(child) == ["goes"]
        assert not waiting.done()
        behind = asyncio.create_task(store.save(note(locked, "by", "another")))
        await asyncio.sleep(0.05)
        await execute("COMMIT")
        assert texts(await waiting) == ["waits"]
        with pytest.raises(SessionConflict):
            await behind
        assert texts(await store.load("s0")) == ["waits"]


async def test_a_change_aside_that_somebody_has_cancelled_is_told(schema: str) -> None:
    """Like one in the batch; what waits behind it is made."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a"))
        await execute("BEGIN")
        await execute("SELECT 1 FROM session FOR UPDATE")
        saves = [asyncio.create_task(store.save(say(session, text))) for text in "bc"]
        (aside,) = await _tasks_aside(store)
        aside.cancel()
        async with asyncio.timeout(20):
            with pytest.raises(StoreError, match="cancelled"):
                await saves[0]
            await execute("ROLLBACK")
            assert texts(await saves[1]) == ["a", "c"]


async def _tasks_aside(store: PostgresStore) -> list[asyncio.Task[None]]:
    async with asyncio.timeout(20):
        while not (found := list(store._engine.opened.writer._tasks_aside)):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
    return found


async def test_a_save_that_is_cut_off_aside_is_made_once(schema: str) -> None:
    """Its connection is lost while it waits for a lock."""
    async with store_in(schema) as store, sql(schema) as execute, sql(schema) as beside:
        session = await store.create(new_session("a"))
        await execute("BEGIN")
        await execute("SELECT 1 FROM session FOR UPDATE")
        saving = asyncio.create_task(store.save(say(session, "b")))
        await _tasks_aside(store)
        await cut_off(beside)
        await asyncio.sleep(0.1)
        await execute("ROLLBACK")
        assert (await saving).version == 2
        assert texts(await store.load(session.id)) == ["a", "b"]


def test_a_statement_has_only_what_its_rows_need() -> None:
    """A table that is named costs time, though no row goes there."""
    plain = parcel.statement(frozenset({"head", "messages", "together"}))
    assert "INSERT INTO msg" in plain
    for other in ("claimed", "run ", "batch ", "key ", "tag ", "value ", "uses ", "ref "):
        assert f"INSERT INTO {other}" not in plain
    whole = parcel.statement(parcel._PARTS)
    assert whole.count("INSERT INTO") == 13
    assert "SKIP LOCKED" not in whole
