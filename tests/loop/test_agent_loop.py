"""A run from its first step to its last: its events, its end, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure import (
    AgentDefinition,
    AgentEnd,
    AgentLoop,
    AgentStart,
    AgentState,
    AgentStop,
    ClaimLost,
    DriverError,
    ExecutionBudget,
    ExecutionStatus,
    InferenceResponse,
    Interceptor,
    LoopFactory,
    Message,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    ModelReply,
    ModelRequest,
    RetriesExhausted,
    StopReason,
    StopSignal,
    ToolCall,
    ToolExecutionEnd,
    Usage,
    tool,
)
from perdure.errors import TransientDriverError
from perdure.loop.agent_loop import RunStart
from perdure.model.loop_events import LoopEvent
from perdure.testing.scripted import Chunks, Delay, ScriptedDriver

from .scenes import Heard, answer_of, asked, loop_of, results_in, run


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def fail(why: str) -> str:
    raise ValueError(why)


ADD = ToolCall("add", {"a": 2, "b": 3}, "c1")


async def test_a_run_goes_on_until_the_model_answers() -> None:
    """Model call, tools, model call: the run is completed with the answer, its steps and their usage."""
    driver = ScriptedDriver([ADD, "It is 5."])
    state = await run(driver, add)
    assert (state.status, state.stop_reason) == (ExecutionStatus.COMPLETED, StopReason.COMPLETED)
    assert (answer_of(state), state.step_count, state.usage.total_tokens) == ("It is 5.", 2, 30)
    assert [message.role for message in state.messages] == ["user", "assistant", "tool", "assistant"]
    assert [message.text for message in driver.requests[1].messages] == ["Hi", "", "5"]
    assert [request.step for request in driver.requests] == [0, 1]


async def test_messages_are_tagged_with_where_they_come_from() -> None:
    """A run's messages carry its execution, step and agent; all but the answer are traces."""
    state = await run([ADD, "5"], add)
    assert state.execution is not None
    for message in state.messages[1:]:
        assert message.metadata["execution_id"] == state.execution.execution_id
        assert message.metadata["agent_id"] == state.agent_id
    assert [message.is_trace for message in state.messages] == [False, True, True, False]


async def test_iterate_gives_the_state_after_each_step() -> None:
    """It yields the state of each step, and last the state at the end of the run."""
    states = [state async for state in loop_of([ADD, "5"], add).iterate(asked())]
    assert [state.step_count for state in states] == [1, 2, 2]
    assert [state.status.value for state in states if state.status] == ["in_progress", "in_progress", "completed"]


async def test_a_state_in_progress_is_continued() -> None:
    """A run that was left after a step resumes with the same execution id, and repeats no step."""
    driver = ScriptedDriver([ADD, ADD, "5"])
    loop = loop_of(driver, add)
    steps = loop.iterate(asked())
    left = await anext(steps)
    await steps.aclose()
    state = await loop.run(left)
    assert left.execution is not None
    assert state.execution is not None
    assert state.execution.execution_id == left.execution.execution_id
    assert (state.step_count, state.execution_count, len(driver.requests)) == (3, 1, 3)


async def test_the_next_run_is_another_execution() -> None:
    """An ended state is not continued: a new execution is counted, and the old one's id is its parent."""
    heard = Heard()
    loop = loop_of(["One.", "Two."], events=heard)
    first = await loop.run(asked())
    second = await loop.run(first.with_messages(Message.user("And?")))
    assert first.execution is not None
    assert second.execution is not None
    assert first.execution.execution_id != second.execution.execution_id
    assert second.execution_count == 2
    assert [event.parent_loop_id for event in heard.of(AgentStart)] == [None, first.execution.execution_id]


async def test_events_come_in_order_and_are_numbered() -> None:
    """A run sends its events from AgentStart to AgentEnd, numbered and in order."""
    heard = Heard()
    state = asked()
    loop = loop_of([ADD, Chunks(["It ", "is 5."])], add, events=heard)
    async for _ in loop.start(state, RunStart(session_id="s", inputs=list(state.messages))).steps():
        pass
    assert heard.names == [
        *("AgentStart", "MessageEnd"),
        *("TurnStart", "MessageStart", "MessageUpdate", "MessageEnd"),
        *("ToolExecutionStart", "ToolExecutionEnd", "MessageEnd", "TurnEnd"),
        *("TurnStart", "MessageStart", "MessageUpdate", "MessageUpdate", "MessageEnd", "TurnEnd", "AgentEnd"),
    ]
    assert [event.seq for event in heard] == list(range(1, len(heard) + 1))
    assert {(event.session_id, event.agent_id) for event in heard} == {("s", state.agent_id)}
    assert [update.text for update in heard.of(MessageUpdate)] == ['{"a":2,"b":3}', "It ", "is 5."]
    ended = heard.of(AgentEnd)[0]
    assert [message.text for message in ended.messages] == ["Hi", "", "5", "It is 5."]
    assert ended.messages == tuple(event.message for event in heard.of(MessageEnd))
    assert (ended.status, ended.usage.total_tokens) == (ExecutionStatus.COMPLETED, 30)


async def test_a_driver_error_fails_the_run() -> None:
    """The error is on the run, the reason is error_forbade, and nothing is raised."""
    state = await run([ADD, DriverError("no such model")], add)
    assert (state.status, state.stop_reason) == (ExecutionStatus.FAILED, StopReason.ERROR_FORBADE)
    assert [(error.type, error.message) for error in state.errors] == [("DriverError", "no such model")]
    assert state.step_count == 1


async def test_a_drivers_own_bug_fails_the_run_with_its_traceback() -> None:
    """An exception that is not a DriverError fails the run too, and its traceback is kept."""
    state = await run([KeyError("choices")])
    assert (state.status, state.errors[0].type) == (ExecutionStatus.FAILED, "KeyError")
    assert "Traceback" in (state.errors[0].traceback or "")


async def test_a_stray_cancellation_fails_the_run() -> None:
    """A driver that leaks a cancellation of its own has failed: the run was not cancelled."""

    async def cancelled(request: object, on_delta: object) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(1))
        inner.cancel()
        await inner

    driver = ScriptedDriver([])
    driver.respond = cancelled  # type: ignore[method-assign,assignment]
    state = await run(driver)
    assert (state.status, state.errors[0].type) == (ExecutionStatus.FAILED, "CancelledError")


async def test_exhausted_retries_have_a_reason_of_their_own() -> None:
    """A model that failed at every attempt fails the run with retry_limit_reached."""
    exhausted = RetriesExhausted(4, TransientDriverError("acme:m", "busy"))
    state = await run([exhausted])
    assert (state.status, state.stop_reason) == (ExecutionStatus.FAILED, StopReason.RETRY_LIMIT_REACHED)


async def test_an_error_that_the_model_has_answered_is_no_failed_run() -> None:
    """A tool's error goes to the model; a run that ends with an answer is completed, with the error still listed."""
    state = await run([ToolCall("fail", {"why": "no luck"}), "Sorry."], fail)
    assert (state.status, answer_of(state)) == (ExecutionStatus.COMPLETED, "Sorry.")
    assert [(error.type, error.message) for error in state.errors] == [("ValueError", "no luck")]
    assert [(result.is_error, result.text) for result in results_in(state)] == [(True, "ValueError: no luck")]


async def test_a_run_whose_last_step_is_an_error_is_failed() -> None:
    """A run that is stopped right after a step whose tool failed has no answer, and is failed."""

    class Finish(Interceptor):
        def after_step(self, state: AgentState) -> AgentState:
            return state.with_stop_signal(StopSignal(StopReason.COMPLETED))

    state = await run([ToolCall("fail", {"why": "x"}), "unused"], fail, interceptors=[Finish()])
    assert (state.status, state.step_count) == (ExecutionStatus.FAILED, 1)


async def test_a_forced_stop_is_stopped_whatever_the_last_step_was() -> None:
    """A budget that ends after a failing tool leaves the run stopped, not failed."""
    state = await run([ToolCall("fail", {"why": "x"})], fail, agent={"budget": ExecutionBudget(max_steps=1)})
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STEPS_LIMIT_REACHED)


@pytest.mark.parametrize("concurrency", ["sequential", "parallel"])
async def test_a_tool_may_stop_the_run(concurrency: str) -> None:
    """AgentStop from a tool: its call is answered, calls already under way end, and no further step is taken."""

    @tool
    def halt() -> None:
        raise AgentStop("enough")

    script = [[ADD, ToolCall("halt")], "unused"]
    state = await run(script, add, halt, concurrency=concurrency)
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STOP_REQUESTED)
    assert state.execution is not None
    assert state.execution.continuation.stop_signals[0].message == "enough"
    assert [result.text for result in results_in(state)] == ["5", "The run was stopped here: enough"]
    assert not state.errors


async def test_cancelling_a_run_leaves_what_it_had() -> None:
    """A cancelled run is stopped at the user's request, with its steps; the caller gets the cancellation."""
    heard = Heard()
    run = loop_of([ADD, Delay(5, "late")], add, events=heard).start(asked())
    task = asyncio.ensure_future(_drained(run.steps()))
    await heard.event_of(MessageStart, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (run.state.status, run.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)
    assert run.state.step_count == 1
    assert heard.of(AgentEnd)[0].status is ExecutionStatus.STOPPED


async def _drained(steps: AsyncIterator[AgentState]) -> None:
    async for _ in steps:
        pass


class Refusing:
    """A record that refuses at its n-th barrier."""

    def __init__(self, at: int) -> None:
        self._left = at

    def wants(self, kind: type[LoopEvent]) -> bool:
        return True

    def put(self, event: LoopEvent) -> None:
        return None

    async def barrier(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise ClaimLost("s", 1)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("calls", [[ADD], [ADD, ToolCall("add", {"a": 1, "b": 1})]])
async def test_a_record_that_refuses_ends_the_run_and_is_heard(at: int, calls: list[ToolCall]) -> None:
    """An event that cannot be recorded does not happen: the store's error is raised, and the run is not failed."""
    loop: AgentLoop = loop_of([calls, "5"], add)
    with pytest.raises(ClaimLost):
        await _drained(loop.start(asked(), RunStart(record=Refusing(at))).steps())


class Keeping:
    """A record that keeps events of some kinds."""

    def __init__(self, *left_out: type[LoopEvent]) -> None:
        self._left_out = left_out
        self.kept: list[tuple[str, int]] = []

    def wants(self, kind: type[LoopEvent]) -> bool:
        return kind not in self._left_out

    def put(self, event: LoopEvent) -> None:
        self.kept.append((type(event).__name__, event.seq))

    async def barrier(self) -> None:
        return None


async def test_an_event_that_nobody_keeps_or_hears_is_counted_and_not_made() -> None:
    """Kept events have the same numbers as always, and a listener gets all events."""
    script = [[ADD, ToolCall("add", {"a": 1, "b": 1}, "c2")], "5"]
    whole, some, listened_to = Keeping(), Keeping(MessageUpdate, ToolExecutionEnd), Keeping(MessageUpdate)
    heard = Heard()
    for record, events in ((whole, None), (some, None), (listened_to, heard)):
        loop: AgentLoop = loop_of(script, add, events=events)
        await _drained(loop.start(asked(), RunStart(record=record)).steps())
    left_out = ("MessageUpdate", "ToolExecutionEnd")
    assert some.kept == [(name, seq) for name, seq in whole.kept if name not in left_out]
    assert len(some.kept) < len(whole.kept)
    assert [(type(event).__name__, event.seq) for event in heard] == whole.kept == listened_to.kept


async def test_a_call_id_that_a_model_uses_twice_is_made_distinct() -> None:
    """Approvals and sub-agents are found by a call's id, so no two calls of a run share one."""
    again = Message.assistant(tool_calls=[ADD, ToolCall("add", {"a": 1, "b": 1}, "c1")])
    driver = ScriptedDriver(lambda request: again if request.step < 2 else "done")
    driver._renewed = lambda message: message  # type: ignore[method-assign]  # as careless as some servers are
    state = await run(driver, add)
    ids = [call.id for message in state.messages for call in message.tool_calls]
    assert len(set(ids)) == 4
    texts = {result.call_id: result.text for result in results_in(state)}  # each when its call has ended
    assert [texts[call] for call in ids] == ["5", "2", "5", "2"]


class CutOff:
    """A driver whose answers end for the given reasons, one a step."""

    def __init__(self, *answers: tuple[Message, str]) -> None:
        self._answers = answers

    async def respond(self, request: ModelRequest, on_delta: Any) -> ModelReply:
        message, reason = self._answers[request.step]
        return ModelReply(message, InferenceResponse(reason, Usage(1, 2)))


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.CONTENT_FILTER])
async def test_a_cut_off_answer_is_a_stop_of_its_own(reason: StopReason) -> None:
    """The run is stopped, not completed; the text is kept, marked incomplete, and is not the final response."""
    state = await run_driver(CutOff((Message.assistant("Once upon a"), reason.value)))
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, reason)
    assert (state.final_response, state.has_final_response) == (None, False)
    (said,) = state.current_response
    assert (said.text, said.is_incomplete, said.metadata["incomplete"]) == ("Once upon a", True, True)
    assert state.messages[-1] == said


async def test_tools_that_a_long_answer_asks_for_are_still_called() -> None:
    """The run continues while the model has steps left; only its last answer counts."""
    driver = CutOff((Message.assistant(ToolCall("add", {"a": 1, "b": 2})), "length"), (Message.assistant("3"), "stop"))

    def add(a: int, b: int) -> int:
        return a + b

    state = await run_driver(driver, add)
    assert (state.status, state.stop_reason) == (ExecutionStatus.COMPLETED, StopReason.COMPLETED)
    assert state.final_response is not None


async def test_an_interceptor_may_have_a_cut_off_answer_continued() -> None:
    """`on_stop` is asked first; if the run then ends by itself, it is completed."""

    class Continue(Interceptor):
        def on_stop(self, state: AgentState) -> AgentState:
            if state.current_response[-1].is_incomplete:
                return state.with_messages(Message.user("Go on.")).with_continuation_requested()
            return state

    driver = CutOff((Message.assistant("Once upon"), "length"), (Message.assistant(" a time."), "stop"))
    state = await run_driver(driver, interceptors=[Continue()])
    assert (state.status, state.final_response and state.final_response.text) == (ExecutionStatus.COMPLETED, " a time.")


async def run_driver(driver: Any, *tools: Any, **options: Any) -> AgentState:
    loops = LoopFactory(driver=driver, tools=tools, **options)
    return await loops.build(AgentDefinition("agent")).run(AgentState().with_messages(Message.user("Hi")))
