"""The promises of a dispatcher, as a test class. Apply it to yours in a few lines:

    class TestMyDispatcher(DispatcherContract):
        def open_store(self, where):
            return MyStore(where / "sessions")

        def dispatcher(self, store):
            return MyDispatcher(store)

`where` is an empty directory (pytest's `tmp_path`). The tests are plain functions, and need no plugin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from perdure.protocols import Dispatcher, ModelReply, ModelRequest, OnDelta, Outcome
from perdure.sessions.connect import connect
from perdure.sessions.queueing import Queued
from perdure.sessions.sessions import Sessions
from perdure.testing.scene import Contract, in_directory
from perdure.testing.scripted import ScriptedDriver
from perdure.workers.worker import Worker

PATIENCE = 20.0
# Well below PATIENCE: a run that a worker has left is taken over within one test.
_LEASE = 6.0


class Model:
    """A model that repeats what it is asked, and counts how many of its answers are under way at once."""

    def __init__(self, thinks: float = 0.0) -> None:
        self._thinks = thinks
        self._voice = ScriptedDriver(lambda request: f"re {request.messages[-1].text}")
        self._now: Counter[str] = Counter()
        self.heard: list[str] = []
        self.has_heard = asyncio.Event()
        self.most: Counter[str] = Counter()
        """The most answers at once, by the first word of the question. The key `""` counts all of them."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        said = request.messages[-1].text
        self.heard.append(said)
        self.has_heard.set()
        names = ("", said.split()[0])
        for name in names:
            self._now[name] += 1
            self.most[name] = max(self.most[name], self._now[name])
        try:
            await asyncio.sleep(self._thinks)
            return await self._voice.respond(request, on_delta)
        finally:
            for name in names:
                self._now[name] -= 1


class DispatcherContract(Contract):
    """The contract of `perdure.protocols.Dispatcher`."""

    def dispatcher(self, store: Any) -> Dispatcher:
        """Return a dispatcher for an open store."""
        raise NotImplementedError("a contract needs to know your dispatcher: define dispatcher(self, store)")

    @asynccontextmanager
    async def _sessions(self, where: Path, model: Model | None = None) -> AsyncIterator[Sessions]:
        async with self.open_store(where) as store, connect(store, driver=model or Model()) as sessions:
            yield sessions

    @asynccontextmanager
    async def _working(self, sessions: Sessions, **options: Any) -> AsyncIterator[Worker]:
        settings: dict[str, Any] = {"concurrency": 8, "lease": _LEASE, "drain": PATIENCE, **options}
        async with Worker(sessions, dispatcher=self.dispatcher(sessions.store), **settings) as worker:
            running = asyncio.create_task(worker.run())
            try:
                yield worker
            finally:
                worker.stop()
                await running

    @in_directory
    async def test_what_is_left_is_answered(self, where: Path) -> None:
        """Each message is answered once, in the order in which they came, and nothing is left over."""
        model = Model()
        async with self._sessions(where, model) as sessions, self._working(sessions):
            await sessions.open("a")
            asked = [await sessions.enqueue("a", f"{number}") for number in range(10)]
            assert [await text_of(each) for each in asked] == [f"re {number}" for number in range(10)]
            assert model.heard == [str(number) for number in range(10)]
            assert await sessions.store.waiting() == []  # type: ignore[attr-defined]

    @in_directory
    async def test_what_was_left_before_is_found(self, where: Path) -> None:
        """A worker that begins later answers the message."""
        async with self._sessions(where) as sessions:
            await sessions.open("a")
            asked = await sessions.enqueue("a", "Is anybody there?")
            assert await asked.reply(timeout=0.3) is None
            async with self._working(sessions):
                assert await text_of(asked) == "re Is anybody there?"

    @in_directory
    async def test_what_is_posted_without_a_word_is_found(self, where: Path) -> None:
        """A message from somebody who uses no dispatcher, such as another process, is answered."""
        async with self._sessions(where) as sessions, self._working(sessions):
            await sessions.open("a")
            await asyncio.sleep(0.5)  # when the worker has nothing to do
            async with connect(sessions.store, driver=Model()) as others:
                asked = await others.enqueue("a", "Hello")
                assert await text_of(asked) == "re Hello"

    @in_directory
    async def test_two_workers_share_the_work(self, where: Path) -> None:
        """Each session has one message answered at a time, in order, and none twice."""
        model = Model(thinks=0.01)
        async with self._sessions(where, model) as sessions:
            names = [f"s{number}" for number in range(6)]
            for name in names:
                await sessions.open(name)
            asked = [await sessions.enqueue(name, f"{name} {number}") for number in range(4) for name in names]
            async with self._working(sessions), self._working(sessions):
                for each in asked:
                    assert await text_of(each) is not None
        assert Counter(model.heard) == {f"{name} {number}": 1 for number in range(4) for name in names}
        for name in names:
            assert [each for each in model.heard if each.startswith(name)] == [f"{name} {n}" for n in range(4)]
            assert model.most[name] == 1

    @in_directory
    async def test_no_more_run_at_once_than_may(self, where: Path) -> None:
        """`concurrency` limits the sessions that run at once, even if many more wait."""
        model = Model(thinks=0.05)
        async with self._sessions(where, model) as sessions:
            asked = []
            for number in range(9):
                await sessions.open(f"s{number}")
                asked.append(await sessions.enqueue(f"s{number}", f"s{number}"))
            async with self._working(sessions, concurrency=3):
                for each in asked:
                    await text_of(each)
        # Below two, nothing would have run side by side, and the limit would not have been tried.
        assert 2 <= model.most[""] <= 3

    @in_directory
    async def test_the_most_urgent_come_first(self, where: Path) -> None:
        """Sessions are answered by priority, whichever was left first."""
        model = Model()
        async with self._sessions(where, model) as sessions:
            for name, priority in (("low", -1), ("plain", 0), ("urgent", 5), ("high", 2)):
                await sessions.open(name)
                await sessions.enqueue(name, name, priority=priority, key=name)
            async with self._working(sessions, concurrency=1):
                for name in ("low", "plain", "urgent", "high"):
                    await text_of(await sessions.enqueue(name, name, key=name))
        assert model.heard == ["urgent", "high", "plain", "low"]

    @in_directory
    async def test_an_owner_with_many_sessions_holds_nobody_up(self, where: Path) -> None:
        """The single message of another owner is answered soon, with a limit for each owner and without."""
        for per_owner in (None, 1, 2):
            model = Model(thinks=0.02)
            async with self._sessions(where / str(per_owner), model) as sessions:
                asked = await _left(sessions, {"ann": 20, "ben": 1, "eve": 1})
                async with self._working(sessions, concurrency=2, per_owner=per_owner):
                    for each in asked:
                        await text_of(each)
            for owner in ("ben", "eve"):
                assert model.heard.index(f"{owner} 0") < 6, (per_owner, model.heard)
            assert model.most["ann"] <= (per_owner or 2)

    @in_directory
    async def test_priorities_hold_within_an_owner_and_between_owners(self, where: Path) -> None:
        """An owner's turn does not bring what is less urgent before what is more urgent."""
        model = Model()
        async with self._sessions(where, model) as sessions:
            asked = await _left(sessions, {"ann": 3})
            asked += await _left(sessions, {"ben": 2, "eve": 1}, priority=3)
            asked += await _left(sessions, {"ann": 5}, priority=7)  # those from before too
            asked += await _left(sessions, {"zoe": 2}, priority=-2)
            async with self._working(sessions, concurrency=1):
                for each in asked:
                    await text_of(each)
        owners = [said.split()[0] for said in model.heard]
        assert owners[:8] == ["ann"] * 8
        assert sorted(owners[8:11]) == ["ben", "ben", "eve"]
        assert owners[11:] == ["zoe", "zoe"]

    @in_directory
    async def test_an_owner_has_no_more_than_its_share(self, where: Path) -> None:
        """`per_owner` holds across all workers, and does not delay other owners."""
        model = Model(thinks=0.05)
        async with self._sessions(where, model) as sessions:
            asked = []
            for owner, many in (("ann", 8), ("ben", 2)):
                hers = sessions.of(owner)
                for number in range(many):
                    await hers.open(f"s{number}")
                    asked.append(await hers.enqueue(f"s{number}", f"{owner} {number}"))
            async with self._working(sessions, per_owner=2), self._working(sessions, per_owner=2):
                for each in asked:
                    await text_of(each)
        assert model.most["ann"] <= 2
        assert model.most["ben"] <= 2

    @in_directory
    async def test_one_that_stops_lets_go_of_what_it_runs(self, where: Path) -> None:
        """A worker that stops takes nothing new. Another continues its runs at once: nothing is lost, or done twice."""
        slow = Model(thinks=PATIENCE)
        async with self._sessions(where, slow) as sessions:
            await sessions.open("a")
            asked = await sessions.enqueue("a", "Hello")
            async with self._working(sessions, drain=0.2):
                async with asyncio.timeout(PATIENCE):
                    await slow.has_heard.wait()
            assert [*await sessions.store.lapsed()] == ["a"]  # type: ignore[attr-defined]
            assert await sessions.enqueue("a", "And again") is not None
            async with connect(sessions.store, driver=Model()) as others, self._working(others):
                assert await text_of(asked) == "re Hello"
            history = [message.text for message in await (await sessions.open("a")).history()]
            assert history[:2] == ["Hello", "re Hello"]

    @in_directory
    async def test_one_that_fails_holds_nobody_up(self, where: Path) -> None:
        """A session that cannot be run here is tried again later; the others are answered."""
        async with self._sessions(where) as sessions:
            for name in ("a", "b"):
                await sessions.open(name)
            worker = Worker(sessions, dispatcher=self.dispatcher(sessions.store), lease=_LEASE)
            dispatcher, tried, again = worker.dispatcher, Counter[str](), asyncio.Event()

            async def advance(session_id: str) -> Any:
                tried[session_id] += 1
                if session_id == "a" and tried["a"] == 1:
                    return Outcome.FAILED
                if tried["a"] > 1 and tried["b"]:
                    again.set()
                return Outcome.DONE

            stopped = asyncio.Event()
            work = asyncio.create_task(dispatcher.work(advance, worker.options, stopped))
            for name in ("a", "b"):
                await dispatcher.wake(name)
            async with asyncio.timeout(PATIENCE):
                await again.wait()
            stopped.set()
            await work

    @in_directory
    async def test_a_session_that_is_gone_does_no_harm(self, where: Path) -> None:
        """A session that is not there any longer is passed over, and the others are answered."""
        async with self._sessions(where) as sessions, self._working(sessions) as worker:
            await worker.dispatcher.wake("nobody")
            await sessions.open("a")
            assert await text_of(await sessions.enqueue("a", "Hello")) == "re Hello"


async def _left(sessions: Sessions, owners: Mapping[str, int], priority: int = 0) -> list[Queued]:
    """Leave a message with each session of some owners. `owners` says how many sessions each has."""
    asked = []
    for owner, many in owners.items():
        for number in range(many):
            session_id = f"{owner}-{number}"
            await sessions.of(owner).open(session_id)
            asked.append(await sessions.of(owner).enqueue(session_id, f"{owner} {number}", priority=priority))
    return asked


async def text_of(asked: Queued) -> str:
    """Return the answer to a message that was left with a session. Fail if none comes."""
    reply = await asked.reply(PATIENCE)
    assert reply is not None, f"{asked!r} was not answered within {PATIENCE:g} seconds"
    return reply.text
