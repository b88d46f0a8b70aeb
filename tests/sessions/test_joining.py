"""Answers that another run gives: the same key while its run is under way, and messages that are queued."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import perdure
from perdure import DriverError, InvalidData, MemoryStore, RunFailed, RunInterrupted, SessionBusy, ToolCall, tool
from perdure.actions.inbox import QUEUE, Inbox, item_of
from perdure.sessions.joining import Joining
from perdure.testing import Chunks, Delay, ScriptedDriver

SLOW = Chunks(("one ", Delay(0.15, "two "), Delay(0.15, "three")))


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/d"}
    return places[request.param]


async def heard(chunks: Any) -> tuple[str, Any]:
    """Return the text of a stream as a browser shows it, and the reply at its end."""
    text, reply = "", None
    async for chunk in chunks:
        text = text[: chunk.offset] if chunk.restarts else text + chunk
        reply = chunk.reply or reply
    return text, reply


@pytest.mark.parametrize("when_busy", ["raise", "queue"])
async def test_the_same_key_during_its_run_waits_for_that_run(url: str, when_busy: Any) -> None:
    """It is sent, streamed and started: the agent runs once, and all get its answer from the beginning."""
    driver = ScriptedDriver([SLOW])
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        first = await chat.start("Go.", key="k")
        started = await chat.start("Go.", key="k", when_busy=when_busy)
        sent, streamed, listened = await asyncio.gather(
            chat.send("Go.", key="k", when_busy=when_busy),
            heard(chat.stream("Go.", key="k", when_busy=when_busy)),
            heard(started.stream()),
        )
        assert sent.text == (await first.result()).text == (await started.result()).text == "one two three"
        assert (streamed[0], streamed[1].text) == (listened[0], listened[1].text) == ("one two three",) * 2
        assert len(driver.requests) == 1
        assert [message.text for message in (await chat.session()).state.messages] == ["Go.", "one two three"]


async def test_two_who_send_a_key_at_once_get_one_answer(url: str) -> None:
    driver = ScriptedDriver(lambda _: Delay(0.1, f"answer {len(driver.requests)}"))
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        replies = await asyncio.gather(*(chat.send("x", key="g") for _ in range(4)))
        assert [reply.text for reply in replies] == ["answer 1"] * 4


async def test_another_message_under_a_key_that_is_under_way_is_refused(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver([SLOW])) as app:
        chat = await app.open("s")
        run = await chat.start("Go.", key="k")
        await chat.send("Later.", key="l", when_busy="queue")
        for key in ("k", "l"):
            with pytest.raises(InvalidData, match="another message"):
                await chat.send("Stop.", key=key, when_busy="queue")
        await run.result()


@pytest.mark.sample(3)
async def test_who_joins_a_run_does_not_stop_it(url: str) -> None:
    """A caller that leaves the stream or stops waiting does not stop the run."""
    async with perdure.connect(url, driver=ScriptedDriver([Chunks(("one ", Delay(1.5, "two")))])) as app:
        chat = await app.open("s")
        run = await chat.start("Go.", key="k")
        async for _ in chat.stream("Go.", key="k"):
            break
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(chat.send("Go.", key="k"), 0.01)
        assert await (await chat.start("Go.", key="k")).cancel()
        assert (await run.result()).text == "one two"


async def test_who_joins_a_run_is_told_that_it_failed(url: str) -> None:
    """The failure is raised, and the run is not repeated."""
    driver = ScriptedDriver([Delay(0.1, DriverError("down"))])  # type: ignore[arg-type]
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        outcomes = await asyncio.gather(*(chat.send("x", key="g") for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [RunFailed] * 3
        assert len(driver.requests) == 1


async def test_who_joins_a_run_gets_the_calls_that_wait(url: str) -> None:
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    driver = ScriptedDriver([Delay(0.1, ToolCall("pay"))])  # type: ignore[arg-type]
    async with perdure.connect(url, driver=driver, tools=[pay]) as app:
        chat = await app.open("s")
        replies = await asyncio.gather(*(chat.send("Pay.", key="g") for _ in range(2)))
        assert [len(reply.pending_calls) for reply in replies] == [1, 1]


async def test_a_queued_message_is_waited_for(url: str) -> None:
    """Its stream has its own text from the beginning, and its result is its own answer, then and later."""
    answers = [SLOW, Chunks(("four ", Delay(0.1, "five"))), "six"]
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: answers.pop(0))) as app:
        chat = await app.open("s")
        run = await chat.start("First.")
        with_key = await chat.start("Second.", key="q", when_busy="queue")
        without = await chat.start("Third.", when_busy="queue")
        assert (await chat.send("Second.", key="q", when_busy="queue")).queued  # returns at once, not posted again
        joined = asyncio.create_task(chat.send("Second.", key="q"))
        text, reply = await heard(with_key.stream())
        assert (text, reply.text, reply.queued) == ("four five", "four five", False)
        assert (await joined).text == "four five"
        assert (await without.result()).text == "six"
        assert (await with_key.result()).text == "four five"
        assert (await run.result()).text == "one two three"
        said = [message.text for message in (await chat.session()).state.messages if message.role == "user"]
        assert said == ["First.", "Second.", "Third."]
        chunks = [chunk async for chunk in with_key.stream()]
        assert all(chunk.cursor is not None for chunk in chunks)
        rest = [chunk async for chunk in chat.follow(after=chunks[0].cursor)]
        assert "".join([chunks[0], *rest]) == "four five"


async def test_a_queued_message_that_fails_raises_from_its_run(url: str) -> None:
    answers: list[Any] = [Delay(0.1, "fine"), DriverError("down")]
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: answers.pop(0))) as app:
        chat = await app.open("s")
        await chat.start("First.")
        queued = await chat.start("Second.", when_busy="queue")
        with pytest.raises(RunFailed, match="down"):
            await queued.result()


async def test_a_queued_message_that_can_never_be_sent_is_refused(url: str) -> None:
    """Its key is used for another message by the time of its turn: waiting for it raises InputRefused."""
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: Delay(0.1, "fine"))) as app:
        chat, journal = await app.open("s"), app.runtime.journal
        assert journal is not None
        await chat.start("First.")
        queued = await chat.start("Second.", key="q", when_busy="queue")
        item = await Inbox(journal, "s").post(QUEUE, item_of([perdure.Message.user("Else.")], "q"))  # as in a race
        late = await chat.start("Third.", when_busy="queue")
        joining = Joining(journal, chat.id, item, app._resume)
        with pytest.raises(perdure.InputRefused, match="another message"):
            _ = [chunk async for chunk in joining.chunks()]
        assert (await queued.result()).text == (await late.result()).text == "fine"


async def test_leaving_the_connection_ends_the_wait(tmp_path: Path) -> None:
    """The wait ends after the grace; what is queued stays queued, and the next connection answers it."""
    url = f"sqlite:///{tmp_path}/s.db"
    async with perdure.connect(url, driver=ScriptedDriver([Delay(30, "never")]), grace=0.05) as app:
        chat = await app.open("s")
        await chat.start("First.", key="k")
        queued = await chat.start("Second.", key="q", when_busy="queue")
        joined = asyncio.create_task(chat.send("First.", key="k"))
        await asyncio.sleep(0.1)
    for wait in (queued.result(), joined):
        with pytest.raises(RunInterrupted):
            await wait
    async with perdure.connect(url, driver=ScriptedDriver(lambda request: f"to {request.messages[-1].text}")) as app:
        assert (await app.send("s", "Second.", key="q")).text == "to Second."
        assert (await app.result("s", "k")).text == "to First."  # type: ignore[union-attr]


async def test_a_key_that_is_answered_in_the_moment_of_its_claim_has_that_answer() -> None:
    """The run that was in the way is over by the time the caller looks for it."""

    class Overtaken(MemoryStore):
        other: Callable[[], Awaitable[Any]] | None = None

        async def claim(self, session_id: str, **options: Any) -> Any:
            if self.other is not None:
                answer, self.other = self.other, None
                await answer()
                raise SessionBusy(session_id, "another")
            return await super().claim(session_id, **options)

    driver = ScriptedDriver(["Once."])
    async with Overtaken() as store, perdure.connect(store, driver=driver) as app:
        chat = await app.open("s")
        store.other = lambda: chat.send("Hi.", key="k")
        assert (await chat.send("Hi.", key="k")).text == "Once."
        assert len(driver.requests) == 1


ELSEWHERE = """
import asyncio, sys
import perdure
from perdure.sessions.joining import Joining
from perdure.testing import Chunks, Delay, ScriptedDriver

async def main():
    parts = [Delay(0.2, f"part {number} ") for number in range(5)]
    async with perdure.connect(sys.argv[1], driver=ScriptedDriver([Chunks(parts)])) as app:
        run = await (await app.open("s")).start("Go.", key="k")
        print("begun", flush=True)
        await run.result()

asyncio.run(main())
"""
WHOLE = "".join(f"part {number} " for number in range(5))


async def elsewhere(url: str) -> asyncio.subprocess.Process:
    """Start another process, and return it once its run has begun."""
    given = [sys.executable, "-c", dedent(ELSEWHERE), url]
    process = await asyncio.create_subprocess_exec(*given, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    return process


async def test_a_key_whose_run_is_in_another_process_waits_for_it(tmp_path: Path) -> None:
    """A send, a stream and a start in this process run nothing here."""
    url = f"sqlite:///{tmp_path}/s.db"
    process = await elsewhere(url)
    driver = ScriptedDriver(["no"])
    async with perdure.connect(url, driver=driver) as app:
        started = await app.start("s", "Go.", key="k")
        sent, streamed = await asyncio.gather(app.send("s", "Go.", key="k"), heard(app.stream("s", "Go.", key="k")))
        assert sent.text == streamed[0] == (await started.result()).text == WHOLE
        assert driver.requests == []
    assert await process.wait() == 0


async def test_a_key_whose_run_is_killed_in_another_process_is_recovered(tmp_path: Path) -> None:
    """The waiting process recovers it, and takes back the shown text where the answer begins again."""
    url = f"sqlite:///{tmp_path}/s.db"
    process = await elsewhere(url)
    async with perdure.connect(url, driver=ScriptedDriver(["at last"])) as app:
        started = await app.start("s", "Go.", key="k")
        queued = await app.start("s", "And then?", when_busy="queue")
        waiting = asyncio.create_task(heard(started.stream()))
        await asyncio.sleep(0.3)
        process.kill()
        await process.wait()
        text, reply = await asyncio.wait_for(waiting, 20)
        assert (text, reply.text) == ("at last", "at last")
        assert (await queued.result()).text == "at last"
