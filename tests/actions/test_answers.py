"""Tools that are called outside: their calls wait for answers, and anybody may hand one in, once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import (
    AgentDefinition,
    AgentSession,
    AgentState,
    AgentStop,
    Blocked,
    ConfigurationError,
    ExecutionStatus,
    ExternalTool,
    IllegalStatusChange,
    Interceptor,
    InvalidData,
    Message,
    PassThroughSessionController,
    RunFailed,
    SessionBusy,
    SessionNotActive,
    SessionStage,
    SessionStatus,
    StopReason,
    StoreError,
    ToolCall,
    ToolExecution,
    Worker,
    connect,
    external_tool,
    tool,
)
from perdure.testing import Delay, FailingStore, ScriptedDriver

WEATHER = external_tool(
    "weather",
    "Look at the weather.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
CALL = ToolCall("weather", {"city": "Oslo"}, id="c1")


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Model:
    """Asks for calls, then repeats their results. It keeps the requests it was sent."""

    def __init__(self, *calls: ToolCall) -> None:
        self.calls = list(calls)
        self.requests: list[Any] = []
        self.driver = ScriptedDriver(self.reply)

    def reply(self, request: Any) -> Any:
        self.requests.append(request)
        if request.step == 0 and self.calls:
            return self.calls
        return " ".join(message.text for message in request.messages if message.role == "tool") or "Hello."


HELPER = AgentDefinition("helper", system_prompt="helper")


class Team(Model):
    """A model that asks a sub-agent, which asks for the weather."""

    def reply(self, request: Any) -> Any:
        self.requests.append(request)
        if request.system_prompt == "helper":
            return CALL if request.step == 0 else f"helper: {request.messages[-1].text}"
        return ToolCall("helper", {"prompt": "Help."}, id="h1") if request.step == 0 else request.messages[-1].text


async def test_a_run_continues_with_the_answer() -> None:
    """The session is suspended until then, and shows that the call is made outside."""
    model = Model(CALL)
    async with connect("memory://", driver=model.driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        reply = await chat.send("How is the weather?")
        assert [(call.id, call.name, call.external) for call in reply.pending_calls] == [("c1", "weather", True)]
        assert (await chat.session()).status is SessionStatus.SUSPENDED
        with pytest.raises(SessionNotActive):
            await chat.send("And now?")
        reply = await chat.answer({"c1": {"degrees": 7}})
        assert '"degrees"' in reply.text
        assert reply.pending_calls == ()
        assert (await chat.session()).status is SessionStatus.ACTIVE
        assert [spec.name for spec in model.requests[0].tools] == ["weather"]


async def test_tools_and_instructions_of_one_message() -> None:
    """The next run has neither. The agent keeps its own tools and prompt."""
    model = Model(CALL)
    agent = AgentDefinition("clerk", system_prompt="Be brief.")
    async with connect("memory://", driver=model.driver, tools=[add]) as sessions:
        chat = await sessions.open("a", agent)
        await chat.send("Hello", external_tools=[WEATHER], instructions="Speak French.")
        assert (await chat.answer({"c1": "rain"})).text == "rain"
        model.calls.clear()
        await chat.send("And now?")
    first, second, third = model.requests
    for request in (first, second):
        assert request.system_prompt == "Be brief.\n\nSpeak French."
        assert [spec.name for spec in request.tools] == ["add", "weather"]
    assert third.system_prompt == "Be brief."
    assert [spec.name for spec in third.tools] == ["add"]


async def test_another_process_answers(tmp_path: Path) -> None:
    """It need not know the tools: they are on record with the run."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    async with connect(url, driver=Model(CALL).driver) as sessions:
        await (await sessions.open("a")).send("Hello", external_tools=[WEATHER], instructions="Speak French.")
    model = Model()
    async with connect(url, driver=model.driver) as sessions:
        assert (await sessions.answer("a", {"c1": "rain"})).text == "rain"
    assert model.requests[0].system_prompt.endswith("Speak French.")


async def test_calls_are_settled_one_by_one() -> None:
    """Some are answered, some decided, some made here. The model is asked once all are settled."""
    calls = [CALL, ToolCall("weather", {"city": "Rome"}, id="c2"), ToolCall("pay", {"amount": 3}, id="c3")]
    model = Model(*calls, ToolCall("add", {"a": 1, "b": 2}, id="c4"))
    async with connect("memory://", driver=model.driver, tools=[WEATHER, pay, add]) as sessions:
        chat = await sessions.open("a")
        assert [call.id for call in (await chat.send("Go")).pending_calls] == ["c1", "c2", "c3"]
        assert [call.id for call in (await chat.answer({"c2": "sun"})).pending_calls] == ["c1", "c3"]
        assert [call.id for call in (await chat.approve()).pending_calls] == ["c1"]
        with pytest.raises(InvalidData, match="called outside"):
            await chat.approve()
        assert len(model.requests) == 1
        assert (await chat.answer({"c1": "rain"})).text == "rain sun paid 3 3"
        assert (await chat.session()).state.steps[0].tool_calls == tuple(model.calls)


async def test_a_call_that_failed_outside_and_one_that_is_denied() -> None:
    """The model is shown both as errors."""
    model = Model(CALL, ToolCall("weather", {"city": "Rome"}, id="c2"))
    async with connect("memory://", driver=model.driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        assert (await chat.answer(errors={"c1": "no network"})).pending_calls[0].id == "c2"
        reply = await chat.deny("not Rome")
        assert "no network" in reply.text
        assert "not Rome" in reply.text
        results = [part for message in model.requests[-1].messages for part in message.tool_results]
        assert [part.is_error for part in results] == [True, True]


@pytest.mark.parametrize(
    ("answers", "errors", "problem"),
    [
        ({}, {}, "one call at least"),
        ({"c9": 1}, {}, "'c9' does not wait for an answer in 'a'; these do: c1 \\(weather\\)"),
        ({"c1": 1, "c3": 1}, {}, "'c3' does not wait for an answer"),
        ({"c1": 1}, {"c1": "no"}, "a result or an error"),
        ({"c1": float("nan")}, {}, "answers.c1"),
        ({}, {"c1": " "}, "errors.c1"),
        ({1: 1}, {}, "expected a str"),
        ("c1", {}, "expected a Mapping"),
    ],
)
async def test_what_cannot_be_an_answer_changes_nothing(answers: Any, errors: Any, problem: str) -> None:
    """An answer is refused to a call that needs approval, for an unknown call, and if it is not JSON."""
    model = Model(CALL, ToolCall("pay", {"amount": 3}, id="c3"))
    async with connect("memory://", driver=model.driver, tools=[WEATHER, pay]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        before = await chat.session()
        with pytest.raises(InvalidData, match=problem):
            await chat.answer(answers, errors=errors)
        assert await chat.session() == before
        with pytest.raises(InvalidData, match="called outside"):
            await chat.approve(["c1"])
        assert await chat.session() == before


@pytest.mark.parametrize(
    ("calls", "pending", "outside"),
    [([CALL], (), ("weather",)), ([CALL, ToolCall("pay", {"amount": 3}, id="c3")], ("pay",), ("weather",))],
)
async def test_a_session_says_what_its_calls_wait_for(calls: list[ToolCall], pending: Any, outside: Any) -> None:
    """A call that is made outside cannot be approved, so the error does not say to approve it."""
    async with connect("memory://", driver=Model(*calls).driver, tools=[WEATHER, pay]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        with pytest.raises(SessionNotActive) as sent:
            await chat.send("And now?")
        with pytest.raises(IllegalStatusChange) as resumed:
            await chat.resume()
    for refused in (sent.value, resumed.value):
        assert (refused.pending, refused.outside) == (pending, outside)
        assert ("approv" in str(refused)) is bool(pending)
    assert "answer({call_id: result})" in str(sent.value)
    assert "AnswerToolCalls" in str(resumed.value)


async def test_an_answer_comes_once() -> None:
    """The second answer is refused: no call waits any more."""
    async with connect("memory://", driver=Model(CALL).driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        outcomes = await asyncio.gather(chat.answer({"c1": "rain"}), chat.answer({"c1": "sun"}), return_exceptions=True)
        (refused,) = (each for each in outcomes if isinstance(each, Exception))
        assert isinstance(refused, InvalidData | SessionBusy)
        with pytest.raises(InvalidData):
            await chat.answer({"c1": "snow"})


@pytest.mark.parametrize("by", ["id", "digest"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_sub_agents_call_is_answered_through_its_caller(by: str, fails: bool) -> None:
    """The caller's run continues with the sub-agent's answer."""
    async with connect("memory://", driver=Team().driver, tools=[WEATHER], subagents=[HELPER]) as sessions:
        chat = await sessions.open("a")
        (call,) = (await chat.send("Go")).pending_calls
        (leaf,) = call.leaves
        assert (leaf.name, leaf.external, call.external) == ("weather", True, False)
        with pytest.raises(InvalidData, match="'h1' does not wait for an answer"):
            await chat.answer({"h1": "x"})
        assert [each.id for each in (await chat.approve()).pending_calls] == ["h1"]  # it decides nothing
        given = {getattr(leaf, by): "rain"}
        reply_to = await (chat.answer(errors=given) if fails else chat.answer(given))
        assert "rain" in reply_to.text
        assert reply_to.pending_calls == ()


async def test_tools_that_cannot_be() -> None:
    """A name the agent has, a name twice, another kind of tool, and tools of a steering message are refused."""
    async with connect("memory://", driver=Model().driver, tools=[add]) as sessions:
        chat = await sessions.open("a")
        version = (await chat.session()).version
        for tools, problem in (
            ([external_tool("add")], "the agent has a tool named 'add'"),
            ([WEATHER, WEATHER], "two tools are named 'weather'"),
            ([add], "expected a tool of external_tool"),
            ([external_tool(f"t{n}") for n in range(129)], "128 tools"),
        ):
            with pytest.raises(InvalidData, match=problem):
                await chat.send("Go", external_tools=tools)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidData, match="steers"):
            await chat.send("Go", instructions="Be quick.", when_busy="steer")
        assert (await chat.session()).version == version
    with pytest.raises(ConfigurationError, match="cannot be the name"):
        external_tool("two words")
    with pytest.raises(ConfigurationError, match="called outside"):
        await ExternalTool(WEATHER.spec).call({}, None)  # type: ignore[arg-type]


async def test_arguments_that_do_not_fit_go_back_to_the_model() -> None:
    """No one outside is asked to make such a call."""
    model = Model(ToolCall("weather", {"city": 7}, id="c1"))
    async with connect("memory://", driver=model.driver, tools=[WEATHER]) as sessions:
        reply = await (await sessions.open("a")).send("Go")
        assert reply.pending_calls == ()
        assert "do not fit weather" in reply.text


async def test_an_answer_streams_what_follows() -> None:
    async with connect("memory://", driver=Model(CALL).driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        chunks = [chunk async for chunk in chat.stream_answer({"c1": "rain"})]
        assert "".join(chunks) == "rain"
        assert chunks[-1].reply is not None


async def test_a_message_for_workers_brings_its_tools(tmp_path: Path) -> None:
    """They wait with it in the inbox. A retry has them, too."""
    model = Model(CALL)
    async with connect(f"sqlite:///{tmp_path / 's.db'}", driver=model.driver) as sessions:
        chat = await sessions.open("a")
        queued = await chat.enqueue("Go", key="k", external_tools=[WEATHER], instructions="Speak French.")
        with pytest.raises(InvalidData, match="another message"):
            await chat.enqueue("Go", key="k")
        async with Worker(sessions) as worker:
            running = asyncio.create_task(worker.run())
            reply = await queued.reply(timeout=20)
            worker.stop()
            await running
        assert reply is not None
        assert reply.pending_calls[0].external
        assert (await chat.answer({"c1": "rain"})).text == "rain"
        (again,) = (await chat.retry()).pending_calls
        assert model.requests[-1].system_prompt == "Speak French."
        assert (await chat.answer({again.id: "sun"})).text == "sun"


@pytest.mark.sample(2)
@pytest.mark.parametrize("whose", ["its own", "a sub-agent's"])
async def test_an_answer_that_has_begun_is_never_asked_for_again(tmp_path: Path, whose: str) -> None:
    """The answer is in the commit with which the run continues, wherever the process dies after that."""
    for call in range(1, 90):
        url, model = f"sqlite:///{tmp_path / f'{call}.db'}", Team() if whose == "a sub-agent's" else Model(CALL)
        store: Any = FailingStore(connect(url).store)
        async with connect(store, driver=model.driver, tools=[WEATHER], subagents=[HELPER], grace=0.0) as sessions:
            chat = await sessions.open("a", AgentDefinition("boss"))
            await chat.send("Go")
            store.crash(call=call, after=True)
            with suppress(StoreError):
                await chat.answer({"c1": "rain"})
            has_crashed = store.has_crashed
            store.heal()
            entries = await store.read("a")
            has_begun = any(entry.body.get("answered") for entry in entries)
            is_told = any(entry.kind == "tool_execution_end" or entry.body.get("answers") for entry in entries)
            assert has_begun is is_told, "they are one commit"
        model = Team() if whose == "a sub-agent's" else Model()
        async with connect(url, driver=model.driver, tools=[WEATHER], subagents=[HELPER]) as sessions:
            await sessions.recover()
            session = await sessions.session("a")
            waits = bool(session.state.execution and session.state.execution.pending_calls)
            assert waits is not has_begun
            if waits:
                assert "rain" in (await sessions.answer("a", {"c1": "rain"})).text
            else:
                assert session.state.final_response is not None
                assert "rain" in session.state.final_response.text
        if not has_crashed:
            break
    assert 3 < call < 89


async def test_what_waits_for_an_answer_is_stored_so(tmp_path: Path) -> None:
    """The state, the record and the exported file keep the call, its tools and the instructions."""
    url = f"file://{tmp_path / 's'}"
    async with connect(url, driver=Model(CALL).driver) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go", external_tools=[WEATHER], instructions="Speak French.")
        await chat.export(tmp_path / "a.jsonl")
    async with connect("memory://", driver=Model().driver) as elsewhere:
        await elsewhere.import_(tmp_path / "a.jsonl")
        execution = (await elsewhere.session("a")).state.execution
        assert execution is not None
        assert execution.external_tools == (WEATHER.spec,)
        assert execution.instructions == "Speak French."
        assert execution.pending_calls[0].external
        loop = (await elsewhere.record("a")).loops[0]
        whole = await elsewhere.loop("a", loop.loop_id)
        assert whole.events[0].external_tools == (WEATHER.spec,)  # type: ignore[union-attr]
        assert (await elsewhere.answer("a", {"c1": Message.user("rain").text})).text == "rain"


async def test_a_cancellation_ends_the_run_and_keeps_the_answer() -> None:
    """A waiting run is not under way, so there is nothing to cancel. A run that continues is stopped."""
    asked = asyncio.Event()

    def reply(request: Any) -> Any:
        if request.step == 0:
            return CALL
        asked.set()
        return Delay(60, "Never.")

    async with connect("memory://", driver=ScriptedDriver(reply), tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        assert not await chat.cancel()
        answering = asyncio.create_task(chat.answer({"c1": "rain"}))
        await asked.wait()
        assert await chat.cancel()
        assert (await answering).stop_reason is StopReason.USER_REQUESTED
        session = await chat.session()
        assert (session.status, session.state.messages[-1].text) == (SessionStatus.ACTIVE, "rain")
        with pytest.raises(InvalidData, match="no tool call"):
            await chat.answer({"c1": "sun"})


async def test_what_gives_the_run_up_refuses_a_late_answer() -> None:
    """An undo ends the run that waits. A later answer is refused, and changes nothing."""
    async with connect("memory://", driver=Model(CALL).driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        await chat.undo()
        before = await chat.session()
        with pytest.raises(InvalidData, match="no tool call"):
            await chat.answer({"c1": "rain"})
        assert await chat.session() == before
        assert (before.status, len(before.state.messages)) == (SessionStatus.ACTIVE, 0)


@pytest.mark.parametrize("strategy", ["truncate", "observation_mask", "llm"])
async def test_a_call_that_waits_survives_a_compaction(strategy: str) -> None:
    """It stays in view, its answer comes behind it, and the model is shown both."""
    model = Model()
    async with connect("memory://", driver=model.driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        for text in ("One", "Two", "Three"):
            await chat.send(text)
        model.calls.append(CALL)
        await chat.send("Go")
        model.calls.clear()
        await chat.compact(compact_strategy=strategy, keep_last=0)
        session = await chat.session()
        assert session.status is SessionStatus.SUSPENDED
        assert session.state.execution is not None
        (call,) = session.state.execution.pending_calls
        assert (await chat.answer({call.id: "rain"})).text == "rain"
        shown = model.requests[-1].messages
        assert [part.id for message in shown for part in message.tool_calls] == [call.id]
        assert [part.call_id for message in shown for part in message.tool_results] == [call.id]


async def test_a_fork_does_not_wait_for_the_answer() -> None:
    """The fork takes messages at once. The answer goes only to the session that asked."""
    model = Model(CALL)
    async with connect("memory://", driver=model.driver, tools=[WEATHER]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go", external_tools=[external_tool("radar")], instructions="Be brief.")
        fork = await chat.fork("b")
        with pytest.raises(InvalidData, match="no tool call"):
            await fork.answer({"c1": "rain"})
        model.calls.clear()
        assert (await fork.send("And now?")).text != ""
        assert model.requests[-1].system_prompt == ""
        assert [spec.name for spec in model.requests[-1].tools] == ["weather"]
        assert (await chat.answer({"c1": "rain"})).text == "rain"
        assert "rain" not in [message.text for message in await fork.history()]


class Meddling(Interceptor):
    """Changes calls and results with the given functions."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        self.before, self.after = before, after

    def before_tool_use(self, call: ToolCall, state: AgentState) -> Any:
        return call if self.before is None else self.before(call)

    def after_tool_use(self, execution: ToolExecution, state: AgentState) -> Any:
        return execution if self.after is None else self.after(execution)


def raising(error: Exception) -> Any:
    def fail(_: object) -> None:
        raise error

    return fail


async def test_interceptors_see_calls_that_are_made_outside() -> None:
    """They can change a call and its answer, and can block the call."""
    hook = Meddling(lambda call: replace(call, arguments={"city": "Bergen"}), lambda done: replace(done, result="…"))
    async with connect("memory://", driver=Model(CALL).driver, tools=[WEATHER], interceptors=[hook]) as sessions:
        chat = await sessions.open("a")
        (call,) = (await chat.send("Go")).pending_calls
        assert call.arguments == {"city": "Bergen"}
        assert (await chat.answer({"c1": "rain"})).text == "…"
    hook = Meddling(lambda call: Blocked("not today"))
    async with connect("memory://", driver=Model(CALL).driver, tools=[WEATHER], interceptors=[hook]) as sessions:
        reply = await (await sessions.open("a")).send("Go")
        assert (reply.pending_calls, "not today" in reply.text) == ((), True)


@pytest.mark.parametrize("wait", [True, False])
async def test_an_interceptor_that_raises_on_an_answer_fails_the_run(wait: bool) -> None:
    """It fails as on the result of any tool. The session takes the next message, and waits for nothing."""
    hook = Meddling(after=raising(ValueError("no such city")))
    model = Model(CALL)
    async with connect("memory://", driver=model.driver, tools=[WEATHER], interceptors=[hook]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        if wait:
            with pytest.raises(RunFailed, match="no such city"):
                await chat.answer({"c1": "rain"})
        else:
            await chat.answer({"c1": "rain"}, wait=False)
            await chat.recover()
        session = await chat.session()
        assert (session.status, session.state.status) == (SessionStatus.ACTIVE, ExecutionStatus.FAILED)
        hook.after = None
        model.calls.clear()
        assert (await chat.send("And now?")).pending_calls == ()


@pytest.mark.parametrize("wait", [True, False])
async def test_an_interceptor_that_stops_the_run_at_an_answer(wait: bool) -> None:
    """The answer is kept, and the model is not asked again."""
    hook, model = Meddling(after=raising(AgentStop("enough"))), Model(CALL)
    async with connect("memory://", driver=model.driver, tools=[WEATHER], interceptors=[hook]) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        await chat.answer({"c1": "rain"}, wait=wait)
        await chat.recover()
        session = await chat.session()
        assert (session.state.stop_reason, len(model.requests)) == (StopReason.STOP_REQUESTED, 1)
        assert session.state.messages[-1].text == "rain"


@pytest.mark.parametrize("stage", [SessionStage.AFTER_ACTION, SessionStage.BEFORE_SAVE])
@pytest.mark.parametrize("wait", [True, False])
async def test_a_hook_that_raises_leaves_the_answer_for_recovery(stage: SessionStage, wait: bool) -> None:
    """The answer is on record, so it need not be given again. A decision that is left to a worker saves nothing."""

    class Failing(PassThroughSessionController):
        is_armed = False

        def on_stage(self, at: SessionStage, session: AgentSession) -> AgentSession:
            if self.is_armed and at is stage:
                raise RuntimeError("the hook has failed")
            return session

    hook, model = Failing(), Model(CALL)
    async with connect("memory://", driver=model.driver, tools=[WEATHER], controller=hook) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go")
        hook.is_armed = True
        if wait:
            with pytest.raises(RuntimeError):
                await chat.answer({"c1": "rain"})
        else:
            assert (await chat.answer({"c1": "rain"}, wait=False)).queued
        hook.is_armed = False
        assert await chat.recover()
        session = await chat.session()
        assert session.state.final_response is not None
        assert session.state.final_response.text == "rain"
        assert len(model.requests) == 2
