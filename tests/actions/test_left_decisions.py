"""Decisions that are left to a worker: on record at once, and carried out by a process with the tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import address_of, store_at
from tests.waiting import until

from perdure import (
    AgentDefinition,
    AnswerToolCalls,
    ApproveToolCalls,
    ConfigurationError,
    InvalidData,
    LoopFactory,
    MemoryStore,
    PendingCall,
    PendingCallsChanged,
    ResumeExecution,
    RunInterrupted,
    SessionNotFound,
    SessionRuntime,
    Sessions,
    SessionStatus,
    StopReason,
    StoreError,
    ToolCall,
    Worker,
    connect,
    external_tool,
    tool,
)
from perdure.actions.parking import deaths
from perdure.archive import fsck
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver
from perdure.workers import InboxDispatcher, advance
from perdure.workers.procrastinate import ProcrastinateDispatcher

BOSS, CLERK = AgentDefinition("boss"), AgentDefinition("clerk", system_prompt="clerk")
WEATHER = external_tool("weather", "Look at the weather.")
PAY = [ToolCall("pay", {"amount": 3}, "p1"), ToolCall("pay", {"amount": 4}, "p2")]
ASK = ToolCall("weather", {}, "w1")
KINDS = ["memory", "sqlite", "files", "postgres"]


class Firm:
    """A model and tools that keep a list of their calls. Only workers have them."""

    def __init__(self, *calls: ToolCall, by_clerk: bool = False) -> None:
        self.done: list[int] = []

        @tool(needs_approval=True)
        def pay(amount: int) -> str:
            """Pay."""
            self.done.append(amount)
            return f"paid {amount}"

        self._calls = calls
        self._by_clerk = by_clerk
        self.requests: list[Any] = []
        self.here: dict[str, Any] = {
            "driver": ScriptedDriver(self._reply),
            "tools": [pay, WEATHER],
            "subagents": [CLERK],
        }

    def _reply(self, request: Any) -> Any:
        self.requests.append(request)
        said = request.messages[-1].text
        if request.messages[-1].role == "user" and said not in ("Go", "Do it."):
            return f"Re: {said}"
        if request.step:
            return " ".join(message.text for message in request.messages if message.role == "tool")
        if self._by_clerk and request.system_prompt != "clerk":
            return ToolCall("clerk", {"prompt": "Do it."}, "k1")
        return list(self._calls)


@asynccontextmanager
async def both(kind: str, where: Path, firm: Firm, **options: Any) -> AsyncIterator[tuple[Sessions, Sessions]]:
    """Open, on one store, a connection without tools or a model, and one with both."""
    if kind == "memory":
        async with MemoryStore() as store, connect(store) as office, connect(store, **firm.here, **options) as shop:
            yield office, shop
        return
    address = address_of(kind, where)
    async with connect(store_at(address)) as office, connect(store_at(address), **firm.here, **options) as shop:
        yield office, shop


@asynccontextmanager
async def waiting(kind: str, where: Path, firm: Firm, **options: Any) -> AsyncIterator[tuple[Sessions, Sessions]]:
    """Open the same, with a session that waits."""
    async with both(kind, where, firm, **options) as (office, shop):
        await shop.open("a", BOSS)
        await shop.send("a", "Go", key="k")
        yield office, shop


@asynccontextmanager
async def working(sessions: Sessions, dispatcher: Any = None) -> AsyncIterator[None]:
    async with Worker(sessions, lease=3.0, dispatcher=dispatcher) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            await running


async def pending(sessions: Sessions, session_id: str = "a") -> list[str]:
    execution = (await sessions.session(session_id)).state.execution
    return [call.id for call in execution.pending_calls] if execution else []


async def said(sessions: Sessions, session_id: str = "a") -> str:
    return (await sessions.session(session_id)).state.messages[-1].text


DECISIONS: dict[str, tuple[Callable[[Sessions], Any], list[int], str]] = {
    "approve": (lambda office: office.approve("a", wait=False), [3, 4], "paid 3 paid 4"),
    "deny": (
        lambda office: office.deny("a", "too much", wait=False),
        [],
        " ".join(["Denied: A person has denied this call: too much"] * 2),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("verb", DECISIONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_carries_out_what_was_decided_elsewhere(tmp_path: Path, kind: str, verb: str) -> None:
    """The person who decides needs neither tools nor a model, and does not wait."""
    decide, done, answer = DECISIONS[verb]
    firm = Firm(*PAY)
    async with waiting(kind, tmp_path, firm) as (office, shop):
        before = await office.session("a")
        reply = await decide(office)
        assert (reply.queued, reply.pending_calls, reply.text) == (True, (), "")
        assert await office.session("a") == before, "the version moves once, when the run ends"
        view = await office.view("a")
        assert (view.activity, view.pending_calls) == ("left", ())
        assert (firm.done, len(firm.requests)) == ([], 1)
        journal: Any = office.store
        assert await deaths(journal, "a") == 0
        assert await journal.lapsed() == ["a"]
        async with working(shop):
            await until(lambda: _is_idle(office))
        assert (sorted(firm.done), await said(office)) == (done, answer)
        assert (await office.session("a")).status is SessionStatus.ACTIVE
        kept = await office.result("a", "k")
        assert kept is not None
        assert kept.text == answer
        assert (await fsck(office.store)).problems == ()


@pytest.mark.parametrize("made", [InboxDispatcher, ProcrastinateDispatcher])
async def test_workers_on_postgres_find_it(tmp_path: Path, made: Any) -> None:
    """They find it with and without procrastinate, also in a process that was never notified of it."""
    firm = Firm(*PAY)
    async with waiting("postgres", tmp_path, firm) as (office, shop), working(shop, made(shop.store)):
        await office.approve("a", wait=False)
        await until(lambda: _is_idle(office))
        assert sorted(firm.done) == [3, 4]


async def _is_idle(sessions: Sessions, session_id: str = "a") -> bool:
    return (await sessions.view(session_id)).activity == "idle"


@pytest.mark.parametrize("by_clerk", [False, True])
@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_an_answer_from_outside_is_left(tmp_path: Path, kind: str, is_error: bool, by_clerk: bool) -> None:
    """It can be for a call of the session's own, or through it for one of a sub-agent."""
    firm = Firm(ASK, by_clerk=by_clerk)
    async with waiting(kind, tmp_path, firm) as (office, shop):
        given = {"w1": "no network"} if is_error else {"w1": {"degrees": 7}}
        reply = await (
            office.answer("a", errors=given, wait=False) if is_error else office.answer("a", given, wait=False)
        )
        assert reply.queued
        assert (await shop.recover()).resumed == ("a",)
        assert ("no network" if is_error else '"degrees"') in await said(office)
        assert await pending(office) == []


@pytest.mark.parametrize("verb", ["approve", "deny"])
async def test_a_sub_agents_calls_are_decided_on_as_they_were_shown(tmp_path: Path, verb: str) -> None:
    """The digest of the caller's call covers the sub-agent's calls."""
    firm = Firm(PAY[0], by_clerk=True)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        execution = (await office.session("a")).state.execution
        assert execution is not None
        (call,) = execution.pending_calls
        if verb == "approve":
            await office.approve("a", [call.digest], wait=False)
        else:
            await office.deny("a", "no", [call], wait=False)
        assert await advance(shop, "a") == "done"
        assert firm.done == ([3] if verb == "approve" else [])
        assert ("paid 3" if verb == "approve" else "denied this call: no") in await said(office)


async def test_a_sub_agent_that_wants_something_else_by_then_waits_again(tmp_path: Path) -> None:
    """A call that was decided in the sub-agent's own session is not decided again."""
    firm = Firm(*PAY, by_clerk=True)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        execution = (await office.session("a")).state.execution
        assert execution is not None
        (call,) = execution.pending_calls
        await office.approve("a", wait=False)
        assert call.session_id is not None
        await shop.deny(call.session_id, "not that one", ["p1"])
        await shop.recover()
        assert (await pending(office), firm.done) == (["k1"], [])
        with pytest.raises(PendingCallsChanged):
            await office.approve("a", [call], wait=False)
        await office.approve("a", wait=False)
        await shop.recover()
        assert firm.done == [4]


async def test_of_several_calls_those_not_decided_on_wait_again(tmp_path: Path) -> None:
    """They wait as if the run had continued at once; then the rest is decided."""
    firm = Firm(*PAY, ASK)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.approve("a", ["p2"], wait=False)
        assert (await shop.recover()).suspended == ("a",)
        assert (await pending(office), firm.done, len(firm.requests)) == (["p1", "w1"], [4], 1)
        with pytest.raises(InvalidData, match="called outside"):
            await office.approve("a", ["w1"], wait=False)
        await office.deny("a", "no", ["p1"], wait=False)
        await shop.recover()
        await office.answer("a", {"w1": "rain"}, wait=False)
        await shop.recover()
        assert (await pending(office), firm.done) == ([], [4])
        assert (await said(office)).endswith("denied this call: no paid 4 rain")


async def test_a_second_decision_is_refused_until_the_run_is_continued(tmp_path: Path) -> None:
    """A process with tools continues the run first, with the first decision, and then has nothing to decide."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.deny("a", "no", wait=False)
        record = await office.store.read("a")  # type: ignore[attr-defined]
        for second in (
            lambda: office.approve("a", wait=False),
            lambda: office.deny("a", "no", ["p1"], wait=False),
            lambda: office.answer("a", {"w1": "rain"}, wait=False),
            lambda: office.approve("a", ["p9"], wait=False),
        ):
            with pytest.raises(PendingCallsChanged, match="somebody has decided already"):
                await second()
        with pytest.raises(ConfigurationError):  # it cannot be continued without a model
            await office.approve("a")
        assert await office.store.read("a") == record  # type: ignore[attr-defined]
        with pytest.raises(InvalidData, match="no tool call"):
            await shop.approve("a")
        assert (firm.done, await pending(office)) == ([], [])


async def test_a_decision_about_other_calls_is_not_told_that_they_are_decided(tmp_path: Path) -> None:
    """They wait again once a worker has continued the run. Until then they are not reported as settled."""
    firm = Firm(*PAY, ASK)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        execution = (await office.session("a")).state.execution
        assert execution is not None
        calls = {call.id: call for call in execution.pending_calls}
        await office.approve("a", ["p2"], wait=False)
        for second in (
            lambda: office.approve("a", wait=False),
            lambda: office.approve("a", [calls["p1"]], wait=False),
            lambda: office.deny("a", "no", [calls["p1"].digest, "p2"], wait=False),
            lambda: office.answer("a", {"w1": "rain"}, wait=False),
            lambda: office.settle("a", deny={"p1": "no"}, answers={calls["w1"].digest: "rain"}, wait=False),
        ):
            with pytest.raises(RunInterrupted, match="left to a worker"):
                await second()
        for second in (
            lambda: office.approve("a", [calls["p2"]], wait=False),
            lambda: office.deny("a", "no", ["p2"], wait=False),
        ):
            with pytest.raises(PendingCallsChanged, match="somebody has decided already"):
                await second()
        await shop.recover()
        await office.settle("a", deny={"p1": "no"}, answers={"w1": "rain"}, wait=False)
        await shop.recover()
        assert (await pending(office), firm.done) == ([], [4])


async def test_two_who_decide_at_once(tmp_path: Path) -> None:
    """One decision holds, and the other is refused. No call is made without an approval."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        outcomes = await asyncio.gather(
            office.approve("a", wait=False), shop.deny("a", "no", wait=False), return_exceptions=True
        )
        (refused,) = (each for each in outcomes if isinstance(each, Exception))
        assert isinstance(refused, PendingCallsChanged)
        await shop.recover()
        assert sorted(firm.done) == ([3, 4] if outcomes[1] is refused else [])


async def test_what_was_left_behind_it_is_sent_after_it(tmp_path: Path) -> None:
    """The same worker continues the run first."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        queued = await office.enqueue("a", "And then?")
        await office.approve("a", wait=False)
        async with working(shop):
            reply = await queued.reply(timeout=20)
        assert reply is not None
        assert reply.text == "Re: And then?"
        texts = [message.text for message in await office.history("a") if message.role != "tool"]
        assert texts == ["Go", "", "paid 3 paid 4", "And then?", "Re: And then?"]


async def test_a_message_continues_the_run_first(tmp_path: Path) -> None:
    """It does where the tools are. Elsewhere it is refused, and changes nothing."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.approve("a", wait=False)
        async with connect(store_at(address_of("sqlite", tmp_path)), driver=firm.here["driver"]) as bare:
            with pytest.raises(ConfigurationError, match="'pay'"):
                await bare.send("a", "Hello")
        assert (await shop.send("a", "Hello")).text == "Re: Hello"
        assert sorted(firm.done) == [3, 4]


async def test_it_is_cancelled_before_a_worker_comes(tmp_path: Path) -> None:
    """Any process can cancel it. No call is made, and the answer stays on record."""
    firm = Firm(*PAY, ASK)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.answer("a", {"w1": "rain"}, wait=False)
        assert await office.cancel("a")
        session = await office.session("a")
        assert (session.status, session.state.stop_reason) == (SessionStatus.ACTIVE, StopReason.USER_REQUESTED)
        assert (await shop.recover()).resumed == ()
        assert (firm.done, await pending(office)) == ([], [])
        starts = [event async for event in office.events("a") if type(event).__name__ == "AgentStart"]
        assert [answer.result for start in starts for answer in start.answers] == ["rain"]


@pytest.mark.parametrize("by_clerk", [False, True])
async def test_what_would_drop_the_decision_is_refused(tmp_path: Path, by_clerk: bool) -> None:
    """It is refused as for any run that waits to be continued. A fork is another session, with nothing decided."""
    firm = Firm(*PAY, by_clerk=by_clerk)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.approve("a", wait=False)
        for change in (
            lambda: shop.undo("a"),
            lambda: shop.rewind("a", 1),
            lambda: shop.reset("a"),
            lambda: shop.compact("a", compact_strategy="truncate", keep_last=0),
            lambda: shop.rename("a", "A"),
            lambda: shop.resume("a"),
        ):
            with pytest.raises(RunInterrupted):
                await change()
        await office.fork("a", "b")
        await shop.recover()
        assert sorted(firm.done) == [3, 4]
        assert await pending(office) == []
        assert "paid 3" not in str(await office.history("b"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("by_clerk", [False, True])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_who_decides_dies_at_any_call(tmp_path: Path, kind: str, by_clerk: bool, after: bool) -> None:
    """The decision is on record, whole, or the calls still wait. No death is counted."""
    firm = Firm(*PAY, ASK, by_clerk=by_clerk)
    outcomes = set()
    async with both(kind, tmp_path, firm) as (office, shop):
        store: Any = office.store
        for call in range(1, 60):
            name, done = f"s{call}", len(firm.done)
            await shop.open(name, BOSS)
            await shop.send(name, "Go")
            asked = (await _leaves(shop, name))[-1]
            failing: Any = FailingStore(store)
            failing.crash(call=call, after=after)
            with suppress(StoreError):
                answer = AnswerToolCalls(LoopFactory(), {asked.id: "rain"}, wait=False)
                await SessionRuntime(failing).execute(name, answer)
            is_decided = any(entry.body.get("answers") for entry in await store.read(name))
            outcomes.add(is_decided)
            assert await store.is_interrupted(name) is is_decided, "and at once, without a lease"
            assert await deaths(store, name) == 0 or not is_decided
            await shop.recover()
            waits = [leaf.name for leaf in await _leaves(shop, name)]
            assert waits == ["pay", "pay", "weather"][: 2 if is_decided else 3]
            assert len(firm.done) == done
            if not failing.has_crashed:
                break
        assert outcomes == {False, True}
        assert 3 < call < 59


async def _leaves(sessions: Sessions, session_id: str) -> list[PendingCall]:
    execution = (await sessions.session(session_id)).state.execution
    assert execution is not None
    return [leaf for call in execution.pending_calls for leaf in call.leaves]


async def test_a_worker_that_dies_with_it_is_the_first_death(tmp_path: Path) -> None:
    """Neither the wait for a person nor the decision counts, so all tries are the worker's own."""
    firm, counted = Firm(*PAY), []
    async with both("memory", tmp_path, firm) as (office, shop):
        store: Any = office.store
        for call in range(1, 60):
            await shop.open(f"s{call}", BOSS)
            await shop.send(f"s{call}", "Go")
            await office.approve(f"s{call}", wait=False)
            failing: Any = FailingStore(store)
            failing.crash(call=call, after=True)
            with suppress(StoreError):
                await SessionRuntime(failing).execute(f"s{call}", ResumeExecution(shop.loops))
            if not failing.has_crashed:
                break
            if not any(entry.kind == "tool_execution_end" for entry in await store.read(f"s{call}")):
                counted.append(await deaths(store, f"s{call}"))
    assert set(counted) == {0, 1}


async def test_an_owner_decides_on_their_own_sessions_only(tmp_path: Path) -> None:
    """This holds also while the owner has the most runs allowed: nothing is run."""
    firm = Firm(*PAY)
    async with both("sqlite", tmp_path, firm) as (office, shop):
        chat = await shop.of("ada").open("a", BOSS)
        await chat.send("Go")
        with pytest.raises(SessionNotFound):
            await office.of("ben").approve(chat.id, wait=False)
        assert not await office.store.is_interrupted(chat.id)  # type: ignore[attr-defined]
        other = await shop.of("ada").open("other", BOSS)
        claim, _ = await shop.store.claim(other.id, version=1, owner="x")  # type: ignore[attr-defined]
        limited = connect(store_at(address_of("sqlite", tmp_path)), per_owner=1)
        async with limited:
            assert (await limited.of("ada").approve("a", wait=False)).queued
        await shop.store.release(claim)  # type: ignore[attr-defined]
        await shop.recover()
        assert sorted(firm.done) == [3, 4]


async def test_a_worker_in_the_same_process_is_told_at_once(tmp_path: Path) -> None:
    """A worker that never sweeps carries it out."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (_, shop):
        async with Worker(shop, lease=30.0) as worker:
            worker._sweep = _nothing  # type: ignore[method-assign]  # on purpose
            running = asyncio.create_task(worker.run())
            await shop.approve("a", wait=False)
            await until(lambda: _is_idle(shop))
            worker.stop()
            await running
        assert sorted(firm.done) == [3, 4]


async def _nothing() -> None:
    """Look for nothing."""


async def test_what_cannot_be_left(tmp_path: Path) -> None:
    """A context is an object of this process, and a store without a journal has no record."""
    firm = Firm(*PAY)
    async with waiting("sqlite", tmp_path, firm) as (office, _):
        for decide in (office.approve, lambda *_, **given: office.deny("a", "no", **given)):
            with pytest.raises(InvalidData, match="would not be there"):
                await decide("a", context=object(), wait=False)
            with pytest.raises(InvalidData, match="expected a bool"):
                await decide("a", wait="no")
        with pytest.raises(InvalidData, match="does not wait for an answer"):
            await office.answer("a", {"p1": "paid"}, wait=False)
        with pytest.raises(PendingCallsChanged):
            await office.approve("a", ["0" * 64], wait=False)
        session = await office.session("a")
        with pytest.raises(ConfigurationError, match="journal"):
            await ApproveToolCalls(LoopFactory(), wait=False).execute_on(session)
        assert not await office.store.is_interrupted("a")  # type: ignore[attr-defined]


async def test_the_time_until_a_worker_comes_is_idle(tmp_path: Path) -> None:
    """It counts as the time that the run waited for a person."""
    firm, clock = Firm(*PAY), FrozenClock(tick=0.001)
    with use(clock=clock):
        async with waiting("memory", tmp_path, firm) as (office, shop):
            clock.advance(100)
            await office.approve("a", wait=False)
            clock.advance(50)
            await shop.recover()
            execution = (await office.session("a")).state.execution
            assert execution is not None
            assert 150 <= execution.idle < 151
            (header,) = (await office.record("a")).loops
            assert header.idle == pytest.approx(execution.idle)


async def test_a_redaction_reaches_an_answer_that_was_left(tmp_path: Path) -> None:
    """Once the model has seen it, redacting its message redacts the answer on record too."""
    firm = Firm(ASK)
    async with waiting("sqlite", tmp_path, firm) as (office, shop):
        await office.answer("a", {"w1": "snow in the secret valley"}, wait=False)
        await shop.recover()
        told = [message.id for message in await office.history("a") if message.role == "tool"]
        final = [message.id for message in await office.history("a") if message.role == "assistant"]
        await shop.redact("a", [*told, final[-1]])
        assert "secret valley" not in str(await office.store.read("a"))  # type: ignore[attr-defined]


async def test_it_is_continued_with_the_context_and_the_key_of_its_message(tmp_path: Path) -> None:
    """The sender's context data is on record, and the worker makes a context of it."""
    seen: list[Any] = []
    firm = Firm(*PAY)
    makes = {"context": lambda session, data: seen.append(data) or "made"}
    async with both("sqlite", tmp_path, firm, **makes) as (office, shop):
        await shop.open("a", BOSS)
        await shop.send("a", "Go", key="k", context_data={"user": "ada"})
        seen.clear()
        await office.approve("a", wait=False)
        under_way = await office.result("a", "k")
        assert under_way is not None
        assert (under_way.queued, under_way.running) == (True, True)
        await shop.recover()
        assert seen == [{"user": "ada"}]
        kept = await office.result("a", "k")
        assert kept is not None
        assert kept.text == "paid 3 paid 4"
