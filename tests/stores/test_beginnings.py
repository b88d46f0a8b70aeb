"""Sessions found by the beginning or the end of their id, in every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests import postgres_server

from perdure.actions.lifecycle import DeleteSession
from perdure.errors import InvalidData, InvalidSessionId
from perdure.protocols import Names
from perdure.stores.engine import drive
from perdure.stores.file import FileStore
from perdure.stores.jobs.listing import IdPart
from perdure.stores.memory import MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.rows import queries_of
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.engine import Rows
from perdure.testing.samples import new_session


@pytest.fixture(params=["memory", "file", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "memory":
            return MemoryStore()
        case "file":
            return FileStore(tmp_path / "sessions")
        case "sqlite":
            return SqliteStore(tmp_path / "sessions.db")
    return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path))


IDS = ("ab", "ab-1", "ab-2", "abc", "abz", "Ab", "ac", "b", "0192")


async def filled(store: Any) -> None:
    for session_id in IDS:
        await store.create(new_session("hello", id=session_id, owner="ada" if "-" in session_id else None))


async def test_the_ids_that_begin_so_come_in_order(store: Any) -> None:
    async with store:
        await filled(store)
        assert isinstance(store, Names)
        assert list(await store.ids_with_prefix("ab")) == ["ab", "ab-1", "ab-2", "abc", "abz"]
        assert list(await store.ids_with_prefix("abc")) == ["abc"]
        assert list(await store.ids_with_prefix("abcd")) == []
        assert list(await store.ids_with_prefix("")) == sorted(IDS)


async def test_there_are_no_more_than_were_asked_for(store: Any) -> None:
    async with store:
        await filled(store)
        assert list(await store.ids_with_prefix("ab", limit=2)) == ["ab", "ab-1"]
        with pytest.raises(InvalidData):
            await store.ids_with_prefix("ab", limit=0)


async def test_another_owners_ids_stay_unknown(store: Any) -> None:
    async with store:
        await filled(store)
        assert list(await store.ids_with_prefix("a", owner="ada")) == ["ab-1", "ab-2"]
        assert list(await store.ids_with_prefix("a", owner="ben")) == []


async def test_deleted_sessions_are_found_when_asked_for_only(store: Any) -> None:
    async with store:
        await filled(store)
        await store.save(await DeleteSession().execute_on(await store.load("abc")))
        assert list(await store.ids_with_prefix("abc")) == []
        assert list(await store.ids_with_prefix("ab", deleted=True)) == ["abc"]


@pytest.mark.parametrize("odd", ["%", "a%", "../a", "a\0", "\ud800", "a" * 201])
async def test_what_no_id_begins_with_is_refused(store: Any, odd: str) -> None:
    async with store:
        with pytest.raises(InvalidSessionId):
            await store.ids_with_prefix(odd)


async def test_a_damaged_session_has_its_id_still(tmp_path: Path) -> None:
    """A damaged session is found by its id, so that a person can name it and learn what is wrong with it."""
    async with FileStore(tmp_path / "sessions") as store:
        await filled(store)
    for file in _files(tmp_path / "sessions", "abz"):
        file.write_bytes(b"no session")
    async with FileStore(tmp_path / "sessions") as store:
        assert list(await store.ids_with_prefix("abz")) == ["abz"]
        assert list(await store.ids_with_prefix("abz", owner="ada")) == []


def _files(folder: Path, stem: str) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.name.startswith(f"{stem}."))


async def test_a_damaged_session_is_found_by_its_end(tmp_path: Path) -> None:
    async with FileStore(tmp_path / "sessions") as store:
        await store.create(new_session("hello", id="x-4af2", owner="ada"))
    for file in _files(tmp_path / "sessions", "x-4af2"):
        file.write_bytes(b"no session")
    async with FileStore(tmp_path / "sessions") as store:
        assert list(await store.ids_with_suffix("4af2")) == ["x-4af2"]
        assert list(await store.ids_with_suffix("4af2", owner="ada")) == []


@pytest.mark.parametrize("owner", [None, "ada"])
@pytest.mark.parametrize(
    ("part", "found", "by"),
    [
        (IdPart.beginning, "ab-", "id>? AND id<?"),
        (IdPart.end, "b-11", "session_again (<expr>=?)"),
    ],
)
async def test_sqlite_finds_them_by_an_index(
    tmp_path: Path, part: Callable[..., IdPart], found: str, by: str, owner: str | None
) -> None:
    """The cost depends on how many are found, not on how many sessions there are."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        for number in range(100):
            await store.create(new_session("hello", id=f"ab-{number}{number}", owner="ada"))
    db = apsw.Connection(str(path))
    db.execute("ANALYZE")  # tells the planner that most sessions belong to one owner
    plans: list[str] = []

    def explain(connection: apsw.Cursor, statement: str, bindings: Any) -> bool:
        if not statement.startswith("EXPLAIN"):
            plans.extend(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", bindings))
        return True

    db.exec_trace = explain
    rows = drive(part(found, owner, False, 2).job(), Rows(db, 0.0).answer)
    db.close()
    assert rows == {"ab-": ["ab-00", "ab-1010"], "b-11": ["ab-11"]}[found]
    assert "USING INDEX" in plans[0]
    assert by in plans[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("owner", [None, "ada"])
async def test_postgres_finds_the_ends_by_an_index(tmp_path: Path, owner: str | None) -> None:
    """The index is used before and after the planner knows how many sessions there are and who owns them."""
    schema = postgres_server.schema_of(tmp_path)
    async with PostgresStore(postgres_server.dsn(), schema=schema) as store:
        await store.create(new_session("hello", id="x-4af2", owner=owner))
        assert list(await store.ids_with_suffix("4af2", owner=owner)) == ["x-4af2"]
    text, values = next(queries_of(IdPart.end("4af2", owner, False, 6).job(), None))
    async with await psycopg.AsyncConnection.connect(postgres_server.dsn(), autocommit=True) as connection:
        await connection.execute(f"SET search_path = {schema}".encode())
        await connection.execute(_MANY_SESSIONS, (owner,))
        for _ in range(2):
            rows = await (await connection.execute(f"EXPLAIN {text}".encode(), values)).fetchall()
            plan = "\n".join(row[0] for row in rows)
            assert "session_by_end" in plan, plan
            await connection.execute("ANALYZE session")


_MANY_SESSIONS = """
    INSERT INTO session (id, log, version, status, agent, owner, created, updated, op)
    SELECT '0192' || md5(n::text), n, 1, 'active', 'a', %s::text, n, n, '' FROM generate_series(1, 100000) AS n
"""
