"""Restoring a store from a backup, in a place without sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import groupby

import msgspec

from perdure.aio import aside
from perdure.archive.backups.backing_up import told_in_loop
from perdure.archive.backups.catalog import Entry, entries_in
from perdure.archive.backups.deposit import Tell
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.packs import Packs
from perdure.archive.backups.target import Target
from perdure.archive.checking import fsck
from perdure.archive.moving import Progress
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.checks import expect, expect_function
from perdure.protocols import Problem, SessionStore
from perdure.stores.copies import Part
from perdure.stores.redacting import without_redactors
from perdure.stores.store import Store
from perdure.stores.urls import store_of

_RESTORE = "Restore another backup with `--at`, or make a new one with `perdure backup`."


class RestoreReport(msgspec.Struct, frozen=True):
    """The result of a restore."""

    backup: Backup
    """The backup that was restored."""
    lapsed: int
    """The number of runs that were under way when the backup was made. `recover` continues them."""
    is_verified: bool = False
    """True if the restored store was checked."""
    problems: tuple[Problem, ...] = ()
    """The problems of the restored store, if it was checked, and rows that were damaged before the backup."""


async def restore(
    target: str | os.PathLike[str],
    store: str | SessionStore,
    *,
    at: str | datetime | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> RestoreReport:
    """Restore a store from a directory of backups, the `target`.

    `at` is the id of a backup, or a time: then it is the last backup before that. Without it, it is the newest. `store`
    is a URL, or a store that is not open, of the same kind as the backup. Raise StoreNotEmpty if it has sessions, and
    BackupDamaged if a chunk is damaged. An interrupted restore leaves a place that raises RestoreUnfinished when it is
    opened, until the restore is repeated.

    Runs that were under way have lapsed: `recover` continues them. With `verify`, the restored store is checked as by
    `fsck`, and its rows are counted. The report says what is wrong, and the store is restored all the same. `progress`
    is called with the bytes done and the bytes of all.
    """
    expect(verify, bool, "$.verify")
    if at is not None and not isinstance(at, str | datetime):
        raise InvalidData("$.at", "it is the id of a backup, or a time")
    if isinstance(at, datetime) and at.tzinfo is None:
        raise InvalidData("$.at", "the time needs a time zone")
    if progress is not None:
        expect_function(progress, "$.progress")
    given = without_redactors(store_of(store))
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
        # Last: until then opening the place raises RestoreUnfinished.
        await landing.publish()
    finally:
        await landing.end()
    return RestoreReport(backup, lapsed, verify, tuple(problems))


def _parts(packs: Packs, backup: Backup, tell: Tell) -> Iterator[Part]:
    """Yield the parts of a backup. The chunks of a part have to be taken before the next part."""
    taken = _Taken(packs, max(backup.bytes, 1), tell)
    for name, entries in groupby(entries_in(packs, backup.catalog), key=lambda entry: entry.part):
        yield Part(name, taken.chunks_of(entries))


class _Taken:
    """A count of the bytes that are taken in."""

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
