"""Put a store back from a backup, in a place where there is none; and check backups without restoring them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import groupby
from pathlib import Path

import msgspec

from perdure.aio import aside
from perdure.archive.backups.backing_up import told_in_loop
from perdure.archive.backups.catalog import Entry, entries_in, hashes_in
from perdure.archive.backups.deposit import Tell
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.packs import Packs, chunks_in
from perdure.archive.backups.target import Target
from perdure.archive.checking import fsck
from perdure.archive.moving import Progress
from perdure.errors import BackupDamaged, ConfigurationError, InvalidData
from perdure.model.checks import expect, expect_function
from perdure.protocols import Problem, SessionStore
from perdure.stores.copies import Part
from perdure.stores.store import Store
from perdure.stores.urls import store_of

_RESTORE = "Restore another backup with `--at`, or make a new one with `perdure backup`."


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore came to."""

    backup: Backup
    lapsed: int
    """How many runs were under way when the backup was made: `recover` goes on with them."""
    is_verified: bool = False
    problems: tuple[Problem, ...] = ()
    """What the check of the restored store has found, if it was asked for."""


class VerifyReport(msgspec.Struct, frozen=True):
    """What a check of a directory of backups has found."""

    backups: tuple[Backup, ...] = ()
    """Those that are whole: they can be restored."""
    damaged: tuple[tuple[str, str], ...] = ()
    """The ids of the others, each with what is wrong with it."""
    chunks: int = 0
    bytes: int = 0
    problems: tuple[BackupDamaged, ...] = ()
    """Everything that is not what was written, whether or not a backup needs it."""

    @property
    def is_sound(self) -> bool:
        return not self.problems and not self.damaged


async def restore(
    target: str | os.PathLike[str],
    store: str | SessionStore,
    *,
    at: str | datetime | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> RestoreReport:
    """Put a store back from a directory of backups: the newest one, that of an id, or the last before a time.

    `store` is a URL, or a store that is not open, of the same kind as the backup. It must have no sessions:
    StoreNotEmpty otherwise. BackupDamaged if a chunk is not what was written. A restore that was cut short leaves a
    place that raises RestoreUnfinished when it is opened, until the restore is repeated.

    Runs that were under way have lapsed: `recover` goes on with them. With `verify`, the restored store is checked as
    `fsck` does, and its rows are counted. What is wrong is in the report, and the store is there all the same.
    """
    expect(verify, bool, "$.verify")
    if at is not None and not isinstance(at, str | datetime):
        raise InvalidData("$.at", "it is the id of a backup, or a time")
    if isinstance(at, datetime) and at.tzinfo is None:
        raise InvalidData("$.at", "the time needs a time zone")
    if progress is not None:
        expect_function(progress, "$.progress")
    given = store_of(store)
    if not isinstance(given, Store):
        raise ConfigurationError(f"A {type(given).__name__} cannot be restored. Import its sessions instead.")
    given.require_copyable()
    place = Target.at(target)
    with ExitStack() as held:
        await aside(held.enter_context, place.reading())
        backup = await aside(place.chosen, at)
        return await _restored(given, place.packs, backup, verify, told_in_loop(progress))


async def _restored(store: Store, packs: Packs, backup: Backup, verify: bool, tell: Tell) -> RestoreReport:
    if backup.engine != store.kind:
        raise ConfigurationError(
            f"Backup {backup.id} is of a {backup.engine} store, and this is a {store.kind} store. "
            "Restore it into a store of its own kind, then copy that."
        )
    landing = store.landing()
    try:
        await landing.begin()
        await landing.take_in(backup.outline, _parts(packs, backup, tell))
        problems = [
            Problem(None, each, "its checksum did not match when the backup was made", _RESTORE)
            for each in backup.facts.get("unsound", ())
        ]
        async with store.at(landing.engine) as landed:
            lapsed = await landed.lapse_claims()
            if verify:
                problems += [*await _miscounted(landed, backup), *(await fsck(landed)).problems]
        await landing.publish()
    finally:
        await landing.end()
    return RestoreReport(backup, lapsed, verify, tuple(problems))


def _parts(packs: Packs, backup: Backup, tell: Tell) -> Iterator[Part]:
    """Yield the parts of a backup. The chunks of each have to be taken before the next part is."""
    taken = _Taken(packs, max(backup.bytes, 1), tell)
    for name, entries in groupby(entries_in(packs, backup.catalog), key=lambda entry: entry.part):
        yield Part(name, taken.chunks_of(entries))


class _Taken:
    """Counts the bytes that are taken in."""

    def __init__(self, packs: Packs, size: int, tell: Tell) -> None:
        self._packs = packs
        self._size = size
        self._tell = tell
        self._done = 0

    def chunks_of(self, entries: Iterator[Entry]) -> Iterator[bytes]:
        for entry in entries:
            for key in entry.keys:
                chunk = self._packs.read(key)
                yield chunk
                self._done += len(chunk)
            self._tell(self._done, max(self._size, self._done))


async def _miscounted(store: Store, backup: Backup) -> list[Problem]:
    found = []
    for table, expected in backup.counts.items():
        rows = await store.count(table)
        if rows != expected:
            found.append(Problem(None, f"table {table}", f"it has {rows} rows, and the backup {expected}", _RESTORE))
    return found


async def verify_backups(target: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check every chunk and manifest in a directory of backups, and say which of them are whole. Nothing is changed."""
    if progress is not None:
        expect_function(progress, "$.progress")
    place = Target.at(target)
    return await aside(_verified, place, told_in_loop(progress))


def _verified(place: Target, tell: Tell) -> VerifyReport:
    with place.reading():
        sound, size, problems = _sound_chunks(place.packs, tell)
        whole: list[Backup] = []
        damaged: list[tuple[str, str]] = []
        for each in place.looked_through():
            if isinstance(each, BackupDamaged):
                problems.append(each)
                damaged.append((Path(each.path).stem, each.reason))
                continue
            missing = _missing(place.packs, each, sound)
            if missing is None:
                whole.append(each)
            else:
                damaged.append((each.id, missing))
        return VerifyReport(tuple(whole), tuple(damaged), len(sound), size, tuple(problems))


def _sound_chunks(packs: Packs, tell: Tell) -> tuple[set[bytes], int, list[BackupDamaged]]:
    """Read all chunks. Return the hashes of those that are sound, their bytes, and what is wrong with others."""
    sound: set[bytes] = set()
    problems = [*packs.damaged]
    broken = {each.path for each in packs.damaged}
    size, total = 0, sum(path.stat().st_size for path in packs.paths())
    for path in packs.paths():
        if str(path) in broken:
            continue
        for key, at in chunks_in(path):
            try:
                packs.read_at(key, at)
                sound.add(key)
            except BackupDamaged as error:
                problems.append(error)
            size += at.size
        tell(size, max(total, size))
    return sound, size, problems


def _missing(packs: Packs, backup: Backup, sound: set[bytes]) -> str | None:
    """Say what a backup lacks; None if it is whole."""
    catalog = [bytes.fromhex(each) for each in backup.catalog]
    lacking = [key for key in catalog if key not in sound] or [
        key for key in hashes_in(packs, backup.catalog) if key not in sound
    ]
    if not lacking:
        return None
    others = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
    return f"chunk {lacking[0].hex()}{others} missing or damaged"
