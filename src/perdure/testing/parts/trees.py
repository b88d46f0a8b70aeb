"""Sessions erased together with those of their sub-agents, in one commit."""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import replace

from perdure.errors import InvalidSessionId, SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import BulkErasure, Checkable
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, say, texts
from perdure.testing.scene import Contract, for_a_while, in_store, refused


class ErasingStore(JournaledStore, BulkErasure, Checkable, Protocol):
    """A store that erases many sessions at once."""


class Trees(Contract):
    """Sessions that are erased together are gone together, and no others are."""

    @in_store
    async def test_a_session_is_erased_with_its_children(self, store: ErasingStore) -> None:
        """Sub-agents' sessions go with a session, also hidden ones and those of their sub-agents. Forks stay."""
        assert isinstance(store, BulkErasure)
        root = await _family(store)
        branch = await store.create(fork(root, id="fork"))
        assert await store.delete_tree("root") == ["grandchild", "two", "one", "root"]
        assert {info.id for info in await store.list()} == {"fork", "other"}
        assert [await store.exists(each) for each in ("root", "one", "two", "grandchild")] == [False] * 4
        assert texts(await store.load("fork")) == ["Hi", "there"]
        assert texts(await store.save(say(branch, "on"))) == ["Hi", "there", "on"]
        assert await store.delete_tree("fork") == ["fork"]
        assert await store.check() == []

    @in_store
    async def test_none_is_erased_while_one_is_run(self, store: ErasingStore) -> None:
        """Nothing is erased while one session runs: SessionBusy names it. An interrupted one goes with the others."""
        await _family(store)
        claim, _ = await store.claim("grandchild", version=1, owner="runner")
        with refused(SessionBusy) as caught:
            await store.delete_tree("root")
        assert caught.error.session_id == "grandchild"
        assert len(await store.list()) == 4
        assert await store.delete_tree("two") == ["two"]
        await store.release(claim, interrupted=True)
        assert await store.delete_tree("root") == ["grandchild", "one", "root"]

    @in_store
    async def test_there_has_to_be_one(self, store: ErasingStore) -> None:
        """An unknown id raises SessionNotFound. Of several callers that erase one tree, all but one get it."""
        await _family(store)
        with refused(SessionNotFound):
            await store.delete_tree("nobody")
        with refused(InvalidSessionId):
            await store.delete_tree("../root")
        outcomes = await asyncio.gather(*(store.delete_tree("root") for _ in range(3)), return_exceptions=True)
        assert sorted(isinstance(outcome, SessionNotFound) for outcome in outcomes) == [False, True, True]

    @in_store
    async def test_cancelled_it_is_gone_whole_or_not_at_all(self, store: ErasingStore) -> None:
        """A caller that is cancelled at any moment leaves the whole tree or nothing of it."""
        for delay in range(8):
            await _family(store)
            attempt = asyncio.create_task(_erased(store))
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            for _ in range(200):  # what was cancelled may still be on its way
                there = {info.id for info in await store.list()} - {"other"}
                if not there:
                    break
                assert there == {"root", "one", "grandchild"}
                try:
                    await store.delete_tree("root")
                except SessionNotFound:
                    await asyncio.sleep(0.001)
            assert not await store.exists("two")
            await store.delete("other")


async def _erased(store: ErasingStore) -> None:
    await store.delete_tree("root")


async def _family(store: ErasingStore) -> AgentSession:
    """Create a session with two children, one of them hidden and one with a child of its own, and a stranger."""
    root = await store.create(new_session("Hi", "there", id="root"))
    await store.create(_child_of("root", "one"))
    hidden = await store.create(_child_of("root", "two"))
    await store.save(hidden.with_status(SessionStatus.DELETED))
    await store.create(_child_of("one", "grandchild"))
    await store.create(new_session(id="other"))
    return root


def _child_of(parent: str, name: str) -> AgentSession:
    made = new_session("Do it", id=name)
    ref = SpawnRef(parent, "run", "call", "helper")
    return replace(made, info=replace(made.info, parent_id=SessionId(parent), spawn_ref=ref))
