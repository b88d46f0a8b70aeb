"""Agents as tools: each in a session of its own, charged to its caller, and found again by its call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from perdure import (
    AgentDefinition,
    AgentSession,
    AgentStop,
    ApproveToolCalls,
    ChangeDefinition,
    ChildLoopRef,
    ConfigurationError,
    DenyToolCalls,
    DriverError,
    EventBus,
    ExecutionBudget,
    ExecutionStatus,
    Interceptor,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    MessageStart,
    ModelRequest,
    PendingCall,
    PendingCallsChanged,
    ResumeExecution,
    SendMessage,
    SendParallel,
    SessionBusy,
    SessionNotActive,
    SessionRecorder,
    SessionRuntime,
    SessionSaved,
    SessionStage,
    SessionStatus,
    SqliteStore,
    StopReason,
    StoreError,
    SubagentPolicy,
    ToolCall,
    ToolExecutionEnd,
    recover,
    tool,
)
from perdure.actions.children import child_session_id
from perdure.model.ids import use
from perdure.testing import Delay, FailingStore, FrozenClock, ScriptedDriver

from .scenes import Heard, answer_of, asked, results_in

BOSS = AgentDefinition("boss", system_prompt="boss", tools=("helper",))
ASK = ToolCall("helper", {"prompt": "Add it up."}, "ask")
paid: list[str] = []


@tool(needs_approval=True)
def pay(to: str) -> str:
    paid.append(to)
    return f"paid {to}"


def helper(**fields: Any) -> AgentDefinition:
    return AgentDefinition("helper", **{"system_prompt": "helper", "tools": (), "description": "Adds up.", **fields})


def loops_for(boss: list[Any], child: list[Any], *, agent: Any = None, **options: Any) -> LoopFactory:
    """Return loops in which the boss follows one script and all others another."""

    def reply(request: ModelRequest) -> Any:
        return (boss if request.system_prompt == "boss" else child)[request.step]

    return LoopFactory(driver=ScriptedDriver(reply), subagents=[agent or helper()], tools=[pay], **options)


async def send(loops: LoopFactory, store: Any = None) -> tuple[SessionRuntime, AgentSession, list[AgentSession]]:
    """Return the boss's session after a message, and those of its sub-agents, oldest first."""
    store = store or MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(BOSS, owner="ada")
    session = await runtime.execute(session.id, SendMessage("Go.", loops))
    found = await runtime.list_sessions(parent=session.id)
    return runtime, session, [await runtime.get_session(info.id) for info in reversed(found)]


async def test_a_sub_agent_has_a_session_of_its_own() -> None:
    """The caller gets only the final text; the child has the id of the call that spawned it."""
    heard = Heard()
    _, session, (child,) = await send(loops_for([ASK, "Done."], ["It is 5."], events=heard))
    assert (answer_of(session.state), results_in(session.state)[0].text) == ("Done.", "It is 5.")
    assert session.state.execution is not None
    execution_id = session.state.execution.execution_id
    assert child.id == child_session_id(session.info, execution_id, "ask")
    assert (child.info.parent_id, child.info.owner, child.info.agent_name) == (session.id, "ada", "helper")
    spawned = child.info.spawn_ref
    assert spawned is not None
    assert (spawned.parent_loop_id, spawned.tool_call_id, spawned.tool_name) == (execution_id, "ask", "helper")
    assert child.state.parent_agent_id == session.state.agent_id
    assert [message.text for message in child.state.messages] == ["Add it up.", "It is 5."]
    ended = next(event for event in heard.of(ToolExecutionEnd) if event.session_id == session.id)
    assert child.state.execution is not None
    assert (ended.child.child_session_id, ended.child.child_loop_id) == (child.id, child.state.execution.execution_id)


async def test_caller_and_sub_agent_are_linked_both_ways_on_record() -> None:
    """The child's first loop has its caller's as parent; later ones, the child's own. A header names children too."""
    loops = loops_for([ASK, "Done."], ["It is 5."])
    runtime, session, (child,) = await send(loops)
    await runtime.execute(child.id, SendMessage("Sure?", loops))
    (caller,) = (await runtime.record(session.id)).loops
    first, second = (await runtime.record(child.id)).loops
    assert (first.parent_loop_id, first.continuation_kind.kind) == (caller.loop_id, "initial")
    assert (second.parent_loop_id, second.continuation_kind.kind) == (first.loop_id, "default")
    assert caller.child_loop_refs == (ChildLoopRef("ask", "helper", first.loop_id, child.id),)
    assert (await runtime.loop(session.id, caller.loop_id)).child_loop_refs == caller.child_loop_refs
    assert [loop.loop_id for loop in (await runtime.record(child.id)).root_loops()] == [first.loop_id]


@pytest.mark.parametrize("child_first", [False, True])
async def test_a_recorder_finds_the_same_links_in_either_order(child_first: bool) -> None:
    """A later loop of the child does not count as spawned by the call."""
    heard = Heard()
    loops = loops_for([ASK, "Done."], ["It is 5."], events=heard)
    runtime, session, (child,) = await send(loops)
    await runtime.execute(child.id, SendMessage("Sure?", loops))
    recorder = SessionRecorder()
    for event in sorted(heard, key=lambda event: (event.session_id == child.id) is not child_first):
        recorder.on_event(event)
    recorded = {record.session_id: record for record in recorder.checkpoint()}
    assert recorded[child.id].parent_spawn_ref == child.info.spawn_ref
    (caller,) = recorded[session.id].loops
    assert caller.child_loop_refs == (await runtime.record(session.id)).loops[0].child_loop_refs
    assert recorded[child.id].loops[0].parent_loop_id == caller.loop_id


async def test_usage_is_charged_up() -> None:
    """A child's usage counts for its parent's run, and against its parent's budget."""
    _, session, (child,) = await send(loops_for([ASK, "Done."], ["It is 5."]))
    assert (child.state.usage.total_tokens, session.state.usage.total_tokens) == (15, 45)
    assert session.state.steps[0].tool_executions[0].usage == child.state.usage


async def test_a_failing_child_is_an_error_of_the_call() -> None:
    """The parent gets the reason and continues; the child's usage is still charged, and the child can be found."""
    heard = Heard()
    script = [ToolCall("nothing"), DriverError("no model")]
    _, session, (child,) = await send(loops_for([ASK, "Pity."], script, events=heard))
    assert child.state.status is ExecutionStatus.FAILED
    (result,) = results_in(session.state)
    assert result.is_error
    assert result.text == "SubagentFailed: Agent helper gave no answer: error_forbade, no model."
    assert (session.state.status, session.state.usage.total_tokens) == (ExecutionStatus.COMPLETED, 45)
    ended = next(event for event in heard.of(ToolExecutionEnd) if event.session_id == session.id)
    assert ended.child.child_session_id == child.id


async def test_an_answer_of_a_failed_run_is_no_answer() -> None:
    """A child whose last message does not fit the requested form has failed, though it has a final response."""
    from perdure.loop.subagents import outcome_of
    from perdure.loop.tool_use import Outcome

    loop = LoopFactory(driver=ScriptedDriver(["no", "no"])).build(AgentDefinition("a"))
    state = await loop.run(asked().with_response_format({"type": "object"}))
    assert state.final_response is not None
    outcome: Outcome = outcome_of("a", state)
    assert outcome.error is not None


async def test_a_child_keeps_to_its_own_budget() -> None:
    """Each agent has its own limits; one that reaches them has given no answer."""
    agent = helper(budget=ExecutionBudget(max_steps=1))
    loops = loops_for([ASK, "Pity."], [ToolCall("nothing"), "late"], agent=agent)
    _, session, (child,) = await send(loops)
    assert child.state.stop_reason is StopReason.STEPS_LIMIT_REACHED
    assert "steps_limit_reached" in results_in(session.state)[0].text


async def test_agents_call_agents_only_so_deep() -> None:
    """At the last level sub-agents are no longer among the tools, so every chain ends."""
    every = [AgentDefinition(name, system_prompt=name) for name in ("a", "b")]

    def reply(request: ModelRequest) -> Any:
        other = "b" if request.system_prompt == "a" else "a"
        offered = {spec.name for spec in request.tools}
        return ToolCall(other, {"prompt": "You."}) if other in offered and request.step == 0 else "me"

    for depth in (0, 1, 3):
        driver = ScriptedDriver(reply)
        loops = LoopFactory(driver=driver, subagents=every, subagent_policy=SubagentPolicy(max_depth=depth))
        runtime = SessionRuntime(MemoryStore())
        session = await runtime.create(every[0])
        await runtime.execute(session.id, SendMessage("Go.", loops))
        assert len(await runtime.list_sessions()) == depth + 1
    with pytest.raises(ConfigurationError):
        SubagentPolicy(max_depth=-1)


async def test_bad_arguments_are_told() -> None:
    """A call without a prompt is not made."""
    _, session, children = await send(loops_for([ToolCall("helper", {"task": "x"}), "Hm."], []))
    assert "takes one argument, prompt" in results_in(session.state)[0].text
    assert children == []


async def test_children_run_side_by_side_in_sessions_of_their_own() -> None:
    """Two calls in one step are two sessions."""
    calls = [ToolCall("helper", {"prompt": prompt}) for prompt in ("One.", "Two.")]
    _, session, children = await send(loops_for([calls, "Done."], ["It is 5."]))
    assert sorted(child.state.messages[0].text for child in children) == ["One.", "Two."]
    assert session.state.usage.total_tokens == 60


async def test_a_child_that_waits_suspends_its_parent(tmp_path: Path) -> None:
    """Approving the parent, from another process, continues through the child; no call is run twice."""
    paid.clear()
    child_script = [ToolCall("pay", {"to": "Bob"}), ToolCall("pay", {"to": "Eve"}), "Paid."]
    loops = loops_for([ASK, "Done."], child_script, agent=helper(tools=("pay",)))
    async with SqliteStore(tmp_path / "s.db") as store, SqliteStore(tmp_path / "s.db") as other:
        _, session, (child,) = await send(loops, store)
        assert (session.status, child.status, paid) == (SessionStatus.SUSPENDED, SessionStatus.SUSPENDED, [])
        assert session.state.execution is not None
        (call,) = session.state.execution.pending_calls
        assert (call.name, call.session_id) == ("helper", child.id)
        assert [(each.name, each.arguments) for each in call.waits_for] == [("pay", {"to": "Bob"})]
        elsewhere = SessionRuntime(other)
        session = await elsewhere.execute(session.id, ApproveToolCalls(loops))
        assert (session.status, paid) == (SessionStatus.SUSPENDED, ["Bob"]), "the child asks again"
        session = await elsewhere.execute(session.id, ApproveToolCalls(loops))
        assert (session.status, answer_of(session.state), paid) == (SessionStatus.ACTIVE, "Done.", ["Bob", "Eve"])
        child = await elsewhere.get_session(child.id)
        assert (child.status, answer_of(child.state)) == (SessionStatus.ACTIVE, "Paid.")
        assert session.state.usage.total_tokens == 15 * 2 + 15 * 3


def pending_in(session: AgentSession) -> tuple[PendingCall, ...]:
    assert session.state.execution is not None
    return session.state.execution.pending_calls


async def test_a_sub_agent_that_wants_something_else_by_now_is_not_approved() -> None:
    """Bob was shown and Eve is wanted: nothing is paid, and then Eve is shown."""
    paid.clear()
    child_script = [ToolCall("pay", {"to": "Bob"}), ToolCall("pay", {"to": "Eve"}), "Paid."]
    loops = loops_for([ASK, "Done."], child_script, agent=helper(tools=("pay",)))
    runtime, session, (child,) = await send(loops)
    await runtime.execute(child.id, ApproveToolCalls(loops))
    for seen in (None, pending_in(session), [pending_in(session)[0].digest], ["ask"]):
        await runtime.execute(session.id, Showing(session))
        with pytest.raises(PendingCallsChanged, match=r'pay\({"to":"Eve"}\)'):
            await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=seen))
        assert paid == ["Bob"]
        looked = await runtime.get_session(session.id)
        (asked,) = pending_in(looked)[0].leaves
        assert (looked.status, asked.arguments) == (SessionStatus.SUSPENDED, {"to": "Eve"})
    session = await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=pending_in(looked)))
    assert (answer_of(session.state), paid) == ("Done.", ["Bob", "Eve"])


class Showing:
    """Makes a session show the pending calls of another version of it, or others."""

    def __init__(self, session: AgentSession | None = None) -> None:
        self.calls = pending_in(session) if session is not None else (PendingCall(ASK.name, ASK.arguments, ASK.id),)

    async def execute_on(self, session: AgentSession, context: Any = None) -> AgentSession:
        execution = session.state.execution
        assert execution is not None
        return session.with_state(session.state.with_execution(execution.with_pending_calls(self.calls)))


async def test_a_sub_agent_that_an_older_release_left_waiting_is_shown_before_it_goes_on() -> None:
    """Its caller's call was stored without the inner call: the first approval only shows that."""
    paid.clear()
    loops = loops_for([ASK, "Done."], [ToolCall("pay", {"to": "Bob"}), "Paid."], agent=helper(tools=("pay",)))
    runtime, session, _ = await send(loops)
    await runtime.execute(session.id, Showing())
    again = await runtime.execute(session.id, ApproveToolCalls(loops))
    assert (again.status, paid, pending_in(again)) == (SessionStatus.SUSPENDED, [], pending_in(session))
    await runtime.execute(session.id, ApproveToolCalls(loops))
    assert paid == ["Bob"]


async def test_a_sub_agent_that_was_decided_by_itself_is_waited_for_no_longer() -> None:
    """Its caller continues with its answer; no call is left to approve."""
    paid.clear()
    loops = loops_for([ASK, "Done."], [ToolCall("pay", {"to": "Bob"}), "Paid."], agent=helper(tools=("pay",)))
    runtime, session, (child,) = await send(loops)
    await runtime.execute(child.id, ApproveToolCalls(loops))
    session = await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=pending_in(session)))
    assert (results_in(session.state)[0].text, paid) == ("Paid.", ["Bob"])


async def test_only_the_sub_agents_that_were_approved_go_on() -> None:
    """One of two keeps waiting, and shows for which call."""
    paid.clear()
    calls = [ToolCall("helper", {"prompt": name}, name) for name in ("Bob", "Eve")]

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "boss":
            return [calls, "Done."][request.step]
        return "Paid." if request.step else ToolCall("pay", {"to": request.messages[0].text})

    loops = LoopFactory(driver=ScriptedDriver(reply), subagents=[helper(tools=("pay",))], tools=[pay])
    runtime, session, _ = await send(loops)
    bob, eve = pending_in(session)
    session = await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=[bob]))
    assert (pending_in(session), paid) == ((eve,), ["Bob"])
    session = await runtime.execute(session.id, DenyToolCalls(loops, reason="not her", call_ids=[eve.digest]))
    assert "not her" in results_in(session.state)[1].text
    assert (answer_of(session.state), paid) == ("Done.", ["Bob"])


async def test_an_approval_reaches_through_every_level() -> None:
    """The last agent's call is shown on the first, and a change to it is found before any call is made."""
    paid.clear()
    uses = {"boss": "mid", "mid": "leaf", "leaf": "pay"}
    agents = [AgentDefinition(name, system_prompt=name, tools=(used,)) for name, used in uses.items()]

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "leaf":
            return [ToolCall("pay", {"to": "Bob"}), ToolCall("pay", {"to": "Eve"}), "Paid."][request.step]
        return "Done." if request.step else ToolCall(uses[request.system_prompt or ""], {"prompt": "You."})

    loops = LoopFactory(driver=ScriptedDriver(reply), subagents=agents[1:], tools=[pay])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(agents[0])
    session = await runtime.execute(session.id, SendMessage("Go.", loops))
    assert [leaf.arguments for leaf in pending_in(session)[0].leaves] == [{"to": "Bob"}]
    leaf = next(info for info in await runtime.list_sessions() if info.agent_name == "leaf")
    await runtime.execute(leaf.id, ApproveToolCalls(loops))
    with pytest.raises(PendingCallsChanged, match="Eve"):
        await runtime.execute(session.id, ApproveToolCalls(loops))
    assert paid == ["Bob"]
    session = await runtime.execute(session.id, ApproveToolCalls(loops))
    assert (session.status, paid) == (SessionStatus.ACTIVE, ["Bob", "Eve"])


@pytest.mark.parametrize("how", ["recover", "approve", "deny", "send", "compare"])
async def test_the_depth_of_a_sub_agent_is_kept_when_it_goes_on_by_itself(how: str) -> None:
    """At the last level it is offered no sub-agents, even if it is not continued by its caller."""
    offered: list[set[str]] = []
    every = [AgentDefinition(name, system_prompt=name) for name in ("boss", "helper")]
    store, clock = MemoryStore(), FrozenClock(tick=0.0001)
    failing = FailingStore(store)

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "boss":
            return ToolCall("helper", {"prompt": "You."}, "ask") if request.step == 0 else "Done."
        offered.append({spec.name for spec in request.tools})
        if how == "recover" and len(offered) == 1:
            failing.crash(call=1)
        return ToolCall("pay", {"to": "Bob"}) if request.step == 0 else "Paid."

    policy = SubagentPolicy(max_depth=1)
    loops = LoopFactory(driver=ScriptedDriver(reply), subagents=every, tools=[pay], subagent_policy=policy)
    with use(clock=clock):
        runtime = SessionRuntime(store)
        session = await runtime.create(every[0])
        with suppress(StoreError):
            await SessionRuntime(failing).execute(session.id, SendMessage("Go.", loops))
        child_id = (await runtime.list_sessions(parent=session.id))[0].id
        clock.advance(60)
        if how == "recover":
            await recover(runtime, loops, session_id=child_id)
        if how == "deny":
            await runtime.execute(child_id, DenyToolCalls(loops, reason="no"))
        else:
            await runtime.execute(child_id, ApproveToolCalls(loops))
        if how == "send":
            await runtime.execute(child_id, SendMessage("Once more.", loops))
        if how == "compare":
            await runtime.execute(child_id, SendParallel("Once more.", loops, configs=["a:a", "a:b"]))
    assert len(offered) > 1
    assert set.union(*offered) == {"pay"}


async def test_a_sub_agents_session_passes_the_stages() -> None:
    """A controller sees its creation like any other, and may refuse it; its changes are kept."""
    seen: list[tuple[str, str]] = []

    class Watching:
        def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
            seen.append((session.info.agent_name, stage.value))
            return session.with_tags(["checked"]) if stage is SessionStage.BEFORE_CREATE else session

    bus, saved = EventBus(), list[Any]()
    bus.subscribe(SessionSaved, saved.append)
    runtime = SessionRuntime(MemoryStore(), controller=Watching(), events=bus)
    session = await runtime.create(BOSS)
    await runtime.execute(session.id, SendMessage("Go.", loops_for([ASK, "Done."], ["It is 5."])))
    (child,) = await runtime.list_sessions(parent=session.id)
    stages = [stage for name, stage in seen if name == "helper"]
    assert stages[:4] == ["before_create", "before_save", "after_save", "after_create"]
    assert child.tags == ("checked",)
    assert [event.version for event in saved if event.session_id == child.id] == [1, 2]


async def test_a_sub_agent_can_be_denied_where_it_is_not_known() -> None:
    """Its session ends, though the process that denies its call has neither the agent nor its tools."""
    loops = loops_for([ASK, "Pity."], [ToolCall("pay", {"to": "Bob"}), "Paid."], agent=helper(tools=("pay",)))
    runtime, session, (child,) = await send(loops)
    bare = LoopFactory(driver=ScriptedDriver(lambda request: "Pity."))
    await runtime.execute(session.id, ChangeDefinition(AgentDefinition("boss", system_prompt="boss")))
    session = await runtime.execute(session.id, DenyToolCalls(bare, reason="too dear"))
    assert answer_of(session.state) == "Pity."
    assert (await runtime.get_session(child.id)).status is SessionStatus.FAILED


@pytest.mark.parametrize("how", ["cancel", "stop", "limit", "fail"])
async def test_a_run_that_ends_ends_the_sub_agents_that_wait(how: str) -> None:
    """If another call of the step ends the run, the sub-agent's call can no longer be approved, and is charged for."""
    paid.clear()
    begun = asyncio.Event()

    @tool
    async def other() -> None:
        begun.set()
        if how == "stop":
            raise AgentStop("enough")
        if how != "fail":
            await asyncio.sleep(5)

    class Failing(Interceptor):
        def after_tool_use(self, execution: Any, state: Any) -> Any:
            if how == "fail":
                raise RuntimeError("broken")
            return execution

    def reply(request: ModelRequest) -> Any:
        return [ASK, ToolCall("other")] if request.system_prompt == "boss" else ToolCall("pay", {"to": "Bob"})

    agent = helper(tools=("pay",))
    loops = LoopFactory(driver=ScriptedDriver(reply), subagents=[agent], tools=[pay, other], interceptors=[Failing()])
    runtime = SessionRuntime(MemoryStore())
    limit = ExecutionBudget(max_seconds=0.2 if how == "limit" else None)
    boss = AgentDefinition("boss", system_prompt="boss", tools=("helper", "other"), budget=limit)
    session = await runtime.create(boss)
    task = asyncio.ensure_future(runtime.execute(session.id, SendMessage("Go.", loops)))
    if how == "cancel":
        await begun.wait()
        child_id: str | None = None
        while child_id is None:
            found = await runtime.list_sessions(parent=session.id, status="suspended")
            child_id = found[0].id if found else None
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    session = await runtime.get_session(session.id)
    (info,) = await runtime.list_sessions(parent=session.id)
    child = await runtime.get_session(info.id)
    assert (session.status, child.status) == (SessionStatus.ACTIVE, SessionStatus.FAILED)
    assert session.state.status in (ExecutionStatus.STOPPED, ExecutionStatus.FAILED)
    assert child.state.status is ExecutionStatus.STOPPED
    with pytest.raises(SessionNotActive):
        await runtime.execute(child.id, ApproveToolCalls(loops))
    assert paid == []
    if how != "fail":
        assert session.state.usage.total_tokens == 30


async def test_a_killed_run_that_is_given_up_ends_its_sub_agents() -> None:
    """Killed while its sub-agent waited, and then cancelled: the sub-agent's call can no longer be approved."""
    paid.clear()
    loops = loops_for([ASK, "Done."], [ToolCall("pay", {"to": "Bob"}), "Paid."], agent=helper(tools=("pay",)))
    store, clock = MemoryStore(), FrozenClock(tick=0.0001)
    failing = FailingStore(store)
    failing.fail("save", call=2)  # the boss's: its sub-agent's is the first
    failing.fail("release", call=None)
    with use(clock=clock):
        runtime = SessionRuntime(store)
        session = await runtime.create(BOSS)
        with pytest.raises(StoreError):
            await SessionRuntime(failing).execute(session.id, SendMessage("Go.", loops))
        clock.advance(60)
        await runtime.execute(session.id, ResumeExecution(loops, give_up=True))
        (info,) = await runtime.list_sessions(parent=session.id)
        assert info.status is SessionStatus.FAILED
        with pytest.raises(SessionNotActive):
            await runtime.execute(info.id, ApproveToolCalls(loops))
    assert paid == []


async def test_a_denied_sub_agent_is_a_refused_call() -> None:
    """The parent's call gets the reason as its answer."""
    paid.clear()
    loops = loops_for([ASK, "Pity."], [ToolCall("pay", {"to": "Bob"}), "Paid."], agent=helper(tools=("pay",)))
    runtime, session, _ = await send(loops)
    session = await runtime.execute(session.id, DenyToolCalls(loops, reason="too dear"))
    assert (answer_of(session.state), paid) == ("Pity.", [])
    assert "too dear" in results_in(session.state)[0].text


@pytest.mark.parametrize("how", ["cancel", "limit"])
async def test_cancellation_and_time_limits_reach_the_child(how: str) -> None:
    """A parent that is cancelled, or out of time, takes its child with it; both are kept as stopped."""
    heard = Heard()
    loops = loops_for([ASK, "Done."], [Delay(5, "late")], events=heard)
    store = MemoryStore()
    runtime = SessionRuntime(store)
    limit = ExecutionBudget(max_seconds=0.05 if how == "limit" else None)
    session = await runtime.create(AgentDefinition("boss", system_prompt="boss", tools=("helper",), budget=limit))
    task = asyncio.ensure_future(runtime.execute(session.id, SendMessage("Go.", loops)))
    if how == "cancel":
        await heard.event_of(MessageStart, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    (info,) = await runtime.list_sessions(parent=session.id)
    reasons = [(await runtime.get_session(each)).state.stop_reason for each in (session.id, info.id)]
    expected = StopReason.USER_REQUESTED if how == "cancel" else StopReason.TIME_LIMIT_REACHED
    assert reasons == [expected, StopReason.USER_REQUESTED]
    assert [await store.is_claimed(each) for each in (session.id, info.id)] == [False, False]


async def test_without_a_store_children_run_in_memory() -> None:
    """A loop without a store runs its sub-agents in place; none of them can wait for a person."""
    loop = loops_for([ASK, "Done."], ["It is 5."]).build(BOSS)
    state = await loop.run(asked().with_system_prompt("boss"))
    assert (answer_of(state), results_in(state)[0].text, state.usage.total_tokens) == ("Done.", "It is 5.", 45)
    waiting = loops_for([ASK, "Pity."], [ToolCall("pay", {"to": "Bob"})], agent=helper(tools=("pay",))).build(BOSS)
    state = await waiting.run(asked().with_system_prompt("boss"))
    assert "waits for an approval" in results_in(state)[0].text


async def test_denying_a_call_ends_the_child_that_waited_for_it() -> None:
    """It is stopped and its session failed, on record too; its usage is charged, and its caller linked."""
    heard = Heard()
    script = [ToolCall("pay", {"to": "Bob"}), "Paid."]
    loops = loops_for([ASK, "Pity."], script, agent=helper(tools=("pay",)), events=heard)
    runtime, session, (child,) = await send(loops)
    assert child.status is SessionStatus.SUSPENDED
    session = await runtime.execute(session.id, DenyToolCalls(loops, reason="too dear"))
    child = await runtime.get_session(child.id)
    assert (child.status, child.state.stop_reason) == (SessionStatus.FAILED, StopReason.USER_REQUESTED)
    assert child.state.execution is not None
    assert child.state.execution.pending_calls == ()
    (loop,) = (await runtime.record(child.id)).loops
    assert loop.status is LoopStatus.COMPLETED, "stopped, at somebody's request"
    assert loop.stop_reason == "user_requested"
    assert session.state.steps[0].tool_executions[0].usage == child.state.usage
    assert child.state.usage.total_tokens == 15
    ended = next(event for event in heard.of(ToolExecutionEnd) if event.session_id == session.id)
    assert ended.child.child_session_id == child.id


async def test_denying_a_call_ends_grandchildren_too() -> None:
    """A chain of agents that waits for one approval ends as a whole."""
    uses = {"boss": "mid", "mid": "leaf", "leaf": "pay"}
    agents = [AgentDefinition(name, system_prompt=name, tools=(used,)) for name, used in uses.items()]

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "leaf":
            return ToolCall("pay", {"to": "Bob"})
        return ToolCall(uses[request.system_prompt or ""], {"prompt": "You."}) if request.step == 0 else "Pity."

    loops = LoopFactory(driver=ScriptedDriver(reply), subagents=agents[1:], tools=[pay])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(agents[0])
    session = await runtime.execute(session.id, SendMessage("Go.", loops))
    assert {info.status for info in await runtime.list_sessions()} == {SessionStatus.SUSPENDED}
    await runtime.execute(session.id, DenyToolCalls(loops, reason="no"))
    by_agent = {info.agent_name: info.status for info in await runtime.list_sessions()}
    failed = SessionStatus.FAILED
    assert by_agent == {"boss": SessionStatus.ACTIVE, "mid": failed, "leaf": failed}


@pytest.mark.parametrize("how", ["cancel", "limit"])
async def test_what_a_cancelled_child_has_used_is_charged(how: str, tmp_path: Path) -> None:
    """The interrupted call is on record with the child's usage, and with the link to it."""
    heard = Heard()
    loops = loops_for([ASK, "Done."], [ToolCall("nothing"), Delay(5, "late")], events=heard)
    async with SqliteStore(tmp_path / "s.db") as store:
        await _cut_short(SessionRuntime(store), loops, heard, how)


async def _cut_short(runtime: SessionRuntime, loops: LoopFactory, heard: Heard, how: str) -> None:
    limit = ExecutionBudget(max_seconds=0.5 if how == "limit" else None)
    session = await runtime.create(AgentDefinition("boss", system_prompt="boss", tools=("helper",), budget=limit))
    task = asyncio.ensure_future(runtime.execute(session.id, SendMessage("Go.", loops)))
    await heard.event_of(MessageStart, 3)
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    after = await runtime.get_session(session.id)
    (info,) = await runtime.list_sessions(parent=session.id)
    child = await runtime.get_session(info.id)
    assert (child.state.usage.total_tokens, after.state.usage.total_tokens) == (15, 30)
    assert after.state.status is ExecutionStatus.STOPPED
    (loop,) = (await runtime.record(session.id)).loops
    whole = await runtime.loop(session.id, loop.loop_id)
    assert (whole.usage, whole.usage.total_tokens) == (after.state.usage, 30)
    assert [ref.child_session_id for ref in whole.child_loop_refs] == [child.id]


class Ailing(MemoryStore):
    """A store that fails, or is busy, for every session of a sub-agent."""

    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error: Any = error

    async def claim(self, session_id: str, **given: Any) -> Any:
        if session_id.startswith("sub-") and self.error is not None:
            raise self.error
        return await super().claim(session_id, **given)


@pytest.mark.parametrize("error", [StoreError("The disk is full."), SessionBusy("sub-1")])
@pytest.mark.parametrize("when_busy", ["raise", "queue"])
async def test_an_ailing_store_is_not_told_to_the_model(error: Exception, when_busy: Any) -> None:
    """An error that is not the child's fault interrupts the run; resumed, it calls the child."""
    store = Ailing(error)
    loops = loops_for([ASK, "Done."], ["It is 5."])
    runtime = SessionRuntime(store)
    session = await runtime.create(BOSS)
    with pytest.raises(type(error)):
        await runtime.execute(session.id, SendMessage("Go.", loops, when_busy=when_busy))
    assert not await store.is_claimed(session.id)
    assert await store.read(session.id, inbox=True) == []
    store.error = None
    after = await runtime.execute(session.id, ResumeExecution(loops))
    assert [message.text for message in after.state.messages if message.role == "user"] == ["Go."]
    assert (answer_of(after.state), results_in(after.state)[0].text) == ("Done.", "It is 5.")


async def test_a_resumed_run_still_knows_the_children_from_before() -> None:
    """Its header names the children from before and after the resume."""
    store = Ailing(None)
    again = ToolCall("helper", {"prompt": "Once more."}, "again")
    loops = loops_for([ASK, again, "Done."], ["It is 5."])
    runtime = SessionRuntime(store)
    session = await runtime.create(BOSS)
    claim = store.claim

    async def claim_once(session_id: str, **given: Any) -> Any:
        claimed = await claim(session_id, **given)
        store.error = StoreError("The disk is full.") if session_id.startswith("sub-") else None
        return claimed

    store.claim = claim_once  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        await runtime.execute(session.id, SendMessage("Go.", loops))
    store.claim = claim  # type: ignore[method-assign]
    store.error = None
    await runtime.execute(session.id, ResumeExecution(loops))
    (caller,) = (await runtime.record(session.id)).loops
    assert [ref.tool_call_id for ref in caller.child_loop_refs] == ["ask", "again"]
    for ref in caller.child_loop_refs:
        (loop,) = (await runtime.record(ref.child_session_id)).loops
        assert (loop.loop_id, loop.parent_loop_id) == (ref.child_loop_id, caller.loop_id)
