"""A store with an example of everything, for tests that move, copy and check whole stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import postgres_server
from tests.crash import agent_process

from perdure import (
    AgentDefinition,
    DeleteSession,
    Entry,
    FileStore,
    ForkSession,
    LongestAnswer,
    LoopFactory,
    MemoryStore,
    Message,
    ModelRequest,
    PostgresStore,
    SendMessage,
    SendParallel,
    SessionRuntime,
    SqliteStore,
    StoreError,
    TagSession,
    ToolCall,
    Transcript,
    WriteMetadata,
)
from perdure.model.ids import SessionId, now
from perdure.protocols import Timer, Token
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver
from perdure.testing.samples import new_session, note, say, seen, show

KINDS = ("memory", "file", "sqlite", "postgres")


@asynccontextmanager
async def opened(kind: str, where: Path) -> AsyncIterator[Any]:
    match kind:
        case "memory":
            store: Any = MemoryStore()
        case "sqlite":
            store = SqliteStore(where / "sessions.db")
        case "postgres":
            store = PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
        case _:
            store = FileStore(where / "sessions")
    async with store:
        yield store


async def tell(store: Any, clock: FrozenClock) -> None:
    """Create sessions of every kind: run, forked, compacted, branched, nested, erased, hidden, interrupted."""
    await _conversation(store)
    await _forks(store)
    await _views(store)
    await _parallel(store)
    await _subagent(store)
    await _interrupted(store, "killed", agent_process.script(), clock)
    await _interrupted(store, "killed-early", agent_process.script(), clock, at=4)


async def _conversation(store: Any) -> None:
    runtime = SessionRuntime(store)
    await runtime.create(agent_process.AGENT, session_id="talk", owner="ada", tags=("vip", "münchen"))
    await runtime.execute("talk", SendMessage("Do it.", ledger_loops(), key="first"))
    await runtime.execute("talk", WriteMetadata("notes", "x" * 500))
    await runtime.execute("talk", TagSession("late"))
    await runtime.execute("talk", SendMessage("And again?", ledger_loops(["Yes 🎈."]), key="second"))
    await store.post("talk", Entry("note", {"text": "waits"}))
    for name, due in (("wake", 1.0), ("digest", 2.0)):
        await store.set_timer(Timer(SessionId("talk"), name, due, Entry("queue", {"text": "in time"})))
    await store.reserve("a key", cost=1.0, burst=1.0)
    for owner, digest in (("ada", "a" * 64), (None, "0" * 64)):
        await store.add_token(Token(digest=digest, owner=owner, may_write=owner is None, created_at=now()))


async def _forks(store: Any) -> None:
    runtime = SessionRuntime(store)
    talk = await store.load("talk")
    # The child's id is first in the alphabet, so no order of names puts its parent before it.
    await store.create(await ForkSession(at=4, dst="a-fork").execute_on(talk))
    await runtime.execute("a-fork", SendMessage("Another way.", ledger_loops(["So be it."])))
    await store.create(await ForkSession(dst="a-fork-of-it").execute_on(await store.load("a-fork")))
    await store.create(new_session("to", "be", "erased", id="gone"))
    await store.create(await ForkSession(at=2, dst="orphan").execute_on(await store.load("gone")))
    await store.save(say(await store.load("orphan"), "left alone"))
    await store.delete("gone")
    await store.create(new_session("hidden", id="hidden"))
    await runtime.execute("hidden", DeleteSession())


async def _views(store: Any) -> None:
    session = await store.create(new_session(*(f"m{number}" for number in range(100)), id="views"))
    await store.save(note(session, "deep", {"a": [1, 2.5, None]}))
    session = await store.load("views")
    covered = session.state.transcript.cover(0, 40, [Message.user("forty")], by="test")
    session = await store.save(show(session, covered))
    nested = session.state.transcript.cover(0, 5, [Message.user("nested")], by="test")
    session = await store.save(show(session, nested))
    holes = Transcript(piece for at in range(1, 50, 2) for piece in session.state.transcript[at : at + 1].pieces)
    more = (await store.load("views", 1)).state.transcript
    many = Transcript((*holes.pieces, *(piece for at in range(0, 100, 2) for piece in more[at : at + 1].pieces)))
    await store.save(show(session, many))


async def _parallel(store: Any) -> None:
    runtime = SessionRuntime(store)
    await runtime.create(agent_process.AGENT, session_id="branches")
    loops = ledger_loops(agent_process.branch_reply)
    await runtime.execute("branches", SendParallel("Do it.", loops, configs=["a", "b"], strategy=LongestAnswer()))
    await runtime.execute("branches", SendMessage("More.", ledger_loops(["Enough."])))


async def _subagent(store: Any) -> None:
    def reply(request: ModelRequest) -> Any:
        ask = ToolCall("helper", {"prompt": "Add it up."}, "ask")
        return ([ask, "Done."] if request.system_prompt == "boss" else ["It is 5."])[request.step]

    runtime = SessionRuntime(store)
    helper = AgentDefinition("helper", system_prompt="helper", description="Adds up.", tools=())
    await runtime.create(AgentDefinition("boss", system_prompt="boss", tools=("helper",)), session_id="boss")
    await runtime.execute("boss", SendMessage("Go.", LoopFactory(driver=ScriptedDriver(reply), subagents=[helper])))


async def _interrupted(store: Any, session_id: str, script: Any, clock: FrozenClock, at: int = 6) -> None:
    await SessionRuntime(store).create(agent_process.AGENT, session_id=session_id)
    failing = FailingStore(store)
    failing.crash(call=at, after=True)
    try:
        await SessionRuntime(failing).execute(session_id, SendMessage("Do it.", ledger_loops(script)))
    except StoreError:
        assert failing.has_crashed
    clock.advance(60)


def ledger_loops(replies: Any = None) -> LoopFactory:
    return LoopFactory(tools=_tools(), driver=ScriptedDriver(replies or agent_process.script()))  # type: ignore[arg-type]


def _tools() -> list[object]:
    return agent_process.tools("/dev/null")


async def account(store: Any) -> dict[str, Any]:
    """Return all that a store's methods say about its sessions, except for the store's own details."""
    runtime, told = SessionRuntime(store), dict[str, Any]()
    for status in (None, "deleted"):
        for info in await store.list(limit=1000, **({"status": status} if status else {})):
            told[info.id] = await _account_of(store, runtime, info)
    return {"sessions": told, "lapsed": sorted(await store.lapsed())}


async def _account_of(store: Any, runtime: SessionRuntime, info: Any) -> dict[str, Any]:
    record = await runtime.record(info.id)
    return {
        "info": info,
        "versions": [seen(await store.load(info.id, number)) for number in range(1, info.version + 1)],
        "newest": seen(await store.load(info.id)),
        "record": record,
        "loops": [await runtime.loop(info.id, loop.loop_id) for loop in record.loops]
        if hasattr(runtime, "loop")
        else [],
        "events": [event async for event in runtime.events(info.id)],
        "inbox": [(entry.kind, entry.body) for entry in await store.read(info.id, inbox=True)],
        "keys": [await store.find_key(info.id, name) for name in ("first", "second")],
        "children": [each.id for each in await store.list(parent=info.id)],
    }
