"""With an owner, no other owner's sessions exist: for any verb, list, search, move or erasure."""

from __future__ import annotations

import inspect
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import InvalidData, MemoryStore, SessionNotFound, Sessions, SqliteStore
from perdure.testing import ScriptedDriver

# What a verb that takes a session's id is given beside it.
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
    "text": "hello",
}
ID_NAMES = ("session_id", "src", "left")
# Verbs that are about no one session, each with a test of its own below; `open` and the two that tolerate any id too.
OTHERS = {"open", "exists", "snapshot", "run", "list", "export", "import_", "purge", "gc"}


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "s.db")


@asynccontextmanager
async def two_owners(store: Any) -> AsyncIterator[tuple[Sessions, Sessions]]:
    """Ann's sessions and Bob's in one store; Ann has `hers`, with a fork, and Bob has `mine`."""
    driver = ScriptedDriver(lambda _: "hello there")
    ann = perdure.connect(store, driver=driver, owner="ann")
    async with ann, perdure.connect(ann.store, driver=driver, owner="bob") as bob:
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
    """Call a verb on a session, with whatever else it needs."""
    parameters = inspect.signature(verb).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    ids = [each.name for each in parameters if each.name in ID_NAMES]
    assert ids, f"{verb} takes no session's id; put it among OTHERS and write a test for it"
    given = {each.name: GIVEN[each.name] for each in needed if each.name not in ids}
    made = verb(**given, **dict.fromkeys(ids[:1], session_id))
    if inspect.isasyncgen(made):
        async for _ in made:
            pass
    else:
        await made


@pytest.mark.parametrize("name", verbs())
async def test_anothers_session_is_not_found_by_any_verb(store: Any, name: str) -> None:
    """The same as if it were not there, and it stays as it was."""
    async with two_owners(store) as (ann, bob):
        before = await ann.snapshot("hers")
        with pytest.raises(SessionNotFound, match="'hers'"):
            await called(getattr(bob, name), "hers")
        with pytest.raises(SessionNotFound, match="'nobody'"):
            await called(getattr(bob, name), "nobody")
        assert await ann.snapshot("hers") == before


async def test_open_exists_and_snapshot_see_no_others_session(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        assert not await bob.exists("hers")
        assert await bob.snapshot("hers") is None
        with pytest.raises(SessionNotFound):
            await bob.open("hers")
        assert (await ann.info("hers")).owner == "ann"


async def test_branches_of_others_are_not_adopted_or_compared(store: Any) -> None:
    async with two_owners(store) as (_, bob):
        with pytest.raises(SessionNotFound):
            await bob.adopt("mine", "her-fork")
        with pytest.raises(SessionNotFound):
            await bob.diff("mine", "hers")


async def test_lists_and_searches_are_ones_own(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        assert [info.id for info in await bob.list()] == ["mine"]
        assert [info.id for info in await bob.list(owner="bob", order="updated", top_level=True)] == ["mine"]
        assert len(await bob.list(owner="ann")) == len(await bob.list(owner=None)) == 0
        assert {hit.session_id for hit in await bob.search("hello")} == {"mine"}
        assert "mine" not in {hit.session_id for hit in await ann.search("hello")}


async def test_a_fork_belongs_to_its_parents_owner(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        assert (await ann.info("her-fork")).owner == "ann"
        assert set((await ann.ancestry("hers")).children) == {"her-fork"}
        with pytest.raises(perdure.SessionConflict):
            await bob.fork("mine", "her-fork")


async def test_exports_and_imports_are_ones_own(store: Any) -> None:
    async with two_owners(store) as (ann, bob):
        file = io.BytesIO()
        assert (await bob.export(file)).sessions == 1
        with pytest.raises(SessionNotFound):
            await bob.export(io.BytesIO(), ["hers"])
        hers = io.BytesIO()
        assert (await ann.export(hers)).sessions == 2
        hers.seek(0)
        with pytest.raises(InvalidData, match="bob"):
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
