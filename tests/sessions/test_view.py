"""A page that is loaded in the middle of a conversation: what it shows, and what it hears from there on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sessions.test_follow import HALF, KINDS, SLOW, WORDS, all_of, connected, shown, store_of
from tests.waiting import until

import perdure
from perdure import (
    LongestAnswer,
    MemoryStore,
    Message,
    RunFailed,
    SendParallel,
    SessionNotFound,
    Sessions,
    ToolCall,
    View,
    tool,
)
from perdure.protocols import SessionStore
from perdure.testing import Chunks, Delay, FailingStore, ScriptedDriver


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


SAID = "".join(WORDS)
ASKS = Message.assistant("May I? ", tool_calls=[ToolCall("pay", {"amount": 3}, id="call-1")])


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def page(view: View) -> tuple[str, list[str], list[str], str]:
    """Return what a page shows at first."""
    return view.activity, texts(view.messages), texts(view.asked), view.text


async def heard_after(sessions: Sessions, view: View, text: str | None = None) -> str:
    """Return the text of the run that a page gets when it follows from the view on."""
    return shown(await all_of(sessions.follow("s", after=view.cursor)), view.text if text is None else text)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_page_that_is_loaded_during_a_run(kind: str, tmp_path: Path) -> None:
    """It has the earlier messages, the question and the answer so far; following from its cursor gives the rest."""
    async with connected(kind, tmp_path, ScriptedDriver(lambda request: SLOW)) as (app, elsewhere):
        chat = await app.open("s")
        assert page(await elsewhere.view("s")) == ("idle", [], [], "")
        await chat.send("One")
        before = await elsewhere.view("s")
        assert page(before) == ("idle", ["One", SAID], [], "")
        run = await chat.start("Two")
        await chat.send("Three", when_busy="queue")
        await until(lambda: _has_said(elsewhere))
        view = await elsewhere.view("s")
        assert page(view)[:3] == ("running", ["One", SAID], ["Two"])
        assert (texts(view.queued), view.session.version) == (["Three"], 2)
        assert SAID.startswith(view.text)
        assert len(view.text) < len(SAID)
        assert await heard_after(elsewhere, view) == SAID
        assert await heard_after(elsewhere, before) == SAID
        await run.result()
        await app.runtime.idle()
        after = await elsewhere.view("s")
        assert page(after) == ("idle", ["One", SAID, "Two", SAID, "Three", SAID], [], "")
        assert (after.queued, await all_of(elsewhere.follow("s", after=after.cursor))) == ((), [""])


async def _has_said(sessions: Sessions) -> bool:
    return len((await sessions.view("s")).text) > 5


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_run_that_waits_for_approval_is_shown_with_its_calls(kind: str, tmp_path: Path) -> None:
    """It stays the run under way until it has ended: before the decision, after it, and beside a compaction."""
    driver = ScriptedDriver(lambda request: SLOW if request.step else ASKS)
    async with connected(kind, tmp_path, driver, tools=[pay]) as (app, elsewhere):
        chat = await app.open("s")
        again = Message.user("Pay.")
        await chat.inject([again, Message.assistant("Not now.")])
        await chat.send(again)
        view = await elsewhere.view("s")
        assert page(view) == ("waiting", ["Pay.", "Not now."], ["Pay."], "May I? ")
        assert [call.name for call in view.pending_calls] == ["pay"]
        assert texts(view.said) == ["May I? "]
        deciding = chat.stream_approve([view.pending_calls[0].digest], detach=True)
        await anext(deciding)
        running = await elsewhere.view("s")
        assert page(running)[:3] == ("running", ["Pay.", "Not now."], ["Pay."])
        assert running.pending_calls == ()
        assert [message.role for message in running.said] == ["assistant", "tool"]
        for each in (view, running):
            assert await heard_after(elsewhere, each) == "May I? " + SAID
        assert page(await elsewhere.view("s"))[1] == ["Pay.", "Not now.", "Pay.", "May I? ", "paid 3", SAID]


async def test_a_session_that_waits_is_shown_so_though_it_was_compacted(tmp_path: Path) -> None:
    async with connected("sqlite", tmp_path, ScriptedDriver([ASKS]), tools=[pay]) as (app, elsewhere):
        chat = await app.open("s")
        await chat.inject([Message.user("Hi."), Message.assistant("Hello.")])
        await chat.send("Pay.")
        await chat.compact(keep_last=2, compact_strategy="truncate")
        view = await elsewhere.view("s")
        assert (view.activity, texts(view.asked), view.text) == ("waiting", ["Pay."], "May I? ")
        assert not {message.id for message in view.messages} & {message.id for message in (*view.asked, *view.said)}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_run_is_shown_until_it_is_recovered(kind: str, tmp_path: Path) -> None:
    """A page that follows it gets the recovered answer, whole and once."""
    async with store_of(kind, tmp_path) as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), grace=0.0) as app:
            await (await app.open("s")).start("Tell me.")
            await until(lambda: _has_said(app))
        async with perdure.connect(store, driver=ScriptedDriver(["A new beginning."])) as app:
            view = await app.view("s")
            assert page(view) == ("killed", [], ["Tell me."], "Once upon a time")
            follower = asyncio.ensure_future(heard_after(app, view))
            await app.recover("s")
            assert await follower == "A new beginning."
            after = await app.view("s")
            assert page(after) == ("idle", ["Tell me.", "A new beginning."], [], "")


async def test_what_steers_a_run_waits_until_it_is_taken_in(tmp_path: Path) -> None:
    """After that it is among the run's own messages."""

    @tool
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(0.3)
        return "waited"

    driver = ScriptedDriver(lambda request: SLOW if request.step else ToolCall("slow", {}))
    async with connected("sqlite", tmp_path, driver, tools=[slow]) as (app, elsewhere):
        chat = await app.open("s")
        await chat.start("Go.")
        await chat.send("Faster!", when_busy="steer")
        view = await elsewhere.view("s")
        assert (texts(view.asked), texts(view.queued), view.text) == (["Go."], ["Faster!"], "")
        await until(lambda: _has_said(elsewhere))
        view = await elsewhere.view("s")
        assert (texts(view.asked), texts(view.queued)) == (["Go."], [])
        assert texts(view.said) == ["", "waited", "Faster!"]


async def test_of_a_parallel_evaluation_the_question_is_shown(tmp_path: Path) -> None:
    """Nobody knows yet which answer will be selected."""
    driver = ScriptedDriver(lambda request: Delay(0.3, f"by {request.model.name}"))
    async with connected("sqlite", tmp_path, driver) as (app, elsewhere):
        await app.open("s")
        action = SendParallel("Go.", app.loops, configs=["a", "long"], strategy=LongestAnswer())
        work = asyncio.ensure_future(app.execute("s", action))
        await until(lambda: _is_asked(elsewhere))
        view = await elsewhere.view("s")
        assert page(view) == ("running", [], ["Go."], "")
        assert view.said == ()
        assert await heard_after(elsewhere, view) == "by long"
        await work
        after = await elsewhere.view("s")
        assert page(after) == ("idle", ["Go.", "by long"], [], "")
        assert await all_of(elsewhere.follow("s", after=after.cursor)) == [""]


async def _is_asked(sessions: Sessions) -> bool:
    return bool((await sessions.view("s")).asked)


async def test_a_run_that_failed_is_over(tmp_path: Path) -> None:
    """Its question is shown; following it gives the same error again."""
    async with connected("sqlite", tmp_path, ScriptedDriver([perdure.DriverError("no line")])) as (app, elsewhere):
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Go.")
        view = await elsewhere.view("s")
        assert page(view) == ("idle", ["Go."], [], "")
        with pytest.raises(RunFailed):
            await all_of(elsewhere.follow("s", after=view.cursor))


async def test_what_was_undone_is_not_shown_again(tmp_path: Path) -> None:
    """A page that follows from there gets the next run only."""
    async with connected("sqlite", tmp_path, ScriptedDriver(lambda request: "Answer.")) as (app, elsewhere):
        chat = await app.open("s")
        await chat.send("One")
        await chat.undo()
        view = await elsewhere.view("s")
        assert page(view) == ("idle", [], [], "")
        await chat.send("Two")
        assert await heard_after(elsewhere, view) == "Answer."


async def test_a_session_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    async with connected("sqlite", tmp_path, ScriptedDriver(["Hello."])) as (app, elsewhere):
        for sessions in (app, elsewhere, app.of("ada")):
            with pytest.raises(SessionNotFound):
                await sessions.view("s")
        assert len(await app.list()) == 0
        await (await app.of("ada").open("s")).send("Hi.")
        with pytest.raises(SessionNotFound):
            await elsewhere.view("s")


async def test_a_store_without_a_journal_shows_what_this_process_runs() -> None:
    store = MemoryStore()
    names = [name for name in vars(SessionStore) if not name.startswith("_")]
    bare: Any = type("Bare", (), {name: staticmethod(getattr(store, name)) for name in names})()
    async with store, perdure.connect(bare, driver=ScriptedDriver([Delay(0.1, "Hello."), ASKS]), tools=[pay]) as app:
        chat = await app.open("s")
        work = asyncio.ensure_future(chat.send("Hi."))
        await asyncio.sleep(0.05)
        assert page(await chat.view()) == ("running", [], [], "")
        await work
        view = await chat.view()
        assert (page(view), view.cursor) == (("idle", ["Hi.", "Hello."], [], ""), None)


def test_viewing_without_await(tmp_path: Path) -> None:
    with perdure.connect_blocking(f"sqlite:///{tmp_path / 's.db'}", driver=ScriptedDriver(["Hello."])) as app:
        chat = app.open("s")
        chat.send("Go.")
        assert page(chat.view()) == page(app.view("s")) == ("idle", ["Go.", "Hello."], [], "")
        assert [str(chunk) for chunk in chat.follow(after=chat.view().cursor)] == [""]


async def test_a_run_that_ends_while_it_is_looked_at_is_over(tmp_path: Path) -> None:
    """Session, record and inbox are read again if somebody has saved between them."""
    store = FailingStore(perdure.SqliteStore(tmp_path / "sessions.db"))
    async with perdure.connect(store, driver=ScriptedDriver(lambda request: Delay(0.1, "Done."))) as app:
        chat = await app.open("s")
        run = await chat.start("Go.")
        await chat.send("More.", when_busy="queue")
        store.delay("progress", 0.6)  # the run ends meanwhile, and so does the next
        view = await chat.view()
        assert run.is_done
        assert (page(view), view.queued) == (("idle", ["Go.", "Done.", "More.", "Done."], [], ""), ())


def answer(number: int) -> str:
    return "".join(f"{number}.{piece} " for piece in range(4))


def _slowly(request: Any) -> Chunks:
    number = int(request.messages[-1].text)
    return Chunks([Delay(0.02 * (piece % 2), f"{number}.{piece} ") for piece in range(4)])


@given(pauses=st.lists(st.integers(0, 30), min_size=4, max_size=8), gap=st.integers(0, 30))
async def test_a_view_is_one_state(pauses: list[int], gap: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs begin and end meanwhile: nothing is shown twice, nothing is missing, and its cursor leads on from it."""
    driver = ScriptedDriver(_slowly)
    async with connected("sqlite", tmp_path_factory.mktemp("view"), driver) as (app, elsewhere):
        chat = await app.open("s")

        async def talk() -> None:
            for number in range(5):
                await chat.send(str(number), when_busy="queue" if number % 3 else "raise")
                if number % 3 == 2:
                    await app.runtime.idle()
                    await asyncio.sleep(gap / 1000)

        talking = asyncio.ensure_future(talk())
        pages: list[asyncio.Future[None]] = []
        for pause in pauses:
            await asyncio.sleep(pause / 1000)
            pages.append(asyncio.ensure_future(_load_and_follow(elsewhere)))
        await asyncio.gather(talking, *pages)
        await app.runtime.idle()
        assert len((await elsewhere.view("s")).messages) == 10


async def _load_and_follow(sessions: Sessions) -> None:
    view = await sessions.view("s")
    done = len(view.messages) // 2
    assert texts(view.messages) == [each for number in range(done) for each in (str(number), answer(number))]
    assert texts(view.asked) == ([str(done)] if view.asked else [])
    asked = done + len(view.asked)
    assert texts(view.queued) == [str(number) for number in range(asked, asked + len(view.queued))]
    assert (view.activity == "idle") <= (not view.asked and not view.text)
    chunks = await all_of(sessions.follow("s", after=view.cursor))
    reply = chunks[-1].reply
    if view.asked:
        assert shown(chunks, view.text) == reply.text == answer(done)
    elif chunks == [""]:  # nothing is new
        assert reply.text == (answer(done - 1) if done else "")
    else:  # the next run has begun since
        assert shown(chunks) == reply.text == answer(done)
