"""One run: its steps, its budget, and when it should stop."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from perdure.errors import InvalidData
from perdure.model import ids
from perdure.model.execution import ExecutionBudget, ExecutionState, ExecutionStatus, PendingCall, Spent
from perdure.model.message import Message, ToolCall
from perdure.model.step import AgentStep, AgentStepType, InferenceResponse, StepExecution, ToolExecution
from perdure.model.stop import StopReason, StopSignal
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord, brief

START = datetime(2030, 1, 1, tzinfo=UTC)
OOPS = ErrorRecord("ValueError", "oops")
CALL = ToolCall("look", {"at": "sky"})


def clock(*seconds: float):
    """Return a clock that shows these seconds after START, one at each call, and then stays."""
    left = list(seconds)
    return lambda: START + timedelta(seconds=left.pop(0) if len(left) > 1 else left[0])


def answer(text: str = "done", **usage: int) -> AgentStep:
    return AgentStep.of([Message.assistant(text)], response=InferenceResponse("stop", Usage(**usage)))


def working(**usage: int) -> AgentStep:
    messages = [Message.assistant(tool_calls=[CALL]), Message.tool(CALL.id, "blue")]
    return AgentStep.of(messages, response=InferenceResponse("tool_calls", Usage(**usage)))


def ran(*steps: AgentStep) -> ExecutionState:
    run = ExecutionState.fresh()
    for step in steps:
        run = run.with_current_step(step).with_current_step_completed()
    return run


def tool_run(**given) -> ToolExecution:
    return ToolExecution(CALL, START, **given)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (AgentStep(), AgentStepType.FINAL_RESPONSE),
        (answer(), AgentStepType.FINAL_RESPONSE),
        (working(), AgentStepType.TOOL_EXECUTION),
        (AgentStep.of([Message.assistant("x")], errors=[OOPS]), AgentStepType.ERROR),
        (AgentStep.of(working().output_messages, errors=[OOPS]), AgentStepType.ERROR),
        (AgentStep.of(working().output_messages, tool_executions=[tool_run(error=OOPS)]), AgentStepType.ERROR),
        (AgentStep.of(working().output_messages, tool_executions=[tool_run()]), AgentStepType.TOOL_EXECUTION),
        (AgentStep.of([Message.assistant("x")], tool_executions=[tool_run()]), AgentStepType.FINAL_RESPONSE),
    ],
)
def test_the_step_type_is_derived(step, kind):
    """An error, also a tool's, makes an error step; else tool calls a tool step; else it is a final response."""
    assert step.step_type is kind


def test_a_step_lists_its_calls_errors_and_usage():
    """A step's calls come from its output; its errors and usage include those of its tools."""
    step = AgentStep.of(
        working().output_messages,
        response=InferenceResponse(usage=Usage(10, 1, cost=0.5)),
        tool_executions=[tool_run(error=OOPS, usage=Usage(5, 2, cost=0.25)), tool_run()],
        errors=[ErrorRecord("A", "a")],
    )
    assert step.tool_calls == (CALL,)
    assert step.all_errors == (ErrorRecord("A", "a"), OOPS)
    assert step.usage == Usage(15, 3, cost=0.75)


def test_a_step_keeps_its_input_as_a_view():
    """The input messages of a step are the given transcript, not a copy."""
    view = Transcript.of([Message.user("hi")])
    assert AgentStep.of([], input=view).input_messages is view


def test_durations_are_seconds():
    """Tools, steps and runs have a duration; an unfinished tool has none, and an unfinished run's lasts until now."""
    assert tool_run().duration is None
    assert tool_run(completed_at=START + timedelta(seconds=1.5)).duration == 1.5
    assert StepExecution(AgentStep(), START, START + timedelta(seconds=2)).duration == 2
    with ids.use(clock=clock(0, 5, 7, 99)):
        run = ExecutionState.fresh()
        assert (run.duration, run.ended(ExecutionStatus.COMPLETED).duration) == (5, 7)


def test_a_step_execution_goes_by_its_steps_id():
    """The completed step and its wrapper have one identity."""
    step = answer()
    assert StepExecution(step, START).id == step.id


def test_usage_adds_up():
    """Usage adds field by field; total tokens are input and output, which include the rest."""
    total = Usage(1, 2, 3, 4, 5, 0.5) + Usage(10, 20, 30, 40, 50, 0.25)
    assert total == Usage(11, 22, 33, 44, 55, 0.75)
    assert total.total_tokens == 33


def test_a_fresh_run_is_in_progress_and_new():
    """fresh() starts a run under a new id; a run made otherwise is pending."""
    assert ExecutionState.fresh().status is ExecutionStatus.IN_PROGRESS
    assert ExecutionState.fresh().execution_id != ExecutionState.fresh().execution_id
    assert ExecutionState().status is ExecutionStatus.PENDING


def test_a_completed_step_is_archived_with_its_times_and_signals():
    """Completing the step under way wraps it with its times and current signals, and clears its place."""
    with ids.use(clock=clock(0, 1, 4)):
        run = ExecutionState.fresh().with_current_step(answer())
        run = run.with_stop_signal(StopSignal(StopReason.USER_REQUESTED))
        done = run.with_current_step_completed()
    (archived,) = done.step_executions
    assert (archived.started_at, archived.completed_at) == (START + timedelta(seconds=1), START + timedelta(seconds=4))
    assert archived.continuation.stop_reason is StopReason.USER_REQUESTED
    assert (done.current_step, done.current_step_started_at) == (None, None)
    assert (done.steps, done.last_step, done.last_step_type) == (
        (run.current_step,),
        run.current_step,
        AgentStepType.FINAL_RESPONSE,
    )


def test_a_step_counts_from_when_it_was_started():
    """A step that was started keeps that time when its content arrives."""
    with ids.use(clock=clock(0, 1, 8, 9)):
        run = ExecutionState.fresh().with_step_started().with_current_step(working()).with_current_step(answer())
    assert run.current_step_started_at == START + timedelta(seconds=1)


def test_completing_without_a_step_changes_nothing():
    """Without a step under way there is nothing to archive."""
    run = ran(answer())
    assert run.with_current_step_completed() is run
    assert ExecutionState.fresh().last_step is None
    assert ExecutionState.fresh().last_step_type is None


def test_changes_make_new_values():
    """A change makes a new run and leaves the old one unchanged."""
    before = ExecutionState.fresh()
    signal = StopSignal(StopReason.COMPLETED)
    assert before.with_stop_signal(signal).continuation.stop_signals == (signal,)
    assert before.with_continuation_requested().continuation.is_continuation_requested
    assert before.with_pending_calls((CALL,)).pending_calls == (PendingCall.of(CALL),)
    assert before.with_error(OOPS).errors == (OOPS,)
    assert before.with_current_step(answer()).current_step is not None
    assert before.ended(ExecutionStatus.FAILED).status is ExecutionStatus.FAILED
    assert before.ended(ExecutionStatus.FAILED).completed_at is not None
    assert before == ExecutionState(before.execution_id, ExecutionStatus.IN_PROGRESS, before.started_at)


SIGNAL = StopSignal(StopReason.STEPS_LIMIT_REACHED)


@pytest.mark.parametrize(
    ("run", "stops"),
    [
        (ExecutionState.fresh(), True),
        (ran(answer()), True),
        (ran(working()), False),
        (ran(working(), answer()), True),
        (ran(answer()).with_current_step(working()), False),
        (ran(working()).with_current_step(answer()), True),
        (ran(working()).with_stop_signal(SIGNAL), True),
        (ran(answer()).with_stop_signal(SIGNAL), True),
        (ran(answer()).with_continuation_requested(), False),
        (ran(working()).with_continuation_requested(), False),
        (ran(working()).with_stop_signal(SIGNAL).with_continuation_requested(), False),
        (ran(answer()).with_stop_signal(SIGNAL).with_continuation_requested(), False),
    ],
)
def test_a_run_stops_as_described(run, stops):
    """Signals stop a run unless it was asked to continue; without either, only tool calls keep it running."""
    assert run.should_stop is stops


def test_the_stop_reason_is_the_signals_or_completion():
    """The highest signal is the reason; a completed run without signals completed; any other run has no reason."""
    assert ran(answer()).stop_reason is None
    assert ran(answer()).ended(ExecutionStatus.COMPLETED).stop_reason is StopReason.COMPLETED
    assert ran(answer()).ended(ExecutionStatus.FAILED).stop_reason is None
    both = ran(answer()).with_stop_signal(StopSignal(StopReason.COMPLETED)).with_stop_signal(SIGNAL)
    assert both.ended(ExecutionStatus.STOPPED).stop_reason is StopReason.STEPS_LIMIT_REACHED


def test_usage_and_errors_are_those_of_all_steps():
    """A run's usage and errors include the step under way, and its own errors come first."""
    run = ran(working(input_tokens=1), AgentStep.of([], errors=[OOPS]))
    run = run.with_current_step(answer(input_tokens=10)).with_error(ErrorRecord("A", "a"))
    assert run.usage == Usage(11)
    assert run.all_errors == (ErrorRecord("A", "a"), OOPS)


def test_an_unlimited_budget_is_empty_and_never_exhausted():
    """Without limits no budget is exhausted."""
    much = Spent(10**9, Usage(10**9, 10**9, cost=1e9), 1e9)
    assert ExecutionBudget.unlimited().is_empty
    assert ExecutionBudget() == ExecutionBudget.unlimited()
    assert ExecutionBudget().reached(much) is None
    assert not ExecutionBudget().is_exhausted(much)


LIMITS = [
    ("max_steps", 3, Spent(2), Spent(3)),
    ("max_tokens", 10, Spent(usage=Usage(4, 5)), Spent(usage=Usage(5, 5))),
    ("max_seconds", 1.5, Spent(seconds=1.49), Spent(seconds=1.5)),
    ("max_cost", 0.5, Spent(usage=Usage(cost=0.49)), Spent(usage=Usage(cost=0.5))),
    ("deadline", START, Spent(at=START - timedelta(microseconds=1)), Spent(at=START)),
]


@pytest.mark.parametrize(("name", "limit", "below", "at"), LIMITS)
def test_each_limit_is_reached_at_its_value(name, limit, below, at):
    """A single limit makes the budget non-empty, allows less than its value, and is reached at it."""
    budget = ExecutionBudget(**{name: limit})
    assert not budget.is_empty
    assert budget.reached(below) is None
    assert not budget.is_exhausted(below)
    assert budget.reached(at) == name
    assert budget.is_exhausted(at)


def test_one_limit_is_enough():
    """A budget is exhausted as soon as any of its limits is reached; the first in order is named."""
    budget = ExecutionBudget(max_steps=3, max_tokens=10, max_cost=1.0)
    assert budget.reached(Spent(1, Usage(cost=2.0))) == "max_cost"
    assert budget.reached(Spent(3, Usage(99, cost=2.0))) == "max_steps"


def test_a_limit_of_zero_allows_nothing():
    """Zero is a limit, and it is reached at once."""
    assert ExecutionBudget(max_steps=0).is_exhausted(Spent())
    assert not ExecutionBudget(max_steps=0).is_empty


def test_a_deadline_may_be_in_any_time_zone():
    """A deadline is an instant, in any zone it is written in."""
    budget = ExecutionBudget(deadline=START.astimezone(timezone(timedelta(hours=9))))
    assert budget.is_exhausted(Spent(at=START))


@pytest.mark.parametrize("name", ["max_steps", "max_tokens", "max_seconds", "max_cost"])
@pytest.mark.parametrize("limit", [-1, True, "5", [], float("nan"), float("inf"), -0.5, 10**400, 10**5000], ids=brief)
def test_a_limit_is_a_number_of_at_least_zero(name, limit):
    """A limit that is negative, not a number, or not finite is InvalidData that names the limit."""
    with pytest.raises(InvalidData) as caught:
        ExecutionBudget(**{name: limit})
    assert caught.value.path == f"$.budget.{name}"


@pytest.mark.parametrize("name", ["max_steps", "max_tokens"])
def test_steps_and_tokens_are_whole(name):
    """Half a step cannot be a limit."""
    with pytest.raises(InvalidData, match="whole"):
        ExecutionBudget(**{name: 2.5})


@pytest.mark.parametrize("deadline", [datetime(2030, 1, 1), "2030-01-01", 5])
def test_a_deadline_has_a_time_zone(deadline):
    """A deadline that could be meant in any zone is InvalidData."""
    with pytest.raises(InvalidData) as caught:
        ExecutionBudget(deadline=deadline)
    assert caught.value.path == "$.budget.deadline"
