"""Calls that wait for a person: the run stops before them, and continues once they are decided, in any process."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import (
    AgentDefinition,
    AgentSession,
    AgentState,
    AgentStop,
    ApproveToolCalls,
    CompleteSession,
    ConfigurationError,
    DeleteSession,
    DenyToolCalls,
    ExecutionState,
    ExecutionStatus,
    FailSession,
    IllegalStatusChange,
    Interceptor,
    InvalidData,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    Message,
    ModelReply,
    ModelRequest,
    PendingCall,
    PendingCallsChanged,
    ResetTranscript,
    ResumeExecution,
    ResumeSession,
    SendMessage,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionRuntime,
    SessionStatus,
    SqliteStore,
    StopReason,
    StoreError,
    ToolCall,
    TrimTranscript,
    Undo,
    recover,
    tool,
)
from perdure.model.ids import use
from perdure.protocols import Entry
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("agent")


class Shop:
    """Three tools that keep a list of their calls, and an agent that calls them all at once."""

    def __init__(self, **options: Any) -> None:
        self.done: list[str] = []

        @tool
        def look(what: str) -> str:
            self.done.append(f"look {what}")
            return f"a {what}"

        @tool(needs_approval=True)
        def buy(what: str) -> str:
            self.done.append(f"buy {what}")
            return f"bought {what}"

        @tool(needs_approval=lambda arguments: arguments["price"] > 100)
        def sell(what: str, price: int = 500) -> str:
            self.done.append(f"sell {what} for {price}")
            return f"sold {what}"

        self.tools = [look, buy, sell]
        self.driver = ScriptedDriver([options.pop("calls", self.calls), "All done."])
        self.loops = LoopFactory(driver=self.driver, tools=self.tools, **options)

    calls = [
        ToolCall("look", {"what": "cup"}, "1"),
        ToolCall("buy", {"what": "cup"}, "2"),
        ToolCall("sell", {"what": "jug"}, "3"),
        ToolCall("sell", {"what": "pan", "price": "10"}, "4"),
    ]


async def waiting(shop: Shop, store: Any = None) -> tuple[SessionRuntime, AgentSession]:
    runtime = SessionRuntime(store or MemoryStore())
    session = await runtime.create(AGENT)
    return runtime, await runtime.execute(session.id, SendMessage("Go.", shop.loops))


def pending(session: AgentSession) -> list[str]:
    assert session.state.execution is not None
    return [call.id for call in session.state.execution.pending_calls]


def results(session: AgentSession) -> dict[str, str]:
    found = [result for message in session.state.messages for result in message.tool_results]
    assert len({result.call_id for result in found}) == len(found), "no call has two results"
    return {result.call_id: result.text for result in found}


async def test_a_call_that_needs_approval_suspends_the_session() -> None:
    """The other calls of the step are made; the waiting ones are on the state; the claim is released."""
    shop, store = Shop(), MemoryStore()
    _, session = await waiting(shop, store)
    assert (session.status, session.state.status) == (SessionStatus.SUSPENDED, ExecutionStatus.IN_PROGRESS)
    assert (pending(session), sorted(shop.done)) == (["2", "3"], ["look cup", "sell pan for 10"])
    assert not await store.is_claimed(session.id)
    assert len(shop.driver.requests) == 1


async def test_a_predicate_sees_the_arguments_as_the_tool_does() -> None:
    """A default counts as if it had been given, and a number that came as text is a number."""
    shop = Shop()
    _, session = await waiting(shop)
    assert "3" in pending(session), "sell(price=500) by default"
    assert "sell pan for 10" in shop.done


async def test_approved_calls_are_made_and_the_run_goes_on() -> None:
    """Each call is made once, in the same execution, and the model gets all results in one list."""
    shop = Shop()
    runtime, before = await waiting(shop)
    session = await runtime.execute(before.id, ApproveToolCalls(shop.loops))
    assert (session.status, session.state.status) == (SessionStatus.ACTIVE, ExecutionStatus.COMPLETED)
    assert sorted(shop.done) == ["buy cup", "look cup", "sell jug for 500", "sell pan for 10"]
    assert results(session) == {"1": "a cup", "2": "bought cup", "3": "sold jug", "4": "sold pan"}
    assert before.state.execution is not None
    assert session.state.execution is not None
    assert session.state.execution.execution_id == before.state.execution.execution_id
    assert (session.state.step_count, session.version) == (2, before.version + 1)
    told = [message.tool_results[0].call_id for message in shop.driver.requests[1].messages if message.tool_results]
    assert told == ["1", "2", "3", "4"]


async def test_denied_calls_are_answered_with_the_reason() -> None:
    """A denied call is not made; the model is told the reason, and continues."""
    shop = Shop()
    runtime, session = await waiting(shop)
    session = await runtime.execute(session.id, DenyToolCalls(shop.loops, reason="too dear"))
    assert (session.status, session.state.status) == (SessionStatus.ACTIVE, ExecutionStatus.COMPLETED)
    assert sorted(shop.done) == ["look cup", "sell pan for 10"]
    assert results(session)["2"] == "Denied: A person has denied this call: too dear"


async def test_some_may_be_decided_now_and_others_later_elsewhere(tmp_path: Path) -> None:
    """Any process can decide, at any time: undecided calls still wait, and nothing runs twice."""
    shop = Shop()
    async with SqliteStore(tmp_path / "s.db") as here:
        runtime, session = await waiting(shop, here)
        session = await runtime.execute(session.id, ApproveToolCalls(shop.loops, call_ids=["3"]))
        assert (session.status, pending(session)) == (SessionStatus.SUSPENDED, ["2"])
    async with SqliteStore(tmp_path / "s.db") as there:
        elsewhere = SessionRuntime(there)
        loaded = await elsewhere.get_session(session.id)
        assert pending(loaded) == ["2"]
        deny = DenyToolCalls(shop.loops, reason="no", call_ids=["2"])
        session = await elsewhere.execute(session.id, deny)
    assert (session.status, session.state.status) == (SessionStatus.ACTIVE, ExecutionStatus.COMPLETED)
    assert sorted(shop.done) == ["look cup", "sell jug for 500", "sell pan for 10"]
    assert len(shop.driver.requests) == 2


async def test_a_suspended_session_takes_no_messages() -> None:
    """Nothing is sent, resumed or changed while calls wait for a decision."""
    shop = Shop()
    runtime, session = await waiting(shop)
    with pytest.raises(SessionNotActive):
        await runtime.execute(session.id, SendMessage("Hurry!", shop.loops))
    with pytest.raises(IllegalStatusChange, match="ApproveToolCalls"):
        await runtime.execute(session.id, ResumeSession())
    assert (await runtime.get_session(session.id)).version == session.version
    assert len(shop.driver.requests) == 1


@pytest.mark.parametrize("call_ids", [["9"], ["1"], "2", []])
async def test_a_decision_about_another_call_is_refused(call_ids: Any) -> None:
    """An id that does not wait, a text instead of ids, or no id at all is InvalidData and changes nothing."""
    shop = Shop()
    runtime, session = await waiting(shop)
    with pytest.raises(InvalidData):
        await runtime.execute(session.id, ApproveToolCalls(shop.loops, call_ids=call_ids))
    with pytest.raises(InvalidData):
        await runtime.execute(session.id, DenyToolCalls(shop.loops, reason="no", call_ids=call_ids))
    assert pending(await runtime.get_session(session.id)) == ["2", "3"]


async def test_what_cannot_be_called_is_not_approved() -> None:
    """A call keeps waiting where its tool is missing; it can be denied there."""
    shop = Shop()
    runtime, session = await waiting(shop)
    bare = LoopFactory(driver=ScriptedDriver(["Denied."]), tools=[])
    with pytest.raises(ConfigurationError, match=r"'buy'.*--tools"):
        await runtime.execute(session.id, ApproveToolCalls(bare))
    assert await runtime.get_session(session.id) == session
    after = await runtime.execute(session.id, DenyToolCalls(bare, reason="no"))
    assert pending(after) == []


async def test_a_call_that_is_not_decided_on_waits_for_its_tool_too() -> None:
    """Neither a decision nor a recovery elsewhere tells the model that its tool does not exist."""
    shop, store = Shop(), FailingStore(MemoryStore())
    runtime, session = await waiting(shop, store)
    sell = LoopFactory(driver=ScriptedDriver(["Done."]), tools=shop.tools[2:])
    for decision in (
        ApproveToolCalls(sell, call_ids=["3"]),
        DenyToolCalls(sell, reason="no", call_ids=["3"]),
    ):
        with pytest.raises(ConfigurationError, match="a call of 'buy'") as refused:
            await runtime.execute(session.id, decision)
        assert (refused.value.missing, refused.value.name) == ("tool", "buy")
        assert await runtime.get_session(session.id) == session
    store.fail("append")  # after the approval is on record, and before a call is made
    with pytest.raises(StoreError):
        await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    assert len((await recover(runtime, sell)).failed) == 1
    assert len((await recover(runtime, shop.loops)).resumed) == 1
    assert results(await runtime.get_session(session.id))["2"] == "bought cup"


async def test_there_must_be_something_to_decide() -> None:
    """A session without waiting calls, and a denial without a reason, are refused."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    with pytest.raises(InvalidData, match="no tool call"):
        await runtime.execute(session.id, ApproveToolCalls(Shop().loops))
    with pytest.raises(InvalidData, match="reason"):
        DenyToolCalls(Shop().loops, reason=" ")


class Doubling(Interceptor):
    """Appends a text to the arguments of each call."""

    def __init__(self) -> None:
        self.more = " and saucer"

    def before_tool_use(self, call: ToolCall, state: AgentState) -> ToolCall:
        return replace(call, arguments={**call.arguments, "what": call.arguments["what"] + self.more})


BUY = [ToolCall("buy", {"what": "cup"}, "2")]


async def test_a_person_approves_the_call_as_it_would_be_made() -> None:
    """An interceptor's changed call is the one that waits, is approved, and is run."""
    shop = Shop(calls=BUY, interceptors=[Doubling()])
    runtime, session = await waiting(shop)
    assert session.state.execution is not None
    assert session.state.execution.pending_calls[0].arguments == {"what": "cup and saucer"}
    session = await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    assert (session.status, shop.done) == (SessionStatus.ACTIVE, ["buy cup and saucer"])


async def test_an_approval_is_for_these_arguments_and_no_others() -> None:
    """A call whose arguments are no longer the approved ones is not made: it waits again, as it is now."""
    changing = Doubling()
    shop = Shop(calls=BUY, interceptors=[changing])
    runtime, session = await waiting(shop)
    changing.more = " and palace"
    session = await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    assert (session.status, shop.done) == (SessionStatus.SUSPENDED, [])
    assert session.state.execution is not None
    assert session.state.execution.pending_calls[0].arguments == {"what": "cup and palace"}


async def test_a_stop_leaves_nothing_waiting() -> None:
    """A run that is stopped by another call of the step is over: its session stays active, with no calls pending."""

    @tool
    def halt() -> None:
        raise AgentStop("enough")

    shop = Shop()
    loops = LoopFactory(driver=ScriptedDriver([[*BUY, ToolCall("halt")]]), tools=[*shop.tools, halt])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    session = await runtime.execute(session.id, SendMessage("Go.", loops))
    assert (session.status, session.state.stop_reason) == (SessionStatus.ACTIVE, StopReason.STOP_REQUESTED)
    assert (pending(session), shop.done) == ([], [])


async def test_what_was_queued_meanwhile_is_sent_after_the_decision() -> None:
    """A message posted to a run that then waited is sent once that run has ended."""
    shop, store = Shop(calls=BUY), MemoryStore()
    runtime, session = await waiting(shop, store)
    message = {"format": 1, "role": "user", "parts": [{"type": "text", "text": "And a jug."}], "id": "m"}
    await store.post(session.id, Entry("queue", {"messages": [message]}))
    await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    await runtime.idle()
    session = await runtime.get_session(session.id)
    assert [message.text for message in session.state.messages if message.role == "user"] == ["Go.", "And a jug."]


async def test_a_run_that_goes_on_numbers_its_events_on(tmp_path: Path) -> None:
    """Each event of one run has its own number, before and after the decision."""
    shop = Shop()
    async with SqliteStore(tmp_path / "s.db") as store:
        runtime, session = await waiting(shop, store)
        await runtime.execute(session.id, ApproveToolCalls(shop.loops))
        numbers = [entry.body["seq"] for entry in await store.read(session.id)]
    assert numbers == sorted(set(numbers))


async def test_two_who_approve_at_once_have_it_done_once(tmp_path: Path) -> None:
    """One of them gets a conflict; the call is made once."""
    shop = Shop(calls=BUY)
    async with SqliteStore(tmp_path / "s.db") as here, SqliteStore(tmp_path / "s.db") as there:
        _, session = await waiting(shop, here)
        both = (SessionRuntime(store).execute(session.id, ApproveToolCalls(shop.loops)) for store in (here, there))
        outcomes = await asyncio.gather(*both, return_exceptions=True)
    lost = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert [isinstance(error, SessionBusy | SessionConflict | InvalidData) for error in lost] == [True]
    assert shop.done == ["buy cup"]


async def test_a_run_without_a_session_waits_as_well() -> None:
    """A loop on its own hands back a state with the calls that wait."""
    shop = Shop(calls=BUY)
    session = await SendMessage("Go.", shop.loops).execute_on(await MemoryStore().create(_fresh()))
    assert (session.status, pending(session)) == (SessionStatus.SUSPENDED, ["2"])
    session = await ApproveToolCalls(shop.loops).execute_on(session)
    assert (session.status, shop.done) == (SessionStatus.ACTIVE, ["buy cup"])


def _fresh() -> AgentSession:
    from perdure import SessionFactory

    return SessionFactory().create(AGENT)


async def test_a_call_that_waits_is_not_trimmed_away() -> None:
    """Its result would enter a view without the call, and the model would be shown neither."""
    shop, runtime = Shop(), SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, SendMessage("Go on", shop.loops))
    trimmed = await runtime.execute(session.id, TrimTranscript(0))
    assert trimmed.state.messages[0].tool_calls == tuple(shop.calls)
    after = await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    results = {result.call_id for message in after.state.messages for result in message.tool_results}
    assert results == {call.id for call in shop.calls}
    shown = {message.id for message in shop.driver.requests[-1].messages}
    assert shown == {message.id for message in after.state.messages[:-1]}


async def test_a_reset_gives_up_what_waits() -> None:
    """The session is active, and no decision is left."""
    shop, runtime = Shop(), SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, SendMessage("Go on", shop.loops))
    after = await runtime.execute(session.id, ResetTranscript())
    assert (after.state.execution, after.status) == (None, SessionStatus.ACTIVE)
    with pytest.raises(InvalidData, match="waits for a decision"):
        await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    assert not [line for line in shop.done if line.startswith("buy")]


def shown(session: AgentSession) -> tuple[PendingCall, ...]:
    assert session.state.execution is not None
    return session.state.execution.pending_calls


async def test_what_was_shown_is_approved() -> None:
    """The calls as they were shown, or their digests, select the calls to make; the others keep waiting."""
    for form in (lambda call: call, lambda call: call.digest):
        shop = Shop()
        runtime, session = await waiting(shop)
        (buy, sell) = shown(session)
        session = await runtime.execute(session.id, ApproveToolCalls(shop.loops, call_ids=[form(sell)]))
        assert (pending(session), "sell jug for 500" in shop.done) == ([buy.id], True)


@pytest.mark.parametrize("decide", ["approve", "deny"])
async def test_a_decision_about_other_arguments_is_refused(decide: str) -> None:
    """A call that was shown with one price and waits with another is not decided; the error has the waiting call."""
    shop = Shop()
    runtime, session = await waiting(shop)
    (_, sell) = shown(session)
    cheaper = replace(sell, arguments={"what": "jug", "price": 101})
    action: Any = ApproveToolCalls(shop.loops, call_ids=[cheaper])
    if decide == "deny":
        action = DenyToolCalls(shop.loops, reason="too cheap", call_ids=[cheaper.digest])
    with pytest.raises(PendingCallsChanged, match="look at the pending calls again") as refused:
        await runtime.execute(session.id, action)
    assert refused.value.pending == shown(session)
    assert await runtime.get_session(session.id) == session
    assert "sell jug for 500" not in shop.done


@pytest.mark.parametrize("given", [5, [5], [None], ToolCall("buy")])
async def test_a_decision_is_about_calls(given: Any) -> None:
    """Anything but calls, digests and ids is InvalidData at once."""
    with pytest.raises(InvalidData, match=r"call_ids"):
        ApproveToolCalls(Shop().loops, call_ids=given)


class Numbering:
    """A model that gives the calls of every answer the same ids, and answers in words once it has results."""

    def __init__(self, *calls: ToolCall) -> None:
        self.calls = calls

    async def respond(self, request: ModelRequest, on_delta: Any) -> ModelReply:
        return ModelReply(
            Message.assistant("Done." if request.step else "", tool_calls=() if request.step else self.calls)
        )


async def test_an_old_id_never_hits_a_new_call() -> None:
    """A model that numbers its calls from 0 in every run gives no two calls of a session the same id."""
    done: list[int] = []

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        done.append(amount)
        return "paid"

    model = Numbering(ToolCall("pay", {"amount": 5}, "call_0"))
    loops, runtime = LoopFactory(driver=model, tools=[pay]), SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    (first,) = shown(await runtime.execute(session.id, SendMessage("Pay.", loops)))
    await runtime.execute(session.id, Undo())
    model.calls = (ToolCall("pay", {"amount": 5000}, "call_0"),)
    (second,) = shown(await runtime.execute(session.id, SendMessage("Pay.", loops)))
    assert re.fullmatch(r"call_0-[0-9a-f]{8}", second.id)
    for stale in (first.id, first, first.digest):
        with pytest.raises(InvalidData):
            await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=[stale]))
    assert done == []


async def test_a_provider_that_takes_back_its_own_ids_only_gets_them() -> None:
    """Random ids are kept as they came: long ones, and those of nine letters and digits."""
    ids = ["D681PevKs", "toolu_01A09q90qw90lq917835lq9", "call_1"]

    @tool
    def look() -> str:
        return "seen"

    model = Numbering(ToolCall("look", {}, "call_0"))
    loops, runtime = LoopFactory(driver=model, tools=[look]), SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, SendMessage("Look.", loops))
    model.calls = tuple(ToolCall("look", {}, each) for each in ids)
    session = await runtime.execute(session.id, SendMessage("Look.", loops))
    own = [call.id for message in session.state.messages for call in message.tool_calls]
    assert own[:3] == ["call_0", *ids[:2]]
    assert own[3].startswith("call_1-")


class Lenient:
    """A shop whose rule for approvals can be taken away while its calls wait."""

    def __init__(self) -> None:
        self.strict = True
        self.done: list[str] = []

        @tool(needs_approval=lambda arguments: self.strict)
        def buy(what: str) -> str:
            self.done.append(what)
            return f"bought {what}"

        calls = [ToolCall("buy", {"what": what}, what) for what in ("cup", "jug")]
        self.loops = LoopFactory(driver=ScriptedDriver([calls, "Done."]), tools=[buy])


async def test_a_call_that_waited_waits_until_it_is_decided() -> None:
    """Undecided calls are not made, though the rule no longer asks."""
    shop = Lenient()
    runtime, session = await waiting(shop)  # type: ignore[arg-type]  # only its loops are used
    shop.strict = False
    session = await runtime.execute(session.id, ApproveToolCalls(shop.loops, call_ids=["cup"]))
    assert (shop.done, pending(session), session.status) == (["cup"], ["jug"], SessionStatus.SUSPENDED)
    session = await runtime.execute(session.id, DenyToolCalls(shop.loops, reason="no", call_ids=["jug"]))
    assert (shop.done, session.state.status) == (["cup"], ExecutionStatus.COMPLETED)


async def test_an_approval_of_other_arguments_lets_nothing_through() -> None:
    """A call that an interceptor has changed since waits again, though the rule no longer asks."""
    shop, changing = Lenient(), Doubling()
    loops = LoopFactory(driver=ScriptedDriver([BUY, "Done."]), tools=shop.loops._tools, interceptors=[changing])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, SendMessage("Go.", loops))
    shop.strict, changing.more = False, " and palace"
    session = await runtime.execute(session.id, ApproveToolCalls(loops))
    assert (shop.done, shown(session)[0].arguments) == ([], {"what": "cup and palace"})


async def test_an_undecided_call_waits_after_a_recovery_too() -> None:
    """Killed after one of two calls was approved: that one is made, the other waits, though the rule has changed."""
    shop, store, clock = Lenient(), MemoryStore(), FrozenClock(tick=0.0001)
    with use(clock=clock):
        runtime, session = await waiting(shop, store)  # type: ignore[arg-type]  # it has loops
        shop.strict = False
        failing = FailingStore(store)
        failing.fail("append", error=StoreError("The process dies here."))
        failing.fail("release")
        with pytest.raises(StoreError):
            await SessionRuntime(failing).execute(session.id, ApproveToolCalls(shop.loops, call_ids=["cup"]))
        clock.advance(60)
        report = await recover(runtime, shop.loops)
    assert report.suspended == (session.id,)
    assert pending(await runtime.get_session(session.id)) == ["jug"]
    assert shop.done == ["cup"]


async def test_a_decision_that_was_killed_is_not_half_ended() -> None:
    """If the end cannot be saved, the version still shows its calls, and the run has not ended on record either."""
    shop, store = Shop(), MemoryStore()
    runtime, session = await waiting(shop, store)
    failing = FailingStore(store)
    failing.fail("save", error=StoreError("The disk is full."))
    with pytest.raises(StoreError):
        await SessionRuntime(failing).execute(session.id, ApproveToolCalls(shop.loops, call_ids=["2"]))
    failing.fail("save", error=StoreError("It still is."))
    with pytest.raises(StoreError):
        await SessionRuntime(failing).execute(session.id, ResumeExecution(shop.loops, give_up=True))
    assert [loop.status for loop in (await runtime.record(session.id)).loops] == [LoopStatus.RUNNING]
    ended = await runtime.execute(session.id, ResumeExecution(shop.loops, give_up=True))
    assert (ended.status, pending(ended)) == (SessionStatus.ACTIVE, [])
    assert [loop.status for loop in (await runtime.record(session.id)).loops] == [LoopStatus.COMPLETED]


@pytest.mark.parametrize("close", [FailSession, CompleteSession, DeleteSession])
async def test_a_closed_session_is_not_reopened_by_a_decision(close: Any) -> None:
    """Its run has ended on record; deciding raises SessionNotActive, makes no call and changes nothing."""
    shop, runtime = Shop(), SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, SendMessage("Go.", shop.loops))
    done = list(shop.done)
    closed = await runtime.execute(session.id, close())
    assert (closed.state.status, closed.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)
    for action in (ApproveToolCalls(shop.loops), DenyToolCalls(shop.loops, reason="no")):
        with pytest.raises(SessionNotActive):
            await runtime.execute(session.id, action)
    assert (await runtime.get_session(session.id), shop.done) == (closed, done)


async def test_a_session_that_an_older_release_closed_while_it_waited_can_be_opened() -> None:
    """Its calls can no longer be decided; ResumeSession ends their run, and the session takes messages."""
    shop, store = Shop(), MemoryStore()
    runtime, session = await waiting(shop, store)
    closed = await store.save(session.failed())  # as releases before this one did
    with pytest.raises(SessionNotActive):
        await runtime.execute(session.id, ApproveToolCalls(shop.loops))
    opened = await runtime.execute(session.id, ResumeSession())
    assert (opened.status, pending(opened), closed.version) == (SessionStatus.ACTIVE, [], opened.version - 1)
    assert [loop.status for loop in (await runtime.record(session.id)).loops] == [LoopStatus.COMPLETED]


async def test_calls_of_older_releases_load() -> None:
    """A waiting call was stored as a plain tool call; it loads as one that waits for no other call."""
    stored = {"type": "tool_call", "name": "buy", "arguments": {"what": "cup"}, "id": "2"}
    execution = ExecutionState.from_dict({"execution_id": "e", "format": 1, "pending_calls": [stored]})
    assert execution.pending_calls == (PendingCall("buy", {"what": "cup"}, "2"),)
    plain = execution.to_dict()["pending_calls"]
    assert plain == [stored]
