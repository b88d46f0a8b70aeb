"""Verbs beside each other: a retry beside a queue and a compaction, an approval beside a recovery, an erasure beside
runs, and a context that cannot be made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import (
    AgentSession,
    ConfigurationError,
    Message,
    RunFailed,
    SessionBusy,
    SessionId,
    SessionNotFound,
    ToolCall,
    ToolContext,
    TransientDriverError,
    tool,
)
from perdure.actions.inbox import QUEUE, Inbox, item_of
from perdure.protocols import ModelReply, ModelRequest, OnDelta
from perdure.stores.engine import Update
from perdure.testing import Delay, ScriptedDriver


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 's.db'}"


def texts(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


class Fails(ScriptedDriver):
    """A driver that fails the first time for each text, and answers it the second time."""

    def __init__(self, *, after: float = 0.0, held: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self._after = after
        self._held = {text: asyncio.Event() for text in held}
        super().__init__(self._answer)

    def release(self, text: str) -> None:
        """Let a held text be answered; until then its run is under way, however slow the machine is."""
        self._held[text].set()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        held = self._held.get(request.messages[-1].text)
        if held is not None:
            await held.wait()
        return await super().respond(request, on_delta)

    def _answer(self, request: Any) -> Any:
        text = request.messages[-1].text
        self.asked.append(text)
        error = TransientDriverError("test:model", "it is busy", status=529)
        return Delay(self._after, error if text == "First." and self.asked.count(text) == 1 else f"to {text}")


async def test_a_retry_goes_before_what_waits_and_loses_none_of_it(url: str) -> None:
    """A message that waits in the inbox is answered after the one that is sent again."""
    async with perdure.connect(url, driver=Fails()) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("First.")
        await Inbox(app.runtime.journal, chat.id).post(QUEUE, item_of([Message.user("Second.")]))  # type: ignore[arg-type]
        reply = await chat.retry()
        if reply.queued:
            await until(lambda: _is_shown(chat, "to First."))
        await until(lambda: _is_shown(chat, "to Second."))
        said = texts(await chat.session())
        assert sorted(said) == ["First.", "Second.", "to First.", "to Second."]
        assert said.index("First.") + 1 == said.index("to First.")


async def _is_shown(chat: perdure.Chat, text: str) -> bool:
    return text in texts(await chat.session())


async def test_a_retry_while_a_queued_message_is_answered_changes_nothing(url: str) -> None:
    driver = Fails(held=["First.", "Second."])
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        run = await chat.start("First.")
        await chat.send("Second.", when_busy="queue")
        driver.release("First.")
        with pytest.raises(RunFailed):
            await run.result()
        await until(lambda: app.runtime.journal.is_claimed(chat.id))  # type: ignore[union-attr]
        before = texts(await chat.session())
        with pytest.raises(SessionBusy):
            await chat.retry()
        assert texts(await chat.session()) == before
        driver.release("Second.")
        await until(lambda: _is_shown(chat, "to Second."))


async def test_a_retry_that_is_overtaken_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run begins at that moment: the failed one is still shown, and can be retried later."""
    driver = Fails(held=["Other."])
    async with perdure.connect(url, driver=driver) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("First.")
        execute = app.runtime.execute
        others: list[Any] = []

        async def overtaken(session_id: str, action: Any, **options: Any) -> AgentSession:
            if type(action).__name__ == "RetryLastRun":
                others.append(await chat.start("Other."))
            return await execute(session_id, action, **options)

        monkeypatch.setattr(app.runtime, "execute", overtaken)
        with pytest.raises(SessionBusy):
            await chat.retry(when_busy="queue")
        driver.release("Other.")
        await others[0].result()
        assert texts(await chat.session()) == ["First.", "Other.", "to Other."]


@pytest.mark.parametrize("keep_last", [1, 2, 4])
async def test_a_retry_after_a_compaction_sends_the_last_message_again(url: str, keep_last: int) -> None:
    """The removed run stays in what the compaction covers, and only there."""
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: "an answer"), compaction=None) as app:
        chat = await app.open("s")
        await chat.send("First.")
        await chat.send("Second.")
        await chat.compact(compact_strategy="truncate", keep_last=keep_last)
        shown = texts(await chat.session())
        assert (await chat.retry()).text == "an answer"
        said = texts(await chat.session())
        assert said[-2:] == ["Second.", "an answer"]
        assert said.count("Second.") == 1
        assert [text for text in said[:-2] if text not in ("First.", "an answer")] == [
            text for text in shown if text not in ("First.", "Second.", "an answer")
        ]
        assert [message.text for message in await chat.history()].count("Second.") == 2


@pytest.mark.parametrize(
    ("verb", "given", "left"), [("trim", (1,), []), ("reset", (), []), ("trim", (3,), ["an answer"])]
)
async def test_a_retry_shows_nothing_again_that_was_cut_since(
    url: str, verb: str, given: tuple[int, ...], left: list[str]
) -> None:
    """The run's messages are removed from the present view, not from the one that the run has left."""
    async with perdure.connect(url, driver=ScriptedDriver(lambda _: "an answer"), compaction=None) as app:
        chat = await app.open("s")
        await chat.send("First.")
        await chat.send("Second.")
        await getattr(chat, verb)(*given)
        await chat.retry()
        assert texts(await chat.session()) == [*left, "Second.", "an answer"]


async def test_a_retry_of_a_run_that_was_approved_begins_from_its_message(url: str) -> None:
    """Its calls, their results and its answer leave the view, and it waits for a person again."""
    till = Till()
    till.go.set()
    driver = ScriptedDriver([ToolCall("pay", {"amount": 7}), "It is done."])
    async with perdure.connect(url, driver=driver, tools=[till.tool]) as app:
        chat = await app.open("s")
        await chat.send("Pay.")
        assert (await chat.approve()).text == "It is done."
        reply = await chat.retry()
        assert len(reply.pending_calls) == 1
        assert [message.role for message in (await chat.session()).state.messages] == ["user", "assistant"]
        assert till.paid == 1


async def test_a_compaction_beside_a_retry_waits_or_is_refused(url: str) -> None:
    """In either order, the message is answered once more, and nothing else is changed."""
    driver = Fails(after=0.1)
    async with perdure.connect(url, driver=driver, compaction=None) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("First.")
        retried, compacted = await asyncio.gather(
            chat.retry(), chat.compact(compact_strategy="truncate", keep_last=1), return_exceptions=True
        )
        assert isinstance(compacted, int | SessionBusy | perdure.SessionConflict)
        if isinstance(retried, SessionBusy):  # then nothing was taken back
            retried = await chat.retry()
        assert isinstance(retried, perdure.Reply)
        await until(lambda: _is_shown(chat, "to First."))
        assert driver.asked == ["First.", "First."]


class Till:
    """A tool that needs a person's approval, and that is held until the test lets it go."""

    def __init__(self) -> None:
        self.begun, self.go, self.paid = asyncio.Event(), asyncio.Event(), 0
        self.tool = tool(needs_approval=True)(self.pay)

    async def pay(self, amount: int) -> str:
        """Pay."""
        self.paid += 1
        self.begun.set()
        await self.go.wait()
        return f"paid {amount}"


async def lapse(store: Any) -> None:
    """End the lease of a claim, as if its process had been stopped for long."""

    def job() -> Any:
        return (yield Update("session", {"expires": 1.0}, {"id": "s"}))

    assert await store._engine.run(job, "write") == [(1,)]


async def test_an_approval_that_another_process_recovers_is_told_so_and_pays_once(url: str) -> None:
    """The run of the approval is stopped for longer than its lease, and is recovered elsewhere meanwhile."""
    till, other = Till(), Till()
    script = [ToolCall("pay", {"amount": 7}), "It is done."]
    async with (
        perdure.connect(url, driver=ScriptedDriver(script), tools=[till.tool]) as here,
        perdure.connect(url, driver=ScriptedDriver(script), tools=[other.tool]) as elsewhere,
    ):
        chat = await here.open("s")
        assert (await chat.send("Pay.")).pending_calls
        listening = asyncio.create_task(_all_of(chat.stream_approve()))
        await till.begun.wait()
        await lapse(here.store)
        report = await elsewhere.recover()
        assert report.resumed == ("s",)
        till.go.set()
        with pytest.raises((perdure.ClaimLost, perdure.SessionConflict, SessionBusy)):
            await listening
        assert (till.paid, other.paid) == (1, 0)  # the call's outcome is unknown, so it is not made again
        said = texts(await here.session("s"))
        assert said[-1] == "It is done."
        assert said.count("It is done.") == 1
        assert (await elsewhere.record("s")).loops[-1].status == "completed"
        assert not await here.runtime.journal.is_claimed("s")  # type: ignore[union-attr]
        till.go.clear()


async def _all_of(chunks: Any) -> list[str]:
    return [chunk async for chunk in chunks]


@tool
def whoami(context: ToolContext[str]) -> str:
    """Tell who is asking."""
    return context.context


def broken(session: AgentSession, data: Any) -> str:
    raise LookupError("the directory of users is away")


def mended(session: AgentSession, data: Any) -> str:
    return f"{data['user']} again"


async def test_a_context_that_cannot_be_made_lets_a_killed_run_wait(url: str) -> None:
    """Recovery says why, continues with the others, and leaves the run unchanged; a good function recovers it."""
    script = [ToolCall("whoami", {}), Delay(30, "never")]
    async with perdure.connect(url, driver=ScriptedDriver(script), tools=[whoami], grace=0.05) as app:
        for name in ("s", "t"):
            await (await app.open(name)).start("Who?", context="ada", context_data={"user": "ada"})
            await until(lambda name=name: _has_result(app, name))  # type: ignore[misc]
    answers = ScriptedDriver([ToolCall("whoami", {}), "done"])
    async with perdure.connect(url, driver=answers, tools=[whoami], context=broken) as app:
        before = [await app.store.dump(name) for name in ("s", "t")]  # type: ignore[attr-defined]
        report = await app.recover()
        assert len(report.errors) == 2
        for error in report.errors:
            assert isinstance(error, ConfigurationError)
            assert error.missing == "context"
            assert "LookupError: the directory of users is away" in str(error)
        with pytest.raises(ConfigurationError, match="directory of users"):
            await app.send("s", "And?")
        assert [await app.store.dump(name) for name in ("s", "t")] == before  # type: ignore[attr-defined]
    async with perdure.connect(url, driver=answers, tools=[whoami], context=mended) as app:
        assert sorted((await app.recover()).resumed) == ["s", "t"]
        assert texts(await app.session("s"))[-1] == "done"


async def _has_result(app: perdure.Sessions, name: str) -> bool:
    return any([isinstance(event, perdure.ToolExecutionEnd) async for event in app.events(name)])


async def test_a_context_that_cannot_be_made_begins_no_run(url: str) -> None:
    async with perdure.connect(url, driver=ScriptedDriver(["done"]), tools=[whoami], context=broken) as app:
        chat = await app.open("s")
        with pytest.raises(ConfigurationError, match="LookupError"):
            await chat.send("Who?", key="k")
        assert (await chat.session()).version == 1
        assert await chat.result("k") is None
        assert (await chat.send("Who?", key="k", context="ada")).text == "done"


async def test_a_queued_message_waits_until_its_context_can_be_made(url: str) -> None:
    """It is neither lost nor refused: the next connection that can make one sends it."""
    driver = ScriptedDriver(lambda request: Delay(0.1, f"to {request.messages[-1].text}"))
    async with perdure.connect(url, driver=driver, tools=[whoami], context=broken) as app:
        chat = await app.open("s")
        run = await chat.start("First.", context="ada")
        await chat.send("Second.", when_busy="queue", context="ada", context_data={"user": "ada"})
        await run.result()
        await asyncio.sleep(0.3)
        assert texts(await chat.session()) == ["First.", "to First."]
        assert len(await app.store.read("s", inbox=True)) == 1  # type: ignore[attr-defined]
    async with perdure.connect(url, driver=driver, tools=[whoami], context=mended) as app:
        await app.send("s", "Third.", when_busy="queue", context_data={"user": "bob"})
        chat = await app.open("s")
        await until(lambda: _is_shown(chat, "to Second."))
        await until(lambda: _is_shown(chat, "to Third."))


async def test_an_owner_is_erased_beside_runs_and_queues(url: str) -> None:
    """All runs stop, queued messages are not sent, and everybody who waits gets an error."""
    driver = ScriptedDriver(lambda request: Delay(30, "too late"))
    async with perdure.connect(url, driver=driver) as app:
        ann, bob = app.of("ann"), app.of("bob")
        chats = [await ann.open(f"s-{number}") for number in range(3)]
        runs = [await chat.start("Go.", key="k") for chat in chats]
        await chats[0].send("Then this.", when_busy="queue")
        await chats[1].fork("fork")
        theirs = await bob.open("s-0")
        his = await theirs.start("Go.")
        receipt = await app.erase_owner("ann")
        assert receipt.is_complete
        assert len(receipt.erased) == 4
        ended = await asyncio.gather(*(run.result() for run in runs), return_exceptions=True)
        assert all(isinstance(each, perdure.PerdureError | asyncio.CancelledError | perdure.Reply) for each in ended)
        await asyncio.sleep(0.3)
        assert not [*await app.list(owner="ann"), *await app.list(owner="ann", status="deleted")]
        assert not his.is_done
        await his.cancel()
        for chat in chats:
            with pytest.raises(SessionNotFound):
                await chat.send("Are you there?")
    async with perdure.connect(url, driver=driver) as app:
        assert not (await app.recover()).resumed
        assert len(await app.list()) == 1


async def test_a_started_run_is_not_erased_under_its_caller(url: str) -> None:
    """It raises SessionBusy until the run is stopped; then nothing of it is left, and its handle says so."""
    async with perdure.connect(url, driver=ScriptedDriver([Delay(30, "too late")])) as app:
        chat = await app.open("s")
        run = await chat.start("Go.")
        with pytest.raises(SessionBusy):
            await chat.erase()
        assert not run.is_done
        assert await run.cancel()
        assert list(await chat.erase()) == ["s"]
        assert not await app.exists("s")
        with pytest.raises(SessionNotFound):
            await _all_of(chat.follow())
    async with perdure.connect(url, driver=ScriptedDriver(["new"])) as app:
        assert not (await app.recover()).resumed
        assert texts((await (await app.open("s")).send("Hello?")).session) == ["Hello?", "new"]


async def test_no_fork_comes_to_be_anothers(url: str) -> None:
    """A fork belongs to its parent's owner, whatever its name, the action or its tags say."""
    async with perdure.connect(url, driver=ScriptedDriver(["hello"])) as app:
        ann, bob = app.of("ann"), app.of("bob")
        await (await ann.open("s")).send("Hi.")
        await bob.open("s")
        for name in ("other", SessionId.under("bob", "s"), SessionId.under("bob", "new")):
            fork = await ann.fork("s", name)
            assert (await app.info(fork.id)).owner == "ann"
        by_admin = await app.fork(SessionId.under("ann", "s"), SessionId.under("bob", "gift"))
        assert (await app.info(by_admin.id)).owner == "ann"
        assert not await bob.exists("gift")
        assert len(await bob.list()) == 1
        assert len((await app.erase_owner("ann")).erased) == 5
        assert not await app.exists(by_admin.id)
