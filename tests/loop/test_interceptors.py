"""Interceptors: called at every point, by priority, and each may change the value there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import (
    AgentEnd,
    AgentState,
    AgentStop,
    Blocked,
    ConfigurationError,
    DriverError,
    ErrorRecord,
    ExecutionStatus,
    Interceptor,
    Message,
    ModelReply,
    ModelRequest,
    StopReason,
    StopSignal,
    ToolCall,
    ToolExecution,
    Usage,
    tool,
)
from perdure.testing.scripted import ScriptedDriver

from .scenes import Heard, answer_of, results_in, run

POINTS = [
    *("before_execution", "before_step", "before_inference", "after_inference", "before_tool_use", "after_tool_use"),
    *("after_step", "on_stop", "after_execution"),
]


@tool
def add(a: int, b: int) -> int:
    return a + b


ADD = ToolCall("add", {"a": 2, "b": 3})


def at(point: str, do: Callable[..., Any]) -> Interceptor:
    """Return an interceptor with a function at one point."""
    return type("At", (Interceptor,), {point: lambda self, *given: do(*given)})()


def raising(error: Exception) -> Callable[..., Any]:
    def do(*given: Any) -> Any:
        raise error

    return do


async def test_every_point_is_passed_in_order() -> None:
    """A run with one tool call passes every point but on_error, in order."""
    seen: list[str] = []

    def watch(point: str) -> Callable[..., Any]:
        async def do(self: Interceptor, value: Any, *rest: Any) -> Any:
            seen.append(point)
            return value

        return do

    watcher = type("Watcher", (Interceptor,), {point: watch(point) for point in POINTS})()
    await run([ADD, "5"], add, interceptors=[watcher])
    inference = ["before_step", "before_inference", "after_inference"]
    first = [*inference, "before_tool_use", "after_tool_use", "after_step"]
    assert seen == ["before_execution", *first, *inference, "after_step", "on_stop", "after_execution"]


async def test_the_highest_priority_comes_first() -> None:
    """Ties are in the order they were given; plain and async methods both work."""
    seen: list[str] = []

    def named(name: str) -> Interceptor:
        def do(state: AgentState) -> AgentState:
            seen.append(name)
            return state

        return at("before_step", do)

    await run(["5"], interceptors=[named("b"), (named("c"), -1), (named("a"), 5), named("b2")])
    assert seen == ["a", "b", "b2", "c"]


async def test_each_may_change_what_passes() -> None:
    """Interceptors replace the state, the request, the reply, the call and its outcome."""
    driver = ScriptedDriver([ADD, "5"])
    heard = Heard()
    state = await run(
        driver,
        add,
        events=heard,
        interceptors=[
            at("before_execution", lambda state: state.with_system_prompt("Be brief.")),
            at("before_inference", lambda request, state: replace(request, tools=request.tools[:0])),
            at("before_tool_use", lambda call, state: replace(call, arguments={**call.arguments, "b": 40})),
            at("after_tool_use", lambda execution, state: replace(execution, result=execution.result * 10)),
            at("after_inference", lambda reply, state: _louder(reply)),
            at("after_execution", lambda state: state.with_metadata("seen", True)),
        ],
    )
    assert {request.system_prompt for request in driver.requests} == {"Be brief."}
    assert {request.tools for request in driver.requests} == {()}
    assert [result.content for result in results_in(state)] == [420]
    assert state.steps[0].tool_executions[0].call.arguments == {"a": 2, "b": 40}
    assert state.messages[1].tool_calls[0].arguments == {"a": 2, "b": 3}, "the model's message is unchanged"
    assert (answer_of(state), state.metadata["seen"]) == ("5!", True)


def _louder(reply: ModelReply) -> ModelReply:
    said = reply.message.text
    return replace(reply, message=Message.assistant(f"{said}!")) if said else reply


async def test_the_list_that_an_interceptor_chooses_is_made_valid() -> None:
    """However an interceptor cuts the messages, a call keeps its result and no result is without its call."""
    driver = ScriptedDriver([ADD, "5"])

    def drop_the_result(request: ModelRequest, state: AgentState) -> ModelRequest:
        return replace(request, messages=request.messages[:2])

    await run(driver, add, interceptors=[at("before_inference", drop_the_result)])
    assert [message.role for message in driver.requests[1].messages] == ["user", "assistant", "tool"]


async def test_a_blocked_call_is_not_made_and_the_model_is_told_why() -> None:
    """Blocked ends the call: no later interceptor is asked, and the reason goes to the model."""
    asked: list[object] = []
    blocking = at("before_tool_use", lambda call, state: Blocked("not on Sundays"))
    later = at("before_tool_use", lambda *given: asked.append(given))
    state = await run([ADD, "ok"], add, interceptors=[blocking, later])
    (result,) = results_in(state)
    assert (result.is_error, result.text) == (True, "Blocked: This call was not made: not on Sundays")
    assert (state.status, asked) == (ExecutionStatus.COMPLETED, [])


async def test_a_call_may_be_sent_to_another_tool() -> None:
    """A call that is renamed runs the other tool; its result answers the call that the model made."""

    @tool
    def add_safely(a: int, b: int) -> str:
        return f"safely {a + b}"

    rename = at("before_tool_use", lambda call, state: replace(call, name="add_safely", id="another"))
    state = await run([ADD, "ok"], add, add_safely, interceptors=[rename])
    (result,) = results_in(state)
    assert (result.call_id, result.name, result.text) == (state.messages[1].tool_calls[0].id, "add", "safely 5")


async def test_on_stop_may_ask_for_another_step() -> None:
    """A run that is about to stop takes one more step each time an interceptor asks for it."""

    def once_more(state: AgentState) -> AgentState:
        if state.step_count > 2:
            return state
        return state.with_messages(Message.user("Sure?")).with_continuation_requested()

    driver = ScriptedDriver(["Yes.", "Quite.", "I said so."])
    state = await run(driver, interceptors=[at("on_stop", once_more)])
    assert (state.step_count, answer_of(state), state.status) == (3, "I said so.", ExecutionStatus.COMPLETED)
    assert [message.text for message in driver.requests[2].messages] == ["Hi", "Yes.", "Sure?", "Quite.", "Sure?"]


async def test_on_error_hears_what_ends_the_run() -> None:
    """It gets an error that fails the run, with the state, which may be changed."""
    heard: list[BaseException] = []

    def note(error: BaseException, state: AgentState) -> AgentState:
        heard.append(error)
        return state.with_metadata("told", str(error))

    state = await run([DriverError("no model")], interceptors=[at("on_error", note)])
    assert (state.status, state.metadata["told"]) == (ExecutionStatus.FAILED, "no model")
    assert [type(error) for error in heard] == [DriverError]


@pytest.mark.parametrize("point", POINTS)
async def test_an_interceptor_may_stop_the_run_anywhere(point: str) -> None:
    """AgentStop at any point: the run is stopped as requested, with an end on record, and without an error."""
    heard = Heard()
    state = await run([ADD, "5"], add, events=heard, interceptors=[at(point, raising(AgentStop("enough")))])
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STOP_REQUESTED)
    assert (heard.names[0], heard.names[-1], state.errors) == ("AgentStart", "AgentEnd", ())
    if point == "after_tool_use":
        assert [result.text for result in results_in(state)] == ["5"], "the tool has run, so its result is kept"


@pytest.mark.parametrize("point", POINTS)
async def test_an_interceptor_that_fails_fails_the_run(point: str) -> None:
    """Any exception of an interceptor is an error of the run, which still ends on record."""
    heard = Heard()
    state = await run([ADD, "5"], add, events=heard, interceptors=[at(point, raising(KeyError("bug")))])
    assert (state.status, state.errors[0].type) == (ExecutionStatus.FAILED, "KeyError")
    assert heard.names[-1] == "AgentEnd"


async def test_an_on_error_that_fails_is_an_error_beside_the_first() -> None:
    """The error that ended the run stays, beside the interceptor's own."""
    state = await run([DriverError("no model")], interceptors=[at("on_error", raising(KeyError("bug")))])
    assert [error.type for error in state.errors] == ["DriverError", "KeyError"]


@pytest.mark.parametrize("point", POINTS)
async def test_an_interceptor_that_returns_nothing_is_told_what_it_must(point: str) -> None:
    """A missing return is a ConfigurationError that names the interceptor and the point."""
    state = await run([ADD, "5"], add, interceptors=[at(point, lambda *given: None)])
    assert (state.status, state.errors[0].type) == (ExecutionStatus.FAILED, ConfigurationError.__name__)
    assert f"At.{point} must return the" in state.errors[0].message


def test_what_is_no_interceptor_is_refused() -> None:
    """An object that is not an Interceptor is a ConfigurationError when the loop is set up."""
    from perdure import LoopFactory

    with pytest.raises(ConfigurationError, match="Interceptor"):
        LoopFactory(interceptors=[object()])


@pytest.mark.parametrize("point", ["before_execution", "after_step"])
async def test_a_stop_signal_on_the_state_stops_the_run(point: str) -> None:
    """A signal that an interceptor puts on the state stops the run before the next step, the first one too."""
    signal = StopSignal(StopReason.STOP_REQUESTED, "not today")
    driver = ScriptedDriver([ADD, "5"])
    state = await run(driver, add, interceptors=[at(point, lambda state: state.with_stop_signal(signal))])
    assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.STOP_REQUESTED)
    assert len(driver.requests) == (0 if point == "before_execution" else 1)


async def test_an_error_may_be_masked_before_it_is_told() -> None:
    """The model gets, and the state keeps, the error that after_tool_use returns."""

    @tool
    def connect() -> None:
        raise ValueError("password hunter2 refused")

    def mask(execution: ToolExecution, state: AgentState) -> ToolExecution:
        return replace(execution, error=ErrorRecord("ValueError", "login refused"))

    state = await run([ToolCall("connect"), "ok"], connect, interceptors=[at("after_tool_use", mask)])
    assert results_in(state)[0].text == "ValueError: login refused"
    assert [error.message for error in state.errors] == ["login refused"]


@pytest.mark.parametrize("error", [AgentStop("not so"), ValueError("oops")])
async def test_an_answer_that_is_thrown_away_has_cost_its_tokens(error: Exception) -> None:
    """If an interceptor stops the run once the model has answered, the run has its tokens, also on record."""
    heard = Heard()
    state = await run(
        [ADD, "Hello."], add, interceptors=[at("after_inference", _at_step(1, raising(error)))], events=heard
    )
    assert state.final_response is None
    assert state.usage == Usage(20, 10)
    (end,) = heard.of(AgentEnd)
    assert (end.usage, end.discarded_usage) == (Usage(20, 10), Usage(10, 5))


def _at_step(number: int, do: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reply, state: do() if state.step_count == number else reply
