"""Remains of erased rows are overwritten and nothing else is, on any page and without a long wait."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import struct
import sys
import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import SessionNotFound
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import scrub as sqlite_scrub
from perdure.stores.sqlite.erasure import Erasure
from perdure.stores.sqlite.schema import exclusively
from perdure.stores.sqlite.scrub import overwrite, remains
from perdure.testing.samples import new_session, say, texts

SIZE = 4096


def pages_of(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return [content[place : place + SIZE] for place in range(0, len(content), SIZE)]


@pytest.mark.parametrize("kind", [2, 5, 10, 13])
def test_a_page_of_text_that_looks_like_a_node_survives(
    tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 2**25 pages, the number at the start of a page of text can look like the mark of a node."""
    monkeypatch.setattr(sqlite_scrub, "_UNCERTAIN", 0)
    path = tmp_path / "large.db"
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE t (body BLOB)")
    db.execute("INSERT INTO t VALUES (?)", (b"x" * 5 * SIZE,))
    db.close()
    number = next(number for number, page in enumerate(pages_of(path)) if page[4:] == b"x" * (SIZE - 4))
    with path.open("r+b") as file:
        file.seek(number * SIZE)
        # A node of one cell, whose unused middle would be all that follows.
        file.write(bytes([kind, 0, 0, 0, 1]) + SIZE.to_bytes(2))
    before = pages_of(path)
    db = apsw.Connection(str(path))
    assert number + 1 not in remains(db, path)
    with exclusively(db):
        overwrite(db, path, range(1, len(before) + 1))
    db.close()
    assert pages_of(path)[number] == before[number]


def test_every_node_is_known(tmp_path: Path) -> None:
    """Tables and indexes of several levels are walked to their last leaf, as SQLite itself knows them."""
    path = tmp_path / "deep.db"
    db = apsw.Connection(str(path))
    for sql in (
        "PRAGMA page_size = 512",
        "PRAGMA secure_delete = 1",
        "CREATE TABLE t (name TEXT PRIMARY KEY, body BLOB)",
    ):
        db.execute(sql).fetchall()
    rows = [(f"{number * 7919 % 5000:07}" * 3, b"x" * (number % 700)) for number in range(5000)]
    with db:
        db.executemany("INSERT INTO t VALUES (?, ?)", rows)
    db.execute("DELETE FROM t WHERE rowid % 5 = 0")
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
    roots = [root for (root,) in db.execute("SELECT rootpage FROM sqlite_schema WHERE rootpage > 0")]
    nodes = sqlite_scrub._Pages(file, db).of_trees([1, *roots])
    first_bytes = path.read_bytes()[::512]
    # In a file as small as this one the first byte tells.
    expected = {number for number, kind in enumerate(first_bytes, 1) if kind in (2, 5, 10, 13)}
    assert nodes == {1, *expected}
    file.xClose()
    db.close()


async def test_an_erasure_reads_what_it_has_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Erasing a small session from a large file reads few of its pages; gc() reads them all, some at a time."""
    read: list[int] = []
    original = sqlite_scrub._Pages._read
    monkeypatch.setattr(
        sqlite_scrub._Pages, "_read", lambda self, number: read.append(number) or original(self, number)
    )
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        for number in range(40):
            await store.create(new_session(*(f"{n} " + "word " * 200 for n in range(100)), id=f"large-{number}"))
        small = await store.create(new_session("a secret"))
    async with SqliteStore(path) as store:
        await store.delete(small.id)
        assert b"a secret" not in path.read_bytes()
        assert len(set(read)) < len(pages_of(path)) / 10
        read.clear()
        await store.gc()
        assert len(set(read)) > len(pages_of(path)) / 2


async def test_others_write_while_a_file_is_scrubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is released between one stretch of the file and the next, so that a save waits for one at most."""
    monkeypatch.setattr("perdure.stores.sqlite.erasure.PAGES_AT_ONCE", 2)
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        for number in range(60):  # enough stretches for a machine on which a save takes long
            await store.create(new_session("word " * 500, id=f"s{number}"))
        session = await other.create(new_session("Hello"))
        cleaning = asyncio.ensure_future(store.gc())
        saves = 0
        while not cleaning.done():
            session = await other.save(say(session, f"{saves}"))
            saves += 1
        await cleaning
        assert saves > 3
        assert texts(await store.load(session.id)) == ["Hello", *map(str, range(saves))]


async def test_nobody_waits_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held to overwrite a few pages that are known to need it; only these are read under it."""
    monkeypatch.setattr("perdure.stores.sqlite.erasure.PAGES_AT_ONCE", 8)
    read, alone = list[str](), list[int]()
    page, overwriting = sqlite_scrub._Pages._read, Erasure.overwrite

    def noted(pages: sqlite_scrub._Pages, number: int) -> bytes:
        read.append(threading.current_thread().name)
        return page(pages, number)

    def counted(erasure: Erasure, db: apsw.Connection) -> bool:
        before = len(read)
        try:
            return overwriting(erasure, db)
        finally:
            alone.append(len(read) - before)

    monkeypatch.setattr(sqlite_scrub._Pages, "_read", noted)
    monkeypatch.setattr(Erasure, "overwrite", counted)
    async with SqliteStore(tmp_path / "sessions.db") as store:
        for number in range(200):
            await store.create(new_session("word " * 100, id=f"{number * 7919 % 1000}-{number}", tags=(f"t{number}",)))
        for verb in (lambda: store.delete("0-0"), store.gc):
            read.clear()
            alone.clear()
            await verb()
            assert 0 < max(alone) <= 8
            assert sum("writer" in name for name in read) == sum(alone)
            assert sum("reader" in name for name in read) > sum(alone)


# Unlike each other from the beginning: of a word that is like its neighbour the search index may keep a beginning.
WORDS = [hashlib.blake2b(bytes([number]), digest_size=8).hexdigest() for number in range(60)]
DOOMED = WORDS[::10]


def traces(where: Path, words: Iterable[str]) -> list[str]:
    """Return the words that any file still has, with its name."""
    contents = {path.name: path.read_bytes() for path in where.iterdir() if path.is_file()}
    return [f"{word} in {name}" for word in words for name, content in contents.items() if word.encode() in content]


async def furnish(path: Path) -> None:
    """Create sessions with words of their own, and leave copies of some, as SQLite does where it moves rows."""
    async with SqliteStore(path) as store:
        for word in WORDS:
            session = await store.create(new_session(f"some words {word}", id=named(word), owner=word, tags=(word,)))
            await store.save(say(session.with_name(word), f"{word} " * 50))
    db = apsw.Connection(str(path))
    pages = db.execute("SELECT max(pageno) FROM dbstat WHERE name GLOB 'session*' AND pagetype = 'leaf' GROUP BY name")
    numbers = [number for (number,) in pages]
    db.close()
    assert len(numbers) > 4
    with path.open("r+b") as file:
        for number, word in zip(numbers, DOOMED * len(numbers), strict=False):
            file.seek((number - 1) * SIZE)
            cells, first = struct.unpack_from(">HH", file.read(SIZE), 3)
            file.seek((number - 1) * SIZE + first - len(word))
            assert first - len(word) > 8 + 2 * cells
            file.write(word.encode())


def named(word: str) -> str:
    return f"{word[:2]}-{word}"


async def test_nothing_is_left_beside_one_who_writes(tmp_path: Path) -> None:
    """Another store saves, tags and creates sessions all the while, so that rows move and pages are written."""
    path, done = tmp_path / "sessions.db", asyncio.Event()
    await furnish(path)
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        await store.search("words")

        async def write() -> int:
            session = await other.create(new_session("Hello", id="talk"))
            for number in count():
                if done.is_set():
                    return number
                session = await other.save(say(session, f"{number}").with_tags([f"t{number % 7}", f"u{number % 5}"]))
                await other.create(new_session("Hello", id=f"{number * 7919 % 1000}-{number}", tags=("t",)))
            raise AssertionError("it is told to end")

        writing = asyncio.ensure_future(write())
        for number, word in enumerate(DOOMED, 1):
            await store.delete(named(word))
            assert traces(tmp_path, DOOMED[:number]) == []
            await store.search("words")
        assert traces(tmp_path, DOOMED) == []
        done.set()
        saved = await writing
        assert saved > 0
        assert texts(await store.load("talk")) == ["Hello", *map(str, range(saved))]
        assert await store.check() == []


DYING = """
import asyncio, os, signal, sys
from perdure.stores.sqlite import SqliteStore, erasure

def dying(original):
    def step(self, *given):
        found = original(self, *given)
        os.kill(os.getpid(), signal.SIGKILL)
        return found
    return step

async def main():
    async with SqliteStore(sys.argv[1]) as store:
        await store.search("words")
        setattr(erasure.Erasure, sys.argv[2], dying(getattr(erasure.Erasure, sys.argv[2])))
        await store.delete(sys.argv[3])

asyncio.run(main())
"""


@pytest.mark.parametrize("step", ["carry_out", "move_ahead", "freeze", "survey", "overwrite"])
async def test_a_killed_erasure_is_finished_by_gc(tmp_path: Path, step: str) -> None:
    """Wherever it was killed, the file opens, each session is whole or gone, and gc leaves nothing of an erased one."""
    path = tmp_path / "sessions.db"
    await furnish(path)
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, str(path), step, named(DOOMED[0]))
    assert await ended.wait() == -signal.SIGKILL
    async with SqliteStore(path) as store:
        if step == "move_ahead":
            await store.delete(named(DOOMED[0]))
        assert not await store.exists(named(DOOMED[0]))
        await store.gc()
        assert traces(tmp_path, DOOMED[:1]) == []
        assert len(await store.search("some words", limit=1000)) == len(WORDS) - 1
        assert await store.check() == []
    assert traces(tmp_path, DOOMED[:1]) == []


async def test_what_an_erasure_could_not_finish_is_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one scrubs the pages of both, though the log that named those of the first has begun again since."""
    path = tmp_path / "sessions.db"
    looked: list[set[int]] = []

    def note(db: Any, path: Path, *, touched: Any, tables: Any) -> list[int]:
        looked.append(set(touched))
        return remains(db, path, touched=touched, tables=tables)

    monkeypatch.setattr("perdure.stores.sqlite.erasure.remains", note)
    await furnish(path)
    async with SqliteStore(path) as store:
        with monkeypatch.context() as failing:
            failing.setattr(Erasure, "freeze", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await store.delete(named(DOOMED[0]))
        left = store._engine.opened.left
        assert left
        session = await store.create(new_session("Hello"))
        for number in range(50):
            session = await store.save(say(session, str(number)))
        with pytest.raises(SessionNotFound):
            await store.delete("nobody")
        assert store._engine.opened.left == left
        await store.delete(named(DOOMED[1]))
        assert looked[-1] > left
        assert store._engine.opened.left == frozenset()
        assert traces(tmp_path, DOOMED[:2]) == []
        with monkeypatch.context() as failing:
            failing.setattr(Erasure, "freeze", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await store.gc()
        assert store._engine.opened.left is None, "any page may have something"
        await store.delete(named(DOOMED[2]))
        assert store._engine.opened.left == frozenset()
