"""The versions of a session as a list: the effect of a damaged one on the others, and the cost of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests import postgres_server
from tests.counted import CountingStore

from perdure import AgentSession, FileStore, PerdureError, PostgresStore, SqliteStore
from perdure.testing.samples import new_session, note, say

from .files import flip


async def told(store: Any, versions: int) -> AgentSession:
    """Return a session of that many versions, each with metadata of its own that is kept by its hash."""
    session: AgentSession = await store.create(new_session("Hello", id="s"))
    for number in range(2, versions + 1):
        session = await store.save(note(say(session, f"message {number}"), "state", f"{number}" * 400))
    return session


async def listed(store: Any, **page: Any) -> list[int]:
    return [head.info.version for head in await store.versions("s", **page)]


# Versions 2 to 5 name metadata of their own, which comes after the definition.
_METADATA_OF_3 = "SELECT rowid FROM value ORDER BY rowid LIMIT 1 OFFSET 2"


@pytest.mark.parametrize(
    "damage",
    ["UPDATE head SET body = x'00' WHERE version = 3", f"DELETE FROM value WHERE rowid = ({_METADATA_OF_3})"],
)
async def test_a_damaged_version_stops_no_other_in_sqlite(tmp_path: Path, damage: str) -> None:
    """It is left out, and the page is filled with older ones."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await told(store, 5)
    db = apsw.Connection(str(path))
    db.execute(damage)
    db.close()
    async with SqliteStore(path) as store:
        assert await listed(store) == [5, 4, 2, 1]
        assert await listed(store, limit=3) == [5, 4, 2]
        assert await listed(store, before=4, limit=1) == [2]
        with pytest.raises(PerdureError):
            await store.load("s", 3)


async def test_a_damaged_version_stops_no_other_in_files(tmp_path: Path) -> None:
    """The lines that are sound are listed."""
    async with FileStore(tmp_path) as store:
        await told(store, 5)
    path = tmp_path / "s.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if b'"kind":"head"' in line and b'"at":3' in line)
    flip(path, sum(map(len, lines[:place])) + len(lines[place]) // 2)
    async with FileStore(tmp_path) as store:
        assert await listed(store) == [5, 4, 2, 1]
        assert await listed(store, limit=3) == [5, 4, 2]


async def test_a_damaged_version_stops_no_other_in_postgres(tmp_path: Path) -> None:
    """It is left out, and the page is filled with older ones."""
    schema = postgres_server.schema_of(tmp_path)
    async with PostgresStore(postgres_server.dsn(), schema=schema) as store:
        await told(store, 5)
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as db:
            db.execute(f"UPDATE {schema}.head SET body = '\\x00' WHERE version = 3")
        assert await listed(store) == [5, 4, 2, 1]
        assert await listed(store, limit=3) == [5, 4, 2]


@pytest.mark.parametrize("before", [None, 150])
async def test_a_page_costs_what_it_has(before: int | None) -> None:
    """Neither the versions beside it nor the messages of the session are read."""
    async with CountingStore() as store:
        await told(store, 300)
        with store.counted() as counts:
            assert len(await listed(store, before=before, limit=10)) == 10
    assert counts.read["head"] == 10
    assert counts.read["msg"] == 0
    assert counts.read["value"] <= 11
    assert counts.statements <= 4
