"""The outcome of messages and runs when something goes wrong around a worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import address_of, store_at
from tests.waiting import until

from perdure import (
    AgentDefinition,
    CompleteSession,
    InvalidData,
    LoopStatus,
    ModelRequest,
    PassThroughSessionController,
    QueueFull,
    RequestRefused,
    RetryingDriver,
    RunFailed,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
    SessionStage,
    SessionStatus,
    StoreError,
    ToolCall,
    TransientDriverError,
    tool,
)
from perdure.model.ids import now, use
from perdure.protocols import Entry, ModelReply, OnDelta, Outcome, Terms
from perdure.sessions import queueing
from perdure.sessions.connect import connect
from perdure.sessions.sessions import Sessions
from perdure.testing import Delay, FailingStore, FrozenClock, ScriptedDriver
from perdure.testing.dispatcher_contract import text_of
from perdure.workers import Worker, advance
from perdure.workers.advancing import Advancing
from perdure.workers.inbox import InboxDispatcher
from perdure.workers.timers import Bell

pytestmark = pytest.mark.sample(2)  # make torture runs all

AGENT = AgentDefinition("agent", tools=("charge",))


class Held:
    """A model that answers once it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.heard: list[str] = []
        self._voice = ScriptedDriver(echo)

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.heard.append(request.messages[-1].text)
        self.asked.set()
        await self.may_answer.wait()
        return await self._voice.respond(request, on_delta)


def echo(request: ModelRequest) -> str:
    return f"re {asked_in(request)}"


def asked_in(request: ModelRequest) -> str:
    return next(message.text for message in reversed(request.messages) if message.role == "user")


@asynccontextmanager
async def sessions_in(
    where: Path, kind: str = "sqlite", *, reply: Any = echo, **options: Any
) -> AsyncIterator[Sessions]:
    driver = reply if hasattr(reply, "respond") else ScriptedDriver(reply)
    async with connect(store_at(address_of(kind, where)), driver=driver, **options) as sessions:
        yield sessions


@asynccontextmanager
async def working(sessions: Sessions, **options: Any) -> AsyncIterator[Worker]:
    async with Worker(sessions, **{"lease": 3.0, "drain": 20.0, **options}) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await running


async def said_in(sessions: Sessions, session_id: str) -> list[str]:
    return [message.text for message in await sessions.history(session_id) if message.text]


async def nothing_waits(sessions: Sessions) -> bool:
    store: Any = sessions.store
    return not await store.waiting(1, idle_only=False) and not await store.running()


async def test_one_who_looks_twice_at_once_is_told_that_it_is_busy(tmp_path: Path) -> None:
    """The claim lets one through; the message is answered once."""
    model = Held()
    async with sessions_in(tmp_path, reply=model) as sessions:
        await sessions.open("a")
        await sessions.enqueue("a", "Hello")
        first = asyncio.create_task(advance(sessions, "a"))
        await model.asked.wait()
        assert await advance(sessions, "a") is Outcome.BUSY
        model.may_answer.set()
        assert await first is Outcome.DONE
        assert await said_in(sessions, "a") == ["Hello", "re Hello"]
        assert model.heard == ["Hello"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_one_that_was_stopped_beyond_its_lease_writes_nothing(tmp_path: Path, kind: str) -> None:
    """Another worker has continued its run. The next write raises an error, and the stopped worker gives way."""
    slow = Held()
    address = address_of(kind, tmp_path)
    failing = FailingStore(store_at(address))
    failing.fail("heartbeat", call=None)
    async with connect(failing, driver=slow) as stopped, sessions_in(tmp_path, kind) as others:
        await others.open("a")
        await others.enqueue("a", "Hello")
        late = Advancing(stopped.runtime.beside(Terms(lease=0.3)), stopped.loops)
        first = asyncio.create_task(late("a"))
        await slow.asked.wait()
        assert await advance(others, "a") is Outcome.BUSY
        await until(lambda: others.store.is_interrupted("a"))  # type: ignore[attr-defined]
        assert await advance(others, "a") is Outcome.DONE
        record = await others.store.read("a")  # type: ignore[attr-defined]
        slow.may_answer.set()
        assert await first is Outcome.BUSY
        assert await others.store.read("a") == record  # type: ignore[attr-defined]
        assert await said_in(others, "a") == ["Hello", "re Hello"]
        assert await nothing_waits(others)


@pytest.mark.parametrize("error", [RequestRefused("a model", "it is too old"), ValueError("a bug in the driver")])
async def test_a_run_that_fails_is_not_tried_again(tmp_path: Path, error: Exception) -> None:
    """It is recorded as failed, since the model has been paid. The next message is answered."""
    calls: Counter[str] = Counter()

    def reply(request: ModelRequest) -> Any:
        calls[asked_in(request)] += 1
        return error if asked_in(request) == "bad" else echo(request)

    async with sessions_in(tmp_path, reply=reply) as sessions:
        await sessions.open("a")
        bad, good = [await sessions.enqueue("a", text) for text in ("bad", "good")]
        async with working(sessions):
            assert await text_of(good) == "re good"
            with pytest.raises(RunFailed):
                await bad.reply(5)
        assert calls == {"bad": 1, "good": 1}
        record = await sessions.record("a")
        assert [loop.status for loop in record.loops] == [LoopStatus.FAILED, LoopStatus.COMPLETED]
        assert await nothing_waits(sessions)


async def test_a_model_that_is_overloaded_is_asked_again_within_the_run(tmp_path: Path) -> None:
    """No other run is begun for it."""
    calls: list[int] = []

    def reply(request: ModelRequest) -> Any:
        calls.append(request.step)
        return (
            TransientDriverError("a model", "it is overloaded", retry_after=0.01) if len(calls) == 1 else echo(request)
        )

    async with sessions_in(tmp_path, reply=RetryingDriver(ScriptedDriver(reply))) as sessions:
        await sessions.open("a")
        asked = await sessions.enqueue("a", "Hello")
        async with working(sessions):
            assert await text_of(asked) == "re Hello"
        assert calls == [0, 0]
        assert len((await sessions.record("a")).loops) == 1


async def test_too_much_that_waits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session has a limit, and one owner. Nothing is left then, and waiting messages are still answered."""
    monkeypatch.setattr(queueing, "MOST_OF_OWNER", 105)
    async with sessions_in(tmp_path) as sessions:
        hers = sessions.of("ann")
        for name in ("a", "b"):
            await hers.open(name)
        for number in range(queueing.MOST_WAITING):
            await hers.enqueue("a", f"{number}")
        with pytest.raises(QueueFull) as full:
            await hers.enqueue("a", "one too many")
        assert (full.value.limit, full.value.owner) == (100, None)
        for number in range(5):
            await hers.enqueue("b", f"{number}")
        with pytest.raises(QueueFull) as full:
            await hers.enqueue("b", "one too many")
        assert (full.value.limit, full.value.owner) == (105, "ann")
        async with working(sessions):
            await until(lambda: nothing_waits(sessions))
        assert len(await said_in(hers, "a")) == 200
        assert len(await said_in(hers, "b")) == 10


@tool(needs_approval=True)
def charge(amount: int) -> str:
    """Take money."""
    return f"charged {amount}"


def charging(request: ModelRequest) -> Any:
    if asked_in(request) == "Charge" and request.step == 0:
        return ToolCall("charge", {"amount": 5})
    return echo(request)


@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_what_waits_behind_an_approval_is_sent_once_it_is_decided(tmp_path: Path, decision: str) -> None:
    """A process other than the worker's decides. Until then no worker looks at the session."""
    async with sessions_in(tmp_path, reply=charging, tools=[charge]) as sessions:
        await sessions.open("a", AGENT)
        asked = [await sessions.enqueue("a", text) for text in ("Charge", "And now?", "And then?")]
        async with working(sessions):
            store: Any = sessions.store
            await until(lambda: _is_suspended(sessions, "a"))
            assert await advance(sessions, "a") is Outcome.WAITS
            assert await store.waiting() == []
            async with sessions_in(tmp_path, reply=charging, tools=[charge], grace=0.0) as others:
                decided = await (others.approve("a") if decision == "approve" else others.deny("a", "No."))
                assert decided.text == "re Charge"
            assert [await text_of(each) for each in asked[1:]] == ["re And now?", "re And then?"]
        assert await nothing_waits(sessions)


async def test_an_approval_that_a_worker_has_to_finish(tmp_path: Path) -> None:
    """The process that approves dies in the middle of the run; a worker continues it, then sends the rest."""
    slow = Held()
    async with sessions_in(tmp_path, reply=charging, tools=[charge]) as sessions:
        await sessions.open("a", AGENT)
        asked = [await sessions.enqueue("a", text) for text in ("Charge", "And now?")]
        assert await advance(sessions, "a") is Outcome.WAITS
        async with sessions_in(tmp_path, reply=slow, tools=[charge], grace=0.0) as others:
            approving = asyncio.create_task(others.approve("a"))
            await slow.asked.wait()
        with pytest.raises(RunInterrupted):
            await approving
        async with working(sessions):
            assert await text_of(asked[1]) == "re And now?"
        assert await said_in(sessions, "a") == ["Charge", "charged 5", "re Charge", "And now?", "re And now?"]


async def _is_suspended(sessions: Sessions, session_id: str) -> bool:
    return (await sessions.info(session_id)).status is SessionStatus.SUSPENDED


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_session_that_is_closed_keeps_what_waits(tmp_path: Path, kind: str) -> None:
    """Its messages are not sent until the session is opened again, by any process."""
    async with sessions_in(tmp_path, kind) as sessions, sessions_in(tmp_path, kind) as others:
        for name in ("suspended", "completed", "deleted"):
            await sessions.open(name)
        await sessions.suspend("suspended")
        await sessions.execute("completed", CompleteSession())
        asked = {name: await sessions.enqueue(name, "Hello") for name in ("suspended", "completed")}
        asked["deleted"] = await sessions.enqueue("deleted", "Hello")
        await sessions.delete("deleted")
        async with working(sessions):
            for each in asked:
                assert await advance(sessions, each) is Outcome.WAITS
            assert await asked["suspended"].reply(0.5) is None
            await others.resume("suspended")
            await others.resume("completed")
            await others.restore("deleted")
            assert [await text_of(each) for each in asked.values()] == ["re Hello"] * 3


async def test_a_session_that_is_erased_takes_what_waits_along(tmp_path: Path) -> None:
    """Waiting for the answer raises SessionNotFound, and the worker continues with others."""
    async with sessions_in(tmp_path) as sessions:
        for name in ("a", "b"):
            await sessions.open(name)
        gone, kept = await sessions.enqueue("a", "Hello"), await sessions.enqueue("b", "Hello")
        waiting = asyncio.create_task(gone.reply(10))
        await asyncio.sleep(0.1)
        await sessions.erase("a")
        with pytest.raises(SessionNotFound):
            await waiting
        assert await advance(sessions, "a") is Outcome.DONE
        async with working(sessions):
            assert await text_of(kept) == "re Hello"
        assert await nothing_waits(sessions)


async def test_a_session_that_is_erased_while_it_is_run(tmp_path: Path) -> None:
    """An erasure has to wait for the run. Nothing of the session comes back then."""
    model = Held()
    async with sessions_in(tmp_path, reply=model) as sessions, sessions_in(tmp_path) as others:
        await sessions.open("a")
        await sessions.enqueue("a", "Hello")
        async with working(sessions):
            await model.asked.wait()
            with pytest.raises(SessionBusy):
                await others.erase("a")
            model.may_answer.set()
            await until(lambda: nothing_waits(sessions))
            await others.erase("a")
            assert await advance(sessions, "a") is Outcome.DONE
        assert not await sessions.store.exists("a")


async def test_a_fork_has_nothing_of_what_waits(tmp_path: Path) -> None:
    """Messages wait in the session that they were left with."""
    async with sessions_in(tmp_path) as sessions:
        await sessions.open("a")
        asked = await sessions.enqueue("a", "Hello")
        fork = await sessions.fork("a", "b")
        later = await sessions.enqueue(fork.id, "Hello, fork")
        async with working(sessions):
            assert (await text_of(asked), await text_of(later)) == ("re Hello", "re Hello, fork")
        assert await said_in(sessions, "b") == ["Hello, fork", "re Hello, fork"]
        assert await said_in(sessions, "a") == ["Hello", "re Hello"]


async def test_compactions_beside_a_worker(tmp_path: Path) -> None:
    """Whatever is compacted between two runs, every message is answered once and in order."""
    async with sessions_in(tmp_path) as sessions, sessions_in(tmp_path) as others:
        await sessions.open("a")
        asked = [await sessions.enqueue("a", f"{number}") for number in range(20)]
        compacted = 0
        async with working(sessions):
            while not await nothing_waits(sessions):
                with suppress(SessionBusy, SessionConflict, RunInterrupted):
                    compacted += (await others.compact("a")) is not None
                await asyncio.sleep(0.005)
            assert [await text_of(each) for each in asked] == [f"re {number}" for number in range(20)]
        heard = [message.text for message in await sessions.history("a") if message.role == "user"]
        assert [text for text in heard if text.isdigit()] == [f"{number}" for number in range(20)]


class Raises(PassThroughSessionController):
    """A hook that raises at a stage, for one session, as often as it is told to."""

    def __init__(self, stage: SessionStage, times: float) -> None:
        self._stage = stage
        self._left = times
        self.calls = 0

    def on_stage(self, stage: SessionStage, session: Any) -> Any:
        if stage is self._stage and session.id == "a" and session.version > 0:
            self.calls += 1
            if self._left > 0:
                self._left -= 1
                raise ValueError("a bug in a hook")
        return session


@pytest.mark.parametrize("stage", [each for each in SessionStage if "create" not in each.value])
async def test_a_hook_that_raises_holds_nobody_up(tmp_path: Path, stage: SessionStage) -> None:
    """Its session is tried again later, not at once; others are answered, and so is this one in the end."""
    hook = Raises(stage, 2)
    asked_of: Counter[str] = Counter()

    def reply(request: ModelRequest) -> str:
        asked_of[asked_in(request)] += 1
        return echo(request)

    async with sessions_in(tmp_path, reply=reply) as opener:
        for name in ("a", "b"):
            await opener.open(name)
    async with sessions_in(tmp_path, reply=reply, controller=hook) as sessions:
        await sessions.enqueue("a", "Hello")
        other = await sessions.enqueue("b", "Other")
        async with working(sessions):
            assert await text_of(other) == "re Other"
            await asyncio.sleep(0.3)
            assert hook.calls <= 2
            async with sessions_in(tmp_path) as reader:
                await until(lambda: _has_answered(reader, "a"))
        assert asked_of["Hello"] == 1
        assert await said_in(sessions, "a") == ["Hello", "re Hello"]


async def _has_answered(sessions: Sessions, session_id: str) -> bool:
    return (await sessions.info(session_id)).version > 1 and await nothing_waits(sessions)


@pytest.mark.sample(3)
@pytest.mark.parametrize("verb", ["save", "append", "claim", "in_turn", "has_waiting", "lapsed", "due", "read"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_store_that_fails_once(tmp_path: Path, verb: str, after: bool) -> None:
    """The message is still answered, once, and its call is not repeated."""
    charged: list[int] = []

    @tool(name="charge")
    def take(amount: int) -> str:
        """Take money."""
        charged.append(amount)
        return f"charged {amount}"

    failing = FailingStore(store_at(address_of("sqlite", tmp_path)))
    async with connect(failing, driver=ScriptedDriver(charging), tools=[take]) as sessions:
        await sessions.open("a", AGENT)
        await sessions.enqueue("a", "Charge")
        failing.fail(verb, after=after)
        async with working(sessions), asyncio.timeout(20):
            await until(lambda: _is_quiet(failing, sessions))
        history = await sessions.history("a")
        assert (history[0].text, history[-1].text) == ("Charge", "re Charge")
        (result,) = [each for message in history for each in message.tool_results]
        assert charged == ([] if result.is_error else [5])  # its start was on record, so it is not made again
        assert (await sessions.info("a")).version == 2
        assert len((await sessions.record("a")).loops) == 1


async def _is_quiet(failing: FailingStore, sessions: Sessions) -> bool:
    store: Any = failing._store
    return (await sessions.info("a")).version > 1 and not await store.waiting(1) and not await store.running()


async def test_a_worker_without_the_tools_leaves_a_run_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, and answers the others."""
    async with sessions_in(tmp_path, tools=[charge]) as sessions:
        await sessions.open("a", AgentDefinition("agent", tools=("charge",)))
        await sessions.open("b")
        asked, other = await sessions.enqueue("a", "Hello"), await sessions.enqueue("b", "Other")
        async with sessions_in(tmp_path) as without, working(without):
            assert await text_of(other) == "re Other"
            assert await asked.reply(1.5) is None
            assert len([each for each in caplog.records if "could not be run here" in each.message]) == 1
        async with working(sessions):
            assert await text_of(asked) == "re Hello"
        assert len((await sessions.record("a")).loops) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_timer_rings_once_and_in_time(tmp_path: Path, kind: str) -> None:
    """This holds for any number of workers. Two seconds allow for a machine with many other tests."""
    async with sessions_in(tmp_path, kind) as sessions, sessions_in(tmp_path, kind) as others:
        names = [f"s{number}" for number in range(10)]
        for name in names:
            await sessions.open(name)
        async with working(sessions), working(others):
            at = datetime.now(UTC) + timedelta(seconds=1.5)
            both = [each.enqueue(name, "Later", at=at, key="k") for name in names for each in (sessions, others)]
            for asked in await asyncio.gather(*both):
                assert await text_of(asked) == "re Later"
            late = [(await sessions.info(name)).updated_at - at for name in names]
            await asyncio.sleep(0.7)
        assert timedelta(0) <= min(late)
        assert max(late) <= timedelta(seconds=2)
        for name in names:
            assert await said_in(sessions, name) == ["Later", "re Later"]
        assert await sessions.timers() == []


async def test_a_session_that_was_suspended_until_a_time_opens_once(tmp_path: Path) -> None:
    """Two workers ring its timer, without an error. Other timers ring in time."""
    async with sessions_in(tmp_path) as sessions, sessions_in(tmp_path) as others:
        names = [f"s{number}" for number in range(8)]
        at = datetime.now(UTC) + timedelta(seconds=0.6)
        asked = []
        for name in names:
            await sessions.open(name)
            asked.append(await sessions.enqueue(name, "Hello"))
            await sessions.suspend(name, until=at)
        async with working(sessions), working(others):
            assert [await text_of(each) for each in asked] == ["re Hello"] * len(names)
        assert [(await sessions.info(name)).version for name in names] == [4] * len(names)
        assert await sessions.timers() == []


async def test_a_timer_that_cannot_be_rung_holds_no_other_up(tmp_path: Path) -> None:
    """One timer's session cannot be loaded here, since a hook refuses it."""

    class Refuses(PassThroughSessionController):
        def on_stage(self, stage: SessionStage, session: Any) -> Any:
            if session.id == "a" and stage is SessionStage.AFTER_LOAD:
                raise StoreError("this session cannot be read here")
            return session

    async with sessions_in(tmp_path) as sessions:
        for name in ("a", "b"):
            await sessions.open(name)
        at = datetime.now(UTC) + timedelta(seconds=0.1)
        await sessions.suspend("a", until=at)
        later = await sessions.enqueue("b", "Hello", at=at + timedelta(seconds=0.1))
        async with sessions_in(tmp_path, controller=Refuses()) as refusing, working(refusing):
            assert await text_of(later) == "re Hello"
        async with working(sessions):
            await until(lambda: _is_active(sessions, "a"))


async def _is_active(sessions: Sessions, session_id: str) -> bool:
    return (await sessions.info(session_id)).status is SessionStatus.ACTIVE


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_key_stands_for_one_message(tmp_path: Path, kind: str) -> None:
    """It may be left any number of times, from anywhere, at once."""
    heard: list[str] = []

    def reply(request: ModelRequest) -> str:
        heard.append(asked_in(request))
        return echo(request)

    async with sessions_in(tmp_path, kind, reply=reply) as sessions, sessions_in(tmp_path, kind, reply=reply) as others:
        await sessions.open("a")
        both = [each.enqueue("a", "Hello", key="k") for each in (sessions, others) * 4]
        asked = await asyncio.gather(*both)
        async with working(sessions):
            assert [await text_of(each) for each in asked] == ["re Hello"] * 8
            again = await others.enqueue("a", "Hello", key="k")
            assert await text_of(again) == "re Hello"
            with pytest.raises(InvalidData):
                await others.enqueue("a", "Something else", key="k")
            await until(lambda: nothing_waits(sessions))
        assert heard == ["Hello"]
        assert await said_in(sessions, "a") == ["Hello", "re Hello"]


async def test_a_schedule_that_was_missed_is_made_up_for_once(tmp_path: Path) -> None:
    """It rings once, however often it was due while no worker ran."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with sessions_in(tmp_path) as sessions:
            await sessions.schedule("digest", "Write it.", cron="0 7 * * *", timezone="Europe/Oslo")
            clock.advance(5 * 24 * 3600)
            async with working(sessions):
                await until(lambda: _has_answered(sessions, "digest"))
                await asyncio.sleep(0.7)
            assert await said_in(sessions, "digest") == ["Write it.", "re Write it."]
            (timer,) = await sessions.schedules()
            assert 0 < timer.due - clock().timestamp() <= 24 * 3600
            clock.advance(24 * 3600)
            async with working(sessions):
                await until(lambda: _has_version(sessions, "digest", 3))
            assert await said_in(sessions, "digest") == ["Write it.", "re Write it."] * 2


async def _has_version(sessions: Sessions, session_id: str, version: int) -> bool:
    return (await sessions.info(session_id)).version >= version


@pytest.mark.parametrize("drain", [0.0, 0.05])
async def test_one_that_stops_begins_nothing_more(tmp_path: Path, drain: float) -> None:
    """No run is ended because of the stop, and none begins after it, wherever the worker is with a session."""
    async with sessions_in(tmp_path) as sessions:
        names = [f"s{number}" for number in range(12)]
        for name in names:
            await sessions.open(name)
            for number in range(4):
                await sessions.enqueue(name, f"{number}")
        for _ in range(40):
            if await nothing_waits(sessions):
                break
            async with sessions_in(tmp_path, reply=lambda request: Delay(0.003, echo(request))) as others:
                async with working(others, drain=drain):
                    await asyncio.sleep(0.03)
                running = await sessions.store.running()  # type: ignore[attr-defined]
                assert [each for each in running if not each.lapsed] == []
        async with working(sessions):
            await until(lambda: nothing_waits(sessions))
        for name in names:
            assert await said_in(sessions, name) == [text for n in range(4) for text in (f"{n}", f"re {n}")]
            assert {loop.status for loop in (await sessions.record(name)).loops} == {LoopStatus.COMPLETED}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_what_is_dealt_with_without_a_run_is_claimed_for_a_worker_s_own_lease(tmp_path: Path, kind: str) -> None:
    """A worker that dies meanwhile keeps others out for no longer than with a run."""
    failing = FailingStore(store_at(address_of(kind, tmp_path)))
    mortal = connect(failing, driver=ScriptedDriver(echo), lease=0.5)
    async with mortal, sessions_in(tmp_path, kind) as others:
        await others.open("a")
        store: Any = others.store
        await store.post("a", Entry("cancel"))
        failing.fail("append")
        failing.fail("release", call=None)
        with pytest.raises(StoreError):
            await advance(mortal, "a")
        (claim,) = await store.running()
        assert claim.expires - time.time() <= 0.5
        await until(lambda: store.is_interrupted("a"))
        assert await advance(others, "a") is Outcome.DONE
        assert await nothing_waits(others)


async def test_timers_that_come_due_until_the_next_look_ring_in_time(tmp_path: Path) -> None:
    """They do not ring before their time, nor while the clock stands still: the next look finds them again."""
    async with connect(f"sqlite:///{tmp_path / 'a.db'}", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.open("a")
        queue = sessions._queue()
        bell = Bell(queue, InboxDispatcher(queue), sessions.runtime.execute)
        with use(clock=FrozenClock()):
            await sessions.enqueue("a", "later", at=now() + timedelta(seconds=0.1))
            await bell.ring(ahead=0.5)
            assert (await sessions.queue()).waiting == []
        due = now() + timedelta(seconds=0.2)
        await sessions.enqueue("a", "soon", at=due)
        await bell.ring()
        assert len(await sessions.timers("a")) == 1  # by this clock the other one has been due for long
        await bell.ring(ahead=0.5)
        assert now() >= due
        assert [each.count for each in (await sessions.queue()).waiting] == [2]


async def test_one_that_is_told_to_stop_looks_at_nothing_more(tmp_path: Path) -> None:
    """Many sessions may wait, and files take long to find them: looks that were begun end meanwhile."""
    async with connect(f"file://{tmp_path / 'a'}", driver=ScriptedDriver(["yes"])) as sessions:
        for number in range(30):
            await sessions.open(f"s{number}")
            await sessions.enqueue(f"s{number}", "Hello")
        queue: Any = sessions.store
        found, looked, stopped = queue.in_turn, [], asyncio.Event()

        async def slowly(*args: Any, **more: Any) -> Any:
            await asyncio.sleep(0.1)
            return await found(*args, **more)

        async def advance(session_id: str) -> Outcome:
            looked.append(session_id)
            if len(looked) <= 3:
                await asyncio.sleep(0.05 * len(looked))  # so that the last ones end during the search for others
            if len(looked) == 3 and looked[-1] == session_id:
                stopped.set()
            return Outcome.BUSY  # as a worker says when it is about to end

        queue.in_turn = slowly
        worker = Worker(sessions, concurrency=3)
        async with asyncio.timeout(30):
            await worker.dispatcher.work(advance, worker.options, stopped)
        assert len(looked) == 3
