"""Creating, saving and loading: the version numbers, and versions that never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.errors import InvalidData, InvalidSessionId, SessionConflict, SessionNotFound
from perdure.model import ids
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import SessionStore
from perdure.testing.clock import FrozenClock
from perdure.testing.samples import new_session, note, run_of, say, seen, show, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused

# An id is a file's name in some stores, so every store refuses what could lead elsewhere.
PATH_LIKE = ("", ".", "..", "../up", "a/b", "a\\b", "/etc/passwd", "a\x00b", ".hidden", "é", "x" * 201, "a b", "a\n")


class Versions(Contract):
    """A session is created as version 1, and each save makes one version more."""

    @in_store
    async def test_a_created_session_is_version_1(self, store: SessionStore) -> None:
        """`create` stores a session of version 0 as version 1, and returns what it stored."""
        given = new_session("Where is order 7?", owner="ann", tags=("vip", "eu"), name="Order 7")
        kept = await store.create(given)
        assert kept == AgentSession.reconstitute(given, version=1, updated_at=kept.info.updated_at)
        assert kept.version == 1
        assert await store.load(given.id) == kept

    @in_store
    async def test_create_refuses_any_version_but_0(self, store: SessionStore) -> None:
        """A session that has a version already cannot be created, and nothing of it is stored."""
        for version in (1, 7, -1):
            given = new_session("Hello")
            odd = AgentSession.reconstitute(given, version=version, updated_at=given.info.updated_at)
            with refused(InvalidData):
                await store.create(odd)
            assert not await store.exists(given.id)

    @in_store
    async def test_create_refuses_an_id_that_is_taken(self, store: SessionStore) -> None:
        """A second session under one id is a conflict, and the first stays as it is."""
        first = await store.create(new_session("first", id="one"))
        with refused(SessionConflict):
            await store.create(new_session("second", id="one"))
        assert await store.load("one") == first
        assert texts(await store.save(say(first, "more"))) == ["first", "more"]

    @in_store
    async def test_each_save_is_one_version_more(self, store: SessionStore) -> None:
        """`save` stores the next version, and returns what it stored."""
        session = await store.create(new_session())
        for version in range(2, 6):
            changed = say(session, f"message {version}")
            session = await store.save(changed)
            assert session == AgentSession.reconstitute(changed, version=version, updated_at=session.info.updated_at)
            assert await store.load(session.id) == session

    @in_store
    async def test_a_save_without_a_change_is_a_version_too(self, store: SessionStore) -> None:
        """Saving what was loaded makes a new version, and changes nothing else."""
        session = await store.create(new_session("Hello"))
        again = await store.save(session)
        assert again.version == 2
        assert again.state == session.state

    @in_store
    async def test_a_stale_save_conflicts_and_changes_nothing(self, store: SessionStore) -> None:
        """Of two saves of one version the second is refused, and every version stays as it is."""
        first = await store.create(new_session("Hello"))
        second = await store.save(note(first, "by", "the winner"))
        for stale in (first, note(say(first, "lost"), "by", "the loser"), first.suspended()):
            with refused(SessionConflict) as conflict:
                await store.save(stale)
            assert (conflict.error.expected, conflict.error.found) == (1, 2)
        assert await store.load(first.id) == second
        assert await store.load(first.id, 1) == first
        assert await store.load(first.id, 3) is None
        assert [info.status for info in await store.list()] == [SessionStatus.ACTIVE]
        third = await store.save(say(second, "goes on"))
        assert texts(await store.load(first.id)) == ["Hello", "goes on"]
        assert third.version == 3

    @in_store
    async def test_a_save_from_the_future_conflicts(self, store: SessionStore) -> None:
        """A version that the store has not reached cannot be replaced."""
        kept = await store.create(new_session("Hello"))
        for version in (0, 2, 9):
            with refused(SessionConflict):
                await store.save(AgentSession.reconstitute(kept, version=version, updated_at=kept.info.updated_at))
        assert await store.load(kept.id) == kept

    @in_store
    async def test_saving_an_unknown_session_is_refused(self, store: SessionStore) -> None:
        """Only what was created can be saved."""
        given = new_session("Hello")
        for version in (0, 1):
            with refused(SessionNotFound):
                await store.save(AgentSession.reconstitute(given, version=version, updated_at=given.info.updated_at))
        assert not await store.exists(given.id)
        assert len(await store.list()) == 0

    @in_store
    async def test_what_is_not_there_loads_as_none(self, store: SessionStore) -> None:
        """An unknown session, or an unknown version of a known one, loads as None."""
        kept = await store.create(new_session("Hello"))
        assert await store.load("nobody") is None
        assert await store.load("nobody", 1) is None
        # Some are beyond a database's integers, which is not an error.
        for version in (-1, 0, 2, 2**31, 2**63, 2**80):
            assert await store.load(kept.id, version) is None

    @in_store
    async def test_exists(self, store: SessionStore) -> None:
        """`exists` tells whether a session is in the store, whatever its status."""
        session = await store.create(new_session())
        assert await store.exists(session.id) is True
        assert await store.exists("nobody") is False
        await store.save(session.deleted())
        assert await store.exists(session.id) is True

    @in_store
    async def test_every_version_loads_for_ever(self, store: SessionStore) -> None:
        """Each version loads as it was saved: its messages, metadata, status, definition and settings."""
        kept = [await store.create(new_session("Hello", "Good day"))]
        for change in _CHANGES:
            kept.append(await store.save(change(kept[-1])))
        for session in kept:
            assert seen(await store.load(session.id, session.version)) == seen(session)
        assert await store.load(kept[0].id) == kept[-1]

    @in_directory
    async def test_every_version_is_there_after_reopening(self, where: Path) -> None:
        """Every version that one instance has stored is found by the next one."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            kept = [await store.create(new_session("Hello", "Good day"))]
            for change in _CHANGES:
                kept.append(await store.save(change(kept[-1])))
        # In both orders: an instance may build one version on what it has loaded before.
        for order in (kept, kept[::-1]):
            async with self.open_store(where) as store:
                for session in order:
                    assert seen(await store.load(session.id, session.version)) == seen(session)
        async with self.open_store(where) as store:
            again = await store.save(say(kept[-1], "after reopening"))
            assert await store.load(again.id) == again

    @in_store
    async def test_times_come_from_the_clock(self, store: SessionStore) -> None:
        """`created_at` stays; `updated_at` is the time of the save."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            created = clock()
            clock.advance(60)
            saved = await store.save(session)
            loaded = await store.load(session.id)
        assert loaded is not None
        assert (saved.info.created_at, saved.info.updated_at) == (created, clock())
        assert loaded.info == saved.info

    @in_store
    async def test_a_session_id_may_be_given_as_text(self, store: SessionStore) -> None:
        """An id given as text comes back as a SessionId."""
        await store.create(new_session(id="Order-7_a.b"))
        loaded = await store.load("Order-7_a.b")
        assert loaded is not None
        assert type(loaded.id) is SessionId

    @in_store
    async def test_ids_that_differ_in_case_are_different(self, store: SessionStore) -> None:
        """Ids that differ only in case are different ids."""
        small = await store.create(new_session("a", id="order"))
        large = await store.create(new_session("b", id="ORDER"))
        assert [texts(await store.load(key)) for key in ("order", "ORDER")] == [["a"], ["b"]]
        await store.delete(small.id)
        assert await store.load("ORDER") == large

    @in_store
    async def test_ids_that_look_like_paths_are_refused(self, store: SessionStore) -> None:
        """Every verb that takes an id refuses one that looks like a path."""
        for odd in PATH_LIKE:
            for verb in (store.load, store.exists, store.delete):
                with refused(InvalidSessionId):
                    await verb(odd)


def _described(session: AgentSession) -> AgentSession:
    return session.with_definition(AgentDefinition("sales", description="Sells.", system_prompt="Sell. " * 100))


def _modelled(session: AgentSession) -> AgentSession:
    return session.with_state(session.state.with_model(ModelConfig("offline", settings={"seed": 7})).with_task("Sell"))


def _large_metadata(session: AgentSession) -> AgentSession:
    # More than 256 bytes, so that it is stored by its hash, apart from the head.
    return note(session, "notes", ["a rather long note"] * 50)


_CHANGES: tuple[Any, ...] = (
    lambda session: say(session, "Where is order 7?", "It was sent."),
    lambda session: note(session, "ticket", "OPS-142"),
    lambda session: session.suspended(),
    lambda session: session.activated(),
    _large_metadata,
    run_of,
    lambda session: session.with_tags(["vip", "late"]).with_name("Order 7"),
    lambda session: show(session, session.state.transcript.trim(2)),
    lambda session: say(session, "And order 8?"),
    _described,
    _modelled,
    lambda session: session.with_state(session.state.with_system_prompt("Be very brief. " * 40)),
    lambda session: session.with_state(session.state.with_response_format({"type": "object"})),
    lambda session: show(session, session.state.transcript.reset()),
    lambda session: session.with_state(session.state.for_next_execution()),
    lambda session: say(session, "A new start"),
    lambda session: session.completed(),
)
