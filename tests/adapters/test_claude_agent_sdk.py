"""The Claude Agent SDK keeps its transcripts in a store, and perdure's verbs work on them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
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

from perdure import (
    InvalidData,
    MemoryStore,
    Message,
    PostgresStore,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    connect,
)
from perdure.adapters.claude_agent_sdk import PerdureSessionStore
from perdure.adapters.home import Home
from perdure.model import ids
from perdure.sessions.family_tree import tree_of
from perdure.sessions.shared import SharedStore, shared
from perdure.testing import FrozenClock

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
SUB: Any = {**KEY, "subpath": SUBPATH}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedStore]:
    """Return a store of each kind."""
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
    """Return the texts that perdure shows of a transcript."""
    session = await store.chat(session_id, project_key=PROJECT).session()
    return [message.text for message in session.state.messages]


async def conversation(store: PerdureSessionStore, key: Any = KEY) -> list[str]:
    """Return the texts that a resume gives to Claude: the chain of entries from the last one back."""
    entries = {each["uuid"]: each for each in await store.load(key) or [] if "parentUuid" in each}
    said, at = [], next(reversed(entries), None)
    while at in entries:
        content = entries[at]["message"]["content"]
        said.append(content if isinstance(content, str) else "".join(block.get("text", "") for block in content))
        at = entries[at]["parentUuid"]
    return said[::-1]


def turn(number: int, prompt: str | None = None) -> list[Any]:
    """Return the entries of a turn as Claude writes them. Those without a uuid are Claude's own notes."""
    asked, noted = prompt or f"Question {number}?", {"sessionId": SESSION}
    at = f"2026-01-01T00:0{number}:00"
    uuids = [f"00000000-0000-4000-8000-0000000000{number}{place}" for place in range(2)]
    parent = None if number == 1 else uuids[1].replace(f"{number}1", f"{number - 1}1")
    question = entry(uuids[0], parent, f"{number}?")
    question["message"] = {"role": "user", "content": asked}
    return [
        {"type": "queue-operation", "operation": "enqueue", "timestamp": f"{at}.001Z", **noted, "content": asked},
        {"type": "queue-operation", "operation": "dequeue", "timestamp": f"{at}.003Z", **noted},
        question,
        {"type": "atis-latch", "atis": "", **noted},
        entry(uuids[1], uuids[0], f"Answer {number}."),
        {"type": "last-prompt", "lastPrompt": asked, "leafUuid": uuids[1], **noted},
        {"type": "mode", "mode": "normal", **noted},
        {"type": "atis-latch", "atis": "", **noted},
        {"type": "cost-state", **noted, "totalCostUSD": number / 8},
    ]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_sdks_own_contracts_hold(kept: SharedStore, backend: str) -> None:
    """Each of the SDK's 14 contracts runs for an owner without entries."""
    owners = count()
    made = lambda: PerdureSessionStore(store=kept, owner=f"{backend}-{next(owners)}")  # noqa: E731
    anyio.run(partial(run_session_store_conformance, made), backend=backend)
    assert next(owners) > 14


def test_the_contracts_hold_without_owners() -> None:
    """Each contract has a store of its own."""
    anyio.run(partial(run_session_store_conformance, lambda: PerdureSessionStore(store=MemoryStore())))


async def test_entries_come_back_the_same(store: PerdureSessionStore) -> None:
    """This holds for any JSON, whatever it means to Claude, and the messages can be read."""
    odd = [
        {"type": "mode"},
        {"type": "x", "n": float("inf"), "t": "\ud800", "deep": [{}]},
        {"type": "summary", "summary": "S"},
    ]
    await store.append(KEY, [*ITEMS["claude"], *odd])  # type: ignore[list-item]
    assert await store.load(KEY) == [*ITEMS["claude"], *odd]
    assert "Where is my order?" in await texts(store)


async def test_an_entry_is_kept_once(store: PerdureSessionStore) -> None:
    """The SDK sends a batch again if it gets no answer."""
    batch: Any = [*chain("a", 4), {"type": "custom-title", "customTitle": "Orders"}]
    await store.append(KEY, batch)
    await store.append(KEY, batch)
    assert await store.load(KEY) == batch
    again = PerdureSessionStore(store=store._home.shared)
    await again.append(KEY, [batch[0], batch[0], *chain("b", 1)])
    assert [each.get("uuid") for each in await again.load(KEY) or []][-2:] == [None, "b-0"]


async def test_what_has_no_uuid_is_kept_once(store: PerdureSessionStore) -> None:
    """A transcript that is imported again adds nothing, in batches of any size, and after a restart."""
    entries = [*turn(1), *turn(2), *turn(3)]
    await store.append(KEY, entries)
    for size in (500, 1, 2, 3, 7):
        again = PerdureSessionStore(store=store._home.shared)
        for start in range(0, len(entries), size):
            await again.append(KEY, entries[start : start + size])
            await store.append(KEY, entries[start : start + size])
        assert await store.load(KEY) == entries
    await again.append(KEY, [*entries, *turn(4)])
    assert await store.load(KEY) == [*entries, *turn(4)]


async def test_a_retried_append_is_kept_once(store: PerdureSessionStore) -> None:
    """The SDK retries as it sends: the conversation, then Claude's own notes."""
    entries = [*turn(1), *turn(2)]
    for batch in (entries[:7], entries[7:9], entries[9:12], entries[12:]):
        for _ in range(3):
            await store.append(KEY, batch)
    assert await store.load(KEY) == entries


async def test_equal_entries_are_not_taken_for_one_another(store: PerdureSessionStore) -> None:
    """A title that was set, changed and set again is set, also after another import and after an undo."""
    title, other = {"type": "custom-title", "customTitle": "A"}, {"type": "custom-title", "customTitle": "B"}
    latches = [{"type": "atis-latch", "atis": ""}] * 2
    for batch in ([*turn(1), *latches], [title], [other], [title], *([each] for each in chain("b", 2)), [title]):
        await store.append(KEY, batch)  # type: ignore[arg-type]
    entries = [*turn(1), *latches, title, other, title, *chain("b", 2), title]
    assert await store.load(KEY) == entries
    await store.append(KEY, entries)  # type: ignore[arg-type]
    assert await store.load(KEY) == entries
    await store.append(KEY, [other])  # type: ignore[list-item]
    assert (await store.load(KEY) or [])[-1] == other
    await store.chat(SESSION, project_key=PROJECT).undo()
    await store.append(KEY, [other])  # type: ignore[list-item]
    assert (await store.load(KEY) or [])[-1] == other


async def test_what_was_never_mirrored_is_added_once(store: PerdureSessionStore) -> None:
    """Claude's own file has more than it mirrors, and a batch may have been lost on the way."""
    mirrored = [*turn(1), *turn(3)]
    request: Any = [{"type": "api-request-blob", "hash": "1"}, {"type": "api-request-blob", "hash": "2"}]
    request = [{"type": "api-request-shape", "timestamp": "2026-01-01T00:01:00.005Z"}, *request]
    local = [*turn(1)[:3], *request, *turn(1)[3:], *turn(2), *turn(3)]
    await store.append(KEY, mirrored)
    for _ in range(3):
        await store.append(KEY, local)
        loaded = await store.load(KEY) or []
        assert len(loaded) == len(local)
        assert all(each in loaded for each in local)


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
    """They equal the summary of all entries at once, and listing them reads no transcript."""
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
    """The SDK finds it by its id; it copies nothing, changes on its own, and outlives its parent."""
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
    """The SDK does not know the prefix of the ids of an owner's sessions."""
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
    """Claude continues from the shown entries, and its next entry is kept."""
    await store.append(KEY, chain("a", 2))  # type: ignore[arg-type]
    await store.append(KEY, chain("a", 4)[2:])  # type: ignore[arg-type]
    assert await store.chat(SESSION, project_key=PROJECT).undo() == 2
    assert [each["uuid"] for each in await store.load(KEY) or []] == ["a-0", "a-1"]
    await store.append(KEY, [entry("b-2", "a-1", "Another?")])  # type: ignore[list-item]
    assert await conversation(store) == ["Where is order 0?", "Order 0 is on its way.", "Another?"]


async def test_what_is_hidden_is_not_brought_back_by_a_repeat(store: PerdureSessionStore) -> None:
    """An undone or covered entry is still known, also to a process that has not seen it."""
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
    """A summary takes the place of the entries it covers in the chain; these come back unchanged."""
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
    """None of its words is left, not even in the summary, and the chain holds."""
    secret = "4111 1111 1111 1111"
    entries = [entry("a-0", None, f"My card is {secret}, is it?"), entry("a-1", "a-0", "Noted.")]
    await store.append(KEY, entries)  # type: ignore[arg-type]
    assert await store.chat(SESSION, project_key=PROJECT).redact(["a-0"]) == 1
    loaded = await store.load(KEY) or []
    assert secret not in repr(loaded) + repr(await store.list_session_summaries(PROJECT))
    assert await conversation(store) == ["[redacted]", "Noted."]
    kept: Any = ("type", "uuid", "parentUuid", "sessionId", "cwd", "timestamp")
    assert [loaded[0][name] for name in kept] == [entries[0][name] for name in kept]


@pytest.mark.sample(3)
@pytest.mark.parametrize("prompt", ["My card is 4111 1111 1111 1111, is it?", "4711", '4111 "1111"\n' * 40])
async def test_copies_of_a_redacted_prompt_go_with_it(kept: SharedStore, prompt: str) -> None:
    """Claude notes a prompt in other entries too. No word of it is left or comes back, and none is in a fork."""
    store = PerdureSessionStore(store=kept)
    entries = [*turn(1, prompt), *turn(2)]
    await store.append(KEY, entries)
    chat = store.chat(SESSION, project_key=PROJECT)
    fork = await chat.fork()
    await store.append({**KEY, "session_id": fork.id}, turn(3, prompt))
    assert await chat.redact([entries[2]["uuid"]]) == 1
    loaded = await store.load(KEY) or []
    assert [each["type"] for each in loaded] == [each["type"] for each in entries]
    noted = [each for each in loaded if "uuid" not in each]
    assert noted == [_without(each, prompt) for each in entries if "uuid" not in each]
    summaries = await store.list_session_summaries(PROJECT)
    needle = json.dumps(prompt)[1:12]
    assert needle not in json.dumps(loaded) + json.dumps([each for each in summaries if each["session_id"] == SESSION])
    async with connect(kept) as sessions:
        for version in range(1, (await sessions.session(chat.id)).version + 1):
            found = await sessions.session(chat.id, version)
            assert needle not in json.dumps(found.to_dict())
    for again in (store, PerdureSessionStore(store=kept)):
        await again.append(KEY, entries)
        assert await again.load(KEY) == loaded


def _without(each: Any, text: str) -> Any:
    return {key: "[redacted]" if value == text else value for key, value in each.items()}


async def test_an_undo_takes_back_what_a_reader_sees(store: PerdureSessionStore) -> None:
    """A turn is two appends, and the second has only Claude's own notes. The summary follows."""
    for number in (1, 2, 3):
        await store.append(KEY, turn(number)[:-1])
        await store.append(KEY, turn(number)[-1:])
    chat = store.chat(SESSION, project_key=PROJECT)
    fork = await chat.fork()
    await chat.undo()
    assert await store.load(KEY) == [*turn(1), *turn(2)]
    assert await prompts(store) == {SESSION: "Question 2?", fork.id: "Question 3?"}
    await chat.undo()
    assert await store.load(KEY) == turn(1)
    with pytest.raises(InvalidData, match="nothing to undo"):
        await chat.undo()
    await store.append(KEY, turn(4))
    assert (await prompts(store))[SESSION] == "Question 4?"
    branch = store.chat(fork.id, project_key=PROJECT)
    await branch.compact(compact_strategy="truncate", keep_last=2)
    assert (await conversation(store, {**KEY, "session_id": fork.id}))[1:] == ["Question 3?", "Answer 3."]
    await store.append({**KEY, "session_id": fork.id}, [turn(5)[-1]])
    await branch.undo()  # the compaction, and Claude's notes after it
    assert len(await conversation(store, {**KEY, "session_id": fork.id})) == 6
    assert (await prompts(store))[fork.id] == "Question 3?"


async def prompts(store: PerdureSessionStore) -> dict[str, str]:
    return {each["session_id"]: each["data"]["last_prompt"] for each in await store.list_session_summaries(PROJECT)}


async def test_hidden_entries_are_not_counted(store: PerdureSessionStore) -> None:
    """Claude's own notes are not shown; `trim` and `compact` count only the messages that are."""
    await store.append(KEY, [*turn(1), *turn(2), *turn(3)])
    chat = store.chat(SESSION, project_key=PROJECT)
    shown = [message.text for message in (await chat.session()).state.messages if not message.is_sealed]
    assert shown == [text for number in (1, 2, 3) for text in (f"Question {number}?", f"Answer {number}.")]
    await chat.compact(compact_strategy="truncate", keep_last=4)
    assert (await conversation(store))[1:] == shown[2:]
    await chat.uncompact()
    await chat.trim(2)
    assert await conversation(store) == shown[4:]


async def test_a_deleted_session_is_not_written_to(store: PerdureSessionStore) -> None:
    """A session that was deleted with perdure stays hidden until it is restored; the SDK's own deletion erases it."""
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
    """While perdure runs the session, other writers are refused; the SDK tries again, and reports a failure."""
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
    """Appends that are under way at once are not mixed up."""
    entries = chain("a", 40)
    await asyncio.gather(*(store.append(KEY, [each]) for each in entries))  # type: ignore[list-item]
    assert await store.load(KEY) == entries


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_caller_who_gives_up_cancels_nothing(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK does not send an append again after a time-out: the append may still land, and it does."""
    store = PerdureSessionStore(store=f"sqlite:///{tmp_path}/a.db")
    begun, appended = threading.Event(), store._appended

    async def slowly(*args: Any) -> bool:
        begun.set()
        await asyncio.sleep(0.05)
        return await appended(*args)

    async def give_up() -> None:
        with anyio.move_on_after(-1):
            await store.append(KEY, chain("b", 2))  # type: ignore[arg-type]  # which is not begun, or is carried out
        monkeypatch.setattr(store, "_appended", slowly)
        async with anyio.create_task_group() as calls:
            calls.start_soon(store.append, KEY, chain("a", 2))
            await anyio.to_thread.run_sync(begun.wait)
            calls.cancel_scope.cancel()
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
    """Two send the same entries, two their own: each entry is kept once, and those of each process are in order."""
    url, rounds = f"sqlite:///{tmp_path}/a.db", 100 if TORTURE else 3
    names = ("same", "same", "a", "b")
    told = run_at_once(claude_process.mirror_at_once, [(url, name, 12, rounds) for name in names])
    assert all(each.count(12) == rounds for each in told)
    for number in range(rounds):
        uuids = _uuids(url, claude_process.session_of(number))
        for name in names:
            assert [each for each in uuids if each.startswith(f"{name}-")] == [each["uuid"] for each in chain(name, 12)]


@pytest.mark.parametrize("seed", range(50 if TORTURE else 1))
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
    """Return the uuids that a process with an empty cache loads, after a check of the sub-agent's transcript."""
    shared(url).close()
    store = PerdureSessionStore(store=url)
    key: Any = {**KEY, "session_id": session_id}
    main, sub = anyio.run(store.load, key) or [], anyio.run(store.load, {**key, "subpath": SUBPATH}) or []
    assert len({each["uuid"] for each in sub}) == len(sub)
    return [each["uuid"] for each in main]
