"""Repair rewrites data that follows from other data, reports its changes, and changes no message."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests import stories
from tests.stores.test_check import IN_SEARCH_INDEX, IN_SQLITE, Damage, assert_named, execute, of
from tests.stories import opened

from perdure import ConfigurationError, MemoryStore, SqliteStore
from perdure.archive import fsck, repair
from perdure.model.ids import use
from perdure.protocols import MEND_FIRST, Problem
from perdure.stores.jobs.repairing import REPAIRED
from perdure.stores.sqlite.check import GIVE_BACK, faults
from perdure.stores.sqlite.mending import _replace, mend
from perdure.stores.sqlite.schema import connect, exclusively
from perdure.testing import FrozenClock

BODIES = (
    "SELECT 'm', log, pos, crc, body FROM msg UNION ALL SELECT 'h', sid, version, crc, body FROM head ORDER BY 1, 2, 3"
)
# Derived from versions, messages and rows. All other damage is left to a backup, to `gc`, or to an expert.
FOLLOWS = (
    *(
        "evt_end = evt_end - 1",
        "expires =",
        "status =",
        "agent =",
        "owner = 'eve'",
        "parent =",
        "created =",
        "updated =",
    ),
    *("INTO tag", "FROM tag", "UPDATE tag", "FROM uses", "INTO uses", "INTO ref", "UPDATE ref", "DELETE FROM ref"),
    *("since = NULL", "sqlite_sequence", "DROP INDEX"),
)


def is_left(damage: Damage) -> bool:
    return not any(each in damage.done for each in FOLLOWS) or damage.done.startswith(
        ("DELETE FROM value", "UPDATE token")
    )


REPAIRED_IN_SQLITE = [each for each in IN_SQLITE if not is_left(each)]
LEFT_IN_SQLITE = [each for each in IN_SQLITE if is_left(each)]


def bodies(path: Path) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(BODIES).fetchall()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store that has a long story, written once."""
    where = tmp_path_factory.mktemp("original")

    async def tell() -> None:
        clock = FrozenClock(tick=0.001)
        with use(clock=clock):
            async with opened("sqlite", where) as store:
                await stories.tell(store, clock)
                await store.search("it")

    asyncio.run(tell())
    return where


def placed(original: Path, where: Path) -> Path:
    shutil.copytree(original, where, dirs_exist_ok=True)
    return where / "sessions.db"


@pytest.mark.sample(6)
@pytest.mark.parametrize("damage", REPAIRED_IN_SQLITE, ids=lambda damage: str(damage.done)[:90])
async def test_what_follows_from_versions_is_repaired(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """The check finds it, a dry run changes nothing, the next check is clean; the session's record has the repair."""
    path = placed(original, tmp_path)
    execute(path, damage.done)
    said = bodies(path)
    async with SqliteStore(path) as store:
        assert_named(await fsck(store), damage)
        dry = await repair(store, dry_run=True)
        assert dry.repaired
        assert (await fsck(store)).problems == dry.found
        report = await repair(store)
        assert report.left == ()
        # One repair may fix two: a fork of a fork has its notes from the other.
        assert {each.where for each in report.repaired} - {"the search index"} <= {each.where for each in dry.repaired}
        for session_id in {each.session_id for each in report.repaired if each.session_id}:
            entries = [each for each in await store.read(session_id) if each.kind == REPAIRED]
            if not any(each.where == "its tags in lists" for each in report.repaired):
                assert entries[-1].body["repaired"]
                assert entries[-1].body["at"] > datetime(2026, 1, 1).timestamp()
        assert (await repair(store)).repaired == ()
    assert bodies(path) == said


@pytest.mark.sample(8)
@pytest.mark.parametrize("damage", LEFT_IN_SQLITE, ids=lambda damage: str(damage.done)[:90])
async def test_what_would_have_to_be_guessed_is_left(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """It is reported with advice, no body is changed, and no new fault appears."""
    path = placed(original, tmp_path)
    execute(path, damage.done.format(erasures="value = -1 WHERE key = 'erasures'"))
    said = bodies(path)
    async with SqliteStore(path) as store:
        before = await fsck(store)
        report = await repair(store)
        assert report.left
        assert {(each.session_id, each.where) for each in report.left} <= {
            (each.session_id, each.where) for each in before.problems
        }
        assert all(len(each.repair) > 30 for each in report.left)
    assert bodies(path) == said


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", IN_SEARCH_INDEX, ids=lambda damage: damage.done[:60])
async def test_a_search_index_is_made_anew(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """It finds the messages again."""
    path = placed(original, tmp_path)
    execute(tmp_path / "sessions.db-search", damage.done)
    async with SqliteStore(path) as store:
        report = await repair(store)
        assert {each.where for each in report.repaired} == {"the search index"}
        assert report.left == ()
        assert await store.search("it")


async def test_flipped_bits_in_indexes_are_repaired(original: Path, tmp_path: Path) -> None:
    """The whole index is made again."""
    rounds = 100 if os.environ.get("PERDURE_TORTURE") else 2
    path = placed(original, tmp_path / "original")
    pages = index_pages(path)
    rng, found = random.Random(17), 0
    for number in range(rounds):
        where = tmp_path / str(number)
        shutil.copytree(path.parent, where)
        flip(where / path.name, rng, pages)
        async with SqliteStore(where / path.name) as store:
            before = await fsck(store)
            if before.problems:
                found += 1
                assert (await repair(store)).left == ()
                assert (await fsck(store)).is_sound
        shutil.rmtree(where)
    assert found


CROWD = """
    WITH RECURSIVE number (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM number WHERE n < 60)
    INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, recent)
    SELECT printf('%03d-', n) || hex(zeroblob(150)), 0, 1, 'paused', 'a', 'owner ' || n, 'p', n, n, n FROM number
"""
ROWS = f"SELECT * FROM ({BODIES}) UNION ALL SELECT id, sid, log, owner, created FROM session"


def crowded(original: Path, where: Path) -> Path:
    """Return a copy of a store with small pages and many sessions, so indexes have inner and overflow pages."""
    path = placed(original, where)
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "delete")
    connection.pragma("page_size", 512)
    connection.execute("VACUUM; " + CROWD).fetchall()
    connection.close()
    return path


def test_damaged_cells_of_every_index_are_repaired(original: Path, tmp_path: Path) -> None:
    """After damage to a page's header, a cell's pointer or its numbers, all is sound again and no row is changed."""
    every = 1 if os.environ.get("PERDURE_TORTURE") else 9
    path = crowded(original, tmp_path / "original")
    sound, damaged = path.read_bytes(), tmp_path / "damaged.db"
    with closing(apsw.Connection(str(path))) as db:
        rows, ids = db.execute(ROWS).fetchall(), db.execute("SELECT rowid, log, pos FROM msg").fetchall()
        pages = db.execute(PAGES_OF_INDEXES).fetchall()
    assert {kind for _, kind in pages} == {"leaf", "internal"}
    for at in sorted(at for number, _ in pages for at in places_in(sound, number))[::every]:
        for beside in tmp_path.glob(f"{damaged.name}*"):
            beside.unlink()
        damaged.write_bytes(sound[:at] + bytes([sound[at] ^ 0xFF]) + sound[at + 1 :])
        with closing(connect(damaged)) as db:
            assert any(each.repair == MEND_FIRST for each in faults(db)), at
            assert mend(db), at
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)], at
            assert db.execute(ROWS).fetchall() == rows
            assert db.execute("SELECT rowid, log, pos FROM msg").fetchall() == ids  # the search index names them


PAGES_OF_INDEXES = (
    "SELECT pageno, pagetype FROM dbstat JOIN sqlite_schema AS of ON of.name = dbstat.name"
    " WHERE of.type = 'index' AND pagetype <> 'overflow' AND ncell > 0"
)


def places_in(raw: bytes | bytearray, page: Any, size: int = 512) -> list[int]:
    """Return places in a page of an index: its type, its first cell's pointer, and the cell's first bytes."""
    start = (page - 1) * size
    is_leaf = raw[start] == 10
    pointer = start + (8 if is_leaf else 12)
    cell = start + int.from_bytes(raw[pointer : pointer + 2], "big")
    child = [] if is_leaf else [cell, cell + 3]
    numbers = cell + (0 if is_leaf else 4)
    return [start, pointer, pointer + 1, *child, *range(numbers, numbers + 4)]


@pytest.mark.parametrize("index", ["sqlite_autoindex_session_1", "session_by_shelf", "session_by_created"])
async def test_a_damaged_index_is_told_first(original: Path, tmp_path: Path, index: str) -> None:
    """Sessions look damaged because of it. The advice is never to erase one, and all are there after the repair."""
    path = placed(original, tmp_path)
    said = bodies(path)
    raw = path.read_bytes()
    with closing(apsw.Connection(str(path))) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (index,)).fetchall()
    at = places_in(raw, root, 4096)[-4]  # the size of the first cell
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
    async with SqliteStore(path) as store:
        report = await fsck(store)
        assert "index" in report.problems[0].where
        assert "fsck --repair" in report.problems[0].repair
        assert not any("erase" in each.repair for each in report.problems)
        assert (await repair(store, dry_run=True)).repaired
        assert (await repair(store)).left == ()
        assert await store.search("it")
    assert bodies(path) == said


def blanked(original: Path, where: Path, name: str) -> Path:
    """Return the file of a store whose table or index `name` has lost its first page."""
    path = placed(original, where)
    with closing(apsw.Connection(str(path))) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).fetchall()
    raw = path.read_bytes()
    path.write_bytes(raw[: (root - 1) * 4096] + bytes(4096) + raw[root * 4096 :])
    return path


@pytest.mark.parametrize("index", ["tag_by_session", "sqlite_autoindex_msg_1"])
async def test_a_lost_page_of_an_index_is_told_first(original: Path, tmp_path: Path, index: str) -> None:
    """The check of the rows fails without the index. The file's own faults are still reported."""
    said = bodies(original / "sessions.db")
    async with SqliteStore(blanked(original, tmp_path, index)) as store:
        report = await fsck(store)
        assert index in report.problems[0].where
        assert "fsck --repair" in report.problems[0].repair
        assert not any("erase" in each.repair for each in report.problems)
        assert (await repair(store)).left == ()
    assert bodies(tmp_path / "sessions.db") == said


async def test_indexes_of_a_lost_table_are_left(original: Path, tmp_path: Path) -> None:
    """They cannot be made again without its rows, so a dry run does not list them, and the advice is a backup."""
    async with SqliteStore(blanked(original, tmp_path, "session")) as store:
        problems = (await fsck(store)).problems
        assert all("backup" in each.repair for each in problems if each.where.startswith(("index", "the database")))
        assert any(each.where.startswith("index") for each in problems)
        assert not any(each.where.startswith("index") for each in (await repair(store, dry_run=True)).repaired)
        assert not any(each.where.startswith("index") for each in (await repair(store)).repaired)


def test_an_index_is_repaired_beside_a_damaged_table(original: Path, tmp_path: Path) -> None:
    """A row of another table cannot be decoded. It is left, and the index is made again."""
    path = crowded(original, tmp_path)
    with closing(apsw.Connection(str(path))) as db:
        found: Any = db.execute("SELECT name, rootpage FROM sqlite_schema").fetchall()
        pages = dict(found)
        rows = db.execute("SELECT rowid, log, pos, body FROM msg").fetchall()
    raw = bytearray(path.read_bytes())
    start = (pages["rate"] - 1) * 512
    raw[start + int.from_bytes(raw[start + 8 : start + 10], "big") + 1] = 0xFF  # the size of its first record's header
    for at in places_in(raw, pages["sqlite_autoindex_msg_1"])[-4:-2]:
        raw[at] ^= 0xFF
    path.write_bytes(raw)
    with closing(connect(path)) as db:
        mend(db)
        assert not any(each.repair == MEND_FIRST for each in faults(db))
        assert faults(db)
        assert db.execute("SELECT rowid, log, pos, body FROM msg").fetchall() == rows


def test_a_repair_that_was_killed_before_it_gave_back_pages_is_repeated(original: Path, tmp_path: Path) -> None:
    """The pages that an index has left are found, and freed."""
    path = placed(original, tmp_path)
    with closing(connect(path)) as db:
        with exclusively(db):
            _replace(db, "session_by_shelf")
        assert {each.repair for each in faults(db)} == {GIVE_BACK}
        assert mend(db)
        assert faults(db) == []


MENDED_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from perdure.stores.sqlite.mending import mend
from perdure.stores.sqlite.schema import connect

db, left = connect(Path(sys.argv[1])), int(sys.argv[2])

def killed() -> bool:
    global left
    left -= db.in_transaction
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return False

db.set_progress_handler(killed, 50)
mend(db)
print(int(sys.argv[2]) - left)
"""


def mended(path: Path, kill_at: int) -> subprocess.CompletedProcess[str]:
    """Repair a file in another process, which kills itself in the middle of a transaction, after some steps."""
    words = (sys.executable, "-c", MENDED_UNTIL_KILLED, str(path), str(kill_at))
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


async def test_a_repair_of_indexes_that_is_killed_in_its_transaction_is_repeated(
    original: Path, tmp_path: Path
) -> None:
    """The kill damages nothing else and loses no row. The next repair fixes the same faults."""
    rounds = 100 if os.environ.get("PERDURE_TORTURE") else 3
    path = placed(original, tmp_path / "original")
    rng = random.Random(23)
    while not any(each.repair == MEND_FIRST for each in found_in(path)):
        flip(path, rng, index_pages(path))
    before, rows = {each.where for each in found_in(path)}, bodies(path)
    shutil.copytree(path.parent, tmp_path / "whole")
    steps = int(mended(tmp_path / "whole" / path.name, 10**9).stdout)
    assert steps > rounds
    for number in range(rounds):
        where = tmp_path / str(number)
        shutil.copytree(path.parent, where)
        assert mended(where / path.name, rng.randrange(1, steps)).returncode == -signal.SIGKILL
        assert {each.where for each in found_in(where / path.name)} <= before
        assert bodies(where / path.name) == rows
        async with SqliteStore(where / path.name) as store:
            assert (await repair(store)).left == ()
            assert (await fsck(store)).is_sound
        assert bodies(where / path.name) == rows
        shutil.rmtree(where)


def found_in(path: Path) -> list[Problem]:
    with closing(connect(path)) as db:
        return faults(db)


def index_pages(path: Path) -> list[int]:
    """Return the numbers of all leaves of indexes that follow from tables."""
    connection = apsw.Connection(str(path))
    sql = (
        "SELECT pageno FROM dbstat JOIN sqlite_schema AS of ON of.name = dbstat.name"
        " WHERE of.type = 'index' AND dbstat.pagetype = 'leaf'"
    )
    try:
        return [number for (number,) in connection.execute(sql)]
    finally:
        connection.close()


def flip(path: Path, rng: random.Random, pages: list[int]) -> None:
    """Flip a bit in the used part of a page; the unused middle would not matter."""
    raw = bytearray(path.read_bytes())
    page = rng.choice(pages)
    start = (page - 1) * 4096
    content = int.from_bytes(raw[start + 5 : start + 7], "big") or 65536
    if content < 4096:
        raw[start + rng.randrange(content, 4096)] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


IN_POSTGRES = (
    Damage("UPDATE session SET owner = 'eve' WHERE id = 'talk'", "talk", "column owner"),
    Damage(f"DELETE FROM uses WHERE sid = {of('talk')}", "talk", "a version names it"),
    Damage(f"DELETE FROM ref WHERE child = {of('a-fork')}", "a-fork", "that is not noted"),
    Damage("DELETE FROM claimed", "killed", "its claim: it is not noted"),
    Damage("DELETE FROM waiting", "talk", "what waits in its inbox"),
    Damage("UPDATE tag SET agent = 'eve' WHERE tag = 'vip'", "talk", "its tags in lists"),
    Damage("DELETE FROM word; DELETE FROM unindexed", None, "the search index of log"),
    Damage(f"UPDATE head SET hashes = ARRAY[]::text[] WHERE sid = {of('talk')}", "talk", "what is fetched along"),
    Damage("SELECT setval(pg_get_serial_sequence('session', 'sid'), 1)", None, "the sequence of session"),
)


async def test_a_postgres_schema_is_repaired(tmp_path: Path) -> None:
    """Derived tables, one after the other, are found damaged, rewritten, and clean after."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("postgres", tmp_path) as store:
            await stories.tell(store, clock)
            await store.search("it")
    async with opened("postgres", tmp_path) as store:
        several = 1 if os.environ.get("PERDURE_TORTURE") else len(IN_POSTGRES)
        for start in range(0, len(IN_POSTGRES), several):
            damages = IN_POSTGRES[start : start + several]
            for statement in ";".join(damage.done for damage in damages).split(";"):
                await store.link.rows(statement)
            report = await repair(store)
            for damage in damages:
                told = [f"{each.where}: {each.what}" for each in report.found if each.session_id == damage.session]
                assert any(damage.said in each for each in told), (damage, report.found)
            assert report.left == (), damages
        assert [each.kind for each in await store.read("talk")].count(REPAIRED) >= 1
        assert await store.search("it")


async def test_a_directory_is_repaired(tmp_path: Path) -> None:
    """Documents and hints are made again from the logs; a damaged log is left to a backup."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("file", tmp_path) as store:
            await stories.tell(store, clock)
            await store.waiting()
    where = tmp_path / "sessions"
    document = (where / "talk.json").read_bytes()
    (where / "talk.json").write_bytes(document.replace(b"ada", b"eve"))
    (where / "views.json").write_bytes(b"{}")
    (where / ".waiting" / "talk").unlink()
    async with opened("file", tmp_path) as store:
        dry = await repair(store, dry_run=True)
        assert {each.where for each in dry.repaired} == {"talk.json", "views.json", ".waiting/talk"}
        assert (where / "talk.json").read_bytes() != document
        report = await repair(store)
        assert {each.where for each in report.repaired} == {each.where for each in dry.repaired}
        assert report.left == ()
    assert (where / "talk.json").read_bytes() == document
    log = where / "boss.jsonl"
    raw = log.read_bytes()
    log.write_bytes(raw[:200] + b"?" + raw[201:])
    damaged = log.read_bytes()
    async with opened("file", tmp_path) as store:
        report = await repair(store)
        assert report.left
    assert log.read_bytes() == damaged


async def test_a_store_of_another_kind_is_refused() -> None:
    """A memory store has nothing to repair, but is checked."""
    async with MemoryStore() as store:
        assert (await repair(store)).is_sound
    with pytest.raises(ConfigurationError, match="cannot be repaired"):
        await repair(object())  # type: ignore[arg-type]
