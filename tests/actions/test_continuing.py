"""The tree of loops: after an undo, a stop or a resend, a run's parent is the loop it continues from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import HeldDriver, loops_of

from perdure import (
    AgentDefinition,
    AgentEnd,
    AgentSession,
    CompactTranscript,
    ConfigurationError,
    DriverError,
    FileStore,
    ForkSession,
    InvalidData,
    LongestAnswer,
    LoopRecord,
    MemoryStore,
    ModelRequest,
    ResetTranscript,
    Rewind,
    SendMessage,
    SendParallel,
    SessionNotFound,
    SessionRuntime,
    SqliteStore,
    ToolCall,
    Undo,
    connect,
    tool,
)
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("agent")


@pytest.fixture(params=["memory", "sqlite", "file"])
def a_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SqliteStore(tmp_path / "sessions.db")
    return FileStore(tmp_path / "sessions")


def reply(request: ModelRequest) -> Any:
    asked = next(message.text for message in reversed(request.messages) if message.role == "user")
    if asked == "broken":
        return DriverError("It is broken.")
    return f"Re: {asked}, says {request.model.name}" if request.model.name in ("a", "bb") else f"Re: {asked}"


class Tree:
    """A session whose loops are named after their messages."""

    def __init__(self, store: Any, session: AgentSession) -> None:
        self.runtime = SessionRuntime(store)
        self.session = session
        self.names: dict[str, str] = {}

    @classmethod
    async def planted(cls, store: Any, *texts: str) -> Tree:
        tree = cls(store, await SessionRuntime(store).create(AGENT))
        for text in texts:
            await tree.send(text)
        return tree

    async def send(self, text: str, name: str | None = None) -> None:
        await self.do(SendMessage(text, loops_of(reply)))
        loops = (await self.runtime.record(self.session.id)).loops
        self.names[loops[-1].loop_id] = name or text

    async def do(self, action: Any) -> AgentSession:
        self.session = await self.runtime.execute(self.session.id, action)
        return self.session

    async def loop(self, name: str) -> LoopRecord:
        loop_id = next(key for key, value in self.names.items() if value == name)
        found = (await self.runtime.record(self.session.id)).get_loop(loop_id)
        assert found is not None
        return found

    async def links(self) -> dict[str, str | None]:
        """The parent of each loop, by name."""
        loops = (await self.runtime.record(self.session.id)).loops
        for loop in loops:
            whole = await self.runtime.loop(self.session.id, loop.loop_id)
            assert whole.children_loop_ids == loop.children_loop_ids
        return {self.names[loop.loop_id]: self.names.get(loop.parent_loop_id or "") for loop in loops}


async def test_a_run_after_an_undo_continues_from_the_one_before(a_store: Any) -> None:
    """Its parent is neither the undone run nor missing; after two more undos it is the one before."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "two", "three")
        await tree.do(Undo())
        await tree.send("four")
        for _ in range(2):
            await tree.do(Undo())
        await tree.send("five")
        assert await tree.links() == {"one": None, "two": "one", "three": "two", "four": "two", "five": "one"}
        children = [(await tree.loop(name)).loop_id for name in ("two", "five")]
        assert (await tree.loop("one")).children_loop_ids == tuple(children)
        assert (await tree.loop("five")).continuation_kind.kind == "default"


async def test_a_run_after_a_rewind_continues_from_what_is_shown(a_store: Any) -> None:
    """After a rewind to a version or a message, its parent is the run that added the last message shown."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "two", "three")
        messages = [message.id for message in tree.session.state.messages]
        await tree.do(Rewind(2))
        await tree.send("by version")
        await tree.do(Rewind(4))
        await tree.do(Rewind(messages[2]))
        await tree.send("by question")
        links = await tree.links()
        assert (links["by version"], links["by question"]) == ("one", "two")


async def test_a_run_after_everything_was_taken_back_is_a_root(a_store: Any) -> None:
    """An undo of the first message, or a rewind to the beginning, leaves nothing to continue from."""
    async with a_store as store:
        tree = await Tree.planted(store, "one")
        await tree.do(Undo())
        await tree.send("two")
        await tree.do(Rewind(1))
        await tree.send("three")
        assert await tree.links() == {"one": None, "two": None, "three": None}


async def test_a_run_after_a_stop_and_an_undo_continues_from_the_one_that_was_stopped(a_store: Any) -> None:
    """That run has no answer, but its question is shown."""
    async with a_store as store:
        tree = await Tree.planted(store, "one")
        driver = HeldDriver(["never"])
        work = asyncio.create_task(tree.do(SendMessage("slow", loops_of(driver))))
        await driver.is_asked.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        stopped = (await tree.runtime.record(tree.session.id)).loops[-1]
        tree.names[stopped.loop_id] = "slow"
        await tree.send("two")
        await tree.do(Undo())
        await tree.send("three")
        assert await tree.links() == {"one": None, "slow": "one", "two": "slow", "three": "slow"}


async def test_branches_and_compactions_after_an_undo_continue_from_the_same(a_store: Any) -> None:
    """Compactions and branches have the same parent as a run would."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "two", "three")
        await tree.do(Undo())
        await tree.do(CompactTranscript(compact_strategy="truncate", keep_last=1))
        await tree.do(Undo())
        await tree.do(SendParallel("four", loops_of(reply), configs=["a", "bb"], strategy=LongestAnswer()))
        loops = (await tree.runtime.record(tree.session.id)).loops
        parent = (await tree.loop("two")).loop_id
        assert [loop.parent_loop_id for loop in loops[3:]] == [parent] * 3
        assert [loop.continuation_kind.kind for loop in loops[3:]] == ["compaction", "branch", "branch"]


async def test_a_fork_begins_a_tree_of_its_own(a_store: Any) -> None:
    """Its messages came from another session's loops, and none of those is in its record."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "two")
        fork = await store.create(await ForkSession().execute_on(tree.session))
        await tree.runtime.execute(fork.id, SendMessage("three", loops_of(reply)))
        (loop,) = (await tree.runtime.record(fork.id)).loops
        assert (loop.parent_loop_id, loop.continuation_kind.kind) == (None, "initial")


async def test_what_is_sent_again_from_the_same_place_is_a_rerun(a_store: Any) -> None:
    """The tag names the repeated loop; a different message from that place is not a rerun."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "two")
        for name in ("again", "and again"):
            await tree.do(Undo())
            await tree.send("two", name)
        await tree.do(Undo())
        await tree.send("other")
        first, second, other = [await tree.loop(name) for name in ("again", "and again", "other")]
        two = await tree.loop("two")
        kinds = [(loop.continuation_kind.kind, loop.continuation_kind.tag) for loop in (first, second, other)]
        assert kinds == [("rerun", two.loop_id), ("rerun", first.loop_id), ("default", None)]
        assert {loop.parent_loop_id for loop in (two, first, second, other)} == {(await tree.loop("one")).loop_id}


async def test_a_message_that_is_sent_again_after_it_failed_is_a_rerun(a_store: Any) -> None:
    """It continues from the run that failed, and repeats it."""
    async with a_store as store:
        tree = await Tree.planted(store, "one", "broken")
        failed = await tree.loop("broken")
        await tree.send("broken", "again")
        await tree.send("two")
        again = await tree.loop("again")
        assert (again.parent_loop_id, again.continuation_kind.kind) == (failed.loop_id, "rerun")
        assert again.continuation_kind.tag == failed.loop_id
        assert (await tree.loop("two")).continuation_kind.kind == "default"


async def test_metadata_goes_on_the_record_of_a_run(a_store: Any) -> None:
    """The header and the whole loop have it, for a run and for each branch of an evaluation."""
    async with a_store as store:
        tree = await Tree.planted(store)
        told = {"request": "r-1", "nested": {"a": [1, None]}}
        await tree.do(SendMessage("Hi", loops_of(reply), metadata=told))
        await tree.do(SendParallel("Ho", loops_of(reply), configs=["a", "bb"], metadata={"n": 2}))
        first, *branches = (await tree.runtime.record(tree.session.id)).loops
        assert first.metadata == (await tree.runtime.loop(tree.session.id, first.loop_id)).metadata == told
        assert [branch.metadata for branch in branches if branch.started_at] == [
            {"n": 2} for branch in branches if branch.started_at
        ]


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (5, InvalidData),
        ([("a", 1)], InvalidData),
        ({"a": object()}, InvalidData),
        ({"a": float("nan")}, InvalidData),
        ({1: "a"}, InvalidData),
        ({"api_key": "sk-1"}, ConfigurationError),
    ],
)
def test_metadata_is_checked_at_once(metadata: Any, error: type[Exception]) -> None:
    """It is stored, so it is JSON, and no secret."""
    loops = loops_of(reply)
    with pytest.raises(error):
        SendMessage("Hi", loops, metadata=metadata)
    with pytest.raises(error):
        SendParallel("Hi", loops, configs=["a", "bb"], metadata=metadata)


def test_a_message_that_steers_has_no_record_for_metadata() -> None:
    """InvalidData says what to do instead."""
    with pytest.raises(InvalidData, match="queue"):
        SendMessage("Hi", loops_of(reply), when_busy="steer", metadata={"a": 1})


async def test_metadata_of_a_queued_message_reaches_its_run() -> None:
    """It waits in the inbox with the message."""
    store = MemoryStore()
    tree = await Tree.planted(store)
    driver = HeldDriver(["First.", "Second."])
    loops = loops_of(driver)
    work = asyncio.create_task(tree.do(SendMessage("one", loops)))
    await driver.is_asked.wait()
    queued = SendMessage("two", loops_of(reply), when_busy="queue", metadata={"n": 2})
    await SessionRuntime(store).execute(tree.session.id, queued)
    driver.may_answer.set()
    await work
    async with asyncio.timeout(30):
        async for event in tree.runtime.events(tree.session.id, follow=True):
            if isinstance(event, AgentEnd) and event.messages[0].text == "two":
                break
    loops_on_record = (await tree.runtime.record(tree.session.id)).loops
    assert [loop.metadata for loop in loops_on_record] == [{}, {"n": 2}]


async def test_a_branch_that_was_not_selected_can_be_forked_from(a_store: Any) -> None:
    """The fork shows the conversation as that branch has it, and continues from there; nothing is copied."""
    look = tool(name="look", idempotent=True)(lambda: "a cup")

    def uses_tool(request: ModelRequest) -> Any:
        return ToolCall("look") if request.model.name == "a" and request.step == 0 else reply(request)

    async with connect(a_store, driver=ScriptedDriver(reply)) as sessions:
        tree = await Tree.planted(a_store, "one")
        loops = loops_of(uses_tool, look)
        await tree.do(SendParallel("two", loops, configs=["a", "bb"], strategy=LongestAnswer()))
        await tree.send("three")
        await tree.do(ResetTranscript())
        first, _ = (await tree.runtime.record(tree.session.id)).parallel_siblings(
            (await tree.runtime.record(tree.session.id)).loops[1].loop_id
        )
        assert not first.parallel_group.is_selected  # type: ignore[union-attr]  # it is of a group
        fork = await sessions.fork(tree.session.id, "fork", loop=first.loop_id)
        texts = [message.text for message in await fork.history()]
        assert texts[:3] == ["one", "Re: one", "two"]
        assert texts[-1] == "Re: two, says a"
        assert len(texts) == 6
        assert (await a_store.log_of("fork"))[1] == 0
        assert (await fork.send("four")).text == "Re: four"
        assert (await fork.session()).info.parent_id == tree.session.id


async def test_a_loop_that_was_undone_can_be_forked_from(a_store: Any) -> None:
    """Every loop that has ended has a view to begin with."""
    async with connect(a_store, driver=ScriptedDriver(reply)) as sessions:
        tree = await Tree.planted(a_store, "one", "two")
        await tree.do(Undo())
        await tree.send("three")
        with pytest.raises(ConfigurationError):
            await ForkSession(loop=(await tree.loop("two")).loop_id).execute_on(tree.session)
        fork = await sessions.fork(tree.session.id, loop=(await tree.loop("two")).loop_id)
        shown = (await fork.session()).state.messages
        assert [message.text for message in shown] == ["one", "Re: one", "two", "Re: two"]
        with pytest.raises(SessionNotFound):
            await sessions.fork(tree.session.id, loop="nobody")
        for wrong in ({"loop": 5}, {"loop": "x", "at": 1}, {"loop": "x", "version": 1}):
            with pytest.raises(InvalidData):
                await sessions.fork(tree.session.id, **wrong)  # type: ignore[arg-type]  # that is the test
