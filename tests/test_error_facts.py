"""Errors carry facts, so a program decides by attributes and never by words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from perdure import (
    InjectMessage,
    LoopFactory,
    MemoryStore,
    ResumeSession,
    SendMessage,
    SessionRuntime,
    codec,
    connect,
    mcp,
    recover,
)
from perdure import tool as as_tool
from perdure.errors import (
    ConfigurationError,
    ContextTooLong,
    ErasedMeanwhile,
    IllegalStatusChange,
    InvalidData,
    InvalidSessionId,
    PerdureError,
    QueueFull,
    RateLimited,
    RequestRefused,
    RunFailed,
    SessionBusy,
    SessionConflict,
    SessionHeld,
    SessionLocked,
    SessionNotActive,
    SessionNotFound,
    StoreError,
    ToolUnavailable,
)
from perdure.model.definition import AgentDefinition
from perdure.model.message import ToolCall
from perdure.model.value import brief, kind_of
from perdure.protocols import SessionQuery
from perdure.testing import ScriptedDriver

ADVISED: list[Callable[[], PerdureError]] = [
    lambda: SessionNotFound("s"),
    lambda: SessionNotFound("s", 3),
    lambda: SessionNotFound("s", None, "It is gone.", "Look elsewhere."),
    lambda: SessionBusy("s", "host:1"),
    lambda: QueueFull("s", 100),
    lambda: RateLimited("openai:gpt-5", "openai:3f", 12.5, 3.0),
    lambda: QueueFull("s", 10_000, "ada", 2.5),
    lambda: SessionLocked("s", "s.lock", 10.0),
    lambda: SessionLocked(None, "s.db-lock", 10.0, holder=7, command="python", is_stopped=True),
    lambda: SessionNotActive("s", "suspended"),
    lambda: SessionNotActive("s", "suspended", ["pay"]),
    lambda: SessionNotActive("s", "suspended", ["pay"], ["weather"]),
    lambda: SessionNotActive("s", "suspended", outside=["weather"]),
    lambda: SessionNotActive("s", "deleted"),
    lambda: SessionConflict("s", 1, 1, "It is another's.", "Open another.", agent="clerk"),
    lambda: InvalidSessionId("a b"),
    lambda: RequestRefused("m", "no"),
    lambda: ContextTooLong("m", "too long"),
    lambda: ErasedMeanwhile("s"),
    lambda: ConfigurationError("Nothing is set.", "Set it."),
    lambda: ToolUnavailable("time", "It is gone."),
    lambda: ToolUnavailable("time", "It is gone.", was_sent=False),
]


@pytest.mark.parametrize("make", ADVISED)
def test_a_message_is_what_happened_and_then_the_advice(make: Callable[[], PerdureError]) -> None:
    error = make()
    assert error.advice
    assert error.what
    assert str(error) == f"{error.what} {error.advice}"


@pytest.mark.parametrize(
    "make", [lambda: StoreError("The disk is full."), lambda: SessionBusy("s", reason="It moves.")]
)
def test_without_advice_the_message_is_what_happened(make: Callable[[], PerdureError]) -> None:
    error = make()
    assert (error.advice, error.what) == ("", str(error))


def test_an_error_is_copied_and_pickled_whole() -> None:
    error = ConfigurationError("No tool is named 'pay'.", "Give it.", missing="tool", name="pay")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.what, other.advice, other.missing, other.name) == (
            *(str(error), error.what, "Give it."),
            *("tool", "pay"),
        )


async def test_a_session_of_another_agent_names_it() -> None:
    async with connect("memory://", driver=ScriptedDriver([])) as sessions:
        await sessions.open("s", AgentDefinition("clerk"))
        with pytest.raises(SessionConflict) as caught:
            await sessions.open("s", AgentDefinition("guide"))
        assert caught.value.agent == "clerk"


async def test_no_model_is_told_from_a_tool_that_is_missing() -> None:
    with pytest.raises(ConfigurationError) as caught:
        LoopFactory().model_of(AgentDefinition("guide"))
    assert (caught.value.missing, caught.value.name) == ("model", "guide")
    with pytest.raises(ConfigurationError) as caught:
        LoopFactory().tools_of(AgentDefinition("guide", tools=("pay",)), 0)
    assert (caught.value.missing, caught.value.name) == ("tool", "pay")


@as_tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def test_a_session_that_waits_says_with_which_calls() -> None:
    async with MemoryStore() as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("guide"))
        loops = LoopFactory(tools=[pay], driver=ScriptedDriver([ToolCall(name="pay", arguments={"amount": 5})]))
        await runtime.execute(session.id, SendMessage("Pay.", loops))
        with pytest.raises(IllegalStatusChange) as caught:
            await runtime.execute(session.id, ResumeSession())
        assert caught.value.pending == ("pay",)


async def test_a_run_that_failed_says_of_what_kind_of_error() -> None:
    async with connect("memory://", driver=ScriptedDriver([ConfigurationError("No key.")])) as sessions:
        chat = await sessions.open()
        with pytest.raises(RunFailed) as caught:
            await chat.send("hello")
        error = caught.value
        assert (error.kind, error.problem, error.reason) == (
            "ConfigurationError",
            "No key.",
            "ConfigurationError: No key.",
        )


async def test_a_report_has_the_errors_of_those_that_failed() -> None:
    async with MemoryStore() as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("guide"))
        await runtime.execute(session.id, InjectMessage("hello"))
        report = await recover(runtime, LoopFactory(), session_id="nobody")
        assert [str(error) for error in report.errors] == [reason for _, reason in report.failed]
        assert isinstance(report.errors[0], SessionNotFound)


@pytest.mark.parametrize(
    ("filters", "path", "told"),
    [
        ({"order": "title"}, "$.order", "unknown order 'title'; use one of created, updated"),
        ({"status": "gone"}, "$.status", "use one of active, suspended, completed, failed, deleted"),
        ({"order": 7}, "$.order", "wrong type"),
        ({"limit": "3"}, "$.limit", "Expected `int`, got `str`"),
    ],
)
def test_a_wrong_filter_is_named_with_what_may_be_asked_for(filters: dict[str, Any], path: str, told: str) -> None:
    with pytest.raises(InvalidData) as caught:
        SessionQuery.of(filters)
    assert (caught.value.path, told in caught.value.problem) == (path, True)


async def test_a_call_that_does_not_wait_is_told_the_ids_and_digests_of_those_that_do() -> None:
    async with connect("memory://", tools=[pay], driver=ScriptedDriver([ToolCall("pay", {"amount": 5})])) as sessions:
        chat = await sessions.open()
        (call,) = (await chat.send("Pay.")).pending_calls
        with pytest.raises(InvalidData, match="'abc' does not wait") as caught:
            await chat.approve(["abc"])
    assert call.id in caught.value.problem
    assert call.digest in caught.value.problem


async def test_a_sentence_ends_before_the_advice() -> None:
    def context(session: object, data: object) -> object:
        raise KeyError("user")

    async with connect("memory://", model="offline", context=context) as sessions:
        with pytest.raises(ConfigurationError, match=r"KeyError: 'user'\. Correct the function"):
            await (await sessions.open()).send("hi")


def test_a_kind_has_its_article() -> None:
    assert [kind_of(each) for each in (5, object(), "", [])] == ["an int", "an object", "a str", "a list"]
    with pytest.raises(InvalidData, match=r"^an object is not JSON"):
        codec.encode_json({"a": object()})


def test_a_quote_that_is_cut_is_closed() -> None:
    assert brief("a" * 99) == f"'{'a' * 48}…'"
    assert brief(["a"] * 99).endswith("…")
    assert brief("a" * 48) == repr("a" * 48)


@pytest.mark.parametrize("given", [5, None, {}, b"uvx"])
def test_what_is_no_mcp_server_is_told_what_is(given: Any) -> None:
    with pytest.raises(InvalidData, match="expected the command or the URL of an MCP server"):
        mcp(given)


def test_a_hold_with_an_empty_case_names_the_call_that_lifts_it() -> None:
    """`hold:` is another tag than `hold`, and lifting one leaves the other."""
    assert "lift_hold('a', '')" in SessionHeld("a", "hold:").advice
    assert "lift_hold('a')" in SessionHeld("a", "hold").advice
