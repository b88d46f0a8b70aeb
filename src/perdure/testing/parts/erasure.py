"""Erasure: `delete` leaves nothing of a session except for what other sessions show."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

from perdure.errors import SessionConflict, SessionNotFound
from perdure.model.message import Message
from perdure.protocols import SessionStore
from perdure.testing.samples import fork, new_session, note, say, show, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused


class Erasure(Contract):
    """`delete` is final, and forks keep what they show."""

    @in_store
    async def test_deleting_an_unknown_session_is_refused(self, store: SessionStore) -> None:
        """Deleting a session that does not exist raises SessionNotFound, and changes nothing."""
        kept = await store.create(new_session("Hello"))
        with refused(SessionNotFound):
            await store.delete("nobody")
        assert await store.load(kept.id) == kept

    @in_store
    async def test_a_deleted_session_is_gone(self, store: SessionStore) -> None:
        """No version of a deleted session loads, no list shows it, and it can neither be saved nor deleted again."""
        session = await store.create(new_session("Hello", tags=("vip",)))
        session = await store.save(say(session, "more"))
        other = await store.create(new_session("stays", tags=("vip",)))
        await store.delete(session.id)
        assert await store.exists(session.id) is False
        assert [await store.load(session.id, version) for version in (None, 1, 2)] == [None, None, None]
        assert (await store.list()).all() == (other.info,)
        assert (await store.list(tag="vip")).all() == (other.info,)
        with refused(SessionNotFound):
            await store.save(session)
        with refused(SessionNotFound):
            await store.delete(session.id)
        assert await store.load(other.id) == other

    @in_store
    async def test_the_id_can_be_used_again(self, store: SessionStore) -> None:
        """A session created under an erased session's id is a new one, with nothing of the old one."""
        for round in range(3):
            session = await store.create(new_session(f"first {round}", id="again", tags=(f"t{round}",)))
            session = await store.save(note(say(session, "second"), "round", round))
            assert await store.load("again") == session
            await store.delete("again")
        anew = await store.create(new_session("anew", id="again"))
        assert (texts(anew), anew.state.metadata, anew.info.tags) == (["anew"], {"team": "north"}, ())
        assert await store.load("again", 2) is None
        saved = await store.save(say(anew, "goes on"))
        assert [texts(await store.load("again", version)) for version in (1, 2)] == [["anew"], ["anew", "goes on"]]
        assert await store.load("again") == saved

    @in_store
    async def test_a_save_from_before_the_erasure_is_refused(self, store: SessionStore) -> None:
        """A session that was erased and created again is not overwritten by a save of the old one."""
        old = await store.create(new_session("old", id="again"))
        await store.delete("again")
        anew = await store.create(new_session("anew", id="again"))
        assert old.version == anew.version
        # Both are right: the session that was loaded is gone, and another has its id.
        refusal = SessionNotFound, SessionConflict
        for stale in (old, show(say(old, "revived"), old.state.transcript.reset()), note(old, "key", "x" * 1000)):
            with refused(*refusal):
                await store.save(stale)
        assert await store.load("again") == anew
        assert await store.save(say(anew, "goes on")) == await store.load("again", 2)

    @in_store
    async def test_a_fork_keeps_what_its_parent_said(self, store: SessionStore) -> None:
        """Every version of a fork reads the same after its parent was erased, and the fork can be continued."""
        parent = await store.create(new_session("one", "two", "three"))
        child = await store.create(fork(parent))
        parent = await store.save(say(parent, "only in the parent"))
        second = await store.save(say(child, "four"))
        third = await store.save(show(second, second.state.transcript.trim(1)))
        await store.delete(parent.id)
        for session in (child, second, third):
            assert await store.load(child.id, session.version) == session
        fourth = await store.save(say(third, "five"))
        assert texts(await store.load(child.id)) == ["four", "five"]
        assert await store.load(child.id) == fourth
        assert (await store.list(parent=parent.id)).all() == (fourth.info,)

    @in_store
    async def test_forks_of_forks_survive_in_any_order(self, store: SessionStore) -> None:
        """Whichever session of a family is erased first, those that are left show all that they showed."""
        # A third of the orders: each takes a family of four sessions.
        for order in [*permutations(range(4))][::3]:
            family = [await store.create(new_session("p1", "p2"))]
            family.append(await store.create(say(fork(family[0]), "c1", "c2")))
            family.append(await store.create(say(fork(family[1]), "g1")))
            family.append(await store.create(show(fork(family[1]), family[1].state.transcript.cut(1, 3))))
            expected = [["p1", "p2"], ["p1", "p2", "c1", "c2"], ["p1", "p2", "c1", "c2", "g1"], ["p2", "c1"]]
            for count, gone in enumerate(order, start=1):
                await store.delete(family[gone].id)
                for left in order[count:]:
                    assert texts(await store.load(family[left].id)) == expected[left], (order, count, left)
        assert len(await store.list()) == 0

    @in_store
    async def test_a_fork_keeps_what_a_block_covers(self, store: SessionStore) -> None:
        """Messages that a compaction hides in a fork can be shown again after the parent was erased."""
        parent = await store.create(new_session("one", "two", "three", "four"))
        view = parent.state.transcript.cover(0, 3, [Message.assistant("a summary")], by="test")
        parent = await store.save(show(parent, view))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        loaded = await store.load(child.id)
        assert texts(loaded) == ["a summary", "four"]
        assert loaded is not None
        await store.save(show(loaded, loaded.state.transcript.uncover()))
        assert texts(await store.load(child.id)) == ["one", "two", "three", "four"]

    @in_store
    async def test_a_fork_of_an_erased_parent_is_whole_or_refused(self, store: SessionStore) -> None:
        """A fork made before its parent was erased, and stored afterwards, is stored whole or refused."""
        parent = await store.create(new_session("one", "two", "three"))
        orphan = fork(parent)
        await store.delete(parent.id)
        try:
            # Both outcomes are right. Half a fork would not be.
            await store.create(orphan)
        except SessionNotFound:
            assert not await store.exists(orphan.id)
            assert len(await store.list()) == 0
        else:
            assert texts(await store.load(orphan.id)) == ["one", "two", "three"]

    @in_store
    async def test_a_fork_may_begin_with_what_another_fork_still_shows(self, store: SessionStore) -> None:
        """An erased parent's messages can be forked from any session that shows them."""
        parent = await store.create(new_session("one", "two", "three"))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        loaded = await store.load(child.id)
        assert loaded is not None
        grandchild = await store.create(say(fork(loaded), "four"))
        await store.delete(child.id)
        assert texts(await store.load(grandchild.id)) == ["one", "two", "three", "four"]

    @in_directory
    async def test_other_instances_see_the_erasure_at_once(self, where: Path) -> None:
        """An instance with the session in its cache stops showing it at once."""
        if not self.shared:
            return
        async with self.open_store(where) as first, self.open_store(where) as second:
            session = await first.create(new_session("old", id="again"))
            child = await first.create(fork(session, id="child"))
            assert await second.load("again") == session
            assert await second.load("child") == child
            await first.delete("again")
            assert await second.load("again") is None
            assert await second.exists("again") is False
            assert texts(await second.load("child")) == ["old"]
            anew = await first.create(new_session("anew", id="again"))
            assert await second.load("again") == anew
            with refused(SessionNotFound, SessionConflict):
                await second.save(note(session, "key", "x" * 1000))
            assert await second.load("again") == anew
            await second.save(say(anew, "goes on"))
            assert texts(await first.load("again")) == ["anew", "goes on"]
