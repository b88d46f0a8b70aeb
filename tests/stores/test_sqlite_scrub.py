"""Remains of erased rows are overwritten, and nothing else is: whatever a page looks like, and without a long wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import scrub as sqlite_scrub
from perdure.stores.sqlite.schema import exclusively
from perdure.stores.sqlite.scrub import scrub
from perdure.testing.samples import new_session, say, texts

SIZE = 4096


def pages_of(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return [content[place : place + SIZE] for place in range(0, len(content), SIZE)]


@pytest.mark.parametrize("kind", [2, 5, 10, 13])
def test_a_page_of_text_that_looks_like_a_node_survives(tmp_path: Path, kind: int) -> None:
    """Beyond 2**25 pages the number that a page of text begins with can begin with the mark of a node."""
    path = tmp_path / "large.db"
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE t (body BLOB)")
    db.execute("INSERT INTO t VALUES (?)", (b"x" * 5 * SIZE,))
    db.close()
    number = next(number for number, page in enumerate(pages_of(path)) if page[4:] == b"x" * (SIZE - 4))
    with path.open("r+b") as file:
        file.seek(number * SIZE)
        file.write(bytes([kind]))
    before = pages_of(path)
    db = apsw.Connection(str(path))
    with exclusively(db):
        scrub(db, path, touched=range(1, len(before) + 1))
    db.close()
    assert pages_of(path) == before


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
    nodes = sqlite_scrub._Pages(file, 512).walk([1, *roots])
    first_bytes = path.read_bytes()[::512]
    # In a file as small as this one the first byte tells.
    expected = {number for number, kind in enumerate(first_bytes, 1) if kind in (2, 5, 10, 13)}
    assert {number for number, mark in enumerate(nodes) if mark} == {1, *expected}
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
    """The lock is let go between one stretch of the file and the next, so that a save waits for one at most."""
    monkeypatch.setattr(sqlite_scrub, "PAGES_AT_ONCE", 4)
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        for number in range(20):
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
