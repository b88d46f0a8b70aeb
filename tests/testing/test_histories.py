"""The checker of histories: it explains valid ones, and finds stores that are broken on purpose."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from perdure import ClaimLost, MemoryStore
from perdure.model.session import AgentSession
from perdure.protocols import Appended
from perdure.testing.histories import SessionModel, broken, play
from perdure.testing.linearizability import Operation, check
from perdure.testing.outcomes import Outcome, note

ROUNDS = 50 if os.environ.get("PERDURE_TORTURE") else 4


class ReadsOldVersions(MemoryStore):
    """A reader gets an older version again, though there is a newer one."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[str, AgentSession] = {}

    async def load(self, session_id: str, version: int | None = None, **given: Any) -> AgentSession | None:
        if version is None and session_id in self._old:
            return self._old.pop(session_id)
        found = await super().load(session_id, version, **given)
        if version is None and found is not None:
            self._old[session_id] = found
        return found


class HasNoFence(MemoryStore):
    """An append with a lost claim returns as if it was kept."""

    async def append(self, claim: Any, **given: Any) -> Appended:
        try:
            return await super().append(claim, **given)
        except ClaimLost:
            return Appended({}, 0)


class ForksOfTheNewest(MemoryStore):
    """A fork shows its parent's messages at the time of the read, not of the fork."""

    async def load(self, session_id: str, version: int | None = None, **given: Any) -> AgentSession | None:
        found = await super().load(session_id, version, **given)
        parent = found.info.parent_id if found is not None else None
        newest = await super().load(parent) if parent else None
        if found is None or newest is None:
            return found
        return found.with_state(found.state.with_transcript(newest.state.transcript))


BROKEN = {
    ReadsOldVersions: "loads may be old",
    HasNoFence: "appends under a lost claim are acknowledged",
    ForksOfTheNewest: "forks show what came later",
}


@pytest.mark.parametrize("store", BROKEN)
async def test_a_store_that_is_broken_is_found_out(store: type[MemoryStore]) -> None:
    """Each control breaks one promise, and its histories cannot be explained. The contract plays one more."""
    found = 0
    for seed in range(ROUNDS):
        async with store() as opened:
            history = await play([opened], clients=6, operations=120, sessions=2, seed=f"control {seed}")
        found += bool(broken(history))
    attack = "histories of concurrent clients"
    given = {"control": BROKEN[store], "control_rounds": ROUNDS, "control_failures": found}
    note(Outcome(attack=attack, store="memory", rounds=0, failures=0, **given))
    assert found >= ROUNDS / 2


def save(client: str, base: int, shown: list[str], began: int, ended: int | None, *answer: Any) -> Operation:
    return Operation(client, "save", (base, shown), began, ended, answer)


def created(*shown: str) -> Operation:
    return Operation("a", "create", ([*shown],), 0, 1, ("ok", 1))


def test_two_saves_of_one_version_cannot_both_have_been_kept() -> None:
    """The verdict names the operations that cannot come next."""
    both = [save("a", 1, ["x", "a"], 2, 10, "ok", 2), save("b", 1, ["x", "b"], 3, 9, "ok", 2)]
    verdict = check([created("x"), *both], SessionModel())
    assert not verdict.is_linearizable
    assert len(verdict.stuck) == 1
    assert "none of these can come next" in str(verdict)


def test_a_save_without_an_answer_may_have_been_kept() -> None:
    """A killed client's save may be there, and once seen, it stays."""
    lost = save("a", 1, ["x", "a"], 2, None)
    seen = Operation("b", "load", (), 20, 21, ("ok", 2, "x", "a"))
    gone = Operation("b", "load", (), 30, 31, ("ok", 1, "x"))
    before = Operation("b", "load", (), 10, 11, ("ok", 1, "x"))
    assert check([created("x"), lost, before, seen], SessionModel()).is_linearizable
    assert check([created("x"), lost, before], SessionModel()).is_linearizable
    assert not check([created("x"), lost, seen, gone], SessionModel()).is_linearizable


def test_a_load_sees_what_was_acknowledged_before_it_began() -> None:
    """One that overlaps with the save may see either."""
    kept = save("a", 1, ["x", "a"], 2, 10, "ok", 2)
    old = ("ok", 1, "x")
    assert check([created("x"), kept, Operation("b", "load", (), 5, 12, old)], SessionModel()).is_linearizable
    assert not check([created("x"), kept, Operation("b", "load", (), 11, 12, old)], SessionModel()).is_linearizable


def test_a_history_of_many_operations_is_checked_in_time() -> None:
    """A thousand operations of ten clients on one session take seconds, not hours."""

    async def long_history() -> Any:
        async with MemoryStore() as store:
            return await play([store], clients=10, operations=100, sessions=1, seed="long")

    assert broken(asyncio.run(long_history())) == []
