"""Leaving a connection: its work ends, or waits to be recovered, before the store is closed."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import RunInterrupted, ToolCall
from perdure.testing.scripted import Chunks, Delay, ScriptedDriver

SLOW = Chunks(["Once ", "upon ", Delay(60, "a time")])


async def texts(url: str) -> list[str]:
    async with perdure.connect(url, driver=ScriptedDriver([])) as sessions:
        return [message.text for message in (await sessions.session("s")).state.messages]


@pytest.fixture(params=["sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db" if request.param == "sqlite" else f"file://{tmp_path}/sessions"


async def test_a_stream_that_was_left_is_stopped_and_kept(url: str) -> None:
    """`break` leaves the generator open: leaving the connection ends its run first, and keeps what was said."""
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        chat = await sessions.open("s")
        async for _ in chat.stream("Tell me."):
            break
    assert (await texts(url))[0] == "Tell me."
    async with perdure.connect(url, driver=ScriptedDriver(["Yes."])) as sessions:
        assert (await sessions.send("s", "Are you there?")).text == "Yes."


async def test_a_listener_whose_connection_is_closed_is_told(url: str) -> None:
    """It gets a typed error, and not a cancellation that nobody asked for; what was said is kept."""
    is_told = asyncio.Event()

    async def listen(chat: Any) -> None:
        async for _ in chat.stream("Tell me."):
            is_told.set()

    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as sessions:
        listening = asyncio.ensure_future(listen(await sessions.open("s")))
        await is_told.wait()
    with pytest.raises(perdure.ConfigurationError, match="closed while"):
        await listening
    assert (await texts(url))[0] == "Tell me."


async def test_a_run_that_ends_within_the_grace_is_waited_for(url: str) -> None:
    """A run that nobody awaits is still saved."""
    async with perdure.connect(url, driver=ScriptedDriver([Delay(0.05, "Done.")])) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Do it."))
        await asyncio.sleep(0.01)
    assert (await run).text == "Done."
    assert await texts(url) == ["Do it.", "Done."]


async def test_a_run_that_does_not_end_in_time_waits_to_be_recovered(url: str) -> None:
    """Its sender gets an error; the next process continues it at once, and no completed tool is called again."""
    called: list[int] = []

    def charge() -> str:
        """Take the money."""
        called.append(1)
        return "charged"

    def script(request: Any) -> Any:
        return ToolCall("charge") if request.step == 0 else Delay(60, "never")

    driver = ScriptedDriver(script)
    async with perdure.connect(url, tools=[charge], driver=driver, grace=0) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Do it.", key="k"))
        await until(lambda: len(driver.requests) == 2)
    with pytest.raises(RunInterrupted, match="its connection was closed before it had ended"):
        await run
    async with perdure.connect(url, tools=[charge], driver=ScriptedDriver(["", "Done."])) as sessions:
        assert (await sessions.send("s", "Do it.", key="k")).text == "Done."
    assert called == [1]
    assert (await texts(url))[-1] == "Done."


async def test_a_queued_message_is_not_lost_on_leaving(url: str) -> None:
    """It waits in the inbox, and is answered after the recovered run."""
    async with perdure.connect(url, driver=ScriptedDriver([Delay(60, "never")]), grace=0) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("One."))
        journal = sessions.runtime.journal
        assert journal is not None
        await until(lambda: journal.is_claimed("s"))
        assert (await chat.send("Two.", when_busy="queue")).queued
    await asyncio.gather(run, return_exceptions=True)
    async with perdure.connect(url, driver=ScriptedDriver(lambda r: f"Re: {r.messages[-1].text}")) as sessions:
        await sessions.recover()
        await sessions.runtime.idle()
    assert await texts(url) == ["One.", "Re: One.", "Two.", "Re: Two."]


def test_leaving_the_blocking_face_keeps_what_was_streamed(url: str) -> None:
    """A thread in the middle of a stream gets an error, and the session is free at once."""
    failures: list[BaseException] = []
    is_told = threading.Event()

    def listen(chat: Any) -> None:
        try:
            for _ in chat.stream("Tell me."):
                is_told.set()
        except perdure.PerdureError as error:
            failures.append(error)
        finally:
            is_told.set()

    with perdure.connect_blocking(url, driver=ScriptedDriver([SLOW])) as sessions:
        thread = threading.Thread(target=listen, args=(sessions.open("s"),))
        thread.start()
        is_told.wait()
    thread.join()
    assert len(failures) == 1
    with perdure.connect_blocking(url, driver=ScriptedDriver(["Yes."])) as sessions:
        assert sessions.send("s", "Are you there?").text == "Yes."
        assert sessions.history("s")[0].text == "Tell me."


async def test_an_agent_that_is_asked_once_is_not_left_behind(url: str) -> None:
    """run() keeps nothing: it ends with the connection, and raises an error that says so."""
    driver = ScriptedDriver([Delay(60, "never")])
    async with perdure.connect(url, driver=driver, grace=0) as sessions:
        run = asyncio.ensure_future(sessions.run("Go."))
        await until(lambda: driver.requests)
    assert run.done()
    with pytest.raises(perdure.ConfigurationError, match="Nothing of it is kept"):
        await run


async def test_a_message_that_steers_is_answered_also_if_the_run_is_killed_then(url: str) -> None:
    """It came after what would have been the last answer: the recovered run still answers it."""

    def script(request: Any) -> Any:
        return Delay(0.3, "Right.") if request.step == 0 else Delay(60, "never")

    driver = ScriptedDriver(script)
    async with perdure.connect(url, driver=driver, grace=0) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Where?"))
        await until(lambda: len(driver.requests) == 1)
        await chat.send("I meant left.", when_busy="steer")
        await until(lambda: len(driver.requests) == 2)
    with pytest.raises(RunInterrupted):
        await run
    async with perdure.connect(url, driver=ScriptedDriver(["", "Left."])) as sessions:
        await sessions.recover()
    assert await texts(url) == ["Where?", "Right.", "I meant left.", "Left."]


@pytest.mark.sample(2)
async def test_a_verb_that_begins_when_all_others_have_ended_leaves_no_claim(url: str) -> None:
    """It is refused, or ends before the store is closed: else the session would be busy until the claim lapses."""
    for turns in range(30):
        async with perdure.connect(url) as sessions:
            chat = await sessions.open(f"s-{turns}")
            for number in range(4):
                await chat.inject({"role": "user", "content": str(number)})
        async with perdure.connect(url, driver=ScriptedDriver([])) as sessions:
            late = Late(sessions, chat.id, turns)
            sessions._connection._exits.push_async_callback(late.begin)
        await asyncio.gather(late.work, return_exceptions=True)
        async with perdure.connect(url) as sessions:
            journal = sessions.runtime.journal
            assert journal is not None
            assert not await journal.is_claimed(chat.id), f"after {turns} turns"


class Late:
    """An object that compacts a session at the last moment, just before a connection closes its store."""

    def __init__(self, sessions: Any, session_id: str, turns: int) -> None:
        self._sessions = sessions
        self._session_id = session_id
        self._turns = turns

    async def begin(self) -> None:
        verb = self._sessions.compact(self._session_id, compact_strategy="truncate", keep_last=1)
        self.work = asyncio.ensure_future(verb)
        for _ in range(self._turns):
            await asyncio.sleep(0)


@pytest.mark.parametrize("on_unknown", ["error", "ask", "rerun"])
async def test_a_tool_call_that_leaving_cuts_off_is_logged(caplog: pytest.LogCaptureFixture, on_unknown: Any) -> None:
    """The log names its session and its tool. A call that recovery makes again loses nothing, and is not logged."""
    begun, may_end = threading.Event(), threading.Event()

    @perdure.tool(on_unknown=on_unknown)
    def charge() -> str:
        """Charge the card."""
        begun.set()
        may_end.wait(30)
        return "charged"

    driver = ScriptedDriver([ToolCall("charge"), "Done."])
    with caplog.at_level(logging.WARNING, "perdure.runs"):
        async with perdure.connect("memory://", driver=driver, tools=[charge], grace=0.0) as sessions:
            await (await sessions.open("s")).start("Charge.")
            await until(begun.is_set)
    may_end.set()
    told = [record.getMessage() for record in caplog.records if record.name == "perdure.runs"]
    assert [each.startswith("session s: ") and "a call of charge" in each for each in told] == (
        [] if on_unknown == "rerun" else [True]
    )
