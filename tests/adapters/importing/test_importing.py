"""Sessions of other libraries are imported once, as their adapters store them, and can be continued."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import pytest
from tests.adapters.items import ITEMS

from perdure import MemoryStore, connect
from perdure.adapters.importing import ImportReport, import_from, langgraph, strands
from perdure.adapters.importing.arriving import Target
from perdure.errors import InvalidData, StoreError
from perdure.model.ids import SessionId


async def taken_in(url: str, framework: str, source: Path, owner: str | None = None) -> ImportReport:
    async with connect(url) as sessions:
        return await import_from(sessions.store, framework, source, owner=owner)  # type: ignore[arg-type]


def counts(report: ImportReport) -> tuple[int, int, int, int]:
    return report.sessions, report.messages, report.skipped, len(report.refused)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/perdure.db"


def unchanged(path: Path) -> Callable[[], None]:
    """Return a check that a source is unchanged byte for byte, with no new file beside it."""

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
        """The adapter reads the very items; a second import does not disturb an item that it added."""
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
        """Only new messages are added. A session that changed on both sides is left alone and reported."""
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
        """The imported items stay, and are not mixed with the rewritten ones."""
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
        """All imported sessions are the owner's."""
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

    def test_a_file_that_is_in_use(self, tmp_path: Path, url: str) -> None:
        """Items in the write-ahead log are read too, by a process that does not share its locks."""
        memory = pytest.importorskip("agents.memory")
        path = tmp_path / "theirs.db"
        pid = os.fork()
        if not pid:  # another process has it open: two SQLite libraries in one would drop each other's locks
            session = memory.SQLiteSession("a", path)
            asyncio.run(session.add_items(ITEMS["openai"]))
            (tmp_path / "ready").touch()
            time.sleep(60)
            os._exit(0)
        try:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            assert (tmp_path / "theirs.db-wal").stat().st_size
            assert asyncio.run(taken_in(url, "openai-agents", path)).messages == len(ITEMS["openai"])
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
        """The error names the row and says what to do. Rows before it have arrived, and the rest does later."""
        path = tmp_path / "theirs.db"
        for name in "abc":
            await self.written(path, name, ITEMS["openai"])
        with sqlite3.connect(path) as db:
            (number, before) = db.execute(f"SELECT rowid, {column} FROM {table} WHERE session_id = 'b'").fetchone()
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, number))
        db.close()
        with pytest.raises(InvalidData, match=rf"{table}\[{number}\]\.{column}"):
            await taken_in(url, "openai-agents", path)
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (before, number))
        db.close()
        await taken_in(url, "openai-agents", path)
        for name in "abc":
            assert await (await self.read(url, name)).get_items() == ITEMS["openai"]


class TestClaude:
    """Transcripts as Claude Code writes them."""

    def written(self, root: Path) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [
            {"type": "summary", "summary": "About cats", "leafUuid": "u-2"},
            *(dict(item) for item in ITEMS["claude"] if item["type"] in ("user", "assistant")),
        ]
        project = root / "-home-ada-work"
        (project / "s-1" / "subagents").mkdir(parents=True)
        _write_lines(project / "s-1.jsonl", entries)
        _write_lines(project / "s-1" / "subagents" / "agent-7.jsonl", entries[1:2])
        (project / "s-1" / "subagents" / "agent-7.meta.json").write_text('{"agentType": "Explore"}')
        return entries

    async def test_transcripts_arrive_and_go_on(self, tmp_path: Path, url: str) -> None:
        """The SDK's store reads the very entries and lists the session, with the sub-agents below it."""
        adapter = pytest.importorskip("perdure.adapters.claude_agent_sdk")
        root = tmp_path / "projects"
        entries = self.written(root)
        check = unchanged(root)
        assert counts(await taken_in(url, "claude", root)) == (2, len(entries) + 2, 0, 0)
        check()
        assert counts(await taken_in(url, "claude", root / "-home-ada-work")) == (0, 0, 2, 0)
        assert counts(await taken_in(url, "claude", root / "-home-ada-work" / "s-1.jsonl")) == (0, 0, 2, 0)
        store = adapter.PerdureSessionStore(store=url)
        key = {"project_key": "-home-ada-work", "session_id": "s-1"}
        assert await store.load(key) == entries
        assert await store.list_subkeys(key) == ["subagents/agent-7"]
        child = await store.load({**key, "subpath": "subagents/agent-7"})
        assert child == [entries[1], {"agentType": "Explore", "type": "agent_metadata"}]
        await store.append(key, [{**entries[-1], "uuid": "new"}])
        assert len(await store.load(key) or []) == len(entries) + 1

    async def test_what_the_adapter_keeps_is_left_alone(self, tmp_path: Path, url: str) -> None:
        """The reason says which adapter keeps the session, and what to do."""
        adapter = pytest.importorskip("perdure.adapters.claude_agent_sdk")
        entries = self.written(tmp_path)
        key = {"project_key": "-home-ada-work", "session_id": "s-1"}
        await adapter.PerdureSessionStore(store=url).append(key, entries[:1])
        report = await taken_in(url, "claude", tmp_path / "-home-ada-work" / "s-1.jsonl")
        (refused,) = report.refused
        assert "the adapter for claude-agent-sdk keeps it in this store already" in refused.reason
        assert f"perdure erase {refused.session_id} --yes" in refused.reason

    async def test_a_summary_follows_what_is_shown(self, tmp_path: Path, url: str) -> None:
        """A redacted prompt is in neither list nor store, though only a part of it was in the summary."""
        adapter = pytest.importorskip("perdure.adapters.claude_agent_sdk")
        said = {"role": "user", "content": "4111 1111 " * 100}
        _write_lines(tmp_path / "p.jsonl", [{"type": "user", "uuid": "u-1", "message": said}])
        await taken_in(url, "claude", tmp_path / "p.jsonl")
        store = adapter.PerdureSessionStore(store=url)
        (before,) = await store.list_session_summaries(tmp_path.name)
        assert before["data"]["first_prompt"].startswith("4111")
        chat = store.chat("p", project_key=tmp_path.name)
        await chat.redact(["u-1"])
        (after,) = await store.list_session_summaries(tmp_path.name)
        assert after["data"]["first_prompt"] == "[redacted]"
        assert "4111" not in repr((await chat.session(1)).state.metadata)

    async def test_the_summary_is_the_sdks(self, tmp_path: Path, url: str) -> None:
        """Lists show the same summary for an imported transcript as for one that the SDK has mirrored."""
        sdk = pytest.importorskip("claude_agent_sdk")
        adapter = pytest.importorskip("perdure.adapters.claude_agent_sdk")
        odd: list[dict[str, Any]] = [
            {"type": "tag", "tag": "x"},
            {"type": "user", "isMeta": True, "message": {"content": "meta"}, "timestamp": "2026-01-01T00:00:00Z"},
            {"type": "user", "message": {"content": "<command-name>/clear</command-name>"}, "cwd": "/home"},
            {"type": "user", "message": {"content": [{"type": "tool_result"}, {"type": "text", "text": "no"}]}},
            {"type": "user", "message": {"content": [{"type": "text", "text": "long " * 100}]}, "gitBranch": "main"},
            {"type": "tag", "tag": ""},
            {"type": "ai-title", "aiTitle": "T", "customTitle": 7},
        ]
        (tmp_path / "p").mkdir()
        entries = self.written(tmp_path / "all")
        for name, each in (("odd", odd), ("s", entries), ("first", odd[:3])):
            _write_lines(tmp_path / "p" / f"{name}.jsonl", each)
        await taken_in(url, "claude", tmp_path / "p")
        listed = await adapter.PerdureSessionStore(store=url).list_session_summaries("p")
        found = {each["session_id"]: each["data"] for each in listed}
        for name, each in (("odd", odd), ("s", entries), ("first", odd[:3])):
            key = {"project_key": "p", "session_id": name}
            assert found[name] == sdk.fold_session_summary(None, key, each)["data"]

    async def test_a_transcript_that_is_being_written(self, tmp_path: Path, url: str) -> None:
        """An incomplete last line waits for the next import; a bad one before it is named."""
        path = tmp_path / "p" / "s.jsonl"
        path.parent.mkdir()
        path.write_text('{"type":"user","uuid":"1"}\n{"type":"user","uu')
        assert counts(await taken_in(url, "claude", path)) == (1, 1, 0, 0)
        path.write_text('{"type":"user","uuid":"1"}\n{"type":"user","uuid":"2"}\n')
        assert counts(await taken_in(url, "claude", path)) == (1, 1, 0, 0)
        path.write_text('{"type":"user","uuid":"1"}\n{"type":"us\n{"type":"user","uuid":"2"}\n')
        with pytest.raises(InvalidData, match=r"s\.jsonl:2"):
            await taken_in(url, "claude", path)


def _write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


class TestStrands:
    """Directories of a `FileSessionManager`."""

    def test_sessions_arrive_and_go_on(self, tmp_path: Path, url: str) -> None:
        """The adapter's repository reads the same as Strands' own, and an agent can continue."""
        pytest.importorskip("strands")
        adapter = pytest.importorskip("perdure.adapters.strands")
        from strands.session.file_session_manager import FileSessionManager
        from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

        theirs = FileSessionManager("s-1", storage_dir=str(tmp_path / "theirs"))
        agent = SessionAgent(agent_id="helper", state={"x": [1, None]}, conversation_manager_state={})
        theirs.create_agent("s-1", agent)
        for number in range(12):  # so that the tenth comes after the ninth, and not after the first
            said = {"role": "user" if number % 2 else "assistant", "content": [{"text": f"{number}"}]}
            theirs.create_message("s-1", "helper", SessionMessage.from_message(said, number))
        image = {"image": {"format": "png", "source": {"bytes": b"\xff\x00"}}}
        theirs.create_message("s-1", "helper", SessionMessage.from_message({"role": "user", "content": [image]}, 12))
        theirs.create_session(Session("s-2", SessionType.AGENT))
        check = unchanged(tmp_path / "theirs")
        assert counts(asyncio.run(taken_in(url, "strands", tmp_path / "theirs"))) == (2, 13, 0, 0)
        check()
        ours = adapter.PerdureSessionRepository(store=url)
        assert ours.read_session("s-1") == theirs.read_session("s-1")
        assert ours.read_agent("s-1", "helper") == theirs.read_agent("s-1", "helper")
        assert ours.list_messages("s-1", "helper") == theirs.list_messages("s-1", "helper")
        ours.create_message("s-1", "helper", SessionMessage.from_message({"role": "user", "content": []}, 13))
        assert counts(asyncio.run(taken_in(url, "strands", tmp_path / "theirs"))) == (0, 0, 2, 0)
        agent.state = {"x": 2}
        theirs.update_agent("s-1", agent)
        report = asyncio.run(taken_in(url, "strands", tmp_path / "theirs" / "session_s-1"))
        assert counts(report) == (0, 0, 0, 1)

    def test_the_first_agent_is_the_session(self, tmp_path: Path, url: str) -> None:
        """Further agents are children, as in the adapter. A session that got its agent later grows."""
        pytest.importorskip("strands")
        adapter = pytest.importorskip("perdure.adapters.strands")
        source = tmp_path / "theirs"
        theirs = self.furnished(source, "user@x / 7")
        assert counts(asyncio.run(taken_in(url, "strands", source))) == (1, 0, 0, 0)
        for name in ("writer", "critic"):
            self.with_agent(theirs, "user@x / 7", name)
        assert counts(asyncio.run(taken_in(url, "strands", source))) == (2, 2, 0, 0)
        ours = adapter.PerdureSessionRepository(store=url)
        for name in ("writer", "critic"):
            assert ours.list_messages("user@x / 7", name) == theirs.list_messages("user@x / 7", name)
        session = ours.chat("user@x / 7", "writer").session()
        assert (session.id, session.info.name) == (SessionId.of("user@x / 7"), "user@x / 7")
        assert ours.chat("user@x / 7", "critic").session().info.parent_id == session.id

    def test_what_had_arrived_in_the_first_layout_goes_on_there(self, tmp_path: Path, url: str) -> None:
        """Its agents stay children, and new messages are added to them."""
        pytest.importorskip("strands")
        adapter = pytest.importorskip("perdure.adapters.strands")
        source = tmp_path / "theirs"
        theirs = self.with_agent(self.furnished(source, "s-1"), "s-1", "default")
        (read,) = strands.pieces(source)
        (first,) = read()

        async def as_before() -> None:
            async with connect(url) as sessions:
                target = Target(sessions.store, "strands")
                for arrival in (first.session, first.agent):
                    assert counts(await arrival.arrive(target))[0] == 1

        asyncio.run(as_before())
        assert counts(asyncio.run(taken_in(url, "strands", source))) == (0, 0, 2, 0)
        self.said(theirs, "s-1", "default", 1)
        assert counts(asyncio.run(taken_in(url, "strands", source))) == (1, 1, 1, 0)
        ours = adapter.PerdureSessionRepository(store=url)
        assert ours.list_messages("s-1", "default") == theirs.list_messages("s-1", "default")
        assert ours.chat("s-1").session().info.name == "default"

    def furnished(self, source: Path, session_id: str) -> Any:
        """Return a store of Strands' own with a session whose id may be any text."""
        from strands.session.file_session_manager import FileSessionManager
        from strands.types.session import Session, SessionType

        theirs = FileSessionManager("beside", storage_dir=str(source.with_name("beside")))
        theirs.storage_dir = str(source)
        theirs._get_session_path = lambda *_: str(source / "session_x")  # type: ignore[method-assign]
        theirs.create_session(Session(session_id, SessionType.AGENT))
        return theirs

    def with_agent(self, theirs: Any, session_id: str, agent_id: str) -> Any:
        from strands.types.session import SessionAgent

        theirs.create_agent(session_id, SessionAgent(agent_id=agent_id, state={}, conversation_manager_state={}))
        self.said(theirs, session_id, agent_id, 0)
        return theirs

    def said(self, theirs: Any, session_id: str, agent_id: str, number: int) -> None:
        from strands.types.session import SessionMessage

        message: Any = {"role": "user", "content": [{"text": f"{agent_id} {number}"}]}
        theirs.create_message(session_id, agent_id, SessionMessage.from_message(message, number))


class TestADK:
    """`SqliteSessionService` and `DatabaseSessionService`."""

    def services(self, path: Path) -> dict[str, Callable[[], Any]]:
        sqlite_service = pytest.importorskip("google.adk.sessions.sqlite_session_service")
        sessions = pytest.importorskip("google.adk.sessions")
        return {
            "sqlite": lambda: sqlite_service.SqliteSessionService(str(path)),
            "database": lambda: sessions.DatabaseSessionService(f"sqlite+aiosqlite:///{path}"),
        }

    @pytest.mark.parametrize("kind", ["sqlite", "database"])
    async def test_sessions_arrive_and_go_on(self, kind: str, tmp_path: Path, url: str) -> None:
        """The adapter's service returns the same sessions: events, state of session, user and app, and times."""
        adapter = pytest.importorskip("perdure.adapters.google_adk")
        path = tmp_path / "theirs.db"
        if kind == "database":
            pytest.importorskip("greenlet")
        service = self.services(path)[kind]()
        for user in ("ada", "bob"):
            state = {"app:limit": 3, "user:name": user, "own": {"a": [1]}}
            session = await service.create_session(app_name="shop", user_id=user, session_id="s-1", state=state)
            await self.said(service, session, range(5))
        theirs = [await service.get_session(app_name="shop", user_id=user, session_id="s-1") for user in ("ada", "bob")]
        await self.closed(service)
        check = unchanged(path)
        report = await taken_in(url, "adk", path)
        check()
        assert (report.messages, report.refused) == (10, ())
        ours = adapter.PerdureSessionService(store=url)
        for each in theirs:
            found = await ours.get_session(app_name="shop", user_id=each.user_id, session_id="s-1")
            assert found is not None
            assert [event.model_dump() for event in found.events] == [event.model_dump() for event in each.events]
            assert (found.state, found.last_update_time) == (each.state, pytest.approx(each.last_update_time, abs=1e-3))
            await self.said(ours, found, range(5, 6))
        assert len((await ours.list_sessions(app_name="shop")).sessions) == 2
        assert (await taken_in(url, "adk", path)).sessions == 0

    async def said(self, service: Any, session: Any, numbers: range) -> None:
        from google.adk.events import Event, EventActions
        from google.genai import types

        for number in numbers:
            content = types.Content(role="user", parts=[types.Part(text=f"{number}")])
            actions = EventActions(state_delta={"count": number})
            event = Event(author="user", invocation_id="i", content=content, actions=actions)
            await service.append_event(session, event)

    async def closed(self, service: Any) -> None:
        if hasattr(service, "db_engine"):
            await service.db_engine.dispose()

    async def test_an_owner_has_all(self, tmp_path: Path, url: str) -> None:
        """Sessions of several users do not clash under one owner."""
        adapter = pytest.importorskip("perdure.adapters.google_adk")
        path = tmp_path / "theirs.db"
        service = self.services(path)["sqlite"]()
        for user in ("ada", "bob"):
            session = await service.create_session(app_name="shop", user_id=user, session_id="s-1")
            await self.said(service, session, range(1))
        await taken_in(url, "adk", path, owner="ada")
        ours = adapter.PerdureSessionService(store=url, owner="ada")
        for user in ("ada", "bob"):
            found = await ours.get_session(app_name="shop", user_id=user, session_id="s-1")
            assert found is not None
            assert len(found.events) == 1

    async def test_pickles_are_left_alone(self, tmp_path: Path, url: str) -> None:
        """The older schema's actions could run code when unpickled, so they are not read."""
        path = tmp_path / "old.db"
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE sessions (app_name, user_id, id, state, create_time, update_time)")
            db.execute(
                "CREATE TABLE events (id, app_name, user_id, session_id, invocation_id, author, actions, timestamp, "
                "content, partial, turn_complete)"
            )
            at = "2026-01-02 03:04:05.000000"
            db.execute("INSERT INTO sessions VALUES ('shop', 'ada', 's', '{\"x\": 1}', ?, ?)", (at, at))
            content = '{"role": "user", "parts": [{"text": "Hi"}]}'
            evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
            values = ("e", "shop", "ada", "s", "i", "user", evil, at, content, 0, None)
            db.execute(f"INSERT INTO events VALUES ({', '.join('?' * len(values))})", values)
        db.close()
        assert counts(await taken_in(url, "adk", path)) == (1, 1, 0, 0)
        assert not (tmp_path / "ran").exists()
        async with connect(url) as sessions:
            (info,) = await sessions.list()
            assert (info.owner, info.last_words, info.created_at.year) == ("ada", "Hi", 2026)


class TestLangGraph:
    """`SqliteSaver`, with all its checkpoints."""

    def graph(self, saver: Any) -> Any:
        """Return a graph that answers, forgets and asks a person; its counting subgraph has checkpoints of its own."""
        from langchain_core.messages import AIMessage, RemoveMessage
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.types import interrupt

        class Counted(TypedDict):
            count: int
            found: Any

        class State(MessagesState):
            count: int
            found: Any

        def count(state: Any) -> Any:
            return {"count": state.get("count", 0) + 1, "found": {"at": (1, 2), "raw": b"\xff", 7: None, "$x": 1.5}}

        def answer(state: Any) -> Any:
            if state["messages"][-1].content == "ask":
                return {"messages": [AIMessage(f"told {interrupt('what?')}")]}
            if state["messages"][-1].content == "forget":
                return {"messages": [RemoveMessage(id=state["messages"][1].id), AIMessage("forgotten")]}
            return {"messages": [AIMessage(f"answer {len(state['messages'])}", id=f"a{len(state['messages'])}")]}

        inner = StateGraph(Counted)
        inner.add_node("count", count)
        inner.add_edge(START, "count")
        outer = StateGraph(State)
        outer.add_node("answer", answer)
        outer.add_node("inner", inner.compile(checkpointer=True))
        outer.add_edge(START, "answer")
        outer.add_edge("answer", "inner")
        return outer.compile(checkpointer=saver)

    def theirs(self, path: Path) -> Any:
        sqlite_saver = pytest.importorskip("langgraph.checkpoint.sqlite")
        pytest.importorskip("langgraph.graph")
        return sqlite_saver.SqliteSaver.from_conn_string(str(path))

    def ours(self, url: str) -> Any:
        return self.graph(pytest.importorskip("perdure.adapters.langgraph").PerdureSaver(store=url))

    def say(self, graph: Any, thread: str, *texts: str) -> dict[str, Any]:
        config = {"configurable": {"thread_id": thread}}
        for text in texts:
            graph.invoke({"messages": [("user", text)]}, config)
        return config

    def told(self, graph: Any, config: Any) -> list[Any]:
        """Return each checkpoint of a history, with the results of its tasks."""
        return [
            (state.values, state.next, state.config, state.parent_config, state.metadata, state.tasks)
            for state in graph.get_state_history(config)
        ]

    def test_threads_arrive_and_go_on(self, tmp_path: Path, url: str) -> None:
        """The whole history is the same through the adapter, and a run can continue from any checkpoint of it."""
        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            graph = self.graph(saver)
            configs = [self.say(graph, thread, "1", "2", "forget", "3") for thread in ("t-1", "Grüße / 2")]
            before = [self.told(graph, config) for config in configs]
        check = unchanged(path)
        report = asyncio.run(taken_in(url, "langgraph", path))
        check()
        assert report.refused == ()
        ours = self.ours(url)
        for config, told in zip(configs, before, strict=True):
            assert self.told(ours, config) == told
        assert asyncio.run(taken_in(url, "langgraph", path)).sessions == 0
        config = self.say(ours, "t-1", "4")
        said = [message.content for message in ours.get_state(config).values["messages"]]
        with self.theirs(path) as saver:
            graph = self.graph(saver)
            same = graph.get_state(self.say(graph, "t-1", "4")).values["messages"]
        assert said == [message.content for message in same]
        middle = before[0][5][2]
        ours.invoke({"messages": [("user", "branch")]}, middle)
        assert [message.content for message in ours.get_state(config).values["messages"]][-2] == "branch"

    def test_an_interrupt_is_answered_there(self, tmp_path: Path, url: str) -> None:
        """A thread that waits for a person in the source waits for one here."""
        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            config = self.say(self.graph(saver), "t", "1", "ask")
        asyncio.run(taken_in(url, "langgraph", path))
        from langgraph.types import Command

        ours = self.ours(url)
        assert [task.interrupts[0].value for task in ours.get_state(config).tasks] == ["what?"]
        found = ours.invoke(Command(resume="this"), config)
        assert found["messages"][-1].content == "told this"

    def test_messages_are_stored_once_and_can_be_read(self, tmp_path: Path, url: str) -> None:
        """Perdure shows the conversation, and a later import adds only the new messages."""
        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            self.say(self.graph(saver), "t", *map(str, range(10)))
        report = asyncio.run(taken_in(url, "langgraph", path))
        with self.theirs(path) as saver:
            config = self.say(self.graph(saver), "t", "more")
            told = self.told(self.graph(saver), config)
        later = asyncio.run(taken_in(url, "langgraph", path))
        assert (report.messages >= 20, later.refused) == (True, ())

        async def shown() -> list[str]:
            async with connect(url) as sessions:
                session = await sessions.store.load("t")
                assert session is not None
                _, end = await sessions.store.log_of("t")  # type: ignore[attr-defined]
                assert end == 22
                return [message.text for message in session.state.messages]

        assert asyncio.run(shown())[-2:] == ["more", "answer 21"]
        assert self.told(self.ours(url), config) == told

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_a_thread_that_continued_on_both_sides_stays_ours(
        self, tmp_path: Path, url: str, ours_first: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The graph, the shown messages and the verbs use one conversation. The source's is a branch."""
        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            self.say(self.graph(saver), "t", "1")
        asyncio.run(taken_in(url, "langgraph", path))
        ours = self.ours(url)
        if ours_first:
            self.say(ours, "t", "ours")
        with self.theirs(path) as saver:
            config = self.say(self.graph(saver), "t", "theirs")
            branch = self.graph(saver).get_state(config)
        if not ours_first:
            self.say(ours, "t", "ours")
        with monkeypatch.context() as killed:
            killed.setattr(langgraph._Arriving, "end", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(taken_in(url, "langgraph", path))
        assert self.said(ours, config) == ["1", "ours"]
        assert asyncio.run(taken_in(url, "langgraph", path)).refused == ()
        assert asyncio.run(self.shown(url, "t")) == self.said(ours, config) == ["1", "ours"]
        assert ours.get_state(branch.config).values == branch.values
        chat = ours.checkpointer.blocking_chat("t")
        chat.trim(2)
        assert self.said(ours, config) == ["ours"]
        with self.theirs(path) as saver:
            self.say(self.graph(saver), "t", "theirs again")
        assert asyncio.run(taken_in(url, "langgraph", path)).diverged == ("t",)
        assert asyncio.run(self.shown(url, "t")) == self.said(ours, config) == ["ours"]
        self.say(ours, "t", "more")
        assert self.said(ours, config) == ["ours", "more"]
        assert counts(asyncio.run(taken_in(url, "langgraph", path)))[0] == 0

    def test_a_verb_counts_as_a_change_here(self, tmp_path: Path, url: str) -> None:
        """A thread that was trimmed here, and has continued in its source, stays trimmed. A new name does not count."""
        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            self.say(self.graph(saver), "trimmed", "1", "2")
            self.say(self.graph(saver), "named", "1", "2")
        asyncio.run(taken_in(url, "langgraph", path))
        ours = self.ours(url)
        ours.checkpointer.blocking_chat("trimmed").trim(2)
        ours.checkpointer.blocking_chat("named").rename("A name")
        with self.theirs(path) as saver:
            trimmed, named = (self.say(self.graph(saver), thread, "3") for thread in ("trimmed", "named"))
        assert asyncio.run(taken_in(url, "langgraph", path)).diverged == ("trimmed",)
        assert (self.said(ours, trimmed), self.said(ours, named)) == (["2"], ["1", "2", "3"])

    def said(self, graph: Any, config: Any) -> list[str]:
        """Return the user's messages in the state of a graph."""
        return [each.text for each in graph.get_state(config).values["messages"] if each.type == "human"]

    async def shown(self, url: str, thread: str) -> list[str]:
        """Return the same as perdure shows it."""
        async with connect(url) as sessions:
            messages = (await sessions.session(thread)).state.messages
        return [message.text for message in messages if message.role == "user"]

    def test_nothing_in_a_file_is_imported(self, tmp_path: Path, url: str) -> None:
        """An object of any class stays data until LangGraph reads it, and an unreadable value is named."""
        pytest.importorskip("langgraph.checkpoint.sqlite")
        import ormsgpack

        path = tmp_path / "theirs.db"
        with self.theirs(path) as saver:
            self.say(self.graph(saver), "t", "1")
        evil = ormsgpack.Ext(0, ormsgpack.packb(("os", "system", f"touch {tmp_path / 'ran'}")))
        with sqlite3.connect(path) as db:
            number, kind, raw = db.execute("SELECT rowid, type, checkpoint FROM checkpoints LIMIT 1").fetchone()
            found = ormsgpack.unpackb(raw, ext_hook=ormsgpack.Ext)
            found["channel_values"]["evil"] = evil
            db.execute("UPDATE checkpoints SET checkpoint = ? WHERE rowid = ?", (ormsgpack.packb(found), number))
        db.close()
        assert asyncio.run(taken_in(url, "langgraph", path)).refused == ()
        assert not (tmp_path / "ran").exists()
        for kind, value in (
            ("pickle", b"cos\nsystem\n"),
            ("msgpack+aes", b"x"),
            ("msgpack", b"\xc1"),
            ("msgpack", b"\x01"),
        ):
            with sqlite3.connect(path) as db:
                db.execute("UPDATE checkpoints SET type = ?, checkpoint = ? WHERE rowid = ?", (kind, value, number))
            db.close()
            with pytest.raises(InvalidData, match=rf"checkpoints\[{number}\]\.checkpoint"):
                asyncio.run(taken_in(f"sqlite:///{tmp_path}/other.db", "langgraph", path))


async def _interrupted(_: object) -> None:
    raise KeyboardInterrupt


class TestAgno:
    """`SqliteDb`, with the runs in a table of their own or, as in older releases, in the session's row."""

    RUNS = [
        {
            "run_id": "r1",
            "messages": [
                {"id": "m1", "role": "system", "content": "Be brief."},
                {"id": "m2", "role": "user", "content": "Add 1 and 2."},
                {
                    "id": "m3",
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"id": "m4", "role": "tool", "tool_call_id": "c", "tool_name": "add", "content": "3"},
                {"id": "m5", "role": "assistant", "content": "3", "reasoning_content": "Hm.", "metrics": {"x": 1.0}},
            ],
        },
        {
            "run_id": "r2",
            "messages": [
                {"id": "m6", "role": "system", "content": "Be brief."},
                {"id": "m7", "role": "user", "content": "Add 1 and 2.", "from_history": True},
                {"id": "m8", "role": "user", "content": "Thanks."},
            ],
        },
        {"run_id": "r3", "parent_run_id": "r2", "messages": [{"id": "m9", "role": "user", "content": "inner"}]},
    ]

    def written(self, path: Path, *, is_old: bool | None) -> None:
        """Write a file. With `is_old=None` it is a migrated one, with the runs in both places."""
        with sqlite3.connect(path) as db:
            runs = ", runs" if is_old in (True, None) else ""
            db.execute(
                "CREATE TABLE agno_sessions (session_id PRIMARY KEY, session_type, agent_id, user_id, session_data, "
                f"metadata, created_at, updated_at{runs})"
            )
            data = json.dumps({"session_name": "Sums", "session_state": {"n": 3}})
            values = ["s-1", "agent", "adder", "ada", data, None, 1767322800, None]
            values += [json.dumps(json.dumps(self.RUNS))] if is_old in (True, None) else []
            db.execute(f"INSERT INTO agno_sessions VALUES ({', '.join('?' * len(values))})", values)
            if not is_old:
                db.execute("CREATE TABLE agno_runs (run_id, session_id, run_index, run_data, created_at)")
                for number, run in enumerate(self.RUNS):
                    row = (run["run_id"], "s-1", number, json.dumps(run), 1767322800 + number)
                    db.execute("INSERT INTO agno_runs VALUES (?, ?, ?, ?, ?)", row)
        db.close()

    @pytest.mark.parametrize("is_old", [True, False, None])
    async def test_sessions_arrive(self, is_old: bool | None, tmp_path: Path, url: str) -> None:
        """Messages come once and in order, with calls, results and thoughts; their user owns the session."""
        path = tmp_path / "theirs.db"
        self.written(path, is_old=is_old)
        assert counts(await taken_in(url, "agno", path)) == (1, 6, 0, 0)
        assert counts(await taken_in(url, "agno", path)) == (0, 0, 1, 0)
        async with connect(url, owner="ada", model="offline") as sessions:
            (info,) = await sessions.list()
            assert (info.title, info.agent_name, info.owner) == ("Sums", "agno", "ada")
            session = await sessions.store.load(info.id)
            assert session is not None
            said = session.state.messages
            assert [message.role for message in said] == ["system", "user", "assistant", "tool", "assistant", "user"]
            assert said[2].tool_calls[0].arguments == {"a": 1}
            assert [message.id for message in said] == ["m1", "m2", "m3", "m4", "m5", "m8"]
            assert session.state.metadata["agno"]["session_data"]["session_state"] == {"n": 3}
            chat = await sessions.open(info.id)
            assert (await chat.send("Again")).text

    async def test_a_real_file(self, tmp_path: Path, url: str) -> None:
        """A file that Agno itself has written is imported."""
        agno = pytest.importorskip("agno.db.sqlite")
        from agno.models.message import Message as AgnoMessage
        from agno.run.agent import RunOutput
        from agno.session.agent import AgentSession

        path = tmp_path / "theirs.db"
        db = agno.SqliteDb(db_file=str(path))
        messages = [AgnoMessage(role="user", content="Hi"), AgnoMessage(role="assistant", content="Hello")]
        run = RunOutput(run_id="r", agent_id="a", session_id="s-1", messages=messages)
        db.upsert_session(AgentSession(session_id="s-1", agent_id="a", created_at=1767322800))
        db.upsert_run(run, session_id="s-1")
        db.close()
        assert counts(await taken_in(url, "agno", path)) == (1, 2, 0, 0)


async def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    """A missing file, one that is not a database, and one of another library change nothing."""
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
