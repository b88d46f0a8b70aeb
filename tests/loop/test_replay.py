"""Replay: a run's events give the state of the run, and the record that a reader is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.loop.scenes import Heard, HeldDriver

from perdure import (
    AgentDefinition,
    AgentEnd,
    AgentSession,
    AgentState,
    ApproveToolCalls,
    DriverError,
    EventBus,
    ExecutionBudget,
    ExecutionStatus,
    LoopEvent,
    LoopFactory,
    LoopRecord,
    MemoryStore,
    Message,
    MessageEnd,
    MessageUpdate,
    SendMessage,
    SessionRuntime,
    StopReason,
    ToolCall,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    tool,
)
from perdure.actions.inbox import STEER
from perdure.loop.agent_loop import RunStart
from perdure.loop.replay import Replay
from perdure.model.record import STATUS_ON_RECORD
from perdure.protocols import Entry
from perdure.testing import Delay, ScriptedDriver


@tool
async def good(n: int) -> int:
    """Work."""
    await asyncio.sleep(0)
    return n


@tool
async def slow(n: int) -> int:
    """Work, later than others."""
    for _ in range(n % 4):
        await asyncio.sleep(0)
    return n


@tool
def bad(n: int) -> int:
    """Fail."""
    raise ValueError(f"no {n}")


@tool(needs_approval=True)
def careful(n: int) -> int:
    """Work, if a person agrees."""
    return n


TOOLS = (good, slow, bad, careful)

calls = st.builds(
    lambda name, n: ToolCall(name, {"n": n}), st.sampled_from(["good", "slow", "bad", "unknown"]), st.integers(0, 9)
)
wrong_calls = st.just(ToolCall("good", {"n": "many"}))
replies = st.lists(calls | wrong_calls, min_size=1, max_size=3) | calls
endings = st.sampled_from(["Done.", DriverError("no"), ValueError("a broken driver")])
stories = st.tuples(st.lists(replies, max_size=5), endings)


def on_record(events: Sequence[Any]) -> list[Any]:
    """Return the events that go on record."""
    return [
        event
        for event in events
        if isinstance(event, LoopEvent) and not isinstance(event, MessageUpdate | ToolExecutionUpdate)
    ]


def seen(state: AgentState) -> dict[str, Any]:
    """Return the parts of a state that must come back from its events."""
    run = state.execution
    assert run is not None
    return {
        "messages": list(state.messages),
        "steps": [
            (step.id, step.step_type, list(step.output_messages), step.tool_executions, step.usage, step.errors)
            for step in run.steps
        ],
        "input": [[message.id for message in step.input_messages] for step in run.steps],
        "response": [step.inference_response for step in run.steps],
        "current": run.current_step,
        "status": run.status,
        "execution_id": run.execution_id,
        "count": state.execution_count,
        "errors": run.all_errors,
        "own errors": run.errors,
        "usage": run.usage,
        "stop": run.continuation.stop_signals,
        "agent": state.agent_id,
    }


def folded(events: Sequence[Any]) -> LoopRecord:
    record = LoopRecord(loop_id=events[0].loop_id, session_id=events[0].session_id)
    for event in events:
        record = record.after(event)
    return record


def assert_record_agrees(record: LoopRecord, state: AgentState, before: AgentState) -> None:
    run = state.execution
    assert run is not None
    assert record.loop_id == run.execution_id
    new = list(state.messages)[len(before.messages) :]
    assert [message.id for message in record.messages] == [message.id for message in new]
    assert [turn.step_id for turn in record.turns] == [step.id for step in run.steps]
    assert [turn.tool_executions for turn in record.turns] == [step.tool_executions for step in run.steps]
    assert [turn.usage for turn in record.turns] == [step.usage for step in run.steps]
    assert [turn.errors for turn in record.turns] == [step.all_errors for step in run.steps]
    assert record.usage == run.usage
    assert record.status is STATUS_ON_RECORD[run.status]
    assert record.errors == run.errors


def assert_prefixes_replay(before: AgentState, events: Sequence[Any]) -> None:
    """Assert that every prefix can be replayed, and has the usage and messages of its record until the end."""
    for length in range(1, len(events) + 1):
        state = Replay(before).apply_all(events[:length]).state
        record = folded(events[:length])
        assert record.usage == state.usage
        new = list(state.messages)[len(before.messages) :]
        assert [message.id for message in record.messages] == [message.id for message in new]


def listened() -> tuple[EventBus, Heard]:
    bus, heard = EventBus(), Heard()
    bus.wiretap(heard.append)
    return bus, heard


async def started(
    bus: EventBus, definition: AgentDefinition | None = None
) -> tuple[SessionRuntime, MemoryStore, AgentSession]:
    store = MemoryStore()
    runtime = SessionRuntime(store, events=bus)
    return runtime, store, await runtime.create(definition or AgentDefinition("agent"))


def assert_agree(before: AgentState, events: Sequence[Any], after: AgentState) -> None:
    assert seen(Replay(before).apply_all(events).state) == seen(after)
    assert_prefixes_replay(before, events)
    assert_record_agrees(folded(events), after, before)


@given(
    stories=st.lists(stories, min_size=1, max_size=2),
    posted=st.integers(0, 2),
    concurrency=st.sampled_from(["parallel", "sequential", 2]),
)
async def test_the_live_state_and_the_replayed_one_agree(
    stories: list[tuple[list[Any], Any]], posted: int, concurrency: Any
) -> None:
    """Each run's events, and each prefix of them, lead to its state, for any runs of a session."""
    bus, heard = listened()
    runtime, store, session = await started(bus)
    for number in range(posted):
        message = Message.user(f"steering {number}")
        await store.post(session.id, Entry(STEER, {"messages": [message.to_dict()], "key": None}))
    for replies, ending in stories:
        heard.clear()
        before = (await store.load(session.id)).state
        driver = ScriptedDriver([*replies, ending, "After all."])  # for a message that comes behind the ending
        loops = LoopFactory(driver=driver, tools=TOOLS, events=bus, concurrency=concurrency)
        after = await runtime.execute(session.id, SendMessage("Go.", loops))
        events = [event for event in on_record(heard) if event.loop_id == after.state.execution.execution_id]
        assert_agree(before, events, after.state)
        assert_record_agrees(await runtime.loop(session.id, events[0].loop_id), after.state, before)


@given(story=stories, steer_at=st.sets(st.integers(0, 5), max_size=3))
async def test_messages_between_any_steps_are_replayed(story: tuple[list[Any], Any], steer_at: set[int]) -> None:
    """A run that is steered between two steps continues, and its events say so."""
    heard = Heard()
    replies, ending = story
    script = [*replies, ending, *["After all."] * 4]
    loop = LoopFactory(driver=ScriptedDriver(script), tools=TOOLS, events=heard).build(AgentDefinition("agent"))
    before, asked = AgentState(), Message.user("Go.")
    run = loop.start(before.with_messages(asked), RunStart(inputs=[asked], session_id="sess"))
    async for state in run.steps():
        if state.step_count in steer_at:
            await run.steer([Message.user(f"steering {state.step_count}")])
    assert_agree(before, on_record(heard), run.state)


async def test_a_replayed_state_has_the_times_of_the_live_one() -> None:
    """Steps and the run begin and end when their events say so."""
    bus, heard = listened()
    runtime, _, session = await started(bus)
    loops = LoopFactory(driver=ScriptedDriver([ToolCall("good", {"n": 1}), "Done."]), tools=TOOLS, events=bus)
    after = await runtime.execute(session.id, SendMessage("Go.", loops))
    events = on_record(heard)
    run = Replay(session.state).apply_all(events).state.execution
    live = after.state.execution
    assert run is not None
    assert live is not None
    assert (run.started_at, run.completed_at) == (events[0].at, events[-1].at)
    for mine, theirs in zip(run.step_executions, live.step_executions, strict=True):
        assert abs(mine.duration - theirs.duration) < 0.5


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_run_that_reached_its_budget_is_replayed(limit: int) -> None:
    """It is stopped with the same signal."""
    bus, heard = listened()
    runtime, _, session = await started(bus, AgentDefinition("agent", budget=ExecutionBudget(max_steps=limit)))
    driver = ScriptedDriver(lambda _: ToolCall("good", {"n": 1}))
    after = await runtime.execute(session.id, SendMessage("Go.", LoopFactory(driver=driver, tools=TOOLS, events=bus)))
    replayed = Replay(session.state).apply_all(on_record(heard)).state
    assert seen(replayed) == seen(after.state)
    assert replayed.stop_reason is StopReason.STEPS_LIMIT_REACHED
    assert_record_agrees(folded(on_record(heard)), after.state, session.state)


@pytest.mark.parametrize("where", ["model", "tool"])
async def test_a_run_that_was_cancelled_is_replayed(where: str) -> None:
    """Both end with the step that was under way, if the model had answered in it."""
    bus, heard = listened()
    runtime, store, session = await started(bus)
    is_called = asyncio.Event()

    @tool
    async def hang(n: int) -> None:
        """Never come back."""
        is_called.set()
        await asyncio.Event().wait()

    driver = HeldDriver([[ToolCall("good", {"n": 1}), ToolCall("hang", {"n": 1})], "Done."])
    if where == "tool":
        driver.may_answer.set()
    loops = LoopFactory(driver=driver, tools=(*TOOLS, hang), events=bus)
    work = asyncio.ensure_future(runtime.execute(session.id, SendMessage("Go.", loops)))
    await (is_called if where == "tool" else driver.is_asked).wait()
    await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    after = await store.load(session.id)
    events = on_record(heard)
    assert after.state.status is ExecutionStatus.STOPPED
    assert after.state.step_count == (1 if where == "tool" else 0)
    assert seen(Replay(session.state).apply_all(events).state) == seen(after.state)
    assert_prefixes_replay(session.state, events)
    assert_record_agrees(folded(events), after.state, session.state)


async def test_a_run_that_waited_for_a_person_is_one_story() -> None:
    """The events before and after the approval lead to one state and one record."""
    bus, heard = listened()
    runtime, _, session = await started(bus)
    driver = ScriptedDriver([[ToolCall("careful", {"n": 1}), ToolCall("good", {"n": 2})], "Done."])
    loops = LoopFactory(driver=driver, tools=TOOLS, events=bus)
    waiting = await runtime.execute(session.id, SendMessage("Go.", loops))
    assert waiting.state.execution is not None
    (pending,) = waiting.state.execution.pending_calls
    first = on_record(heard)
    after = await runtime.execute(session.id, ApproveToolCalls(loops, call_ids=[pending.id]))
    events = on_record(heard)
    assert after.state.status is ExecutionStatus.COMPLETED
    assert seen(Replay(session.state).apply_all(events).state) == seen(after.state)
    assert seen(Replay(waiting.state).apply_all(events[len(first) :]).state) == seen(after.state)
    assert_record_agrees(folded(events), after.state, session.state)
    assert_record_agrees(await runtime.loop(session.id, events[0].loop_id), after.state, session.state)


async def test_a_message_with_the_tags_of_another_run_is_an_input() -> None:
    """A forwarded answer that keeps its metadata is replayed as input to the agent."""
    bus, heard = listened()
    runtime, _, session = await started(bus)
    loops = LoopFactory(driver=ScriptedDriver(["Done."]), events=bus)
    copied = Message.user("Look at this.", metadata={"step_id": "elsewhere", "execution_id": "elsewhere"})
    after = await runtime.execute(session.id, SendMessage(copied, loops))
    events = on_record(heard)
    assert seen(Replay(session.state).apply_all(events).state) == seen(after.state)
    assert_record_agrees(folded(events), after.state, session.state)


async def events_of_one_call() -> tuple[AgentState, list[Any]]:
    bus, heard = listened()
    runtime, _, session = await started(bus)
    loops = LoopFactory(driver=ScriptedDriver([ToolCall("good", {"n": 1}), "Done."]), tools=TOOLS, events=bus)
    await runtime.execute(session.id, SendMessage("Go.", loops))
    return session.state, on_record(heard)


async def test_a_call_is_in_doubt_from_its_start_to_the_message_of_its_outcome() -> None:
    """After a crash in between, or right behind the outcome, the call is not made again without asking."""
    before, events = await events_of_one_call()
    start = next(place for place, event in enumerate(events) if isinstance(event, ToolExecutionStart))
    end = next(place for place, event in enumerate(events) if isinstance(event, ToolExecutionEnd))
    assert isinstance(events[end + 1], MessageEnd)
    doubts = [Replay(before).apply_all(events[:length]).decisions.unknown for length in range(len(events) + 1)]
    in_doubt = frozenset({events[start].call.id})
    assert [place for place, doubt in enumerate(doubts) if set(doubt) == in_doubt] == list(range(start + 1, end + 2))
    assert all(not doubt for doubt in doubts[: start + 1] + doubts[end + 2 :])


async def test_a_step_that_goes_on_after_a_crash_counts_from_there() -> None:
    """The time between crash and resume does not count for the step, as in the run itself."""
    before, events = await events_of_one_call()
    end = next(place for place, event in enumerate(events) if isinstance(event, ToolExecutionEnd))
    hours = timedelta(hours=5)
    resumed = replace(events[0], resumed=True, at=events[end].at + hours)
    later = [replace(event, at=event.at + hours) for event in events[end:]]
    run = Replay(before).apply_all([*events[:end], resumed, *later]).state.execution
    assert run is not None
    assert run.status is ExecutionStatus.COMPLETED
    assert sum(step.duration for step in run.step_executions) < 60


async def test_replaying_nothing_changes_nothing() -> None:
    """A state without events is the state."""
    state = AgentState().with_messages(Message.user("Hi"))
    assert Replay(state).apply_all([]).state == state


async def test_a_delayed_answer_and_parallel_tools_keep_their_order() -> None:
    """Tools are in the order of their ends, not of their starts, live and replayed."""
    bus, heard = listened()
    runtime, _, session = await started(bus)
    script = [
        Delay(0.001, [ToolCall("slow", {"n": 3}), ToolCall("bad", {"n": 1}), ToolCall("slow", {"n": 1})]),
        "Done.",
    ]
    after = await runtime.execute(
        session.id, SendMessage("Go.", LoopFactory(driver=ScriptedDriver(script), tools=TOOLS, events=bus))
    )
    events = on_record(heard)
    assert isinstance(events[-1], AgentEnd)
    assert seen(Replay(session.state).apply_all(events).state) == seen(after.state)
