"""Backups of a store that is in use. Each has one state of the whole store, and only new data is written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import msgspec

from perdure.aio import aside
from perdure.archive.backups import manifest
from perdure.archive.backups.deposit import Packing, Stopped, Tell
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.target import Target
from perdure.archive.moving import Progress
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.model.checks import expect, expect_function
from perdure.model.ids import now
from perdure.protocols import SessionStore
from perdure.stores.redacting import without_redactors
from perdure.stores.store import Store


class BackupReport(msgspec.Struct, frozen=True):
    """The result of a backup."""

    backup: Backup
    """The backup that was added."""
    removed: tuple[str, ...] = ()
    """The ids of older backups that were removed, because of `keep`."""
    freed: int = 0
    """The bytes that their removal has freed."""


async def backup(
    store: SessionStore,
    target: str | os.PathLike[str],
    *,
    keep: int | None = None,
    full: bool = False,
    gentle: bool = True,
    progress: Progress | None = None,
) -> BackupReport:
    """Add a backup of an open `store` to a directory, the `target`, while others read and write.

    All tables are of one state. Only chunks that the directory lacks are written; `full` writes all of them again. If
    it is killed at any instant, earlier backups stay whole, and the next backup clears up. `keep` is the number of
    backups of this store to keep; older ones are removed. A `gentle` backup pauses now and then, so that others in this
    process have their turn. If it is alone in its process, it is quicker without. `progress` is called with the bytes
    done and the bytes of all.

    Raise ConfigurationError for a store in memory, and StoreError if the directory cannot be written to.
    """
    kept = _checked_keep(keep)
    expect(full, bool, "$.full")
    expect(gentle, bool, "$.gentle")
    if progress is not None:
        expect_function(progress, "$.progress")
    store = without_redactors(store)
    if not isinstance(store, Store):
        raise ConfigurationError(f"A {type(store).__name__} cannot be backed up. Export its sessions instead.")
    store.require_copyable()
    place = Target.at(target)
    making = _Making(store, place, kept, progress, full=full, gentle=gentle)
    work = asyncio.ensure_future(making.run())
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread is writing. It stops at its next chunk, and is waited for, since it holds the directory's lock.
        making.stop()
        with suppress(PerdureError, Stopped, asyncio.CancelledError):
            await work
        raise


def _checked_keep(keep: int | None) -> int | None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise InvalidData("$.keep", "it is how many backups to keep: a number from 1 on")
    return keep


class _Making:
    """A backup that is being made."""

    def __init__(
        self,
        store: Store,
        target: Target,
        keep: int | None,
        progress: Progress | None,
        *,
        full: bool,
        gentle: bool,
    ) -> None:
        self._is_gentle = gentle
        self._store = store
        self._target = target
        self._keep = keep
        self._full = full
        self._tell = told_in_loop(progress)
        self._packing: Packing | None = None
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        if self._packing is not None:
            self._packing.is_stopped = True

    async def run(self) -> BackupReport:
        with ExitStack() as held:
            await aside(held.enter_context, self._target.writing())
            return await aside(self._cleared_up, await self._made())

    async def _made(self) -> Backup:
        at = now()
        name = f"{at:%Y%m%d-%H%M%S}-{os.urandom(3).hex()}"
        before = await aside(self._target.backups, self._store.origin)
        # Before the first pack: by this mark the next backup finds what a kill has left.
        await aside(self._target.mark_unfinished, name)
        last = before[-1] if before else None
        packing = Packing(self._target, name, last, self._tell, full=self._full, gentle=self._is_gentle)
        self._packing = packing
        packing.is_stopped = self._is_stopped
        try:
            outline = await self._store.copy_out(packing)
            catalog = await aside(packing.finish)
        except BaseException:
            await aside(packing.discard)
            raise
        made = Backup(
            id=name,
            store=outline.store,
            engine=outline.engine,
            schema=outline.schema,
            release=_release(),
            at=at,
            counts=outline.counts,
            bytes=packing.size,
            added=packing.added,
            chunks=packing.chunks,
            catalog=catalog,
            facts=outline.facts,
        )
        # Last: all chunks are on the disk by now, and the backup exists once this file has its name.
        path = self._target.path / "backups" / f"{name}{manifest.SUFFIX}"
        await aside(self._target.write, path, manifest.encoded(made))
        return made

    def _cleared_up(self, made: Backup) -> BackupReport:
        """Remove the backups beyond `keep`, and what killed backups have left."""
        series = self._target.backups(made.store)
        removed = series[: -self._keep] if self._keep is not None else []
        freed = self._target.clear_up(made.id, removed)
        (self._target.path / "unfinished" / made.id).unlink(missing_ok=True)
        return BackupReport(made, tuple(each.id for each in removed), freed)


async def list_backups(target: str | os.PathLike[str]) -> Sequence[Backup]:
    """Return the backups in a directory, the `target`, the oldest first.

    Those with a damaged manifest are left to `verify_backups`.
    """
    place = Target.at(target)

    def read() -> Sequence[Backup]:
        with place.reading():
            return place.backups()

    return await aside(read)


def told_in_loop(progress: Progress | None) -> Tell:
    """Return a function that calls `progress` in this event loop's thread, from whatever thread it is called."""
    if progress is None:
        return lambda done, steps: None
    loop, tell = asyncio.get_running_loop(), progress

    def told(done: int, steps: int) -> None:
        loop.call_soon_threadsafe(tell, done, steps)

    return told


def _release() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("perdure")
    except PackageNotFoundError:  # it runs from its sources
        return "unknown"
