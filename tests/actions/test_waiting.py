"""Runs that wait for a person and are given up: they end on record, and their sub-agents with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import address_of, store_at

from perdure import (
    AdoptBranch,
    AgentDefinition,
    AgentEnd,
    AgentSession,
    ApproveToolCalls,
    ClearSession,
    CompleteSession,
    DeleteSession,
    EventBus,
    ExecutionStatus,
    FailSession,
    FileStore,
    ForkSession,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    ModelRequest,
    PerdureError,
    ResetTranscript,
    Rewind,
    SendMessage,
    SessionBusy,
    SessionNotActive,
    SessionRuntime,
    SessionStatus,
    SqliteStore,
    StopReason,
    StoreError,
    ToolCall,
    Undo,
    connect,
    tool,
)
from perdure.run_journal import owner_here
from perdure.testing import FailingStore, ScriptedDriver

STORES: dict[str, Any] = {
    "postgres": lambda path: store_at(address_of("postgres", path)),
    "memory": lambda path: MemoryStore(),
    "sqlite": lambda path: SqliteStore(path / "s.db"),
    "file": lambda path: FileStore(path / "sessions"),
}
AGENTS = [
    AgentDefinition(name, system_prompt=name, tools=tools)
    for name, tools in (("boss", ("mid",)), ("mid", ("leaf",)), ("leaf", ("pay",)))
]
USES = {"boss": "mid", "mid": "leaf"}
FORK = "a-fork"
VERBS: dict[str, Any] = {
    "undo": Undo,
    "reset": ResetTranscript,
    "rewind": lambda: Rewind(1),
    "clear": ClearSession,
    "adopt": lambda: AdoptBranch(FORK),
    "complete": CompleteSession,
    "fail": FailSession,
    "delete": DeleteSession,
}
CLOSED = {
    "complete": SessionStatus.COMPLETED,
    "fail": SessionStatus.FAILED,
    "delete": SessionStatus.DELETED,
}
paid: list[int] = []


@tool(needs_approval=True)
def pay(amount: int) -> str:
    paid.append(amount)
    return "paid"


def reply(request: ModelRequest) -> Any:
    name = request.system_prompt
    if request.step:
        return "Done."
    return ToolCall("pay", {"amount": 5}) if name == "leaf" else ToolCall(USES[name], {"prompt": "You."})


def loops(events: Any = None) -> LoopFactory:
    return LoopFactory(driver=ScriptedDriver(reply), subagents=AGENTS[1:], tools=[pay], events=events)


async def waiting(runtime: SessionRuntime) -> AgentSession:
    """Return a boss that waits for its sub-agent, which waits for its own, which waits for a person."""
    paid.clear()
    session = await runtime.create(AGENTS[0])
    await runtime.add(await ForkSession(dst=FORK).execute_on(session))
    return await runtime.execute(session.id, SendMessage("Go.", loops()))


async def family(runtime: SessionRuntime) -> dict[str, AgentSession]:
    found = [*await runtime.list_sessions(), *await runtime.list_sessions(status="deleted")]
    return {info.agent_name: await runtime.get_session(info.id) for info in found if info.id != FORK}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_that_gives_a_waiting_run_up_ends_it_on_record(verb: str, kind: str, tmp_path: Path) -> None:
    """The run has an end with its messages and usage; its sub-agents have ended, and no decision is left."""
    async with STORES[kind](tmp_path) as store:
        runtime = SessionRuntime(store)
        session = await waiting(runtime)
        after = await runtime.execute(session.id, VERBS[verb]())
        assert after.status is CLOSED.get(verb, SessionStatus.ACTIVE)
        (loop,) = (await runtime.record(session.id)).loops
        assert (loop.status, loop.stop_reason) == (LoopStatus.COMPLETED, "user_requested")
        assert (loop.usage, loop.usage.total_tokens) == (session.state.usage, 15)
        whole = await runtime.loop(session.id, loop.loop_id)
        assert [message.id for message in whole.messages] == [message.id for message in session.state.messages]
        for each in (await family(runtime)).values():
            assert await store.is_claimed(each.id) is False
            with pytest.raises(PerdureError):
                await runtime.execute(each.id, ApproveToolCalls(loops()))
        assert paid == []


@pytest.mark.parametrize("verb", ["undo", "reset", "rewind", "clear", "adopt"])
async def test_the_session_takes_messages_then(verb: str) -> None:
    """It is active: on the next message it asks again for the approval."""
    runtime = SessionRuntime(MemoryStore())
    session = await waiting(runtime)
    await runtime.execute(session.id, VERBS[verb]())
    children = {name: each.id for name, each in (await family(runtime)).items() if name != "boss"}
    assert {(await runtime.get_session(each)).status for each in children.values()} == {SessionStatus.FAILED}
    session = await runtime.execute(session.id, SendMessage("Go.", loops()))
    session = await runtime.execute(session.id, ApproveToolCalls(loops()))
    assert (session.status, session.state.status, paid) == (SessionStatus.ACTIVE, ExecutionStatus.COMPLETED, [5])
    for each in children.values():
        with pytest.raises(SessionNotActive):
            await runtime.execute(each, ApproveToolCalls(loops()))


async def test_listeners_hear_the_end_once_it_is_saved() -> None:
    """Each given-up run sends its end: the sub-agents' first."""
    bus = EventBus()
    runtime = SessionRuntime(MemoryStore(), events=bus)
    session = await waiting(runtime)
    heard: list[AgentEnd] = []
    bus.subscribe(AgentEnd, heard.append)
    await runtime.execute(session.id, Undo())
    ids = {each.id: name for name, each in (await family(runtime)).items()}
    assert [ids[event.session_id] for event in heard if event.session_id] == ["leaf", "mid", "boss"]
    assert {event.status for event in heard} == {ExecutionStatus.STOPPED}
    assert {event.stop_signals[-1].reason for event in heard} == {StopReason.USER_REQUESTED}


async def test_a_verb_that_is_refused_ends_nothing() -> None:
    """A refused verb leaves the run waiting, and it can be approved."""
    runtime = SessionRuntime(MemoryStore())
    session = await waiting(runtime)
    for verb in (Rewind("no such message"), Rewind(99), AdoptBranch("nobody")):
        with pytest.raises(PerdureError):
            await runtime.execute(session.id, verb)
    assert await runtime.get_session(session.id) == session
    session = await runtime.execute(session.id, ApproveToolCalls(loops()))
    assert paid == [5]


async def test_a_save_that_fails_leaves_no_claim() -> None:
    """The verb can be repeated, and then the run ends."""
    store = MemoryStore()
    session = await waiting(SessionRuntime(store))
    failing = FailingStore(store)
    failing.fail("save", call=3)  # the boss's, after those of its sub-agents
    with pytest.raises(StoreError):
        await SessionRuntime(failing).execute(session.id, Undo())
    runtime = SessionRuntime(store)
    after = await runtime.execute(session.id, Undo())
    assert (after.status, [loop.stop_reason for loop in (await runtime.record(session.id)).loops]) == (
        SessionStatus.ACTIVE,
        ["user_requested"],
    )


async def test_a_run_that_somebody_has_taken_up_is_not_given_up() -> None:
    """While its sub-agent runs, the verb is refused as busy, and nothing is changed."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await waiting(runtime)
    leaf = (await family(runtime))["leaf"]
    claim, _ = await store.claim(leaf.id, version=leaf.version, owner=owner_here())
    for verb in (Undo(), DeleteSession()):
        with pytest.raises(SessionBusy):
            await runtime.execute(session.id, verb)
    assert await runtime.get_session(session.id) == session
    await store.release(claim)
    session = await runtime.execute(session.id, ApproveToolCalls(loops()))
    assert paid == [5]


async def test_a_store_without_a_journal_ends_them_too() -> None:
    """Nothing is recorded; the sub-agents' sessions still end."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    runtime.journal = None
    session = await waiting(runtime)
    after = await runtime.execute(session.id, Undo())
    assert after.status is SessionStatus.ACTIVE
    children = [each for name, each in (await family(runtime)).items() if name != "boss"]
    assert {each.status for each in children} == {SessionStatus.FAILED}


async def test_deleting_a_session_hides_its_sub_agents() -> None:
    """All of its sub-agents are hidden with it, at any depth; its forks stay."""
    runtime = SessionRuntime(MemoryStore())
    session = await waiting(runtime)
    await runtime.execute(session.id, DeleteSession())
    assert [info.id for info in await runtime.list_sessions()] == [FORK]
    assert len(await runtime.list_sessions(status="deleted")) == 3


@pytest.mark.parametrize("kind", STORES)
async def test_erasing_a_session_erases_its_sub_agents(kind: str, tmp_path: Path) -> None:
    """All are erased, hidden ones too; the returned ids name them, and `purge` counts them."""
    async with connect(STORES[kind](tmp_path)) as sessions:
        runtime = sessions.runtime
        session = await waiting(runtime)
        ids = {each.id for each in (await family(runtime)).values()}
        await runtime.execute((await family(runtime))["leaf"].id, DeleteSession())
        assert set(await sessions.erase(session.id)) == ids
        assert [info.id for info in await sessions.list()] == [FORK]
        assert not await sessions.list(status="deleted")
        await sessions.erase(FORK)
        session = await waiting(runtime)
        await runtime.execute(session.id, FailSession())
        assert await sessions.purge(status="failed") == 3


@pytest.mark.parametrize("is_bulk", [True, False])
@pytest.mark.parametrize("running", ["boss", "leaf"])
async def test_none_is_erased_while_one_runs(running: str, is_bulk: bool) -> None:
    """No session of a family is erased while one of them runs; also if the store erases one by one."""
    store: Any = MemoryStore() if is_bulk else FailingStore(MemoryStore())
    async with connect(store) as sessions:
        session = await waiting(sessions.runtime)
        journal = sessions.runtime.journal
        assert journal is not None
        runs = (await family(sessions.runtime))[running]
        claim, _ = await journal.claim(runs.id, version=runs.version, owner=owner_here())
        with pytest.raises(SessionBusy):
            await sessions.erase(session.id)
        assert len(await family(sessions.runtime)) == 3
        await journal.release(claim)
        assert [*await sessions.erase(session.id)][-1] == session.id
        assert [info.id for info in await sessions.list()] == [FORK]
