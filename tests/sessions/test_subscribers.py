"""Subscribers of a session: called in order, alone in their failures, until they cancel or the session is closed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import perdure
from perdure import (
    AgentEnd,
    AgentStart,
    Compaction,
    DriverError,
    Redacted,
    SessionRecorder,
    SessionSaved,
    ToolCall,
    TurnEnd,
)
from perdure.model.loop_events import LoopEvent
from perdure.testing import ScriptedDriver


def look() -> str:
    return "seen"


def connect() -> perdure.Sessions:
    def reply(request: Any) -> Any:
        return ToolCall(name="look") if request.step == 0 else "done"

    return perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[look])


async def test_subscribers_hear_in_the_order_they_came() -> None:
    """Plain and async subscribers: each one ends before the next is called."""
    heard: list[str] = []

    async def slowly(event: object) -> None:
        await asyncio.sleep(0)
        heard.append("first")

    async with connect() as sessions:
        chat = await sessions.open()
        chat.subscribe(slowly)
        await sessions.subscribe(chat.id, lambda event: heard.append("second"))
        await chat.inject({"role": "user", "content": "hi"})
        assert heard
        assert heard == ["first", "second"] * (len(heard) // 2)


async def test_a_turn_end_comes_with_every_turn() -> None:
    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        chat.subscribe(heard.append)
        await chat.send("hi")
        assert len([event for event in heard if isinstance(event, TurnEnd)]) == 2
        assert isinstance(heard[-1], SessionSaved)


async def test_one_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: object) -> None:
        raise ValueError("no")

    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        chat.subscribe(fail)
        chat.subscribe(heard.append)
        with caplog.at_level(logging.CRITICAL, "perdure.events"):
            assert (await chat.send("hi")).text == "done"
        assert heard


async def test_one_that_cancels_hears_no_more() -> None:
    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        handle = chat.subscribe(heard.append)
        await chat.send("hi")
        before = len(heard)
        handle.cancel()
        handle.cancel()
        await chat.send("hi")
        assert len(heard) == before


async def test_a_fork_has_no_subscribers() -> None:
    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        chat.subscribe(heard.append)
        branch = await chat.fork()
        heard.clear()
        await branch.send("hi")
        assert heard == []


async def test_subscribers_survive_a_reset_and_not_a_close() -> None:
    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        handle = chat.subscribe(heard.append)
        await chat.reset()
        heard.clear()
        await chat.send("hi")
        assert heard
        await chat.close()
        heard.clear()
        await chat.send("hi")
        handle.cancel()
        assert heard == []


async def test_they_hear_their_own_session_only() -> None:
    async with connect() as sessions:
        chat, other, heard = await sessions.open(), await sessions.open(), []
        chat.subscribe(heard.append)
        await other.send("hi")
        assert heard == []


async def test_a_subscriber_may_use_the_session_it_listens_to() -> None:
    """Events of its own calls come in their turn."""
    async with connect() as sessions:
        chat = await sessions.open()
        lengths: list[int] = []

        async def on_saved(event: object) -> None:
            if isinstance(event, SessionSaved):
                lengths.append(await chat.length())

        chat.subscribe(on_saved)
        await chat.send("hi")
        assert lengths == [4]


async def test_events_are_heard_from_the_record_too() -> None:
    async with connect() as sessions:
        chat = await sessions.open()
        await chat.send("hi")
        kinds = [type(event).__name__ async for event in chat.events()]
        assert kinds[0] == "AgentStart"
        assert kinds.count("TurnEnd") == 2


async def test_they_hear_of_a_compaction_once_it_is_saved() -> None:
    """It is a loop of its own, the same on record and on the bus; a recorder makes the same of it."""
    async with connect() as sessions:
        chat, heard = await sessions.open(), []
        recorder = SessionRecorder()
        await chat.send("hi")
        await chat.send("ho")

        async def hear(event: object) -> None:
            if isinstance(event, LoopEvent):
                heard.append((event, (await chat.session()).version))

        before = (await chat.session()).version
        chat.subscribe(hear)
        chat.subscribe(recorder.on_event)
        await chat.compact(compact_strategy="truncate", keep_last=1)
        assert [type(event) for event, _ in heard] == [AgentStart, Compaction, AgentEnd]
        assert {version for _, version in heard} == {before + 1}
        told = [event async for event in chat.events()][-3:]
        assert [(type(event), event.seq, event.loop_id) for event in told] == [
            (type(event), event.seq, event.loop_id) for event, _ in heard
        ]
        (loop,) = recorder.checkpoint()[0].loops
        assert loop.compaction_block == (await chat.record()).loops[-1].compaction_block is not None


async def test_they_hear_of_a_compaction_that_failed_and_has_cost_something() -> None:
    """Subscribers get what is on record: a start and an end, with the tokens."""

    def reply(request: Any) -> Any:
        if request.messages[-1].text == "hi":
            return "a long answer " * 50
        return "done" if request.tools else ""

    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[look]) as sessions:
        chat, heard = await sessions.open(), []
        for _ in range(3):
            await chat.send("hi")
        chat.subscribe(heard.append)
        with pytest.raises(DriverError):
            await chat.compact(compact_strategy="llm", keep_last=1)
        told = [event for event in heard if isinstance(event, LoopEvent)]
        assert [type(event) for event in told] == [AgentStart, AgentEnd]
        assert told[-1].usage.total_tokens > 0


async def test_they_hear_of_a_redaction_once_it_is_done() -> None:
    """Subscribers of the session, and of an open fork that shows the message, get the ids, and not the content."""
    async with connect() as sessions:
        chat = await sessions.open()
        await chat.send("my secret")
        fork, other = await chat.fork(), await sessions.open()
        heard: dict[str, list[Any]] = {each.id: [] for each in (chat, fork, other)}
        said: list[str] = []

        async def read(event: object) -> None:
            if isinstance(event, Redacted):
                said.extend(message.text for message in await chat.history())

        chat.subscribe(read)
        for each in (chat, fork, other):
            each.subscribe(heard[each.id].append)
        first = (await chat.history())[0].id
        assert await chat.redact([first]) == 1
        assert [event for event in heard[chat.id] if isinstance(event, LoopEvent)] == [
            event async for event in chat.events(last=1)
        ]
        for each in (chat, fork):
            (event,) = [event for event in heard[each.id] if isinstance(event, Redacted)]
            assert (event.session_id, event.message_ids, event.loop_id) == (each.id, (first,), "")
        assert not any(isinstance(event, Redacted) for event in heard[other.id])
        assert said[0] == "[redacted]"
        await chat.redact([first])
