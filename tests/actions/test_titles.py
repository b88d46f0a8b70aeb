"""A title function: called after the first answer, and its title saved with that answer."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import AgentDefinition, AgentSession, SendParallel, Sessions, SqliteStore, ToolCall, WriteMetadata, tool
from perdure.actions import titles
from perdure.testing import FailingStore, ScriptedDriver


@tool(needs_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


def reply(request: Any) -> Any:
    last = request.messages[-1]
    return ToolCall("pay", {}) if last.text == "pay" and last.role == "user" else "done"


def connect(title: Any, store: Any = "memory://", **options: Any) -> Sessions:
    return perdure.connect(store, tools=[pay], **{"driver": ScriptedDriver(reply), "title": title, **options})


class Asked:
    """A title that counts how often it was called, and for which sessions."""

    def __init__(self, *made: Any) -> None:
        self.made = [*made] or ["A title"]
        self.sessions: list[AgentSession] = []

    async def __call__(self, session: AgentSession) -> Any:
        self.sessions.append(session)
        return self.made[min(len(self.sessions), len(self.made)) - 1]


async def title_of(app: Sessions, session_id: str = "s") -> str | None:
    (listed,) = await app.list(id=session_id)
    return listed.title


async def test_the_title_comes_with_the_first_answer() -> None:
    """The run's version has it as the session's name; later answers call no title."""
    asked = Asked("Greetings\nand more")

    async def make(session: AgentSession) -> str | None:
        return await asked(session)  # type: ignore[no-any-return]

    async with connect(make) as app:
        chat = await app.open("s")
        reply = await chat.send("Hello")
        assert (reply.session.version, reply.session.info.name) == (2, "Greetings and more")
        assert [message.text for message in asked.sessions[0].state.messages] == ["Hello", "done"]
        await chat.send("Again")
        await chat.rename(None)
        await chat.send("And again")
        assert len(asked.sessions) == 1
        assert await title_of(app) == "Hello"


@pytest.mark.parametrize("made", [None, "", " \n"])
async def test_without_a_title_the_first_words_serve(made: Any) -> None:
    """None and a blank give no title."""
    async with connect(lambda session: made) as app:
        await (await app.open("s")).send("Hello")
        assert (await title_of(app), (await app.info("s")).name) == ("Hello", None)


async def test_a_name_is_never_replaced() -> None:
    """A session that was renamed before its first answer is not asked about."""
    asked = Asked()
    async with connect(asked) as app:
        chat = await app.open("s")
        await chat.rename("Mine")
        await chat.send("Hello")
        assert (await title_of(app), asked.sessions) == ("Mine", [])


@pytest.mark.parametrize("problem", ["raises", "late", "late in a thread", "wrong type"])
async def test_a_title_that_fails_is_logged(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has ended: it is saved, and the first words serve."""
    free = threading.Event()

    async def raises(session: AgentSession) -> str:
        raise ValueError("no title")

    async def late(session: AgentSession) -> str:
        await asyncio.sleep(60)
        return "late"

    def late_in_a_thread(session: AgentSession) -> str:
        free.wait(30)
        return "late"

    makes = {"raises": raises, "late": late, "late in a thread": late_in_a_thread, "wrong type": lambda session: 7}
    monkeypatch.setattr(titles, "PATIENCE", 0.1)
    with caplog.at_level(logging.ERROR, "perdure.titles"):
        async with connect(makes[problem]) as app:
            reply = await (await app.open("s")).send("Hello")
            free.set()
            assert (reply.text, await title_of(app)) == ("done", "Hello")
    assert "no title for session s" in caplog.text


async def test_a_run_that_waited_is_titled_once_it_has_answered() -> None:
    """It is not called while the run waits for approval."""
    asked = Asked()
    async with connect(asked) as app:
        chat = await app.open("s")
        await chat.send("pay")
        assert asked.sessions == []
        reply = await chat.approve()
        assert (reply.session.info.name, len(asked.sessions)) == ("A title", 1)


async def test_a_recovered_run_is_titled(tmp_path: Path) -> None:
    """A title that was lost with its save is made again, and recovery saves it."""
    asked, store = Asked(), FailingStore(SqliteStore(tmp_path / "s.db"))
    async with connect(asked, store) as app:
        chat = await app.open("s")
        store.fail("save")
        with pytest.raises(perdure.StoreError):
            await chat.send("Hello")
        await app.recover()
        assert (await title_of(app), (await app.session("s")).version) == ("A title", 2)


async def test_a_stream_ends_with_the_title_saved() -> None:
    """All of the answer comes first."""
    asked = Asked()
    async with connect(asked) as app:
        chat = await app.open("s")
        pieces = [chunk async for chunk in chat.stream("Hello")]
        assert "".join(pieces) == "done"
        assert await title_of(app) == "A title"


async def test_sub_agents_are_not_titled() -> None:
    """A sidebar does not show their sessions."""
    asked = Asked()

    def lead(request: Any) -> Any:
        is_lead = request.system_prompt == "Lead." and request.messages[-1].role == "user"
        return ToolCall("helper", {"prompt": "Help."}) if is_lead else "done"

    helper = AgentDefinition("helper", description="Helps.")
    async with connect(asked, driver=ScriptedDriver(lead), subagents=[helper]) as app:
        chat = await app.open("s", AgentDefinition("lead", system_prompt="Lead.", tools=("helper",)))
        await chat.send("go")
        assert [session.id for session in asked.sessions] == ["s"]
        assert [each.name for each in await app.list(parent="s")] == [None]


async def test_selected_answers_are_titled() -> None:
    """The title is made for the answer that is selected of several."""
    asked = Asked()
    async with connect(asked) as app:
        await app.open("s")
        await app.execute("s", SendParallel("Hi", app.loops, configs=["a", "b"]))
        assert (await title_of(app), len(asked.sessions)) == ("A title", 1)


async def test_messages_may_come_while_a_title_is_made() -> None:
    """A queued message is sent once the session is free, and a cancel ends the wait, not the run."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(session: AgentSession) -> str:
        begun.set()
        await go.wait()
        return "Slow"

    async with connect(slow) as app:
        chat = await app.open("s")
        first = asyncio.create_task(chat.send("One"))
        await begun.wait()
        second = await chat.send("Two", when_busy="queue")
        assert second.queued
        go.set()
        assert (await first).text == "done"
        await app.runtime.idle()
        assert [message.text for message in await chat.history()] == ["One", "done", "Two", "done"]
        assert await title_of(app) == "Slow"


@pytest.mark.parametrize("how", ["cancel", "task"])
async def test_a_cancel_ends_the_wait_for_a_title(how: str) -> None:
    """The answer is there, and is kept."""
    begun = asyncio.Event()

    async def stuck(session: AgentSession) -> str:
        begun.set()
        await asyncio.sleep(60)
        return "never"

    async with connect(stuck) as app:
        chat = await app.open("s")
        sending = asyncio.create_task(chat.send("One"))
        await begun.wait()
        if how == "cancel":
            await chat.cancel()
            assert (await sending).text == "done"
        else:
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        session = await app.session("s")
        assert (session.version, session.state.final_response is not None) == (2, True)
        assert await title_of(app) == "One"
        await app.execute("s", WriteMetadata("free", True))


async def test_closing_does_not_wait_for_a_title_beyond_its_grace(tmp_path: Path) -> None:
    """The answer is saved, or waits for recovery, and the model is not asked again."""
    begun, driver = asyncio.Event(), ScriptedDriver(["done"])

    async def stuck(session: AgentSession) -> str:
        begun.set()
        await asyncio.sleep(60)
        return "never"

    async with connect(stuck, SqliteStore(tmp_path / "s.db"), driver=driver, grace=0.1) as app:
        run = await (await app.open("s")).start("One")
        await begun.wait()
        del run
    async with connect(None, SqliteStore(tmp_path / "s.db"), driver=driver) as app:
        await app.recover()
        assert [message.text for message in await app.history("s")] == ["One", "done"]
        assert await title_of(app) == "One"


def test_a_title_is_a_function() -> None:
    """Anything else is refused at once."""
    with pytest.raises(perdure.InvalidData):
        perdure.connect("memory://", title="Chat")  # type: ignore[arg-type]
