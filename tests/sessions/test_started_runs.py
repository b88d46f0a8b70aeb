"""Runs that outlive their callers: started, listened to, waited for, stopped, and asked for by key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import InvalidData, RunFailed, SessionBusy, SessionNotActive, ToolCall, TransientDriverError, tool
from perdure.testing import Chunks, Delay, ScriptedDriver

SLOW = Chunks(("one ", "two ", Delay(0.05, ""), "three"))


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 's.db'}"


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def heard(chunks: Any) -> tuple[str, Any]:
    """Return the whole text of a stream, and the reply at its end."""
    text, reply = "", None
    async for chunk in chunks:
        text += chunk
        reply = chunk.reply or reply
    return text, reply


async def test_a_started_run_needs_nobody_to_listen(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        chat = await sessions.open("s")
        run = await chat.start("Go.")
        async for _ in run.stream():
            break  # leaving stops nothing
        assert (await run.result()).text == "one two three"
        assert run.is_done


async def test_everybody_hears_all_of_it_early_or_late(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        run = await (await sessions.open("s")).start("Go.")
        early = asyncio.create_task(heard(run.stream()))
        await run.result()
        assert (await early)[0] == (await heard(run.stream()))[0] == "one two three"
        assert (await early)[1] == await run.result()


async def test_waiting_that_is_given_up_ends_no_run(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.1, "done")])) as sessions:
        run = await (await sessions.open("s")).start("Go.")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.result(), 0.01)
        assert (await run.result()).text == "done"


async def test_what_keeps_a_run_from_beginning_is_raised_by_start(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.2, "done")])) as sessions:
        chat = await sessions.open("s")
        run = await chat.start("Go.")
        with pytest.raises(SessionBusy):
            await chat.start("And this.")
        later = await chat.start("Later.", when_busy="queue")
        assert not later.is_done
        assert (await run.result()).text == "done"
        await chat.session()
    async with perdure.connect(url, driver=ScriptedDriver(["no"])) as sessions:
        chat = await sessions.open("t")
        await sessions.suspend("t")
        with pytest.raises(SessionNotActive):
            await chat.start("Go.")


async def test_a_started_run_can_be_stopped(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([Chunks(("so ", "far", Delay(30, "")))])) as sessions:
        chat = await sessions.open("s")
        run = await chat.start("Go.")
        async for chunk in run.stream():
            if chunk == "far":
                break
        assert await run.cancel()
        assert not await run.cancel()
        assert (await chat.session()).state.messages[-1].text == "so far"
        with pytest.raises(perdure.ConfigurationError, match="cancelled"):
            await run.result()


async def test_a_stream_that_is_detached_continues(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        chat = await sessions.open("s")
        async for _ in chat.stream("Go.", detach=True):
            break
        await until(lambda: _has_answer(chat))
        assert (await chat.session()).state.messages[-1].text == "one two three"


async def _has_answer(chat: perdure.Chat) -> bool:
    session = await chat.session()
    return bool(session.state.messages) and session.state.messages[-1].role == "assistant"


async def test_leaving_the_connection_gives_started_runs_their_grace(tmp_path: Path) -> None:
    """A run that ends within it is saved; another is interrupted, and the next connection recovers it."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.05, "done")])) as sessions:
        await (await sessions.open("quick")).start("Go.")
    async with perdure.connect(url, driver=ScriptedDriver([Delay(30, "never")]), grace=0.05) as sessions:
        run = await (await sessions.open("slow")).start("Go.")
    with pytest.raises(perdure.RunInterrupted):
        await run.result()
    async with perdure.connect(url, driver=ScriptedDriver(["at last"])) as sessions:
        assert (await sessions.session("quick")).state.messages[-1].text == "done"
        assert (await sessions.recover()).resumed == ("slow",)
        assert (await sessions.session("slow")).state.messages[-1].text == "at last"


async def test_a_stream_may_queue_its_message(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.1, "first")])) as sessions:
        chat = await sessions.open("s")
        run = await chat.start("Go.")
        text, reply = await heard(chat.stream("And this.", when_busy="queue"))
        assert (text, reply.text, reply.queued) == ("first", "first", False)
        assert [message.text for message in reply.session.state.messages] == ["Go.", "first", "And this.", "first"]
        await run.result()


@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_decisions_stream_what_follows(url: str, decision: str) -> None:
    driver = ScriptedDriver([ToolCall("pay", {"amount": 5}), Chunks(("it is ", "done"))])
    async with perdure.connect(url, driver=driver, tools=[pay]) as sessions:
        chat = await sessions.open("s")
        assert (await chat.send("Pay.")).pending_calls
        chunks = chat.stream_approve() if decision == "approve" else chat.stream_deny("too much")
        text, reply = await heard(chunks)
        assert (text, reply.text) == ("it is done", "it is done")
        results = [message.text for message in reply.session.state.messages if message.role == "tool"]
        assert ("paid 5" in results[0]) is (decision == "approve")


async def test_a_key_tells_what_came_of_it(url: str) -> None:
    """Asking starts nothing, and the answer follows the run: not sent, under way, answered."""
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.1, "42")])) as sessions:
        chat = await sessions.open("s")
        assert await chat.result("k") is None
        run = await chat.start("Go.", key="k")
        await chat.send("Later.", key="l", when_busy="queue")
        for key, is_running in (("k", True), ("l", False)):
            reply = await chat.result(key)
            assert reply is not None
            assert (reply.queued, reply.running) == (True, is_running)
            with pytest.raises(InvalidData, match="is being answered" if is_running else "waits for another run"):
                _ = reply.value
        await run.result()
        reply = await chat.result("k")
        assert reply is not None
        assert (reply.text, reply.queued) == ("42", False)
        assert await chat.result("m") is None


async def test_a_failed_run_does_not_blame_a_tool_whose_error_the_model_was_told(url: str) -> None:
    @tool
    def look() -> str:
        """Look."""
        raise ValueError("there is nothing")

    answers: Any = iter([ToolCall("look"), TransientDriverError("test:model", "it is busy", status=529)])
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: next(answers)), tools=[look]) as sessions:
        with pytest.raises(RunFailed, match="it is busy") as failed:
            await (await sessions.open("s")).send("Go.")
        assert (failed.value.kind, failed.value.retryable) == ("TransientDriverError", True)
        both = (await sessions.session("s")).state.errors
        assert [error.type for error in both] == ["TransientDriverError", "ValueError"]


async def test_a_failed_run_says_why_and_can_be_retried(url: str) -> None:
    failing: list[Any] = [TransientDriverError("test:model", "it is busy", status=529), "now it works"]
    answers = iter(failing)
    driver = ScriptedDriver(lambda _: next(answers))
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        with pytest.raises(RunFailed) as failed:
            await chat.send("Go.", key="k")
        error = failed.value
        assert error.cause is not None
        assert (error.cause.type, error.cause.code, error.retryable) == ("TransientDriverError", 529, True)
        assert error.session.id == "s"
        assert "retry() sends the message again" in str(error)
        with pytest.raises(RunFailed):
            await chat.result("k")
        assert (await chat.retry()).text == "now it works"
        said = (await chat.session()).state.messages
        assert [message.text for message in said] == ["Go.", "now it works"]
        assert [message.text for message in await chat.history()].count("Go.") == 2


async def test_an_answer_can_be_made_again(url: str) -> None:
    answers = iter(["one", "two"])
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: next(answers))) as sessions:
        chat = await sessions.open("s")
        await chat.inject({"role": "user", "content": "Before."})
        await chat.send("Go.")
        assert (await chat.retry()).text == "two"
        said = (await chat.session()).state.messages
        assert [message.text for message in said] == ["Before.", "Go.", "two"]


async def test_where_nothing_was_sent_there_is_nothing_to_retry(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver(["no"])) as sessions:
        chat = await sessions.open("s")
        with pytest.raises(InvalidData, match="send"):
            await chat.retry()


def test_the_blocking_face_has_them_too(tmp_path: Path) -> None:
    with perdure.connect_blocking(f"sqlite:///{tmp_path / 's.db'}", driver=ScriptedDriver([SLOW])) as sessions:
        run = sessions.open("s").start("Go.")
        assert "".join(run.stream()) == "one two three"
        assert run.result().text == "one two three"
        assert not run.cancel()


async def test_a_repeated_key_streams_the_answer_that_is_there(url: str) -> None:
    """A reader that uses the offsets of chunks has the whole text at the end."""
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        chat = await sessions.open("s")
        first, _ = await heard(chat.stream("Go.", key="k"))
        again, reply = await heard(chat.stream("Go.", key="k"))
        assert (first, again, reply.text) == ("one two three",) * 3
        shown = ""
        async for chunk in chat.stream("Go.", key="k"):
            shown = shown[: chunk.offset] + chunk
        assert shown == "one two three"
