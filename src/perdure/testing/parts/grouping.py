"""Several sessions in one commit: all of them are kept, or none is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from perdure.errors import InvalidData, PerdureError, RunInterrupted, SessionBusy, SessionConflict, SessionNotFound
from perdure.model.message import Media, Message, Text
from perdure.model.session import AgentSession
from perdure.protocols import Change, Entry, Key, SavesTogether
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, note, say, tell, texts
from perdure.testing.scene import Contract, for_a_while, in_store, refused

ROUNDS = 8


class GroupingStore(JournaledStore, SavesTogether, Protocol):
    """A store that keeps several sessions in one commit."""


class Grouping(Contract):
    """Sessions that are saved together are there together, for every reader and after any failure."""

    @in_store
    async def test_several_sessions_are_kept_in_one_commit(self, store: GroupingStore) -> None:
        """`save_all` creates and saves sessions, each with its key and entries, and returns them in the same order."""
        assert isinstance(store, SavesTogether)
        old = await store.create(new_session("Hi", id="m"))
        request = Key("again", "digest")
        kept = await store.save_all(
            [
                Change(new_session("first", id="z"), key=request, entries=[Entry("made", 1), Entry("made", 2)]),
                Change(say(old, "more"), entries=[Entry("said")]),
                Change(note(new_session(id="a"), "state", {"app": 1})),
            ]
        )
        assert [(each.id, each.version) for each in kept] == [("z", 1), ("m", 2), ("a", 1)]
        assert [await store.load(each.id) for each in kept] == list(kept)
        assert [texts(each) for each in kept] == [["first"], ["Hi", "more"], []]
        assert await store.find_key("z", "again") == (request, 1)
        assert [(each.seq, each.body) for each in await store.read("z")] == [(1, 1), (2, 2)]
        assert [each.kind for each in await store.read("m")] == ["said"]
        again = await store.save_all([Change(say(each, "on"), entries=[Entry("on")]) for each in kept])
        assert [await store.load(each.id) for each in again] == list(again)
        assert [each.seq for each in await store.read("z")] == [1, 2, 3]
        assert texts(await store.save(say(again[0], "alone"))) == ["first", "on", "alone"]
        assert list(await store.save_all([])) == []

    @in_store
    async def test_one_that_is_refused_stops_all(self, store: GroupingStore) -> None:
        """One refused change stops all, wherever it is in the list. The error is that of the first refused one."""
        saved = [await store.create(new_session("Hi", id=each)) for each in ("b", "d", "f")]
        stale = await store.create(new_session(id="c"))
        await store.save(stale)
        taken, unknown = new_session(id="c"), _gone()
        for bad, error in ((stale, SessionConflict), (taken, SessionConflict), (unknown, SessionNotFound)):
            for place in range(4):
                changes = [*map(_said, saved), Change(new_session("new", id="e"), key=Key("k", "d"))]
                changes.insert(place, Change(bad))
                with refused(error) as caught:
                    await store.save_all(changes)
                assert caught.error.session_id == bad.id
                assert [await store.load(each.id) for each in saved] == saved
                assert not await store.exists("e")
                assert [*await store.read("b")] == []
                assert await store.find_key("b", "k") is None
        with refused(SessionConflict) as caught:
            await store.save_all([Change(taken), Change(new_session(id="b"))])
        assert caught.error.session_id == "c"
        kept = await store.save_all([*map(_said, saved), Change(new_session("new", id="e"))])
        assert [each.version for each in kept] == [2, 2, 2, 1]

    @in_store
    async def test_a_session_that_is_run_stops_all(self, store: GroupingStore) -> None:
        """`save_all` raises SessionBusy while one session is claimed, and RunInterrupted once the claim has lapsed."""
        one, two = [await store.create(new_session("Hi", id=each)) for each in ("one", "two")]
        claim, _ = await store.claim("two", version=1, owner="runner")
        with refused(SessionBusy):
            await store.save_all([_said(one), _said(two)])
        await store.release(claim, interrupted=True)
        with refused(RunInterrupted):
            await store.save_all([_said(one), _said(two)])
        assert await store.load("one") == one
        claim, _ = await store.claim("two", version=1, owner="other", take_over=True)
        await store.release(claim)
        assert [each.version for each in await store.save_all([_said(one), _said(two)])] == [2, 2]

    @in_store
    async def test_no_session_is_there_twice(self, store: GroupingStore) -> None:
        """Two changes of one session raise InvalidData, which names the place of the second."""
        session = await store.create(new_session("Hi", id="s"))
        with refused(InvalidData) as caught:
            await store.save_all([_said(session), Change(new_session(id="t")), _said(session)])
        assert caught.error.path == "$.changes[2]"
        assert await store.load("s") == session
        assert not await store.exists("t")

    @in_store
    async def test_a_fork_is_kept_with_what_it_is_forked_from(self, store: GroupingStore) -> None:
        """A fork may show messages that its parent says in the same commit, and earlier ones."""
        parent = say(await store.create(new_session("Hi", id="p")), "both")
        kept, branch = await store.save_all([Change(parent), Change(fork(parent, id="f"))])
        assert [await store.load("p"), await store.load("f")] == [kept, branch]
        assert texts(kept) == texts(branch) == ["Hi", "both"]
        await store.delete("p")
        assert texts(await store.load("f")) == ["Hi", "both"]
        assert texts(await store.save(say(branch, "on"))) == ["Hi", "both", "on"]

    @in_store
    async def test_files_are_kept_with_them(self, store: Any) -> None:
        """An image that two sessions have is stored with the commit, and not at all if it is refused."""
        # Files are a port of their own, which this contract does not require.
        if not hasattr(store, "attachments"):
            return
        picture = Media("image/png", data=b"\x89" * 9000)
        seen = Message(role="user", parts=(Text("look"), picture))
        one, two = (tell(new_session(id=each), seen) for each in ("one", "two"))
        taken = await store.create(new_session(id="taken"))
        with refused(SessionConflict):
            await store.save_all([Change(one), Change(two), Change(new_session(id=taken.id))])
        kept = await store.save_all([Change(one), Change(two)])
        hashes = [hashlib.sha256(b"\x89" * 9000).hexdigest()]
        for each in kept:
            assert [*(await store.attachments(each.id, hashes)).values()] == [b"\x89" * 9000]
        await store.delete("one")
        assert await store.check() == []

    @in_store
    async def test_of_those_that_overlap_one_wins_whole(self, store: GroupingStore) -> None:
        """Tasks that save the same sessions in different orders, and create new ones, do not wait for ever."""
        sessions = [await store.create(note(new_session(id=f"s{n}"), "winner", None)) for n in range(4)]
        for round in range(ROUNDS):
            attempts = [_attempt(sessions, round, racer) for racer in range(4)]
            outcomes = await asyncio.gather(*map(store.save_all, attempts), return_exceptions=True)
            winners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
            losers = [type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
            assert len(winners) == 1
            assert losers == [SessionConflict] * 3
            by_id = {each.id: each for each in winners[0]}
            sessions = [by_id[each.id] for each in sessions]
            assert [await store.load(each.id) for each in winners[0]] == list(winners[0])
            assert len({each.state.metadata["winner"] for each in winners[0]}) == 1
            assert {each.version for each in sessions} == {round + 2}

    @in_store
    async def test_others_save_meanwhile(self, store: GroupingStore) -> None:
        """A save of one session comes before the whole group or after it: one of the two gets a conflict."""
        for round in range(ROUNDS):
            pair = [await store.create(new_session(id=f"{name}{round}")) for name in ("a", "b")]
            outcomes = await asyncio.gather(
                store.save(say(pair[1], "alone")), store.save_all(_said_in_all(pair)), return_exceptions=True
            )
            assert sorted(isinstance(outcome, SessionConflict) for outcome in outcomes) == [False, True]
            versions = [(await _loaded(store, each)).version for each in pair]
            assert versions == ([1, 2] if isinstance(outcomes[1], SessionConflict) else [2, 2])

    @in_store
    async def test_cancelled_they_are_kept_whole_or_not_at_all(self, store: GroupingStore) -> None:
        """A caller that is cancelled at any moment leaves all of them or none."""
        pair: list[AgentSession] = [await store.create(new_session(id=each)) for each in ("a", "b")]
        for delay in range(16):
            attempt = asyncio.create_task(store.save_all(_said_in_all(pair)))
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            pair = await _saved_after_all(store, pair)
            assert pair[0].version == pair[1].version
            assert texts(pair[0]) == texts(pair[1])


def _gone() -> AgentSession:
    """Return a session that another store has saved."""
    new = new_session(id="nobody")
    return AgentSession.reconstitute(new, version=3, updated_at=new.info.updated_at)


def _said(session: AgentSession) -> Change:
    return Change(say(session, "more"), key=Key("k", "d"), entries=[Entry("said")])


def _said_in_all(sessions: Iterable[AgentSession]) -> list[Change]:
    return [_said(each) for each in sessions]


def _attempt(sessions: Sequence[AgentSession], round: int, racer: int) -> list[Change]:
    """Return the changes of one racer in a round. Each racer has an order of its own."""
    new = [new_session(id=f"new-{round}-{n}") for n in range(2)]
    every = [note(each, "winner", racer) for each in (*sessions, *new)]
    turned = [*every[racer:], *every[:racer]]
    return [Change(each) for each in (turned if racer % 2 else reversed(turned))]


async def _loaded(store: GroupingStore, session: AgentSession) -> AgentSession:
    found = await store.load(session.id)
    assert found is not None
    return found


async def _saved_after_all(store: GroupingStore, pair: Sequence[AgentSession]) -> list[AgentSession]:
    """Save on top of what is there. The cancelled save may still be under way, and then there is a conflict."""
    # A cancel lets the caller go, and not always the commit: it may come in between.
    for _ in range(100):
        loaded = [await _loaded(store, each) for each in pair]
        try:
            return list(await store.save_all(_said_in_all(loaded)))
        except PerdureError:
            await asyncio.sleep(0.001)
    raise AssertionError("the sessions never came to rest")
