"""Several sessions in one commit, beyond the contract: any mixture of them, faults, kills, and other processes."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import postgres_server
from tests.crash import grouping_process
from tests.crash.addresses import wait_for_server
from tests.stores.files import ENVIRONMENT, TORTURE
from tests.stories import KINDS, opened

import perdure
from perdure.errors import PerdureError, SessionConflict, StoreError
from perdure.model.ids import new_id
from perdure.protocols import Change, Entry, Key
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import FailingStore
from perdure.testing.samples import new_session, note, say, texts

pytestmark = pytest.mark.sample(2)  # make torture runs all

NAMES = "abcd"
ROUNDS = 60 if TORTURE else 6


WISHES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["new", "current", "stale"]), st.booleans()),
    max_size=4,
    unique_by=lambda wish: wish[0],
)
"""Sessions to be saved together: each one's name, the version that the caller has, and whether it has a key."""


@pytest.mark.parametrize("kind", KINDS)
@given(rounds=st.lists(WISHES, min_size=1, max_size=4))
async def test_any_mixture_is_kept_whole_or_not_at_all(
    kind: str, rounds: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """New, current and stale sessions in any order: the store has the same as a mapping in memory."""
    model: dict[str, int] = {}
    example = new_id()
    names = [f"{name}-{example}" for name in NAMES]
    async with opened(kind, tmp_path_factory.getbasetemp()) as store:
        for wishes in rounds:
            changes = [await _wished(store, f"{name}-{example}", *wish) for name, *wish in wishes]
            is_good = all(each.session.version == model.get(each.session.id, 0) for each in changes)
            try:
                kept = await store.save_all(changes)
            except SessionConflict:
                assert not is_good
            else:
                assert is_good
                model |= {each.id: each.version for each in kept}
            found = {name: await store.load(name) for name in names}
            assert {name: each.version for name, each in found.items() if each} == model
            assert {name: len(texts(each)) for name, each in found.items() if each} == model
            assert {name: len(await store.read(name)) for name in model} == model
            keys = {name: await store.find_key(name, "k") for name in model}
            assert all(each is None or each[1] <= model[name] for name, each in keys.items())


async def _wished(store: Any, name: str, has: str, has_key: bool) -> Change:
    """Return a change to a session in the version that its caller has: 0, the newest, or the one before that."""
    found = None if has == "new" else await store.load(name)
    if has == "stale" and found is not None and found.version > 1:
        found = await store.load(name, found.version - 1)
    said = say(found or new_session(id=name), "x")
    return Change(said, key=Key("k", str(said.version)) if has_key else None, entries=[Entry("said")])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "file"])
async def test_a_fault_leaves_nothing_or_everything(kind: str, after: bool, tmp_path: Path) -> None:
    """A failed commit changes nothing. A commit whose answer is lost has changed all, and may be repeated once."""
    async with opened(kind, tmp_path) as kept_in:
        store = FailingStore(kept_in)
        pair = [await store.create(new_session("Hi", id=name)) for name in "ab"]
        changes = [*(Change(say(each, "x")) for each in pair), Change(new_session(id="c"))]
        store.fail("save_all", after=after)
        with pytest.raises(StoreError):
            await store.save_all(changes)
        assert [info.version for info in await store.list() if info.id in "ab"] == [2 if after else 1] * 2
        assert await store.exists("c") is after
        if after:
            with pytest.raises(SessionConflict):
                await store.save_all(changes)
        else:
            await store.save_all(changes)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_what_is_at_hand_changes_with_the_commit_alone(kind: str, tmp_path: Path) -> None:
    """A refused commit leaves the sessions in memory as they were, and the next save of one passes."""
    store: Any = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "s.db")
    async with store:
        pair = [await store.create(new_session("Hi", id=name)) for name in "ab"]
        at_hand = dict(store._cache)
        with pytest.raises(PerdureError):
            await store.save_all([Change(say(pair[0], "x")), Change(new_session(id="b"))])
        assert dict(store._cache) == at_hand
        assert (await store.save(say(pair[0], "y"))).version == 2
        kept = await store.save_all([Change(note(pair[1], "n", 1)), Change(new_session(id="c"))])
        assert [store._cache[each.id].session for each in kept] == kept


@pytest.mark.parametrize("kind", ["sqlite", "file", "postgres"])
def test_killed_they_are_kept_whole_or_not_at_all(kind: str, tmp_path: Path) -> None:
    """After SIGKILL at any moment the sessions are at one version, and no acknowledged one is missing."""
    url, chance, acknowledged = _url_of(kind, tmp_path), random.Random(kind), 0
    for _ in range(ROUNDS):
        acknowledged = max(acknowledged, _run_and_kill(url, chance.random() * 0.08))
        versions, rounds = asyncio.run(_state(url))
        assert len(set(versions)) == len(set(rounds)) == 1
        assert versions[0] >= acknowledged


def _url_of(kind: str, where: Path) -> str:
    if kind == "postgres":
        return postgres_server.url_of(where)
    return f"sqlite:///{where}/sessions.db" if kind == "sqlite" else f"file://{where}/sessions"


def _run_and_kill(url: str, delay: float) -> int:
    """Return how many commits were acknowledged when the process was killed."""
    command, name = [sys.executable, grouping_process.__file__, url], f"killed {new_id()}"
    where = {**ENVIRONMENT, "PGAPPNAME": name}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        said = [first, *process.stdout.read().splitlines()]
    if url.startswith("postgres"):
        wait_for_server(f"@{postgres_server.dsn()}", name)
    return int(said[-1] if said[-1].strip() else said[-2])


async def _state(url: str) -> tuple[list[int], list[Any]]:
    store: Any = perdure.store_of(url)
    async with store:
        found = [await store.load(name) for name in grouping_process.NAMES]
        assert await store.check() == []
        return [each.version for each in found], [each.state.metadata["round"] for each in found]
