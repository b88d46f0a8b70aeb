"""Sessions found by the beginning or the end of their id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from perdure.errors import InvalidData, InvalidSessionId
from perdure.model.session import SessionStatus
from perdure.protocols import Names, SessionStore
from perdure.testing.samples import new_session
from perdure.testing.scene import Contract, in_store, refused

# In ASCII, digits come before capitals, and these before small letters.
IDS = ("ab", "ab-1", "ab-2", "abc", "abz", "Ab", "ac", "b", "0192")
ENDING_SO = ("1-4af2", "14af2", "2-14AF2", "2-14af2", "4af2", "4af2-4af", "af2")
"""Ids with similar ends."""
OF_ADA = ("ab-1", "ab-2", "2-14AF2", "2-14af2")


class NamedStore(SessionStore, Names, Protocol):
    """A store that finds sessions by the beginning or the end of their id."""


class Naming(Contract):
    """Ids are listed in the order of text, and only those that were asked for."""

    @in_store
    async def test_the_ids_that_begin_so_come_in_order(self, store: NamedStore) -> None:
        """Ids that begin with a text come in the order of ASCII, and the text itself comes first."""
        assert isinstance(store, Names)
        await _fill(store)
        assert [*await store.ids_with_prefix("ab")] == ["ab", "ab-1", "ab-2", "abc", "abz"]
        assert [*await store.ids_with_prefix("abc")] == ["abc"]
        assert [*await store.ids_with_prefix("abcd")] == []
        assert [*await store.ids_with_prefix("")] == sorted(IDS)

    @in_store
    async def test_there_are_no_more_ids_than_were_asked_for(self, store: NamedStore) -> None:
        """No more ids are listed than `limit` allows, and a limit below 1 is refused."""
        await _fill(store)
        assert [*await store.ids_with_prefix("ab", limit=2)] == ["ab", "ab-1"]
        with refused(InvalidData):
            await store.ids_with_prefix("ab", limit=0)

    @in_store
    async def test_another_owners_ids_stay_unknown(self, store: NamedStore) -> None:
        """An owner is shown only their own ids."""
        await _fill(store)
        assert [*await store.ids_with_prefix("a", owner="ada")] == ["ab-1", "ab-2"]
        assert [*await store.ids_with_prefix("a", owner="ben")] == []

    @in_store
    async def test_hidden_sessions_are_found_only_when_asked_for(self, store: NamedStore) -> None:
        """A session of status `deleted` is listed only with `deleted=True`, and an erased session never."""
        await _fill(store)
        session = await store.load("abc")
        assert session is not None
        await store.save(replace(session, info=replace(session.info, status=SessionStatus.DELETED)))
        await store.delete("abz")
        assert [*await store.ids_with_prefix("ab")] == ["ab", "ab-1", "ab-2"]
        assert [*await store.ids_with_prefix("ab", deleted=True)] == ["abc"]

    @in_store
    async def test_what_no_id_begins_with_is_refused(self, store: NamedStore) -> None:
        """A text that no id begins with is refused, such as wildcards and parts of paths."""
        for odd in ("%", "a%", "../a", "a\0", "\ud800", "a" * 201):
            with refused(InvalidSessionId, of=repr(odd)):
                await store.ids_with_prefix(odd)

    @in_store
    async def test_the_ids_that_end_so_come_in_order(self, store: NamedStore) -> None:
        """Ids that end with four characters or more come in order. Case matters, and an id ends with itself."""
        await _fill(store, ENDING_SO)
        assert [*await store.ids_with_suffix("4af2")] == ["1-4af2", "14af2", "2-14af2", "4af2"]
        assert [*await store.ids_with_suffix("14af2")] == ["14af2", "2-14af2"]
        assert [*await store.ids_with_suffix("-14af2")] == ["2-14af2"]
        assert [*await store.ids_with_suffix("2-14af2")] == ["2-14af2"]
        assert [*await store.ids_with_suffix("92-14af2")] == []
        assert [*await store.ids_with_suffix("4af2", limit=2)] == ["1-4af2", "14af2"]

    @in_store
    async def test_the_end_of_an_id_tells_nothing_of_others(self, store: NamedStore) -> None:
        """An owner is shown only their own ids, hidden sessions only when asked for, and erased ones never."""
        await _fill(store, ENDING_SO)
        assert [*await store.ids_with_suffix("4af2", owner="ada")] == ["2-14af2"]
        assert [*await store.ids_with_suffix("4af2", owner="ben")] == []
        session = await store.load("14af2")
        assert session is not None
        await store.save(replace(session, info=replace(session.info, status=SessionStatus.DELETED)))
        await store.delete("1-4af2")
        assert [*await store.ids_with_suffix("4af2")] == ["2-14af2", "4af2"]
        assert [*await store.ids_with_suffix("4af2", deleted=True)] == ["14af2"]
        assert [*await store.ids_with_suffix("4af2", owner="ada", deleted=True)] == []

    @in_store
    async def test_what_no_id_ends_with_is_refused(self, store: NamedStore) -> None:
        """A text that no id ends with is refused. So is an end of fewer than four characters: too many ids have it."""
        for odd in ("", "%%%%", "a%4af2", "/4af2", "4af2\0", "4af\ud800", "a" * 201):
            with refused(InvalidSessionId, of=repr(odd)):
                await store.ids_with_suffix(odd)
        for short in ("2", "af2", "-af"):
            with refused(InvalidData, of=repr(short)):
                await store.ids_with_suffix(short)
        with refused(InvalidData):
            await store.ids_with_suffix("4af2", limit=0)


async def _fill(store: NamedStore, ids: Sequence[str] = IDS) -> None:
    for session_id in ids:
        await store.create(new_session("hello", id=session_id, owner="ada" if session_id in OF_ADA else None))
