"""A message that is sent again: in place of its run, in one commit, under the same key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import ConfigurationError, DriverError, InvalidData, RunFailed, ToolCall, ToolContext, tool
from perdure.fsck import fsck
from perdure.testing import Chunks, Delay, ScriptedDriver


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/d"}
    return places[request.param]


def numbered(*failures: int) -> ScriptedDriver:
    """Return a model that says what it was shown and the number of the request; requests of some numbers fail."""

    def answer(request: Any) -> Any:
        number = len(driver.requests)
        said = " | ".join(message.text for message in request.messages)
        return DriverError("down") if number in failures else f"{number}: {said}"

    driver = ScriptedDriver(answer)
    return driver


async def texts(chat: perdure.Chat) -> list[str]:
    return [message.text for message in (await chat.session()).state.messages]


async def test_a_key_whose_run_failed_asks_its_question_once(url: str) -> None:
    """The failed run leaves the view, and stays in the history."""
    async with perdure.connect(url, driver=numbered(1, 2)) as app:
        chat = await app.open("s")
        for _ in range(2):
            with pytest.raises(RunFailed):
                await chat.send("hi", key="k")
        reply = await chat.send("hi", key="k")
        assert reply.text == "3: hi"
        assert await texts(chat) == ["hi", "3: hi"]
        assert [message.text for message in await chat.history()].count("hi") == 3
        assert (await chat.send("hi", key="k")).text == "3: hi"


async def test_a_key_that_runs_again_leaves_what_others_have_said_since(url: str) -> None:
    async with perdure.connect(url, driver=numbered(1)) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
        await chat.inject({"role": "user", "content": "by the way"})
        await chat.send("hi", key="k")
        assert await texts(chat) == ["by the way", "hi", "2: by the way | hi"]


async def test_a_queued_message_whose_run_failed_is_asked_once(url: str) -> None:
    """Sent again behind another run, it removes its own failed run when its turn comes."""
    answers: list[Any] = [DriverError("down"), Delay(0.2, "other"), "fine"]
    driver = ScriptedDriver(lambda _: answers.pop(0))
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
        await chat.start("Other.")
        assert (await chat.send("hi", key="k", when_busy="queue")).queued
        await app.runtime.idle()
        assert await texts(chat) == ["Other.", "other", "hi", "fine"]


async def test_a_key_runs_again_after_a_compaction(url: str) -> None:
    """Covered messages stay covered."""
    async with perdure.connect(url, driver=numbered(2), compaction=None) as app:
        chat = await app.open("s")
        await chat.send("before")
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
        await chat.compact(compact_strategy="truncate", keep_last=1)
        await chat.send("hi", key="k")
        said = await texts(chat)
        assert said.count("hi") == 1
        assert said[-2] == "hi"


async def test_a_retry_takes_over_the_key_of_its_run(url: str) -> None:
    """The key returns the retry's answer, and repeats nothing."""
    driver = numbered(1, 2)
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
        with pytest.raises(RunFailed):
            await chat.retry()
        assert (await chat.retry()).text == "3: hi"
        found = await chat.result("k")
        assert found is not None
        assert found.text == (await chat.send("hi", key="k")).text == "3: hi"
        assert await texts(chat) == ["hi", "3: hi"]
        assert len(driver.requests) == 3
        with pytest.raises(InvalidData, match="another message"):
            await chat.send("ho", key="k")


async def test_a_retry_under_a_key_of_its_own_runs_once(url: str) -> None:
    """A second retry with its key returns the first one's result, and the first key keeps its own answer."""
    driver = numbered()
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        await chat.send("hi", key="k")
        for _ in range(2):
            assert (await chat.retry(key="again")).text == "2: hi"
        assert (await chat.result("k")).text == "1: hi"  # type: ignore[union-attr]
        assert await texts(chat) == ["hi", "2: hi"]


async def test_a_retry_is_asked_for_the_same_form(url: str) -> None:
    @dataclass
    class City:
        name: str

    driver = ScriptedDriver(lambda _: '{"name": "Bern"}')
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        await chat.send("Which city?", output=City, key="k")
        assert (await chat.retry()).value == {"name": "Bern"}
        assert (await chat.retry(output=City)).value == City("Bern")
        assert (await chat.send("Which city?", output=City, key="k")).value == City("Bern")
        assert len(driver.requests) == 3


async def test_one_undo_takes_a_retry_back(url: str) -> None:
    """The view before it is shown again; the next undo takes the message back."""
    async with perdure.connect(url, driver=numbered()) as app:
        chat = await app.open("s")
        await chat.send("hi")
        await chat.retry()
        await chat.undo()
        assert await texts(chat) == ["hi", "1: hi"]
        await chat.undo()
        assert await texts(chat) == []


async def test_a_retry_after_an_undo_sends_the_last_question_that_is_shown(url: str) -> None:
    async with perdure.connect(url, driver=numbered()) as app:
        chat = await app.open("s")
        await chat.send("a")
        await chat.send("b")
        await chat.undo()
        assert (await chat.retry()).text == "3: a"
        assert await texts(chat) == ["a", "3: a"]
        await chat.undo()
        await chat.undo()
        with pytest.raises(InvalidData, match="use send"):
            await chat.retry()


async def test_a_retry_can_be_started_and_streamed(url: str) -> None:
    """A started retry outlives its caller; a stream that is left stops it, unless it is detached."""
    driver = ScriptedDriver(lambda _: Chunks(("one ", "two ", Delay(0.1, ""), "three")))
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        await chat.send("Go.")
        run = await chat.start_retry()
        assert "".join([chunk async for chunk in run.stream()]) == (await run.result()).text == "one two three"
        async with aclosing(chat.stream_retry()) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                if chunk == "two ":
                    break
        assert (await chat.session()).state.messages[-1].is_incomplete
        chunks = [chunk async for chunk in chat.stream_retry(detach=True)]
        assert "".join(chunks) == "one two three"
        assert chunks[0].cursor is not None
        assert await texts(chat) == ["Go.", "one two three"]


def test_the_blocking_face_retries_too(tmp_path: Path) -> None:
    with perdure.connect_blocking(f"sqlite:///{tmp_path}/s.db", driver=numbered()) as app:
        chat = app.open("s")
        chat.send("hi")
        assert "".join(chat.stream_retry()) == "2: hi"
        assert chat.start_retry().result().text == "3: hi"
        assert "".join(app.stream_retry("s")) == "4: hi"


@tool
def who(caller: ToolContext[str]) -> str:
    """Say who asks."""
    return caller.context


async def outcome(made: Any) -> Any:
    """Return the result of a verb, or everything that a stream yields."""
    return [chunk async for chunk in made] if hasattr(made, "__anext__") else await made


@pytest.mark.parametrize("verb", ["retry", "start_retry", "stream_retry"])
async def test_a_retry_that_is_refused_changes_nothing(url: str, verb: str) -> None:
    async with perdure.connect(url, driver=numbered(), tools=[who]) as app:
        chat = await app.open("s")
        await chat.send("hi", context="ada")
        before = await chat.session()
        with pytest.raises(ConfigurationError, match="needs a context"):
            await outcome(getattr(chat, verb)())
        assert await chat.session() == before


async def test_a_retry_that_a_filter_refuses_shows_what_was_shown(url: str) -> None:
    allowed = [True]

    def once(messages: Any) -> Any:
        return None if allowed.pop() else perdure.Rejected("enough")

    async with perdure.connect(url, driver=numbered(), input_filters=[once]) as app:
        chat = await app.open("s")
        await chat.send("hi")
        allowed.append(False)
        with pytest.raises(perdure.InputRefused):
            await chat.retry()
        assert await texts(chat) == ["hi", "1: hi"]


@pytest.fixture
def kept(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


Again = Callable[[perdure.Chat], Any]
AGAIN: dict[str, Again] = {
    "retry": lambda chat: chat.start_retry(),
    "key": lambda chat: chat.start("hi", key="k"),
}


@pytest.mark.parametrize("verb", AGAIN)
async def test_a_repeated_run_that_was_killed_is_recovered_from_where_it_began(kept: str, verb: str) -> None:
    """It continues without the run that it repeats, under its key, and shows nothing twice."""
    async with perdure.connect(kept, driver=numbered(1)) as app:
        chat = await app.open("s")
        await chat.inject({"role": "user", "content": "before"})
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
    async with perdure.connect(kept, driver=ScriptedDriver([Delay(30, "never")]), grace=0.0) as app:
        await AGAIN[verb](await app.open("s"))
    driver = numbered()
    async with perdure.connect(kept, driver=driver) as app:
        chat = await app.open("s")
        assert (await app.recover()).resumed == ("s",)
        assert await texts(chat) == ["before", "hi", "1: before | hi"]
        assert (await chat.result("k")).text == "1: before | hi"  # type: ignore[union-attr]
        await chat.undo()
        assert await texts(chat) == ["before", "hi"]
        assert not (await fsck(app.store)).problems


async def test_a_fork_of_a_retrys_loop_begins_where_it_ended(kept: str) -> None:
    async with perdure.connect(kept, driver=numbered()) as app:
        chat = await app.open("s")
        await chat.send("before")
        await chat.send("hi")
        await chat.retry()
        loop = (await chat.record()).loops[-1]
        await chat.reset()
        fork = await chat.fork(loop=loop.loop_id)
        assert await texts(fork) == ["before", "1: before", "hi", "3: before | 1: before | hi"]


async def test_a_retry_of_a_run_that_waits_for_approval_follows_its_key(url: str) -> None:
    """After the retry and the approval, the key returns the answer."""
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    answers: list[Any] = [DriverError("down"), ToolCall("pay"), "Paid."]
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: answers.pop(0)), tools=[pay]) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Pay.", key="k")
        assert (await chat.retry()).pending_calls
        assert (await chat.send("Pay.", key="k")).pending_calls
        await chat.approve()
        assert (await chat.send("Pay.", key="k")).text == "Paid."


async def test_a_key_tells_that_it_is_running_again(url: str) -> None:
    """While a failed key runs again, its reply is queued and running, and no longer the failure."""
    answers: list[Any] = [DriverError("down"), Delay(0.2, "fine")]
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: answers.pop(0))) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("hi", key="k")
        run = await chat.start_retry()
        found = await chat.result("k")
        assert found is not None
        assert (found.queued, found.running) == (True, True)
        await run.result()
        assert (await chat.result("k")).text == "fine"  # type: ignore[union-attr]


async def test_two_retries_at_once_ask_the_question_once_each(url: str) -> None:
    """The second is refused while the first runs, or repeats the first one's result."""
    async with perdure.connect(url, driver=numbered()) as app:
        chat = await app.open("s")
        await chat.send("hi")
        outcomes = await asyncio.gather(chat.retry(), chat.retry(), return_exceptions=True)
        assert all(isinstance(each, perdure.Reply | perdure.SessionBusy) for each in outcomes)
        said = await texts(chat)
        assert (len(said), said[0]) == (2, "hi")
