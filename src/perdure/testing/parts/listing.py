"""Lists: newest first, in pages that neither repeat nor skip, narrowed by filters."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from perdure.errors import InvalidData
from perdure.model import ids
from perdure.model.definition import AgentDefinition
from perdure.model.lineage import SpawnRef
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import SessionStore
from perdure.stores.format.rows import Order
from perdure.testing.clock import FrozenClock
from perdure.testing.samples import fork, ids_of, new_session, note, say
from perdure.testing.scene import Contract, in_store, refused


async def create_many(store: SessionStore, count: int, prefix: str = "s") -> list[str]:
    """Create sessions, and return their ids, the oldest first."""
    names = [f"{prefix}{number:03}" for number in range(count)]
    for name in names:
        await store.create(new_session("Hello", id=name))
    return names


class Listing(Contract):
    """`list` returns headers, the newest session first."""

    @in_store
    async def test_an_empty_store_lists_nothing(self, store: SessionStore) -> None:
        """An empty store lists no session, no next page and nothing damaged."""
        page = await store.list()
        assert (page.all(), page.next, page.damaged) == ((), None, ())

    @in_store
    async def test_headers_are_those_of_the_newest_version(self, store: SessionStore) -> None:
        """A list shows each session once, as of its last save."""
        session = await store.create(new_session("Hello", owner="ann"))
        session = await store.save(session.with_tags(["vip"]).with_name("Order 7"))
        session = await store.save(session.with_definition(AgentDefinition("sales")).suspended())
        assert (await store.list()).all() == (session.info,)

    @in_store
    async def test_the_newest_session_comes_first(self, store: SessionStore) -> None:
        """Sessions are listed by when they were created; a save does not move them."""
        with ids.use(clock=FrozenClock(tick=1)):
            names = await create_many(store, 5)
            oldest = await store.load(names[0])
            assert oldest is not None
            await store.save(say(oldest, "more"))
            assert ids_of(await store.list()) == names[::-1]

    @in_store
    async def test_the_last_updated_session_comes_first(self, store: SessionStore) -> None:
        """With `order="updated"` a save moves a session to the front, within a minute and over hours."""
        clock = FrozenClock(tick=0.001)
        with ids.use(clock=clock):
            expected: list[str] = []
            for number in range(12):
                await store.create(new_session("Hello", id=f"s{number}"))
                expected.insert(0, f"s{number}")
                clock.advance(37 * number)
            for number in (3, 3, 11, 0, 7, 3, 8):
                session = await store.load(f"s{number}")
                assert session is not None
                await store.save(say(session, "more"))
                expected.remove(f"s{number}")
                expected.insert(0, f"s{number}")
                assert ids_of(await store.list(order="updated")) == expected
                clock.advance(1000 if number == 0 else 1)
        for limit in (1, 2, 5, 11, 12):
            assert await _paged(store, limit) == expected

    @in_store
    async def test_pages_by_update_skip_nothing_that_stays(self, store: SessionStore) -> None:
        """A session that is updated between two pages moves to the front; all others show once, in their order."""
        clock = FrozenClock(tick=1)
        with ids.use(clock=clock):
            names = await create_many(store, 130)  # so that they are updated in several minutes
            found: list[str] = []
            moved: list[str] = []
            page = await store.list(order="updated", limit=7)
            while True:
                found += ids_of(page)
                for name in (ids_of(page)[0], names[len(moved) // 2]):
                    session = await store.load(name)
                    assert session is not None
                    await store.save(say(session, "more"))
                    moved.append(name)
                if page.next is None:
                    break
                page = await store.list(order="updated", limit=7, after=page.next)
        assert len(found) == len({*found})
        assert found == [name for name in names[::-1] if name in found]
        assert {*names} - {*found} <= {*moved}

    @in_store
    async def test_a_page_belongs_to_its_order(self, store: SessionStore) -> None:
        """`next` of a list in one order is refused by a list in the other."""
        await create_many(store, 3)
        # `next` is a place in one order, which means nothing in the other.
        by_creation, by_update = await store.list(limit=1), await store.list(order="updated", limit=1)
        with refused(InvalidData):
            await store.list(order="updated", after=by_creation.next)
        with refused(InvalidData):
            await store.list(after=by_update.next)

    @in_store
    async def test_an_old_session_that_is_brought_in_is_not_the_newest(self, store: SessionStore) -> None:
        """Lists and pages go by when sessions were created, not by when they came into this store."""
        clock = FrozenClock(tick=1)
        with ids.use(clock=clock):
            old = [new_session("Hello", id=f"old{number}") for number in range(2)]
            young = await create_many(store, 2, "young")
            for session in reversed(old):
                await store.create(session)
            expected = [*young[::-1], "old1", "old0"]
            assert ids_of(await store.list()) == expected
            found, page = [], await store.list(limit=1)
            while page.next is not None:
                found += ids_of(page)
                page = await store.list(limit=1, after=page.next)
            assert found + ids_of(page) == expected

    @in_store
    async def test_pages_have_neither_repeats_nor_gaps(self, store: SessionStore) -> None:
        """`next` leads from page to page until it is None, with neither repeats nor gaps."""
        with ids.use(clock=FrozenClock(tick=1)):
            names = await create_many(store, 10)
        for limit in (1, 3, 5, 9, 10, 11):
            found, page = [], await store.list(limit=limit)
            while page.next is not None:
                assert len(page) == limit
                found += ids_of(page)
                page = await store.list(limit=limit, after=page.next)
            assert found + ids_of(page) == names[::-1]

    @in_store
    async def test_pages_stand_while_sessions_come_and_go(self, store: SessionStore) -> None:
        """Sessions created or erased between two pages neither shift nor repeat the others."""
        with ids.use(clock=FrozenClock(tick=1)):
            names = await create_many(store, 9)
            first = await store.list(limit=3)
            await create_many(store, 4, prefix="new")
            await store.delete(ids_of(first)[-1])
            second = await store.list(limit=3, after=first.next)
            await store.delete(ids_of(second)[-1])
            await store.delete(names[0])
            third = await store.list(limit=3, after=second.next)
        assert ids_of(first) + ids_of(second) + ids_of(third) == names[:0:-1]
        assert third.next is None

    @in_store
    async def test_filters_apply_to_every_page(self, store: SessionStore) -> None:
        """A page is filled with sessions that match, however many others are between them."""
        with ids.use(clock=FrozenClock(tick=1)):
            for number in range(12):
                await store.create(new_session(id=f"s{number:02}", owner="ann" if number % 3 else "ben"))
        page = await store.list(owner="ben", limit=3)
        rest = await store.list(owner="ben", limit=3, after=page.next)
        assert ids_of(page) + ids_of(rest) == ["s09", "s06", "s03", "s00"]
        assert rest.next is None

    @in_store
    async def test_each_filter_narrows(self, store: SessionStore) -> None:
        """Lists are narrowed by id, agent, status, owner, tag, parent and time. Several filters must all match."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            await _create_three(store, clock)
            start = clock.advance(0) - timedelta(seconds=300)
        cases: list[tuple[dict[str, Any], list[str]]] = [
            ({"id": "b"}, ["b"]),
            ({"id": "nobody"}, []),
            ({"agent": "sales"}, ["b"]),
            ({"status": "suspended"}, ["b"]),
            ({"status": SessionStatus.ACTIVE}, ["c", "a"]),
            ({"owner": "ann"}, ["b", "a"]),
            ({"tag": "vip"}, ["b", "a"]),
            ({"tag": "late"}, ["b"]),
            ({"parent": "a"}, ["c"]),
            ({"created_after": start + timedelta(seconds=100)}, ["c"]),
            ({"created_after": start + timedelta(seconds=99)}, ["c", "b"]),
            ({"created_before": start + timedelta(seconds=100)}, ["a"]),
            ({"updated_after": start + timedelta(seconds=200)}, ["b"]),
            ({"updated_before": start + timedelta(seconds=200)}, ["a"]),
            # Times are compared as moments, in whatever time zone they are given.
            ({"updated_before": (start + timedelta(seconds=201)).astimezone(timezone(timedelta(hours=5)))}, ["c", "a"]),
            ({"owner": "ann", "tag": "late", "status": "suspended", "agent": "sales"}, ["b"]),
            ({"owner": "ann", "status": "completed"}, []),
            ({"owner": None}, ["c"]),
            ({"owner": None, "agent": "support", "status": "active"}, ["c"]),
            ({"owner": None, "tag": "vip"}, []),
            ({"owner": None, "parent": "a"}, ["c"]),
            ({"owner": None, "id": "a"}, []),
            ({"tag": None, "after": None}, ["c", "b", "a"]),
        ]
        for filters, expected in cases:
            assert ids_of(await store.list(**filters)) == expected, filters
            by_update = [name for name in ("b", "c", "a") if name in expected]
            assert ids_of(await store.list(**filters, order="updated")) == by_update, filters

    @in_store
    async def test_top_level_leaves_out_sub_agents(self, store: SessionStore) -> None:
        """A sub-agent's session shows unless `top_level` is asked for; a fork of a session always does."""
        first = await store.create(new_session(id="first", owner="ann", tags=("vip",)))
        child = new_session(id="child", owner="ann", tags=("vip",), spawn_ref=SpawnRef("first", "run", "call", "ask"))
        child = await store.create(child)
        await store.create(fork(first, id="fork"))
        await store.save(say(child, "more"))
        orders: tuple[Order, ...] = ("created", "updated")
        for order in orders:
            assert {*ids_of(await store.list(order=order))} == {"first", "child", "fork"}
            assert ids_of(await store.list(order=order, top_level=True)) == ["fork", "first"]
            assert ids_of(await store.list(order=order, top_level=True, owner="ann", tag="vip")) == ["first"]
            assert ids_of(await store.list(order=order, top_level=True, parent="first")) == ["fork"]
            assert ids_of(await store.list(order=order, top_level=True, id="child")) == []
            assert ids_of(await store.list(order=order, top_level=False, owner="ann")) == ["child", "first"]

    @in_store
    async def test_filters_see_the_newest_version_only(self, store: SessionStore) -> None:
        """A session is found by its newest version only."""
        session = await store.create(new_session(tags=("old", "kept")))
        await store.save(session.with_tags(["kept", "new"]).with_definition(AgentDefinition("sales")).suspended())
        gone: list[dict[str, Any]] = [{"tag": "old"}, {"agent": "support"}, {"status": "active"}]
        there: list[dict[str, Any]] = [{"tag": "new"}, {"tag": "kept"}, {"agent": "sales"}, {"status": "suspended"}]
        assert [len(await store.list(**filters)) for filters in gone] == [0, 0, 0]
        assert [len(await store.list(**filters)) for filters in there] == [1, 1, 1, 1]

    @in_store
    async def test_lists_are_narrowed_by_indexed_metadata(self, store: SessionStore) -> None:
        """Lists are narrowed by declared metadata, with every other filter. 1, true and "1" are different values."""
        values: list[Any] = ["acme", "1", 1, True, 0, False, -(2**63), "", "ä\\\x00\x1f'%", "x" * 200]
        for number, value in enumerate(values):
            made = note(new_session(id=f"s{number}", owner="ann" if number % 2 else "ben"), "customer", value)
            await store.create(note(made, "plan", "pro").with_indexed(["customer", "plan"]))
        orders: tuple[Order, ...] = ("created", "updated")
        for order in orders:
            for number, value in enumerate(values):
                found = await store.list(metadata={"customer": value}, order=order, top_level=True, status="active")
                assert (ids_of(found), found.damaged) == ([f"s{number}"], ())
                both = {"customer": value, "plan": "pro"}
                assert ids_of(await store.list(metadata=both, order=order)) == [f"s{number}"]
                assert ids_of(await store.list(metadata={**both, "plan": "free"}, order=order)) == []
            mine = await store.list(metadata={"plan": "pro"}, owner="ann", order=order, limit=3)
            rest = await store.list(metadata={"plan": "pro"}, owner="ann", order=order, limit=3, after=mine.next)
            assert {*ids_of(mine), *ids_of(rest)} == {"s1", "s3", "s5", "s7", "s9"}
            assert len(mine) == 3
        assert ids_of(await store.list(metadata={})) == ids_of(await store.list())
        assert ids_of(await store.list(metadata={"other": "pro"})) == []
        wrong: list[Any] = [{"customer": 1.5}, {"customer": None}, {"customer": "x" * 201}, {"customer": 2**63}, "acme"]
        for each in wrong:
            with refused(InvalidData):
                await store.list(metadata=each)

    @in_store
    async def test_an_index_follows_the_metadata(self, store: SessionStore) -> None:
        """A new value replaces the indexed one in each save. Tags stay, and a tag is never taken for a value."""
        session = note(new_session(id="it", tags=("vip",)), "customer", "acme")
        session = await store.create(session.with_indexed(["customer", "plan"]))
        assert (session.info.indexed, session.info.tags) == ({"customer": "acme"}, ("vip",))
        session = await store.save(note(session, "customer", "other"))
        assert (await store.list(metadata={"customer": "acme"})).all() == ()
        assert (await store.list(metadata={"customer": "other"}, tag="vip")).all() == (session.info,)
        session = await store.save(note(session.with_tags(["odd"]), "customer", {"not": "indexed"}))
        assert session.info.indexed == {}
        assert ids_of(await store.list(metadata={"customer": "other"})) == []
        assert ids_of(await store.list(tag="odd")) == ["it"]
        session = await store.save(note(session, "customer", True).with_indexed(["customer"]))
        assert ids_of(await store.list(metadata={"customer": True})) == ["it"]
        assert ids_of(await store.list(metadata={"customer": 1})) == []
        await store.delete("it")
        assert ids_of(await store.list(metadata={"customer": True})) == []
        for tag in ("\x1fcustomer\x1ftrue", "\x1f"):
            with refused(InvalidData):
                session.with_tags([tag])

    @in_store
    async def test_deleted_sessions_show_only_when_asked_for(self, store: SessionStore) -> None:
        """The status `deleted` hides a session from every list that does not name it."""
        session = await store.create(new_session(id="hidden", owner="ann", tags=("vip",)))
        await store.create(new_session(id="seen"))
        await store.save(session.deleted())
        assert ids_of(await store.list()) == ["seen"]
        assert ids_of(await store.list(owner="ann")) == []
        assert ids_of(await store.list(tag="vip")) == []
        assert ids_of(await store.list(status="deleted")) == ["hidden"]
        assert ids_of(await store.list(id="hidden")) == ["hidden"]

    @in_store
    async def test_wrong_filters_are_refused(self, store: SessionStore) -> None:
        """An unknown filter, a wrong type or a limit out of bounds is an error, never ignored."""
        await create_many(store, 2)
        wrong: list[dict[str, Any]] = [
            {"colour": "red"},
            {"session_id": "a"},
            {"status": "asleep"},
            {"owner": 7},
            {"limit": 0},
            {"limit": -1},
            {"limit": 1001},
            {"limit": "ten"},
            {"limit": 2.5},
            {"order": "name"},
            {"top_level": 1},
            {"after": "not a page"},
            {"after": ""},
            {"after": 7},
            {"created_after": "yesterday"},
            {"created_after": datetime(2025, 1, 1)},  # without a time zone
        ]
        for filters in wrong:
            with refused(InvalidData):
                await store.list(**filters)

    @in_store
    async def test_filters_are_values_not_syntax(self, store: SessionStore) -> None:
        """Quotes, wildcards and empty texts match only themselves."""
        await store.create(new_session(id="plain", owner="ann"))
        for odd in ("", "%", "*", "an_", "ann' OR '1'='1", 'x" OR 1=1 --', "ANN", "ann ", "\x00", "null"):
            assert ids_of(await store.list(owner=odd)) == []
            await store.create(new_session(id=f"odd{len(odd)}.{ord(odd[:1] or '0')}", owner=odd, tags=("t" + odd,)))
            assert len(await store.list(owner=odd)) == 1
            assert len(await store.list(tag="t" + odd)) == 1


async def _paged(store: SessionStore, limit: int) -> list[str]:
    """Return the ids of all sessions in the order of their updates, read page by page."""
    found, page = [], await store.list(order="updated", limit=limit)
    while page.next is not None:
        assert len(page) == limit
        found += ids_of(page)
        page = await store.list(order="updated", limit=limit, after=page.next)
    return found + ids_of(page)


async def _create_three(store: SessionStore, clock: FrozenClock) -> None:
    """Create `a`, `b` and `c` at 0, 100 and 200 s, and suspend `b` at 300 s, where the clock stays."""
    first = await store.create(new_session(id="a", owner="ann", tags=("vip",)))
    clock.advance(100)
    sales = AgentDefinition("sales")
    second: AgentSession = await store.create(new_session(id="b", owner="ann", tags=("vip", "late"), definition=sales))
    clock.advance(100)
    await store.create(fork(first, id="c"))
    clock.advance(100)
    await store.save(second.suspended())
