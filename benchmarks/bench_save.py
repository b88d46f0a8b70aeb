"""A save in a SQLite file: beside the bare transaction, in pages and bytes, and with a long history."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import msgspec

from benchmarks.harness import Run, interleaved, ms
from benchmarks.setting import (
    AGENT,
    BareFile,
    Saver,
    checkpoint,
    filled,
    json_size,
    make_steady,
    settled_size,
    turn,
    wal_frames,
)
from perdure import SessionRuntime, SqliteStore

COMMITS = 200


class BareTransaction:
    """The same rows on the same tables in one transaction, in a thread of its own: the least code that saves a turn."""

    def __init__(self, path: Path, session_id: str) -> None:
        self._file = BareFile(path)
        self.close = self._file.close
        self._id = session_id
        (self._head,) = self._file.last("head", 1)

    async def __call__(self) -> None:
        rows = [msgspec.json.encode(message) for message in turn()]
        await self._file.run(self._write, rows)

    def _write(self, rows: list[bytes]) -> None:
        db = self._file.db
        db.execute("BEGIN IMMEDIATE")
        update = (
            "UPDATE session SET version = version + 1, updated = ?, msg_end = msg_end + ?"
            " WHERE id = ? RETURNING sid, log, version, msg_end"
        )
        sid, log, version, end = db.execute(update, (time.time(), len(rows), self._id)).fetchone()  # type: ignore[misc]
        numbered = [(log, end - len(rows) + place, zlib.crc32(row), row) for place, row in enumerate(rows)]
        db.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", numbered)
        self._file.add_head(sid, version, self._head)
        db.execute("COMMIT")


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await beside_bare(run, folder)
    with run.folder() as folder:
        await with_history(run, folder)
    with run.folder() as folder:
        await on_disk(run, folder)


async def beside_bare(run: Run, folder: Path) -> None:
    """Compare with the bare transaction, in files of their own: a connection reads again what another has written."""
    ours, theirs, third = folder / "ours.db", folder / "bare.db", folder / "in_loop.db"
    in_loop = SqliteStore(third, commit_in_loop=True)
    async with SqliteStore(ours) as store, SqliteStore(theirs) as idle, in_loop:
        stores = {store: ours, idle: theirs, in_loop: third}
        saver, other, in_place = [Saver(each, await SessionRuntime(each).create(AGENT)) for each in stores]
        await other()
        bare = BareTransaction(theirs, other.session.id)
        for each, path in stores.items():
            await make_steady(each, path)
        save, here, floor = await interleaved(saver, in_place, bare, rounds=400, warm_up=50)
        for key, side in (("save.bare", save), ("save.in_loop", here)):
            cpu = f"processor {ms(side.cpu)} / {ms(floor.cpu)}, {side.cpu / floor.cpu:.2f}×"
            run.report(key, side.wall / floor.wall, f"{ms(side.wall)} / {ms(floor.wall)}; {cpu}")
        pages, least = [await pages_of(side, path) for side, path in ((saver, ours), (bare, theirs))]
        run.report("save.wal", pages, f"mean of {COMMITS} commits; the bare transaction {least:.2f}")
        bare.close()


async def pages_of(save: Saver | BareTransaction, path: Path) -> float:
    """Return the mean number of pages that a save writes to the log."""
    await save()
    pages, before = 0, wal_frames(path)
    for _ in range(COMMITS):
        await save()
        after = wal_frames(path)
        pages += after - before if after > before else after  # the log has begun again from its start
        before = after
    return pages / COMMITS


async def with_history(run: Run, folder: Path) -> None:
    async with SqliteStore(folder / "bench.db") as store:
        runtime = SessionRuntime(store)
        savers = [Saver(store, await filled(runtime, count)) for count in (0, 10_000, 100_000)]
        checkpoint(folder / "bench.db")
        empty, some, many = await interleaved(*savers, rounds=200)
    run.report("save.10k", some.wall / empty.wall, f"{ms(some.wall)} / {ms(empty.wall)}")
    run.report("save.100k", many.wall / empty.wall, f"{ms(many.wall)} / {ms(empty.wall)}")


async def on_disk(run: Run, folder: Path) -> None:
    path = folder / "bench.db"
    async with SqliteStore(path) as store:
        saver = Saver(store, await SessionRuntime(store).create(AGENT))
        await saver()
        before = settled_size(path)
        for _ in range(500):
            await saver()
        grown = (settled_size(path) - before) / 500
    size = json_size(turn())
    run.report("save.bytes", grown / size, f"{grown:,.0f} / {size:,} bytes")
