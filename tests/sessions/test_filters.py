"""Lists filtered by metadata that was declared for it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

import perdure
from perdure import (
    ClearSession,
    FileStore,
    InvalidData,
    MemoryStore,
    PostgresStore,
    Sessions,
    SqliteStore,
    TagSession,
    WriteMetadata,
)
from perdure.archive import fsck
from perdure.testing import ScriptedDriver

STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda where: MemoryStore(),
    "file": lambda where: FileStore(where / "files"),
    "sqlite": lambda where: SqliteStore(where / "s.db"),
    "postgres": lambda where: PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return STORES[request.param](tmp_path)


def connect(store: Any, *filters: str) -> Sessions:
    return perdure.connect(store, driver=ScriptedDriver(lambda _: "Yes."), filters=filters)


async def found(app: Sessions, **metadata: Any) -> list[str]:
    page = await app.list(metadata=metadata)
    assert page.damaged == ()
    return sorted(each.id for each in page)


async def sound(app: Sessions) -> bool:
    return not (await fsck(app.store)).problems


async def test_a_declared_key_can_be_asked_for(store: Any) -> None:
    """It is found as soon as it is written, with other filters; a cleared session has its definition's values."""
    agent = perdure.AgentDefinition("clerk", metadata={"plan": "free"})
    async with connect(store, "customer", "plan") as app:
        chat = await app.open("one", agent)
        await app.open("two", agent)
        await app.execute("one", WriteMetadata("customer", "acme"))
        assert (await found(app, customer="acme"), await found(app, plan="free")) == (["one"], ["one", "two"])
        await chat.send("Hello")
        (listed,) = await app.list(metadata={"customer": "acme", "plan": "free"}, order="updated", top_level=True)
        assert (listed.title, listed.indexed, listed.tags) == ("Hello", {"plan": "free", "customer": "acme"}, ())
        await app.execute("one", ClearSession())
        assert (await found(app, customer="acme"), await found(app, plan="free")) == ([], ["one", "two"])
        assert await sound(app)


async def test_an_undeclared_key_is_refused(store: Any) -> None:
    """The error names the declared keys."""
    async with connect(store, "customer", "plan") as app:
        with pytest.raises(InvalidData, match=r"'colour'; declared are customer, plan"):
            await app.list(metadata={"colour": "red"})
        with pytest.raises(InvalidData, match=r"'colour'; declared are customer, plan"):
            await app.of("ann").headers(metadata={"colour": "red"})
        with pytest.raises(InvalidData, match="metadata"):
            await app.list(metadata="red")  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", ["customer", [7], [""], ["x" * 201], ["a\x1fb"], 7])
def test_wrong_keys_are_refused(filters: Any) -> None:
    """One text is not several keys."""
    with pytest.raises(InvalidData):
        perdure.connect("memory://", filters=filters)


async def test_forks_keep_their_place_in_the_index(store: Any) -> None:
    """A fork has its parent's metadata, and another owner's list does not show it."""
    async with connect(store, "customer") as app:
        mine = app.of("ann")
        await mine.open("one")
        await mine.execute("one", WriteMetadata("customer", "acme"))
        await mine.fork("one", "two")
        assert len(await mine.list(metadata={"customer": "acme"})) == 2
        assert len(await app.of("bob").list(metadata={"customer": "acme"})) == 0


async def test_another_connection_keeps_the_index(tmp_path: Path) -> None:
    """A connection without declarations keeps the index up to date; one with more adds to it at its next save."""
    async with connect(SqliteStore(tmp_path / "s.db"), "customer") as app:
        await app.open("one")
        await app.execute("one", WriteMetadata("customer", "acme"))
        await app.execute("one", WriteMetadata("plan", "pro"))
    async with connect(SqliteStore(tmp_path / "s.db")) as app:
        await app.execute("one", WriteMetadata("customer", "other"))
        assert await sound(app)
    async with connect(SqliteStore(tmp_path / "s.db"), "customer", "plan") as app:
        assert (await found(app, customer="other"), await found(app, customer="acme")) == (["one"], [])
        assert await found(app, plan="pro") == []
        await app.execute("one", TagSession())  # any save will do
        assert await found(app, plan="pro") == ["one"]
        assert await sound(app)


async def test_an_import_brings_its_index(store: Any) -> None:
    """Keys that were indexed in the first store are indexed in the second; the session's tags stay its tags."""
    file = io.BytesIO()
    async with connect("memory://", "customer") as app:
        await app.open("one", tags=("vip",))
        await app.execute("one", WriteMetadata("customer", "acme"))
        await app.export(file)
    assert b"\\u001f" not in file.getvalue()
    file.seek(0)
    async with connect(store, "customer") as app:
        await app.import_(file)
        assert await found(app, customer="acme") == ["one"]
        assert (await app.info("one")).tags == ("vip",)
        assert await sound(app)


async def test_what_is_redacted_leaves_the_index(store: Any) -> None:
    """A value that repeats a message is replaced with it, and erasing the session erases its rows."""
    async with connect(store, "customer") as app:
        chat = await app.open("one")
        await chat.send("secretword")
        await app.execute("one", WriteMetadata("customer", "secretword"))
        await app.execute("one", WriteMetadata("other", "kept"))
        assert await found(app, customer="secretword") == ["one"]
        (first, *_) = await chat.history()
        await chat.redact([first.id])
        assert await found(app, customer="secretword") == []
        session = await app.session("one")
        assert "secretword" not in f"{session.info.indexed} {session.state.metadata}"
        assert session.info.indexed == {"customer": session.state.metadata["customer"]}
        assert await found(app, customer=session.state.metadata["customer"]) == ["one"]
        assert await sound(app)
        await app.erase("one")
        assert await found(app, customer=session.state.metadata["customer"]) == []


async def test_what_cannot_be_indexed_is_kept_and_not_found(store: Any) -> None:
    """No value in metadata makes a save fail."""
    async with connect(store, "customer") as app:
        await app.open("one")
        for value in (["a"], {"a": 1}, 1.5, None, "x" * 10_000, 2**63):
            await app.execute("one", WriteMetadata("customer", value))
            assert (await app.info("one")).indexed == {}
        assert await sound(app)
