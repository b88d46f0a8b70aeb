"""Concurrency: tasks, instances and processes on one store, callers that are cancelled, and closed stores."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

from perdure.errors import PerdureError, SessionConflict, StoreError
from perdure.model.session import AgentSession
from perdure.protocols import SessionStore
from perdure.testing.processes import ask_all, processes
from perdure.testing.samples import fork, new_session, note, say, texts
from perdure.testing.scene import Contract, for_a_while, in_directory, in_store, refused

ROUNDS = 8
RACERS = 6


class Together(Contract):
    """Of several callers that save the same version, one wins and the others get a conflict."""

    @in_store
    async def test_of_racing_saves_one_wins_each_round(self, store: SessionStore) -> None:
        """Of several tasks that save one version at once, one gets the next version, and the others a conflict."""
        session = await store.create(new_session())
        for round in range(1, ROUNDS + 1):
            attempts = [note(say(session, f"{round}.{racer}"), "winner", racer) for racer in range(RACERS)]
            outcomes = await asyncio.gather(*map(store.save, attempts), return_exceptions=True)
            session = _only_winner(outcomes)
            assert session.version == round + 1
            assert await store.load(session.id) == session
            assert texts(session)[-1] == f"{round}.{session.state.metadata['winner']}"
        assert len(session.state.messages) == ROUNDS

    @in_store
    async def test_of_racing_creates_one_wins(self, store: SessionStore) -> None:
        """Of several tasks that create one id at once, one creates it."""
        for round in range(ROUNDS):
            attempts = [new_session(str(racer), id=f"race-{round}") for racer in range(RACERS)]
            outcomes = await asyncio.gather(*map(store.create, attempts), return_exceptions=True)
            assert await store.load(f"race-{round}") == _only_winner(outcomes)

    @in_store
    async def test_saves_of_different_sessions_do_not_disturb_each_other(self, store: SessionStore) -> None:
        """Every session gets all of its own messages, in order."""

        async def converse(session: AgentSession) -> AgentSession:
            for turn in range(6):
                session = await store.save(say(session, f"{session.id}/{turn}"))
                assert await store.load(session.id) == session
            return session

        started = [await store.create(new_session(id=f"s{n}")) for n in range(12)]
        for session in await asyncio.gather(*map(converse, started)):
            assert texts(session) == [f"{session.id}/{turn}" for turn in range(6)]
            assert await store.load(session.id) == session

    @in_store
    async def test_loads_among_saves_are_never_torn(self, store: SessionStore) -> None:
        """A reader that loads while others write sees one whole version."""
        session = await store.create(note(new_session(), "count", 0))

        async def read() -> None:
            seen = 0
            while seen < 30:
                loaded = await store.load(session.id)
                assert loaded is not None
                assert loaded.state.metadata["count"] == len(loaded.state.messages) == loaded.version - 1 >= seen
                seen = loaded.version - 1
                # A store in memory may never wait: without this, the writer would not get its turn.
                await asyncio.sleep(0)

        async def write(current: AgentSession) -> None:
            for count in range(1, 31):
                current = await store.save(note(say(current, str(count)), "count", count))

        await asyncio.gather(read(), read(), write(session))

    @in_store
    async def test_forks_while_the_parent_goes_on(self, store: SessionStore) -> None:
        """A fork that is made while its parent is saved shows the version that it was made from."""
        parent = await store.create(new_session("a"))
        for turn in range(10):
            child, parent = await asyncio.gather(store.create(fork(parent)), store.save(say(parent, str(turn))))
            assert texts(await store.load(child.id)) == ["a", *map(str, range(turn))]

    @in_store
    async def test_a_cancelled_save_is_whole_or_not_at_all(self, store: SessionStore) -> None:
        """A save that is cancelled at any moment leaves the next version or none, and the store works."""
        session = await store.create(note(new_session(), "count", 0))
        # Each round cancels at another moment, from the first step of the save on.
        for delay in range(24):
            attempt = asyncio.create_task(store.save(_one_more(session)))
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            session = await _save_after_all(store, session.id)
        last = await store.load(session.id)
        assert last is not None
        for version in range(1, last.version + 1):
            older = await store.load(session.id, version)
            assert older is not None
            assert older.state.metadata["count"] == len(older.state.messages) == version - 1
        assert await store.load(session.id, last.version + 1) is None

    @in_store
    async def test_a_cancelled_create_is_whole_or_not_at_all(self, store: SessionStore) -> None:
        """A create that is cancelled at any moment leaves a whole session or none."""
        for delay in range(16):
            attempt = asyncio.create_task(store.create(new_session("Hello", id=f"s{delay}")))
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            try:
                session = await store.create(new_session("Hello", id=f"s{delay}"))
            except SessionConflict:
                loaded = await store.load(f"s{delay}")
                assert loaded is not None
                session = loaded
            assert texts(await store.save(say(session, "more"))) == ["Hello", "more"]

    @in_store
    async def test_cancelled_reads_leave_the_store_working(self, store: SessionStore) -> None:
        """Cancelled reads have no effect on others."""
        session = await store.create(new_session("Hello"))
        for delay in range(12):
            attempts = [
                asyncio.create_task(store.load(session.id, 1)),
                asyncio.create_task(store.list()),
                asyncio.create_task(store.load(session.id)),
            ]
            await for_a_while(delay)
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        assert await store.load(session.id) == session
        assert len(await store.list()) == 1

    @in_directory
    async def test_instances_see_each_others_writes_at_once(self, where: Path) -> None:
        """Two open instances take turns, and each begins with what the other has just written."""
        if not self.shared:
            return
        async with self.open_store(where) as one, self.open_store(where) as two:
            session = await one.create(new_session("a"))
            for turn in range(6):
                writer, reader = (one, two) if turn % 2 else (two, one)
                loaded = await writer.load(session.id)
                assert loaded == session
                session = await writer.save(say(loaded, str(turn)))
                assert await reader.load(session.id) == session
                assert (await reader.list()).all() == (session.info,)
                with refused(SessionConflict):
                    await reader.save(loaded)
            assert texts(session) == ["a", *"012345"]
            for version in range(1, 8):
                assert await one.load(session.id, version) == await two.load(session.id, version)

    @in_directory
    async def test_of_racing_processes_one_wins_each_round(self, where: Path) -> None:
        """Of several processes that save one version at once, one gets the next version in every round."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            session = await store.create(new_session("a"))
            async with processes(self, where, session.id, "one", "two") as racers:
                for round in range(1, ROUNDS + 1):
                    assert await ask_all(racers, "load") == [{"did": round}] * 2
                    answers = await ask_all(racers, "save")
                    assert sorted(answer.get("error", "won") for answer in answers) == ["SessionConflict", "won"]
                    winner = racers[0].name if "did" in answers[0] else racers[1].name
                    loaded = await store.load(session.id)
                    assert (loaded.version, loaded.state.metadata["winner"]) == (round + 1, winner)

    @in_directory
    async def test_of_processes_that_create_one_id_one_wins(self, where: Path) -> None:
        """Of several processes that create one session at once, one creates it in every round."""
        if not self.shared:
            return
        async with processes(self, where, "race", "one", "two") as racers:
            for round in range(ROUNDS):
                answers = await ask_all(racers, f"create race-{round}")
                assert sorted(answer.get("error", "won") for answer in answers) == ["SessionConflict", "won"]
        async with self.open_store(where) as store:
            assert len(await store.list()) == ROUNDS

    def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        """A closed store holds no file handle, whatever happened in it, and can be opened again."""
        for number in range(3):
            before = _handles()
            # The second round opens the store of the first one again.
            where = tmp_path / str(number // 2)
            where.mkdir(exist_ok=True)
            asyncio.run(self._use(where))
            # What a cancelled task still refers to may hold a handle until it is collected.
            gc.collect()
            assert _handles() <= before

    async def _use(self, where: Path) -> None:
        async with self.open_store(where) as store:
            session = await store.create(new_session("Hello"))
            attempts = [asyncio.create_task(store.save(say(session, str(n)))) for n in range(4)]
            await asyncio.sleep(0)
            attempts[0].cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            await store.list()
            await store.load(session.id, 1)
            await store.delete(session.id)

    @in_directory
    async def test_a_closed_store_says_so(self, where: Path) -> None:
        """After closing, every verb raises StoreError. A store with nothing to close may just continue."""
        async with self.open_store(where) as store:
            session = await store.create(new_session("Hello"))
        verbs: list[Any] = [
            lambda: store.create(new_session("Hello")),
            lambda: store.save(session),
            lambda: store.load(session.id),
            lambda: store.load(session.id, 1),
            lambda: store.exists(session.id),
            lambda: store.list(),
            lambda: store.delete(session.id),
        ]
        outcomes = [await _outcome(verb) for verb in verbs]
        assert outcomes in ([StoreError] * len(verbs), [None] * len(verbs))


def _only_winner(outcomes: list[Any]) -> AgentSession:
    winners = [outcome for outcome in outcomes if isinstance(outcome, AgentSession)]
    losers = [type(outcome) for outcome in outcomes if not isinstance(outcome, AgentSession)]
    assert len(winners) == 1
    assert losers == [SessionConflict] * (RACERS - 1)
    return winners[0]


def _one_more(session: AgentSession) -> AgentSession:
    count = len(session.state.messages) + 1
    return note(say(session, str(count)), "count", count)


async def _save_after_all(store: SessionStore, session_id: str) -> AgentSession:
    """Save on top of what is there. The cancelled save may still be under way, and then there is a conflict."""
    # A cancel lets the caller go, and not always the commit: it may come in between.
    for _ in range(100):
        loaded = await store.load(session_id)
        assert loaded is not None
        try:
            return await store.save(_one_more(loaded))
        except SessionConflict:
            await asyncio.sleep(0.001)
    raise AssertionError("the session never came to rest")


def _handles() -> int:
    """Return how many files this process has open, or 0 where that cannot be found out."""
    here = Path("/proc/self/fd")
    return len(os.listdir(here)) if here.is_dir() else 0


async def _outcome(verb: Any) -> type[BaseException] | None:
    try:
        # A verb that hangs is told apart from one that raises, before the whole test runs out of time.
        async with asyncio.timeout(30):
            await verb()
    except PerdureError as error:
        return type(error)
    return None
