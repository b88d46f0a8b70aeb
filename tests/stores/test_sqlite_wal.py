"""The write-ahead log: a torn end is ignored, and damage before its end is never taken for one."""

from __future__ import annotations

import asyncio
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from perdure.errors import CorruptRecord
from perdure.stores.sqlite import SqliteStore, worker
from perdure.testing.samples import new_session, say

VERSIONS = 12
FRAME = 24 + 4096


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a process that was killed after a dozen saves, each a commit of its own."""
    where = tmp_path_factory.mktemp("original")

    async def main() -> None:
        async with SqliteStore(where / "open" / "s.db") as store:
            session = await store.create(new_session("Hello", id="s"))
            while session.version < VERSIONS:
                session = await store.save(say(session, f"{session.version}", "x" * 3000))
            (where / "killed").mkdir()
            for name in ("s.db", "s.db-wal"):
                shutil.copy(where / "open" / name, where / "killed" / name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "IDLE_SECONDS", 600.0)
        asyncio.run(main())
    return where / "killed"


def copied(original: Path, tmp_path: Path, change: Callable[[bytearray], object]) -> Path:
    """Copy the files, with another log."""
    where = tmp_path / "copy"
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(original, where)
    log = bytearray((where / "s.db-wal").read_bytes())
    change(log)
    (where / "s.db-wal").write_bytes(log)
    return where / "s.db"


def commits(log: bytes) -> list[int]:
    """Return the numbers of the frames that end a commit, from 0."""
    heads = [struct.unpack_from(">2I", log, place) for place in range(32, len(log), FRAME)]
    return [number for number, (_, commit) in enumerate(heads) if commit]


async def version_in(path: Path) -> int:
    async with SqliteStore(path) as store:
        session = await store.load("s")
        return 0 if session is None else session.version


async def test_a_flipped_bit_takes_back_nothing_that_was_committed_later(original: Path, tmp_path: Path) -> None:
    """Before the last commit, opening is refused and no file is changed; in the last commit, that one is lost."""
    rng = random.Random(3)
    log = (original / "s.db-wal").read_bytes()
    last = 32 + (commits(log)[-2] + 1) * FRAME
    heads = [*range(56), *range(last - FRAME, last - FRAME + 24)]
    for place in (*heads, *(rng.randrange(56, last) for _ in range(60))):
        path = copied(original, tmp_path, partial(_flip, place, rng.randrange(8)))
        before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
        with pytest.raises(CorruptRecord, match=r"s\.db-wal is damaged"):
            await version_in(path)
        after = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.name in before}
        assert after == before, place
    path = copied(original, tmp_path, partial(_flip, last + 40, 0))
    assert await version_in(path) == VERSIONS - 1


async def test_a_torn_end_is_no_damage(original: Path, tmp_path: Path) -> None:
    """The log may be cut anywhere, or the last commit's frames written in any order: earlier commits are there."""
    rng = random.Random(5)
    log = (original / "s.db-wal").read_bytes()
    ends = commits(log)
    for _ in range(12):
        cut = rng.randrange(32, len(log))
        whole = sum(32 + (end + 1) * FRAME <= cut for end in ends)
        path = copied(original, tmp_path, partial(_cut, cut))
        assert await version_in(path) == max(0, whole - len(ends) + VERSIONS)
    first, final = ends[-2] + 1, ends[-1]
    assert final - first >= 2
    for lost in range(first, final):  # the commit's last frame reached the disk, and this one did not
        start = 32 + lost * FRAME
        for junk in (bytes(FRAME), log[start : start + 24] + bytes(4096)):
            path = copied(original, tmp_path, partial(_put, start, junk))
            assert await version_in(path) == VERSIONS - 1


async def test_a_log_of_zeros_is_no_damage(original: Path, tmp_path: Path) -> None:
    """A power cut may leave a log of the right size with zeros alone: what is in the database file is there."""
    path = copied(original, tmp_path, lambda log: _put(0, bytes(len(log)), log))
    assert await version_in(path) < VERSIONS


def _flip(place: int, bit: int, log: bytearray) -> None:
    log[place] ^= 1 << bit


def _cut(end: int, log: bytearray) -> None:
    del log[end:]


def _put(start: int, content: bytes, log: bytearray) -> None:
    log[start : start + len(content)] = content


async def test_frames_from_before_the_log_was_begun_again_are_no_damage(tmp_path: Path) -> None:
    """Frames of earlier rounds, sound in themselves, follow the last frame."""
    path = tmp_path / "open" / "s.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello", id="s"))
        for _ in range(6):
            session = await store.save(say(session, "x" * 3000))
        await store._engine.opened.writer.run(
            lambda db: db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall(), alone=True
        )
        session = await store.save(say(session, "after"))
        shutil.copytree(path.parent, tmp_path / "killed")
    assert await version_in(tmp_path / "killed" / "s.db") == session.version
