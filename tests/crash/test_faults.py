"""A crash at every call of the store in turn, before and after it takes effect, and a recovery from each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.crash import agent_process
from tests.crash.addresses import address_of, store_at
from tests.crash.test_kill import results_of

from perdure import (
    Action,
    AgentDefinition,
    AgentSession,
    ApproveToolCalls,
    DenyToolCalls,
    ExecutionStatus,
    InjectMessage,
    LongestAnswer,
    LoopFactory,
    Media,
    MemoryStore,
    Message,
    ModelRequest,
    RecoveryReport,
    SendMessage,
    SendParallel,
    SessionRuntime,
    SessionStatus,
    StoreError,
    ToolCall,
    ToolExecutionEnd,
    recover,
    tool,
)
from perdure.archive import fsck
from perdure.loop.prompt import compile_prompt
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

MOST_CALLS = 200


class Ledger(list[str]):
    """The effects of the tools of `agent_process`, kept in memory."""

    def loops(self, script: Any = None) -> LoopFactory:
        @tool(idempotent=True)
        async def note(text: str) -> str:
            self.append(f"note {text}")
            await asyncio.sleep(0)
            return f"noted {text}"

        @tool
        async def charge(amount: int) -> str:
            self.append(f"charge {amount}")
            await asyncio.sleep(0)
            return f"charged {amount}"

        return LoopFactory(tools=[note, charge], driver=ScriptedDriver(script or agent_process.script()))

    def check_send(self, session: AgentSession) -> None:
        assert session.state.status is ExecutionStatus.COMPLETED
        assert session.state.final_response is not None
        assert session.state.final_response.text == "done"
        results = results_of(session)
        assert set(results) == {"c1", "c2", "c3", "c4", "c5"}
        ledgered = Counter(self)
        for call_id, line in {"c2": "charge 2", "c4": "charge 4", "c5": "charge 5"}.items():
            assert ledgered[line] <= 1, f"{call_id} was made twice"
            assert results[call_id] or ledgered[line] == 1
        for call_id, line in {"c1": "note one", "c3": "note three"}.items():
            assert not results[call_id]
            assert ledgered[line] in (1, 2)

    def check_parallel(self, session: AgentSession) -> None:
        assert session.state.final_response is not None
        assert session.state.final_response.text == "done by b, at length"
        assert max(Counter(line for line in self if line.startswith("charge")).values()) == 1


@asynccontextmanager
async def opened(kind: str, path: Path) -> AsyncIterator[Any]:
    async with MemoryStore() if kind == "memory" else store_at(address_of(kind, path)) as store:
        yield store


async def execute_and_crash(
    store: Any, session_id: str, action: Action, call: int, *, after: bool
) -> tuple[bool, Sequence[str]]:
    """Execute over a store that dies at a call. Return whether it died, and the tool calls with a result on record."""
    failing = FailingStore(store)
    failing.crash(call=call, after=after)
    try:
        await SessionRuntime(failing).execute(session_id, action)
    except StoreError:
        assert failing.has_crashed
    events = [event async for event in SessionRuntime(store).events(session_id)]
    ended = [event.execution.call for event in events if isinstance(event, ToolExecutionEnd)]
    return failing.has_crashed, [" ".join((call.name, *map(str, call.arguments.values()))) for call in ended]


async def recovered(store: Any, session_id: str, loops: LoopFactory, clock: FrozenClock) -> AgentSession:
    clock.advance(60)
    runtime = SessionRuntime(store)
    report = await recover(runtime, loops)
    assert report.failed == ()
    await runtime.idle()
    assert await store.lapsed() == []
    assert await recover(runtime, loops) == RecoveryReport()
    return await runtime.get_session(session_id)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["send", "photo", "parallel"])
async def test_a_crash_at_every_store_call_is_recovered(tmp_path: Path, kind: str, how: str, after: bool) -> None:
    """Whichever call is the last, the run ends, no completed tool runs again, and no unknown outcome is repeated."""
    async with opened(kind, tmp_path) as store:
        for call in range(1, MOST_CALLS):
            clock, ledger = FrozenClock(tick=0.0001), Ledger()
            with use(clock=clock):
                session = await SessionRuntime(store).create(agent_process.AGENT)
                crashed, completed = await execute_and_crash(store, session.id, _action(how, ledger), call, after=after)
                before = Counter(ledger)
                began = bool(await store.read(session.id))
                kept = await recovered(store, session.id, ledger.loops(_script(how)), clock)
            again = Counter(ledger) - before
            assert not any(again[line] for line in completed), f"call {call}: a completed tool ran again"
            if began:
                (ledger.check_parallel if how == "parallel" else ledger.check_send)(kept)
                assert [m.text for m in kept.state.messages if m.role == "user"] == ["Do it."]
                shown = {m.id for m in compile_prompt(kept.state.messages)}
                assert shown == {m.id for m in kept.state.messages}
            else:
                assert (kept.version, ledger) == (1, [])
            if not crashed:
                break
        assert 10 < call < MOST_CALLS - 1
        assert (await fsck(store)).problems == ()


def _script(how: str) -> Any:
    return agent_process.branch_reply if how == "parallel" else agent_process.script()


def _action(how: str, ledger: Ledger) -> Action:
    loops = ledger.loops(_script(how))
    if how == "send":
        return SendMessage("Do it.", loops)
    if how == "photo":
        return SendMessage(Message.user("Do it.", Media("image/png", data=bytes(10_000))), loops)
    return SendParallel("Do it.", loops, configs=["a", "b"], strategy=LongestAnswer())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_during_the_recovery_is_recovered(after: bool) -> None:
    """A recovery that dies at any call leaves a run that the next recovery ends."""
    for call in range(1, MOST_CALLS):
        store, clock, ledger = MemoryStore(), FrozenClock(tick=0.0001), Ledger()
        with use(clock=clock):
            session = await SessionRuntime(store).create(agent_process.AGENT)
            await execute_and_crash(store, session.id, _action("send", ledger), 6, after=True)
            clock.advance(60)
            failing = FailingStore(store)
            failing.crash(call=call, after=after)
            try:
                await recover(SessionRuntime(failing), ledger.loops())
            except StoreError:
                assert failing.has_crashed
            kept = await recovered(store, session.id, ledger.loops(), clock)
        ledger.check_send(kept)
        if not failing.has_crashed:
            break
    assert 10 < call < MOST_CALLS - 1


async def test_messages_that_waited_for_a_killed_run_are_sent_once_it_is_recovered() -> None:
    """A message that was queued behind a dead run is sent after its recovery."""
    store, clock, ledger = MemoryStore(), FrozenClock(tick=0.0001), Ledger()
    with use(clock=clock):
        runtime = SessionRuntime(store)
        session = await runtime.create(agent_process.AGENT)
        await execute_and_crash(store, session.id, _action("send", ledger), 6, after=True)
        loops = ledger.loops(lambda request: _script("send")[request.step] if "and" not in _last(request) else "Too.")
        await runtime.execute(session.id, SendMessage("and that", loops, when_busy="queue"))
        kept = await recovered(store, session.id, loops, clock)
    assert [m.text for m in kept.state.messages if m.role == "user"] == ["Do it.", "and that"]
    assert kept.state.messages[-1].text == "Too."
    assert await store.read(session.id, inbox=True) == []


def _last(request: Any) -> str:
    return next(message.text for message in reversed(request.messages) if message.role == "user")


async def test_a_repeated_key_after_a_recovery_is_answered_with_what_was_recovered() -> None:
    """A request whose run was killed and recovered is not run again when it is sent again with its key."""
    store, clock, ledger = MemoryStore(), FrozenClock(tick=0.0001), Ledger()
    with use(clock=clock):
        runtime = SessionRuntime(store)
        session = await runtime.create(agent_process.AGENT)
        action = SendMessage("Do it.", ledger.loops(), key="request-1")
        await execute_and_crash(store, session.id, action, 8, after=True)
        kept = await recovered(store, session.id, ledger.loops(), clock)
        assert await runtime.execute(session.id, action) == kept


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_approved_call_is_made_once_whatever_call_the_crash_strikes(after: bool) -> None:
    """The decision is on record before the run continues: nobody is asked twice, and nothing is made twice."""
    for call in range(1, MOST_CALLS):
        store, clock, done = MemoryStore(), FrozenClock(tick=0.0001), list[str]()
        with use(clock=clock):
            runtime = SessionRuntime(store)
            session = await runtime.create(AgentDefinition("buyer"))
            await runtime.execute(session.id, SendMessage("Buy it.", shop(done)))
            failing = FailingStore(store)
            failing.crash(call=call, after=after)
            try:
                await SessionRuntime(failing).execute(session.id, ApproveToolCalls(shop(done)))
            except StoreError:
                assert failing.has_crashed
            began = await store.lapsed() == []
            kept = await recovered(store, session.id, shop(done), clock)
        assert len(done) <= 1, f"call {call}: an approved call was made twice"
        if kept.version == 2:
            assert began, f"call {call}: a run that had begun was not recovered"
            assert (done, kept.status) == ([], SessionStatus.SUSPENDED)
        else:
            assert (kept.status, kept.state.messages[-1].text) == (SessionStatus.ACTIVE, "Bought.")
            assert set(results_of(kept)) == {"b1"}
        if not failing.has_crashed:
            break
    assert 5 < call < MOST_CALLS - 1


def shop(done: list[str]) -> LoopFactory:
    """Return an agent with a tool that a person has to approve."""

    @tool(needs_approval=True)
    def buy(what: str) -> str:
        done.append(what)
        return f"bought {what}"

    return LoopFactory(tools=[buy], driver=ScriptedDriver([ToolCall("buy", {"what": "cup"}, id="b1"), "Bought."]))


async def test_a_parent_that_is_recovered_alone_resumes_its_child() -> None:
    """The child's completed call is not made again, though only the parent was named."""
    store, clock, ledger = MemoryStore(), FrozenClock(tick=0.0001), Ledger()
    failing = FailingStore(store)

    @tool
    def charge(amount: int) -> str:
        ledger.append(f"charge {amount}")
        failing.crash(call=1)
        return "charged"

    def reply(request: ModelRequest) -> Any:
        call = ToolCall("helper", {"prompt": "sub"}) if request.messages[0].text == "top" else None
        return (call or ToolCall("charge", {"amount": 1})) if request.step == 0 else "done"

    loops = LoopFactory(driver=ScriptedDriver(reply), tools=[charge], subagents=[AgentDefinition("helper")])
    with use(clock=clock):
        session = await SessionRuntime(store).create(AgentDefinition("top"))
        with pytest.raises(StoreError):
            await SessionRuntime(failing).execute(session.id, SendMessage("top", loops))
        clock.advance(60)
        report = await recover(SessionRuntime(store), loops, session_id=session.id)
    assert report.resumed == (session.id,)
    assert ledger == ["charge 1"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_a_decision_about_a_sub_agent_takes_effect_once_whatever_call_the_crash_strikes(
    decision: str, after: bool
) -> None:
    """The sub-agent wants the same payment twice: a decision allows one at most, and the other waits for its own."""
    for call in range(1, MOST_CALLS):
        store, clock, done = MemoryStore(), FrozenClock(tick=0.0001), list[str]()
        with use(clock=clock):
            runtime = SessionRuntime(store)
            session = await runtime.create(AgentDefinition("boss", system_prompt="boss", tools=("buyer",)))
            await runtime.execute(session.id, SendMessage("Buy it.", shop_of_a_sub_agent(done)))
            failing = FailingStore(store)
            failing.crash(call=call, after=after)
            action: Action = ApproveToolCalls(shop_of_a_sub_agent(done))
            if decision == "deny":
                action = DenyToolCalls(shop_of_a_sub_agent(done), reason="too dear")
            with suppress(StoreError):
                await SessionRuntime(failing).execute(session.id, action)
            kept = await recovered(store, session.id, shop_of_a_sub_agent(done), clock)
        assert len(done) <= (decision == "approve"), f"call {call}: a payment was made that nobody has approved"
        if decision == "deny" and "ask" in results_of(kept):
            assert "too dear" in kept.state.messages[2].tool_results[0].text
        else:
            assert kept.status is SessionStatus.SUSPENDED
        if not failing.has_crashed:
            assert done == (["cup"] if decision == "approve" else [])
            break
    assert 5 < call < MOST_CALLS - 1


def shop_of_a_sub_agent(done: list[str]) -> LoopFactory:
    """Return an agent whose sub-agent wants to buy the same thing twice, and has to ask each time."""

    @tool(needs_approval=True)
    def buy(what: str) -> str:
        done.append(what)
        return f"bought {what}"

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "boss":
            return "Done." if request.step else ToolCall("buyer", {"prompt": "Two cups."}, "ask")
        return "Bought." if request.step == 2 else ToolCall("buy", {"what": "cup"})

    buyer = AgentDefinition("buyer", system_prompt="buyer", tools=("buy",))
    return LoopFactory(tools=[buy], subagents=[buyer], driver=ScriptedDriver(reply))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_a_redaction_beside_a_recovery_is_not_undone(tmp_path: Path, kind: str) -> None:
    """A recovery that has loaded the session before shows nobody the old text: not the model, not a later load."""
    async with opened(kind, tmp_path) as store:
        clock, ledger, seen = FrozenClock(tick=0.0001), Ledger(), list[str]()
        with use(clock=clock):
            runtime = SessionRuntime(store)
            session = await runtime.create(agent_process.AGENT)
            session = await runtime.execute(session.id, InjectMessage("The code is 4711.", "I see."))
            await execute_and_crash(store, session.id, _action("send", ledger), 6, after=True)
            clock.advance(60)
            script = _script("send")

            def answer(request: ModelRequest) -> Any:
                seen.extend(message.text for message in request.messages)
                return script[request.step]

            late = FailingStore(store)
            claim = store.claim

            async def redacted_first(*args: Any, **options: Any) -> Any:
                if not await store.redact(session.id, [session.state.messages[0].id]):
                    raise AssertionError("it was redacted before")
                return await claim(*args, **options)

            late.claim = redacted_first  # type: ignore[attr-defined]
            await recover(SessionRuntime(late), ledger.loops(answer))
            kept = await SessionRuntime(store).get_session(session.id)
        assert kept.state.messages[0].text == "[redacted]"
        assert seen
        assert not any("4711" in text for text in seen)
        ledger.check_send(kept)
