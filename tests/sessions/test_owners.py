"""With an owner, no other owner's sessions exist for any verb, list, search, move or erasure."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import (
    CorruptRecord,
    FileStore,
    InvalidData,
    MemoryStore,
    SessionId,
    SessionNotFound,
    Sessions,
    SqliteStore,
)
from perdure.testing import Delay, ScriptedDriver
from perdure.testing.parts.tokens import token

# The other arguments of verbs that take a session's id.
GIVEN: dict[str, dict[str, Any]] = {
    "message": {"role": "user", "content": "hi"},
    "keep_last": 1,
    "to": 1,
    "branch": "mine",
    "right": "mine",
    "subscriber": print,
    "action": perdure.ResetTranscript(),
    "message_ids": ["x"],
    "reason": "no",
    "loop_id": "x",
    "before": 1,
    "rule": perdure.Retention(versions=3),
    "text": "hello",
    "name": "a name",
    "key": "k",
    "cron": "0 7 * * MON",
    "part": perdure.Media("image/png", hash="0" * 64, size=1),
}
OPEN_ENDED = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
ID_NAMES = ("session_id", "src", "left")
# Verbs that are not about one session, each with a test of its own below; `open` and the two that accept any id too.
OTHERS = {
    *("open", "exists", "snapshot", "run", "list", "headers", "find"),
    "queue",  # see test_operating.py
    *("export", "import_", "purge", "gc", "erase_owner"),
    *("apply_retention", "holds", "lift_hold"),  # see test_retention.py
    "backup",  # about a whole store: see tests/test_backup.py
}


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "s.db")


@asynccontextmanager
async def two_owners(store: Any) -> AsyncIterator[tuple[Sessions, Sessions]]:
    """Yield Ann's and Bob's sessions on one connection; Ann has `hers`, with a fork, and Bob has `mine`."""
    async with perdure.connect(store, driver=ScriptedDriver(lambda _: "hello there")) as app:
        ann, bob = app.of("ann"), app.of("bob")
        await (await ann.open("hers")).send("hello")
        await ann.fork("hers", "her-fork")
        await (await bob.open("mine")).send("hello")
        yield ann, bob


def verbs() -> list[str]:
    names = [name for name, found in inspect.getmembers(Sessions) if not name.startswith("_") and _is_async(found)]
    return sorted({*names} - OTHERS)


def _is_async(found: object) -> bool:
    return inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)


async def called(verb: Callable[..., Any], session_id: str) -> None:
    """Call a verb on a session, with its other arguments."""
    parameters = inspect.signature(verb).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind not in OPEN_ENDED]
    ids = [each.name for each in parameters if each.name in ID_NAMES]
    assert ids, f"{verb} takes no session's id; put it among OTHERS and write a test for it"
    given = {each.name: GIVEN[each.name] for each in needed if each.name not in ids}
    made = verb(**given, **dict.fromkeys(ids[:1], session_id))
    if inspect.isasyncgen(made):
        async for _ in made:
            pass
    else:
        await made


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", verbs())
async def test_anothers_session_is_not_found_by_any_verb(store: Any, name: str) -> None:
    """The error is the same as for a missing session, and the session is unchanged."""
    async with two_owners(store) as (ann, bob):
        before = await ann.snapshot("hers")
        with pytest.raises(SessionNotFound, match="'hers'"):
            await called(getattr(bob, name), "hers")
        with pytest.raises(SessionNotFound, match="'nobody'"):
            await called(getattr(bob, name), "nobody")
        assert await ann.snapshot("hers") == before


async def test_exists_and_snapshot_see_no_others_session(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        for name in ("hers", (await ann.info("hers")).id):
            assert not await bob.exists(name)
            assert await bob.snapshot(name) is None


async def test_the_names_of_sessions_are_an_owners_own(store: Any) -> None:
    """Two owners may use the same name, and neither learns that the other does."""
    async with two_owners(store) as (ann, bob):
        chat = await bob.open("hers")
        assert await chat.length() == 0
        assert [message.text for message in (await ann.session("hers")).state.messages] == ["hello", "hello there"]
        assert (await ann.info("hers")).owner == "ann"
        assert (await bob.info("hers")).owner == "bob"
        assert (await bob.open(chat.id)).id == chat.id


async def test_anothers_whole_id_is_like_any_that_is_free(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        theirs = (await ann.info("hers")).id
        taken, free = [(await bob.open(each)).id for each in (theirs, "o234567abcdefghij.free")]
        assert taken.removesuffix(theirs) == free.removesuffix("o234567abcdefghij.free")
        assert (await ann.length("hers"), await bob.length(theirs)) == (2, 0)


async def test_a_session_that_an_owner_has_without_a_mark_is_found(store: Any) -> None:
    """Earlier releases did not set the mark."""
    async with two_owners(store) as (ann, bob):
        await ann.runtime.create(perdure.AgentDefinition("assistant"), session_id="old", owner="ann")
        assert (await ann.open("old")).id == "old"
        assert not await bob.exists("old")
        assert (await bob.open("old")).id != "old"


async def test_what_an_owner_creates_has_the_owners_mark(store: Any) -> None:
    """Forks and sessions without a name have it too, and an import for the owner accepts no others."""
    async with two_owners(store) as (ann, _):
        made = [await ann.open(), await ann.open("x"), await ann.fork("x"), await ann.new_session("x")]
        assert {chat.id[:17] for chat in made} == {SessionId.under("ann", "x")[:17]}


async def test_an_owner_cannot_speak_for_another(store: Any) -> None:
    async with two_owners(store) as (ann, _):
        with pytest.raises(perdure.ConfigurationError, match="anybody else"):
            ann.of("bob")
        with pytest.raises(perdure.ConfigurationError, match="nobody else"):
            await ann.erase_owner("bob")


async def test_branches_of_others_are_not_adopted_or_compared(store: Any) -> None:
    async with two_owners(store) as (_, bob):
        with pytest.raises(SessionNotFound):
            await bob.adopt("mine", "her-fork")
        with pytest.raises(SessionNotFound):
            await bob.diff("mine", "hers")


async def test_lists_and_searches_are_ones_own(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        mine = (await bob.info("mine")).id
        assert [info.id for info in await bob.list()] == [mine]
        assert [info.id for info in await bob.list(owner="bob", order="updated", top_level=True)] == [mine]
        assert [info.id for info in await bob.headers()] == [mine]
        assert len(await bob.list(owner="ann")) == len(await bob.list(owner=None)) == 0
        assert {hit.session_id for hit in await bob.search("hello")} == {mine}
        assert mine not in {hit.session_id for hit in await ann.search("hello")}
        said = (await bob.session("mine")).state.messages[0].id
        assert [place.session_id for place in await bob.find(said)] == [mine]
        assert await ann.find(said) == []


async def test_a_fork_belongs_to_its_parents_owner(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        assert (await ann.info("her-fork")).owner == "ann"
        assert set((await ann.ancestry("hers")).children) == {(await ann.info("her-fork")).id}
        assert (await bob.fork("mine", "her-fork")).id != (await ann.info("her-fork")).id


async def test_exports_and_imports_are_ones_own(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        file = io.BytesIO()
        assert (await bob.export(file)).sessions == 1
        with pytest.raises(SessionNotFound):
            await bob.export(io.BytesIO(), ["hers"])
        hers = io.BytesIO()
        assert (await ann.export(hers)).sessions == 2
        hers.seek(0)
        with pytest.raises(InvalidData, match=r"'bob''s: .* take the file in without one"):
            await bob.import_(hers)


async def test_purge_erases_ones_own(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        assert await bob.purge(status="active") == 1
        assert await ann.exists("hers")
        assert await ann.exists("her-fork")


async def test_recover_looks_at_ones_own(store: Any) -> None:
    async with two_owners(store) as (_, bob):
        assert not (await bob.recover()).resumed


async def test_a_one_shot_run_is_nobodys(store: Any) -> None:
    async with two_owners(store) as (_, bob):
        assert (await bob.run("hi")).text == "hello there"
        assert len(await bob.list()) == 1


async def test_without_an_owner_all_are_seen(store: Any) -> None:
    async with two_owners(store) as (ann, _), perdure.connect(ann.store) as everyone:
        assert len(await everyone.list()) == 3
        assert await everyone.gc() == 0


async def test_connecting_as_an_owner_is_the_short_form(store: Any) -> None:
    async with two_owners(store) as (ann, _), perdure.connect(ann.store, owner="ann") as again:
        assert (await again.info("hers")).id == (await ann.info("hers")).id


async def test_a_person_is_erased_and_nobody_else(store: Any) -> None:
    """Hidden sessions and forks are erased too, with a receipt; the words are found nowhere any more."""
    async with two_owners(store) as (ann, bob):
        await (await ann.open("secret")).send("zanzibar", key="k")
        await ann.delete("secret")
        secret = (await ann.info("secret")).id
        with pytest.raises(InvalidData, match="name the owner"):
            await perdure.Sessions.erase_owner(perdure.connect(store), None)
        receipt = await ann.erase_owner()
        assert receipt.is_complete
        assert (receipt.owner, len(receipt.erased), receipt.left) == ("ann", 3, ())
        assert secret in receipt.erased
        assert not list(await ann.list())
        assert not list(await ann.list(status="deleted"))
        assert not list(await ann.search("zanzibar"))
        assert len(await bob.list()) == 1
        assert (await ann.erase_owner()).erased == ()


async def test_a_persons_tokens_are_erased_with_them(store: Any) -> None:
    """Other owners' tokens stay, and so do an operator's."""
    async with two_owners(store) as (ann, _):
        given = [token(1, "ann"), token(2, "bob"), token(3, None), token(4, "ann")]
        for each in given:
            await store.add_token(each)
        await ann.erase_owner()
        assert [*await store.tokens()] == [given[1], given[2]]
        assert await store.token(given[0].digest) is None


async def test_a_damaged_token_stops_an_erasure_before_it_begins(tmp_path: Path) -> None:
    """Otherwise somebody would believe that nothing of a person is left."""
    async with two_owners(FileStore(tmp_path)) as (ann, _):
        await ann.store.add_token(token(1, "ann"))
        (tmp_path / ".tokens").write_bytes(b"{}")
        with pytest.raises(CorruptRecord, match="remove it and make new tokens"):
            await ann.erase_owner()
        assert len(await ann.list()) == 2


async def test_a_persons_runs_are_stopped_before_they_are_erased(store: Any) -> None:
    driver = ScriptedDriver([Delay(30.0, "too late")])
    async with perdure.connect(store, driver=driver) as app:
        chat = await app.of("ann").open("long")
        run = asyncio.create_task(chat.send("take your time"))
        await until(lambda: app.runtime.journal.is_claimed(chat.id))
        receipt = await app.erase_owner("ann")
        assert (receipt.erased, receipt.is_complete) == ((chat.id,), True)
        await asyncio.gather(run, return_exceptions=True)
        assert not await app.exists(chat.id)


class LateErasure(MemoryStore):
    """A store in which a message is sent between the end of a run and the erasure of its session."""

    chat: perdure.Chat | None = None

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        chat, self.chat = self.chat, None
        if chat is not None:
            await chat.start("and then")
        return await super().delete_many(session_ids)


async def test_a_run_that_begins_during_the_erasure_of_its_owner_is_stopped_too() -> None:
    """As that of a message which was queued behind the run that was stopped first."""
    store, driver = LateErasure(), ScriptedDriver(lambda request: Delay(30.0, "too late"))
    async with perdure.connect(store, driver=driver) as app:
        store.chat = await app.of("ann").open("long")
        await store.chat.start("take your time")
        receipt = await app.erase_owner("ann")
        assert (len(receipt.erased), receipt.is_complete) == (1, True)


async def test_a_deleted_session_is_hidden_until_it_is_restored(store: Any) -> None:
    async with two_owners(store) as (ann, _):
        await ann.suspend("hers")
        await ann.delete("hers")
        assert "hers" not in {info.id[17:] for info in await ann.list()}
        await ann.restore("hers")
        assert (await ann.info("hers")).status == "suspended"
        await ann.restore("hers")
        assert (await ann.info("hers")).status == "suspended"
        await ann.erase("hers")
        with pytest.raises(SessionNotFound):
            await ann.restore("hers")


async def test_a_session_that_cannot_be_erased_is_named_and_not_tried_without_end(store: Any) -> None:
    """A session that runs elsewhere and does not stop in time is left, and the receipt says so."""
    async with two_owners(store) as (ann, _):
        held = (await ann.info("hers")).id
        await ann.runtime.journal.claim(held, version=2, owner="another process")
        receipt = await ann.erase_owner(wait=0.1)
        assert (receipt.left, receipt.is_complete) == ((held,), False)
        assert len(receipt.erased) == 1
