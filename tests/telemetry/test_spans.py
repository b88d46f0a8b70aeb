"""The spans of runs, model calls and tool calls."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any
from weakref import ref

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from tests.telemetry.watching import Watching, is_beneath, links_of, told, trace_of
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    DriverError,
    Interceptor,
    Judge,
    ModelConfig,
    RunFailed,
    SendParallel,
    SessionBusy,
    ToolCall,
    Usage,
    tool,
)
from perdure.redactors import DEFAULT
from perdure.testing import Delay, ScriptedDriver
from perdure.testing.scripted import Chunks

CANARY = "canary-4711"


@tool
def look_up(query: str) -> str:
    """Look something up."""
    return f"{CANARY} result"


async def test_a_run_with_a_tool_call_is_four_spans() -> None:
    """A run is one span, and beneath it are one for each model call and one for each tool call."""
    seen = Watching()
    driver = ScriptedDriver([ToolCall("look_up", {"query": "x"}, id="call-1"), "done"], usage=Usage(10, 5, cost=0.25))
    async with perdure.connect(
        "memory://", owner="ann", driver=driver, tools=[look_up], telemetry=seen.telemetry
    ) as sessions:
        chat = await sessions.open("a", AgentDefinition("clerk"))
        await chat.send("go")
        (start,) = await _starts(sessions, chat.id)
    names = [span.name for span in seen.spans()]
    assert names == ["chat ScriptedDriver", "execute_tool look_up", "chat ScriptedDriver", "invoke_agent clerk"]
    run = seen.the("invoke_agent")
    assert run.parent is None
    assert all(is_beneath(span, run) for span in seen.spans()[:-1])
    assert {span.status.status_code for span in seen.spans()} == {StatusCode.UNSET}
    here = run.get_span_context()
    assert start.trace == f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
    assert told(run) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "driver",
        "gen_ai.request.model": "ScriptedDriver",
        "gen_ai.agent.name": "clerk",
        "gen_ai.conversation.id": chat.id,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 10,
        "perdure.cost": 0.5,
        "perdure.owner": "ann",
        "perdure.run.id": start.loop_id,
        "perdure.run.status": "completed",
    }
    first = seen.spans("chat")[0]
    assert first.kind is SpanKind.CLIENT
    assert told(first) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "driver",
        "gen_ai.request.model": "ScriptedDriver",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("tool_call",),
        "gen_ai.conversation.id": chat.id,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "perdure.cost": 0.25,
    }
    assert told(seen.the("execute_tool")) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look_up",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-1",
        "gen_ai.conversation.id": chat.id,
    }


async def test_spans_of_users_are_beneath() -> None:
    """A tool's or a driver's own span is beneath the call, also in a plain function's thread."""
    seen = Watching()

    @tool
    def in_thread() -> str:
        """Work in a thread."""
        with seen.tracer.start_as_current_span("in thread"):
            trace.get_current_span().set_attribute("mine", True)
            return "ok"

    @tool
    async def in_loop() -> str:
        """Work in the loop."""
        trace.get_current_span().set_attribute("mine", True)
        with seen.tracer.start_as_current_span("in loop"):
            await asyncio.sleep(0)
            return "ok"

    class Driver(ScriptedDriver):
        async def respond(self, request: Any, on_delta: Any) -> Any:
            with seen.tracer.start_as_current_span("in driver"):
                return await super().respond(request, on_delta)

    class Tracing(Interceptor):
        async def before_step(self, state: Any) -> Any:
            with seen.tracer.start_as_current_span("in interceptor"):
                return state

    driver = Driver([[ToolCall("in_thread"), ToolCall("in_loop")], "done"])
    async with perdure.connect(
        "memory://", driver=driver, tools=[in_thread, in_loop], interceptors=[Tracing()], telemetry=seen.telemetry
    ) as sessions:
        with seen.tracer.start_as_current_span("request"):
            await (await sessions.open()).send("go")
    run, calls = seen.the("invoke_agent"), {span.name: span for span in seen.spans("execute_tool")}
    assert is_beneath(run, seen.the("request"))
    assert is_beneath(seen.the("in thread"), calls["execute_tool in_thread"])
    assert is_beneath(seen.the("in loop"), calls["execute_tool in_loop"])
    assert told(calls["execute_tool in_loop"])["mine"] is True
    asked = seen.spans("in driver")
    assert all(is_beneath(mine, chat) for mine, chat in zip(asked, seen.spans("chat"), strict=True))
    assert all(is_beneath(mine, run) for mine in seen.spans("in interceptor"))
    assert all(is_beneath(span, run) for span in (*calls.values(), *seen.spans("chat")))


async def test_work_that_a_tool_leaves_behind_is_beneath_its_call() -> None:
    """A task that outlives its tool is beneath the tool's span, even after that span was exported."""
    seen = Watching()
    left: list[asyncio.Task[None]] = []
    may_go_on = asyncio.Event()

    async def later() -> None:
        await may_go_on.wait()
        with seen.tracer.start_as_current_span("left behind"):
            pass

    @tool
    async def leave() -> str:
        """Leave work behind."""
        left.append(asyncio.create_task(later()))
        return "ok"

    driver = ScriptedDriver([ToolCall("leave"), "done"])
    async with perdure.connect("memory://", driver=driver, tools=[leave], telemetry=seen.telemetry) as sessions:
        await (await sessions.open()).send("go")
        call = seen.the("execute_tool")
        may_go_on.set()
        await left[0]
    assert is_beneath(seen.the("left behind"), call)
    assert len(seen.spans("execute_tool")) == 1


async def test_a_call_begins_and_ends_when_it_does() -> None:
    """A span has the times of its call, though the SDK may get it later."""
    seen = Watching()
    async with perdure.connect("memory://", driver=ScriptedDriver([Delay(0.05, "x")]), telemetry=seen.telemetry) as all:
        await (await all.open()).send("go")
        await asyncio.sleep(0.05)
    chat, run = seen.the("chat"), seen.the("invoke_agent")
    began, ended = chat.start_time or 0, chat.end_time or 0
    assert (run.start_time or 0) <= began
    assert ended <= (run.end_time or 0)
    assert (ended - began) / 1e9 >= 0.05


async def test_spans_are_told_of_soon() -> None:
    """The spans of a run that has ended are exported without a flush."""
    seen = Watching()
    async with perdure.connect("memory://", driver=ScriptedDriver(["x"]), telemetry=seen.telemetry) as sessions:
        await (await sessions.open()).send("go")
        await asyncio.sleep(0.15)
        assert len(seen._exporter.get_finished_spans()) == 2


async def test_a_run_that_fails_is_an_error() -> None:
    """The spans of a failed model call, and of its run, have the error's type, but not its message."""
    seen = Watching()
    driver = ScriptedDriver([DriverError(f"refused: {CANARY}")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        with pytest.raises(RunFailed):
            await (await sessions.open()).send("go")
    for span in seen.spans():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "DriverError"
        assert told(span)["error.type"] == "DriverError"
    assert [span.name for span in seen.spans()] == ["chat ScriptedDriver", "invoke_agent assistant"]
    assert told(seen.the("invoke_agent"))["perdure.run.status"] == "failed"
    assert CANARY not in seen.text()


async def test_a_tool_that_fails_is_an_error_of_its_own() -> None:
    """A tool that raises makes only its own span an error: the run continues."""
    seen = Watching()

    @tool
    def fail() -> str:
        """Fail."""
        raise LookupError(CANARY)

    driver = ScriptedDriver([ToolCall("fail"), "done"])
    async with perdure.connect("memory://", driver=driver, tools=[fail], telemetry=seen.telemetry) as sessions:
        await (await sessions.open()).send("go")
    failed = [span for span in seen.spans() if span.status.status_code is StatusCode.ERROR]
    assert [span.name for span in failed] == ["execute_tool fail"]
    assert told(failed[0])["error.type"] == "LookupError"
    assert CANARY not in seen.text()


async def test_a_run_that_waits_for_approval_continues_its_trace() -> None:
    """The parts before and after an approval are one trace, and each is linked to the one before."""
    seen = Watching()

    @tool(needs_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    driver = ScriptedDriver([ToolCall("pay"), "done"])
    async with perdure.connect("memory://", driver=driver, tools=[pay], telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        await chat.send("go")
        with seen.tracer.start_as_current_span("approval"):
            await chat.approve()
    first, second = seen.spans("invoke_agent")
    assert told(first)["perdure.run.status"] == "waiting"
    assert told(second)["perdure.run.status"] == "completed"
    assert told(first)["perdure.run.id"] == told(second)["perdure.run.id"]
    assert is_beneath(second, first)
    spans = {"continues": first.get_span_context().span_id, "called_by": seen.the("approval").context.span_id}
    assert links_of(second) == spans
    assert is_beneath(seen.the("execute_tool"), second)
    assert told(second)["gen_ai.usage.input_tokens"] == 10, "the first part's usage is not counted again"


async def test_a_run_that_is_cancelled_is_not_an_error() -> None:
    """A run that is cancelled has stopped, and so has its call."""
    seen = Watching()
    driver = ScriptedDriver([Delay(60, "x")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        run = await chat.start("go")
        await until(lambda: driver.requests)
        await run.cancel()
        await sessions.runtime.idle()
    assert {span.status.status_code for span in seen.spans()} == {StatusCode.UNSET}
    assert told(seen.the("chat"))["perdure.cancelled"] is True
    assert told(seen.the("invoke_agent"))["perdure.run.status"] == "stopped"
    assert told(seen.the("invoke_agent"))["perdure.run.stop_reason"] == "user_requested"


async def test_a_subagent_is_beneath_the_call_that_began_it() -> None:
    """The run of a sub-agent is in its caller's trace, beneath the span of the tool call, with its own session."""
    seen = Watching()

    def script(request: Any) -> Any:
        if request.system_prompt == "child":
            return "found"
        return ToolCall("helper", {"prompt": "help"}) if request.step == 0 else "done"

    helper = AgentDefinition("helper", system_prompt="child")
    async with perdure.connect(
        "memory://", driver=ScriptedDriver(script), subagents=[helper], telemetry=seen.telemetry
    ) as sessions:
        await (await sessions.open("a", AgentDefinition("boss"))).send("go")
    child, boss = seen.spans("invoke_agent")
    assert (child.name, boss.name) == ("invoke_agent helper", "invoke_agent boss")
    assert is_beneath(child, seen.the("execute_tool"))
    assert is_beneath(seen.the("execute_tool"), boss)
    assert told(child)["gen_ai.conversation.id"] != told(boss)["gen_ai.conversation.id"] == "a"
    assert told(boss)["gen_ai.usage.input_tokens"] == 20, "a sub-agent's tokens are on its own span"
    assert len({trace_of(span) for span in seen.spans()}) == 1


async def test_branches_are_beneath_one_span() -> None:
    """Runs that are compared are beneath one span, and so is the call of the model that judges them."""
    seen = Watching()

    def script(request: Any) -> Any:
        return "1" if request.model.name == "judge:j" else f"by {request.model.name}"

    async with perdure.connect("memory://", driver=ScriptedDriver(script), telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        configs = ["openai:one", "openai:two", "openai:three"]
        await sessions.execute(
            chat.id, SendParallel("go", sessions.loops, configs=configs, strategy=Judge(ModelConfig("judge:j")))
        )
    group = next(span for span in seen.spans("invoke_agent") if "perdure.branches" in told(span))
    branches = [span for span in seen.spans("invoke_agent") if span is not group]
    assert told(group)["perdure.branches"] == 3
    assert sorted(told(each)["gen_ai.request.model"] for each in branches) == ["one", "three", "two"]
    assert all(is_beneath(each, group) for each in branches)
    judged = next(span for span in seen.spans("chat") if span.name == "chat j")
    assert is_beneath(judged, group)
    for each in branches:
        (chat_span,) = [span for span in seen.spans("chat") if is_beneath(span, each)]
        assert told(chat_span)["gen_ai.provider.name"] == "openai"


async def test_a_stream_is_traced_like_any_run() -> None:
    """A run that is streamed has the same spans, beneath the span in which it was begun."""
    seen = Watching()
    driver = ScriptedDriver([Chunks(["a", "b", "c"])])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        with seen.tracer.start_as_current_span("request"):
            said = [chunk async for chunk in chat.stream("go")]
    assert said
    assert sorted(span.name for span in seen.spans()) == ["chat ScriptedDriver", "invoke_agent assistant", "request"]
    assert is_beneath(seen.the("invoke_agent"), seen.the("request"))
    assert told(seen.the("chat"))["gen_ai.usage.output_tokens"] == 5


@pytest.mark.parametrize("content", [False, True])
async def test_content_is_traced_only_if_it_is_asked_for(content: bool) -> None:
    """Without `content`, no span has a word of messages, arguments or results."""
    seen = Watching(content=content)
    driver = ScriptedDriver([ToolCall("look_up", {"query": CANARY}), f"{CANARY} answer"])
    agent = AgentDefinition("clerk", system_prompt=f"{CANARY} prompt", description=f"{CANARY} description")
    async with perdure.connect("memory://", driver=driver, tools=[look_up], telemetry=seen.telemetry) as sessions:
        chat = await sessions.open("a", agent)
        await chat.send(f"{CANARY} question", metadata={"note": CANARY}, context_data={"note": CANARY})
    if not content:
        assert CANARY not in seen.text()
        return
    first, last = seen.spans("chat")
    question = f'[{{"role":"user","parts":[{{"type":"text","content":"{CANARY} question"}}]}}]'
    assert told(first)["gen_ai.input.messages"] == question
    assert told(first)["gen_ai.system_instructions"] == f'[{{"type":"text","content":"{CANARY} prompt"}}]'
    assert '"name":"look_up"' in told(first)["gen_ai.tool.definitions"]
    answer = f'[{{"role":"assistant","parts":[{{"type":"text","content":"{CANARY} answer"}}],"finish_reason":"stop"}}]'
    assert told(last)["gen_ai.output.messages"] == answer
    assert f'"response":"{CANARY} result"' in told(last)["gen_ai.input.messages"]
    assert told(seen.the("execute_tool"))["gen_ai.tool.call.arguments"] == f'{{"query":"{CANARY}"}}'
    assert told(seen.the("execute_tool"))["gen_ai.tool.call.result"] == f"{CANARY} result"
    assert told(seen.the("invoke_agent"))["gen_ai.input.messages"] == question
    assert f"{CANARY} answer" in told(seen.the("invoke_agent"))["gen_ai.output.messages"]


async def test_a_run_that_did_not_get_its_session_has_no_span() -> None:
    """A message to a busy session is counted, and has no span of a run."""
    seen = Watching()
    driver = ScriptedDriver([Delay(0.2, "x")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        run = await chat.start("go")
        await until(lambda: driver.requests)
        with pytest.raises(SessionBusy):
            await chat.send("too early", when_busy="raise")
        await run.result()
    assert len(seen.spans("invoke_agent")) == 1


async def test_a_queued_message_begins_a_trace_of_its_own() -> None:
    """A message that waited for another's run is linked to its own sender, and is not in the other's trace."""
    seen = Watching()
    driver = ScriptedDriver([Delay(0.1, "x")])
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        with seen.tracer.start_as_current_span("first sender"):
            run = await chat.start("go")
        await until(lambda: driver.requests)
        with seen.tracer.start_as_current_span("second sender"):
            await chat.send("next", when_busy="queue")
        await run.result()
        await sessions.runtime.idle()
    first, second = seen.spans("invoke_agent")
    assert is_beneath(first, seen.the("first sender"))
    assert second.parent is None
    assert links_of(second) == {"sent_by": seen.the("second sender").get_span_context().span_id}
    assert trace_of(second) not in {trace_of(first), trace_of(seen.the("second sender"))}


async def test_the_model_that_summarises_is_traced() -> None:
    """The model call of a compaction is a span beneath the operation that compacts."""
    seen = Watching()
    driver = ScriptedDriver(lambda request: "notes" if "notes" in request.system_prompt else "said")
    async with perdure.connect("memory://", driver=driver, telemetry=seen.telemetry) as sessions:
        chat = await sessions.open()
        for number in range(6):
            await chat.send(f"{number} " + "word " * 300)
        before = len(seen.spans("chat"))
        with seen.tracer.start_as_current_span("request"):
            await chat.compact(keep_last=2)
    (made,) = seen.spans("chat")[before:]
    assert is_beneath(made, seen.the("request"))


def test_blocking_sessions_trace_beneath_the_caller() -> None:
    """A script that has no event loop has its runs beneath its own current span."""
    seen = Watching()
    with (
        perdure.connect_blocking("memory://", driver=ScriptedDriver(["x"]), telemetry=seen.telemetry) as sessions,
        seen.tracer.start_as_current_span("script"),
    ):
        sessions.open().send("go")
    assert is_beneath(seen.the("invoke_agent"), seen.the("script"))


async def test_a_shared_store_is_traced_like_any_other() -> None:
    """Sessions in a store that all of the process shares are traced."""
    seen = Watching()
    store = perdure.shared("memory://")
    async with perdure.connect(store, driver=ScriptedDriver(["x"]), telemetry=seen.telemetry) as sessions:
        await (await sessions.open()).send("go")
    assert len(seen.spans()) == 2


async def _starts(sessions: Any, session_id: str) -> list[Any]:
    return [event async for event in sessions.events(session_id) if isinstance(event, perdure.AgentStart)]


async def test_what_a_connection_redacts_is_in_no_span() -> None:
    """The model's answer, a call's arguments and the tool's result pass through the redaction, as in the store."""
    secret = "sk-" + "a1B2" * 12

    @perdure.tool
    def look_up(name: str) -> str:
        """Look something up."""
        return f"{name} has the key {secret}"

    seen = Watching(content=True)
    driver = ScriptedDriver([ToolCall("look_up", {"name": secret}, id="c1"), f"It is {secret}."])
    options = {"tools": [look_up], "telemetry": seen.telemetry, "redact": DEFAULT}
    async with perdure.connect("memory://", driver=driver, **options) as sessions:
        await (await sessions.open("order-7")).send(f"My key is {secret}")
    assert "look_up" in seen.text()
    assert secret not in seen.text()


async def test_a_closed_connection_leaves_no_redactors_behind() -> None:
    """A program may open a connection for each request. Its spans must not pass through all earlier redactors."""
    seen = Watching(content=True)
    redactors = []
    for _ in range(3):
        options: Any = {"telemetry": seen.telemetry, "redact": [lambda text: text]}
        async with perdure.connect("memory://", model="offline", **options) as app:
            await (await app.open("order-7")).send("Hello")
        assert app.loops.redaction is not None
        redactors.append(ref(app.loops.redaction))
        del app
    deadline = time.monotonic() + 5
    while any(each() for each in redactors) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)  # timers of the loop have the last run's context for a moment
        gc.collect()  # connections have cycles
    assert not any(each() for each in redactors)
