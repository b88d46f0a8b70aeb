"""Following a run: from its beginning or from a cursor, while it answers, once it is over, and after a crash."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    DriverError,
    ExecutionBudget,
    InvalidData,
    LongestAnswer,
    RunFailed,
    RunInterrupted,
    SendParallel,
    SessionNotFound,
    ToolCall,
    TransientDriverError,
    tool,
)
from perdure.loop.drivers.retry import RetryingDriver
from perdure.protocols import Delta, Entry, ModelReply
from perdure.testing import Chunks, Delay, FailingStore, ScriptedDriver

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

KINDS = ("memory", "sqlite", "file", "postgres")
WORDS = tuple(f"w{number} " for number in range(12))
SLOW = Chunks([each for word in WORDS for each in (word, Delay(0.04, ""))])
HALF = Chunks(["Once upon ", "a time", Delay(60, "there was more")])


def store_of(kind: str, where: Path) -> Any:
    stores = {
        "memory": perdure.MemoryStore,
        "sqlite": lambda: perdure.SqliteStore(where / "sessions.db"),
        "file": lambda: perdure.FileStore(where / "sessions"),
        "postgres": lambda: perdure.PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
    }
    return stores[kind]()


@asynccontextmanager
async def connected(kind: str, where: Path, driver: Any, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield two connections to one store: one runs agents, and one follows them from elsewhere."""
    async with store_of(kind, where) as store:
        other = store if kind == "memory" else store_of(kind, where)
        async with (
            perdure.connect(store, driver=driver, **options) as app,
            perdure.connect(other, driver=ScriptedDriver([])) as elsewhere,
        ):
            yield app, elsewhere


async def all_of(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]


def shown(chunks: list[Any], before: str = "") -> str:
    """Return the text that a reader of offsets has; each chunk has to follow the one before it."""
    text = before
    for chunk in chunks:
        assert chunk.offset <= len(text) if chunk.restarts else chunk.offset == len(text)
        text = text[: chunk.offset] + chunk
    return text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_is_followed_while_it_answers(kind: str, tmp_path: Path) -> None:
    """The text comes in pieces before the answer is whole; the last chunk is empty, and has the reply."""
    async with connected(kind, tmp_path, ScriptedDriver([SLOW])) as (app, elsewhere):
        run = await (await app.open("s")).start("Go.")
        chunks = []
        async for chunk in elsewhere.follow("s"):
            chunks.append(chunk)
            assert chunk.reply is not None or not run.is_done or len(chunks) > 2
        assert len(chunks) > 3
        assert (shown(chunks), chunks[-1]) == ("".join(WORDS), "")
        assert [chunk.reply for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].reply.text == "".join(WORDS)
        assert not any(chunk.restarts for chunk in chunks)
        assert await all_of(elsewhere.follow("s")) == ["".join(WORDS), ""]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cursor_leads_back_to_where_somebody_was(kind: str, tmp_path: Path) -> None:
    """A cursor of a stream or of following, within a piece or at the end, leads on without loss or duplicate."""
    async with connected(kind, tmp_path, ScriptedDriver([SLOW])) as (app, elsewhere):
        run = await (await app.open("s")).start("Go.")
        heard: list[Any] = []
        followed: list[Any] = []
        async for chunk in run.stream():
            heard.append(chunk)
            if chunk.offset and not followed:
                before, followed = shown(heard), await all_of(elsewhere.follow("s", after=chunk.cursor))
        for place, chunk in enumerate(heard):
            rest = await all_of(elsewhere.follow("s", after=chunk.cursor))
            assert shown(rest, shown(heard[: place + 1])) == "".join(WORDS)
            assert rest[-1].reply.text == "".join(WORDS)
        for chunk in followed:
            rest = await all_of(elsewhere.follow("s", after=chunk.cursor))
            assert rest[-1].offset == len("".join(WORDS))
        assert shown(followed, before) == "".join(WORDS)


async def test_postgres_tells_followers_of_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not have to poll."""
    monkeypatch.setattr("perdure.sessions.following.LOOK_ANYWAY", 30.0)
    async with connected("postgres", tmp_path, ScriptedDriver([SLOW])) as (app, elsewhere):
        await (await app.open("s")).start("Go.")
        async with asyncio.timeout(20):
            chunks = await all_of(elsewhere.follow("s"))
        assert len(chunks) > 3
        assert shown(chunks) == "".join(WORDS)


async def test_a_model_that_begins_again_takes_back_what_was_shown(tmp_path: Path) -> None:
    """The chunk that restarts gives the place, in the stream and for followers. The text before it stays."""

    class Stumbles:
        def __init__(self) -> None:
            self.goes_on = asyncio.Event()

        async def respond(self, request: Any, on_delta: Any) -> ModelReply:
            if request.step == 0:
                await on_delta(Delta("text", "First I look. "))
                return ModelReply(
                    perdure.Message.assistant("First I look. ", tool_calls=[ToolCall("look", {}, id="call-1")])
                )
            await on_delta(Delta("text", "It is red"))
            await self.goes_on.wait()
            await on_delta(Delta("restart", ""))
            await on_delta(Delta("text", "It is blue, "))
            await asyncio.sleep(0.3)
            await on_delta(Delta("text", "I think."))
            return ModelReply(perdure.Message.assistant("It is blue, I think."))

    @tool
    def look() -> str:
        """Look."""
        return "blue"

    driver = Stumbles()
    agent = AgentDefinition("agent", tools=("look",))
    async with connected("sqlite", tmp_path, driver, tools=[look]) as (app, elsewhere):
        chat = await app.open("s", agent)
        run = await chat.start("Go.")
        chunks = []
        async for chunk in elsewhere.follow("s"):
            chunks.append(chunk)
            if "red" in chunk:
                driver.goes_on.set()
        heard = await all_of(run.stream())
        for seen in (chunks, heard):
            assert shown(seen) == "First I look. It is blue, I think."
            (again,) = [chunk for chunk in seen if chunk.restarts]
            assert (again, again.offset) == ("", len("First I look. "))
        red = next(chunk for chunk in heard if "red" in chunk)
        rest = await all_of(elsewhere.follow("s", after=red.cursor))
        assert [(str(chunk), chunk.offset, chunk.restarts) for chunk in rest] == [
            ("", 14, True),
            ("It is blue, I think.", 14, False),
            ("", 34, False),
        ]


async def test_a_follower_who_is_behind_gets_messages_in_order(tmp_path: Path) -> None:
    """The run has several steps, and any cursor leads on from its place."""

    @tool
    async def wait() -> str:
        """Wait."""
        return "done"

    said = ["One. ", "Two. ", "Three."]
    calls = [perdure.Message.assistant(text, tool_calls=[ToolCall("wait", {}, id=f"call-{text}")]) for text in said[:2]]
    agent = AgentDefinition("agent", tools=("wait",))
    async with connected("sqlite", tmp_path, ScriptedDriver([*calls, said[2]]), tools=[wait]) as (app, elsewhere):
        run = await (await app.open("s", agent)).start("Go.")
        heard = await all_of(run.stream())
        assert heard == [*said, ""]
        for place, chunk in enumerate(heard):
            rest = await all_of(elsewhere.follow("s", after=chunk.cursor))
            assert rest == [*said[place + 1 :], ""]
            assert shown(rest, shown(heard[: place + 1])) == "One. Two. Three."


async def test_only_what_the_run_says_itself_is_shown(tmp_path: Path) -> None:
    """A message that was sent to it in the model's name is not shown, though it looks like one that a crash cut off."""
    marks = {"incomplete": True, "superseded": True, "execution_id": "another"}
    given = [perdure.Message.assistant("An example.", metadata=marks), perdure.Message.user("And now?")]
    async with perdure.SqliteStore(tmp_path / "sessions.db") as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), grace=0.0) as app:
            chat = await app.open("s")
            await chat.start(given, any_role=True)
            await until(lambda: _has_kept(store, "Once upon a time"))
        driver = ScriptedDriver(["Fine."])
        async with perdure.connect(store, driver=driver) as app:
            await app.recover("s")
            assert await all_of(app.follow("s")) == ["Fine.", ""]
            assert [message.text for message in driver.requests[0].messages] == ["An example.", "And now?"]


async def test_an_earlier_run_is_followed_by_its_cursor(tmp_path: Path) -> None:
    """Without a cursor the last run is followed; the cursor of a run's end leads to the next run."""
    driver = ScriptedDriver(lambda request: f"Answer {len(request.messages)}.")
    async with connected("sqlite", tmp_path, driver) as (app, elsewhere):
        chat = await app.open("s")
        streams = [await all_of(chat.stream(f"Question {number}")) for number in range(3)]
        assert await all_of(elsewhere.follow("s")) == ["Answer 5.", ""]
        rest = await all_of(elsewhere.follow("s", after=streams[0][0].cursor))
        assert (rest, rest[-1].reply.text, rest[-1].reply.session.version) == ([""], "Answer 1.", 2)
        rest = await all_of(elsewhere.follow("s", after=streams[0][-1].cursor))
        assert (rest, rest[-1].reply.text) == (["Answer 3.", ""], "Answer 3.")
        rest = await all_of(elsewhere.follow("s", after=streams[2][-1].cursor))
        assert (rest, rest[-1].reply.text) == ([""], "Answer 5.")
        await chat.compact(keep_last=1)
        assert await all_of(elsewhere.follow("s")) == ["Answer 5.", ""]


@pytest.mark.parametrize("kind", KINDS)
async def test_notes_do_not_disturb_who_follows(kind: str, tmp_path: Path) -> None:
    """Others put entries on record while an answer is written: its pieces still come, each once."""
    async with connected(kind, tmp_path, ScriptedDriver([SLOW])) as (app, elsewhere):
        run = await (await app.open("s")).start("Go.")
        chunks = []
        async for chunk in elsewhere.follow("s"):
            chunks.append(chunk)
            await elsewhere.store.note("s", [Entry("acme.note", len(chunks), f"task-{len(chunks)}")])
        assert (await run.result()).text == "".join(WORDS)
        assert len(chunks) > 3
        assert (shown(chunks), chunks[-1].reply.text) == ("".join(WORDS), "".join(WORDS))
        assert not any(chunk.restarts for chunk in chunks)


async def test_the_next_run_is_found_behind_many_notes(tmp_path: Path) -> None:
    """A cursor at the end of one run leads to the next, though thousands of notes lie between them."""
    driver = ScriptedDriver(lambda request: f"Answer {len(request.messages)}.")
    async with connected("sqlite", tmp_path, driver) as (app, elsewhere):
        chat = await app.open("s")
        await chat.send("Go.")
        first = await all_of(elsewhere.follow("s"))
        await app.store.note("s", [Entry("acme.note", None, f"task-{number % 7}") for number in range(2_500)])
        await chat.send("On.")
        assert "".join(await all_of(elsewhere.follow("s", after=first[-1].cursor))) == "Answer 3."


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_run_that_waits_for_approval_ends_the_stream(kind: str, tmp_path: Path) -> None:
    """The reply has the calls that it waits for, and its cursor leads on once somebody has decided."""

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    asks = perdure.Message.assistant("May I? ", tool_calls=[ToolCall("pay", {"amount": 3}, id="call-1")])
    agent = AgentDefinition("agent", tools=("pay",))
    async with connected(kind, tmp_path, ScriptedDriver([asks, "Thanks."]), tools=[pay]) as (app, elsewhere):
        chat = await app.open("s", agent)
        run = await chat.start("Go.")
        chunks = await all_of(elsewhere.follow("s"))
        assert shown(chunks) == "May I? "
        assert [call.name for call in chunks[-1].reply.pending_calls] == ["pay"]
        heard = await all_of(run.stream())
        await elsewhere.compact(
            "s", keep_last=1, compact_strategy="truncate"
        )  # a run of its own on record, which says nothing
        decided = await all_of(chat.stream_approve())
        assert (shown(decided, "May I? "), decided[0].offset) == ("May I? Thanks.", 7)
        for before in (chunks[-1], heard[-1]):
            rest = await all_of(elsewhere.follow("s", after=before.cursor))
            assert (shown(rest, "May I? "), rest[-1].reply.text) == ("May I? Thanks.", "Thanks.")
        assert await all_of(elsewhere.follow("s", after=decided[0].cursor)) == [""]


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_recovered_run_takes_back_what_the_killed_one_said(kind: str, noted: bool, tmp_path: Path) -> None:
    """The killed run's text is kept as an incomplete message, counted, and not shown to the model again.

    Notes by others in the meantime make no difference.
    """
    driver = ScriptedDriver(lambda request: HALF)
    async with store_of(kind, tmp_path) as store:
        async with perdure.connect(store, driver=driver, grace=0.0) as app:
            run = await (await app.open("s")).start("Tell me.")
            await until(lambda: _has_kept(store, "Once upon a time"))
            await store.note("s", [Entry("acme.note", None, "task")] if noted else [])
        with pytest.raises(RunInterrupted):
            await run.result()
        later = ScriptedDriver(["A new beginning."])
        async with perdure.connect(store, driver=later) as app:
            chat = await app.open("s")
            follower = asyncio.ensure_future(all_of(chat.follow()))
            await asyncio.sleep(0.1)
            await chat.recover()
            chunks = await follower
            assert shown(chunks) == "A new beginning."
            assert [str(chunk) for chunk in chunks] == ["Once upon a time", "", "A new beginning.", ""]
            assert [chunk.restarts for chunk in chunks] == [False, True, False, False]
            assert not chunks[-1].reply.is_incomplete
            await _check_lost(chat, later)
            rest = await all_of(chat.follow(after=chunks[0].cursor))
            assert [(str(each), each.restarts) for each in rest] == [
                ("", True),
                ("A new beginning.", False),
                ("", False),
            ]


async def _has_kept(store: Any, text: str) -> bool:
    return "".join(each.text for each in (await store.progress("s")).sketches) == text


async def _check_lost(chat: Any, driver: ScriptedDriver) -> None:
    session = await chat.session()
    assert [message.text for message in session.state.messages] == ["Tell me.", "A new beginning."]
    asked, lost, answer = await chat.history()
    assert (asked.text, lost.text, answer.text) == ("Tell me.", "Once upon a time", "A new beginning.")
    assert lost.is_incomplete
    assert [message.text for message in driver.requests[-1].messages] == ["Tell me."]
    (loop,) = (await chat.record()).loops
    whole = await chat._sessions.loop(chat.id, loop.loop_id)
    assert [message.text for message in whole.messages] == ["Tell me.", "Once upon a time", "A new beginning."]
    used = session.state.usage
    assert (used.output_tokens, used.input_tokens) > (5, 10)
    assert whole.usage == loop.usage == used
    assert session.state.execution.discarded_usage.output_tokens == used.output_tokens - 5


async def test_a_run_that_is_killed_twice_keeps_both(tmp_path: Path) -> None:
    """Each attempt is a message in the history, and none is shown or judged as something that somebody said."""
    store = perdure.SqliteStore(tmp_path / "sessions.db")
    async with store:
        for attempt in range(2):
            said = Chunks([f"Attempt {attempt}", Delay(60, "")])
            async with perdure.connect(store, driver=ScriptedDriver(lambda _, said=said: said), grace=0.0) as app:
                chat = await app.open("s")
                work = asyncio.ensure_future(chat.recover() if attempt else chat.send("Tell me."))
                await until(lambda said=said: _has_kept(store, said.pieces[0]))
            await asyncio.gather(work, return_exceptions=True)
        driver = ScriptedDriver(["The end."])
        async with perdure.connect(store, driver=driver) as app:
            chat = await app.open("s")
            await chat.recover()
            texts = ["Tell me.", "Attempt 0", "Attempt 1", "The end."]
            assert [message.text for message in await chat.history()] == texts
            assert [message.text for message in driver.requests[-1].messages] == ["Tell me."]
            loop = (await chat.record()).loops[0]
            assert (await chat._sessions.loop(chat.id, loop.loop_id)).usage == (await chat.session()).state.usage


async def test_a_killed_run_that_is_given_up_keeps_what_was_said(tmp_path: Path) -> None:
    """As after a cancellation, the last message is incomplete, and the reply says so."""
    async with perdure.SqliteStore(tmp_path / "sessions.db") as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), grace=0.0) as app:
            await (await app.open("s")).start("Tell me.")
            await until(lambda: _has_kept(store, "Once upon a time"))
        driver = ScriptedDriver(lambda request: "The end.")
        async with perdure.connect(store, driver=driver) as app:
            chat = await app.open("s")
            assert await chat.cancel()
            chunks = await all_of(chat.follow())
            assert (chunks, chunks[-1].reply.is_incomplete) == (["Once upon a time", ""], True)
            session = await chat.session()
            assert [message.text for message in session.state.messages] == ["Tell me.", "Once upon a time"]
            assert session.state.usage.output_tokens > 0
            assert (await chat.send("Go on.")).text == "The end."
            assert [message.text for message in driver.requests[-1].messages][:2] == ["Tell me.", "Once upon a time"]


@pytest.mark.parametrize("how", ["cancel", "time limit", "length", "failure"])
async def test_an_answer_that_is_cut_off_is_followed_to_where_it_ends(how: str, tmp_path: Path) -> None:
    whole = perdure.Message.assistant("Once upon a time")
    length = ModelReply(whole, perdure.InferenceResponse(finish_reason="length"))
    broken = Chunks(["Once upon ", "a time", Delay(0.3, DriverError("the line is dead"))])  # type: ignore[arg-type]
    replies = {"length": length, "failure": broken}
    agent = AgentDefinition("a", budget=ExecutionBudget(max_seconds=0.4) if how == "time limit" else ExecutionBudget())
    async with connected("sqlite", tmp_path, ScriptedDriver([replies.get(how, HALF)])) as (app, elsewhere):
        chat = await app.open("s", agent)
        await chat.start("Tell me.")
        chunks, failure = [], None
        try:
            async for chunk in elsewhere.follow("s"):
                chunks.append(chunk)
                if how == "cancel" and chunk:
                    await elsewhere.cancel("s")
        except RunFailed as error:
            failure = error
        assert shown(chunks) == "Once upon a time"
        assert (failure is not None) == (how == "failure")
        if failure is None:
            assert chunks[-1].reply.is_incomplete
            assert chunks[-1].reply.text == "Once upon a time"


async def test_a_follower_gives_up_where_nobody_recovers(tmp_path: Path) -> None:
    async with perdure.SqliteStore(tmp_path / "sessions.db") as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), grace=0.0) as app:
            await (await app.open("s")).start("Tell me.")
        async with perdure.connect(store, driver=ScriptedDriver([])) as app:
            with pytest.raises(RunInterrupted):
                await all_of(app.follow("s", timeout=0.1))
            for wrong in (-1, "1", None):
                with pytest.raises(InvalidData):
                    await all_of(app.follow("s", timeout=wrong))


async def test_what_is_not_a_cursor_of_the_session_is_refused(tmp_path: Path) -> None:
    async with connected("sqlite", tmp_path, ScriptedDriver(lambda request: "Hello.")) as (app, elsewhere):
        chat = await app.open("s")
        assert [chunk.reply.text for chunk in await all_of(chat.follow())] == [""]  # nothing was ever said
        ours = (await all_of(chat.stream("Go.")))[0].cursor
        theirs = (await all_of((await app.open("t")).stream("Go.")))[0].cursor
        odd = [base64.urlsafe_b64encode(raw).decode() for raw in (b'["run","",0,0,-1,0]', b'{"a":1}', b"[]", b"\xff")]
        for wrong in ("", "x", "!", "ä", ours[:-4], theirs, *odd, 5, b"x"):
            with pytest.raises(InvalidData):
                await all_of(elsewhere.follow("s", after=wrong))
        with pytest.raises(SessionNotFound):
            await all_of(elsewhere.follow("nobody"))
        with pytest.raises(SessionNotFound):
            await all_of(app.of("ada").follow("s", after=ours))


async def test_of_a_parallel_evaluation_the_selected_answer_is_shown(tmp_path: Path) -> None:
    driver = ScriptedDriver(lambda request: Delay(0.2, f"by {request.model.name}"))
    async with connected("sqlite", tmp_path, driver) as (app, elsewhere):
        await app.open("s")
        action = SendParallel("Go.", app.loops, configs=["a", "long"], strategy=LongestAnswer())
        work = asyncio.ensure_future(app.execute("s", action))
        await until(lambda: app.store.read("s"))
        chunks = await all_of(elsewhere.follow("s"))
        await work
        assert (chunks, chunks[-1].reply.text) == (["by long", ""], "by long")


async def test_a_journal_that_keeps_no_pieces_shows_whole_messages(tmp_path: Path) -> None:
    """Journals of other authors need not know pieces."""
    store = FailingStore(perdure.SqliteStore(tmp_path / "sessions.db"))
    del store.sketch, store.progress  # type: ignore[attr-defined]
    async with perdure.connect(store, driver=ScriptedDriver([SLOW])) as app:
        chat = await app.open("s")
        await chat.start("Go.")
        assert await all_of(chat.follow()) == ["".join(WORDS), ""]


async def test_a_piece_that_cannot_be_kept_fails_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged, and the next pieces are kept with it a little later; a store that hangs delays nothing."""
    store = FailingStore(perdure.SqliteStore(tmp_path / "sessions.db"))
    store.fail("sketch", call=None)
    async with perdure.connect(store, driver=ScriptedDriver([SLOW])) as app:
        assert (await (await app.open("s")).send("Go.")).text == "".join(WORDS)
        assert store.calls["sketch"] == 1
        assert "could not be kept: This sketch was told to fail." in caplog.text
        store.heal()
        store.delay("sketch", 0.5, call=None)
        heard = [asyncio.get_running_loop().time() async for _ in app.stream("s", "Go.")]
        assert max(later - before for before, later in pairwise(heard[:-1])) < 0.4


async def test_a_follower_sees_what_transient_errors_begin_again(tmp_path: Path) -> None:
    """A retry voids the text before it, even if it says the same again."""
    broken = Chunks(["Once upon ", Delay(0.3, TransientDriverError("offline", "busy"))])  # type: ignore[arg-type]
    attempts = iter([broken, Chunks(["Once upon ", Delay(0.3, "a time")])])
    driver = RetryingDriver(ScriptedDriver(lambda _: next(attempts)), base=0.01)
    async with connected("sqlite", tmp_path, driver) as (app, elsewhere):
        await (await app.open("s")).start("Go.")
        chunks = await all_of(elsewhere.follow("s"))
        assert shown(chunks) == "Once upon a time"
        assert [chunk.offset for chunk in chunks if chunk.restarts] == [0]


def test_following_without_await(tmp_path: Path) -> None:
    with perdure.connect_blocking(f"sqlite:///{tmp_path / 's.db'}", driver=ScriptedDriver(["Hello."])) as app:
        chat = app.open("s")
        chat.send("Go.")
        assert [str(chunk) for chunk in chat.follow()] == ["Hello.", ""]
        assert [str(chunk) for chunk in app.follow("s")] == ["Hello.", ""]
