"""A directory of backups: packs of chunks, a manifest for each backup, and a mark for each that is not finished.

packs/ID-N.pack        chunks, which backups share
backups/ID.json        the manifest of a backup, written when all its chunks are on the disk
unfinished/ID          the mark of a backup that is being made; the next one clears up what a killed one has left
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path

from perdure.archive.backups import manifest
from perdure.archive.backups.catalog import hashes_in
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.packs import TEMPORARY, Packs, PackWriter, Place, chunks_in, read_index
from perdure.archive.whole_file import checked_path
from perdure.errors import BackupDamaged, BackupNotFound, ConfigurationError, InvalidData, StoreError
from perdure.stores.file_lock import FileLock
from perdure.stores.folder import make_directory, sync_directory

_MARK = "perdure-backups"
_SAYS = b"Backups of perdure stores, format 1. See `perdure backup --list`.\n"
_LOCK = "lock"
_LEAST_IN_USE = 0.5
"""The share of a pack that has to be in use. With less, removing old backups writes the used part into a new pack."""


class Target:
    """A directory of backups."""

    @classmethod
    def at(cls, given: str | os.PathLike[str]) -> Target:
        """Return the directory with a name. Raise InvalidData if the system cannot take the name."""
        return cls(Path(os.path.abspath(checked_path(given, "$.target"))))

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packs = Packs(path / "packs")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open the directory for reading within the block. Raise BackupNotFound if it does not exist."""
        if not (self.path / _MARK).is_file():
            raise BackupNotFound(self.path)
        try:
            with as_store_error(self.path):
                self.packs.open()
                yield
        finally:
            self.packs.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open the directory for writing within the block, under its lock. Create it if it is missing."""
        with as_store_error(self.path):
            self._begin()
            lock = FileLock(self.path / _LOCK)
            try:
                if not lock.try_once():
                    raise StoreError(f"Another backup into {self.path} is under way.", "Wait until it is over.")
                self._make()
                self._remove_temporary()
                self.packs.open()
                yield
            finally:
                self.packs.close()
                lock.close()

    def _begin(self) -> None:
        """Create the directory. Raise ConfigurationError if it has something else."""
        if (self.path / _MARK).exists():
            return
        if self.path.is_symlink() or (self.path.exists() and not self._is_begun()):
            raise ConfigurationError(
                f"{self.path} is not a directory of backups, and not empty. Name another for the backups."
            )
        make_directory(self.path)

    def _make(self) -> None:
        """Create what is missing. Under the lock: two first backups would write the same mark."""
        mark = self.path / _MARK
        for name in ("packs", "backups", "unfinished"):
            (self.path / name).mkdir(0o700, exist_ok=True)
        if not mark.exists():
            self.write(mark, _SAYS)  # last, since it syncs the new directories too

    def _is_begun(self) -> bool:
        """Tell whether the directory is empty, or has only what a killed first backup has left."""
        own = {"packs", "backups", "unfinished", _LOCK, _MARK, _MARK + TEMPORARY}
        return self.path.is_dir() and {each.name for each in self.path.iterdir()} <= own

    def _remove_temporary(self) -> None:
        """Remove the files that killed backups have left half written."""
        for directory in (self.path, self.path / "packs", self.path / "backups"):
            for path in directory.iterdir():
                if path.name.endswith(TEMPORARY):
                    path.unlink()

    def write(self, path: Path, body: bytes) -> None:
        """Write a small file, either whole and on the disk, or not at all."""
        unfinished = path.with_name(path.name + TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, path)
        sync_directory(path.parent)

    def backups(self, store: str | None = None) -> list[Backup]:
        """Return the backups whose manifests are sound, the oldest first: all of them, or a store's."""
        return [each for each in self.looked_through() if isinstance(each, Backup) and store in (None, each.store)]

    def looked_through(self) -> Sequence[Backup | BackupDamaged]:
        """Return the backups in order, then an error for each damaged manifest."""
        found: list[Backup] = []
        damaged: list[BackupDamaged] = []
        directory = self.path / "backups"
        for path in sorted(directory.glob(f"*{manifest.SUFFIX}")) if directory.is_dir() else ():
            try:
                found.append(manifest.decoded(path, path.read_bytes()))
            except BackupDamaged as error:
                damaged.append(error)
            except FileNotFoundError:  # another process has removed old ones
                continue
        return [*sorted(found, key=lambda each: (each.at, each.id)), *damaged]

    def chosen(self, at: str | datetime | None) -> Backup:
        """Return the backup with an id or the beginning of one, the last backup before a time, or the newest.

        Raise InvalidData if the directory has backups of several stores, and `at` does not choose one.
        """
        known = self.looked_through()
        backups = [each for each in known if isinstance(each, Backup)]
        if isinstance(at, str):
            found = [each for each in backups if each.id == at] or [each for each in backups if each.id.startswith(at)]
            if len(found) == 1:
                return found[0]
            if found:
                raise InvalidData("$.at", f"{at!r} is the beginning of {len(found)} backups' ids; write more of it")
            for damage in known:
                if isinstance(damage, BackupDamaged) and Path(damage.path).name.startswith(at):
                    raise damage
            raise BackupNotFound(self.path, at)
        if at is not None:
            backups = [each for each in backups if each.at <= at]
        if not backups:
            damaged = [each for each in known if isinstance(each, BackupDamaged)]
            if damaged:
                raise damaged[-1]
            raise BackupNotFound(self.path, None if at is None else f"from before {at.isoformat(timespec='seconds')}")
        if len({each.store for each in backups}) > 1:
            stores = ", ".join(sorted({f"{each.id} ({each.engine} {each.store[:8]})" for each in _newest(backups)}))
            raise InvalidData("$.at", f"{self.path} has backups of several stores; name one by its id: {stores}")
        return backups[-1]

    def mark_unfinished(self, name: str) -> None:
        (self.path / "unfinished" / name).touch(0o600)
        sync_directory(self.path / "unfinished")

    def unfinished(self) -> list[str]:
        return sorted(path.name for path in (self.path / "unfinished").iterdir() if path.suffix != TEMPORARY)

    def writers(self, name: str) -> Iterator[PackWriter]:
        """Yield new packs, one after the other, for a backup or for chunks that are moved."""
        for number in count():
            yield PackWriter(self.path / "packs" / f"{name}-{number:04}.pack")

    def clear_up(self, name: str, removed: Collection[Backup] = ()) -> int:
        """Remove backups, and the chunks that no other backup names. Return the number of bytes freed.

        Without backups to remove, clear up what killed ones have left. If this is killed, every other backup stays
        whole: manifests go first, and a pack goes when its needed chunks are on the disk elsewhere.
        """
        left = [each for each in self.unfinished() if each != name]
        if not left and not removed:
            return 0
        for backup in removed:
            (self.path / "backups" / f"{backup.id}{manifest.SUFFIX}").unlink(missing_ok=True)
        # The manifests are gone for good before the first chunk that they name.
        if removed:
            sync_directory(self.path / "backups")
        freed = self._sweep(name, only=None if removed else left)
        for each in left:
            (self.path / "unfinished" / each).unlink(missing_ok=True)
        return freed

    def _sweep(self, name: str, only: Sequence[str] | None) -> int:
        needed = self._needed()
        if needed is None:
            return 0
        freed, moved = 0, list[Path]()
        met: set[bytes] = set()
        for path in reversed(self.packs.paths()):  # the newest first: of two copies of a chunk the newer one stays
            if only is not None and not path.name.startswith(tuple(f"{each}-" for each in only)):
                continue
            try:
                index = read_index(path)
            except BackupDamaged:
                continue  # its chunks are not known, so nothing is removed here; `verify` reports it
            used = {key: place for key, place in index.items() if key in needed and key not in met}
            met |= used.keys()
            size, in_use = path.stat().st_size, sum(place.size for place in used.values())
            if not used:
                path.unlink()
                freed += size
            elif only is None and in_use < size * _LEAST_IN_USE:
                moved.append(path)
        return freed + self._move(f"{name}-kept", moved, needed)

    def _needed(self) -> set[bytes] | None:
        """Return all chunks that backups name. Return None if a backup cannot be read: then nothing is removed."""
        needed: set[bytes] = set()
        for backup in self.looked_through():
            if isinstance(backup, BackupDamaged):
                return None
            try:
                needed.update(bytes.fromhex(each) for each in backup.catalog)
                needed.update(hashes_in(self.packs, backup.catalog))
            except BackupDamaged:
                return None
        return needed

    def _move(self, name: str, paths: Sequence[Path], needed: set[bytes]) -> int:
        """Write the needed chunks of packs into new packs, then remove the old ones."""
        writers, writer = self.writers(name), None
        before = sum(path.stat().st_size for path in paths)
        after = 0
        for path in paths:
            for key, place in chunks_in(path):
                if key in needed:
                    writer = writer or next(writers)
                    writer.add(key, self._as_it_is(place))
                    if writer.is_full:
                        after, writer = after + writer.finish(), None
        if writer is not None:
            after += writer.finish()
        # Only now, when their chunks are on the disk in the new packs.
        for path in paths:
            path.unlink()
        return before - after

    def _as_it_is(self, place: Place) -> bytes:
        """Return a chunk's bytes, damaged or not, so that a move never loses what may still be saved."""
        with open(place.pack, "rb") as file:
            file.seek(place.offset)
            return file.read(place.size)


def _newest(backups: Sequence[Backup]) -> Collection[Backup]:
    """Return the newest backup of each store."""
    return {each.store: each for each in backups}.values()


@contextmanager
def as_store_error(path: Path) -> Iterator[None]:
    """Raise an error of the system in the block as a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        what = f"The backups in {path} could not be read or written: {error.strerror or error}."
        raise StoreError(
            what, "Those that are finished stay as they are. Free some space or fix that, then repeat it."
        ) from None
