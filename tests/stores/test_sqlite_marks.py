"""The mark beside a SQLite file: an acknowledged commit that is missing in the log is noticed, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest
from tests.stores.files import ENVIRONMENT, TORTURE

from perdure.errors import CorruptRecord, StoreError
from perdure.stores.sqlite import SqliteStore, marks, wal, worker
from perdure.stores.sqlite.lost import accept_lost_commits
from perdure.stores.sqlite.marks import Mark, Marker, log_path, mark_path, read_mark
from perdure.testing.outcomes import Outcome, note
from perdure.testing.samples import new_session, say

FRAME = 24 + 4096
VERSIONS = 6
FILES = ("s.db", "s.db-wal", "s.db-mark")


class Snapshot(NamedTuple):
    """The files of a store at a moment, and the version that was acknowledged by then."""

    files: dict[str, bytes]
    changed: int
    version: int


def taken(path: Path, version: int) -> Snapshot:
    files = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.name in FILES}
    return Snapshot(files, path.stat().st_mtime_ns, version)


def put(where: Path, snapshot: Snapshot, **changed: bytes | None) -> Path:
    """Write the files of a snapshot, with some of them changed or left out."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    for name, content in {
        **snapshot.files,
        **{f"s.db{key and '-' + key}": raw for key, raw in changed.items()},
    }.items():
        if content is not None:
            (where / name).write_bytes(content)
    os.utime(where / "s.db", ns=(snapshot.changed, snapshot.changed))
    return where / "s.db"


async def version_in(path: Path) -> int:
    async with SqliteStore(path) as store:
        session = await store.load("s")
        return 0 if session is None else session.version


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Return the files of a process that was killed after some saves, each a commit of its own."""
    path = tmp_path_factory.mktemp("killed") / "s.db"

    async def main() -> Snapshot:
        async with SqliteStore(path) as store:
            session = await store.create(new_session("Hello", id="s"))
            await _emptied(store)
            while session.version < VERSIONS:
                session = await store.save(say(session, f"{session.version}", "x" * 3000))
            return taken(path, session.version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "IDLE_SECONDS", 600.0)
        return asyncio.run(main())


async def _emptied(store: SqliteStore, mode: str = "TRUNCATE") -> None:
    def empty(db: apsw.Connection) -> None:
        db.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    await store._engine.opened.writer.run(empty, alone=True)


def flipped(raw: bytes, place: int, bit: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]


def places_in_last_commit(log: bytes, rng: random.Random) -> list[int]:
    """Return every byte of the header and of the last commit's frame heads, and some of its pages."""
    count = (len(log) - 32) // FRAME
    starts = [32 + number * FRAME for number in range(count)]
    ends = [number for number, start in enumerate(starts) if any(log[start + 4 : start + 8])]
    first = ends[-2] + 1
    heads = [place for number in range(first, count) for place in range(starts[number], starts[number] + 24)]
    inside = [rng.randrange(starts[first], len(log)) for _ in range(2_000 if TORTURE else 40)]
    return [*range(32), *(heads if TORTURE else rng.sample(heads, 40)), *inside]


async def test_a_flipped_bit_in_the_last_commit_is_noticed(killed: Snapshot, tmp_path: Path) -> None:
    """Opening is refused and no file changed, whether the bit is in a page, a frame's head or the log's header."""
    rng, log = random.Random(7), killed.files["s.db-wal"]
    places, failures, unmarked = places_in_last_commit(log, rng), 0, 0
    for place in places:
        damaged = flipped(log, place, rng.randrange(8))
        path = put(tmp_path / "copy", killed, wal=damaged)
        before = {name: (path.parent / name).read_bytes() for name in FILES}
        with suppress(CorruptRecord):
            await version_in(path)
            failures += 1
        assert {name: (path.parent / name).read_bytes() for name in FILES} == before, place
        if place % 8 == 0:  # without the mark the last commit is lost
            path = put(tmp_path / "copy", killed, wal=damaged, mark=None)
            with suppress(CorruptRecord):
                unmarked += await version_in(path) < killed.version
    assert failures == 0
    assert unmarked > 3
    note(
        Outcome(
            attack="flipped bit in the last commit of the log",
            store="SQLite",
            rounds=len(places),
            failures=failures,
            control="no mark",
            control_rounds=sum(place % 8 == 0 for place in places),
            control_failures=unmarked,
        )
    )


@pytest.mark.parametrize(
    "cut",
    [
        lambda log: log[:-1],
        lambda log: log[: len(log) // 2],
        lambda log: log[: 32 + FRAME],
        lambda log: log[:32],
        lambda log: log[:7],
        lambda log: b"",
        lambda log: None,
        lambda log: bytes(512) + log[512:],
        lambda log: log[:-512] + bytes(512),
        lambda log: bytes(len(log)),
    ],
)
async def test_a_log_that_was_cut_is_noticed(
    killed: Snapshot, tmp_path: Path, cut: Callable[[bytes], bytes | None]
) -> None:
    """A log that was shortened, emptied, removed or partly zeroed lacks an acknowledged commit."""
    path = put(tmp_path / "copy", killed, wal=cut(killed.files["s.db-wal"]))
    with pytest.raises(CorruptRecord, match=r"s\.db-wal is damaged.*perdure fsck --accept-lost-commits"):
        await version_in(path)


async def test_a_loss_can_be_accepted(killed: Snapshot, tmp_path: Path) -> None:
    """The log is kept beside the file, what SQLite can read stays, and the store works again."""
    log = killed.files["s.db-wal"]
    for damaged, version in (
        (flipped(log, len(log) - 9, 0), VERSIONS - 1),
        (flipped(log, 40 + 2 * FRAME, 0), 1),
        (flipped(log, 3, 0), 1),
        (b"", 1),
        (None, 1),
    ):
        path = put(tmp_path / "copy", killed, wal=damaged)
        kept = accept_lost_commits(path)
        if not damaged:
            assert kept is None
        else:
            assert kept is not None
            assert (kept.name, kept.read_bytes(), kept.stat().st_mode & 0o777) == ("s.db-wal-lost-1", damaged, 0o600)
        assert await version_in(path) == version
        async with SqliteStore(path) as store:
            session = await store.load("s")
            assert session is not None
            await store.save(say(session, "on"))
        assert await version_in(path) == version + 1
        assert accept_lost_commits(path) is None


async def test_nothing_is_given_up_that_is_there_or_in_use(killed: Snapshot, tmp_path: Path) -> None:
    """A sound log stays as it is, and a file that another process has open is not touched."""
    path = put(tmp_path / "copy", killed)
    assert accept_lost_commits(path) is None
    assert await version_in(path) == VERSIONS
    with pytest.raises(StoreError, match="is not there"):
        accept_lost_commits(tmp_path / "nothing.db")
    path = put(tmp_path / "copy", killed, wal=killed.files["s.db-wal"][:-1])
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM session").fetchall()
    with pytest.raises(StoreError, match="Another process uses"):
        accept_lost_commits(path)
    reader.close()


async def test_a_log_that_could_not_be_emptied_is_opened(killed: Snapshot, tmp_path: Path) -> None:
    """SQLite has begun the log again in the shared index, and was stopped before it emptied the file.

    The database file has all of it. Only if the log is damaged as well, nobody can tell.
    """
    path = put(tmp_path / "copy", killed)
    async with SqliteStore(path) as store:
        await _emptied(store)
        log_path(path).write_bytes(flipped(killed.files["s.db-wal"], 40 + 2 * FRAME, 0))
        with pytest.raises(CorruptRecord):
            await version_in(path)
        log_path(path).write_bytes(killed.files["s.db-wal"])
        assert await version_in(path) == VERSIONS


async def test_files_without_their_mark_are_opened(killed: Snapshot, tmp_path: Path) -> None:
    """A copy of the file and its log, or a file with a damaged or strange mark, opens as before."""
    mark = killed.files["s.db-mark"]
    for other in (None, b"", mark[:-1], mark + b"x", bytes(len(mark)), flipped(mark, 9, 3), b"somebody else's"):
        path = put(tmp_path / "copy", killed, mark=other)
        assert await version_in(path) == VERSIONS
    path = put(tmp_path / "copy", killed, wal=None, mark=None)
    assert await version_in(path) == 1


async def test_a_mark_is_for_its_owner_and_no_link(tmp_path: Path) -> None:
    """A link in its place is not followed, and a save does not fail because of it."""
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "s.db-mark").symlink_to(tmp_path / "target")
    async with SqliteStore(tmp_path / "s.db") as store:
        await store.create(new_session("Hello", id="s"))
    assert (tmp_path / "target").read_bytes() == b"mine"
    assert await version_in(tmp_path / "s.db") == 1


async def test_a_backup_that_is_put_back_is_opened(killed: Snapshot, tmp_path: Path) -> None:
    """An older file over a newer one, whose mark is still there, is a restored backup and no damage."""
    path = put(tmp_path / "copy", killed)
    async with SqliteStore(path) as store:  # its log begins again with other salts
        old = await store.load("s")
        assert old is not None
        backup = tmp_path / "backup.db"
        apsw.Connection(str(path)).execute("VACUUM INTO ?", (str(backup),))
        await store.save(say(old, "newer"))
    for name in ("s.db-wal", "s.db-shm"):
        (path.parent / name).unlink(missing_ok=True)
    shutil.copyfile(backup, path)
    assert await version_in(path) == VERSIONS


Step = Callable[[SqliteStore, random.Random], object]


async def _story(path: Path, rng: random.Random, steps: int) -> list[Snapshot]:
    """Tell what may happen to a file: saves, checkpoints, erasures, a vacuum, older releases, new beginnings."""
    found: list[Snapshot] = []
    is_marked = Marker.set

    def unmarked(self: Marker, frames: int) -> None:
        """Commit as a release without marks does."""

    version = 0
    while len(found) < steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Marker, "set", is_marked if rng.random() < 0.7 else unmarked)
            async with SqliteStore(path, commit_in_loop=rng.random() < 0.3) as store:
                for _ in range(rng.randrange(1, 9)):
                    session = await store.load("s")
                    if session is None:
                        session = await store.create(new_session("Hello", id="s"))
                    chance = rng.random()
                    if chance < 0.55:
                        said = ["x" * rng.randrange(9_000) for _ in range(rng.randrange(1, 4))]
                        session = await store.save(say(session, *said))
                    elif chance < 0.8:
                        await _emptied(store, rng.choice(["PASSIVE", "FULL", "RESTART", "TRUNCATE"]))
                    elif chance < 0.9:
                        await store.create(new_session("gone", "y" * rng.randrange(30_000), id="gone"))
                        found.append(taken(path, session.version))
                        await store.delete("gone")
                    else:
                        db = apsw.Connection(str(path))
                        db.set_busy_timeout(5_000)
                        db.execute("VACUUM")
                        db.close()
                    version = session.version
                    found.append(taken(path, version))
        found.append(taken(path, version))
    return found


async def test_a_power_cut_is_never_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark may be older than the log, the log torn at its end, the file's time old: every save is there."""
    rng = random.Random(23)
    monkeypatch.setattr(worker, "IDLE_SECONDS", 600.0)
    steps, rounds = (60, 600) if TORTURE else (24, 40)
    story = await _story(tmp_path / "story" / "s.db", rng, steps)
    monkeypatch.setattr(wal, "number_of_boot", lambda: 1)  # the machine has started again
    for _ in range(rounds):
        at = rng.randrange(len(story))
        older = story[rng.randrange(at + 1)]
        now = story[at]._replace(changed=rng.choice([story[at].changed, older.changed]))
        log = now.files.get("s.db-wal")
        if log is not None and rng.random() < 0.5:  # frames that were written and not synced
            torn = rng.choice([bytes(FRAME), rng.randbytes(rng.randrange(3 * FRAME)), b""])
            log += torn
        path = put(tmp_path / "cut", now, mark=older.files.get("s.db-mark"), wal=log)
        assert await version_in(path) == now.version
    note(Outcome(attack="power cut beside an older mark", store="SQLite", rounds=rounds, failures=0))


async def test_a_killed_process_is_never_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves a mark, at any point of the same story, within one start of the machine."""
    rng = random.Random(29)
    monkeypatch.setattr(worker, "IDLE_SECONDS", 600.0)
    story = await _story(tmp_path / "story" / "s.db", rng, 60 if TORTURE else 20)
    for snapshot in story:
        path = put(tmp_path / "killed", snapshot)
        assert await version_in(path) == snapshot.version


WRITER = """
import asyncio, sys
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, say

async def main():
    async with SqliteStore(sys.argv[1], commit_in_loop=sys.argv[2] == "1") as store:
        session = await store.load("s") or await store.create(new_session("Hello", id="s"))
        print(session.version, flush=True)
        while True:
            session = await store.save(say(session, "x" * 2000))
            print(session.version, flush=True)

asyncio.run(main())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_loop", ["0", "1"])
def test_a_writer_that_is_killed_loses_nothing(tmp_path: Path, in_loop: str) -> None:
    """After SIGKILL at any moment, round after round, what it has acknowledged is there, and nothing is in the way."""
    path, rng = tmp_path / "s.db", random.Random(31)
    rounds = 150 if TORTURE else 2
    for _ in range(rounds):
        command = [sys.executable, "-c", WRITER, str(path), in_loop]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randrange(1, 30))]
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].splitlines()
        acknowledged = max(int(line) for line in (*lines, *rest) if line.strip().isdigit())
        assert asyncio.run(version_in(path)) >= acknowledged
    note(Outcome(attack="killed writer beside its mark", store="SQLite", rounds=rounds, failures=0))


def test_a_mark_is_read_as_it_was_written() -> None:
    """A mark with a single flipped bit is not read at all."""
    mark = Mark(106, 80, 80, (1, 2), (3, 4), (5, 6), 7, 1_795_019_968_970_680_843, 282_624)
    raw = mark.encoded()
    assert Mark.of(raw) == mark
    assert all(Mark.of(flipped(raw, place, bit)) is None for place in range(len(raw)) for bit in range(8))


async def test_every_commit_is_marked(tmp_path: Path) -> None:
    """The writer's thread, an event loop and an erasure all mark their commits; the mark names the newest commit."""
    path = tmp_path / "s.db"
    for in_loop in (False, True):
        async with SqliteStore(path, commit_in_loop=in_loop) as store:
            for number in range(3):
                before = read_mark(path)
                await store.create(new_session("Hello", id=f"s{number}"))
                assert read_mark(path) not in (None, before)
            before = read_mark(path)
            await store.delete("s0")
            assert read_mark(path) not in (None, before)
            for number in (1, 2):
                await store.delete(f"s{number}")
            mark, log = read_mark(path), log_path(path).read_bytes()
            assert mark is not None
            assert log[32 + (mark.frame - 1) * FRAME :][:24] == marks.FRAME.pack(
                mark.page, mark.commits, *mark.salts, *mark.sum
            )


async def test_a_save_is_kept_though_its_mark_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save succeeds even if the disk is full for its mark."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(marks.os, "pwrite", full)
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        await store.save(say(await store.create(new_session("Hello", id="s")), "more"))
    assert mark_path(path).read_bytes() == b""
    assert await version_in(path) == 2
