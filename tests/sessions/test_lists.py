"""`sessions.list` is enough for the sidebar of a chat app."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import perdure
from perdure import AgentDefinition, MemoryStore, SqliteStore
from perdure.model.session import ListedSession
from perdure.testing import ScriptedDriver
from perdure.testing.faults import FailingStore


def connect(store: Any = "memory://", **options: Any) -> perdure.Sessions:
    return perdure.connect(store, driver=ScriptedDriver(lambda _: "It was sent."), **options)


async def test_a_page_has_titles_last_words_and_counts() -> None:
    """A page has the name or the first words, the last words, and the number of messages."""
    async with connect() as app:
        mine = app.of("ann")
        chat = await mine.open("order-7", agent=AgentDefinition("clerk"))
        await chat.send("Where is my order?")
        await (await app.of("bob").open("secret")).send("Not Ann's")
        (listed,) = page = await mine.list(order="updated", top_level=True, limit=30)
        assert (page.next, page.damaged) == (None, ())
        assert isinstance(listed, ListedSession)
        assert (listed.title, listed.last_words, listed.message_count) == ("Where is my order?", "It was sent.", 2)
        assert listed.message_count == await chat.length()
        header = await mine.info("order-7")
        assert {name: getattr(listed, name) for name in header.__struct_fields__} == {
            name: getattr(header, name) for name in header.__struct_fields__
        }
        await chat.rename("Order 7")
        assert [each.title for each in await mine.list()] == ["Order 7"]
        await chat.rename(None)
        assert [each.title for each in await mine.list()] == ["Where is my order?"]


async def test_a_fork_has_its_parents_title_until_it_is_renamed() -> None:
    """It keeps the title when it is trimmed, reset and cleared."""
    async with connect() as app:
        chat = await app.open("one")
        await chat.send("Plan a trip")
        branch = await app.fork("one", "two")
        await branch.send("To Rome")
        for action in (perdure.TrimTranscript(1), perdure.ResetTranscript(), perdure.ClearSession()):
            await app.execute("two", action)
            assert {each.id: each.title for each in await app.list()} == {"one": "Plan a trip", "two": "Plan a trip"}


async def test_headers_read_no_message(tmp_path: Path) -> None:
    """`headers` gives the same page without previews."""
    async with connect(SqliteStore(tmp_path / "s.db")) as app:
        await (await app.open("one")).send("Hello")
        page = await app.headers()
        assert not isinstance(page[0], ListedSession)
        assert [info.id for info in page] == ["one"]


async def test_a_store_that_previews_nothing_lists_names() -> None:
    """The title is the name, and everything that would have to be read is None."""

    class Plain:
        def __init__(self) -> None:
            inner = MemoryStore()
            for name in ("create", "save", "load", "exists", "delete", "list"):
                setattr(self, name, getattr(inner, name))
            self.open, self.close = inner.__aenter__, inner.__aexit__

        async def __aenter__(self) -> Plain:
            await self.open()
            return self

        async def __aexit__(self, *error: object) -> None:
            await self.close(*error)

    async with connect(Plain()) as app:
        chat = await app.open("one")
        await chat.send("Hello")
        (listed,) = await app.list()
        assert (listed.title, listed.last_words, listed.message_count) == (None, None, None)
        await chat.rename("Named")
        assert [each.title for each in await app.list()] == ["Named"]


async def test_a_damaged_message_is_named_and_the_rest_is_listed(tmp_path: Path) -> None:
    """A session is listed with everything that can be read of it."""
    path = tmp_path / "s.db"
    async with connect(SqliteStore(path)) as app:
        for name in ("first", "last", "sound"):
            await (await app.open(name)).send(f"Hello {name}")
    db = sqlite3.connect(path)
    for name, pos in (("first", 0), ("last", 1)):
        db.execute(
            "UPDATE msg SET crc = crc + 1 WHERE pos = ? AND log = (SELECT log FROM session WHERE id = ?)", (pos, name)
        )
    db.commit()
    db.close()
    async with connect(SqliteStore(path)) as app:
        page = await app.list()
        found = {each.id: (each.title, each.last_words, each.message_count) for each in page}
        assert found == {
            "first": (None, "It was sent.", 2),
            "last": ("Hello last", None, 2),
            "sound": ("Hello sound", "It was sent.", 2),
        }
        assert {each.session_id for each in page.damaged} == {"first", "last"}  # type: ignore[union-attr]


async def test_a_wrapped_store_previews_as_its_own(tmp_path: Path) -> None:
    """A store that wraps another one and forwards unknown verbs has previews too."""
    async with connect(FailingStore(SqliteStore(tmp_path / "s.db"))) as app:
        await (await app.open("one")).send("Hello")
        assert [each.title for each in await app.list()] == ["Hello"]
