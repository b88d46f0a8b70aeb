"""`perdure import --from`: sessions of other libraries, on the command line."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import COMMAND

SESSIONS, KILLS = (60, 20) if os.environ.get("PERDURE_TORTURE") else (30, 3)


def written(path: Path, sessions: int, messages: int = 3) -> None:
    """Write a file as the OpenAI Agents SDK does."""
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE agent_sessions (session_id TEXT PRIMARY KEY, created_at, updated_at)")
        db.execute("CREATE TABLE agent_messages (id INTEGER PRIMARY KEY, session_id, message_data, created_at)")
        for number in range(sessions):
            db.execute("INSERT INTO agent_sessions VALUES (?, '2026-01-02 03:04:05', NULL)", (f"chat-{number}",))
            for place in range(messages):
                item = json.dumps({"role": "user", "content": f"message {place} of {number}"})
                row = (f"chat-{number}", item)
                db.execute("INSERT INTO agent_messages (session_id, message_data) VALUES (?, ?)", row)
    db.close()


def test_sessions_are_taken_in_and_shown(perdure: Callable[..., Any], home: Path) -> None:
    """The command says how many came, and the sessions are there like any other."""
    written(home / "theirs.db", 3)
    first = perdure("--store", "s.db", "import", "--from", "openai-agents", "theirs.db")
    assert first.out == "imported 3 sessions with 9 messages\n"
    again = perdure("--store", "s.db", "import", "--from", "openai-agents", "theirs.db", "--json")
    assert again.json == {"sessions": 0, "messages": 0, "skipped": 3, "refused": [], "diverged": []}
    assert "message 1 of 2" in perdure("--store", "s.db", "show", "chat-2").out
    assert "chat-1" in perdure("--store", "s.db", "search", "message of 1").out
    assert perdure("--store", "s.db", "fsck").out.endswith("no problems\n")


def test_a_library_goes_by_its_packages_name_too(perdure: Callable[..., Any], home: Path) -> None:
    """The names are those of perdure's extras: each finds its reader."""
    written(home / "theirs.db", 1)
    for name, said in (("google-adk", "no table has the columns"), ("claude-agent-sdk", "theirs.db")):
        assert said in perdure("--store", "s.db", "import", "--from", name, "theirs.db", code=2).err


def test_what_is_refused_is_told(perdure: Callable[..., Any], home: Path) -> None:
    """The others arrive, the reason says what to do, and the exit code informs programs."""
    written(home / "theirs.db", 3)
    perdure("--store", "s.db", "send", "--new", "chat-1", "mine")
    said = perdure("--store", "s.db", "import", "--from", "openai-agents", "theirs.db", code=4)
    assert said.out == "imported 2 sessions with 6 messages\n"
    assert "Another session has the id 'chat-1'" in said.err


def test_usage(perdure: Callable[..., Any], home: Path) -> None:
    """Options that do not fit together, a missing source and a bad row raise errors and change nothing."""
    written(home / "theirs.db", 1)
    (home / "folder").mkdir()
    for arguments, code in (
        (("--from", "crewai", "theirs.db"), 2),
        (("--from", "adk", "--format", "openai", "theirs.db"), 2),
        (("--from", "adk", "-"), 2),
        (("--from", "adk", "nowhere.db"), 7),
    ):
        assert perdure("--store", "s.db", "import", *arguments, code=code).err
    assert "no table has the columns" in perdure("--store", "s.db", "import", "--from", "adk", "theirs.db", code=2).err
    db = sqlite3.connect(home / "theirs.db")
    db.execute("UPDATE agent_messages SET message_data = '{' WHERE id = 2")
    db.commit()
    db.close()
    said = perdure("--store", "s.db", "import", "--from", "openai-agents", "theirs.db", code=2)
    assert "agent_messages[2].message_data" in said.err
    assert "import again" in said.err


def test_a_source_that_cannot_be_read_leaves_no_store(perdure: Callable[..., Any], home: Path) -> None:
    """The error is about the source, and not about the store."""
    written(home / "theirs.db", 40)
    whole = (home / "theirs.db").read_bytes()
    (home / "broken.db").write_bytes(whole[:3_000])
    (home / "folder").mkdir()
    for source in ("broken.db", "folder", "nowhere.db"):
        said = perdure("--store", "s.db", "import", "--from", "openai-agents", source, code=7)
        assert source in said.err
        assert "doctor" not in said.err
    assert not list(home.glob("s.db*"))


def test_a_database_needs_its_library(perdure: Callable[..., Any], home: Path) -> None:
    """Without --from it would be taken for an export, which it is not."""
    written(home / "theirs.db", 1)
    assert "--from langgraph" in perdure("--store", "s.db", "import", "theirs.db", code=2).err


def test_a_killed_import_is_repeated(perdure: Callable[..., Any], home: Path) -> None:
    """An import killed at any moment leaves whole sessions, and the next one adds what is missing, once."""
    written(home / "theirs.db", SESSIONS, messages=20)
    chance = random.Random(3)
    command = [*COMMAND, "--store", "s.db", "import", "--from", "openai-agents", "theirs.db"]
    for _ in range(KILLS):
        process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while process.poll() is None and not (home / "s.db-wal").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.random() / 10)
        process.kill()
        process.wait()
    report = perdure("--store", "s.db", "import", "--from", "openai-agents", "theirs.db", "--json").json
    assert report["sessions"] + report["skipped"] == SESSIONS
    assert report["messages"] == 20 * report["sessions"]
    listed = perdure("--store", "s.db", "ls", "--json", "--limit", 1000).json_lines
    assert sorted(each["id"] for each in listed) == sorted(f"chat-{number}" for number in range(SESSIONS))
    assert {each["message_count"] for each in listed} == {20}
    assert perdure("--store", "s.db", "fsck").out.endswith("no problems\n")


def test_a_thread_that_has_diverged_is_named(perdure: Callable[..., Any], home: Path) -> None:
    """It was continued here by a verb, and in its source. The command says which to stop."""
    with sqlite3.connect(home / "theirs.db") as db:
        db.execute(
            "CREATE TABLE checkpoints "
            "(thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata)"
        )
        db.execute("INSERT INTO checkpoints VALUES ('t', '', '1', NULL, 'json', ?, '{}')", (_checkpoint("one", "two"),))
    perdure("--store", "s.db", "import", "--from", "langgraph", "theirs.db")
    perdure("--store", "s.db", "trim", "t", "1")
    db.execute("INSERT INTO checkpoints VALUES ('t', '', '2', '1', 'json', ?, '{}')", (_checkpoint("one", "three"),))
    db.commit()
    db.close()
    said = perdure("--store", "s.db", "import", "--from", "langgraph", "theirs.db")
    assert "1 thread diverged: t." in said.err
    assert "Stop the old program" in said.err
    shown = perdure("--store", "s.db", "show", "t").out
    assert "two" in shown
    assert "three" not in shown


def _checkpoint(*texts: str) -> str:
    """Return a checkpoint as old releases of LangGraph wrote it."""
    path = ["langchain", "schema", "messages", "HumanMessage"]
    said = [
        {"lc": 1, "type": "constructor", "id": path, "kwargs": {"content": text, "type": "human", "id": text}}
        for text in texts
    ]
    return json.dumps({"channel_values": {"messages": said}})
