"""Carrying out tool calls: their order, the outcome of each, and that none of them ends the run."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from pydantic import BaseModel

from perdure import (
    AgentStepType,
    ExecutionStatus,
    Outcome,
    ToolCall,
    ToolContext,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    Usage,
    codec,
    current_session,
    tool,
)
from perdure.loop.agent_loop import RunStart
from perdure.testing.scripted import ScriptedDriver

from .scenes import Heard, answer_of, asked, loop_of, results_in, run


async def told(function: Any, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the model's result of one call of a tool, and the execution on record."""
    made = tool(**options)(function) if options else tool(function)
    state = await run([ToolCall(made.name, arguments or {}), "done"], made)
    assert (state.status, answer_of(state)) == (ExecutionStatus.COMPLETED, "done")
    (result,) = results_in(state)
    return result, state.steps[0].tool_executions[0]


async def test_arguments_that_do_not_fit_go_back_to_the_model() -> None:
    """A call that does not fit is not made; the model gets the problem, and the run continues."""
    called = []

    def add(a: int, b: int) -> None:
        called.append((a, b))

    result, execution = await told(add, {"a": 1, "b": "two"})
    assert result.is_error
    assert "$.b" in result.text
    assert (execution.error.type, called) == ("InvalidArguments", [])


async def test_a_call_that_nobody_decided_about_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is bound to a hash of its call. Without a decision there is nothing to compare."""

    def refuse(*_: object) -> str:
        raise AssertionError("nobody has decided about this call")

    monkeypatch.setattr("perdure.loop.tool_use.call_hash", refuse)
    monkeypatch.setattr("perdure.model.execution.PendingCall.digest", property(refuse))
    result, _ = await told(lambda: "done", name="work")
    assert result.content == "done"


async def test_an_unknown_tool_is_told_with_those_there_are() -> None:
    """A tool that does not exist, or is not allowed to this agent, is an error result that names the others."""

    @tool
    def secret() -> None: ...

    @tool
    def open_() -> None: ...

    state = await run([ToolCall("secret"), "done"], secret, open_, agent={"tools": ("open_",)})
    assert results_in(state)[0].text == "UnknownTool: No tool is named 'secret'. Available: open_."


async def stop_iteration() -> None:
    raise StopIteration


def plain_stop_iteration() -> int:
    return next(iter(()))  # in a thread, asyncio would wait for this for ever


def leave() -> None:
    sys.exit(3)


async def stray_cancellation() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(1))
    inner.cancel()
    await inner


def silent() -> None:
    raise ValueError


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (stop_iteration, "RuntimeError: coroutine raised StopIteration"),
        (plain_stop_iteration, "RuntimeError: the tool raised StopIteration"),
        (leave, "SystemExit: 3"),
        (stray_cancellation, "CancelledError: "),
        (silent, "ValueError: "),
        (lambda: Unprintable(), "RuntimeError: no"),
        (lambda: "x" * 20_000_000, "ToolError: The result has 20,000,002 bytes"),
    ],
)
async def test_a_raising_tool_never_ends_a_run(function: Any, said: str) -> None:
    """The model gets the type and message of any exception, and continues."""
    result, execution = await told(function, name="tool")
    assert result.is_error
    assert result.text.startswith(said)
    assert execution.error is not None


async def test_checks_that_raise_are_errors_of_the_call() -> None:
    """A predicate that fails decides nothing: the call is not made, and the model gets the error."""
    result, _ = await told(lambda: None, name="tool", needs_approval=lambda arguments: arguments["missing"])
    assert result.text == "KeyError: 'missing'"


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_tool_that_takes_too_long_is_told_off() -> None:
    """An async tool is cancelled when its time is over."""
    result, _ = await told(never, timeout=0.01)
    assert result.text.startswith("OutcomeUnknown: No result within 0.01 s. This call was interrupted")


async def test_a_plain_function_that_takes_too_long_is_left_behind() -> None:
    """A thread cannot be cancelled, but the run stops waiting for it."""
    release = threading.Event()
    result, _ = await told(lambda: release.wait(5), name="wait", timeout=0.01)
    release.set()
    assert result.is_error
    assert "it may or may not have taken effect. Check before you repeat it." in result.text


@pytest.mark.parametrize("option", [{"idempotent": True}, {"on_unknown": "rerun"}])
async def test_a_tool_that_may_be_repeated_has_only_taken_too_long(option: Any) -> None:
    result, _ = await told(never, timeout=0.01, **option)
    assert result.text == "TimeoutError: No result within 0.01 s."


async def test_a_tools_own_timeout_error_is_its_own() -> None:
    """A TimeoutError from inside the tool keeps its own message."""

    async def ask() -> None:
        raise TimeoutError("the printer did not answer")

    result, _ = await told(ask, timeout=5)
    assert result.text == "TimeoutError: the printer did not answer"


class Meeting:
    """A tool that ends only once a given number of its calls are under way; `most` is the maximum so far."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._here = 0
        self._all_here = asyncio.Event()
        self.most = 0
        self.tool = tool(name="meet")(self.meet)

    async def meet(self, who: int) -> int:
        self._here += 1
        self.most = max(self.most, self._here)
        if self._here == self._size:
            self._all_here.set()
        await self._all_here.wait()
        await asyncio.sleep(0)
        self._here -= 1
        return who


@pytest.mark.parametrize(("concurrency", "most"), [("sequential", 1), ("parallel", 4), (2, 2)])
async def test_calls_run_one_by_one_or_at_once_or_in_batches(concurrency: Any, most: int) -> None:
    """The loop runs exactly the allowed number of calls at once."""
    meeting = Meeting(most)
    calls = [ToolCall("meet", {"who": number}) for number in range(4)]
    driver = ScriptedDriver([calls, "done"])
    state = await run(driver, meeting.tool, concurrency=concurrency)
    assert meeting.most == most
    assert sorted(result.content for result in results_in(state)) == [0, 1, 2, 3]
    assert [message.text for message in driver.requests[1].messages[2:]] == ["0", "1", "2", "3"], "in the calls' order"


async def test_parallel_calls_tell_their_stories_apart() -> None:
    """Each outcome is followed by its own message, in order, also for a slow listener."""
    barrier = asyncio.Barrier(3)

    class Slow(Heard):
        async def emit(self, event: object) -> None:
            await asyncio.sleep(0)
            await super().emit(event)

    @tool
    async def meet(who: int) -> int:
        await barrier.wait()
        return who

    heard = Slow()
    state = await run([[ToolCall("meet", {"who": n}) for n in range(3)], "done"], meet, events=heard)
    assert [event.seq for event in heard] == list(range(1, len(heard) + 1))
    ends = [(end, then) for end, then in pairwise(heard) if isinstance(end, ToolExecutionEnd)]
    told = [(end.execution.call.id, then.message.tool_results[0].call_id) for end, then in ends]
    assert len(told) == 3
    assert all(ended == said for ended, said in told)
    assert [result.call_id for result in results_in(state)] == [ended for ended, _ in told]


async def test_a_large_result_is_cut_for_the_model_and_whole_on_record() -> None:
    """The model gets head, tail and the missing length; the step keeps everything. Long errors are cut as well."""
    text = "".join(chr(97 + number % 26) for number in range(1000))

    @tool
    def read() -> str:
        return text

    @tool
    def shout() -> str:
        raise ValueError(text)

    state = await run([[ToolCall("read"), ToolCall("shout")], "done"], read, shout, max_result_chars=90)
    shown, error = results_in(state)
    assert shown.text.startswith(text[:60] + "\n[… 910 characters left out here")
    assert shown.text.endswith("…]\n" + text[-30:])
    assert len(error.text) < 200
    assert state.steps[0].tool_executions[0].result == text


@dataclass
class Spot:
    x: float


class Row(BaseModel):
    at: datetime


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        (None, None),
        ({"a": [1, 2.5, True, None]}, {"a": [1, 2.5, True, None]}),
        (float("nan"), "nan"),
        ([float("inf"), 1], ["inf", 1]),
        (b"\x00\xff", "AP8="),
        (Spot(1.5), {"x": 1.5}),
        ([Row(at=datetime(2026, 1, 1, tzinfo=UTC))], [{"at": "2026-01-01T00:00:00Z"}]),
        ({"spot": Spot(2), "odd": Ellipsis}, {"spot": {"x": 2}, "odd": "Ellipsis"}),
        ("half \ud800 a pair", "half � a pair"),
        ({"\udfff": {3}}, {"�": [3]}),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        (2**70, str(2**70)),
        (LOOP, "[[...]]"),
    ],
)
async def test_any_result_can_be_kept(returned: Any, kept: Any) -> None:
    """Results are kept as the JSON closest to the returned value."""
    result, execution = await told(lambda: returned, name="give")
    assert (result.is_error, execution.result) == (False, kept)
    codec.encode(execution)


async def test_a_result_nested_too_deep_is_cut_off_below() -> None:
    """A structure deeper than a store takes keeps its upper levels."""
    _, execution = await told(lambda: DEEP, name="give")
    codec.encode(execution)
    assert isinstance(execution.result, list)


async def test_a_tool_may_say_more_than_its_result() -> None:
    """An Outcome carries the call's usage, which counts for the run."""
    used = Usage(input_tokens=100, cost=0.25)
    _, execution = await told(lambda: Outcome(Spot(1), usage=used), name="ask")
    assert (execution.result, execution.usage) == ({"x": 1.0}, used)


async def test_a_tool_knows_what_it_serves() -> None:
    """The context is filled in and hidden from the model; threads know the session too."""
    seen: list[Any] = []

    @tool
    def look(context: ToolContext, extra: int = 1) -> None:
        seen.append((context.call_id, context.session_id, current_session()))

    driver = ScriptedDriver([[ToolCall("look", {}, "c1"), ToolCall("look", {}, "c2")], "done"])
    run = loop_of(driver, look).start(asked(), RunStart(session_id="s-1"))
    async for _ in run.steps():
        pass
    assert sorted(seen) == [("c1", "s-1", "s-1"), ("c2", "s-1", "s-1")]
    assert set(driver.requests[0].tools[0].parameters["properties"]) == {"extra"}
    assert current_session() is None


async def test_a_tool_tells_how_far_it_is() -> None:
    """Progress is an event between the call's start and its end."""

    @tool
    async def work(context: ToolContext) -> None:
        assert context.progress is not None
        await context.progress({"done": float("nan")})

    heard = Heard()
    await run([ToolCall("work", {}, "c1"), "done"], work, events=heard)
    (update,) = heard.of(ToolExecutionUpdate)
    assert (update.call_id, update.progress) == ("c1", {"done": "nan"})
    assert heard.of(ToolExecutionStart)[0].seq < update.seq < heard.of(ToolExecutionEnd)[0].seq


async def test_a_step_with_a_failed_call_is_an_error_step() -> None:
    """One error among its calls makes it an error step."""

    @tool
    def fine() -> int:
        return 1

    state = await run([[ToolCall("fine"), ToolCall("missing")], "done"], fine)
    assert [step.step_type for step in state.steps] == [AgentStepType.ERROR, AgentStepType.FINAL_RESPONSE]
