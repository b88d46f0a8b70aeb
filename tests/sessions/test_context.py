"""Contexts tell tools who is asking: given with a send, made again for runs without a caller, and never stored."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import pytest

import perdure
from perdure import AgentDefinition, AgentSession, ConfigurationError, InvalidData, SendParallel, ToolCall, ToolContext
from perdure.loop.tools import FunctionTool
from perdure.testing import Delay, ScriptedDriver

CALL = ToolCall("whoami", {})


@dataclass
class Request:
    """An object that cannot be stored, and must not be."""

    user: str


@perdure.tool
def whoami(context: ToolContext[Request]) -> str:
    """Tell who is asking."""
    return f"{context.context.user} owner={context.owner} session={context.session_id} data={context.context_data}"


@perdure.tool(needs_approval=True)
def ask(context: ToolContext[Request]) -> str:
    """Tell who is asking, once a person agrees."""
    return context.context.user


@perdure.tool
def maybe(context: ToolContext[Request | None]) -> str:
    """Tell who is asking, if anybody does."""
    return context.context.user if context.context else f"nobody, {context.metadata.get('tier')}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 's.db'}"


def results(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages if message.role == "tool"]


def stored_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def from_data(session: AgentSession, data: Any) -> Request:
    return Request(f"{(data or {}).get('user', 'nobody')} again")


async def test_tools_are_given_what_the_sender_gave(url: str, tmp_path: Path) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([CALL, "done"]), tools=[whoami]) as app:
        chat = await app.of("ada").open("s")
        reply = await chat.send("Who?", context=Request("zanzibar-7"), context_data={"plan": "pro"})
        assert results(reply.session) == [f"zanzibar-7 owner=ada session={chat.id} data={{'plan': 'pro'}}"]
        await chat.inject({"role": "user", "content": "more"})
    assert b"Request(" not in stored_in(tmp_path)


async def test_a_tool_that_needs_a_context_is_not_run_without_one(url: str) -> None:
    """The send says what to do, and nothing has changed."""
    async with perdure.connect(url, driver=ScriptedDriver([CALL, "done"]), tools=[whoami]) as app:
        chat = await app.open("s")
        with pytest.raises(ConfigurationError, match="context=") as refused:
            await chat.send("Who?")
        assert (refused.value.missing, refused.value.name) == ("context", "whoami")
        assert (await app.info("s")).version == 1
        assert not await app.runtime.journal.is_interrupted("s")


async def test_a_tool_may_do_without(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([ToolCall("maybe", {}), "done"]), tools=[maybe]) as app:
        chat = await app.open("s")
        await app.execute("s", perdure.WriteMetadata("tier", "gold"))
        assert results((await chat.send("Who?")).session) == ["nobody, gold"]


async def test_a_run_without_a_caller_has_its_context_made(url: str) -> None:
    """No task of the sender runs a queued message: its context is made from the data that the sender left."""
    answers = iter([Delay(0.1, "first"), CALL, "second"])
    driver = ScriptedDriver(lambda _: next(answers))
    async with perdure.connect(url, driver=driver, tools=[whoami], context=from_data) as app:
        chat = await app.open("s")
        run = await chat.start("Go.", context=Request("bob"))
        await chat.send("Who?", when_busy="queue", context=Request("unused"), context_data={"user": "ada"})
        await run.result()
        await app.runtime.close(10)
        assert results(await chat.session())[0].startswith("ada again")


async def test_an_async_factory_is_awaited(url: str) -> None:
    async def make(session: AgentSession, data: Any) -> Request:
        await asyncio.sleep(0)
        return Request(session.id)

    async with perdure.connect(url, driver=ScriptedDriver([CALL, "done"]), tools=[whoami], context=make) as app:
        assert results((await (await app.open("s")).send("Who?")).session)[0].startswith("s owner=None")


async def interrupted(url: str, call: ToolCall) -> None:
    """Leave a run that was answered by a tool and is about to ask the model again."""
    driver = ScriptedDriver([call, Delay(30, "never")])
    async with perdure.connect(url, driver=driver, tools=[whoami, ask], grace=0.05) as app:
        run = await (await app.open("s")).start("Who?", context=Request("ada"), context_data={"user": "ada"})
        events = app.events("s", follow=True)
        async for event in events:
            if isinstance(event, perdure.ToolExecutionEnd):
                break
        await events.aclose()
        assert not run.is_done


async def test_a_recovered_run_waits_until_its_tools_have_a_context(url: str) -> None:
    """Recovery refuses and leaves the run unchanged; where a context can be made, the run continues."""
    await interrupted(url, CALL)
    answers = [CALL, ToolCall("whoami", {}, id="again"), "done"]
    async with perdure.connect(url, driver=ScriptedDriver(answers), tools=[whoami, ask]) as app:
        report = await app.recover()
        assert [error.missing for error in report.errors] == ["context"]  # type: ignore[attr-defined]
        assert await app.runtime.journal.is_interrupted("s")
    async with perdure.connect(url, driver=ScriptedDriver(answers), tools=[whoami, ask], context=from_data) as app:
        assert (await app.recover()).resumed == ("s",)
        assert [each.split(" owner")[0] for each in results(await app.session("s"))] == ["ada", "ada again"]


@pytest.mark.parametrize("who", ["the decider", "the factory"])
async def test_an_approval_continues_with_a_context(url: str, who: str) -> None:
    driver = ScriptedDriver([ToolCall("ask", {}), "done"])
    async with perdure.connect(url, driver=driver, tools=[ask], context=from_data) as app:
        chat = await app.open("s")
        await chat.send("Who?", context=Request("ada"), context_data={"user": "ada"})
        reply = await chat.approve(context=Request("eve") if who == "the decider" else None)
        assert results(reply.session) == ["eve" if who == "the decider" else "ada again"]


async def test_sub_agents_have_their_callers_context(url: str) -> None:
    helper = AgentDefinition("helper", description="Helps.")
    boss = AgentDefinition("boss")
    answers = iter([ToolCall("helper", {"prompt": "Who?"}), CALL, "it is told", "done"])
    driver = ScriptedDriver(lambda _: next(answers))
    async with perdure.connect(url, driver=driver, tools=[whoami], subagents=[helper]) as app:
        await (await app.open("s", boss)).send("Ask.", context=Request("ada"), context_data={"n": 1})
        (child,) = await app.list(parent="s")
        assert results(await app.session(child.id))[0].startswith("ada owner=None")
        assert results(await app.session(child.id))[0].endswith("data={'n': 1}")


async def test_branches_have_the_senders_context(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([CALL, "done"]), tools=[whoami]) as app:
        await app.open("s")
        configs = ["test:a", "test:b"]
        after = await app.execute("s", SendParallel("Who?", app.loops, configs=configs, context=Request("ada")))
        assert results(after)[0].startswith("ada owner=None")


async def test_context_data_is_json_without_secrets(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver(["no"])) as app:
        chat = await app.open("s")
        for wrong in (5, {"a": object()}, {"api_key": "sk-1"}):
            with pytest.raises((InvalidData, ConfigurationError)):
                await chat.send("hi", context_data=wrong)  # type: ignore[arg-type]
        assert (await app.info("s")).version == 1


class Named(Protocol):
    user: str


class Typed(TypedDict):
    user: str


Item = TypeVar("Item")


class Box(Generic[Item]):
    user = "boxed"


async def test_a_context_of_another_class_is_refused_before_the_run(url: str) -> None:
    """The error names both classes; nothing is changed, and no model is asked."""
    driver = ScriptedDriver([CALL, "done"])
    async with perdure.connect(url, driver=driver, tools=[whoami]) as app:
        chat = await app.open("s")
        with pytest.raises(ConfigurationError, match=r"of type \S+Request, and was given a str") as refused:
            await chat.send("Who?", context="ada")
        assert (refused.value.missing, refused.value.name) == ("context", "whoami")
        assert (await app.info("s")).version == 1
        assert driver.requests == []
        assert (await chat.send("Who?", context=type("Better", (Request,), {})("ada"))).text == "done"


async def test_what_the_function_makes_is_checked_too(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([CALL]), tools=[whoami], context=lambda *_: 5) as app:
        with pytest.raises(ConfigurationError, match="was given an int"):
            await (await app.open("s")).send("Who?")


def _taking(kind: Any) -> FunctionTool[..., Any]:
    def ask_it(caller: Any) -> str:
        """Take a context."""
        return "taken"

    ask_it.__annotations__["caller"] = ToolContext[kind]
    return perdure.tool(ask_it)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Named, Request("ada")),
        (Typed, {"user": "ada"}),
        (Box[int], Box()),
        (dict[str, str], {}),
        (Request | None, "ada"),
        (Any, 5),
        (object, 5),
        (float, 5),
    ],
)
async def test_a_type_that_a_value_does_not_tell_is_not_checked(url: str, kind: Any, given: Any) -> None:
    """Protocols, typed dicts, generics and unions pass: only the tool can find out whether they fit."""
    driver = ScriptedDriver([ToolCall("ask_it", {}), "done"])
    async with perdure.connect(url, driver=driver, tools=[_taking(kind)]) as app:
        assert results((await (await app.open("s")).send("Go.", context=given)).session) == ["taken"]
