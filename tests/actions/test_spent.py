"""The usage of a session: counted once, shown in its header, and reduced by no verb."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.golden.make import HERE

import perdure
from perdure import (
    AgentDefinition,
    ClearSession,
    DriverError,
    MemoryStore,
    ResetTranscript,
    ResumeSession,
    SendParallel,
    Sessions,
    SqliteStore,
    ToolCall,
    Usage,
    tool,
)
from perdure.errors import RunFailed
from perdure.stores.format.heads import encode_head
from perdure.testing import ScriptedDriver
from perdure.testing.samples import new_session

USED = Usage(100, 7, cost=0.25)


@tool
def look() -> str:
    """Look."""
    return "seen"


@tool(needs_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


def answer(request: Any) -> Any:
    """Do what the last message says: `look` and `pay` call a tool, `fail` fails, and any other is answered."""
    last = request.messages[-1]
    if last.role == "tool":
        return "done"
    word = last.text.split()[0]
    if word == "fail":
        return DriverError("It is broken.")
    return ToolCall(word, {}) if word in ("look", "pay") else "fine"


def connected(store: Any = "memory://") -> Sessions:
    return perdure.connect(store, tools=[look, pay], driver=ScriptedDriver(answer, usage=USED))


async def counted(app: Sessions, session_id: str = "s") -> Usage | None:
    """Return the usage a list shows for a session; check that its header and state agree."""
    (listed,) = await app.list(id=session_id)
    session = await app.session(session_id)
    assert listed.usage == session.state.total_usage
    assert (session.info.usage or Usage()) == listed.usage
    return listed.usage


async def recorded(app: Sessions, session_id: str = "s") -> Usage:
    """Return the sum of the headers of a session's loops, with those that wait."""
    return (await app.record(session_id)).total_usage()


async def act(app: Sessions, verb: str) -> None:
    try:
        match verb:
            case "approve" | "deny" | "undo" | "retry":
                await getattr(app, verb)("s", *(("no",) if verb == "deny" else ()))
            case "key":
                await app.send("s", "look once", key="k")
            case "clear" | "reset":
                await app.execute("s", {"clear": ClearSession(), "reset": ResetTranscript()}[verb])
            case "branches":
                await app.execute("s", SendParallel("hi", app.loops, configs=["a", "b", "c"]))
            case "compact":
                await app.compact("s", compact_strategy="llm", keep_last=1)
            case _:
                await app.send("s", verb)
    except (perdure.PerdureError, RunFailed):
        pass


VERBS = (
    "hi",
    "look",
    "pay",
    "fail",
    "approve",
    "deny",
    "undo",
    "retry",
    "key",
    "clear",
    "reset",
    "branches",
    "compact",
)


@given(st.lists(st.sampled_from(VERBS), max_size=12))
async def test_the_total_is_what_the_record_adds_up_to(verbs: Sequence[str]) -> None:
    """They agree after every verb, and the total never falls."""
    async with connected() as app:
        await app.open("s", AgentDefinition("agent", model="m"))
        last = Usage()
        for verb in verbs:
            await act(app, verb)
            total = await counted(app)
            assert total == await recorded(app), verbs
            assert total is not None
            assert total.total_tokens >= last.total_tokens
            last = total


async def test_a_fork_begins_at_zero() -> None:
    """It is charged with its own runs, and its parent with its own."""
    async with connected() as app:
        chat = await app.open("s")
        await chat.send("look")
        branch = await app.fork("s", "fork")
        assert await counted(app, "fork") == Usage()
        await branch.send("hi")
        assert (await counted(app, "fork"), await counted(app)) == (USED, USED + USED)
        await app.execute("s", perdure.AdoptBranch("fork"))
        assert await counted(app) == USED + USED


async def test_a_sub_agent_is_charged_to_its_caller() -> None:
    """Its own session counts the same usage again, which is why a sidebar asks for `top_level`."""
    helper = AgentDefinition("helper", description="Helps.")

    def reply(request: Any) -> Any:
        if request.system_prompt == "Lead." and request.messages[-1].role == "user":
            return ToolCall("helper", {"prompt": "Help."})
        return "done"

    driver = ScriptedDriver(reply, usage=USED)
    async with perdure.connect("memory://", subagents=[helper], driver=driver) as app:
        chat = await app.open("s", AgentDefinition("lead", system_prompt="Lead.", tools=("helper",)))
        await chat.send("go")
        (child,) = await app.list(parent="s")
        assert (await counted(app), child.usage) == (USED + USED + USED, USED)
        assert [each.id for each in await app.list(top_level=True)] == ["s"]


@pytest.mark.parametrize("kill_at", ["before", "after"])
async def test_a_recovered_run_is_counted_once(tmp_path: Path, kill_at: str) -> None:
    """The answers that the dead process had paid for are on record, and count."""
    from perdure.testing import FailingStore

    store = FailingStore(SqliteStore(tmp_path / "s.db"))
    async with connected(store) as app:
        chat = await app.open("s")
        await chat.send("hi")
        store.fail("save", after=kill_at == "after")
        with pytest.raises(perdure.StoreError):
            await chat.send("look")
        await app.recover()
        assert await counted(app) == USED + USED + USED == await recorded(app)


async def test_a_cancelled_run_keeps_its_cost() -> None:
    """A run whose call was never decided keeps its cost too."""
    async with connected() as app:
        chat = await app.open("s")
        await chat.send("pay")
        assert await counted(app) == USED
        await chat.cancel()
        await chat.reset()
        assert await counted(app) == USED


@pytest.mark.parametrize("name", ["sessions.sqlite", "files"])
async def test_what_an_older_release_has_run_is_not_known(name: str, tmp_path: Path) -> None:
    """None means unknown, not zero; it stays None, since a part of a total would look like the whole."""
    source = HERE / "format-1-head-2-schema-9" / name
    copy, is_file = tmp_path / name, name == "sessions.sqlite"
    shutil.copy(source, copy) if is_file else shutil.copytree(source, copy)
    store = SqliteStore(copy) if is_file else perdure.FileStore(copy)
    async with connected(store) as app:
        found = {each.id: each.usage for each in await app.list()}
        assert (found["beta"], found["eta-0"]) == (None, Usage())
        await app.execute("beta", ResumeSession())
        await app.execute("beta", ClearSession())
        assert [each.usage for each in await app.list(id="beta")] == [None]
        await app.fork("beta", "fork")
        assert await counted(app, "fork") == Usage()


async def test_a_session_without_runs_stores_nothing_of_it() -> None:
    """Neither its header nor its state has one byte more."""
    async with MemoryStore() as store:
        session = await store.create(new_session("Hello"))
        session = await store.save(session.with_tags(["vip"]))
        head, *_ = encode_head(session, "")
        assert b"usage" not in head
        assert b"spent" not in head
