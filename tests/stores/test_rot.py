"""Bit rot: over every file of a store, each answer is right, typed or reported, and never silently wrong."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest
from tests.store_breaks import (
    without_line_checksums,
    without_marks,
    without_message_checksums,
    without_page_checksums,
)
from tests.stores.files import TORTURE
from tests.stores.rotting import PAGE, RottenLogs, Scene, attack_on, furnished

from perdure.errors import CorruptRecord, StoreError
from perdure.model.ids import use
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.engine import SqliteEngine
from perdure.testing import RotContract
from perdure.testing.outcomes import Outcome, note
from perdure.testing.rot.attack import Attack, Report, RottenFiles, forget_claims
from perdure.testing.rot.questions import Question, answers_of
from perdure.testing.samples import new_session

SHARDS = int(os.environ.get("PERDURE_ROT_SHARDS", "8")) if TORTURE else 1
ROUNDS = {"main": 1_500, "search": 250, "wal": 600, "file": 500} if TORTURE else {"main": 8, "search": 6, "wal": 16}
STORES = {
    "main": "SQLite, database file",
    "search": "SQLite, search index",
    "wal": "SQLite, write-ahead log and mark",
    "file": "files",
}


class Control(NamedTuple):
    """A control for a kind of file: the protection that is removed, in words and by a function; number of attacks."""

    without: str
    break_it: Callable[..., None]
    rounds: int


CONTROLS = {
    "main": Control("checksums of messages are ignored", without_message_checksums, 400 if TORTURE else 25),
    "search": Control("checksums of pages are ignored", without_page_checksums, 800),
    "wal": Control("the log is not held against its mark", without_marks, 100 if TORTURE else 5),
    "file": Control("checksums of lines are ignored", without_line_checksums, 100),
}


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Return a directory in memory: none of these tests is about a disk."""
    where = Path(tempfile.mkdtemp(prefix="perdure-rot-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield where
    shutil.rmtree(where, ignore_errors=True)


_scenes: dict[str, Scene] = {}


def scene_of(kind: str, memory: Path) -> Scene:
    """Return the scene for one kind of damage. The database file and the search index share one."""
    name = "main" if kind == "search" else kind
    if name not in _scenes:
        (memory / name).mkdir()
        _scenes[name] = asyncio.run(furnished(name, memory / name))
    return _scenes[name]


def attacked(kind: str, scene: Scene, rounds: int, seed: int) -> Report:
    with use(clock=scene.clock):
        return asyncio.run(attack_on(scene, kind).run(rounds, seed))


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", ROUNDS)
def test_damage_is_never_a_wrong_answer(memory: Path, kind: str, shard: int) -> None:
    """A read, or a save on top, never gives a wrong answer, whichever bit, byte or sector is damaged."""
    report = attacked(kind, scene_of(kind, memory), ROUNDS[kind], shard)
    told = [f"{each.damage}: {each.question}: {each.found}" for each in report.wrong]
    failures = len({each.damage for each in report.wrong})
    control = CONTROLS[kind].without
    note(Outcome(attack="bit flips", store=STORES[kind], rounds=report.rounds, failures=failures, control=control))
    assert told == []
    if kind in ("main", "wal"):
        assert report.noticed > report.rounds / 4


@pytest.mark.parametrize("kind", CONTROLS if TORTURE else ("main", "wal"))
def test_unprotected_damage_is_silent(memory: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the checks, wrong values are read."""
    scene, control = scene_of(kind, memory), CONTROLS[kind]
    control.break_it(monkeypatch.setattr)
    report = attacked(kind, scene, control.rounds, 77)
    silent = {each.damage for each in report.wrong}
    note(
        Outcome(
            attack="bit flips",
            store=STORES[kind],
            rounds=0,
            failures=0,
            control=control.without,
            control_rounds=control.rounds,
            control_failures=len(silent),
        )
    )
    assert silent


class TestRotOfFiles(RotContract):
    """The contract as other projects apply it, to a directory of files."""

    flips = 400 if TORTURE else 1
    patience = 3_600.0 if TORTURE else RotContract.patience
    left_to_check = ("queue", "lenient", "notes")

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")

    def damage(self, where: Path) -> RottenLogs:
        return RottenLogs(where)


async def test_a_search_in_a_damaged_store_ends(tmp_path: Path) -> None:
    """It raises CorruptRecord: if the messages cannot be read, the index is not rebuilt again and again."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.create(new_session(*(f"word{number} {'x' * 200}" for number in range(200)), id="s"))
    db = apsw.Connection(str(path))
    sql = "SELECT pageno FROM dbstat WHERE name = 'msg' AND pagetype = 'leaf' ORDER BY path LIMIT 1 OFFSET 3"
    (page,) = db.execute(sql).fetchone() or (0,)
    db.close()
    raw = bytearray(path.read_bytes())
    raw[(page - 1) * 4096 : (page - 1) * 4096 + 512] = bytes(512)
    path.write_bytes(raw)
    async with SqliteStore(path) as store, asyncio.timeout(30):
        with pytest.raises(CorruptRecord):
            await store.search("word7")
        with pytest.raises(CorruptRecord):
            await store.find_message("nobody")


async def test_a_session_row_of_zeros_is_damage(tmp_path: Path) -> None:
    """It reads as a session without a claim and without a parent, and both answers would be wrong."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        # A page's first row is at its end: the sector of zeros covers the whole row.
        child = await store.create(new_session("one", id="child", parent_id="parent"))
        await store.claim(child.id, version=child.version, owner="holder")
        forget_claims(store)
    db = apsw.Connection(str(path))
    (page,) = db.execute("SELECT pageno FROM dbstat WHERE name = 'session'").fetchone() or (0,)
    db.close()
    raw = bytearray(path.read_bytes())
    raw[page * PAGE - 512 : page * PAGE] = bytes(512)
    path.write_bytes(raw)
    async with SqliteStore(path) as store:
        for verb in (store.is_claimed, store.is_interrupted, store.line_of):
            with pytest.raises(CorruptRecord):
                await verb("child")


def handles_on(path: Path) -> list[str]:
    open_now = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return [each for each in open_now if each.startswith(str(path))]


def break_page(path: Path, name: str) -> None:
    """Overwrite the first page of a table or an index with zeros."""
    db = apsw.Connection(str(path))
    (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).fetchone() or (0,)
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(bytes(PAGE))


async def test_a_damaged_index_of_heads_does_not_keep_a_store_closed(tmp_path: Path) -> None:
    """Opening looks at the newest head, to tell whether the store is sealed."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("one"))
    break_page(path, "sqlite_autoindex_head_1")
    async with SqliteStore(path) as store:
        assert await store.ids_with_prefix("") == [session.id]
    assert handles_on(path) == []


async def test_an_opening_that_fails_leaves_no_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this process could not open the file again once it is restored."""
    path = tmp_path / "s.db"
    async with SqliteStore(path):
        pass
    sound = path.read_bytes()
    break_page(path, "meta")
    with pytest.raises(CorruptRecord):
        await SqliteStore(path).__aenter__()
    assert handles_on(path) == []
    path.write_bytes(sound)

    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(SqliteEngine, "run", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await SqliteStore(path).__aenter__()
    assert handles_on(path) == []
    async with SqliteStore(path):
        pass


async def test_an_attack_tells_of_a_store_that_stays_closed(tmp_path: Path) -> None:
    """No later round would find anything, and no control would either."""
    is_stuck = False

    @asynccontextmanager
    async def sticking(where: Path) -> AsyncIterator[SqliteStore]:
        nonlocal is_stuck
        if is_stuck:
            raise StoreError("the file is in use")
        is_stuck = True
        async with SqliteStore(where / "s.db") as store:
            is_stuck = False
            yield store

    async with SqliteStore(tmp_path / "s.db") as store:
        await store.create(new_session("one", id="one"))
        question = Question("load one", lambda store: store.load("one"))
        right = await answers_of(store, [question])
    attack = Attack(sticking, tmp_path, RottenFiles(tmp_path, hit="s.db".__eq__), [question], right)
    report = await attack.run(30)
    assert "open, when it was restored" in {each.question for each in report.wrong}


async def test_a_parent_that_rotted_is_not_a_parent(tmp_path: Path) -> None:
    """The session's head says which parent is right."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("one", id="child", parent_id="parent"))
    for damage in ("'parenu'", "NULL"):
        db = apsw.Connection(str(path))
        db.execute(f"UPDATE session SET parent = {damage}")
        db.close()
        async with SqliteStore(path) as store:
            with pytest.raises(CorruptRecord, match="parent"):
                await store.line_of("child")


async def test_a_lease_in_a_row_whose_columns_are_shifted_has_not_lapsed(tmp_path: Path) -> None:
    """One byte gives the width of a column. If it is wrong, the columns behind it are misread, and so is the lease."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("one", id="claimed"))
        await store.claim("claimed", version=session.version, owner="holder")
        forget_claims(store)
    raw = bytearray(path.read_bytes())
    # The types of a row's columns precede its first text, the id. A 7 is a number of eight bytes: there are two times.
    times = re.search(rb"\x07\x07.{1,20}claimed.?active", raw, re.DOTALL)
    assert times is not None
    raw[times.start() + 1] = 5
    path.write_bytes(raw)
    async with SqliteStore(path) as store:
        for verb in (store.is_claimed, store.is_interrupted):
            with pytest.raises(CorruptRecord, match="claim"):
                await verb("claimed")


async def test_rows_that_are_out_of_order_end_a_check(tmp_path: Path) -> None:
    """A row with a smaller number than those before it would lead a check back to them, again and again."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        for number in range(3):
            await store.create(new_session("one", id=f"s{number}"))
    db = apsw.Connection(str(path))
    (page,) = db.execute("SELECT pageno FROM dbstat WHERE name = 'session'").fetchone() or (0,)
    db.close()
    raw = bytearray(path.read_bytes())
    start = (page - 1) * PAGE
    # The third of the page's pointers to its rows. A row begins with its length, in one byte or two, and its number.
    row = start + int.from_bytes(raw[start + 12 : start + 14], "big")
    number = row + 1 if raw[row] < 128 else row + 2
    assert raw[number] == 3
    raw[number] = 1
    path.write_bytes(raw)
    async with SqliteStore(path) as store, asyncio.timeout(30):
        assert "its rows are out of order" in [problem.what for problem in await store.check()]
