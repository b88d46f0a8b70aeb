"""Sessions found by the beginning of their id."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from perdure.errors import InvalidData, InvalidSessionId
from perdure.model.session import SessionStatus
from perdure.protocols import Names, SessionStore
from perdure.testing.samples import new_session
from perdure.testing.scene import Contract, in_store, refused

IDS = ("ab", "ab-1", "ab-2", "abc", "abz", "Ab", "ac", "b", "0192")


class NamedStore(SessionStore, Names, Protocol):
    """A store that finds sessions by the beginning of their id."""


class Naming(Contract):
    """Ids come in the order of text, and only those that were asked for."""

    @in_store
    async def test_the_ids_that_begin_so_come_in_order(self, store: NamedStore) -> None:
        """In the order of ASCII, the beginning itself first."""
        assert isinstance(store, Names)
        await _fill(store)
        assert [*await store.ids_with_prefix("ab")] == ["ab", "ab-1", "ab-2", "abc", "abz"]
        assert [*await store.ids_with_prefix("abc")] == ["abc"]
        assert [*await store.ids_with_prefix("abcd")] == []
        assert [*await store.ids_with_prefix("")] == sorted(IDS)

    @in_store
    async def test_there_are_no_more_ids_than_were_asked_for(self, store: NamedStore) -> None:
        """At least one has to be asked for."""
        await _fill(store)
        assert [*await store.ids_with_prefix("ab", limit=2)] == ["ab", "ab-1"]
        with refused(InvalidData):
            await store.ids_with_prefix("ab", limit=0)

    @in_store
    async def test_another_owners_ids_stay_unknown(self, store: NamedStore) -> None:
        """An owner is shown no ids but their own."""
        await _fill(store)
        assert [*await store.ids_with_prefix("a", owner="ada")] == ["ab-1", "ab-2"]
        assert [*await store.ids_with_prefix("a", owner="ben")] == []

    @in_store
    async def test_hidden_sessions_are_found_only_when_asked_for(self, store: NamedStore) -> None:
        """A session of status `deleted` is shown to those who look for such, and one that is erased to nobody."""
        await _fill(store)
        session = await store.load("abc")
        assert session is not None
        await store.save(replace(session, info=replace(session.info, status=SessionStatus.DELETED)))
        await store.delete("abz")
        assert [*await store.ids_with_prefix("ab")] == ["ab", "ab-1", "ab-2"]
        assert [*await store.ids_with_prefix("ab", deleted=True)] == ["abc"]

    @in_store
    async def test_what_no_id_begins_with_is_refused(self, store: NamedStore) -> None:
        """Whatever could mean more to a database or a file system than a letter."""
        for odd in ("%", "a%", "../a", "a\0", "\ud800", "a" * 201):
            with refused(InvalidSessionId, of=repr(odd)):
                await store.ids_with_prefix(odd)


async def _fill(store: NamedStore) -> None:
    for session_id in IDS:
        await store.create(new_session("hello", id=session_id, owner="ada" if "-" in session_id else None))
