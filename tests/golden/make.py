"""Writes the golden files of the current stored format: `python tests/golden/make.py`.

Each format has a directory that is written once, by the release that introduces the format, and never again: those
files have to load for ever. So this refuses to touch a directory that is there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from perdure import codec
from perdure.archive import export_sessions
from perdure.model import ids
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget, ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    Compaction,
    CompactionBlock,
    CompactionPart,
    ContinuationKind,
    InputRejected,
    LoopConfigSnapshot,
    MessageEnd,
    MessageStart,
    ParallelLoopEnd,
    ParallelLoopStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
    UnknownEvent,
)
from perdure.model.message import Media, Message, Opaque, Thinking, ToolCall
from perdure.model.record import SessionRecord
from perdure.model.session import AgentSession
from perdure.model.step import InferenceResponse, ToolExecution
from perdure.model.stop import StopReason, StopSignal
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord
from perdure.protocols import Entry, Key, Sketch, Timer, Token
from perdure.recorder import SessionRecorder
from perdure.records.files import save_session
from perdure.stores.file import FileStore
from perdure.stores.format import heads
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.schema import newest_schema
from perdure.testing import FrozenClock
from perdure.testing.samples import fork, new_session, note, run_of, say, seen, show, tell, texts

HERE = Path(__file__).parent
CURRENT = f"format-{codec.FORMAT}-head-{heads.FORMAT}-schema-{newest_schema()}"
"""Values have a format, heads have one too, and SQLite files a schema. A number that is left out was the first.

A last word names a change without a new number: `totals` are the usage of all runs and the indexed metadata in
headers, and runs that are kept in their heads.
"""
RECORD = "record-2"
"""The form of a session record's file. The first has no checksum."""
FOREIGN = {
    "foreign-1": ("openai", "langchain", "adk", "claude", "pydantic-ai", "strands"),
    "foreign-2": ("agno",),
    "foreign-3": ("claude",),
}
"""The frameworks whose items are in a directory. A new one goes into a new directory, as does a new kind of hole."""
LANGGRAPH = "langgraph-1"
STRANDS = "strands-2"
FORGETFUL = "forgetful-1"
STORES: dict[str, Callable[[Path], Any]] = {
    "sessions.sqlite": SqliteStore,
    "files": FileStore,
}


async def furnish(store: Any) -> None:
    """Sessions with an example of everything that a store can hold."""
    alpha = await _converse(store)
    beta = await store.create(say(fork(alpha, id="beta"), "Only in the fork"))
    await store.save(beta.suspended())
    await _run(store)
    spawned = SpawnRef("gamma", "loop-1", "call-9", "research")
    deleted = await store.create(new_session("Hidden", id="delta", spawn_ref=spawned))
    await store.save(deleted.deleted())
    await _nest(store)
    await _line(store)
    with ids.use(clock=FrozenClock(datetime(2025, 3, 1, tzinfo=UTC))):  # as above
        await _queue(store)
    for token in tokens():
        await store.add_token(token)
    await store.drop_token(tokens()[-1].id)


def tokens() -> list[Token]:
    """Access tokens, as they were added; the last one was dropped. No secret has these digests."""
    created = datetime(2025, 4, 1, 12, 30, 15, 250_000, UTC)
    return [
        Token(digest="0" * 64, owner=None, may_write=True, created_at=created),
        Token(digest="1f" * 32, owner="ann", may_write=False, created_at=created + timedelta(days=1)),
        Token(
            digest="2e" * 32,
            owner="o'dd \\ \x00 münchen 😀",
            may_write=True,
            created_at=created + timedelta(days=2),
            expires_at=created + timedelta(days=30),
            name="the night shift \x00",
        ),
        Token(digest="3d" * 32, owner="ann", may_write=True, created_at=created + timedelta(days=3)),
    ]


async def _queue(store: Any) -> None:
    """`kappa`: items that wait, a timer, a schedule, one that has rung and one that was dropped. `gamma` waits too."""
    session = await store.create(new_session("Later", id="kappa", owner="ann"))
    for number, priority in enumerate((3, 7)):
        await store.post("kappa", Entry("queue", {"n": number}), priority=priority)
    for timer in timers(session.id):
        await store.set_timer(timer)
    (rings,) = [timer for timer in await store.timers("kappa") if timer.name == "rings"]
    await store.ring(rings)
    await store.drop_timer("kappa", "dropped")
    await store.reserve("provider", cost=1.0, burst=2.0)


def timers(session_id: SessionId) -> list[Timer]:
    """The timers of `kappa`, as they were set."""
    said = Entry("queue", {"text": "Did it arrive? \x00 😀", "list": [1, None]}, "run-1")
    return [
        Timer(session_id, "once", 1_800_000_000.5, said, 2),
        Timer(session_id, "rings", 1_700_000_000.0, Entry("queue", {"n": 2})),
        Timer(session_id, "digest", 1_800_000_060.0, said, cron="0 7 * * MON", timezone="Europe/Oslo"),
        Timer(session_id, "dropped", 1_800_000_000.0, said),
        Timer(session_id, "wake", 1_800_000_120.0),
    ]


async def _line(store: Any) -> None:
    """`eta-4`: a fork of a fork of a fork, one of which is erased, and another came to show more later."""
    session = await store.create(new_session("Said in 0", id="eta-0"))
    for number in range(1, 5):
        session = await store.create(fork(session, id=f"eta-{number}"))
        session = await store.save(say(session, f"Said in {number}"))
    shown = (*session.state.transcript.pieces, *(await store.load("delta")).state.transcript.pieces)
    with ids.use(clock=FrozenClock(datetime(2025, 2, 1, tzinfo=UTC))):  # stores read the clock more than once
        await store.save(show(session, type(session.state.transcript)(shown)))
    await store.delete("eta-2")


async def _nest(store: Any) -> None:
    """`epsilon`: compactions of compactions, so deep that blocks are stored apart."""
    session = await store.create(new_session("One", "Two", "Three", id="epsilon"))
    for level in range(60):
        view = say(session, f"Said at {level}").state.transcript
        summary = [Message.user(f"Summary {level}")]
        session = show(session, view.cover(0, len(view) - 2, summary, by="test", tokens_before=level))
    await store.save(run_of(await store.save(session)))


async def _converse(store: Any) -> AgentSession:
    definition = AgentDefinition(
        "support",
        label="Support",
        description="Answers questions. " * 20,
        system_prompt="Be brief.",
        model=ModelConfig("offline", temperature=0.5, settings={"seed": 7}),
        tools=("look_up",),
        budget=ExecutionBudget(max_steps=9, max_cost=1.5),
        metadata={"team": "north"},
    )
    given = new_session("Where is order 7?", id="alpha", definition=definition, owner="ann", tags=("vip", "eu"))
    session = await store.create(AgentSession.from_dict({**given.to_dict(), "from_the_future": {"kept": True}}))
    session = await store.save(run_of(session))
    session = await store.save(tell(session, *_content()).with_name("Order 7"))
    noted = note(note(session, "ticket", "OPS-142"), "notes", ["a long note"] * 40)
    session = await store.save(noted.with_indexed(("ticket",)))
    session = await store.save(note(note(session, "draft", ["a much longer note"] * 300), "ticket", "OPS-143"))
    view = session.state.transcript.cover(
        0, 4, [Message.assistant("They asked for order 7.")], by="test", tokens_before=90
    )
    session = await store.save(show(session, view))
    session = await store.save(show(session, session.state.transcript.trim(5)))
    state = session.state.with_system_prompt("Be very brief. " * 30).with_task("Find order 7")
    return await store.save(session.with_state(state.with_response_format({"type": "object"}).for_next_execution()))


def _content() -> list[Message]:
    holo = codec.convert(Message, {"role": "user", "id": "m-holo", "parts": [{"type": "hologram", "rays": [1, None]}]})
    return [
        Message.assistant(Thinking("hm", signature="c2ln", provider="p"), "So \x00 \u202e 😀"),
        Message.assistant(tool_calls=[ToolCall("look_up", {"n": 2**63, "f": -0.5}, id="call-2")]),
        Message.tool("call-2", {"found": [1, None, True]}, is_error=True),
        Message.user("See:", Media("image/png", data=bytes(range(16)), name="a.png"), Media("text/html", url="x:y")),
        Message.user("A large one:", Media("application/pdf", data=bytes(range(256)) * 20, name="b.pdf")),
        Message.assistant(Opaque("p", {"response": "r-1"}), metadata={"nested": {"a": [1]}}),
        holo,
    ]


async def _run(store: Any) -> None:
    """`gamma`: a run on record that was saved, and one that was killed while it answered."""
    session = await store.create(new_session("Go", id="gamma"))
    ahead = [Message.assistant("Written ahead")]
    start = [Entry("start", {"n": 1}, "loop-1"), Entry("note", None)]
    claim, appended = await store.claim("gamma", version=1, owner="runner", messages=ahead, entries=start)
    await store.append(
        claim, messages=[Message.assistant("On a branch")], entries=[Entry("go", [2], "loop-1")], log="b-1"
    )
    for word in ("left", "right"):
        await store.post("gamma", Entry("steer", word))
    session = await store.save(
        tell(session, *ahead),
        claim=claim,
        written=appended.written,
        entries=[Entry("end", {}, "loop-1")],
        taken=1,
        key=Key("key-1", "digest-1"),
    )
    lost = [Entry("start", {"n": 2}, "loop-2")]
    unsaved = [Message.user("Never saved")]
    claim, appended = await store.claim("gamma", version=2, owner="killed", messages=unsaved, entries=lost)
    for start, text in ((0, "Half "), (5, "an answer")):
        await store.sketch(claim, Sketch("loop-2", "message-2", text, start, seq=appended.seq))


async def describe(store: Any) -> dict[str, Any]:
    """Return all that a store answers, as JSON: files must be read like this for ever."""
    page = await store.list()
    hidden = await store.list(status="deleted")
    names = [info.id for info in (*page, *hidden)]
    return {"listed": [info.id for info in page], "sessions": {name: await _describe(store, name) for name in names}}


async def _describe(store: Any, name: str) -> dict[str, Any]:
    newest = await store.load(name)
    versions = [await store.load(name, version) for version in range(newest.info.first_version, newest.version + 1)]
    return {
        "versions": [_version(session) for session in versions],
        "record": [[entry.seq, entry.kind, entry.body, entry.run] for entry in await store.read(name)],
        "inbox": [[item.seq, item.kind, item.body] for item in await store.read(name, inbox=True)],
    }


def _version(session: AgentSession) -> dict[str, Any]:
    return {
        "version": session.version,
        "status": session.status.value,
        "texts": texts(session),
        "metadata": dict(session.state.metadata),
        "blocks": [[block.id, block.by, len(block)] for block in session.state.transcript.blocks()],
        "document": seen(session).to_dict(),
    }


async def furnish_forgetful(store: Any) -> None:
    """A session that has forgotten versions, twice, with runs before and after; its fork shows forgotten messages."""
    session = await store.create(new_session("First", id="theta"))
    for number in range(1, 4):
        session = await _ran(store, session, f"run-{number}")
        if number == 1:
            await store.create(fork(session, id="iota"))
    await store.post("theta", Entry("queued", {"message": "dealt with"}))
    session = await store.save(show(session, session.state.transcript.trim(2)), taken=1, key=Key("k", "digest"))
    await store.forget("theta", before=session.version)
    session = await _ran(store, await store.load("theta"), "run-4")
    session = await store.save(show(session, session.state.transcript.reset()))
    session = await store.save(note(await _ran(store, session, "run-5"), "mood", "calm"))
    await store.forget("theta", before=session.version)
    await _ran(store, await store.load("theta"), "run-6")


async def _ran(store: Any, session: AgentSession, run: str) -> AgentSession:
    asked, answer = Message.user(f"Asked of {run}"), Message.assistant(f"Said by {run}")
    start = Entry("agent_start", {"base_version": session.version, "message": {"id": asked.id}}, run)
    given = {"messages": [asked], "entries": [start]}
    claim, first = await store.claim(session.id, version=session.version, owner="ann", **given)
    second = await store.append(claim, messages=[answer], entries=[Entry("told", {"message": {"id": answer.id}}, run)])
    written, ended = {**first.written, **second.written}, [Entry("agent_end", {}, run)]
    saved: AgentSession = await store.save(tell(session, asked, answer), claim=claim, written=written, entries=ended)
    return saved


async def write_forgetful(directory: Path) -> None:
    await _write(directory, furnish_forgetful, tick=0)  # stores read the clock when they load, more or less often


async def write(directory: Path) -> None:
    session = await _write(directory, furnish)
    assert session is not None
    (directory / "session.json").write_text(_json(session.to_dict()))


async def _write(directory: Path, furnish: Callable[[Any], Awaitable[None]], *, tick: float = 1) -> AgentSession | None:
    """Write stores, an export, and the expected answers. Return a session of the last store, if it has that."""
    described, session = list[dict[str, Any]](), None
    for name, opened in STORES.items():
        numbers = count(1)
        with ids.use(clock=FrozenClock(tick=tick), ids=lambda numbers=numbers: f"id-{next(numbers):05}"):
            async with opened(directory / name) as store:
                await furnish(store)
                described.append(await describe(store))
                session = await store.load("alpha", 4)
                with ids.use(clock=FrozenClock(datetime(2030, 1, 1, tzinfo=UTC))):  # when the claim has lapsed
                    await export_sessions(store, directory / "export.jsonl")
    assert all(each == described[0] for each in described), "the stores do not agree"
    (directory / "expected.json").write_text(_json(described[0]))
    return session


def record() -> SessionRecord:
    """A session record with an example of everything that one can hold."""
    numbers = count(1)
    with ids.use(clock=FrozenClock(tick=1), ids=lambda: f"id-{next(numbers):05}"):
        recorder = SessionRecorder()
        for event in (*_worked(), *_compacted(), *_branched(), *_refused(), *_resumed(), *_unfinished()):
            assert recorder.on_event(event)
        recorder.flush()
        (made,) = recorder.drain_completed()
    return made


def _ids(loop_id: str) -> dict[str, Any]:
    return {"loop_id": loop_id, "session_id": "golden", "agent_id": "agent-1"}


_USED = Usage(input_tokens=100, output_tokens=20, cache_read_tokens=50, reasoning_tokens=3, cost=0.25)


def _worked() -> list[Any]:
    """`work`: a run of a sub-agent's session with a tool that fails, and one that spawns another."""
    on, config = _ids("work"), LoopConfigSnapshot("gpt-5", "openai", base_url="https://x.test/v1", temperature=0.5)
    call = ToolCall("research", {"n": 2**53, "f": -0.5, "text": "ü 😀"}, id="call-1")
    asked, asks = Message.user("Find it."), Message.assistant(tool_calls=[call], metadata={"step_id": "step-1"})
    found = Message.tool("call-1", {"found": [1, None, True]}, metadata={"step_id": "step-1"})
    answer = Message.assistant(Thinking("hm", signature="c2ln", provider="p"), "Found.", metadata={"step_id": "step-2"})
    child = ChildLoopRef("call-1", "research", "child-loop", "child-session")
    error = ErrorRecord("ValueError", "no", "Traceback …")
    spawn = SpawnRef("parent", "parent-loop", "call-0", "ask")
    done = ToolExecution(call, ids.now(), ids.now(), {"found": [1, None, True]}, error, Usage(input_tokens=7))
    said = (asked, asks, found, answer)
    return [
        AgentStart(**on, seq=1, config=config, metadata={"why": ["test", 1]}, spawn_ref=spawn, base_version=3),
        MessageEnd(**on, seq=2, message=asked),
        TurnStart(**on, seq=3, step_id="step-1", index=0),
        MessageStart(**on, seq=4, message_id=asks.id, role="assistant"),
        MessageEnd(**on, seq=5, message=asks, response=InferenceResponse("tool_call", _USED, "gpt-5", "openai", "r-1")),
        ToolExecutionStart(**on, seq=6, call=call, step_id="step-1"),
        ToolExecutionEnd(**on, seq=7, execution=done, step_id="step-1", child=child),
        MessageEnd(**on, seq=8, message=found),
        TurnEnd(**on, seq=9, step_id="step-1", index=0, usage=_USED + Usage(input_tokens=7), errors=(error,)),
        TurnStart(**on, seq=10, step_id="step-2", index=1),
        MessageEnd(**on, seq=11, message=answer, response=InferenceResponse("stop", _USED)),
        TurnEnd(**on, seq=12, step_id="step-2", index=1, usage=_USED),
        AgentEnd(
            **on,
            seq=13,
            status=ExecutionStatus.STOPPED,
            messages=said,
            stop_signals=(StopSignal(StopReason.STEPS_LIMIT_REACHED, "2 of 2", source="budget"),),
            usage=_USED + _USED + Usage(input_tokens=7),
            children=(child,),
        ),
    ]


def _compacted() -> list[Any]:
    """`compact`: a compaction on request."""
    on, kind = _ids("compact"), ContinuationKind("compaction")
    block = CompactionBlock("block-1", "llm", ids.now(), 4, "They looked for it.", 90, 12, 0, "gpt-5")
    parts = (CompactionPart(Message.user("They looked for it.")), CompactionPart(None, 3, 4))
    return [
        AgentStart(**on, seq=1, parent_loop_id="work", continuation=kind),
        Compaction(**on, seq=2, block=block, shown=parts, usage=_USED),
        AgentEnd(**on, seq=3, status=ExecutionStatus.COMPLETED, usage=_USED),
    ]


def _branched() -> list[Any]:
    """`left` and `right`: a parallel evaluation whose first branch failed and whose second was selected."""
    on, branches = _ids("left"), ("left", "right")
    said = Message.assistant("Right.", metadata={"step_id": "step-r"})
    failed = ErrorRecord("DriverError", "It could not answer.")
    signal = StopSignal(StopReason.ERROR_FORBADE, "It could not answer.", source="DriverError")
    model = {"model": {"name": "offline"}}
    branch = {"parent_loop_id": "compact", "group": branches, "input_at": (4, 5), "base_version": 5}
    return [
        ParallelLoopStart(**on, loop_ids=branches, parent_loop_id="compact", configs=(model, model), strategy="first"),
        AgentStart(**_ids("left"), seq=1, continuation=ContinuationKind("branch", "0"), **branch),
        AgentStart(**_ids("right"), seq=1, continuation=ContinuationKind("branch", "1"), **branch),
        TurnStart(**_ids("right"), seq=2, step_id="step-r", index=0),
        AgentEnd(**_ids("left"), seq=2, status=ExecutionStatus.FAILED, errors=(failed,), stop_signals=(signal,)),
        MessageEnd(**_ids("right"), seq=3, message=said, response=InferenceResponse("stop", _USED)),
        TurnEnd(**_ids("right"), seq=4, step_id="step-r", index=0, usage=_USED),
        AgentEnd(**_ids("right"), seq=5, status=ExecutionStatus.COMPLETED, messages=(said,), usage=_USED),
        ParallelLoopEnd(
            **on, loop_ids=branches, selected_loop_id="right", selected_config_index=1, evaluation_usage=_USED
        ),
    ]


def _refused() -> list[Any]:
    """`rude`: an input that a filter refused."""
    on, said = _ids("rude"), Message.user("!!!")
    return [
        AgentStart(**on, seq=1, parent_loop_id="right", continuation=ContinuationKind("rerun", "again")),
        MessageEnd(**on, seq=2, message=said),
        InputRejected(**on, seq=3, reason="rude"),
        AgentEnd(**on, seq=4, status=ExecutionStatus.STOPPED, messages=(said,), rejection="rude"),
    ]


def _resumed() -> list[Any]:
    """`resumed`: a run that lay dead for an hour, threw an answer away, and has an entry of a newer release."""
    on, said = _ids("resumed"), Message.assistant("Still here.")
    config = LoopConfigSnapshot("m", "p", "config-1", "p:m", "openai_responses", reasoning=True, thinking_level="high")
    return [
        AgentStart(**on, seq=1, parent_loop_id="rude", continuation=ContinuationKind("default"), config=config),
        UnknownEvent(**on, seq=2, kind="billed", body={"cents": 3}),
        AgentStart(**on, seq=3, parent_loop_id="rude", resumed=True, idle=3600.0),
        TurnStart(**on, seq=4, step_id="step-f", index=0),
        MessageEnd(**on, seq=5, message=said, response=InferenceResponse("stop", _USED)),
        TurnEnd(**on, seq=6, step_id="step-f", index=0, usage=_USED),
        AgentEnd(
            **on,
            seq=7,
            status=ExecutionStatus.COMPLETED,
            messages=(said,),
            usage=_USED + _USED,
            discarded_usage=_USED,
            idle=3600.0,
        ),
    ]


def _unfinished() -> list[Any]:
    """`cut`: a run that the flush has aborted."""
    on, said = _ids("cut"), Message.assistant("Well", metadata={"step_id": "step-c"})
    return [
        AgentStart(**on, seq=1, parent_loop_id="rude", continuation=ContinuationKind("default")),
        TurnStart(**on, seq=2, step_id="step-c", index=0),
        MessageEnd(**on, seq=3, message=said, response=InferenceResponse("stop", _USED)),
        TurnStart(**on, seq=4, step_id="step-d", index=1),
    ]


def describe_record(made: SessionRecord) -> dict[str, Any]:
    """Return a record's content about its loops, as JSON: its file must be read like this for ever."""
    return {
        "session": [made.session_id, made.agent_id, str(made.created_at), str(made.last_active_at)],
        "spawned_by": made.parent_spawn_ref.tool_call_id if made.parent_spawn_ref else None,
        "roots": [loop.loop_id for loop in made.root_loops()],
        "usage": [made.total_usage().total_tokens, made.total_usage().cost],
        "loops": {loop.loop_id: _described_loop(loop) for loop in made.loops},
    }


def _described_loop(loop: Any) -> dict[str, Any]:
    group = loop.parallel_group
    return {
        "status": [loop.status.value, loop.rejection, loop.stop_reason, str(loop.started_at), str(loop.ended_at)],
        "tree": [loop.parent_loop_id, loop.continuation_kind.kind, loop.continuation_kind.tag],
        "children": [*loop.children_loop_ids, *(ref.child_loop_id for ref in loop.child_loop_refs)],
        "config": [loop.config.provider, loop.config.model, loop.config.temperature] if loop.config else None,
        "messages": [[message.id, message.role, message.text] for message in loop.messages],
        "turns": [[turn.step_id, turn.index, list(turn.message_ids), turn.usage.total_tokens] for turn in loop.turns],
        "results": [done.result for turn in loop.turns for done in turn.tool_executions],
        "errors": [error.message for error in loop.errors],
        "events": [[type(event).__name__, event.seq] for event in loop.events],
        "block": [loop.compaction_block.id, loop.compaction_block.summary] if loop.compaction_block else None,
        "group": [list(group.all_loop_ids), group.selected_loop_id, group.is_selected] if group else None,
        "usage": [loop.usage.total_tokens, loop.compaction_usage.total_tokens, dict(loop.metadata)],
    }


def write_record(directory: Path) -> None:
    made = record()
    save_session(made, directory)
    (directory / "expected.txt").write_text(_json(describe_record(made)))


def write_foreign(names: Sequence[str], directory: Path) -> None:
    """Write messages that keep other frameworks' items, with and without their content."""
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.adapters.items import ITEMS
    from tests.adapters.test_forms import FORMS, redacted

    lines = []
    for name in names:
        for place, item in enumerate(ITEMS[name]):
            named = name in ("langchain", "adk", "claude") and place % 2 == 0
            message = FORMS[name].message(item, message_id=None if named else f"m-{place}")
            left = redacted(message)
            lines.append(
                {
                    "form": name,
                    "item": item,
                    "message": codec.encode_message(message).decode(),
                    "redacted": codec.encode_message(left).decode(),
                    "left": FORMS[name].items(left),
                }
            )
    (directory / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_langgraph(directory: Path) -> None:
    """Threads of LangGraph as one release keeps them, and the expected answers of LangGraph."""
    from tests.adapters.langgraph_golden import furnish_threads, told_of

    from perdure import MemoryStore, connect_blocking
    from perdure.adapters.langgraph import PerdureSaver

    saver = PerdureSaver(store=MemoryStore())
    furnish_threads(saver)
    with connect_blocking(saver._home.shared) as sessions:
        sessions.export(directory / "threads.jsonl")
    (directory / "told.json").write_text(_json(told_of(saver)))


def write_strands(directory: Path) -> None:
    """Sessions of Strands as one release keeps them, and the expected answers of Strands."""
    from tests.adapters.strands_golden import furnish_sessions, told_of

    from perdure import MemoryStore, connect_blocking
    from perdure.sessions.shared import shared

    store = shared(MemoryStore())
    furnish_sessions(store)
    with connect_blocking(store) as sessions:
        sessions.export(directory / "sessions.jsonl")
    (directory / "told.json").write_text(_json(told_of(store)))


def _json(plain: Any) -> str:
    return json.dumps(plain, indent=1, ensure_ascii=True) + "\n"


def main() -> None:
    wanted: dict[str, Callable[[Path], None]] = {CURRENT: lambda path: asyncio.run(write(path)), RECORD: write_record}
    wanted |= {name: partial(write_foreign, forms) for name, forms in FOREIGN.items()}
    wanted |= {LANGGRAPH: write_langgraph, STRANDS: write_strands}
    wanted |= {FORGETFUL: lambda path: asyncio.run(write_forgetful(path))}
    missing = {HERE / name: writes for name, writes in wanted.items() if not (HERE / name).exists()}
    if not missing:
        there = " and ".join(wanted)
        sys.exit(f"{there} are there. Golden files are never written again; a new format gets a new directory.")
    for directory, writes in missing.items():
        directory.mkdir()
        writes(directory)
        for lock in directory.rglob("*lock"):
            lock.unlink()
        print(f"wrote {directory}")


if __name__ == "__main__":
    main()
