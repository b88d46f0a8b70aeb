"""A SQLite file of the first schema is read, and works as before, whatever state its sessions are in."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import sys
from contextlib import nullcontext
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests import stories
from tests.stories import ledger_loops, opened

from perdure import CorruptRecord, SessionRuntime, SqliteStore, recover
from perdure.archive import export_sessions, fsck
from perdure.model.ids import use
from perdure.stores.format.packing import unpack, unpack_entries
from perdure.stores.format.rows import checksum, entry_checksum
from perdure.stores.sqlite import steps
from perdure.stores.sqlite.schema import _FUNCTIONS
from perdure.testing import FrozenClock
from perdure.testing.samples import texts

ADDED_TO_TAGS = ("owner", "agent", "status", "created", "spawned", "recent")
OPEN = """
import asyncio, sys
from perdure import SqliteStore

async def main():
    async with SqliteStore(sys.argv[1]) as store:
        print(len(await store.read("talk")))

asyncio.run(main())
"""


LINES_NOTED = """
    INSERT INTO ref (log, child, start, stop)
    WITH RECURSIVE up (sid, line) AS (
        SELECT sid, line FROM session WHERE line IS NOT NULL
        UNION SELECT up.sid, session.line FROM up JOIN session ON session.sid = up.line WHERE session.line IS NOT NULL
    )
    SELECT log, up.sid, start, stop FROM up JOIN ref ON child = up.line WHERE since IS NULL
"""
"""The statement that notes for each fork all that it shows, as the first schema did."""


def make_old(path: Path) -> None:
    """Give a file the form of the first schema: each entry of a record in a row of its own, unpacked."""
    script = (files("perdure.stores.sqlite") / "migrations" / "0001_initial.sql").read_text()
    (create,) = re.findall(r"CREATE TABLE event \(.*?STRICT;", script, re.DOTALL)
    db = apsw.Connection(str(path))
    with db:
        db.execute(create)
        runs: dict[Any, Any] = {}
        for run, sid, loop in db.execute("SELECT run, sid, loop FROM run"):
            runs[run] = loop
            runs[sid, loop] = run
        rows = db.execute("SELECT sid, last, count, run, body FROM batch ORDER BY rowid").fetchall()
        for sid, last, count, run, body in rows:
            for seq, entry in enumerate(unpack_entries(runs.get(run), body), last - count + 1):
                raw = msgspec.json.encode(entry.body)
                crc = entry_checksum(sid, seq, entry.run, entry.kind, raw)
                values = (sid, seq, runs.get((sid, entry.run)), entry.kind, crc, raw)
                db.execute("INSERT INTO event (sid, seq, run, kind, crc, body) VALUES (?, ?, ?, ?, ?, ?)", values)
        for table in ("batch", "blob", "attached", "sketch", "timer", "rate", "token"):
            db.execute(f"DROP TABLE {table}").fetchall()
        db.execute(LINES_NOTED)
        newer = "type = 'trigger' OR type = 'index' AND sql IS NOT NULL"
        for kind, name in db.execute(f"SELECT type, name FROM sqlite_schema WHERE {newer}").fetchall():
            db.execute(f"DROP {kind} {name}").fetchall()
        for index in re.findall(r"(?m)^CREATE INDEX .*?;", script, re.DOTALL):
            db.execute(index).fetchall()
        added = (("key", "crc"), ("log", "crc"), ("session", "line"), ("ref", "since"))
        added += (("session", "spawned"), ("session", "recent"), ("session", "priority"), ("session", "since"))
        for table, column in (*(("tag", name) for name in ADDED_TO_TAGS), *added):
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}").fetchall()
        db.pragma("user_version", 1)
    db.close()


async def exported(store: SqliteStore) -> bytes:
    file = io.BytesIO()
    await export_sessions(store, file)
    return file.getvalue()


async def _tell(where: Path) -> bytes:
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("sqlite", where) as store:
            await stories.tell(store, clock)
            return await exported(store)


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, bytes]:
    """Return a file of the first schema in which a good deal has happened, and an export of it."""
    said = asyncio.run(_tell(tmp_path))
    make_old(tmp_path / "sessions.db")
    return tmp_path / "sessions.db", said


async def test_an_old_file_is_read_as_before(old: tuple[Path, bytes]) -> None:
    """Runs, branches recorded in turns, erased parents, interrupted runs: everything is read, byte for byte."""
    path, said = old
    async with SqliteStore(path) as store:
        assert await exported(store) == said
        assert (await fsck(store)).problems == ()


async def test_killed_runs_in_an_old_file_are_recovered(old: tuple[Path, bytes]) -> None:
    """Their records say how far they had come."""
    path, _ = old
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        clock.advance(3600)
        async with SqliteStore(path) as store:
            report = await recover(SessionRuntime(store), ledger_loops())
            assert sorted(report.resumed) == ["killed", "killed-early"]
            assert [texts(await store.load(each))[-1] for each in report.resumed] == ["done", "done"]
            assert (await fsck(store)).problems == ()


async def test_many_processes_that_open_an_old_file_at_once(old: tuple[Path, bytes]) -> None:
    """One of them brings it up to date, and all of them read it."""
    path, said = old
    command = (sys.executable, "-c", OPEN, str(path))
    started = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(8)]
    told = [(await each.communicate())[0] for each in started]
    assert len(set(told)) == 1
    assert int(told[0]) > 0
    async with SqliteStore(path) as store:
        assert await exported(store) == said


async def test_a_migration_that_fails_changes_nothing(old: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration is one transaction: the next process that opens the file begins again."""
    path, said = old
    with monkeypatch.context() as dying:
        dying.setitem(_FUNCTIONS, "batch_body", lambda kind, body: 1 / 0 if kind == b"agent_end" else b"[]")
        with pytest.raises(ZeroDivisionError):
            await SqliteStore(path).__aenter__()
    async with SqliteStore(path) as store:
        assert await exported(store) == said


def _said_by(schema: str) -> list[Any]:
    """Return the schema, word for word, and the rows of a file in which the statements were carried out."""
    db = apsw.Connection(":memory:")
    for name, function in _FUNCTIONS.items():
        db.create_scalar_function(name, function, deterministic=True)
    db.execute(schema, {"after": 0, "upto": 0}).fetchall()  # steps of migrations name a range of sessions: none here
    made = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY rowid").fetchall()
    rows = {table: db.execute(f"SELECT * FROM {table}").fetchall() for kind, table, *_ in made if kind == "table"}
    rows["meta"] = [(key, "random" if key == "uid" else value) for key, value in rows["meta"]]
    return [*made, rows]


def test_a_new_file_has_the_schema_that_all_migrations_make() -> None:
    """The statements of `schema.sql` make the same schema as all migrations together."""
    room = files("perdure.stores.sqlite")
    scripts = sorted(path.name for path in (room / "migrations").iterdir() if path.name.endswith(".sql"))
    migrated = "".join(
        ";\n".join([*in_steps, rest])
        for in_steps, rest in (steps.halves((room / "migrations" / name).read_text()) for name in scripts)
    )
    assert _said_by((room / "schema.sql").read_text()) == _said_by(migrated)


DAMAGES = {
    "another body": "UPDATE event SET body = x'7b' WHERE rowid = {0}",
    "no body": "UPDATE event SET body = NULL WHERE rowid = {0}",
    "a kind that is no text": "UPDATE event SET kind = CAST(x'ff6162' AS TEXT) WHERE rowid = {0}",
    "no kind": "UPDATE event SET kind = NULL WHERE rowid = {0}",
    "a checksum that is no number": "UPDATE event SET crc = 'seven' WHERE rowid = {0}",
    "a number that is none": "UPDATE event SET seq = 'three' WHERE rowid = {0}",
    "a run that is none": "UPDATE event SET run = x'01' WHERE rowid = {0}",
    "a loop that is no text": (
        "UPDATE run SET loop = CAST(x'ff6162' AS TEXT) WHERE run = (SELECT run FROM event WHERE rowid = {0})"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_damage_in_an_old_file_stays_where_it_is(old: tuple[Path, bytes], damage: str) -> None:
    """A flipped bit may change a column's type. The session is reported as damaged, and every other is read."""
    path, _ = old
    rowid = spoil(path, damage)
    async with SqliteStore(path) as store:
        with pytest.raises(CorruptRecord):
            await store.read("talk")
        assert await store.load("talk") is not None
        others = [info.id for info in await store.list() if info.id != "talk"]
        assert [len(await store.read(each)) >= 0 for each in others]
        assert {problem.session_id for problem in (await fsck(store)).problems} == {"talk"}, rowid


def spoil(path: Path, damage: str) -> int:
    """Damage a row of a run of the session `talk`, in a way that SQLite would not allow."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA writable_schema = ON")
    db.execute(
        "UPDATE sqlite_schema SET sql = replace(replace(sql, 'STRICT', ''), 'NOT NULL', '')"
        " WHERE name IN ('event', 'run')"
    )
    db.close()
    db = apsw.Connection(str(path))
    ((rowid,),) = db.execute(
        "SELECT event.rowid FROM event JOIN session USING (sid) WHERE id = 'talk' AND run IS NOT NULL LIMIT 1 OFFSET 2"
    ).fetchall()
    db.execute(damage.format(rowid))
    assert db.changes() == 1
    db.close()
    return int(rowid)


GOLDEN = Path(__file__).parent.parent / "golden" / "format-1-head-2-schema-6" / "sessions.sqlite"


@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 6, 9, 22])
async def test_a_migration_in_steps_can_be_cut_short_and_begun_again(tmp_path: Path, done: int) -> None:
    """The next opening finishes it, however far it came and whatever others have written meanwhile."""
    path = tmp_path / "sessions.db"
    shutil.copyfile(GOLDEN, path)
    db = apsw.Connection(str(path))
    for name, function in _FUNCTIONS.items():
        db.create_scalar_function(name, function, deterministic=True)
    in_steps, _ = steps.halves((files("perdure.stores.sqlite") / "migrations" / "0007_recent_lists.sql").read_text())
    steps.take(db, in_steps[:done], nullcontext)
    head = db.execute("SELECT body FROM head JOIN session USING (sid, version) WHERE id = 'beta'").get
    later = json.loads(unpack(head))["info"]["updated_at"].replace("2025-", "2026-")
    body = unpack(head).replace(b'"updated_at":"2025-', b'"updated_at":"2026-', 1)
    sid, version = db.execute("SELECT sid, version FROM session WHERE id = 'beta'").get
    db.execute(
        "UPDATE head SET body = ?, crc = ? WHERE sid = ? AND version = ?",
        (body, checksum(body, sid, version), sid, version),
    )
    db.execute("UPDATE session SET updated = ? WHERE sid = ?", (datetime.fromisoformat(later).timestamp(), sid))
    db.close()
    async with SqliteStore(path) as store:
        assert (await store.list(order="updated")).all()[0].id == "beta"
        assert [info.id for info in await store.list(status="deleted")] == ["delta"]
        assert [info.id for info in await store.list(status="deleted", top_level=True)] == []
        assert await store.check() == []
