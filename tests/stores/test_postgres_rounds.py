"""Round trips of the PostgreSQL store: few for each verb, and no request waits for another that does not concern it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.stores.test_postgres import cut_off, schema, sql, store_in

from perdure import PostgresStore
from perdure.errors import SessionConflict, StoreError
from perdure.model.message import Message, ToolCall
from perdure.protocols import Entry
from perdure.stores.engine import Insert, Job
from perdure.stores.postgres import link, parcel
from perdure.testing.samples import fork, new_session, note, say, tell, texts

__all__ = ["schema"]


@contextmanager
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Yield the list of exchanges with the server within the block: statements, and the ends of transactions."""
    made: list[object] = []

    def noting(gen: Any) -> Any:
        try:
            wanted = next(gen)
            made.append(gen)  # an exchange without anything for the server does not come here
            while True:
                wanted = gen.send((yield wanted))
        except StopIteration as done:
            return done.value

    def counting(kind: Any) -> Any:
        wait = kind.wait
        return lambda self, gen, *args, **options: wait(self, noting(gen), *args, **options)

    with monkeypatch.context() as patch:
        for kind in (link.Impatient, link.ImpatientJob):
            patch.setattr(kind, "wait", counting(kind))
        yield made


async def test_waiting_looks_go_out_together(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many warm loads at once, the first is sent at once, and all others share the next round trip."""
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
    """A load sees a save that another store made before it, however many loads are under way."""
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
    """The other looks get their answers, whether the first one or one that waits is cancelled."""
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
    """All waiting loads get their answer from a new connection."""
    async with store_in(schema) as store, sql(schema) as execute:
        sessions = [await store.create(new_session(f"{n}")) for n in range(6)]
        for _ in range(3):
            await cut_off(execute)
            loaded = await asyncio.gather(*(store.load(session.id) for session in sessions))
            assert loaded == sessions


async def test_a_failed_look_is_told_to_all_that_wait(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All waiting loads raise StoreError, and the next ones succeed."""
    async with store_in(schema) as store, sql(schema) as execute:
        sessions = [await store.create(new_session(f"{n}")) for n in range(3)]
        await execute("ALTER TABLE meta RENAME TO away")
        answers = await asyncio.gather(*(store.load(each.id) for each in sessions), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreError] * 3
        await execute("ALTER TABLE away RENAME TO meta")
        assert await asyncio.gather(*(store.load(each.id) for each in sessions)) == sessions


@pytest.mark.parametrize("pool", [1, 2, 3, 4])
async def test_a_small_pool_does_all_the_same(schema: str, pool: int) -> None:
    """A pool of few connections is enough for all verbs, and no more are opened."""
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


async def test_a_large_crowd_shares_two_connections(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saves are a few statements; a second save of a session waits for the first, on either connection."""
    async with store_in(schema) as store:
        sessions = [await store.create(new_session(id=f"s{n}")) for n in range(70)]
        with round_trips(monkeypatch) as made:
            saved = await asyncio.gather(*(store.save(say(session, "one")) for session in sessions))
        assert len({id(gen) for gen in made}) <= 5
        assert all(texts(session) == ["one"] for session in saved)
        again = [store.save(say(session, text)) for text in ("two", "late") for session in saved]
        answers = await asyncio.gather(*again, return_exceptions=True)
        assert all(isinstance(answer, SessionConflict) for answer in answers[70:])
        for n in range(70):
            assert texts(await store.load(f"s{n}")) == ["one", "two"]


async def test_new_sessions_are_one_round_trip_each(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a second round trip fetches numbers for the next sessions."""
    async with store_in(schema) as store:
        with round_trips(monkeypatch) as made:
            for n in range(34):
                await store.create(new_session(id=f"s{n}"))
        assert len(made) == 34 + 2
        assert len(await store.list()) == 34


async def test_a_batch_does_not_wait_for_a_session_that_is_locked(schema: str) -> None:
    """The other saves of the batch are made at once; the locked one waits by itself."""
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
    """It raises StoreError. The change behind it is made, unless the server had begun with the first."""
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
            (behind,) = await asyncio.gather(saves[1], return_exceptions=True)
        made = texts(await store.load(session.id))
        assert made == (["a", "b"] if isinstance(behind, SessionConflict) else ["a", "c"])


async def _tasks_aside(store: PostgresStore) -> list[asyncio.Task[None]]:
    async with asyncio.timeout(20):
        while not (found := list(store._engine.opened.writer._tasks_aside)):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
    return found


async def test_a_save_that_is_cut_off_aside_is_made_once(schema: str) -> None:
    """Its connection is cut while it waits for a lock."""
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


async def test_reads_of_the_record_are_one_round_trip_each(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part of a record takes one round trip, however many runs there are; so do the inbox, a log's end, a list."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a", "b", id="s"))
        for run in ("r1", "r2\\", "r3"):
            claim, _ = await store.claim("s", version=session.version, owner="ann", entries=[Entry("start", run=run)])
            await store.append(claim, entries=[Entry("on", {"n": 1}, run=run), Entry("on", {"n": 2})])
            session = await store.save(session, claim=claim, entries=[Entry("end", run=run)])
        for number in range(1, 4):
            assert await store.post("s", Entry("steer", run="r1")) == number

        async def numbers(**asked: Any) -> list[int]:
            with round_trips(monkeypatch) as made:
                found = await store.read("s", **asked)
            assert len(made) == 1, asked
            return [entry.seq for entry in found]

        assert await numbers() == [*range(1, 13)]
        assert await numbers(after=5) == [*range(6, 13)]
        assert await numbers(after=3, limit=4) == [4, 5, 6, 7]
        assert await numbers(last=2) == [11, 12]
        assert await numbers(after=11, last=5) == [12]
        assert await numbers(after=50) == []
        assert await numbers(run="r2\\") == [5, 6, 8]
        assert await numbers(run="r2\\", after=5, limit=1) == [6]
        assert await numbers(run="r2\\", last=1) == [8]
        assert await numbers(inbox=True) == [1, 2, 3]
        assert await numbers(inbox=True, after=1, limit=1) == [2]
        with round_trips(monkeypatch) as made:
            runs = await store.runs("s")
            assert [(run.loop_id, run.first.seq, run.last.seq) for run in runs] == [
                ("r1", 1, 4),
                ("r2\\", 5, 8),
                ("r3", 9, 12),
            ]
            assert await store.runs("s", limit=2) == runs[1:]
            assert await store.runs("s", limit=1, before=9) == runs[1:2]
            assert await store.runs("s", run="r2\\") == runs[1:2]
            assert await store.runs("s", run="nobody's") == []
            assert await store.log_of("s") == (session.state.transcript.pieces[0].tape.ref, 2)
            assert len(await store.list()) == 1
            assert await store.post("s", Entry("steer")) == 4
        assert len(made) == 8


async def test_a_note_is_five_exchanges(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note takes five exchanges, however many entries and runs it has, and the next append is not sent twice."""
    async with store_in(schema) as store:
        await store.create(new_session(id="s"))
        claim, _ = await store.claim("s", version=1, owner="ann", entries=[Entry("start", run="r")])
        with round_trips(monkeypatch) as made:
            await store.note("s", [Entry("noted", [number], f"task-{number % 3}") for number in range(20)])
        assert len(made) == 5
        with round_trips(monkeypatch) as made:
            assert (await store.append(claim, entries=[Entry("on", run="r")])).seq == 22
        assert len(made) == 1


def test_a_statement_has_only_what_its_rows_need() -> None:
    """A table that a statement names costs time, even if no row goes there."""
    plain = parcel.statement(frozenset({"head", "messages", "together"}))
    assert "INSERT INTO msg" in plain
    for other in ("claimed", "run ", "batch ", "key ", "tag ", "value ", "uses ", "ref "):
        assert f"INSERT INTO {other}" not in plain
    whole = parcel.statement(parcel.PARTS)
    assert whole.count("INSERT INTO") == 15
    assert "SKIP LOCKED" in whole
    assert "SKIP LOCKED" not in parcel.statement(parcel.PARTS - {"together"})


async def test_messages_are_brought_in_many_at_a_time(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 messages take three statements, and make three stretches for the search index."""
    async with store_in(schema) as store, store_in(f"{schema}_b") as other, sql(f"{schema}_b") as execute:
        session = await store.create(new_session(*(f"message {n}" for n in range(2_500))))
        archived = await store.dump(session.id)
        sent: list[str] = []
        fetched = link._fetched_at_once

        def noting(connection: Any, query: str, values: Any) -> list[Any]:
            sent.append(query)
            return fetched(connection, query, values)

        monkeypatch.setattr(link, "_fetched_at_once", noting)
        assert await other.restore(archived)
        assert sum("INSERT INTO msg" in query for query in sent) == 3
        stretches = [(0, 1_000), (1_000, 2_000), (2_000, 2_500)]
        assert await execute("SELECT start, stop FROM unindexed ORDER BY start") == stretches
        assert texts(await other.load(session.id)) == texts(session)


async def test_a_row_that_is_there_already_is_told_after_a_few_tries(schema: str) -> None:
    """The next look would find a row that somebody else has just added, so half a minute of tries would not help."""
    tries = 0

    def job() -> Job[None]:
        nonlocal tries
        tries += 1
        yield Insert("tag", ("tag", "sid"), [("a", 1), ("a", 1)])

    async with store_in(schema) as store:
        with pytest.raises(StoreError):
            await store._engine.run(job, "write")
    assert tries == 3


async def test_previews_are_few_round_trips(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take one round trip for all heads and one for all messages, and one more if some sessions have no words."""
    async with store_in(schema) as store:
        for number in range(40):
            await store.create(new_session(f"Title {number}", "Bye", id=f"s{number}"))
        names = [f"s{number}" for number in range(40)]
        with round_trips(monkeypatch) as made:
            found = await store.previews(names)
        assert [found[name].title for name in names] == [f"Title {number}" for number in range(40)]
        assert len(made) == 2
        for number in range(40):
            asked = tell(new_session(id=f"t{number}"), Message.system("Be kind."), Message.user("Hi"))
            asked = tell(asked, Message.assistant("", tool_calls=[ToolCall("f", {}, id="c")]))
            await store.create(asked)
        with round_trips(monkeypatch) as made:
            found = await store.previews([*names, *(f"t{number}" for number in range(40))])
        assert {each.last_words for each in found.values()} == {"Bye", "Hi"}
        assert len(made) == 3


async def test_damage_is_found_in_one_state(schema: str) -> None:
    """A damaged session stops no other preview."""
    async with store_in(schema) as store:
        for name in ("a", "b", "c"):
            await store.create(new_session("Hello", "Bye", id=name))
        async with sql(schema) as execute:
            of_b = "(SELECT log FROM session WHERE id = 'b')"
            await execute(f"UPDATE msg SET crc = crc + 1 WHERE pos = 1 AND log = {of_b}")
            await execute("DELETE FROM head WHERE sid = (SELECT sid FROM session WHERE id = 'c')")
        found = await store.previews(["a", "b", "c"])
        assert {name: (each.title, each.last_words, each.message_count) for name, each in found.items()} == {
            "a": ("Hello", "Bye", 2),
            "b": ("Hello", None, 2),
            "c": (None, None, None),
        }
        assert [name for name, each in found.items() if each.damage is not None] == ["b", "c"]
