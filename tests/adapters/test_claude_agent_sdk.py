"""The Claude Agent SDK keeps its transcripts in a store, and perdure's verbs work on them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("claude_agent_sdk")

import anyio
from claude_agent_sdk import (
    ClaudeAgentOptions,
    delete_session_via_store,
    fold_session_summary,
    fork_session_via_store,
    get_session_messages_from_store,
    list_sessions_from_store,
    project_key_for_directory,
    rename_session_via_store,
)
from claude_agent_sdk._internal.session_resume import materialize_resume_session
from claude_agent_sdk.testing import run_session_store_conformance
from tests import postgres_server
from tests.adapters import claude_process
from tests.adapters.claude_process import KEY, PROJECT, SESSION, SUBPATH, chain, entry
from tests.adapters.items import ITEMS
from tests.adapters.processes import run_and_kill, run_at_once

from perdure import MemoryStore, Message, PostgresStore, SessionBusy, SessionConflict, SessionNotActive, connect
from perdure.adapters.claude_agent_sdk import PerdureSessionStore
from perdure.adapters.home import Home
from perdure.cli.family_tree import tree_of
from perdure.model import ids
from perdure.sessions.shared import SharedStore, shared
from perdure.testing import FrozenClock

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
SUB: Any = {**KEY, "subpath": SUBPATH}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedStore]:
    """A store of each kind."""
    made: Any = MemoryStore()
    if request.param == "sqlite":
        made = f"sqlite:///{tmp_path}/a.db"
    elif request.param == "postgres":
        made = PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path))
    store = shared(made)
    yield store
    store.close()


@pytest.fixture
def store() -> Iterator[PerdureSessionStore]:
    made = shared(MemoryStore())
    yield PerdureSessionStore(store=made)
    made.close()


async def texts(store: PerdureSessionStore, session_id: str = SESSION) -> list[str]:
    """What perdure shows of a transcript."""
    session = await store.chat(session_id, project_key=PROJECT).session()
    return [message.text for message in session.state.messages]


async def conversation(store: PerdureSessionStore, key: Any = KEY) -> list[str]:
    """What Claude is shown: the chain of entries from the last one back, as it is materialized for a resume."""
    entries = {each["uuid"]: each for each in await store.load(key) or [] if "parentUuid" in each}
    said, at = [], next(reversed(entries), None)
    while at in entries:
        content = entries[at]["message"]["content"]
        said.append(content if isinstance(content, str) else "".join(block.get("text", "") for block in content))
        at = entries[at]["parentUuid"]
    return said[::-1]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_sdks_own_contracts_hold(kept: SharedStore, backend: str) -> None:
    """All 14 behaviours that the SDK asks of a store, each time for an owner who has nothing there yet."""
    owners = count()
    made = lambda: PerdureSessionStore(store=kept, owner=f"{backend}-{next(owners)}")  # noqa: E731
    anyio.run(partial(run_session_store_conformance, made), backend=backend)
    assert next(owners) > 14


def test_the_contracts_hold_without_owners() -> None:
    """Each contract has a store of its own."""
    anyio.run(partial(run_session_store_conformance, lambda: PerdureSessionStore(store=MemoryStore())))


async def test_entries_come_back_the_same(store: PerdureSessionStore) -> None:
    """Any JSON does, whatever Claude means by it, and what is said can be read."""
    odd = [
        {"type": "mode"},
        {"type": "x", "n": float("inf"), "t": "\ud800", "deep": [{}]},
        {"type": "summary", "summary": "S"},
    ]
    await store.append(KEY, [*ITEMS["claude"], *odd])  # type: ignore[list-item]
    assert await store.load(KEY) == [*ITEMS["claude"], *odd]
    assert "Where is my order?" in await texts(store)


async def test_an_entry_is_kept_once(store: PerdureSessionStore) -> None:
    """The SDK sends a batch again whose answer it has not heard. What has no uuid is not told apart."""
    batch: Any = [*chain("a", 4), {"type": "custom-title", "customTitle": "Orders"}]
    await store.append(KEY, batch)
    await store.append(KEY, batch)
    assert await store.load(KEY) == [*batch, batch[-1]]
    again = PerdureSessionStore(store=store._home.shared)
    await again.append(KEY, [batch[0], batch[0], *chain("b", 1)])
    assert [each.get("uuid") for each in await again.load(KEY) or []][-2:] == [None, "b-0"]


async def test_a_sub_agent_is_a_child(store: PerdureSessionStore) -> None:
    """`perdure tree` shows it below its session, also if its entries come first."""
    await store.append(SUB, chain("sub", 2))  # type: ignore[arg-type]
    assert await store.load(KEY) is None
    assert await store.list_sessions(PROJECT) == []
    await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    assert await store.list_subkeys({"project_key": PROJECT, "session_id": SESSION}) == [SUBPATH]
    chat = store.chat(SESSION, project_key=PROJECT)
    async with connect(store._home.shared) as sessions:
        (child,) = (await tree_of(sessions, chat.id, limit=5)).children
    assert (child.kind, child.title) == ("subagent", f"claude-agent-sdk “{SUBPATH}”")
    assert await texts(store) == ["Where is order 0?", "Order 0 is on its way."]


async def test_summaries_are_folded_as_entries_come(
    store: PerdureSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what all entries at once would give, and to list them reads no transcript."""
    entries: Any = [*chain("a", 6), {"type": "custom-title", "customTitle": "Orders"}]
    for each in entries:
        await store.append(KEY, [each])
    await store.append(SUB, entries)

    async def refuse(*_: object) -> None:
        raise AssertionError("a transcript was read")

    monkeypatch.setattr(store._home.shared, "load", refuse, raising=False)
    (summary,) = await store.list_session_summaries(PROJECT)
    assert summary["data"] == fold_session_summary(None, KEY, entries)["data"]
    assert await store.list_sessions(PROJECT) == [{"session_id": SESSION, "mtime": summary["mtime"]}]


async def test_a_project_with_a_long_name_is_listed(store: PerdureSessionStore) -> None:
    """The SDK's keys of long paths are longer than an index holds."""
    project = "-home-" + "x" * 300
    await store.append({"project_key": project, "session_id": SESSION}, chain("a", 1))  # type: ignore[arg-type]
    assert [each["session_id"] for each in await store.list_sessions(project)] == [SESSION]
    assert await store.list_sessions(project[:-1]) == []


async def test_transcripts_kept_within_a_millisecond_have_an_order(store: PerdureSessionStore) -> None:
    """The SDK sorts by times in milliseconds, and shows the newest first."""
    keys = [{**KEY, "session_id": f"{SESSION[:-2]}{number}"} for number in range(10, 40)]
    with ids.use(clock=FrozenClock(tick=0.000_001)):
        for key in keys:
            await store.append(key, [entry("u", None, "Hi")])  # type: ignore[typeddict-item]
    listed = await store.list_sessions(PROJECT)
    assert len({each["mtime"] for each in listed}) == len(keys)
    newest_first = sorted(listed, key=lambda each: -each["mtime"])
    assert [each["session_id"] for each in newest_first] == [key["session_id"] for key in reversed(keys)]
    assert [each["mtime"] for each in await store.list_session_summaries(PROJECT)] == [each["mtime"] for each in listed]


async def test_a_fork_is_a_session_of_the_sdk(store: PerdureSessionStore) -> None:
    """It is known by its id, copies nothing, and goes its own way. It outlives what it was forked from."""
    await store.append(KEY, chain("a", 4))  # type: ignore[arg-type]
    fork = await store.chat(SESSION, project_key=PROJECT).fork(at=2)
    key: Any = {"project_key": PROJECT, "session_id": fork.id}
    await store.append(key, [entry("b-1", "a-1", "And order 7?", fork.id)])  # type: ignore[list-item]
    await store.append({**key, "subpath": SUBPATH}, chain("sub", 1))  # type: ignore[arg-type]
    assert {each["session_id"] for each in await store.list_sessions(PROJECT)} == {SESSION, fork.id}
    await store.delete(KEY)
    assert await store.load(KEY) is None
    assert [each["uuid"] for each in await store.load(key) or []] == ["a-0", "a-1", "b-1"]
    assert {each["sessionId"] for each in await store.load(key) or []} == {fork.id}
    assert await store.list_subkeys(key) == [SUBPATH]
    assert await store.load({**key, "project_key": "another"}) is None
    assert store.chat(fork.id, project_key=PROJECT).id == fork.id


async def test_an_owners_fork_is_found_by_its_name() -> None:
    """The SDK does not know of the mark that the ids of an owner's sessions begin with."""
    kept = shared(MemoryStore())
    ada, bob = (PerdureSessionStore(store=kept, owner=owner) for owner in ("ada", "bob"))
    await ada.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    fork = await ada.chat(SESSION, project_key=PROJECT).fork()
    listed = {each["session_id"] for each in await ada.list_sessions(PROJECT)} - {SESSION}
    (session_id,) = listed
    assert fork.id.endswith(f".{session_id}")
    assert len(await ada.load({"project_key": PROJECT, "session_id": session_id}) or []) == 2
    assert await bob.load(KEY) is None
    assert await bob.load({"project_key": PROJECT, "session_id": session_id}) is None
    assert await bob.list_sessions(PROJECT) == []
    kept.close()


async def test_undo_shows_what_was_before(store: PerdureSessionStore) -> None:
    """Claude goes on from there, and what follows is kept."""
    await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    await store.append(KEY, chain("a", 4)[2:])  # type: ignore[arg-type]
    assert await store.chat(SESSION, project_key=PROJECT).undo() == 2
    assert [each["uuid"] for each in await store.load(KEY) or []] == ["a-0", "a-1"]
    await store.append(KEY, [entry("b-2", "a-1", "Another?")])  # type: ignore[list-item]
    assert await conversation(store) == ["Where is order 0?", "Order 0 is on its way.", "Another?"]


async def test_what_is_hidden_is_not_brought_back_by_a_repeat(store: PerdureSessionStore) -> None:
    """An entry that was undone or covered is known still, also to a process that has not seen it."""
    await store.append(KEY, chain("a", 6))  # type: ignore[arg-type]
    chat = store.chat(SESSION, project_key=PROJECT)
    await chat.compact(keep_last=1, compact_strategy="custom", custom_compactor=lambda _: ["Much was said."])
    await store.append(KEY, chain("b", 1))  # type: ignore[arg-type]
    await chat.undo()
    for each in (store, PerdureSessionStore(store=store._home.shared)):
        await each.append(KEY, [*chain("a", 6), *chain("b", 1)])  # type: ignore[arg-type]
    assert await conversation(store) == ["Much was said.", "Order 2 is on its way."]
    fork = await chat.fork()
    await store.append({**KEY, "session_id": fork.id}, [*chain("a", 6)[5:], *chain("c", 1)])  # type: ignore[arg-type]
    assert (await texts(store, fork.id))[1:] == ["Order 2 is on its way.", "Where is order 0?"]


async def test_compact_and_uncompact_keep_the_chain(store: PerdureSessionStore) -> None:
    """A summary stands in the chain where the entries stood that it covers; these come back as they were."""
    await store.append(KEY, chain("a", 8))  # type: ignore[arg-type]
    before = await store.load(KEY)
    chat = store.chat(SESSION, project_key=PROJECT)
    await chat.compact(
        keep_last=3, compact_strategy="custom", custom_compactor=lambda _: ["Three orders were asked for."]
    )
    shown = await conversation(store)
    assert shown == [
        "Three orders were asked for.",
        "Order 2 is on its way.",
        "Where is order 3?",
        "Order 3 is on its way.",
    ]
    await chat.inject(Message.user("By the way, hurry."))
    await store.append(KEY, [entry("b-8", "a-7", "Where is order 9?")])  # type: ignore[list-item]
    assert (await conversation(store))[-3:] == [shown[-1], "By the way, hurry.", "Where is order 9?"]
    assert all(each["sessionId"] == SESSION and each["cwd"] for each in await store.load(KEY) or [])
    await chat.uncompact()
    assert (await store.load(KEY) or [])[:8] == before


async def test_a_redacted_entry_is_still_valid(store: PerdureSessionStore) -> None:
    """Nothing of what it said is left, in the summary neither, and the chain holds."""
    secret = "4111 1111 1111 1111"
    entries = [entry("a-0", None, f"My card is {secret}, is it?"), entry("a-1", "a-0", "Noted.")]
    await store.append(KEY, entries)  # type: ignore[arg-type]
    assert await store.chat(SESSION, project_key=PROJECT).redact(["a-0"]) == 1
    loaded = await store.load(KEY) or []
    assert secret not in repr(loaded) + repr(await store.list_session_summaries(PROJECT))
    assert await conversation(store) == ["[redacted]", "Noted."]
    kept: Any = ("type", "uuid", "parentUuid", "sessionId", "cwd", "timestamp")
    assert [loaded[0][name] for name in kept] == [entries[0][name] for name in kept]


async def test_a_deleted_session_is_not_written_to(store: PerdureSessionStore) -> None:
    """What a person has deleted stays hidden until it is restored; the SDK's own deletion erases it."""
    await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    chat = store.chat(SESSION, project_key=PROJECT)
    await chat.delete()
    assert await store.list_sessions(PROJECT) == []
    with pytest.raises(SessionNotActive):
        await store.append(KEY, chain("b", 1))  # type: ignore[arg-type]
    await chat.restore()
    assert len(await store.load(KEY) or []) == 2
    await chat.delete()
    await store.delete(KEY)
    assert await store.load(KEY) is None


async def test_a_claimed_session_is_refused(store: PerdureSessionStore) -> None:
    """While perdure runs the session nobody else writes; the SDK tries again, and reports what it could not send."""
    await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    chat, verbs = store.chat(SESSION, project_key=PROJECT), store._home.store
    claim, _ = await verbs.claim(chat.id, version=1, owner="somebody")
    with pytest.raises(SessionBusy):
        await store.append(KEY, chain("a", 3))  # type: ignore[arg-type]
    with pytest.raises(SessionBusy):
        await store.delete(KEY)
    await verbs.release(claim)
    await store.append(KEY, chain("a", 3))  # type: ignore[arg-type]
    assert len(await store.load(KEY) or []) == 3


async def test_another_agents_session_is_refused(store: PerdureSessionStore) -> None:
    """Neither its messages nor the session itself are touched."""
    other = Home("other", store._home.shared)
    await other.run(other.keep(other.new(store._id_of(KEY))))
    for refused in (store.append(KEY, chain("a", 1)), store.load(KEY), store.delete(KEY)):  # type: ignore[arg-type]
        with pytest.raises(SessionConflict, match="'other'"):
            await refused


async def test_appends_are_kept_in_the_order_of_their_calls(store: PerdureSessionStore) -> None:
    """Those that are under way at once are not mixed up."""
    entries = chain("a", 40)
    await asyncio.gather(*(store.append(KEY, [each]) for each in entries))  # type: ignore[list-item]
    assert await store.load(KEY) == entries


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_caller_who_gives_up_cancels_nothing(tmp_path: Path, backend: str) -> None:
    """The SDK does not send again what took too long: it may land still, and it does."""
    store = PerdureSessionStore(store=f"sqlite:///{tmp_path}/a.db")

    async def give_up() -> None:
        with anyio.move_on_after(-1):
            await store.append(KEY, chain("b", 2))  # type: ignore[arg-type]  # which is not begun, or is carried out
        with anyio.move_on_after(0.0001):
            await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
        await store.append(KEY, chain("a", 1))  # type: ignore[arg-type]  # which waits for the one before
        assert [each for each in await store.load(KEY) or [] if each["uuid"] in ("a-0", "a-1")] == chain("a", 2)

    anyio.run(give_up, backend=backend)
    store._home.shared.close()


async def test_the_sdks_own_verbs_work(store: PerdureSessionStore, tmp_path: Path) -> None:
    """Rename, fork, list, read, resume and delete, each through the SDK."""
    project = project_key_for_directory(tmp_path)
    uuids = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(4)]
    said = ["Where is order 0?", "On its way.", "And 1?", "Lost."]
    entries = [entry(uuid, uuids[n - 1] if n else None, said[n]) for n, uuid in enumerate(uuids)]
    await store.append({"project_key": project, "session_id": SESSION}, entries)  # type: ignore[arg-type]
    await rename_session_via_store(store, SESSION, "Orders", directory=str(tmp_path))
    forked = await fork_session_via_store(store, SESSION, directory=str(tmp_path))
    titles = {
        each.session_id: each.custom_title for each in await list_sessions_from_store(store, directory=str(tmp_path))
    }
    assert titles == {SESSION: "Orders", forked.session_id: "Orders (fork)"}
    messages = await get_session_messages_from_store(store, forked.session_id, directory=str(tmp_path))
    assert len(messages) == 4
    made = await materialize_resume_session(ClaudeAgentOptions(cwd=tmp_path, session_store=store, resume=SESSION))
    assert made is not None
    assert len((made.config_dir / "projects" / project / f"{SESSION}.jsonl").read_text().splitlines()) == 5
    await made.cleanup()
    await delete_session_via_store(store, SESSION, directory=str(tmp_path))
    assert [each.session_id for each in await list_sessions_from_store(store, directory=str(tmp_path))] == [
        forked.session_id
    ]


def test_processes_that_mirror_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two send the same entries, two their own: each entry is there once, and each one's are in order."""
    url, rounds = f"sqlite:///{tmp_path}/a.db", 100 if TORTURE else 3
    names = ("same", "same", "a", "b")
    told = run_at_once(claude_process.mirror_at_once, [(url, name, 12, rounds) for name in names])
    assert all(each.count(12) == rounds for each in told)
    for number in range(rounds):
        uuids = _uuids(url, claude_process.session_of(number))
        for name in names:
            assert [each for each in uuids if each.startswith(f"{name}-")] == [each["uuid"] for each in chain(name, 12)]


@pytest.mark.parametrize("seed", range(50 if TORTURE else 3))
def test_a_killed_mirror_keeps_what_it_has_flushed(tmp_path: Path, seed: int) -> None:
    """The transcript loads, and the same entries sent again complete it."""
    url, count = f"sqlite:///{tmp_path}/a.db", 200
    told = run_and_kill(claude_process.mirror, (url, count), random.Random(seed).random() * 0.4)
    entries = chain("a", count)
    kept = _uuids(url)
    assert len(kept) >= max(told, default=0)
    assert kept == [each["uuid"] for each in entries[: len(kept)]]
    claude_process.mirror(lambda _: None, url, count)
    assert _uuids(url) == [each["uuid"] for each in entries]


def _uuids(url: str, session_id: str = SESSION) -> list[str]:
    """Return what a process loads that has nothing at hand, having looked at the sub-agent's transcript too."""
    shared(url).close()
    store = PerdureSessionStore(store=url)
    key: Any = {**KEY, "session_id": session_id}
    main, sub = anyio.run(store.load, key) or [], anyio.run(store.load, {**key, "subpath": SUBPATH}) or []
    assert len({each["uuid"] for each in sub}) == len(sub)
    return [each["uuid"] for each in main]
