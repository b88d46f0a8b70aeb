"""A session keeps its model: over processes, crashes, approvals, forks and sub-agents. Asserted on the wire."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.loop.drivers import wire
from tests.loop.drivers.asking import KEY, KEY_ENV
from tests.loop.drivers.loopback import Loopback, Stream

from perdure import (
    AgentDefinition,
    ChangeModel,
    ClearSession,
    ConfigurationError,
    EventBus,
    LoopFactory,
    ModelConfig,
    SendMessage,
    SendParallel,
    SessionActionExecuted,
    SessionRuntime,
    ToolCall,
    ToolContext,
    Workflow,
    connect,
    tool,
)
from perdure.errors import RunFailed
from perdure.sessions.sessions import Sessions
from perdure.testing import ScriptedDriver
from perdure.workflow import Stage

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

HELLO = Stream(
    wire.chat({"role": "assistant", "content": "Hello."}, usage={"prompt_tokens": 1, "completion_tokens": 1})
)


def calling(name: str, arguments: str) -> Stream:
    return Stream(wire.chat(*wire.chat_calls(("call_1", name, [arguments])), finish="tool_calls"))


ADDING = calling("add", '{"a": 2, "b": 3}')


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


class Provider:
    """A server that speaks OpenAI's chat completions and keeps its requests."""

    def __init__(self, server: Loopback) -> None:
        self._server = server
        self.url = server.url

    def model(self, name: str, key: str = KEY_ENV, **settings: Any) -> ModelConfig:
        return ModelConfig(f"openai:{name}", base_url=f"{self.url}/v1", api_key_env=key, **settings)

    @property
    def asked(self) -> list[str]:
        """Return the models that were asked, in order."""
        return [request.body["model"] for request in self._server.requests]


@asynccontextmanager
async def providing(monkeypatch: pytest.MonkeyPatch, *replies: Stream) -> AsyncIterator[Provider]:
    """Run a provider with these replies; by default it says hello each time."""
    monkeypatch.setenv(KEY_ENV, KEY)
    async with Loopback(*(replies or [HELLO] * 8)) as server:
        yield Provider(server)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/sessions.db"


async def test_a_later_connection_need_not_name_the_model(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The model that connect() named at creation is stored with the session, settings and key variable included."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5", max_tokens=100)) as sessions:
            await (await sessions.open("s")).send("hi")
        async with connect(url) as sessions:
            assert (await sessions.send("s", "again")).text == "Hello."
            session = await sessions.session("s")
        assert provider.asked == ["gpt-5", "gpt-5"]
        assert session.state.default_model == provider.model("gpt-5", max_tokens=100)
        assert session.state.model is None


async def test_naming_another_model_is_a_change_on_record(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The change is a ChangeModel with a version of its own, once; later connections need not name it either."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await (await sessions.open("s")).send("hi")
            before = (await sessions.info("s")).version
        changes: list[str] = []
        bus = EventBus()
        bus.subscribe(SessionActionExecuted, lambda event: changes.append(event.action))
        async with connect(url, model=provider.model("gpt-6"), events=bus) as sessions:
            await sessions.send("s", "and now?")
            await sessions.send("s", "still?")
            assert (await sessions.info("s")).version == before + 3
            record = await sessions.record("s")
        async with connect(url) as sessions:
            await sessions.send("s", "and after?")
        assert changes == ["ChangeModel", "SendMessage", "SendMessage"]
        assert provider.asked == ["gpt-5", "gpt-6", "gpt-6", "gpt-6"]
        assert [loop.config.model for loop in record.loops] == ["gpt-5", "gpt-6", "gpt-6"]


async def test_a_stream_changes_the_model_too(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A stream changes it before the first word, as a send does."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("s")
        async with connect(url, model=provider.model("gpt-6")) as sessions:
            assert "".join([chunk async for chunk in sessions.stream("s", "hi")]) == "Hello."
        assert provider.asked == ["gpt-6"]


async def test_the_same_model_named_again_changes_nothing(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """An app that names its model at every start makes no versions that way."""
    async with providing(monkeypatch) as provider:
        for _ in range(2):
            async with connect(url, model=provider.model("gpt-5")) as sessions:
                await (await sessions.open("s")).send("hi")
                version = (await sessions.info("s")).version
        assert version == 3


async def test_a_change_of_one_session_outlasts_the_default(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """ChangeModel wins over the default, in this connection and in a later one that names a default again."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("s")
            await sessions.execute("s", ChangeModel(provider.model("gpt-mini")))
            await sessions.send("s", "hi")
        for default in ("gpt-5", "gpt-6"):
            async with connect(url, model=provider.model(default)) as sessions:
                await sessions.send("s", "hi")
        assert provider.asked == ["gpt-mini"] * 3


async def test_an_agents_own_model_comes_before_the_default(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A model in the definition wins over connect's, at creation and later."""
    async with providing(monkeypatch) as provider:
        agent = AgentDefinition("agent", model=provider.model("gpt-own"))
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await (await sessions.open("s", agent)).send("hi")
        async with connect(url, model=provider.model("gpt-6")) as sessions:
            await sessions.send("s", "hi")
            assert (await sessions.info("s")).version == 3
        assert provider.asked == ["gpt-own", "gpt-own"]


async def test_an_explicit_driver_overrides_all(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The driver's request still names the session's model."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("s")
        driver = ScriptedDriver(["Scripted."])
        async with connect(url, driver=driver) as sessions:
            assert (await sessions.send("s", "hi")).text == "Scripted."
        assert provider.asked == []
        assert driver.requests[0].model == provider.model("gpt-5")


async def test_a_session_that_keeps_no_model_takes_the_named_one(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A session that was stored without a model keeps the one that connect() names from then on."""
    async with providing(monkeypatch) as provider:
        async with connect(url) as sessions:
            await sessions.open("s")
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.send("s", "hi")
        async with connect(url) as sessions:
            await sessions.send("s", "hi")
        assert provider.asked == ["gpt-5", "gpt-5"]


async def streamed(sessions: Sessions) -> None:
    _ = [chunk async for chunk in sessions.stream("s", "hi")]


async def compared(sessions: Sessions) -> None:
    configs = [AgentDefinition("a"), AgentDefinition("b")]
    await sessions.execute("s", SendParallel("hi", sessions.loops, configs=configs))


ASKING: dict[str, Callable[[Sessions], Awaitable[Any]]] = {
    "send": lambda sessions: sessions.send("s", "hi"),
    "stream": streamed,
    "run": lambda sessions: sessions.run("hi"),
    "compact": lambda sessions: sessions.compact("s", compact_strategy="llm", keep_last=1),
    "parallel": compared,
}


@pytest.mark.parametrize("verb", ASKING)
async def test_without_any_model_nothing_is_asked_and_nothing_written(url: str, verb: str) -> None:
    """A ConfigurationError says what to set, and the session is unchanged."""
    async with connect(url) as sessions:
        await sessions.open("s")
        with pytest.raises(ConfigurationError, match=r"connect\(url, model='openai:gpt-5'\)"):
            await ASKING[verb](sessions)
        assert (await sessions.info("s")).version == 1
        assert [event async for event in sessions.events("s")] == []
        await sessions.execute("s", ChangeModel("offline"))
        assert (await sessions.send("s", "hi")).text


async def test_offline_answers_where_it_was_named(url: str) -> None:
    """Later connections use it too, like any other model."""
    async with connect(url, model="offline") as sessions:
        await (await sessions.open("s")).send("hi")
        assert (await sessions.run("hi")).text
    async with connect(url) as sessions:
        assert (await sessions.send("s", "hi")).text


async def test_a_fork_and_a_cleared_session_keep_the_model(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Clearing takes back the model that ChangeModel set, and nothing else."""
    async with providing(monkeypatch) as provider:
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("s")
            await sessions.fork("s", "t")
            await sessions.execute("s", ChangeModel(provider.model("gpt-mini")))
            await sessions.execute("s", ClearSession())
        async with connect(url) as sessions:
            await sessions.send("s", "hi")
            await sessions.send("t", "hi")
        assert provider.asked == ["gpt-5", "gpt-5"]


async def test_a_workflow_keeps_the_model_of_its_stages(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A stage that is left for a later process asks the model that its session was created with."""
    async with providing(monkeypatch) as provider:
        workflow = Workflow("w", [Stage("one"), Stage("two", fork_from="one")])
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("w.one")
        async with connect(url) as sessions:
            await workflow.run(sessions, "hi")
        assert provider.asked == ["gpt-5", "gpt-5"]


async def test_a_sub_agent_asks_what_its_caller_was_given(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """In a later process without a model, sub-agents ask the session's model, unless they have their own."""
    calls = [calling("clerk", '{"prompt": "Do it."}'), HELLO, calling("expert", '{"prompt": "Do it."}'), HELLO, HELLO]
    async with providing(monkeypatch, *calls) as provider:
        agents = [AgentDefinition("clerk"), AgentDefinition("expert", model=provider.model("gpt-expert"))]
        async with connect(url, model=provider.model("gpt-5")) as sessions:
            await sessions.open("s")
        async with connect(url, subagents=agents) as sessions:
            await sessions.send("s", "hi")
        assert provider.asked == ["gpt-5", "gpt-5", "gpt-5", "gpt-expert", "gpt-5"]


async def test_an_approval_goes_on_with_the_runs_model(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The run's model is asked, whatever the approving process names; without its key the approval is refused."""
    async with providing(monkeypatch, calling("pay", '{"amount": 5}'), HELLO) as provider:
        async with connect(url, model=provider.model("gpt-5"), tools=[pay]) as sessions:
            assert (await (await sessions.open("s")).send("Pay 5.")).pending_calls
        monkeypatch.delenv(KEY_ENV)
        async with connect(url, tools=[pay]) as sessions:
            version = (await sessions.info("s")).version
            for decide in (sessions.approve("s"), sessions.deny("s", "No.")):
                with pytest.raises(ConfigurationError, match=rf"'openai:gpt-5'.*{KEY_ENV} is not set"):
                    await decide
            assert (await sessions.info("s")).version == version
        monkeypatch.setenv(KEY_ENV, KEY)
        async with connect(url, model="offline", tools=[pay]) as sessions:
            assert (await sessions.approve("s")).text == "Hello."
        assert provider.asked == ["gpt-5", "gpt-5"]


async def test_a_run_of_a_session_without_a_model_goes_on_with_the_recorded_one(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The record names the model of a LoopFactory; with the same factory here, its key variable is known too."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with providing(monkeypatch, calling("pay", '{"amount": 5}'), HELLO) as provider:
        async with connect(url, tools=[pay]) as sessions:
            runtime = SessionRuntime(sessions.store)
            await runtime.create(AgentDefinition("agent"), session_id="s")
            loops = LoopFactory(model=provider.model("gpt-5"), tools=[pay])
            await runtime.execute("s", SendMessage("Pay 5.", loops))
            await loops.aclose()
            assert (await sessions.approve("s")).text == "Hello."
        assert provider.asked == ["gpt-5", "gpt-5"]


KILLED = """
import asyncio, os, sys
from perdure import ModelConfig, connect, tool

@tool(idempotent=True)
def add(a: int, b: int) -> int:
    "Add."
    os.kill(os.getpid(), 9)

async def main():
    url, server = sys.argv[1:]
    model = ModelConfig("openai:gpt-5", base_url=server + "/v1", api_key_env="PERDURE_LOOPBACK_KEY")
    async with connect(url, model=model, tools=[add]) as sessions:
        await (await sessions.open("s")).send("What is 2 + 3?")

asyncio.run(main())
"""


@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def killed(url: str, server: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", dedent(KILLED), url, server)
    assert await process.wait() == -9


@pytest.mark.parametrize("named", [None, "offline"])
async def test_a_killed_run_is_recovered_with_its_own_model(
    monkeypatch: pytest.MonkeyPatch, url: str, named: str | None
) -> None:
    """The recovering process may name another model or none; the tree of runs credits the model that answered."""
    async with providing(monkeypatch, ADDING, HELLO, HELLO) as provider:
        await killed(url, provider.url)
        async with connect(url, model=named, tools=[add]) as sessions:
            assert (await sessions.recover()).resumed == ("s",)
            record = await sessions.record("s")
        assert provider.asked == ["gpt-5", "gpt-5"]
    assert [loop.config.model for loop in record.loops] == ["gpt-5"]


async def test_a_killed_run_whose_model_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As for a missing tool, the error names the model and what is missing, and the run can still be recovered."""
    async with providing(monkeypatch, ADDING, HELLO, HELLO) as provider:
        await killed(url, provider.url)
        monkeypatch.delenv(KEY_ENV)
        async with connect(url, tools=[add]) as sessions:
            [(_, problem)] = (await sessions.recover()).failed
            assert "'openai:gpt-5'" in problem
            assert f"{KEY_ENV} is not set" in problem
            with pytest.raises(ConfigurationError, match=f"{KEY_ENV} is not set"):
                await sessions.send("s", "hi")
        monkeypatch.setenv(KEY_ENV, KEY)
        async with connect(url, tools=[add]) as sessions:
            assert (await sessions.recover()).resumed == ("s",)


async def test_a_killed_run_can_be_ended_without_its_model(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A cancellation asks no model, and the run's record still names its model."""
    async with providing(monkeypatch, ADDING) as provider:
        await killed(url, provider.url)
        monkeypatch.delenv(KEY_ENV)
        async with connect(url) as sessions:
            assert await sessions.cancel("s")
            assert [loop.config.model for loop in (await sessions.record("s")).loops] == ["gpt-5"]


async def test_a_killed_run_is_recovered_before_the_model_is_changed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A send that names another model lets the killed run end with its own model first."""
    async with providing(monkeypatch, ADDING, HELLO, HELLO) as provider:
        await killed(url, provider.url)
        async with connect(url, model=provider.model("gpt-6"), tools=[add]) as sessions:
            await sessions.send("s", "hi")
        assert provider.asked == ["gpt-5", "gpt-5", "gpt-6"]


async def test_a_run_of_a_driver_of_ones_own_is_not_recovered_by_a_model(url: str, tmp_path: Path) -> None:
    """The error says that the driver has to be given."""
    async with connect(url, driver=ScriptedDriver([ToolCall("pay", {"amount": 5}), "Done."]), tools=[pay]) as sessions:
        await (await sessions.open("s")).send("Pay 5.")
    async with connect(url, tools=[pay]) as sessions:
        with pytest.raises(ConfigurationError, match=r"connect\(driver=…\)"):
            await sessions.approve("s")
    async with connect(url, driver=ScriptedDriver(["", "Done."]), tools=[pay]) as sessions:
        assert (await sessions.approve("s")).text == "Done."


async def test_a_message_for_a_busy_session_is_left_there(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A connection that names another model does not block its own message."""
    async with providing(monkeypatch) as provider:
        started, go = asyncio.Event(), asyncio.Event()

        @tool
        async def wait() -> str:
            """Wait."""
            started.set()
            await go.wait()
            return "done"

        driver = ScriptedDriver(lambda request: ToolCall("wait") if request.step == 0 else "Done.")
        async with connect(url, driver=driver, tools=[wait]) as one, connect(url, model=provider.model("gpt-6")) as two:
            chat = await one.open("s")
            running = asyncio.create_task(chat.send("hi"))
            await started.wait()
            left = await two.send("s", "more", when_busy="queue")
            go.set()
            await running
            assert left.queued
        assert provider.asked == []


async def test_a_model_that_cannot_be_asked_fails_the_run(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The message is kept, as after any failure of a model, and the session keeps the named model."""
    monkeypatch.delenv(KEY_ENV, raising=False)
    async with connect(url, model=ModelConfig("openai:gpt-5", api_key_env=KEY_ENV)) as sessions:
        chat = await sessions.open("s")
        with pytest.raises(RunFailed, match=f"{KEY_ENV} is not set"):
            await chat.send("hi")


async def test_a_new_session_keeps_the_model_of_the_one_before(tmp_path: Path) -> None:
    """This holds in a process that names none: a rotated chat continues with the model that it began with."""
    url = f"sqlite:///{tmp_path}/s.db"
    async with connect(url, model="offline") as sessions:
        await sessions.open("s")
    async with connect(url) as sessions:
        chat = await sessions.open("s")
        fresh = await chat.new_session()
        assert fresh != "s"
        assert (await chat.send("Hello.")).text
        assert (await chat.session()).state.default_model == ModelConfig("offline")


@pytest.mark.parametrize("name", ["nope:x", "gpt-5"])
async def test_a_model_that_there_is_not_writes_nothing(name: str, tmp_path: Path) -> None:
    """Neither the message nor a key is written, and a session with another model keeps it."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    async with connect(url, model="offline") as sessions:
        await (await sessions.open("kept")).send("hello")
    async with connect(url, model=name) as sessions:
        for session_id in ("new", "kept"):
            chat = await sessions.open(session_id)
            before = await chat.session()
            told = f"{name} cannot be asked: Unknown .*such as 'openai:gpt-5'"
            with pytest.raises(ConfigurationError, match=told) as refused:
                await chat.send("hi", key="k")
            assert refused.value.missing == "model"
            assert await chat.session() == before
            assert await chat.result("k") is None
        with pytest.raises(ConfigurationError, match=r"cannot be asked"):
            await sessions.execute("new", SendParallel("hi", configs=[name, "offline"], loops=sessions.loops))
        assert (await sessions.info("new")).version == 1


async def test_a_key_that_is_missing_fails_the_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is known, and can be asked once the key is there: the message is kept."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with connect("memory://", model="openai:gpt-5") as sessions:
        chat = await sessions.open("s")
        with pytest.raises(RunFailed, match="OPENAI_API_KEY is not set"):
            await chat.send("hi")
        assert await chat.length() == 1


async def test_a_driver_of_ones_own_that_is_not_here_writes_nothing(tmp_path: Path) -> None:
    """A session that was begun with such a driver is opened where no model is named."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    async with connect(url, model="driver:Mine") as sessions:
        chat = await sessions.open("s")
        with pytest.raises(ConfigurationError, match="'Mine' is not here"):
            await chat.send("hi")
        assert await chat.length() == 0


@tool
def whose(caller: ToolContext[str]) -> str:
    """Tell who is asking."""
    return caller.context


REFUSED: dict[str, Callable[[Sessions], Awaitable[Any]]] = {
    "send": lambda sessions: sessions.send("s", "hi"),
    "start": lambda sessions: sessions.start("s", "hi"),
    "stream": streamed,
    "retry": lambda sessions: sessions.retry("s"),
    "start_retry": lambda sessions: sessions.start_retry("s"),
}


@pytest.mark.parametrize("verb", REFUSED)
async def test_a_run_that_is_refused_does_not_change_the_model(url: str, verb: str) -> None:
    """Without a tool's context, or with an unknown model, the session is unchanged."""
    async with connect(url, model="offline") as sessions:
        await (await sessions.open("s")).send("first")
        before = await sessions.session("s")
    async with connect(url, model=ModelConfig("offline", temperature=0.5), tools=[whose]) as sessions:
        with pytest.raises(ConfigurationError, match="needs a context"):
            await REFUSED[verb](sessions)
        assert await sessions.session("s") == before
    async with connect(url, model="nope:x") as sessions:
        with pytest.raises(ConfigurationError, match="nope"):
            await REFUSED[verb](sessions)
        assert await sessions.session("s") == before


async def test_a_repeated_key_does_not_change_the_model(url: str) -> None:
    """Its answer is there, so nothing is begun with the model that this connection names."""
    async with connect(url, model="offline") as sessions:
        await (await sessions.open("s")).send("first", key="k")
        before = await sessions.session("s")
    async with connect(url, model=ModelConfig("offline", temperature=0.5)) as sessions:
        await sessions.send("s", "first", key="k")
        assert await sessions.session("s") == before
        await sessions.send("s", "second")
        assert (await sessions.session("s")).state.default_model == ModelConfig("offline", temperature=0.5)


async def test_a_model_is_changed_beside_an_injection(url: str) -> None:
    """The message is sent to the named model, in either order."""
    async with connect(url, model="offline") as sessions:
        await sessions.open("s")
    for number in range(5):
        model = ModelConfig("offline", temperature=number / 10)
        async with connect(url, model=model) as sessions:
            note = {"role": "user", "content": "By the way."}
            both = sessions.send("s", "hi"), sessions.inject("s", note)
            reply, _ = await asyncio.gather(*both, return_exceptions=True)
            assert not isinstance(reply, BaseException), reply
            assert (await sessions.session("s")).state.default_model == model
