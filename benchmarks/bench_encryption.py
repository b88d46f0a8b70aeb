"""A store with keys beside the same store without: saves, cold loads, and bytes on disk."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.harness import Run, interleaved, ms
from benchmarks.setting import Saver, filled, make_steady, settled_size
from perdure import FileKeyRing, SessionRuntime, SqliteStore

_TURNS = 300
_LONG = 100


async def measure(run: Run) -> None:
    with run.folder() as folder:
        ring = FileKeyRing(folder / "keys.json", master=os.urandom(32), create=True)
        paths = folder / "plain.db", folder / "sealed.db"
        async with SqliteStore(paths[0]) as without, SqliteStore(paths[1], keys=ring) as with_keys:
            stores = without, with_keys
            for store, path in zip(stores, paths, strict=True):
                await make_steady(store, path)
            savers = [Saver(store, await filled(SessionRuntime(store), 12)) for store in stores]
            plain, sealed = await interleaved(*savers, rounds=_TURNS)
            run.report("encryption.save", sealed.wall / plain.wall, f"{ms(sealed.wall)} / {ms(plain.wall)}")
            run.report("encryption.save_processor", sealed.cpu / plain.cpu, f"{ms(sealed.cpu)} / {ms(plain.cpu)}")
            grown = [await _grown(saver, path) for saver, path in zip(savers, paths, strict=True)]
            run.report("encryption.bytes", grown[1] / grown[0], f"{grown[1]:,.0f} / {grown[0]:,.0f} bytes")
            long = [(await filled(SessionRuntime(store), _LONG)).id for store in stores]
        async with SqliteStore(paths[0], cache=0) as without, SqliteStore(paths[1], cache=0, keys=ring) as with_keys:
            loads = (lambda: without.load(long[0]), lambda: with_keys.load(long[1]))
            plain, sealed = await interleaved(*loads, rounds=_TURNS)
            run.report("encryption.load", sealed.cpu / plain.cpu, f"{ms(sealed.cpu)} / {ms(plain.cpu)} of processor")


async def _grown(saver: Saver, path: Path) -> float:
    """Return the bytes that a turn adds to a file."""
    before = settled_size(path)
    for _ in range(_TURNS):
        await saver()
    return (settled_size(path) - before) / _TURNS
