"""Reading the record back: loops by page and one by one, events from a cursor on, and while they are written."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import loops_of

from perdure import (
    AgentDefinition,
    AgentEnd,
    AgentSession,
    ApproveToolCalls,
    CompactTranscript,
    ConfigurationError,
    DriverError,
    Entry,
    EventBus,
    FileStore,
    InjectMessage,
    LongestAnswer,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    Message,
    MessageEnd,
    ModelReply,
    ModelRequest,
    Outcome,
    SendMessage,
    SendParallel,
    SessionNotFound,
    SessionRuntime,
    SqliteStore,
    StoreError,
    ToolCall,
    ToolExecution,
    ToolExecutionEnd,
    Usage,
    connect,
    recover,
    tool,
)
from perdure.archive import export_sessions, fsck, import_sessions
from perdure.model.ids import new_id, now, use
from perdure.model.loop_events import UnknownEvent
from perdure.protocols import OnDelta, SessionStore
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

AGENT = AgentDefinition("agent", tools=("add",))


class Home:
    """A place for a store; each store opened in it is like another process's."""

    def __init__(self, kind: str, path: Path) -> None:
        self._kind = kind
        self._path = path
        self._memory = MemoryStore()

    def store(self) -> Any:
        match self._kind:
            case "memory":
                return self._memory
            case "sqlite":
                return SqliteStore(self._path / "sessions.db")
        return FileStore(self._path / "sessions")

    @asynccontextmanager
    async def runtime(self) -> AsyncIterator[SessionRuntime]:
        async with self.store() as store:
            yield SessionRuntime(store)


@pytest.fixture(params=["memory", "sqlite", "file"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    return Home(request.param, tmp_path)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def reply(request: ModelRequest) -> Any:
    """Work out a sum with a tool, and answer anything else at once."""
    asked = next(message.text for message in reversed(request.messages) if message.role == "user")
    if asked == "sum" and request.step == 0:
        return ToolCall("add", {"a": 2, "b": 3})
    return f"Re: {asked}, says {request.model.name}" if request.model.name in ("a", "bb") else f"Re: {asked}"


async def told(runtime: SessionRuntime, *texts: str) -> AgentSession:
    """Return a session to which these messages were sent, one after the other."""
    session = await runtime.create(AGENT)
    for text in texts:
        session = await runtime.execute(session.id, SendMessage(text, loops_of(reply, add)))
    return session


async def heard(runtime: SessionRuntime, session_id: str, **how: Any) -> list[Any]:
    return [event async for event in runtime.events(session_id, **how)]


async def test_a_record_has_a_header_for_each_loop(home: Home) -> None:
    """A header has a loop's agent, times, status, configuration and cost; no messages, turns or events."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "sum")
        record = await runtime.record(session.id)
        assert (record.session_id, record.agent_id) == (session.id, session.state.agent_id)
        assert record.created_at == session.info.created_at
        first, second = record.loops
        assert record.last_active_at == second.ended_at
        assert (first.status, second.status) == (LoopStatus.COMPLETED, LoopStatus.COMPLETED)
        assert (first.usage, second.usage) == (Usage(10, 5), Usage(20, 10))
        assert second.config is not None
        for loop in record.loops:
            assert loop.agent_id == session.state.agent_id
            assert loop.started_at is not None
            assert loop.ended_at is not None
            assert loop.ended_at >= loop.started_at
            assert (loop.turns, loop.events) == ((), ())


async def test_a_header_tells_what_a_run_that_waits_has_used(home: Home) -> None:
    """It has its steps so far and the charges of tools, as the session's total counts them; at its end, no more."""
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    dear = tool(name="dear")(lambda: Outcome("seen", usage=Usage(1, 1)))
    script = [ToolCall("dear", {}), [ToolCall("dear", {}), ToolCall("pay", {})], "done"]
    loops = LoopFactory(driver=ScriptedDriver(lambda request: script[request.step]), tools=[pay, dear])
    async with home.runtime() as runtime:
        session = await runtime.create(AgentDefinition("agent", tools=("pay", "dear")))
        waits = await runtime.execute(session.id, SendMessage("go on", loops))
        record = await runtime.record(session.id)
        (header,) = record.loops
        assert header.usage == (await runtime.loop(session.id, header.loop_id)).usage == Usage(22, 12)
        assert record.total_usage() == waits.info.usage
        assert (header.status, header.messages, header.turns, header.events) == (LoopStatus.RUNNING, (), (), ())
        after = await runtime.execute(session.id, ApproveToolCalls(loops))
        assert (await runtime.record(session.id)).total_usage() == after.info.usage == Usage(32, 17)


async def test_loops_are_linked_to_a_tree(home: Home) -> None:
    """Each knows its parent and its children; a chain leads from the root to any of them."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "two", "three")
        record = await runtime.record(session.id)
        ids = [loop.loop_id for loop in record.loops]
        assert [loop.parent_loop_id for loop in record.loops] == [None, *ids[:2]]
        assert [loop.children_loop_ids for loop in record.loops] == [(ids[1],), (ids[2],), ()]
        assert [loop.loop_id for loop in record.root_loops()] == ids[:1]
        assert [loop.loop_id for loop in record.children_of(ids[0])] == [ids[1]]
        assert [loop.loop_id for loop in record.chain_to(ids[2])] == ids
        assert record.get_loop(ids[1]) == record.loops[1]
        assert record.total_usage() == Usage(30, 15)


async def test_a_record_is_read_by_page(home: Home) -> None:
    """A page has the newest loops, oldest first; the oldest one's first event is the cursor for the next page."""
    async with home.runtime() as runtime:
        session = await told(runtime, *"abcde")
        whole = [loop.loop_id for loop in (await runtime.record(session.id)).loops]
        pages: list[list[str]] = []
        before = None
        while True:
            page = await runtime.record(session.id, limit=2, before=before)
            if not page.loops:
                break
            pages.append([loop.loop_id for loop in page.loops])
            before = (await runtime.loop(session.id, pages[-1][0])).events[0].cursor
        assert pages == [whole[3:], whole[1:3], whole[:1]]


async def test_a_page_that_parts_a_group_knows_which_branch_was_selected(home: Home) -> None:
    """The branches on it say so, though the others are on another page."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one")
        action = SendParallel("two", loops_of(reply, add), configs=["a", "bb"], strategy=LongestAnswer())
        await runtime.execute(session.id, action)
        whole = (await runtime.record(session.id)).loops
        (last,) = (await runtime.record(session.id, limit=1)).loops
        assert last == whole[-1]
        before = (await runtime.loop(session.id, whole[2].loop_id)).events[0].cursor
        (earlier,) = (await runtime.record(session.id, limit=1, before=before)).loops
        assert earlier == whole[1]
        assert {earlier.parallel_group.is_selected, last.parallel_group.is_selected} == {True, False}


async def test_a_session_that_has_not_run_has_an_empty_record(home: Home) -> None:
    """No loops, and no events."""
    async with home.runtime() as runtime:
        session = await told(runtime)
        record = await runtime.record(session.id)
        assert (record.loops, record.last_active_at) == ((), None)
        assert await heard(runtime, session.id) == []


async def test_one_loop_is_read_whole(home: Home) -> None:
    """It has its messages, turns, tool executions and events; its header is that of the record."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "sum")
        header = (await runtime.record(session.id)).loops[1]
        loop = await runtime.loop(session.id, header.loop_id)
        assert [m.id for m in loop.messages] == [m.id for m in session.state.messages[2:]]
        assert [turn.index for turn in loop.turns] == [0, 1]
        assert [each.result for turn in loop.turns for each in turn.tool_executions] == [5]
        assert [type(event).__name__ for event in loop.events][:: len(loop.events) - 1] == ["AgentStart", "AgentEnd"]
        assert [event.seq for event in loop.events] == sorted({event.seq for event in loop.events})
        for name in ("status", "usage", "started_at", "ended_at", "config", "parent_loop_id", "agent_id"):
            assert getattr(loop, name) == getattr(header, name)


async def test_messages_that_share_an_id_are_told_apart_by_their_runs(home: Home) -> None:
    """Each loop, and each event, has the text that its own run was sent."""
    async with home.runtime() as runtime:
        session, loops = await runtime.create(AGENT), loops_of(reply, add)
        for text in ("one", "sum", "two"):
            await runtime.execute(session.id, SendMessage(Message.user(text, id="m"), loops))
        record = await runtime.record(session.id)
        read = [await runtime.loop(session.id, each.loop_id) for each in record.loops]
        assert [loop.messages[0].text for loop in read] == ["one", "sum", "two"]
        ends = [event for event in await heard(runtime, session.id) if isinstance(event, MessageEnd)]
        assert [end.message.text for end in ends if end.message.id == "m"] == ["one", "sum", "two"]


async def test_what_is_not_there_is_not_found(home: Home) -> None:
    """An unknown session or loop raises SessionNotFound."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one")
        for reading in (
            runtime.record("nobody"),
            runtime.loop(session.id, "nothing"),
            runtime.loop("nobody", "nothing"),
            heard(runtime, "nobody"),
            heard(runtime, "nobody", follow=True),
        ):
            with pytest.raises(SessionNotFound):
                await reading
        with pytest.raises(SessionNotFound, match="has no loop 'nothing'"):
            await runtime.loop(session.id, "nothing")


async def test_a_store_without_a_journal_has_no_record() -> None:
    """A ConfigurationError says so."""
    store = MemoryStore()
    bare: Any = type("Bare", (), {name: getattr(store, name) for name in _verbs(SessionStore)})()
    runtime = SessionRuntime(bare)
    session = await runtime.create(AGENT)
    with pytest.raises(ConfigurationError, match="no journal"):
        await runtime.record(session.id)
    with pytest.raises(ConfigurationError, match="no journal"):
        await heard(runtime, session.id)


def _verbs(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


async def test_events_are_replayed_in_order(home: Home) -> None:
    """All events on record come with cursor, session, agent and loop; messages are whole."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "sum")
        events = await heard(runtime, session.id)
        assert [event.cursor for event in events] == list(range(1, len(events) + 1))
        assert {(event.session_id, event.agent_id) for event in events} == {(session.id, session.state.agent_id)}
        messages = [event.message.id for event in events if isinstance(event, MessageEnd)]
        assert messages == [message.id for message in session.state.messages]


async def test_events_are_replayed_from_any_cursor(home: Home) -> None:
    """The events after it equal those of the whole, also from the middle of a loop."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "sum")
        events = await heard(runtime, session.id)
        for cut in range(len(events) + 1):
            assert await heard(runtime, session.id, after=cut) == events[cut:]
            assert await heard(runtime, session.id, last=cut) == events[len(events) - cut :]
        assert await heard(runtime, session.id, last=1000) == events
        assert await heard(runtime, session.id, after=1000) == []


async def test_the_events_of_branches_come_with_their_own_messages(home: Home) -> None:
    """They are interleaved as they were written, each with the loop it belongs to."""
    async with home.runtime() as runtime:
        session = await told(runtime)
        action = SendParallel("sum", loops_of(reply, add), configs=["a", "bb"], strategy=LongestAnswer())
        await runtime.execute(session.id, action)
        events = await heard(runtime, session.id)
        assert [event.cursor for event in events] == list(range(1, len(events) + 1))
        for loop in (await runtime.record(session.id)).loops:
            whole = await runtime.loop(session.id, loop.loop_id)
            own = [event for event in events if event.loop_id == loop.loop_id and not _is_of_group(event)]
            assert own == list(whole.events)


def _is_of_group(event: object) -> bool:
    return type(event).__name__.startswith("Parallel")


async def test_a_follower_elsewhere_misses_nothing_and_hears_nothing_twice(home: Home) -> None:
    """It replays what is there, then gets what another process writes, in order, until that stops."""
    async with AsyncExitStack() as stack:
        writer, reader = [await stack.enter_async_context(home.runtime()) for _ in range(2)]
        session = await told(writer, "one")
        already = await heard(writer, session.id)
        followed: list[Any] = []
        follower = asyncio.create_task(follow(reader, session.id, followed, after=1))
        for text in ("two", "sum", "three"):
            await writer.execute(session.id, SendMessage(text, loops_of(reply, add)))
            await asyncio.sleep(0.02)
        events = await heard(writer, session.id)
        assert len(events) > len(already)
        await reached(followed, len(events) - 1)
        await stopped(follower)
        assert followed == events[1:]


async def test_a_follower_hears_soon_of_what_is_written(home: Home) -> None:
    """From the write to the reader in another process it takes well under half a second."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(home.store())
        reader = await stack.enter_async_context(home.runtime())
        session = await SessionRuntime(store).create(AGENT)
        claim, _ = await store.claim(session.id, version=1, owner="test")
        followed: list[Any] = []
        delays: list[float] = []
        follower = asyncio.create_task(follow(reader, session.id, followed, delays=delays))
        for number in range(1, 21):
            body = {"step_id": str(number), "index": number, "at": now().isoformat(), "seq": number}
            await store.append(claim, entries=[Entry("turn_start", body, "loop")])
            await reached(followed, number)
        await stopped(follower)
        assert [event.index for event in followed] == list(range(1, 21))
        assert statistics.median(delays) < 0.5


async def follow(
    runtime: SessionRuntime, session_id: str, into: list[Any], *, after: int = 0, delays: list[float] | None = None
) -> None:
    async for event in runtime.events(session_id, after=after, follow=True):
        into.append(event)
        if delays is not None:
            delays.append((datetime.now(UTC) - event.at).total_seconds())


async def reached(events: list[Any], count: int) -> None:
    async with asyncio.timeout(30):
        while len(events) < count:  # noqa: ASYNC110 (the follower is watched from outside)
            await asyncio.sleep(0.002)


async def stopped(follower: asyncio.Task[None]) -> None:
    follower.cancel()
    with pytest.raises(asyncio.CancelledError):
        await follower


async def test_following_reads_each_message_once() -> None:
    """A long run is not read again at each of its events."""
    read: list[tuple[int, int]] = []

    class Counting(MemoryStore):
        async def messages(self, log: Any, start: int, stop: int) -> Any:
            read.append((start, stop))
            return await super().messages(log, start, stop)

    store = Counting()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    steps: list[Any] = [ToolCall("add", {"a": number, "b": 1}) for number in range(10)]
    followed: list[Any] = []
    follower = asyncio.create_task(follow(runtime, session.id, followed))
    driver = ScriptedDriver([*steps, "Done."])
    await runtime.execute(session.id, SendMessage("Go", loops_of(driver, add)))
    await reached(followed, len(await store.read(session.id)))
    await stopped(follower)
    assert sum(stop - start for start, stop in read) == 22


async def test_a_loop_knows_the_loops_that_go_on_from_it(home: Home) -> None:
    """Read alone it has the same children as in the whole record: single ones, branches, and those of branches."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one", "sum")
        action = SendParallel("two", loops_of(reply, add), configs=["a", "bb"], strategy=LongestAnswer())
        await runtime.execute(session.id, action)
        failing = SendParallel("three", loops_of([DriverError("no")], add), configs=["a", "bb"])
        with pytest.raises(DriverError):
            await runtime.execute(session.id, failing)
        for text in ("four", "five"):
            await runtime.execute(session.id, SendMessage(text, loops_of(reply, add)))
        record = await runtime.record(session.id)
        assert [len(loop.children_loop_ids) for loop in record.loops] == [1, 2, 0, 3, 0, 0, 1, 0]
        for loop in record.loops:
            whole = await runtime.loop(session.id, loop.loop_id)
            assert whole.children_loop_ids == loop.children_loop_ids


async def test_looking_for_children_reads_no_more_in_a_long_session() -> None:
    """It goes from start to start: the same reads after ten loops of ten turns and twenty of twenty."""
    reads = {}
    for turns in (10, 20):
        store = Counting()
        runtime = SessionRuntime(store)
        script = [ToolCall("add", {"a": 1, "b": 2}, f"c{index}") for index in range(turns)]
        session = await told(runtime, "one")
        for _ in range(turns):
            await runtime.execute(session.id, SendMessage("go", loops_of([*script, "Done."], add)))
        first = (await runtime.record(session.id)).loops[0]
        store.entries_read = 0
        whole = await runtime.loop(session.id, first.loop_id)
        assert len(whole.children_loop_ids) == 1
        reads[turns] = store.entries_read
    assert reads[10] == reads[20]


class Counting(MemoryStore):
    """A store that counts the entries that it returns."""

    entries_read = 0

    async def read(self, session_id: str, **how: Any) -> Any:
        found = await super().read(session_id, **how)
        self.entries_read += len(found)
        return found


async def test_the_end_of_a_resumed_loop_tells_all_its_messages(home: Home) -> None:
    """It has those from before it waited for a person: listeners and readers get the same list."""
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    script: list[Any] = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("pay"), "Done."]
    bus = EventBus()
    ends: list[AgentEnd] = []
    bus.subscribe(AgentEnd, ends.append)
    loops = LoopFactory(driver=ScriptedDriver(script), tools=[add, pay], events=bus)
    async with home.runtime() as runtime:
        session = await runtime.create(AgentDefinition("agent", tools=("add", "pay")))
        await runtime.execute(session.id, SendMessage("Before.", loops_of(["Hello."], add, pay)))
        await runtime.execute(session.id, SendMessage("Go.", loops))
        after = await runtime.execute(session.id, ApproveToolCalls(loops))
        expected = [message.id for message in after.state.messages][2:]
        assert len(expected) == 6
        (end,) = ends
        assert [message.id for message in end.messages] == expected
        whole = await runtime.loop(session.id, end.loop_id)
        assert [message.id for message in whole.messages] == expected
        (read,) = [event for event in whole.events if isinstance(event, AgentEnd)]
        assert read.messages == end.messages


class SameIds:
    """A driver that gives the calls of every run the same ids, as some models do."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        last = request.messages[-1]
        if last.role == "user":
            call = ToolCall("look", {"what": f"{last.text} {request.model.name}"}, id="call_0")
            return ModelReply(Message.assistant("", tool_calls=[call]))
        return ModelReply(Message.assistant(f"done: {last.text}"))


@tool(idempotent=True)
def look(what: str) -> str:
    """Look."""
    return f"saw {what}"


def looked(executions: Iterable[ToolExecution]) -> list[Any]:
    return [(each.call.arguments["what"], each.result) for each in executions]


async def test_calls_of_several_runs_may_have_one_id(home: Home) -> None:
    """Each run's record has its own call and its own result."""
    loops = LoopFactory(driver=SameIds(), tools=[look])
    async with home.runtime() as runtime:
        session = await runtime.create(AgentDefinition("agent", model="m", tools=("look",)))
        ran = [await runtime.execute(session.id, SendMessage(text, loops)) for text in "abcd"]
        ended = [e.execution async for e in runtime.events(session.id) if isinstance(e, ToolExecutionEnd)]
        assert looked(ended) == [(f"{text} m", f"saw {text} m") for text in "abcd"]
        for each, text in zip(ran, "abcd", strict=True):
            assert each.state.execution is not None
            loop = await runtime.loop(session.id, each.state.execution.execution_id)
            assert looked(loop.turns[0].tool_executions) == [(f"{text} m", f"saw {text} m")]


async def test_calls_of_branches_may_have_one_id_whatever_the_crash() -> None:
    """A branch that is continued after a crash keeps its own outcomes, not those of the branch beside it."""
    loops = LoopFactory(driver=SameIds(), tools=[look])
    for call in range(1, 40):
        store, clock = MemoryStore(), FrozenClock(tick=0.001)
        failing = FailingStore(store)
        with use(clock=clock):
            session = await SessionRuntime(store).create(AgentDefinition("agent", tools=("look",)))
            failing.crash(call=call, after=True)
            action = SendParallel("go", loops, configs=["a", "bbb", "cc"], strategy=LongestAnswer())
            try:
                await SessionRuntime(failing).execute(session.id, action)
            except StoreError:
                clock.advance(60)
                await recover(SessionRuntime(store), loops)
            kept = await SessionRuntime(store).get_session(session.id)
        for step in kept.state.steps[:1]:
            assert looked(step.tool_executions) == [("go bbb", "saw go bbb")]
        if not failing.has_crashed:
            break
    assert 10 < call < 39


class Newer(SqliteStore):
    """A store of a newer release: among the entries of every write are some of an unknown kind."""

    BODIES = (None, [2], {"at": "2026-01-01T00:00:00Z", "seq": 99, "cents": 3}, {"at": "once", "seq": "first"})

    async def claim(self, session_id: str, **facts: Any) -> Any:
        return await super().claim(session_id, **{**facts, "entries": self._among(facts.get("entries", ()))})

    async def append(self, claim: Any, **facts: Any) -> Any:
        return await super().append(claim, **{**facts, "entries": self._among(facts.get("entries", ()))})

    async def save(self, session: Any, **facts: Any) -> Any:
        return await super().save(session, **{**facts, "entries": self._among(facts.get("entries", ()))})

    def _among(self, entries: Any) -> list[Entry]:
        """Add an entry of the run and one without a run after each entry, and never before a run's start."""
        return [
            each
            for place, entry in enumerate(entries)
            for each in (entry, Entry("billed", self.BODIES[place % 4], entry.run), Entry("noted", None))
        ]


class Noted(SqliteStore):
    """A store in which others note things, before and after every write of a run, under names of their own."""

    async def claim(self, session_id: str, **facts: Any) -> Any:
        await self._note(session_id)
        claimed = await super().claim(session_id, **facts)
        await self._note(session_id)
        return claimed

    async def append(self, claim: Any, **facts: Any) -> Any:
        appended = await super().append(claim, **facts)
        await self._note(claim.session_id)
        return appended

    async def save(self, session: Any, **facts: Any) -> Any:
        await self._note(session.id)
        saved = await super().save(session, **facts)
        await self._note(session.id)
        return saved

    async def _note(self, session_id: str) -> None:
        tasks = [Entry("billed", body, f"task-{place}") for place, body in enumerate(Newer.BODIES)]
        await self.note(session_id, [*tasks, Entry("noted", None), Entry("billed", {"cents": 3}, new_id())])


@pytest.mark.parametrize("newer", [Newer, Noted])
@pytest.mark.parametrize("parallel", [False, True])
async def test_entries_of_an_unknown_kind_hide_nothing(
    parallel: bool, newer: type[SqliteStore], tmp_path: Path
) -> None:
    """Events, headers, loops, fsck, export and import skip them; each is an UnknownEvent with kind and body."""
    seen: list[Any] = []
    for kind in (SqliteStore, newer):
        async with kind(tmp_path / f"{kind.__name__}.db") as store:
            runtime = SessionRuntime(store)
            session = await runtime.create(AGENT, session_id="s")
            await runtime.execute("s", SendMessage("one", loops_of(reply, add)))
            loops = loops_of(reply, add)
            action = SendParallel("sum", loops, configs=["a", "bb"], strategy=LongestAnswer())
            await runtime.execute("s", action if parallel else SendMessage("sum", loops))
            await runtime.execute("s", SendMessage("two", loops_of(reply, add)))
            record = await runtime.record("s")
            whole = [await runtime.loop("s", loop.loop_id) for loop in record.loops]
            seen.append([_told_of(loop) for loop in (*record.loops, *whole)])
            assert (await fsck(store)).problems == ()
            moved = tmp_path / f"{kind.__name__}.jsonl"
            await export_sessions(store, moved)
            async with MemoryStore() as elsewhere:
                await import_sessions(elsewhere, moved)
                there = await heard(SessionRuntime(elsewhere), session.id)
            assert there == await heard(runtime, session.id)
    known, others = seen
    assert known == others
    odd = [event for event in there if isinstance(event, UnknownEvent)]
    assert {event.kind for event in odd} == {"billed", "noted"}
    bodies = [event.body for event in odd if event.body is not None]
    assert [2] in bodies
    assert {"cents": 3} in bodies


def _told_of(loop: Any) -> list[Any]:
    """Return the parts of a loop that are equal for two runs of the same script."""
    group = loop.parallel_group
    return [
        loop.status,
        loop.usage,
        loop.stop_reason,
        loop.continuation_kind,
        len(loop.messages),
        len(loop.children_loop_ids),
        [(turn.index, len(turn.message_ids), turn.usage) for turn in loop.turns],
        [type(event) for event in loop.events if not isinstance(event, UnknownEvent)],
        group and (len(group.all_loop_ids), group.selected_config_index, group.is_selected),
    ]


def _counted(calls: list[int]) -> Any:
    """Return a tool that notes its calls."""

    @tool(name="add")
    def counted(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append(a)
        return a + b

    return counted


@pytest.mark.parametrize("newer", [Newer, Noted])
@pytest.mark.parametrize("parallel", [False, True])
async def test_a_run_with_entries_of_an_unknown_kind_is_recovered(
    parallel: bool, newer: type[SqliteStore], tmp_path: Path
) -> None:
    """Wherever it was killed, no completed tool runs again and the answer comes."""
    for call in range(1, 40):
        # A list for each round: a tool that was under way in its thread at the crash may end in the next one.
        calls: list[int] = []
        loops = LoopFactory(driver=ScriptedDriver(reply), tools=[_counted(calls)])
        async with newer(tmp_path / f"{call}.db") as store:
            failing, clock = FailingStore(store), FrozenClock(tick=0.001)
            with use(clock=clock):
                session = await SessionRuntime(store).create(AGENT)
                failing.crash(call=call, after=True)
                many = SendParallel("sum", loops, configs=["a", "bb"], strategy=LongestAnswer())
                try:
                    await SessionRuntime(failing).execute(session.id, many if parallel else SendMessage("sum", loops))
                except StoreError:
                    clock.advance(60)
                    report = await recover(SessionRuntime(store), loops)
                    assert report.failed == ()
                kept = await SessionRuntime(store).get_session(session.id)
        assert len(calls) <= (2 if parallel else 1)
        if not failing.has_crashed:
            break
    assert kept.state.final_response is not None
    assert 5 < call < 39


async def test_branches_that_have_not_begun_are_pending_in_the_record(home: Home) -> None:
    """They are there from their announcement on; one that never begins is aborted once another is selected."""
    async with home.runtime() as runtime:
        session = await told(runtime, "one")
        (first,) = (await runtime.record(session.id)).loops
        journal = runtime.journal
        assert journal is not None
        claim, _ = await journal.claim(session.id, version=2, owner="test")
        group = {"loop_ids": ["x", "y", "z"], "loop_id": "x", "parent_loop_id": first.loop_id, "at": _now()}
        await journal.append(claim, entries=[Entry("parallel_loop_start", group)])
        record = await runtime.record(session.id)
        assert [loop.status for loop in record.loops] == [LoopStatus.COMPLETED, *[LoopStatus.PENDING] * 3]
        assert record.loops[0].children_loop_ids == ("x", "y", "z")
        assert record.last_active_at == first.ended_at
        begun = {"group": ["x", "y", "z"], "parent_loop_id": first.loop_id, "seq": 1, "at": _now()}
        await journal.append(claim, entries=[Entry("agent_start", begun, "y")], log="y")
        statuses = {loop.loop_id: loop.status for loop in (await runtime.record(session.id, limit=1)).loops}
        assert statuses == {"x": LoopStatus.PENDING, "y": LoopStatus.RUNNING, "z": LoopStatus.PENDING}
        ended = {"status": "completed", "seq": 2, "at": _now()}
        chosen = {"loop_ids": ["x", "y", "z"], "loop_id": "x", "selected_loop_id": "y", "at": _now()}
        await journal.append(claim, entries=[Entry("agent_end", ended, "y")], log="y")
        await journal.append(claim, entries=[Entry("parallel_loop_end", chosen)])
        loops = (await runtime.record(session.id)).loops[1:]
        assert {loop.loop_id: loop.status for loop in loops} == {
            "x": LoopStatus.ABORTED,
            "y": LoopStatus.COMPLETED,
            "z": LoopStatus.ABORTED,
        }
        await journal.release(claim)


def _now() -> str:
    return now().isoformat()


async def test_headers_have_the_compaction_block(home: Home) -> None:
    """A compaction on request, and a run that compacted on its way, have the block that the whole loop has."""
    async with home.runtime() as runtime:
        session = await told(runtime, *"abcdef")
        await runtime.execute(session.id, CompactTranscript(compact_strategy="truncate", keep_last=2))
        record = await runtime.record(session.id)
        last = record.loops[-1]
        assert last.compaction_block is not None
        for loop in record.loops:
            whole = await runtime.loop(session.id, loop.loop_id)
            assert (loop.compaction_block, loop.compaction_usage) == (whole.compaction_block, whole.compaction_usage)
        assert [loop.compaction_block is None for loop in record.loops] == [True] * 6 + [False]


async def test_a_loop_knows_children_that_began_while_it_waited(home: Home) -> None:
    """A compaction of a session that waits for a person continues from the waiting run, before that has ended."""
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    loops = LoopFactory(driver=ScriptedDriver([ToolCall("pay"), "Done."]), tools=[pay])
    async with home.runtime() as runtime:
        session = await runtime.create(AgentDefinition("agent", tools=("pay",)))
        for number in range(6):
            await runtime.execute(session.id, InjectMessage(f"{number}"))
        await runtime.execute(session.id, SendMessage("Go.", loops))
        await runtime.execute(session.id, CompactTranscript(compact_strategy="truncate", keep_last=2))
        await runtime.execute(session.id, ApproveToolCalls(loops))
        first, second = (await runtime.record(session.id)).loops
        assert first.children_loop_ids == (second.loop_id,)
        assert (await runtime.loop(session.id, first.loop_id)).children_loop_ids == (second.loop_id,)


async def test_time_that_a_run_lay_dead_is_not_its_own() -> None:
    """Killed anywhere and recovered an hour later, it has worked for less than a minute, live and on record."""
    recovered = 0
    for call in range(1, 40):
        store, clock = MemoryStore(), FrozenClock(tick=0.001)
        failing = FailingStore(store)
        with use(clock=clock):
            session = await SessionRuntime(store).create(AGENT)
            failing.crash(call=call, after=True)
            try:
                await SessionRuntime(failing).execute(session.id, SendMessage("sum", loops_of(reply, add)))
            except StoreError:
                clock.advance(3600)
                report = await recover(SessionRuntime(store), loops_of(reply, add))
                recovered += len(report.resumed)
            runtime = SessionRuntime(store)
            state = (await runtime.get_session(session.id)).state
            for header in (await runtime.record(session.id)).loops:
                whole = await runtime.loop(session.id, header.loop_id)
                assert header.duration is not None
                assert header.duration == whole.duration < 60
                assert all((turn.ended_at - turn.started_at).total_seconds() < 60 for turn in whole.turns)
                assert state.execution_duration is not None
                assert state.execution_duration < 60
        if not failing.has_crashed:
            break
    assert recovered >= 3


async def test_time_that_a_run_waited_for_a_person_is_not_its_own(home: Home) -> None:
    """Approved a day later, it has worked for less than a minute."""
    pay = tool(name="pay", needs_approval=True)(lambda: "paid")
    loops = LoopFactory(driver=ScriptedDriver([ToolCall("pay"), "Done."]), tools=[pay])
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with home.runtime() as runtime:
            session = await runtime.create(AgentDefinition("agent", tools=("pay",)))
            await runtime.execute(session.id, SendMessage("Go.", loops))
            clock.advance(86400)
            after = await runtime.execute(session.id, ApproveToolCalls(loops))
            (header,) = (await runtime.record(session.id)).loops
            whole = await runtime.loop(session.id, header.loop_id)
    assert header.duration is not None
    assert header.duration == whole.duration < 60 < 86400 <= header.idle
    assert after.state.execution_duration is not None
    assert after.state.execution_duration < 60


async def test_a_loop_knows_its_children_behind_many_notes(home: Home) -> None:
    """It knows them however many notes lie between two loops, and however many names the notes have."""
    async with home.store() as store:
        runtime = SessionRuntime(store)
        session = await told(runtime, "one")
        for number in range(3):
            await store.note(session.id, [Entry("acme.note", None, f"task-{number}-{each}") for each in range(40)])
            await runtime.execute(session.id, SendMessage("go", loops_of(reply, add)))
        record = await runtime.record(session.id)
        assert [len(loop.children_loop_ids) for loop in record.loops] == [1, 1, 1, 0]
        for loop in record.loops:
            assert (await runtime.loop(session.id, loop.loop_id)).children_loop_ids == loop.children_loop_ids


@pytest.mark.parametrize("before", [False, True])
async def test_notes_of_an_adapter_are_no_loops(before: bool, tmp_path: Path) -> None:
    """Entries under names of their own are events, and a search for the last loops does not meet them."""
    notes = [Entry("acme.note", body, f"checkpoint-{place}") for place, body in enumerate([None, [1], {"key": 2}] * 9)]

    async def note(store: Any, session: Any) -> Any:
        return await store.save(session.with_state(session.state.with_metadata("k", "v")), entries=notes)

    async with (
        SqliteStore(tmp_path / "a.db") as store,
        connect(store, driver=ScriptedDriver(reply), tools=[add]) as sessions,
    ):
        chat = await sessions.open("s", AGENT)
        runtime = SessionRuntime(store)
        if before:
            await note(store, await store.load("s"))
        await chat.send("sum", key="k-1")
        if not before:
            await note(store, await store.load("s"))
        (loop,) = (await runtime.record("s")).loops
        assert (await runtime.record("s", limit=1)).loops == (loop,)
        assert (await runtime.loop("s", loop.loop_id)).loop_id == loop.loop_id
        with pytest.raises(SessionNotFound, match="has no loop 'checkpoint-1'"):
            await runtime.loop("s", "checkpoint-1")
        events = await heard(runtime, "s")
        assert [event.loop_id for event in events if isinstance(event, UnknownEvent)] == [n.run for n in notes]
        assert [chunk async for chunk in chat.follow()][-1].reply.text
        assert (await chat.result("k-1")).text == (await chat.retry()).text
        assert (await fsck(store)).problems == ()
        assert (await recover(runtime, loops_of(reply, add))).failed == ()
