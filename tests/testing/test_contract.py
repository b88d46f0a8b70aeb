"""The store contract itself: a minimal store passes it, and a store that breaks a promise does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from perdure.errors import InvalidData, SessionConflict, SessionNotFound
from perdure.model.ids import SessionId, now
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList
from perdure.protocols import SessionQuery, SessionStore
from perdure.stores.jobs.listing import matches
from perdure.stores.memory import MemoryStore
from perdure.testing import StoreContract


class DocumentStore:
    """A minimal store: every version of every session is a document of its own."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[bytes]] = {}
        self.numbers: dict[str, int] = {}
        self.last = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def create(self, session: AgentSession) -> AgentSession:
        if session.version != 0:
            raise InvalidData("$.version", "a new session has version 0")
        if session.id in self.sessions:
            raise SessionConflict(session.id, 0, len(self.sessions[session.id]))
        kept = self.keep(session)
        self.last += 1
        self.numbers[session.id] = self.last
        return kept

    async def save(self, session: AgentSession) -> AgentSession:
        stored = await self.load(session.id)
        if stored is None:
            raise SessionNotFound(session.id)
        same = stored.info.created_at == session.info.created_at
        if stored.version != session.version or not same:
            raise SessionConflict(session.id, session.version, stored.version)
        return self.keep(session)

    def keep(self, session: AgentSession) -> AgentSession:
        kept = AgentSession.reconstitute(session, version=session.version + 1, updated_at=now())
        document = msgspec.json.encode(kept.to_dict())
        AgentSession.from_dict(msgspec.json.decode(document))
        self.sessions.setdefault(session.id, []).append(document)
        return kept

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        versions = self.sessions.get(SessionId(session_id), [])
        place = len(versions) if version is None else version
        if not 1 <= place <= len(versions):
            return None
        return AgentSession.from_dict(msgspec.json.decode(versions[place - 1]))

    async def exists(self, session_id: str) -> bool:
        return SessionId(session_id) in self.sessions

    async def delete(self, session_id: str) -> None:
        if SessionId(session_id) not in self.sessions:
            raise SessionNotFound(session_id)
        del self.sessions[session_id], self.numbers[session_id]

    async def list(self, **filters: Any) -> SessionInfoList:
        query = SessionQuery.of(filters)
        before = None if query.after is None else page_start(query.after, query.order)
        loaded = [(number, await self.load(key)) for key, number in self.numbers.items()]
        matching = [
            ((time_of(s.info, query.order), number), s.info) for number, s in loaded if s and matches(s.info, query)
        ]
        found = sorted((each for each in matching if before is None or each[0] < before), reverse=True)
        page = found[: query.limit]
        cursor = "{} {!r} {}".format(query.order, *page[-1][0]) if len(found) > len(page) else None
        return SessionInfoList([info for _, info in page], next=cursor)


def time_of(info: AgentSessionInfo, order: str) -> float:
    return (info.updated_at if order == "updated" else info.created_at).timestamp()


def page_start(after: str, order: str) -> tuple[float, int]:
    of_order, *place = after.split(" ")
    if of_order != order or len(place) != 2 or not place[1].isdecimal():
        raise InvalidData("$.after", "not a page of this list")
    return float(place[0]), int(place[1])


class TestDocumentStore(StoreContract):
    """A store that knows nothing of logs still keeps the contract."""

    def open_store(self, where: Path) -> DocumentStore:
        return DocumentStore()


class _LosesUpdates(DocumentStore):
    async def save(self, session: AgentSession) -> AgentSession:
        stored = await self.load(session.id)
        current = AgentSession.reconstitute(session, version=stored.version if stored else 0, updated_at=now())
        return self.keep(current)


class _KeepsTheLastVersionOnly(DocumentStore):
    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        return await super().load(session_id)


class _Overwrites(DocumentStore):
    async def create(self, session: AgentSession) -> AgentSession:
        self.sessions.pop(session.id, None)
        return await super().create(session)


class _ListsTheOldestFirst(DocumentStore):
    async def list(self, **filters: Any) -> SessionInfoList:
        return SessionInfoList([*await super().list(**filters)][::-1])


class _IgnoresFilters(DocumentStore):
    async def list(self, **filters: Any) -> SessionInfoList:
        return await super().list()


class _OnlyHides(DocumentStore):
    async def delete(self, session_id: str) -> None:
        self.numbers.pop(session_id, None)


class _TakesAnyId(DocumentStore):
    async def exists(self, session_id: str) -> bool:
        return session_id in self.sessions


class _SharesItsValues(MemoryStore):
    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        loaded = await super().load(session_id, version)
        return loaded and loaded.with_state(loaded.state.with_metadata("seen", now().isoformat()))


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (_LosesUpdates, "test_a_stale_save_conflicts_and_changes_nothing"),
        (_LosesUpdates, "test_of_racing_saves_one_wins_each_round"),
        (_KeepsTheLastVersionOnly, "test_every_version_loads_for_ever"),
        (_Overwrites, "test_create_refuses_an_id_that_is_taken"),
        (_ListsTheOldestFirst, "test_the_newest_session_comes_first"),
        (_IgnoresFilters, "test_wrong_filters_are_refused"),
        (_IgnoresFilters, "test_each_filter_narrows"),
        (_OnlyHides, "test_a_deleted_session_is_gone"),
        (_TakesAnyId, "test_ids_that_look_like_paths_are_refused"),
        (_SharesItsValues, "test_a_created_session_is_version_1"),
    ],
)
def test_a_broken_promise_is_noticed(store: type[Any], test: str, tmp_path: Path) -> None:
    """A store with a fault fails the test of that fault."""

    class Applied(StoreContract):
        def open_store(self, where: Path) -> Any:
            return store()

    with pytest.raises(AssertionError):
        getattr(Applied(), test)(tmp_path)


def test_the_contract_says_what_it_needs(tmp_path: Path) -> None:
    """A class that applies the contract without opening a store gets an error that says so."""
    with pytest.raises(NotImplementedError, match="open_store"):
        StoreContract().test_a_created_session_is_version_1(tmp_path)


def test_a_store_is_one_by_its_methods() -> None:
    """No base class is needed."""
    assert isinstance(DocumentStore(), SessionStore)
