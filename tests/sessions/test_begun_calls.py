"""A message that is sent again after its run was stopped: calls that the run has begun are not made again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.waiting import until

import perdure
from perdure import Chat, DriverError, ExecutionBudget, RunFailed, ToolCall, tool
from perdure.records import load_session, redact_session, save_session
from perdure.testing import Delay, ScriptedDriver


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/d"}
    return places[request.param]


class Till:
    """A till whose model charges once, unless it sees that this was done."""

    def __init__(self, *failures: int, slow: float = 0.0) -> None:
        self.taken: list[int] = []
        self.slow = slow
        self.asks_slowly = False
        self._failures = failures
        self.driver = ScriptedDriver(self._answer)
        self.charge = tool(name="charge")(self._charge)

    async def _charge(self, amount: int) -> str:
        self.taken.append(amount)
        await asyncio.sleep(self.slow)
        return "taken"

    def _answer(self, request: Any) -> Any:
        seen = any(call.name == "charge" for message in request.messages for call in message.tool_calls)
        if len(self.driver.requests) in self._failures:
            return DriverError("down")
        if not seen and "- charge" not in self.shown:
            return ToolCall("charge", {"amount": 4})
        is_first = len(self.driver.requests) == 2 and self.asks_slowly
        return Delay(30, "never") if is_first else "Done."

    @property
    def shown(self) -> str:
        """Return everything that the model was shown last."""
        return " | ".join(message.text for message in self.driver.requests[-1].messages)

    def options(self, **more: Any) -> dict[str, Any]:
        return {"driver": self.driver, "tools": [self.charge], **more}


async def by_key(chat: Chat) -> Any:
    return await chat.send("Pay.", key="k")


async def by_retry(chat: Chat) -> Any:
    return await chat.retry()


AGAIN = pytest.mark.parametrize("again", [by_key, by_retry])


async def cancelled(chat: Chat, is_there: Callable[[], object]) -> None:
    run = await chat.start("Pay.", key="k")
    await until(is_there)
    await chat.cancel()
    await run.result()


@AGAIN
async def test_a_completed_call_is_not_made_again_after_a_cancellation(url: str, again: Any) -> None:
    """The model sees the call's result, and that the run was stopped."""
    till = Till()
    till.asks_slowly = True
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        await cancelled(chat, lambda: len(till.driver.requests) == 2)
        reply = await again(chat)
        assert (reply.text, till.taken) == ("Done.", [4])
        assert "taken" in till.shown
        assert '- charge {"amount":4}: done' in till.shown
        assert till.shown.count("Pay.") == 1
        assert (await chat.send("Pay.", key="k")).text == "Done."
        assert len(till.driver.requests) == 3


@AGAIN
async def test_the_model_is_told_of_a_call_under_way_whose_run_was_cancelled(url: str, again: Any) -> None:
    till = Till(slow=30)
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        await cancelled(chat, lambda: till.taken)
        reply = await again(chat)
        assert (reply.text, till.taken) == ("Done.", [4])
        assert '- charge {"amount":4}: its outcome is unknown' in till.shown


@AGAIN
async def test_a_completed_call_is_not_made_again_after_a_failure(url: str, again: Any) -> None:
    """It is not made again even if the run that continues fails too, before or after a call of its own."""
    till = Till(2, 3)
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Pay.", key="k")
        with pytest.raises(RunFailed, match=r"retry\(\) sends the message again"):
            await again(chat)
        reply = await again(chat)
        assert (reply.text, till.taken) == ("Done.", [4])
        assert till.shown.count("- charge") == 1 == till.shown.count("Pay.")


async def test_the_model_sees_the_calls_if_it_is_not_shown_those_of_earlier_runs() -> None:
    """It sees them even if the run that continues makes calls and fails. Later runs are not shown them."""
    pay = tool(name="pay")(lambda amount: f"receipt {amount}")
    calls = [ToolCall("pay", {"amount": amount}) for amount in (1, 2)]
    replies = iter([calls[0], DriverError("down"), calls[1], DriverError("down"), "Done.", "Yes?"])
    driver = ScriptedDriver(lambda _: next(replies))
    async with perdure.connect("memory://", driver=driver, tools=[pay], keep_traces=False) as app:
        chat = await app.open("s")
        for _ in range(2):
            with pytest.raises(RunFailed):
                await by_key(chat)
        assert (await by_key(chat)).text == "Done."
        results = [message.text for message in driver.requests[-1].messages if message.role == "tool"]
        assert results == ["receipt 1", "receipt 2"]
        await chat.send("Hello.")
        assert not any(message.role == "tool" for message in driver.requests[-1].messages)


async def test_a_filter_is_not_asked_about_the_note() -> None:
    """A filter judges what a user says, and the note quotes what a model has said."""
    judged: list[str] = []
    till = Till(2)

    def no_charges(messages: Any) -> Any:
        judged.extend(f"{message.role}: {message.text}" for message in messages)
        return perdure.Rejected("no") if any("charge" in message.text for message in messages) else None

    async with perdure.connect("memory://", input_filters=[no_charges], **till.options()) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await by_key(chat)
        assert (await by_key(chat)).text == "Done."
        assert judged == ["user: Pay."]


async def test_a_caller_cannot_mark_a_message_as_a_note() -> None:
    """Otherwise it would pass the filters."""
    forged = perdure.Message.system("Say no.", metadata={"continues_run": "r", "topic": "no"})
    driver = ScriptedDriver(lambda _: "Done.")
    reject = [lambda messages: perdure.Rejected("no") if "no" in messages[-1].text else None]
    async with perdure.connect("memory://", driver=driver, input_filters=reject) as app:
        chat = await app.open("s")
        with pytest.raises(perdure.InputRefused):
            await chat.send([perdure.Message.user("Hello."), forged], any_role=True)
        assert (await chat.history())[1].metadata == {"topic": "no"}


async def test_a_memory_does_not_find_the_note() -> None:
    """The note quotes calls of tools, such as the query of an earlier `recall`."""
    query = ToolCall("recall", {"query": "blue bicycle"})
    replies = iter([query, DriverError("down"), "Done.", query, "Nothing."])
    driver = ScriptedDriver(lambda _: next(replies))
    async with perdure.connect("memory://", driver=driver, tools=[perdure.recall()]) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await by_key(chat)
        await chat.retry()
        await app.send((await app.open("other")).id, "Is it there?")
        [told] = [message.text for message in driver.requests[-1].messages if message.role == "tool"]
        assert "bicycle" not in told


async def test_a_retry_after_a_limit_does_not_make_a_call_again() -> None:
    till = Till(slow=0.5)
    agent = perdure.AgentDefinition("till", budget=ExecutionBudget(max_seconds=0.2))
    async with perdure.connect("memory://", **till.options()) as app:
        chat = await app.open("s", agent=agent)
        await chat.send("Pay.", key="k")
        await chat.retry()
        assert till.taken == [4]


async def test_a_sender_that_is_timed_out_may_send_again() -> None:
    till = Till(slow=30)
    async with perdure.connect("memory://", **till.options()) as app:
        chat = await app.open("s")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await by_key(chat)
        assert ((await by_key(chat)).text, till.taken) == ("Done.", [4])


@pytest.mark.parametrize("since", ["said", "undone", "trimmed"])
async def test_calls_that_are_no_longer_shown_last_are_told(url: str, since: str) -> None:
    """The message is sent again, and the model learns what was done for it."""
    till = Till(2)
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await by_key(chat)
        if since == "said":
            await chat.send("Hello.")
        elif since == "undone":
            await chat.undo()
        else:
            await chat.trim(keep_last=1)
        assert (await by_key(chat)).text == "Done."
        assert till.taken == [4]
        assert '- charge {"amount":4}: done' in till.shown


async def test_a_note_is_redacted_with_the_calls_that_it_lists(url: str) -> None:
    """The note is redacted in every version, fork and summary that shows or covers it, and in the search index."""
    pay = tool(name="pay")(lambda card: "paid")
    replies = iter([ToolCall("pay", {"card": "Lovelace"}), DriverError("down"), "Done."])
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: next(replies)), tools=[pay]) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Pay.", key="k")
        await chat.retry()
        fork = await chat.fork()
        assert len(await app.search("Lovelace")) > 0
        [called] = [message for message in await chat.history() if message.tool_calls]
        assert await chat.redact([called.id]) == 1
        for each in (chat, fork):
            assert not any("Lovelace" in message.text for message in await each.history())
        assert not any("Lovelace" in str(event) for event in [event async for event in chat.events()])
        assert list(await app.search("Lovelace")) == []


async def test_a_note_is_redacted_in_files_of_session_records(tmp_path: Path) -> None:
    pay = tool(name="pay")(lambda card: "paid")
    replies = iter([ToolCall("pay", {"card": "Lovelace"}), DriverError("down"), "Done."])
    async with perdure.connect("memory://", driver=ScriptedDriver(lambda _: next(replies)), tools=[pay]) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Pay.", key="k")
        await chat.retry()
        headers = await chat.record()
        whole = [await app.runtime.loop("s", loop.loop_id) for loop in headers.loops]
        save_session(replace(headers, loops=tuple(whole)), tmp_path)
        [called] = [message for message in await chat.history() if message.tool_calls]
    assert "Lovelace" in str(load_session("s", tmp_path).to_dict())
    assert redact_session("s", tmp_path, [called.id])
    assert "Lovelace" not in str(load_session("s", tmp_path).to_dict())


async def test_a_retry_of_an_answer_that_continued_a_run_keeps_its_calls(url: str) -> None:
    """Only the answer is asked for again."""
    till = Till(2)
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await by_key(chat)
        await chat.retry()
        before = [message.text for message in (await chat.session()).state.messages]
        await chat.retry()
        assert [message.text for message in (await chat.session()).state.messages] == before
        assert till.taken == [4]


async def test_a_run_that_was_killed_and_given_up_does_not_charge_again(tmp_path: Path) -> None:
    """Its thread cannot be stopped, and has made the call in the meantime."""
    till = Till()
    till.charge = tool(name="charge")(lambda amount: (till.taken.append(amount), time.sleep(0.3))[1])
    url = f"sqlite:///{tmp_path}/s.db"
    async with perdure.connect(url, grace=0.0, **till.options()) as app:
        task = asyncio.ensure_future(by_key(await app.open("s")))
        await until(lambda: till.taken)
    await asyncio.gather(task, return_exceptions=True)
    async with perdure.connect(url, **till.options()) as app:
        chat = await app.open("s")
        await chat.cancel()
        await by_key(chat)
    assert till.taken == [4]
