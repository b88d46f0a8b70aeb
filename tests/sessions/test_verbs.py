"""The effects of each verb, and its refusals."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import HeldDriver

import perdure
from perdure import (
    AgentDefinition,
    ConfigurationError,
    Envelope,
    InvalidData,
    InvalidSessionId,
    Message,
    RunFailed,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionNotFound,
    Sessions,
    StopReason,
    ToolCall,
    WriteMetadata,
)
from perdure.loop.tool_use import current_session
from perdure.sessions.streaming import Listener
from perdure.testing import Chunks, Delay, ScriptedDriver

Connect = Callable[..., Sessions]


@pytest.fixture(params=["memory", "sqlite"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """`perdure.connect` on either store."""
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'sessions.db'}"
    return lambda **options: perdure.connect(url, **options)


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


async def shown(sessions: Sessions, session_id: str) -> list[str]:
    return texts((await sessions.session(session_id)).state.messages)


@asynccontextmanager
async def said(connect: Connect, *lines: str, **options: Any) -> AsyncIterator[tuple[Sessions, perdure.Chat]]:
    """Yield a session with these lines."""
    async with connect(**{"driver": ScriptedDriver(lambda _: "yes"), **options}) as sessions:
        chat = await sessions.open()
        for line in lines:
            await chat.inject({"role": "user", "content": line})
        yield sessions, chat


async def test_open_makes_a_session_once(connect: Connect) -> None:
    """An existing id is opened; without an id, a UUIDv7 is made."""
    async with connect() as sessions:
        first, again = await sessions.open("mine"), await sessions.open("mine")
        assert first.id == again.id == "mine"
        assert (await sessions.info("mine")).version == 1
        made = await sessions.open()
        assert uuid.UUID(made.id).version == 7


async def test_another_agent_does_not_get_the_session(connect: Connect) -> None:
    async with connect() as sessions:
        await sessions.open("mine", AgentDefinition("poet"))
        await sessions.open("mine", AgentDefinition("poet"))
        await sessions.open("mine")
        with pytest.raises(SessionConflict, match="belongs to the agent 'poet'"):
            await sessions.open("mine", AgentDefinition("critic"))
        with pytest.raises(InvalidData, match="AgentDefinition"):
            await sessions.open("other", "poet")  # type: ignore[arg-type]
        assert not await sessions.exists("other")


async def test_two_who_open_the_same_id_at_once_have_the_same_session(connect: Connect) -> None:
    async with connect() as sessions:
        chats = await asyncio.gather(*(sessions.open("mine") for _ in range(5)))
        assert {chat.id for chat in chats} == {"mine"}
        assert len(await sessions.list()) == 1


UNKNOWN: dict[str, Callable[[Sessions], Any]] = {
    "length": lambda s: s.length("nobody"),
    "reset": lambda s: s.reset("nobody"),
    "fork": lambda s: s.fork("nobody"),
    "trim": lambda s: s.trim("nobody", 1),
    "compact": lambda s: s.compact("nobody"),
    "uncompact": lambda s: s.uncompact("nobody"),
    "inject": lambda s: s.inject("nobody", {"role": "user", "content": "hi"}),
    "close": lambda s: s.close("nobody"),
    "send": lambda s: s.send("nobody", "hi"),
    "undo": lambda s: s.undo("nobody"),
    "rewind": lambda s: s.rewind("nobody", 1),
    "history": lambda s: s.history("nobody"),
    "ancestry": lambda s: s.ancestry("nobody"),
    "diff": lambda s: s.diff("nobody", "nobody"),
    "adopt": lambda s: s.adopt("nobody", "nobody"),
    "subscribe": lambda s: s.subscribe("nobody", print),
    "cancel": lambda s: s.cancel("nobody"),
    "delete": lambda s: s.delete("nobody"),
    "erase": lambda s: s.erase("nobody"),
    "restore": lambda s: s.restore("nobody"),
    "rename": lambda s: s.rename("nobody", "a name"),
    "redact": lambda s: s.redact("nobody", ["x"]),
    "record": lambda s: s.record("nobody"),
    "recover": lambda s: s.recover("nobody"),
    "search": lambda s: s.search("text", session_id="nobody"),
    "approve": lambda s: s.approve("nobody"),
}


@pytest.mark.parametrize("verb", UNKNOWN)
async def test_an_unknown_id_is_an_error(connect: Connect, verb: str) -> None:
    """The error names it, and nothing is made under it."""
    async with connect() as sessions:
        with pytest.raises(SessionNotFound, match="'nobody'"):
            await UNKNOWN[verb](sessions)
        assert not await sessions.exists("nobody")
        with pytest.raises(InvalidSessionId):
            await sessions.length("../etc")


async def test_exists_and_snapshot_tolerate_unknown_ids(connect: Connect) -> None:
    async with connect() as sessions:
        assert await sessions.exists("nobody") is False
        assert await sessions.snapshot("nobody") is None


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "option": (lambda c: c.compact(keep=3), "'keep' is not an option of compaction.*keep_last"),
    "strategy": (lambda c: c.compact(compact_strategy="magic"), "llm, truncate, observation_mask, custom"),
    "compact count": (lambda c: c.compact(keep_last=-1), "keep_last"),
    "compact type": (lambda c: c.compact(keep_last="3"), "keep_last"),
    "callback": (lambda c: c.compact(mask_callback="no"), "mask_callback"),
    "trim count": (lambda c: c.trim(-1), "keep_last"),
    "trim type": (lambda c: c.trim(True), "keep_last"),
    "trim text": (lambda c: c.trim("3"), "keep_last"),
    "no role": (lambda c: c.inject({"content": "hi"}), "role"),
    "bad role": (lambda c: c.inject({"role": "narrator", "content": "hi"}), "role"),
    "plain texts": (lambda c: c.inject(["hi", "there"]), "role"),
    "no message": (lambda c: c.inject(7), "message"),
    "fork at": (lambda c: c.fork(at=99), "99"),
    "fork type": (lambda c: c.fork(at=1.5), "at"),
    "fork message": (lambda c: c.fork(at="no-such-message"), "no-such-message"),
    "rewind type": (lambda c: c.rewind(1.5), "version number or a message id"),
    "rewind message": (lambda c: c.rewind("no-such-message"), "no-such-message"),
    "uncompact": (lambda c: c.uncompact(), "no compaction block"),
    "uncompact block": (lambda c: c.uncompact("no-block"), "no-block"),
    "adopt": (lambda c: c.adopt(c), "not a fork"),
    "send nothing": (lambda c: c.send([]), "nothing to send"),
    "when_busy": (lambda c: c.send("hi", when_busy="wait"), "'raise', 'steer' or 'queue'"),
    "search blank": (lambda c: c.search("  "), ""),
    "rotate": (lambda c: c.check_and_rotate(-1), "idle"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_input_is_refused_and_changes_nothing(connect: Connect, case: str) -> None:
    """The error names the argument, and what is allowed."""
    verb, match = REFUSED[case]
    async with said(connect, "one", "two") as (sessions, chat):
        before = await chat.snapshot()
        with pytest.raises(InvalidData, match=f"(?s){match}"):
            await verb(chat)
        assert await chat.snapshot() == before
        assert len(await sessions.list()) == 1


async def test_a_subscriber_has_to_be_callable(connect: Connect) -> None:
    async with said(connect) as (_, chat):
        with pytest.raises(InvalidData, match="function"):
            chat.subscribe("print")  # type: ignore[arg-type]


async def test_send_keeps_what_is_said(connect: Connect) -> None:
    driver = ScriptedDriver(lambda request: f"answer {len(request.messages)}")
    async with connect(driver=driver) as sessions:
        chat = await sessions.open()
        first = await chat.send("hello")
        assert (first.text, str(first), first.stop_reason) == ("answer 1", "answer 1", StopReason.COMPLETED)
        assert first.usage.output_tokens == 5
        assert first.session.id == chat.id
        assert (await chat.send("again")).text == "answer 3"
        assert await shown(sessions, chat.id) == ["hello", "answer 1", "again", "answer 3"]


async def test_a_key_gives_the_first_answer_again(connect: Connect) -> None:
    async with said(connect) as (_, chat):
        first = await chat.send("hello", key="k")
        again = await chat.send("hello", key="k")
        assert (again.session.version, await chat.length()) == (first.session.version, 2)
        with pytest.raises(InvalidData, match="another message"):
            await chat.send("other", key="k")


async def test_run_persists_nothing(connect: Connect) -> None:
    async with connect(driver=ScriptedDriver(["42"])) as sessions:
        assert (await sessions.run("what?")).text == "42"
        assert len(await sessions.list()) == 0
        assert await sessions.search("what") == []


async def test_a_run_that_fails_says_so_and_the_session_goes_on(connect: Connect) -> None:
    replies: list[Any] = [ValueError("the roof leaks"), "fine"]
    async with connect(driver=ScriptedDriver(lambda _: replies.pop(0))) as sessions:
        chat = await sessions.open()
        with pytest.raises(RunFailed, match="the roof leaks") as caught:
            await chat.send("hello")
        assert caught.value.session_id == chat.id
        assert caught.value.version == (await chat.session()).version
        assert (await chat.send("again")).text == "fine"


async def test_a_stream_gives_text_as_it_comes_and_the_reply_at_last(connect: Connect) -> None:
    async with connect(driver=ScriptedDriver([Chunks(["Hel", "lo"])])) as sessions:
        chat = await sessions.open()
        chunks = [chunk async for chunk in chat.stream("hi")]
        assert chunks == ["Hel", "lo", ""]
        assert [chunk.reply is not None for chunk in chunks] == [False, False, True]
        assert chunks[-1].reply is not None
        assert chunks[-1].reply.text == "Hello"


async def test_whoever_stops_listening_stops_the_run(connect: Connect) -> None:
    """The session can be used at once, and has kept what the user said."""
    slow = Chunks(["one ", Delay(30, "two")])
    replies: list[Any] = [slow, "done"]
    async with connect(driver=ScriptedDriver(lambda _: replies.pop(0))) as sessions:
        chat = await sessions.open()
        stream = chat.stream("count")
        assert await anext(stream) == "one "
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await shown(sessions, chat.id))[0] == "count"
        assert (await chat.send("and?")).text == "done"


async def test_a_stream_is_of_its_own_run_alone(connect: Connect) -> None:
    """A message queued meanwhile is answered later; a late stream is refused, and gets nothing of another's answer."""

    def reply(request: Any) -> Any:
        text = request.messages[-1].text
        return Chunks(["to ", Delay(0.5 if text == "one" else 0.0, text)])

    async with connect(driver=ScriptedDriver(reply)) as sessions:
        chat = await sessions.open()
        first = chat.stream("one")
        heard = [await anext(first)]
        queued = await chat.send("two", when_busy="queue")
        with pytest.raises(SessionBusy):
            assert [chunk async for chunk in chat.stream("three")] == []
        assert (queued.queued, queued.text, queued.usage.total_tokens, queued.stop_reason) == (True, "", 0, None)
        heard += [chunk async for chunk in first]
        assert ("".join(heard), queued.session.version) == ("to one", 1)
        await sessions.runtime.idle()
        assert await shown(sessions, chat.id) == ["one", "to one", "two", "to two"]


async def test_a_change_beside_a_run_is_refused(connect: Connect) -> None:
    """It would cost the run its result. The advice fits every verb, and names what only a message may do."""
    async with connect(driver=ScriptedDriver([Delay(0.2, "Done.")])) as sessions:
        chat = await sessions.open()
        run = await chat.start("Go.")
        for change in (lambda: chat.rename("Mine"), chat.delete, chat.reset, lambda: chat.inject(Message.user("x"))):
            with pytest.raises(SessionBusy, match=r"Wait for the run to end, or cancel\(\) it\. A message can be left"):
                await change()
        assert (await run.result()).text == "Done."
        await chat.rename("Mine")
        info = await sessions.info(chat.id)
        assert (info.name, info.status.value, info.version) == ("Mine", "active", 3)


async def test_a_deleted_session_says_how_it_is_taken_back(connect: Connect) -> None:
    async with connect(driver=ScriptedDriver(["Hello."])) as sessions:
        chat = await sessions.open()
        await chat.delete()
        with pytest.raises(SessionNotActive, match=r"Call restore\(\)"):
            await chat.send("Hi.")
        await chat.restore()
        assert (await chat.send("Hi.")).text == "Hello."


async def test_what_is_queued_behind_nothing_is_answered(connect: Connect) -> None:
    """An earlier answer is never taken for the answer to a message that is still to be sent."""

    def replies(request: perdure.ModelRequest) -> Any:
        text = request.messages[-1].text
        return Delay(0.5, text) if text == "two" else text

    async with connect(driver=ScriptedDriver(replies)) as sessions:
        chat = await sessions.open()
        reply = await chat.send("one", when_busy="queue")
        assert (reply.queued, reply.text) == (False, "one")
        run = asyncio.ensure_future(chat.send("two"))
        while not await sessions.runtime.journal.is_claimed(chat.id):  # type: ignore[union-attr]  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)
        left = await chat.send("three", when_busy="queue", key="k")
        assert (left.queued, left.text) == (True, "")
        assert (await run).text == "two"
        await sessions.runtime.idle()
        again = await chat.send("three", when_busy="queue", key="k")
        assert (again.queued, again.text) == (False, "three")


async def test_a_version_that_is_not_there_is_said_not_to_be(connect: Connect) -> None:
    async with connect() as sessions:
        await sessions.open("mine")
        with pytest.raises(SessionNotFound, match="numbered from 1"):
            await sessions.rewind("mine", 99)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(perdure.ConfigurationError, match=r"'tool'.*tools"):
        perdure.connect("memory://", tool=[])  # type: ignore[call-arg]  # that is the point


async def test_recover_tells_whether_there_was_a_run_to_go_on_with(connect: Connect) -> None:
    async with connect(driver=ScriptedDriver(["yes"])) as sessions:
        chat = await sessions.open()
        assert not await chat.recover()
        sent = await chat.send("hi")
        assert not await chat.recover()
        await chat.redact([sent.session.state.messages[0].id])
        assert not await chat.recover()


async def test_streams_at_once_hear_their_own_sessions_only(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber is called as often beside ten other streams as alone: with the events of its session."""
    calls: list[Listener] = []
    hear = Listener.hear

    def counted(self: Listener, event: object) -> None:
        calls.append(self)
        hear(self, event)

    monkeypatch.setattr(Listener, "hear", counted)
    async with connect(driver=ScriptedDriver(lambda _: Chunks(["one ", "two ", "three"]))) as sessions:
        alone = "".join([chunk async for chunk in (await sessions.open()).stream("hi")])
        each = len(calls)

        async def streamed() -> str:
            return "".join([chunk async for chunk in (await sessions.open()).stream("hi")])

        assert set(await asyncio.gather(*(streamed() for _ in range(10)))) == {alone}
    assert len(calls) == 11 * each


async def test_a_streams_error_reaches_the_listener(connect: Connect) -> None:
    async with connect(driver=ScriptedDriver([ValueError("no")])) as sessions:
        chat = await sessions.open()
        with pytest.raises(RunFailed):
            _ = [chunk async for chunk in chat.stream("hi")]
        with pytest.raises(SessionNotFound):
            _ = [chunk async for chunk in sessions.stream("nobody", "hi")]


async def test_forks_begin_where_they_are_told(connect: Connect) -> None:
    async with said(connect, "a", "b", "c", "d") as (sessions, chat):
        third = (await chat.session()).state.messages[2]
        assert await shown(sessions, (await chat.fork()).id) == ["a", "b", "c", "d"]
        assert await shown(sessions, (await chat.fork(at=3)).id) == ["a", "b", "c"]
        assert await shown(sessions, (await chat.fork(at=third.id)).id) == ["a", "b", "c"]
        assert await shown(sessions, (await chat.fork(version=2)).id) == ["a"]
        assert (await chat.fork("named", at=0)).id == "named"
        assert await shown(sessions, "named") == []
        with pytest.raises(SessionConflict):
            await chat.fork(dst="named")
        with pytest.raises(SessionNotFound, match="version 99"):
            await chat.fork(version=99)


async def test_a_fork_and_its_parent_go_their_own_ways(connect: Connect) -> None:
    async with said(connect, "a") as (_, chat):
        branch = await chat.fork()
        await branch.inject({"role": "user", "content": "left"})
        await chat.inject({"role": "user", "content": "right"})
        diff = await chat.diff(branch)
        assert (texts(diff.common), texts(diff.left), texts(diff.right)) == (["a"], ["right"], ["left"])
        assert texts((await chat.diff(branch.id)).right) == ["left"]


async def test_a_session_adopts_what_its_fork_has_come_to(connect: Connect) -> None:
    async with said(connect, "a") as (sessions, chat):
        branch = await (await chat.fork()).fork()
        await branch.inject({"role": "user", "content": "b"})
        await chat.adopt(branch)
        assert await shown(sessions, chat.id) == ["a", "b"]
        assert texts(await chat.history()) == ["a", "b"]
        assert await chat.undo() == 1
        with pytest.raises(InvalidData, match="not a fork"):
            await branch.adopt(chat.id)


async def test_ancestry_names_parent_children_and_root(connect: Connect) -> None:
    async with said(connect, "a") as (_, root):
        first, second = await root.fork(), await root.fork()
        leaf = await first.fork()
        above, below = await root.ancestry(), await leaf.ancestry()
        assert (above.parent, set(above.children), above.root) == (None, {first.id, second.id}, root.id)
        assert (below.parent, below.children, below.root) == (first.id, (), root.id)
        assert (above.line, below.line) == ((), (root.id, first.id))


async def test_trim_reset_and_history(connect: Connect) -> None:
    async with said(connect, "a", "b", "c") as (sessions, chat):
        assert await chat.trim(keep_last=2) == 2
        assert await shown(sessions, chat.id) == ["b", "c"]
        await chat.reset()
        assert await chat.length() == 0
        assert texts(await chat.history()) == ["a", "b", "c"]


async def test_compact_and_uncompact_say_how_much_is_shown(connect: Connect) -> None:
    async with said(connect, *"abcdef") as (sessions, chat):
        assert await chat.compact(compact_strategy="truncate", keep_last=2) == 3
        assert (await shown(sessions, chat.id))[1:] == ["e", "f"]
        assert await chat.compact(compact_strategy="llm", keep_last=1) == 2
        assert texts(await chat.history()) == [*"abcdef"]
        assert (await chat.uncompact(), await chat.uncompact()) == (3, 6)
        assert await shown(sessions, chat.id) == [*"abcdef"]


async def test_undo_goes_back_one_change_at_a_time(connect: Connect) -> None:
    """Send, undo, send, undo, undo: an undone change does not come back."""
    async with said(connect) as (sessions, chat):
        await chat.send("one")
        await chat.send("two")
        assert await chat.undo() == 2
        await chat.send("three")
        assert await chat.undo() == 2
        assert await shown(sessions, chat.id) == ["one", "yes"]
        assert await chat.undo() == 0
        with pytest.raises(InvalidData, match="nothing to undo"):
            await chat.undo()
        assert texts(await chat.history()) == ["one", "yes", "two", "yes", "three", "yes"]


async def test_undo_takes_hidden_messages_along(connect: Connect) -> None:
    """A framework's hidden message is not a step of its own, whether it came alone or before a compaction."""
    hidden = iter(Message("system", (Envelope("acme", n),)) for n in range(9))
    async with connect() as sessions:
        chat = await sessions.open("chat")
        for text in ("one", "two", "three"):
            await chat.inject(Message.user(text))
            await chat.inject(next(hidden))
        assert await chat.undo() == 4
        await chat.compact(compact_strategy="truncate", keep_last=1)
        await chat.inject(next(hidden))
        assert await chat.undo() == 4  # the compaction
        assert await chat.undo() == 2
        assert texts((await chat.session()).state.messages) == ["one", ""]
        assert await chat.undo() == 0
        with pytest.raises(InvalidData, match="nothing to undo"):
            await chat.undo()


async def test_undo_takes_back_what_changed_the_view(connect: Connect) -> None:
    """Metadata, and a trim that removes nothing, are not undone."""
    async with said(connect, "a", "b") as (sessions, chat):
        await chat.reset()
        await sessions.execute(chat.id, WriteMetadata("mood", "good"))
        assert await chat.undo() == 2
        assert await chat.undo() == 1
        await chat.trim(10)
        await sessions.execute(chat.id, WriteMetadata("mood", "better"))
        assert await chat.undo() == 0
        assert (await chat.session()).state.metadata["mood"] == "better"


async def test_undo_takes_back_a_rewind_and_a_compaction(connect: Connect) -> None:
    async with said(connect, "a", "b", "c") as (sessions, chat):
        assert await chat.rewind(2) == 1
        assert await chat.undo() == 3
        await chat.compact(compact_strategy="truncate", keep_last=1)
        await sessions.execute(chat.id, WriteMetadata("mood", "good"))
        assert await chat.undo() == 3
        first = (await chat.session()).state.messages[0]
        assert await chat.rewind(first.id) == 1
        with pytest.raises(SessionNotFound):
            await chat.rewind(99)


async def test_a_tool_knows_the_session_it_serves(connect: Connect) -> None:
    heard: list[str | None] = []

    def look() -> str:
        heard.append(current_session())
        return "seen"

    driver = ScriptedDriver([ToolCall(name="look"), "done"])
    async with connect(driver=driver, tools=[look]) as sessions:
        chat = await sessions.open()
        await chat.send("look")
        assert heard == [chat.id]
        assert current_session() is None


async def test_a_redacted_message_is_gone_from_search_and_history(connect: Connect) -> None:
    async with said(connect, "the secret plan", "other") as (sessions, chat):
        secret = (await chat.session()).state.messages[0]
        branch = await chat.fork()
        assert [hit.message_id for hit in await chat.search("secret")] == [secret.id]
        assert await chat.redact([secret.id]) == 1
        assert await sessions.search("secret") == []
        assert await shown(sessions, branch.id) == ["[redacted]", "other"]
        assert texts(await chat.history()) == ["[redacted]", "other"]


async def test_a_message_is_found_by_its_id(connect: Connect) -> None:
    """The result has its session and its place in the log, also for covered and undone messages."""
    async with said(connect, "one", "two") as (sessions, chat):
        first, second = (await chat.session()).state.messages
        await chat.fork()
        await chat.reset()
        for position, message in enumerate((first, second)):
            (place,) = await sessions.find(message.id)
            assert (place.session_id, place.position) == (chat.id, position)
            assert sessions.runtime.journal is not None
            assert [*await sessions.runtime.journal.messages(place.log, position, position + 1)] == [message]
        assert await sessions.find("nobody") == []


async def test_purge_needs_to_be_told_what(connect: Connect) -> None:
    async with said(connect, "a") as (sessions, chat):
        with pytest.raises(InvalidData, match="older_than, status"):
            await sessions.purge()
        await sessions.execute(chat.id, perdure.CompleteSession())
        assert await sessions.purge(status="completed") == 1
        assert not await sessions.exists(chat.id)


async def test_rotation_moves_the_handle_on(connect: Connect) -> None:
    async with said(connect, "a") as (_, chat):
        before = chat.id
        assert await chat.check_and_rotate(3600) is None
        made = await chat.check_and_rotate(0)
        assert made == chat.id != before
        assert await chat.length() == 0


async def test_a_session_that_is_being_run_is_not_rotated(connect: Connect) -> None:
    """The handle stays with the run, whichever connection runs it and however old its last save is."""
    driver = HeldDriver(["done"])
    async with said(connect, "a", driver=driver) as (sessions, chat):
        work = asyncio.create_task(chat.send("slow"))
        await driver.is_asked.wait()
        assert await chat.check_and_rotate(0) is None
        async with perdure.connect(sessions.store, driver=driver) as elsewhere:
            assert await (await elsewhere.open(chat.id)).check_and_rotate(0) is None
        driver.may_answer.set()
        assert (await work).text == "done"
        assert await chat.check_and_rotate(0) is not None


async def test_a_session_whose_run_waits_for_approval_is_not_rotated(connect: Connect) -> None:
    """The handle stays with a run until somebody decides about its calls; a session that was only paused is left."""

    @perdure.tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    driver = ScriptedDriver([ToolCall("pay", {"amount": 5}), "done"])
    async with connect(driver=driver, tools=[pay]) as sessions:
        chat = await sessions.open("waits")
        assert (await chat.send("Pay 5.")).pending_calls
        assert await chat.check_and_rotate(0) is None
        assert (await chat.approve()).text == "done"
        await sessions.execute(chat.id, perdure.SuspendSession())
        assert await chat.check_and_rotate(0) == chat.id != "waits"


async def test_a_snapshot_is_a_copy(connect: Connect) -> None:
    async with said(connect, "a") as (_, chat):
        snapshot = await chat.snapshot()
        assert snapshot is not None
        snapshot["messages"].clear()
        assert await chat.length() == 1


GOOD = {
    "memory://": "MemoryStore",
    "file://{folder}/sessions": "FileStore",
    "sqlite:///{folder}/sessions.db": "SqliteStore",
}


@pytest.mark.parametrize("url", GOOD)
async def test_a_url_names_a_store(tmp_path: Path, url: str) -> None:
    async with perdure.connect(url.format(folder=tmp_path)) as sessions:
        assert type(sessions.store).__name__ == GOOD[url]
        await (await sessions.open("mine")).inject({"role": "user", "content": "hi"})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sessions.db",
        "mysql://me:hunter2@host/db",
        "postgres//me:hunter2@host/db",
        "postgresq://me:hunter2@[host/db",
        "postgresq://me:hun@ter2@host/db",
        "memory://more",
        "sqlite://",
        "sqlite:///",
        "sqlite://file.db",
        "sqlite://me:hunter2@host",
        "memory://me:hunter2@host",
        "me:hunter2@host",
        "pg://host/db?password=hunter2",
        "file://",
        "file://a\0b",
        7,
    ],
)
def test_a_bad_url_is_refused_without_its_password(url: Any) -> None:
    """The error shows the valid forms."""
    with pytest.raises(ConfigurationError) as caught:
        perdure.connect(url)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("options", [{"live": 0}, {"live": True}, {"owner": ""}, {"owner": 7}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidData):
        perdure.connect("memory://", **options)


async def test_messages_of_every_form_can_be_injected(connect: Connect) -> None:
    async with said(connect) as (sessions, chat):
        await chat.inject(Message.user("as a message"))
        await chat.inject({"role": "assistant", "content": "as a dict", "metadata": {"k": 1}})
        assert await shown(sessions, chat.id) == ["as a message", "as a dict"]


async def test_a_forks_history_has_every_message_once(connect: Connect) -> None:
    """This holds if a compaction shows again some of the messages that it covers."""
    driver = ScriptedDriver(lambda request: ToolCall(name="_look") if request.step == 0 else "done")
    async with connect(driver=driver, tools=[_look]) as sessions:
        chat = await sessions.open()
        await chat.send("one")
        await chat.send("two")
        await chat.compact(compact_strategy="observation_mask", keep_last=0)
        wanted = [message.id for message in await chat.history()]
        assert len(wanted) == 8
        assert [message.id for message in await (await chat.fork()).history()] == wanted


def _look() -> str:
    return "long " * 50


CLERK = AgentDefinition("clerk", description="Pays.", system_prompt="clerk", tools=("pay",))
BOSS = AgentDefinition("boss", system_prompt="boss", tools=("clerk", "pay"))


class Till:
    """A till that pays what a person has approved: asked directly, or by a clerk."""

    def __init__(self) -> None:
        self.paid: list[int] = []

        @perdure.tool(needs_approval=True)
        def pay(amount: int) -> str:
            self.paid.append(amount)
            return "paid"

        def reply(request: perdure.ModelRequest) -> Any:
            asks = request.system_prompt == "boss" and "clerk" in request.messages[0].text
            call = ToolCall("clerk", {"prompt": "Pay 5."}) if asks else ToolCall("pay", {"amount": 5})
            return "Done." if request.step else call

        self.options: dict[str, Any] = {"tools": [pay], "subagents": [CLERK], "driver": ScriptedDriver(reply)}


async def test_what_a_sub_agent_wants_is_shown_and_approved_as_it_was_shown(connect: Connect) -> None:
    """`reply.pending_calls` has the sub-agent's own calls, and goes back into `approve`."""
    till = Till()
    async with connect(**till.options) as sessions:
        chat = await sessions.open(agent=BOSS)
        reply = await chat.send("Ask the clerk.")
        (call,) = reply.pending_calls
        assert (call.name, [leaf.arguments for leaf in call.leaves]) == ("clerk", [{"amount": 5}])
        assert (await chat.approve(reply.pending_calls)).text == "Done."
        assert till.paid == [5]


async def test_a_reply_tells_what_its_call_has_used(connect: Connect) -> None:
    """The whole run's usage is on the state; usage before an approval is not counted again."""
    async with connect(**Till().options) as sessions:
        chat = await sessions.open(agent=BOSS)
        first = await chat.send("Pay.")
        then = await chat.approve()
        assert (first.usage.total_tokens, then.usage.total_tokens) == (15, 15)
        assert then.session.state.usage == first.usage + then.usage


async def test_asking_once_fails_where_a_person_would_have_to_agree() -> None:
    """Nobody could decide afterwards: no call is made, by the agent or a sub-agent, and the error says what to do."""
    till = Till()
    async with perdure.connect("memory://", **till.options) as sessions:
        for prompt in ("Pay.", "Ask the clerk."):
            with pytest.raises(ConfigurationError, match=r"call pay, which needs .* sessions.open"):
                await sessions.run(prompt, BOSS)
        assert (till.paid, len(await sessions.list())) == ([], 0)


class Stamping:
    """A controller that marks every session that it sees created."""

    def on_stage(self, stage: perdure.SessionStage, session: perdure.AgentSession) -> perdure.AgentSession:
        return session.with_tags(["seen"]) if stage is perdure.SessionStage.BEFORE_CREATE else session


async def test_a_controller_sees_every_session_that_is_made(connect: Connect) -> None:
    """`connect(controller=…)`: it sees opened sessions, forks, and sub-agents' sessions."""
    async with connect(**Till().options, controller=Stamping()) as sessions:
        chat = await sessions.open(agent=BOSS)
        await chat.send("Ask the clerk.")
        await chat.fork()
        assert [info.tags for info in await sessions.list()] == [("seen",)] * 3


def test_a_controller_has_a_method_for_stages() -> None:
    """Any other object is refused when it is given."""
    with pytest.raises(ConfigurationError, match="on_stage"):
        perdure.connect_blocking("memory://", controller=print)  # type: ignore[arg-type]


TWICE = [Message.user("a", id="m"), Message.user("b", id="m")]


async def test_one_id_for_two_messages_of_a_call_is_refused(connect: Connect) -> None:
    """One of the two would be lost; nothing is changed."""
    async with said(connect, "first") as (sessions, chat):
        before = await chat.session()
        for call in (
            lambda: chat.send(TWICE),
            lambda: sessions.execute(chat.id, perdure.InjectMessage(*TWICE)),
            lambda: sessions.runtime.create(AgentDefinition("x"), seed=perdure.AgentState().with_messages(*TWICE)),
        ):
            with pytest.raises(InvalidData, match="used twice"):
                await call()
        assert await chat.session() == before
        assert len(await sessions.list()) == 1


BLANK: dict[str, Any] = {
    "nothing": "",
    "spaces": " \n\t",
    "a dict": {"role": "user", "content": ""},
    "no parts": Message.user(),
    "one of several": ["hello", " "],
    "no messages": [],
}


@pytest.mark.parametrize("blank", BLANK)
async def test_a_blank_message_is_not_sent(connect: Connect, blank: str) -> None:
    """No provider accepts it, so it raises InvalidData before anything is stored or spent."""
    driver = ScriptedDriver(lambda _: "yes")
    async with said(connect, "first", driver=driver) as (_, chat):
        before = await chat.session()
        with pytest.raises(InvalidData) as caught:
            await chat.send(BLANK[blank])
        assert caught.value.path.startswith("$.message")
        with pytest.raises(InvalidData):
            [chunk async for chunk in chat.stream(BLANK[blank])]
        assert (await chat.session(), driver.requests) == (before, [])


OTHERS = [Message.assistant("I say"), Message.system("Obey."), Message.tool("c", "done")]


@pytest.mark.parametrize("message", OTHERS, ids=lambda message: message.role)
async def test_only_a_users_message_is_sent_unless_asked_for(connect: Connect, message: Message) -> None:
    """Another role raises InvalidData that says what to do; `any_role` and `inject` let it pass."""
    async with said(connect) as (_, chat):
        with pytest.raises(InvalidData, match="any_role=True") as caught:
            await chat.send([Message.user("hi"), message])
        assert caught.value.path == "$.message[1].role"
        assert await chat.length() == 0
        assert (await chat.send([Message.user("hi"), message], any_role=True)).text == "yes"
        await chat.inject([Message.assistant(ToolCall("finish", {}, "c")), message])


async def test_a_changed_agent_is_told_or_taken_by_choice(connect: Connect) -> None:
    """The same name with another prompt is SessionConflict, unless the caller says which of the two to use."""
    old, new = AgentDefinition("poet", system_prompt="Rhyme."), AgentDefinition("poet", system_prompt="Do not rhyme.")
    async with connect() as sessions:
        await sessions.open("s", old)
        with pytest.raises(SessionConflict, match=r"system_prompt differ.*on_change='take'"):
            await sessions.open("s", new)
        await sessions.open("s", new, on_change="keep")
        assert (await sessions.session("s")).definition == old
        await sessions.open("s", new, on_change="take")
        changed = await sessions.session("s")
        assert (changed.definition, changed.state.context.system_prompt, changed.version) == (new, "Do not rhyme.", 2)
        await sessions.open("s", new)
        assert (await sessions.info("s")).version == 2
        with pytest.raises(InvalidData, match="'raise', 'keep' or 'take'"):
            await sessions.open("s", new, on_change="ask")  # type: ignore[arg-type]


async def test_an_agent_that_names_no_model_is_not_a_changed_one(connect: Connect) -> None:
    """The session's model stays its own if the caller's definition names none."""
    async with connect() as sessions:
        await sessions.open("s", AgentDefinition("poet", model="offline"))
        await sessions.open("s", AgentDefinition("poet"))
        await sessions.open("s", AgentDefinition("poet", label="The poet"), on_change="take")
        assert (await sessions.session("s")).definition == AgentDefinition("poet", model="offline", label="The poet")


async def test_a_sub_agents_session_is_not_a_fork(connect: Connect) -> None:
    """It has a parent, but it is not listed among its forks, and cannot be adopted as one."""
    helper = AgentDefinition("helper", system_prompt="helper")
    script = ScriptedDriver(
        lambda request: (
            "done" if request.system_prompt == "helper" or request.step else ToolCall("helper", {"prompt": "Help."})
        )
    )
    async with connect(driver=script, subagents=[helper]) as sessions:
        chat = await sessions.open("boss")
        await chat.send("Go on.")
        fork = await chat.fork("fork")
        (child,) = [info.id for info in await sessions.list(parent="boss") if info.spawn_ref is not None]
        assert (await chat.ancestry()).children == (fork.id,)
        assert await sessions.ancestry(child) == perdure.Ancestry(None, (), child)
        below = await sessions.fork(child, "below")
        assert (await below.ancestry()).root == child
        for wrong in (child, below.id):
            with pytest.raises(InvalidData, match="not a fork"):
                await chat.adopt(wrong)


async def test_a_reply_that_was_cut_off_says_so(connect: Connect) -> None:
    """It has its text and a stop reason of its own; the session can be talked to as before."""

    class Brief:
        async def respond(self, request: Any, on_delta: Any) -> perdure.ModelReply:
            return perdure.ModelReply(Message.assistant("Once upon"), perdure.InferenceResponse("length"))

    async with connect(driver=Brief()) as sessions:
        chat = await sessions.open("s")
        reply = await chat.send("Tell me a story.")
        assert (reply.text, reply.stop_reason) == ("Once upon", StopReason.LENGTH)
        assert reply.message is not None
        assert reply.message.is_incomplete
        again = await sessions.session("s")
        assert again.state.stop_reason is StopReason.LENGTH
        assert (await chat.send("Go on.")).text == "Once upon"


async def test_several_connections_share_a_store_that_is_open(connect: Connect) -> None:
    """Entering another connection neither opens the store again nor closes it for the first."""
    async with connect() as sessions:
        async with perdure.connect(sessions.store, owner="ben") as bens:
            chat = await bens.open("s")
        assert await sessions.exists(chat.id)
