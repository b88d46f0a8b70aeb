"""Tools that are called outside: their calls wait for answers, which anybody may hand in, once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from perdure import (
    AgentDefinition,
    ConfigurationError,
    ExternalTool,
    InvalidData,
    Message,
    SessionBusy,
    SessionNotActive,
    SessionStatus,
    StoreError,
    ToolCall,
    Worker,
    connect,
    external_tool,
    tool,
)
from perdure.testing import FailingStore, ScriptedDriver

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
    """Asks for calls, then says what their results are. It keeps what it was sent."""

    def __init__(self, *calls: ToolCall) -> None:
        self.calls = list(calls)
        self.requests: list[Any] = []
        self.driver = ScriptedDriver(self.reply)

    def reply(self, request: Any) -> Any:
        self.requests.append(request)
        if request.step == 0 and self.calls:
            return self.calls
        return " ".join(message.text for message in request.messages if message.role == "tool") or "Hello."


async def test_a_run_continues_with_the_answer() -> None:
    """The session is suspended meanwhile, and shows that the call is made outside."""
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
    """The next run has neither. What the agent has itself stays."""
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
    """Some are answered, some decided on, some made here. The model is asked once all are settled."""
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
    """The model is told of both."""
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
    """A call that needs approval, one that is unknown, and values that are not JSON."""
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


async def test_an_answer_comes_once() -> None:
    """The second one is told that nothing waits any more."""
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
    """The caller's run continues with what the sub-agent has made of it."""

    def reply(request: Any) -> Any:
        if request.system_prompt == "helper":
            return CALL if request.step == 0 else f"helper: {request.messages[-1].text}"
        return ToolCall("helper", {"prompt": "Help."}, id="h1") if request.step == 0 else request.messages[-1].text

    helper = AgentDefinition("helper", system_prompt="helper")
    async with connect("memory://", driver=ScriptedDriver(reply), tools=[WEATHER], subagents=[helper]) as sessions:
        chat = await sessions.open("a")
        (call,) = (await chat.send("Go")).pending_calls
        (leaf,) = call.leaves
        assert (leaf.name, leaf.external, call.external) == ("weather", True, False)
        with pytest.raises(InvalidData, match="'h1' does not wait for an answer"):
            await chat.answer({"h1": "x"})
        assert [each.id for each in (await chat.approve()).pending_calls] == ["h1"]  # which decides nothing
        given = {getattr(leaf, by): "rain"}
        reply_to = await (chat.answer(errors=given) if fails else chat.answer(given))
        assert "rain" in reply_to.text
        assert reply_to.pending_calls == ()


async def test_tools_that_cannot_be() -> None:
    """A name that the agent has already, a name twice, something that is not such a tool, and one that steers."""
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
    """Nobody outside is asked to make such a call."""
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


async def test_an_answer_that_has_begun_is_never_asked_for_again(tmp_path: Path) -> None:
    """It is in the commit that the run continues with, wherever the process dies after that."""
    for call in range(1, 60):
        store: Any = FailingStore(connect(f"sqlite:///{tmp_path / f'{call}.db'}").store)
        async with connect(store, driver=Model(CALL).driver, grace=0.0) as sessions:
            chat = await sessions.open("a")
            await chat.send("Go", external_tools=[WEATHER])
            store.crash(call=call, after=True)
            with suppress(StoreError):
                await chat.answer({"c1": "rain"})
            has_crashed = store.has_crashed
            store.heal()
            entries = await store.read("a")
            has_begun = any(entry.body.get("answered") for entry in entries)
            assert has_begun is any(entry.kind == "tool_execution_end" for entry in entries), "they are one commit"
        model = Model()
        async with connect(f"sqlite:///{tmp_path / f'{call}.db'}", driver=model.driver) as sessions:
            await sessions.recover()
            session = await sessions.session("a")
            waits = bool(session.state.execution and session.state.execution.pending_calls)
            assert waits is not has_begun
            if waits:
                assert (await sessions.answer("a", {"c1": "rain"})).text == "rain"
            else:
                assert session.state.final_response is not None
        if not has_crashed:
            break
    assert 3 < call < 59


async def test_what_waits_for_an_answer_is_stored_so(tmp_path: Path) -> None:
    """In the state, on record, and in what is exported."""
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
