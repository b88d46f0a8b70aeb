"""Budgets: each limit stops a run before the step that would begin over it, and time stops calls in flight."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from perdure import (
    AgentState,
    DriverError,
    ExecutionBudget,
    ExecutionStatus,
    Interceptor,
    Message,
    Spent,
    StopReason,
    StopSignal,
    ToolCall,
    Usage,
    UseGuards,
    tool,
)
from perdure.loop.agent_loop import RunStart
from perdure.loop.tool_use import Decisions, call_hash
from perdure.model.ids import use
from perdure.testing.scripted import Delay, ScriptedDriver

from .scenes import answer_of, asked, loop_of, results_in, run


@tool
def step() -> str:
    return "ok"


def for_ever() -> ScriptedDriver:
    """Return an agent that never answers; each of its steps uses 15 tokens and 10 cents."""
    return ScriptedDriver(lambda request: ToolCall("step"), usage=Usage(10, 5, cost=0.1))


def signal_of(state: AgentState) -> StopSignal:
    assert state.execution is not None
    (signal,) = state.execution.continuation.stop_signals
    return signal


@pytest.mark.parametrize(
    ("budget", "reason", "limit", "steps"),
    [
        (ExecutionBudget(max_steps=3), StopReason.STEPS_LIMIT_REACHED, "max_steps", 3),
        (ExecutionBudget(max_steps=0), StopReason.STEPS_LIMIT_REACHED, "max_steps", 0),
        (ExecutionBudget(max_tokens=40), StopReason.TOKEN_LIMIT_REACHED, "max_tokens", 3),
        (ExecutionBudget(max_tokens=45), StopReason.TOKEN_LIMIT_REACHED, "max_tokens", 3),
        (ExecutionBudget(max_cost=0.15), StopReason.TOKEN_LIMIT_REACHED, "max_cost", 2),
        (ExecutionBudget(max_seconds=0), StopReason.TIME_LIMIT_REACHED, "max_seconds", 0),
        (ExecutionBudget(deadline=datetime(2020, 1, 1, tzinfo=UTC)), StopReason.TIME_LIMIT_REACHED, "deadline", 0),
    ],
)
async def test_each_limit_stops_the_run(budget: ExecutionBudget, reason: StopReason, limit: str, steps: int) -> None:
    """The run is stopped before the step that would begin over a limit, and its signal names that limit."""
    driver = for_ever()
    state = await run(driver, step, agent={"budget": budget})
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, reason)
    assert (signal_of(state).limit, signal_of(state).source) == (limit, "budget")
    assert (state.step_count, len(driver.requests)) == (steps, steps)


async def test_an_answer_at_the_limit_is_an_answer() -> None:
    """A run that has its answer needs no further step, so no limit stops it."""
    state = await run([ToolCall("step"), "done"], step, agent={"budget": ExecutionBudget(max_steps=2, max_tokens=30)})
    assert (state.status, answer_of(state)) == (ExecutionStatus.COMPLETED, "done")


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=0.03)


@pytest.mark.parametrize("limit", ["max_seconds", "deadline"])
@pytest.mark.parametrize("by", ["definition", "capability"])
async def test_a_model_call_in_flight_is_cancelled_at_the_time_limit(limit: str, by: str) -> None:
    """A model that does not answer in time is cancelled, whether a budget or a capability sets the limit."""
    budget = ExecutionBudget(max_seconds=0.03) if limit == "max_seconds" else ExecutionBudget(deadline=soon())
    guarded = {"capabilities": ("guards",)} if by == "capability" else {"budget": budget}
    script = [ToolCall("step"), Delay(5, "late")]
    state = await run(script, step, agent=guarded, capabilities={"guards": UseGuards(budget)})
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.TIME_LIMIT_REACHED)
    assert (signal_of(state).limit, state.step_count) == (limit, 1)
    assert not state.errors


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_in_flight_is_cancelled_at_the_time_limit(calls: int) -> None:
    """Tools that take longer than the run may are cancelled; results of others stay."""
    cancelled = []

    @tool
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    script = [[ToolCall("step"), *(ToolCall("hang") for _ in range(calls))], "unused"]
    state = await run(script, step, hang, agent={"budget": ExecutionBudget(max_seconds=0.05)})
    assert (state.status, signal_of(state).limit) == (ExecutionStatus.STOPPED, "max_seconds")
    assert len(cancelled) == calls
    assert [result.text for result in results_in(state)] == ["ok"]


async def test_nothing_begins_when_time_is_up() -> None:
    """A run whose time has passed while its model was thinking starts no tool."""
    called = []

    @tool
    def late() -> None:
        called.append(True)

    clock = datetime(2026, 1, 1, tzinfo=UTC)

    class Jump(Interceptor):
        def after_inference(self, reply: object, state: AgentState) -> object:
            nonlocal clock
            clock += timedelta(hours=1)
            return reply

    with use(clock=lambda: clock):
        agent = {"budget": ExecutionBudget(max_seconds=60)}
        state = await run([ToolCall("late")], late, agent=agent, interceptors=[Jump()])
    assert (state.stop_reason, called) == (StopReason.TIME_LIMIT_REACHED, [])


async def test_time_that_a_run_waited_for_a_person_does_not_count() -> None:
    """max_seconds counts only the work, however long approvals take and however many there are."""
    clock = datetime(2026, 1, 1, tzinfo=UTC)

    @tool(needs_approval=True)
    def pay() -> str:
        nonlocal clock
        clock += timedelta(seconds=10)
        return "paid"

    with use(clock=lambda: clock):
        script = [ToolCall("pay"), ToolCall("pay"), "done"]
        loop = loop_of(script, pay, agent={"budget": ExecutionBudget(max_seconds=60)})
        state = await loop.run(asked())
        for _ in range(2):
            assert state.execution is not None
            clock += timedelta(days=1)
            pending = state.execution.pending_calls
            going_on = state.with_execution(state.execution.with_pending_calls(()))
            approved = Decisions(approved={call.id: call_hash(call) for call in pending})
            execution = loop.start(going_on, RunStart(decisions=approved))
            async for _ in execution.steps():
                pass
            state = execution.state
        assert (state.status, answer_of(state)) == (ExecutionStatus.COMPLETED, "done")
        assert execution.spent().seconds == 20


async def test_a_run_that_was_resumed_goes_on_counting() -> None:
    """Steps and tokens from before an interruption count for the budget of the whole run."""
    driver = for_ever()
    loop = loop_of(driver, step, agent={"budget": ExecutionBudget(max_steps=3)})
    steps = loop.iterate(asked())
    left = await anext(steps)
    await steps.aclose()
    state = await loop.run(left)
    assert (state.step_count, len(driver.requests)) == (3, 3)


async def test_the_next_run_has_a_budget_of_its_own() -> None:
    """The next run does not count an earlier run's usage."""
    loop = loop_of(for_ever(), step, agent={"budget": ExecutionBudget(max_steps=2, max_tokens=40)})
    state = await loop.run(asked())
    again = await loop.run(state.with_messages(Message.user("Again")))
    assert (again.step_count, again.execution_count) == (2, 2)


async def test_guards_of_a_capability_stop_a_run_too() -> None:
    """A guard is any object with a check; the first that objects stops the run with its own signal."""

    class OnlyOnce:
        def check(self, state: AgentState, spent: Spent) -> StopSignal | None:
            return StopSignal(StopReason.STOP_REQUESTED, "once is enough") if spent.steps else None

    class Add:
        def install(self, setup: object) -> object:
            from msgspec.structs import replace

            return replace(setup, guards=(OnlyOnce(),))  # type: ignore[type-var]

    state = await run(for_ever(), step, agent={"capabilities": ("once",)}, capabilities={"once": Add()})
    assert (state.status, signal_of(state).message) == (ExecutionStatus.STOPPED, "once is enough")


async def test_what_a_limit_stops_is_not_hidden_by_a_failure() -> None:
    """A driver that fails within its time fails the run; the budget does not stop it."""
    state = await run([DriverError("no")], agent={"budget": ExecutionBudget(max_seconds=5)})
    assert (state.status, state.stop_reason) == (ExecutionStatus.FAILED, StopReason.ERROR_FORBADE)
