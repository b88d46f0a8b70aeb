"""CompactTranscript and UncompactTranscript on stores, and automatic compaction in a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loop.test_replay import TOOLS, folded, listened, on_record, seen, started, stories

from perdure import (
    AgentDefinition,
    AgentSession,
    ApproveToolCalls,
    AutoCompaction,
    ChangeDefinition,
    Compaction,
    CompactionFailed,
    CompactTranscript,
    ConfigurationError,
    ContextTooLong,
    DriverError,
    EventBus,
    ExecutionBudget,
    ExecutionStatus,
    FileStore,
    ForkSession,
    InjectMessage,
    InvalidData,
    LongestAnswer,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    Message,
    ModelConfig,
    ModelRequest,
    RecoveryReport,
    SendMessage,
    SendParallel,
    SessionBusy,
    SessionRecorder,
    SessionRuntime,
    SqliteStore,
    StoreError,
    ToolCall,
    UncompactTranscript,
    Usage,
    load_session,
    recover,
    save_session,
    tool,
)
from perdure.archive import fsck
from perdure.loop.compaction.summary import INSTRUCTIONS
from perdure.loop.replay import Replay
from perdure.model.ids import use
from perdure.testing import Delay, FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("agent", model=ModelConfig("test:model"))
LONG = "x" * 4_000


@pytest.fixture(params=["memory", "file", "sqlite"])
def opened(request, tmp_path: Path) -> Any:
    return {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path / "sessions"),
        "sqlite": lambda: SqliteStore(tmp_path / "sessions.db"),
    }[request.param]


def turns(count: int, text: str = "") -> list[Message]:
    return [
        message
        for n in range(count)
        for message in (Message.user(f"question {n} {text}"), Message.assistant(f"answer {n} {text}"))
    ]


@asynccontextmanager
async def session_of(store: Any, *messages: Message) -> AsyncIterator[tuple[SessionRuntime, AgentSession]]:
    async with store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT, session_id="s")
        yield runtime, await runtime.execute(session.id, InjectMessage(*messages)) if messages else session


def summing(*script: Any) -> LoopFactory:
    """Loops of a model that writes "sum" when asked for notes, and follows a script otherwise."""
    return LoopFactory(driver=ScriptedDriver(summing_script(*script)))


def summing_script(*script: Any) -> Any:
    def reply(request: ModelRequest) -> Any:
        return "sum" if request.system_prompt == INSTRUCTIONS else script[request.step]

    return reply


def json_of(session: AgentSession) -> bytes:
    return msgspec.json.encode(list(session.state.transcript))


async def test_compact_and_uncompact_on_every_store(opened):
    """A cold load shows the compacted view and, after uncompact, the earlier one byte by byte."""
    async with session_of(opened(), *turns(20)) as (runtime, before):
        after = await runtime.execute("s", CompactTranscript(loops=summing(), keep_last=4))
        assert (len(after.state.transcript), after.version) == (5, before.version + 1)
        assert json_of(await runtime.get_session("s")) == json_of(after)
        sent = await runtime.execute("s", SendMessage("more", summing("fine")))
        assert [m.text for m in sent.state.transcript][-2:] == ["more", "fine"]
        restored = await runtime.execute("s", UncompactTranscript())
        assert list(restored.state.transcript)[:40] == list(before.state.transcript)
        assert len(restored.state.transcript) == 42
        assert json_of(await runtime.get_session("s")) == json_of(restored)


async def test_what_a_cold_load_left_in_the_store_is_read_by_uncompact(tmp_path):
    """The covered messages are not in memory after a load; uncompact reads them."""
    path = tmp_path / "sessions.db"
    async with session_of(SqliteStore(path), *turns(20)) as (runtime, before):
        await runtime.execute("s", CompactTranscript(keep_last=2))
        await runtime.execute("s", CompactTranscript(compact_strategy="truncate", keep_last=0))
    async with SqliteStore(path) as store:
        runtime = SessionRuntime(store)
        await runtime.execute("s", UncompactTranscript())
        restored = await runtime.execute("s", UncompactTranscript())
        assert json_of(restored) == json_of(before)
        assert json_of(await runtime.get_session("s")) == json_of(before)


async def test_a_fork_of_a_compacted_session_can_be_uncompacted(opened):
    """The originals stay forkable."""
    async with session_of(opened(), *turns(9)) as (runtime, before):
        after = await runtime.execute("s", CompactTranscript(keep_last=2))
        store = runtime._repository.store
        fork = await store.create(await ForkSession().execute_on(after))
        restored = await runtime.execute(fork.id, UncompactTranscript())
        assert json_of(restored) == json_of(before)


async def test_nothing_to_do_moves_no_version(opened):
    """A session that is short enough stays at its version, and is free."""
    async with session_of(opened(), *turns(3)) as (runtime, before):
        after = await runtime.execute("s", CompactTranscript())
        assert after.version == before.version
        await runtime.execute("s", SendMessage("go on", summing("fine")))


async def test_uncompact_names_what_is_wrong():
    """An unknown block, a value that is not an id, and a session with nothing to show again raise typed errors."""
    async with session_of(MemoryStore(), *turns(9)) as (runtime, _):
        with pytest.raises(InvalidData, match="nothing to show again"):
            await runtime.execute("s", UncompactTranscript())
        after = await runtime.execute("s", CompactTranscript(keep_last=2))
        (block,) = after.state.transcript.blocks()
        with pytest.raises(InvalidData, match=f"nope; there are: {block.id}"):
            await runtime.execute("s", UncompactTranscript("nope"))
        with pytest.raises(InvalidData, match="block_id"):
            UncompactTranscript(7)
        assert len((await runtime.execute("s", UncompactTranscript(block.id))).state.transcript) == 18


async def test_a_compaction_is_a_loop_on_record(opened):
    """It says which messages were covered, by which method, and at what cost; its usage counts for the session."""
    async with session_of(opened(), *turns(20)) as (runtime, _):
        await runtime.execute("s", SendMessage("hi", summing("hello")))
        loops = summing()
        after = await runtime.execute("s", CompactTranscript(loops=loops, keep_last=4))
        record = await runtime.record("s")
        first, made = record.loops
        assert (made.continuation_kind.kind, made.parent_loop_id) == ("compaction", first.loop_id)
        assert (made.usage.total_tokens, made.config.model) == (15, "model")
        assert record.total_usage().total_tokens == 30
        whole = await runtime.loop("s", made.loop_id)
        (block,) = after.state.transcript.blocks()
        told = whole.compaction_block
        assert told is not None
        assert (told.id, told.by, told.at, told.model) == (block.id, "llm", block.at, "test:model")
        assert (told.start, told.covered) == (0, 38)
        assert (told.tokens_before, told.tokens_after) == (block.tokens_before, block.tokens_after)
        assert "sum" in told.summary
        (event,) = [event async for event in runtime.events("s") if isinstance(event, Compaction)]
        assert (event.trigger, event.usage.total_tokens) == ("request", 15)
        assert event.shown[0].message == after.state.transcript[0]


async def test_another_model_may_write_the_summary():
    """The named model is asked, and the block says so."""
    driver = ScriptedDriver(lambda _: "sum")
    async with session_of(MemoryStore(), *turns(20)) as (runtime, _):
        after = await runtime.execute("s", CompactTranscript(loops=LoopFactory(driver=driver), model="test:small"))
    assert [request.model.name for request in driver.requests] == ["test:small"]
    assert [block.model for block in after.state.transcript.blocks()] == ["test:small"]


async def test_a_model_that_fails_leaves_the_session_untouched(opened):
    """The error says so; the session is free, at its version, with nothing new on record."""
    async with session_of(opened(), *turns(20)) as (runtime, before):
        loops = LoopFactory(driver=ScriptedDriver(lambda _: DriverError("out of order")))
        with pytest.raises(CompactionFailed, match="out of order"):
            await runtime.execute("s", CompactTranscript(loops=loops))
        after = await runtime.get_session("s")
        assert (after.version, json_of(after)) == (before.version, json_of(before))
        assert (await runtime.record("s")).loops == ()
        await runtime.execute("s", SendMessage("hi", summing("hello")))


def test_llm_without_loops_says_what_to_pass():
    """It fails at once, not when a session is loaded."""
    for options in ({"compact_strategy": "llm"}, {"hard_limit_tokens": 9, "hard_limit_strategy": "llm"}):
        with pytest.raises(ConfigurationError, match="loops="):
            CompactTranscript(**options)
    CompactTranscript(compact_strategy="llm", compress_callback=lambda _: "sum")


async def test_the_offline_model_writes_a_digest_if_asked():
    """The digest quotes the beginning of messages, the first and the last of many; it is on record like any summary."""
    async with MemoryStore() as store:
        runtime = SessionRuntime(store)
        await runtime.create(AgentDefinition("plain"), session_id="s")
        await runtime.execute("s", InjectMessage(*turns(40, LONG), Message.assistant(tool_calls=[ToolCall("f")])))
        action = CompactTranscript(loops=LoopFactory(model="offline"), compact_strategy="llm", keep_last=0)
        after = await runtime.execute("s", action)
        (summary,) = after.state.transcript
        assert "user: question 0 xxx" in summary.text
        assert "assistant: answer 39 xxx" in summary.text
        assert "[… 40 messages left out]" in summary.text
        assert len(summary.text) < 8_000
        assert (await runtime.record("s")).total_usage().output_tokens > 100


@pytest.mark.parametrize("options", [{"keep": 1}, {"keep_last": -1}, {"compact_strategy": "no"}])
def test_wrong_options_fail_before_anything_happens(options):
    """An action that cannot be executed cannot be made."""
    with pytest.raises(InvalidData, match=next(iter(options))):
        CompactTranscript(**options)


@pytest.mark.parametrize("model", [None, "offline"])
async def test_without_a_model_the_default_is_truncation(model):
    """The offline model is asked only on request: it writes summaries by fixed rules."""
    async with MemoryStore() as store:
        runtime = SessionRuntime(store)
        await runtime.create(AgentDefinition("plain"), session_id="s")
        await runtime.execute("s", InjectMessage(*turns(9)))
        after = await runtime.execute("s", CompactTranscript(loops=LoopFactory(model=model), keep_last=2))
        assert [block.by for block in after.state.transcript.blocks()] == ["truncate"]
        assert [block.by for block in (await CompactTranscript().execute_on(after)).state.transcript.blocks()] == [
            "truncate"
        ]


async def test_a_session_is_held_while_it_is_compacted(opened):
    """A run that starts during it raises SessionBusy, and spends nothing."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def compress(messages: object) -> str:
        asked.set()
        await go_on.wait()
        return "sum"

    async with session_of(opened(), *turns(20)) as (runtime, _):
        work = asyncio.ensure_future(runtime.execute("s", CompactTranscript(compress_callback=compress)))
        await asked.wait()
        with pytest.raises(SessionBusy):
            await runtime.execute("s", SendMessage("hi", summing("hello")))
        go_on.set()
        assert len((await work).state.transcript) == 13
        work = asyncio.ensure_future(runtime.execute("s", CompactTranscript(compress_callback=compress, keep_last=0)))
        go_on.clear()
        await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await runtime.execute("s", SendMessage("hi", summing("hello")))


async def test_calls_that_wait_for_approval_are_not_covered():
    """The run continues after the compaction, and its result finds the call."""

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    driver = ScriptedDriver([ToolCall("pay", {"amount": 3}), "done"])
    loops = LoopFactory(driver=driver, tools=[pay])
    async with session_of(MemoryStore(), *turns(20)) as (runtime, _):
        await runtime.execute("s", SendMessage("pay", loops))
        await runtime.execute("s", CompactTranscript(keep_last=0))
        after = await runtime.execute("s", ApproveToolCalls(loops))
        assert [m.text for m in after.state.transcript][-2:] == ["paid 3", "done"]
        assert after.state.status is ExecutionStatus.COMPLETED


async def test_a_killed_compaction_leaves_nothing_behind(opened):
    """Its claim lapses, recover clears it, and there is nothing to resume."""
    clock = FrozenClock()
    with use(clock=clock):
        async with opened() as store:
            runtime = SessionRuntime(store)
            await runtime.create(AGENT, session_id="s")
            await store.claim("s", version=1, owner="elsewhere:1")
            clock.advance(60)
            await recover(runtime, summing())
            assert await recover(runtime, summing()) == RecoveryReport()
            await runtime.execute("s", SendMessage("hi", summing("hello")))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_thousand_compactions_in_a_row(kind, tmp_path):
    """They are saved, loaded cold, and undone."""
    path = tmp_path / "s.db"
    store = MemoryStore() if kind == "memory" else SqliteStore(path)
    action = CompactTranscript(compact_strategy="truncate", keep_last=1)
    async with store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT, session_id="s")
        for n in range(1_000):
            view = session.state.with_messages(*turns(1, str(n)))
            session = await action.execute_on(session.with_state(view))
        assert sum(1 for _ in session.state.transcript.blocks()) == 1_000
        session = await store.save(session)
        if kind == "memory":
            await _check_thousand(runtime)
    if kind == "sqlite":
        async with SqliteStore(path) as store:
            await _check_thousand(SessionRuntime(store))


async def _check_thousand(runtime: SessionRuntime) -> None:
    session = await runtime.get_session("s")
    assert len(session.state.transcript) == 2
    assert sum(1 for _ in session.state.transcript.blocks()) == 1_000
    for left in (999, 998):
        session = await runtime.execute("s", UncompactTranscript())
        assert sum(1 for _ in session.state.transcript.blocks()) == left
        assert "question" in [m.text for m in session.state.transcript][-2]
    await runtime.execute("s", SendMessage("hi", summing("hello")))


# In the loop


WINDOW = ModelConfig("test:model", context_window=10_000)


def auto(script: Any, compaction: Any = None, **options: Any) -> LoopFactory:
    driver = script if isinstance(script, ScriptedDriver) else ScriptedDriver(script)
    return LoopFactory(driver=driver, model=WINDOW, compaction=compaction or AutoCompaction(), **options)


@asynccontextmanager
async def windowed(store: Any, *messages: Message) -> AsyncIterator[SessionRuntime]:
    async with store:
        runtime = SessionRuntime(store)
        await runtime.create(AgentDefinition("agent"), session_id="s")
        await runtime.execute("s", InjectMessage(*messages))
        yield runtime


async def test_a_run_compacts_before_its_prompt_fills_the_window(opened):
    """It compacts at 80 % of the window by default: on record, charged to the run, and only once."""
    driver = ScriptedDriver(summing_script("fine"))
    async with windowed(opened(), *turns(20, LONG[:1000])) as runtime:
        after = await runtime.execute("s", SendMessage("hi", auto(driver)))
        assert len(driver.requests) == 3, "two for the notes: a window is not filled to the brim for them, either"
        assert len(after.state.transcript) == 1 + 12 + 1
        assert after.state.usage.total_tokens == 45
        (event,) = [event async for event in runtime.events("s") if isinstance(event, Compaction)]
        assert (event.trigger, event.block.by) == ("window", "llm")
        (loop,) = (await runtime.record("s")).loops
        whole = await runtime.loop("s", loop.loop_id)
        assert (whole.usage.total_tokens, loop.usage.total_tokens) == (45, 45)
        assert whole.compaction_block is not None
        assert [m.text for m in driver.requests[2].messages][-1] == "hi"
        assert json_of(await runtime.get_session("s")) == json_of(after)
        restored = await runtime.execute("s", UncompactTranscript())
        assert len(restored.state.transcript) == 42


@pytest.mark.parametrize(
    ("messages", "compaction"),
    [
        (turns(3, LONG[:1000]), AutoCompaction()),
        (turns(20, LONG[:1000]), AutoCompaction(1.0, keep_last=40)),
        (turns(20, LONG[:1000]), None),
    ],
)
async def test_a_run_that_has_room_or_is_told_not_to_does_not_compact(messages, compaction):
    """Nothing happens below the share of the window, nor at any size with compaction=None."""
    driver = ScriptedDriver(summing_script("fine"))
    async with windowed(MemoryStore(), *messages) as runtime:
        loops = LoopFactory(driver=driver, model=WINDOW, compaction=compaction)
        after = await runtime.execute("s", SendMessage("hi", loops))
        if compaction is None or len(messages) < 10:
            assert len(after.state.transcript) == len(messages) + 2
            assert len(driver.requests) == 1


async def test_a_prompt_that_is_refused_as_too_long_is_compacted_and_sent_once_more(opened):
    """The same holds if the window is unknown; a second refusal fails the run."""

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == INSTRUCTIONS:
            return "sum"
        return "fine" if len(request.messages) < 15 else ContextTooLong("test:model", "too long")

    async with session_of(opened(), *turns(20)) as (runtime, _):
        driver = ScriptedDriver(reply)
        after = await runtime.execute("s", SendMessage("hi", LoopFactory(driver=driver)))
        assert after.state.final_response.text == "fine"
        assert len(driver.requests) == 3
        (event,) = [event async for event in runtime.events("s") if isinstance(event, Compaction)]
        assert event.trigger == "context_too_long"
        never = ScriptedDriver(lambda r: "sum" if r.system_prompt == INSTRUCTIONS else ContextTooLong("m", "too long"))
        await runtime.execute("s", InjectMessage(*turns(20)))
        failed = await runtime.execute("s", SendMessage("hi", LoopFactory(driver=never)))
        assert failed.state.status is ExecutionStatus.FAILED
        assert failed.state.errors[0].type == "ContextTooLong"
        assert len([r for r in never.requests if r.system_prompt != INSTRUCTIONS]) == 2


async def test_a_refusal_with_nothing_to_compact_fails_as_before():
    """One short message cannot be made shorter."""
    async with session_of(MemoryStore()) as (runtime, _):
        driver = ScriptedDriver(lambda _: ContextTooLong("m", "too long"))
        failed = await runtime.execute("s", SendMessage("hi", LoopFactory(driver=driver)))
        assert (failed.state.errors[0].type, len(driver.requests)) == ("ContextTooLong", 1)


async def test_a_summary_that_fails_in_a_run_gives_way_to_truncation():
    """The run continues: it is worth more than its summary."""

    def reply(request: ModelRequest) -> Any:
        return DriverError("no notes") if request.system_prompt == INSTRUCTIONS else "fine"

    async with windowed(MemoryStore(), *turns(20, LONG[:1000])) as runtime:
        after = await runtime.execute("s", SendMessage("hi", auto(reply)))
        assert after.state.status is ExecutionStatus.COMPLETED
        assert [block.by for block in after.state.transcript.blocks()] == ["truncate"]


async def test_output_that_overflows_in_the_middle_of_a_run_is_compacted():
    """Tool results that fill the window are compacted step by step, and the request is not forgotten."""

    @tool
    def read(n: int) -> str:
        """Read."""
        return f"{n} " + LONG * 2

    script = summing_script(*[ToolCall("read", {"n": n}) for n in range(20)], "done")
    driver = ScriptedDriver(script)
    async with windowed(MemoryStore(), Message.user("hello")) as runtime:
        loops = auto(driver, AutoCompaction(compact_strategy="truncate", keep_last=4), tools=[read])
        after = await runtime.execute("s", SendMessage("read it all", loops))
        assert after.state.status is ExecutionStatus.COMPLETED
        assert after.state.step_count == 21
        events = [event async for event in runtime.events("s") if isinstance(event, Compaction)]
        assert 1 < len(events) < 20
        assert all("read it all" in r.messages[0].text for r in driver.requests[8:])
        assert sum(1 for _ in after.state.transcript.blocks()) == len(events)
        assert json_of(await runtime.get_session("s")) == json_of(after)


async def test_providers_counts_move_the_trigger():
    """If a model counts twice the estimate, compaction starts at half the estimate."""
    heavy = Usage(input_tokens=6_000, output_tokens=5)
    driver = ScriptedDriver(summing_script("fine"), usage=heavy)
    loops = auto(driver)
    async with windowed(MemoryStore(), *turns(6, LONG[:1000])) as runtime:
        await runtime.execute("s", SendMessage("hi", loops))
        after = await runtime.execute("s", InjectMessage(*turns(3, LONG[:1000])))
        assert not list(after.state.transcript.blocks())
        after = await runtime.execute("s", SendMessage("hi", loops))
        assert list(after.state.transcript.blocks())


async def test_a_summary_that_fails_half_way_is_charged_for():
    """Truncation takes its place, and the tokens the model had used count in the run and on its record."""
    asked: list[int] = []

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt != INSTRUCTIONS:
            return "fine"
        asked.append(1)
        return "sum" if len(asked) == 1 else DriverError("out of order")

    used = Usage(input_tokens=100, output_tokens=10)
    loops = auto(ScriptedDriver(reply, usage=used), AutoCompaction(compact_strategy="llm"))
    async with windowed(MemoryStore(), *turns(20, LONG[:1000])) as runtime:
        after = await runtime.execute("s", SendMessage("hi", loops))
        assert len(asked) == 2
        assert [block.by for block in after.state.transcript.blocks()] == ["truncate"]
        assert (after.state.execution.compaction_usage, after.state.usage) == (used, used + used)
        assert (await runtime.record("s")).total_usage() == used + used


@pytest.mark.parametrize("how", ["fails", "cancelled", "over the limit"])
async def test_a_compaction_that_comes_to_nothing_is_on_record_with_what_it_took(opened, how):
    """The session is untouched and can be run; nothing waits to be recovered."""
    asked: list[int] = []
    again = asyncio.Event()

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt != INSTRUCTIONS:
            return "fine"
        asked.append(1)
        if len(asked) == 1:
            return "sum"
        again.set()
        return Delay(30, "too late") if how == "cancelled" else DriverError("out of order")

    used = Usage(input_tokens=100, output_tokens=10)
    loops = auto(ScriptedDriver(reply, usage=used))
    limit = {"hard_limit_tokens": 1, "hard_limit_strategy": "observation_mask"} if how == "over the limit" else {}
    async with windowed(opened(), *turns(4 if limit else 20, LONG[:1000])) as runtime:
        before = await runtime.get_session("s")
        compact = CompactTranscript(loops=loops, compact_strategy="llm", keep_last=2, **limit)
        work = asyncio.ensure_future(runtime.execute("s", compact))
        if how == "cancelled":
            await again.wait()
            work.cancel()
        with pytest.raises((CompactionFailed, InvalidData, asyncio.CancelledError)):
            await work
        assert json_of(await runtime.get_session("s")) == json_of(before)
        (loop,) = (await runtime.record("s")).loops
        assert (loop.continuation_kind.kind, loop.usage) == ("compaction", used)
        assert loop.status is (LoopStatus.COMPLETED if how == "cancelled" else LoopStatus.FAILED)
        assert await recover(runtime, loops) == RecoveryReport()
        assert (await recover(runtime, loops, session_id="s")).resumed == ()
        assert (await fsck(runtime.journal)).problems == ()
        after = await runtime.execute("s", SendMessage("hi", LoopFactory(driver=ScriptedDriver(["fine"]))))
        assert after.state.final_response.text == "fine"


@pytest.mark.parametrize("how", ["time limit", "cancelled", "empty"])
async def test_what_a_compaction_has_used_is_charged_whatever_becomes_of_it(how):
    """The model has answered once, with nothing, or before the run ended. The run's record agrees on the usage."""
    asked: list[int] = []
    again = asyncio.Event()

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt != INSTRUCTIONS:
            return "fine"
        asked.append(1)
        if how == "empty":
            return ""
        if len(asked) == 1:
            return "sum"
        again.set()
        return Delay(30, "too late")

    used = Usage(input_tokens=100, output_tokens=10)
    loops = auto(ScriptedDriver(reply, usage=used), AutoCompaction(compact_strategy="llm"))
    budget = ExecutionBudget(max_seconds=0.3 if how == "time limit" else None)
    async with windowed(MemoryStore(), *turns(20, LONG[:1000])) as runtime:
        definition = (await runtime.get_session("s")).definition
        await runtime.execute("s", ChangeDefinition(msgspec.structs.replace(definition, budget=budget)))
        run = asyncio.ensure_future(runtime.execute("s", SendMessage("hi", loops)))
        if how == "cancelled":
            await again.wait()
            run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        after = await runtime.get_session("s")
        assert after.state.execution.compaction_usage == used
        (loop,) = (await runtime.record("s")).loops
        whole = await runtime.loop("s", loop.loop_id)
        assert loop.usage == whole.usage == after.state.usage
        assert whole.compaction_usage == used
        events = [event async for event in runtime.events("s")]
        assert Replay((await runtime.get_session("s", version=3)).state).apply_all(events).state.usage == whole.usage


@pytest.mark.parametrize("share", [0, 1.1, "much", True])
def test_a_wrong_setting_is_named(share):
    """A wrong option and a value that is not a setting at all are named too."""
    with pytest.raises(InvalidData, match="share"):
        AutoCompaction(share)
    with pytest.raises(InvalidData, match="keep_first"):
        AutoCompaction(keep_first=3)
    with pytest.raises(InvalidData, match="keep_last"):
        AutoCompaction(keep_last=0)
    with pytest.raises(ConfigurationError, match="compaction"):
        LoopFactory(compaction=0.5)


async def test_listeners_hear_of_it():
    """Every listener of the loop gets the event."""
    heard: list[Compaction] = []
    bus = EventBus()
    bus.subscribe(Compaction, heard.append)
    async with windowed(MemoryStore(), *turns(20, LONG[:1000])) as runtime:
        await runtime.execute("s", SendMessage("hi", auto(summing_script("fine"), events=bus)))
    assert [event.trigger for event in heard] == ["window"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_run_killed_at_any_call_of_the_store_recovers_with_the_same_view(kind, after, tmp_path):
    """Compactions on record are not made again, and the summary on record is the one that is shown."""
    async with MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "s.db") as store:
        for call in range(1, 200):
            clock = FrozenClock(tick=0.0001)
            with use(clock=clock):
                failing, session = await _crashed_run(store, call, after=after)
                made = await _compactions(store, session.id)
                clock.advance(60)
                runtime = SessionRuntime(store)
                report = await recover(runtime, _reading_loops())
                assert report.failed == ()
                assert await recover(runtime, _reading_loops()) == RecoveryReport()
                kept = await runtime.get_session(session.id)
                told = await _compactions(store, session.id)
            assert told[: len(made)] == made
            assert [block.id for block in kept.state.transcript.blocks()] == [each.block.id for each in told][::-1]
            assert kept.state.usage == sum((each.usage for each in told), start=_usage_of_steps(kept))
            if kept.state.execution is not None:
                assert kept.state.final_response.text == "done"
                assert len(told) > 1
            if not failing.has_crashed:
                break
        assert 10 < call < 199


@tool(idempotent=True)
def read_on(n: int) -> str:
    """Read."""
    return f"{n} " + LONG * 2


def _reading_loops() -> LoopFactory:
    script = summing_script(*[ToolCall("read_on", {"n": n}) for n in range(8)], "done")
    return auto(script, AutoCompaction(compact_strategy="llm", keep_last=4), tools=[read_on])


async def _crashed_run(store: Any, call: int, *, after: bool) -> tuple[FailingStore, AgentSession]:
    session = await SessionRuntime(store).create(AgentDefinition("agent"))
    failing = FailingStore(store)
    failing.crash(call=call, after=after)
    with suppress(StoreError):
        await SessionRuntime(failing).execute(session.id, SendMessage("go", _reading_loops()))
    return failing, session


async def _compactions(store: Any, session_id: str) -> list[Compaction]:
    return [event async for event in SessionRuntime(store).events(session_id) if isinstance(event, Compaction)]


def _usage_of_steps(session: AgentSession) -> Usage:
    return sum((step.usage for step in session.state.steps), start=Usage())


async def test_branches_that_run_side_by_side_compact_each_for_itself(opened):
    """Each compacts in its own log; the session takes the view of the selected one."""
    async with windowed(opened(), *turns(20, LONG[:1000])) as runtime:
        action = SendParallel("hi", auto(summing_script("fine")), configs=[WINDOW, WINDOW], strategy=LongestAnswer())
        after = await runtime.execute("s", action)
        assert len(after.state.transcript) == 1 + 12 + 1
        assert json_of(await runtime.get_session("s")) == json_of(after)
        assert len([e async for e in runtime.events("s") if isinstance(e, Compaction)]) == 2
        assert len((await runtime.execute("s", UncompactTranscript())).state.transcript) == 42


async def test_a_record_with_compactions_is_kept_in_a_file(tmp_path):
    """The recorder gets the events, and its record comes back from the file unchanged."""
    recorder = SessionRecorder()
    bus = EventBus()
    bus.wiretap(recorder.on_event)
    async with windowed(MemoryStore(), *turns(20, LONG[:1000])) as runtime:
        await runtime.execute("s", SendMessage("hi", auto(summing_script("fine"), events=bus)))
    recorder.flush()
    (record,) = recorder.drain_completed()
    assert record.loops[0].compaction_block is not None
    assert record.loops[0].usage.total_tokens == 45
    save_session(record, tmp_path)
    assert load_session("s", tmp_path) == record


@pytest.mark.parametrize("messages", [200, 20_000])
async def test_what_a_compaction_writes_does_not_depend_on_the_history(messages, tmp_path):
    """Compact and uncompact write less than 4 KB beside the summary, however much is covered."""
    path = tmp_path / "s.db"

    def stored() -> int:
        db = apsw.Connection(str(path))
        sizes = [db.execute(f"SELECT coalesce(sum(length(body)), 0) FROM {table}").get for table in TABLES]
        return sum(sizes)

    async with session_of(SqliteStore(path), *turns(messages // 2)) as (runtime, before):
        start = stored()
        await runtime.execute("s", CompactTranscript(loops=summing()))
        compacted = stored()
        restored = await runtime.execute("s", UncompactTranscript())
        assert compacted - start < 4_096
        assert stored() - compacted < 4_096
        assert json_of(restored) == json_of(before)


TABLES = ("msg", "head", "value", "batch")


@given(
    story=stories,
    window=st.integers(40, 600),
    keep_last=st.integers(1, 8),
    strategy=st.sampled_from(["llm", "truncate", "observation_mask"]),
    has_notes=st.booleans(),
)
async def test_a_run_with_compactions_is_replayed_as_it_was(story, window, keep_last, strategy, has_notes):
    """The live and the replayed state have the same blocks; every prefix has the usage of its record."""
    replies, ending = story

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == INSTRUCTIONS:
            return "sum" if has_notes else DriverError("no notes")
        return [*replies, ending][request.step]

    bus, heard = listened()
    runtime, store, session = await started(bus)
    await runtime.execute(session.id, InjectMessage(*turns(4, "w" * 40)))
    before = (await store.load(session.id)).state
    loops = LoopFactory(
        driver=ScriptedDriver(reply),
        model=ModelConfig("test:model", context_window=window),
        tools=TOOLS,
        events=bus,
        compaction=AutoCompaction(keep_last=keep_last, compact_strategy=strategy),
    )
    after = (await runtime.execute(session.id, SendMessage("Go.", loops))).state
    events = on_record(heard)
    replayed = Replay(before).apply_all(events).state
    assert replayed.transcript == after.transcript
    assert seen(replayed) == seen(after)
    for length in range(1, len(events) + 1):
        assert folded(events[:length]).usage == Replay(before).apply_all(events[:length]).state.usage
    kept = (await store.load(session.id)).state
    assert list(kept.transcript) == list(after.transcript)
    told = folded(await _events(runtime, session.id))
    assert (told.usage, told.compaction_block) == (after.usage, folded(events).compaction_block)


async def _events(runtime: SessionRuntime, session_id: str) -> list[Any]:
    return [event async for event in runtime.events(session_id)]
