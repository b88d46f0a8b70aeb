"""What other libraries have stored arrives as their adapters lay it out, once, and goes on there."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.items import ITEMS

from perdure import MemoryStore, Message, SessionConflict, connect
from perdure.adapters.importing import ImportReport, import_from
from perdure.errors import InvalidData, StoreError


async def taken_in(url: str, framework: str, source: Path, owner: str | None = None) -> ImportReport:
    async with connect(url) as sessions:
        return await import_from(sessions.store, framework, source, owner=owner)  # type: ignore[arg-type]


def counts(report: ImportReport) -> tuple[int, int, int, int]:
    return report.sessions, report.messages, report.skipped, len(report.refused)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/perdure.db"


def unchanged(path: Path) -> Callable[[], None]:
    """Return a check that a source is byte for byte what it is now, with nothing new beside it."""

    def everything() -> dict[Path, bytes]:
        files = [path, *path.parent.glob(f"{path.name}-*")] if path.is_file() else [*path.rglob("*")]
        return {each: each.read_bytes() for each in files if each.is_file()}

    before = everything()

    def check() -> None:
        assert everything() == before

    return check


class TestOpenAI:
    """`SQLiteSession` and `AdvancedSQLiteSession`."""

    async def written(self, path: Path, name: str, items: list[Any]) -> None:
        memory = pytest.importorskip("agents.memory")
        session = memory.SQLiteSession(name, path)
        await session.add_items(items)
        session.close()

    async def read(self, url: str, name: str, owner: str | None = None) -> Any:
        adapter = pytest.importorskip("perdure.adapters.openai_agents")
        return adapter.PerdureSession(name, store=url, owner=owner)

    async def test_sessions_arrive_and_go_on(self, tmp_path: Path, url: str) -> None:
        """The adapter reads the very items, and what it adds is not disturbed by another import."""
        path = tmp_path / "theirs.db"
        for name in ("chat-1", "Grüße / 2"):
            await self.written(path, name, ITEMS["openai"])
        check = unchanged(path)
        assert counts(await taken_in(url, "openai-agents", path)) == (2, 2 * len(ITEMS["openai"]), 0, 0)
        check()
        for name in ("chat-1", "Grüße / 2"):
            session = await self.read(url, name)
            assert await session.get_items() == ITEMS["openai"]
            await session.add_items([{"role": "user", "content": "And?"}])
        assert counts(await taken_in(url, "openai-agents", path)) == (0, 0, 2, 0)
        assert len(await (await self.read(url, "chat-1")).get_items()) == len(ITEMS["openai"]) + 1

    async def test_a_session_that_has_grown(self, tmp_path: Path, url: str) -> None:
        """Only what is new is added. What was changed on both sides is left alone, and said."""
        path = tmp_path / "theirs.db"
        await self.written(path, "a", ITEMS["openai"])
        await taken_in(url, "openai-agents", path)
        await self.written(path, "a", [{"role": "user", "content": "more"}])
        await self.written(path, "b", [{"role": "user", "content": "new"}])
        assert counts(await taken_in(url, "openai-agents", path)) == (2, 2, 0, 0)
        session = await self.read(url, "a")
        assert await session.get_items() == [*ITEMS["openai"], {"role": "user", "content": "more"}]
        await session.add_items([{"role": "user", "content": "here"}])
        await self.written(path, "a", [{"role": "user", "content": "there"}])
        report = await taken_in(url, "openai-agents", path)
        assert counts(report) == (0, 0, 1, 1)
        assert "perdure erase a --yes" in report.refused[0].reason
        assert (await session.get_items())[-1] == {"role": "user", "content": "here"}

    async def test_a_source_that_was_rewritten(self, tmp_path: Path, url: str) -> None:
        """What has arrived stays, and is not mixed with what is there now."""
        memory = pytest.importorskip("agents.memory")
        path = tmp_path / "theirs.db"
        await self.written(path, "a", ITEMS["openai"])
        await taken_in(url, "openai-agents", path)
        session = memory.SQLiteSession("a", path)
        await session.pop_item()
        await session.add_items([{"role": "user", "content": "other"}])
        session.close()
        assert counts(await taken_in(url, "openai-agents", path)) == (0, 0, 0, 1)
        assert await (await self.read(url, "a")).get_items() == ITEMS["openai"]

    async def test_another_session_of_the_same_id(self, tmp_path: Path, url: str) -> None:
        """It is not touched."""
        path = tmp_path / "theirs.db"
        await self.written(path, "a", ITEMS["openai"])
        async with connect(url, model="offline") as sessions:
            await (await sessions.open("a")).send("Hi")
        assert counts(await taken_in(url, "openai-agents", path)) == (0, 0, 0, 1)

    async def test_an_owner(self, tmp_path: Path, url: str) -> None:
        """All that arrives is the owner's."""
        path = tmp_path / "theirs.db"
        await self.written(path, "a", ITEMS["openai"])
        await taken_in(url, "openai-agents", path, owner="ada")
        assert await (await self.read(url, "a", owner="ada")).get_items() == ITEMS["openai"]
        assert await (await self.read(url, "a")).get_items() == []

    async def test_branches(self, tmp_path: Path, url: str) -> None:
        """Each branch of an `AdvancedSQLiteSession` is a session of its own."""
        advanced = pytest.importorskip("agents.extensions.memory.advanced_sqlite_session")
        path = tmp_path / "theirs.db"
        session = advanced.AdvancedSQLiteSession(session_id="a", db_path=path, create_tables=True)
        said = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"))]
        await session.add_items(said)
        await session.add_items([{"role": "user", "content": "3"}])
        await session.create_branch_from_turn(2, "other")
        await session.add_items([{"role": "user", "content": "4"}])
        session.close()
        assert (await taken_in(url, "openai-agents", path)).sessions == 2
        main = await (await self.read(url, "a")).get_items()
        assert [item["content"] for item in main] == ["1", "2", "3"]
        async with connect(url) as sessions:
            other = next(info for info in await sessions.list() if info.name == "a branch other")
            session = await sessions.store.load(other.id)
            assert session is not None
            assert [message.text for message in session.state.messages] == ["1", "2", "4"]

    async def test_a_file_that_is_in_use(self, tmp_path: Path, url: str) -> None:
        """What stands in the log beside it is read too, by a process that does not share its locks."""
        memory = pytest.importorskip("agents.memory")
        path = tmp_path / "theirs.db"
        pid = os.fork()
        if not pid:  # another process has it open: two SQLite libraries in one would drop each other's locks
            import asyncio
            import time

            session = memory.SQLiteSession("a", path)
            asyncio.run(session.add_items(ITEMS["openai"]))
            (tmp_path / "ready").touch()
            time.sleep(60)
            os._exit(0)
        try:
            while not (tmp_path / "ready").exists():
                pass
            assert (tmp_path / "theirs.db-wal").stat().st_size
            assert (await taken_in(url, "openai-agents", path)).messages == len(ITEMS["openai"])
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)

    @pytest.mark.parametrize(
        ("table", "column", "value"),
        [
            ("agent_messages", "message_data", "{cut"),
            ("agent_messages", "message_data", "[" * 100_000),
            ("agent_messages", "session_id", b"\xff\xfe"),
            ("agent_sessions", "session_id", b"blob"),
        ],
    )
    async def test_hostile_rows(self, tmp_path: Path, url: str, table: str, column: str, value: Any) -> None:
        """The error names the row and says what to do. What came before it has arrived, and the rest does later."""
        path = tmp_path / "theirs.db"
        for name in "abc":
            await self.written(path, name, ITEMS["openai"])
        with sqlite3.connect(path) as db:
            (number, before) = db.execute(f"SELECT rowid, {column} FROM {table} WHERE session_id = 'b'").fetchone()  # noqa: S608
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, number))  # noqa: S608
        db.close()
        with pytest.raises(InvalidData, match=rf"{table}\[{number}\]\.{column}"):
            await taken_in(url, "openai-agents", path)
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (before, number))  # noqa: S608
        db.close()
        await taken_in(url, "openai-agents", path)
        for name in "abc":
            assert await (await self.read(url, name)).get_items() == ITEMS["openai"]


async def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    """A file that is not there, that is not a database, or is another library's, changes nothing."""
    (tmp_path / "text").write_text("not a database " * 1_000)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE agent_messages (x)")
    db.close()
    async with MemoryStore() as store:
        for framework in ("openai-agents", "langgraph", "adk", "agno"):
            for name in ("text", "empty", "folder", "other.db", "nowhere"):
                with pytest.raises((InvalidData, StoreError)):
                    await import_from(store, framework, tmp_path / name)
        for framework in ("claude", "strands"):
            for name in ("folder", "nowhere"):
                with pytest.raises((InvalidData, StoreError)):
                    await import_from(store, framework, tmp_path / name)
        with pytest.raises(InvalidData, match="claude"):
            await import_from(store, "crewai", tmp_path / "folder")
        assert not await store.list()
