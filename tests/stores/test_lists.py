"""A page of a list costs what it shows: the same among many sessions as among few, with any filters together."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stories import opened

from perdure import MemoryStore, SqliteStore
from perdure.archive import copy, fsck
from perdure.errors import CorruptRecord
from perdure.model.ids import use
from perdure.protocols import SessionQuery
from perdure.stores.jobs.listing import Page
from perdure.stores.sqlite.engine import _read_page
from perdure.stores.sqlite.schema import migrate
from perdure.testing import FrozenClock
from perdure.testing.samples import new_session, say

MANY = 20_000
FILL = """
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {many})
    INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, spawned, recent)
    SELECT 's' || n, n, 1,
        CASE WHEN n > 0.8 * {many} THEN 'deleted' WHEN n % 7 = 0 THEN 'failed' ELSE 'completed' END,
        'agent' || n % 3, CASE WHEN n % 11 THEN 'owner' || n % 2 END, CASE WHEN n % 1000 = 0 THEN 's5' END, n, n,
        n % 5 = 0, n / 60
    FROM numbers;
    INSERT INTO tag (tag, sid) SELECT 'even', sid FROM session WHERE sid % 2 = 0;
    INSERT INTO tag (tag, sid) SELECT 'rare', sid FROM session WHERE sid % 1000 = 1;
    INSERT INTO head (sid, version, crc, body) SELECT sid, 1, 0, x'' FROM session;
"""


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


FILTERS: dict[str, Any] = {
    "agent": "agent1",
    "status": "failed",
    "owner": "owner1",  # no even number is its
    "tag": "even",
    "parent": "s5",
    "created_after": at(0.1 * MANY),
    "created_before": at(0.5 * MANY),
    "updated_before": at(0.4 * MANY),
    "top_level": True,
    "after": f"{0.3 * MANY!r}_{int(0.3 * MANY)}",
}
NONES: dict[str, Any] = {"owner": None}
OTHERS = (
    *({"tag": "rare"}, {"tag": "none"}, {"status": "active"}, {"status": "deleted"}, {"updated_after": at(1)}),
    *({"updated_after": at(0.75 * MANY)}, {"updated_after": at(0.7999 * MANY)}, {"updated_before": at(100)}),
    *(NONES, {**NONES, "agent": "agent1"}, {**NONES, "tag": "even"}, {**NONES, "status": "failed"}),
    *({**NONES, "tag": "even", "top_level": True}, {**NONES, "updated_before": at(0.4 * MANY)}),
)


def asked() -> Iterator[dict[str, Any]]:
    for names in (names for count in range(len(FILTERS) + 1) for names in combinations(FILTERS, count)):
        query = {name: FILTERS[name] for name in names}
        yield query
        # Old sessions may have been updated at any time. To find the sessions created before a moment and updated
        # last, a store has to look at all that were updated since.
        # last, takes a look at all that were updated since.
        if "created_before" not in query:
            yield by_update(query)
    for query in OTHERS:
        yield from (query, by_update(query))
    yield by_update({"created_before": at(100)})


def by_update(query: dict[str, Any]) -> dict[str, Any]:
    after = {"after": f"u{query['after']}"} if "after" in query else {}
    return {**query, **after, "order": "updated"}


@pytest.fixture(params=[MANY])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[apsw.Connection]:
    db = apsw.Connection(str(tmp_path / "sessions.db"))
    migrate(db)
    db.execute(FILL.format(many=request.param)).fetchall()
    yield db
    db.close()


def steps_of(db: apsw.Connection, query: dict[str, Any]) -> int:
    """Return the number of SQLite's own instructions for a page, in tens."""
    count = 0

    def note() -> bool:
        nonlocal count
        count += 1
        return False

    db.set_progress_handler(note, 10)
    _read_page(Page(SessionQuery.of(query)), db)
    db.set_progress_handler(None)
    return count


def test_a_page_takes_as_many_steps_as_it_shows_sessions(filled: apsw.Connection) -> None:
    """A full page out of eight shelves, after a count, costs most; to skip 20,000 rows would cost ten times that."""
    dear = {str(query): steps for query in asked() if (steps := steps_of(filled, query)) > 2_600}
    assert dear == {}


@pytest.mark.parametrize("filled", [2_000 if os.environ.get("PERDURE_TORTURE") else 250], indirect=True)
def test_pages_are_those_of_a_scan(filled: apsw.Connection) -> None:
    """A page has the sessions that meet every condition, whichever index finds them."""
    filled.execute("UPDATE session SET updated = 1, recent = 0 WHERE sid = 1403")  # the clocks disagree
    filled.execute("UPDATE session SET updated = 1100 - sid % 97, recent = (1100 - sid % 97) / 60 WHERE sid % 13 = 0")
    filled.execute("UPDATE session SET status = 'suspended', agent = 'agent1' WHERE sid % 77 = 0")
    tags: dict[int, set[str]] = {}
    for tag, sid in filled.execute("SELECT tag, sid FROM tag"):
        tags.setdefault(sid, set()).add(tag)
    columns = ("sid", "status", "agent", "owner", "parent", "spawned", "created", "updated")
    rows = filled.execute(f"SELECT {', '.join(columns)} FROM session").fetchall()
    sessions = [dict(zip(columns, row, strict=True)) for row in rows]
    in_order = {
        order: sorted(sessions, key=operator.itemgetter(order, "sid"), reverse=True) for order in ("created", "updated")
    }
    for query in asked():
        page = Page(SessionQuery.of({**query, "limit": 20}))
        found = [row.sid for row in _read_page(page, filled)]
        expected = [each["sid"] for each in in_order[page.query.order] if _meets(page, each, tags)]
        assert found == expected[:21], query


def _meets(page: Page, session: dict[str, Any], tags: dict[int, set[str]]) -> bool:
    query = page.query
    is_tagged = query.tag is None or query.tag in tags.get(session["sid"], ())
    is_behind = page.start is None or (session[query.order], session["sid"]) < page.start
    return is_tagged and is_behind and all(_holds(session, *each) for each in page.where.items())


def _holds(session: dict[str, Any], key: str, value: Any) -> bool:
    column, _, sign = key.partition(" ")
    compare = {"": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}[sign]
    return bool(compare(session[column], value))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_a_tag_follows_its_session(tmp_path: Path, kind: str) -> None:
    """Lists by tag follow a session's status, its tags and its deletion."""
    async with opened(kind, tmp_path) as store:
        session = await store.create(new_session("one", owner="ada", tags=("a", "b")))
        other = await store.create(new_session("two", owner="ben", tags=("b",)))

        async def found(**filters: Any) -> list[str]:
            return [info.id for info in await store.list(**filters)]

        assert await found(tag="b") == [other.id, session.id]
        assert await found(tag="b", owner="ada") == [session.id]
        session = await store.save(session.suspended())
        assert await found(tag="a", status="active") == []
        assert await found(tag="a", status="suspended", owner="ada") == [session.id]
        session = await store.save(session.with_tags(("b", "c")).deleted())
        assert await found(tag="c") == await found(tag="a", status="deleted") == []
        assert await found(tag="c", status="deleted") == [session.id]
        await store.delete(session.id)
        assert await found(tag="c", status="deleted") == []
        assert await store.check() == []


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_clocks_that_disagree_hide_nothing(tmp_path: Path, kind: str) -> None:
    """A session that was updated before it was created is listed by the time that it says."""
    clock = FrozenClock()
    with use(clock=clock):
        async with opened(kind, tmp_path) as store:
            early = clock()
            clock.advance(3600)
            session = await store.create(new_session("one", tags=("t",), owner="ada"))
            clock.advance(-7200)
            await store.save(say(session, "two"))
            for filters in ({}, {"tag": "t"}, {"owner": "ada"}, {"parent": "nobody"}, {"id": session.id}):
                page = await store.list(updated_before=early, **filters)
                assert [info.id for info in page] == ([] if "parent" in filters else [session.id]), filters
                assert list(await store.list(updated_after=early, **filters)) == []
                later = early + timedelta(hours=2)
                assert len(await store.list(updated_before=later, **filters)) == len(page), "once, not twice"
            assert await store.check() == []


async def test_what_tags_say_of_sessions_is_checked(tmp_path: Path) -> None:
    """A check names the session that lists by tag would not show; a copy of the store shows it again."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("one", tags=("t",)))
        db = apsw.Connection(str(path))
        db.execute("UPDATE tag SET status = 'gone'")
        db.close()
        assert list(await store.list(tag="t")) == []
        (problem,) = (await fsck(store)).problems
        assert (problem.session_id, problem.where) == (session.id, "its tags in lists")
        async with SqliteStore(tmp_path / "copy.db") as other:
            await copy(store, other)
            assert [info.id for info in await other.list(tag="t")] == [session.id]
            assert (await fsck(other)).problems == ()


async def test_an_index_that_leads_nowhere_is_damage(tmp_path: Path) -> None:
    """A page names the missing session as damaged, and shows the sessions that are there."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        kept = await store.create(new_session("one", tags=("t",)))
        lost = await store.create(new_session("two", tags=("t",)))
        db = apsw.Connection(str(path))
        db.execute("DELETE FROM session WHERE id = ?", (str(lost.id),))
        db.close()
        page = await store.list(tag="t")
        assert [info.id for info in page] == [kept.id]
        (damage,) = page.damaged
        assert isinstance(damage, CorruptRecord)
        assert "not there" in str(damage)


async def test_memory_lists_alike() -> None:
    """An engine without indexes answers with the same pages."""
    async with MemoryStore() as store:
        made = [await store.create(new_session(str(n), tags=("t",) if n % 2 else ())) for n in range(5)]
        assert [info.id for info in await store.list(tag="t", limit=1)] == [made[3].id]
