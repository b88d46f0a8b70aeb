"""Messages by their ids, in stores that index them: when a message is indexed, and what older releases left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.test_postgres import schema, store_in
from tests.stores.test_search import index_of

from perdure import Message, SqliteStore
from perdure.stores.postgres import schema as migrating
from perdure.stores.sqlite import search
from perdure.stores.sqlite.sums import connect_with_sums
from perdure.testing.samples import new_session, say, tell

__all__ = ["schema"]


async def where(store: Any, message_id: str) -> list[tuple[str, int]]:
    return [(place.session_id, place.position) for place in await store.find_message(message_id)]


async def test_saves_know_nothing_of_the_index(tmp_path: Path) -> None:
    """The index is made when a message is first looked up, and brought up to date at the next lookup."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        session = await store.create(tell(new_session(id="it"), Message.user("a", id="a")))
        assert not index_of(path).exists()
        assert await where(store, "a") == [("it", 0)]
        size = index_of(path).stat().st_mtime_ns
        await store.save(tell(session, Message.user("b", id="b")))
        assert index_of(path).stat().st_mtime_ns == size
        assert await where(store, "b") == [("it", 1)]


async def test_an_index_of_the_last_release_gets_ids(tmp_path: Path) -> None:
    """An index with words and without ids gets ids; its words stay."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.create(tell(new_session(id="it"), *(Message.user(f"word{n}", id=f"m{n}") for n in range(50))))
        assert [hit.session_id for hit in await store.search("word7")] == ["it"]
    index = connect_with_sums(index_of(path), search.has_sums)
    index.execute("DROP TABLE named")
    index.execute("DELETE FROM note WHERE key IN ('named', 'named_erasures')")
    index.close()
    async with SqliteStore(path) as store:
        assert await store.index() == 0
        assert await where(store, "m7") == [("it", 7)]
        assert [hit.session_id for hit in await store.search("word7")] == ["it"]
        assert await store.check() == []


async def test_what_the_last_release_has_erased_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last release erases words and leaves ids in the index, and SQLite uses row numbers again."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        for name in ("one", "two"):
            await store.create(tell(new_session(id=name), *(Message.user("t", id=f"{name}-{n}") for n in range(9))))
        assert await where(store, "two-3") == [("two", 3)]
        monkeypatch.setattr(search, "_erase_names", lambda *_: None)
        await store.delete("two")
        await store.create(tell(new_session(id="three"), *(Message.user("t", id=f"three-{n}") for n in range(9))))
        assert await where(store, "three-3") == [("three", 3)]
        assert await where(store, "two-3") == []
        assert await where(store, "one-3") == [("one", 3)]


async def test_words_are_not_indexed_for_an_id(tmp_path: Path) -> None:
    """Looking up an id is quick in a store that was never searched, and a search does not wait for ids."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.create(tell(new_session(id="it"), *(Message.user(f"word{n}", id=f"m{n}") for n in range(9))))
        assert await where(store, "m7") == [("it", 7)]
        index = apsw.Connection(str(index_of(path)), flags=apsw.SQLITE_OPEN_READONLY)
        assert index.execute("SELECT (SELECT count(*) FROM place), (SELECT count(*) FROM named)").fetchall() == [(0, 9)]
        index.close()
        assert [hit.session_id for hit in await store.search("word7")] == ["it"]


@pytest.mark.parametrize("verb", ["delete", "redact"])
async def test_the_index_keeps_no_number_of_an_erased_message(tmp_path: Path, verb: str) -> None:
    """An erased message leaves the index, a redacted one keeps its id, and new rows are found."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        for name in ("one", "two"):
            await store.create(tell(new_session(id=name), *(Message.user(f"t{n}", id=f"{name}-{n}") for n in range(9))))
        assert await where(store, "two-3") == [("two", 3)]
        await (store.delete("two") if verb == "delete" else store.redact("two", ["two-3"]))
        index = apsw.Connection(str(index_of(path)), flags=apsw.SQLITE_OPEN_READONLY)
        rows = index.execute("SELECT count(*) FROM named").fetchall()
        index.close()
        assert rows == [(9 if verb == "delete" else 18,)]
        assert await where(store, "two-3") == ([] if verb == "delete" else [("two", 3)])
        await store.create(tell(new_session(id="three"), *(Message.user("t", id=f"three-{n}") for n in range(9))))
        assert await where(store, "three-3") == [("three", 3)]
        assert await where(store, "one-3") == [("one", 3)]
        assert await store.check() == []


async def test_a_wrong_number_in_the_index_leads_nowhere(tmp_path: Path) -> None:
    """Two ids may have the same 64 bits, so the store compares the id of the message that it finds."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.create(tell(new_session(id="it"), Message.user("a", id="a"), Message.user("b", id="b")))
        assert await where(store, "a") == [("it", 0)]
        index = apsw.Connection(str(index_of(path)))
        index.execute("INSERT OR IGNORE INTO named SELECT one.number, two.id FROM named AS one, named AS two")
        index.close()
        assert await where(store, "a") == [("it", 0)]
        assert await where(store, "b") == [("it", 1)]


async def test_what_an_older_release_has_indexed_is_found(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema without ids is brought up to date, and the first search indexes its words once more."""
    scripts = migrating.migrations()
    with monkeypatch.context() as patch:
        # The previous release did not write this column. It stays here until the schema is left.
        patch.setattr(migrating, "migrations", lambda: [*scripts[:8], "ALTER TABLE word ADD COLUMN named bigint"][:9])
        async with store_in(schema) as store:
            session = await store.create(new_session(*(f"word{n}" for n in range(250)), id="it"))
            assert [hit.session_id for hit in await store.search("word7")] == ["it"]
            await store._engine.opened.link.rows("ALTER TABLE word DROP COLUMN named")
            await store._engine.opened.link.rows("UPDATE perdure_schema SET number = 8")
    async with store_in(schema) as store:
        ids = [message.id for message in session.state.messages]
        for place in (0, 99, 100, 249):
            assert await where(store, ids[place]) == [("it", place)]
        assert [hit.session_id for hit in await store.search("word7")] == ["it"]
        later = await store.save(say(session, "more"))
        assert await where(store, later.state.messages[-1].id) == [("it", 250)]
        assert await store.check() == []
