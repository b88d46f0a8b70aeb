"""A directory of sessions copied while others write, and put back.

Logs only grow, so a copy takes each log up to its length at one instant. To find such an instant, all logs are looked
at twice: a log that is the same in both looks did not change in between. The few sessions that are being written are
locked for both looks. Documents are not copied: a restore makes them from the logs.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perdure.aio import aside
from perdure.errors import StoreError, StoreNotEmpty
from perdure.stores.copies import CHUNK, Outline, Part
from perdure.stores.engine import unfinished
from perdure.stores.file import blobs, group
from perdure.stores.file.desk import Desk
from perdure.stores.file.directory import ERASURES, IDENTITY, Directory, owner_of, store_error
from perdure.stores.file.mending import write_document
from perdure.stores.file.pledge import give_hint
from perdure.stores.file.small_tables import Rates, Tokens
from perdure.stores.folder import Folder, make_directory, sync_directory
from perdure.stores.restore_lock import ELSEWHERE, RestoreLock, not_restored, require_directory

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit
    from perdure.stores.file.engine import FileEngine

_LOG = re.compile(r"(?P<stem>[A-Za-z0-9][A-Za-z0-9._-]{0,199}(@[0-9]{1,20})?)\.jsonl")
_PLEDGE = re.compile(r"(?P<stem>[A-Za-z0-9][A-Za-z0-9._-]{0,199})\.redaction")
_ALONE = (IDENTITY, ERASURES, Tokens.file, Rates.file)
"""Files that belong to no session. Each is replaced as a whole, or grows by itself."""
# A lock is an open file, of which a process may have only a limited number.
_MOST_LOCKED = 400
_TRIES = 20
_PATIENCE = 60.0

Stamp = tuple[int, int, int]


class _Cut(NamedTuple):
    """The state of all files at one instant."""

    logs: Mapping[str, Stamp]
    small: Mapping[str, bytes]
    blobs: Mapping[str, int]


class _Replaced(Exception):
    """The error for a file that was replaced or erased before it could be copied."""


def copy_out(path: Path, lock_timeout: float, deposit: Deposit) -> Outline:
    """Put a directory into a deposit."""
    try:
        directory = Directory(path, lock_timeout)
        try:
            for _ in range(_TRIES):
                try:
                    return _copied(directory, _cut_of(directory), deposit)
                except _Replaced:
                    continue
        finally:
            directory.close()
    except OSError as error:
        raise store_error(error, path) from None
    raise StoreError("Sessions kept being redacted or erased while they were copied.", "Repeat it later.")


def _cut_of(directory: Directory) -> _Cut:
    moving: set[str] = set()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        directory.settle()
        with ExitStack() as locks:
            # In the same order as writers take them, so that no two wait for each other.
            locks.enter_context(directory.locked(moving))
            locks.enter_context(directory.folder.locked([blobs.LOCK, group.GROUP], directory.lock_timeout))
            if directory.folder.size(group.GROUP) is not None:
                continue  # its writer was killed, and `settle` finishes what it began
            before = _stamps(directory.folder)
            cut = _Cut(
                {name: stamp for name, stamp in before.items() if _LOG.fullmatch(name)},
                _small(directory.folder, before),
                _blobs(directory.folder.path),
            )
            after = _stamps(directory.folder)
        if before == after:
            return cut
        changed = {name for name, _ in before.items() ^ after.items()}
        moving |= {owner_of(name.rpartition(".")[0]) for name in changed}
        if len(moving) > _MOST_LOCKED:
            moving = {owner_of(name.rpartition(".")[0]) for name in sorted(changed)[:_MOST_LOCKED]}
    raise StoreError("Too many sessions are written at once to be copied.", "Repeat it later.")


def _stamps(folder: Folder) -> dict[str, Stamp]:
    names = [name for name in folder.names() if _LOG.fullmatch(name) or _PLEDGE.fullmatch(name)]
    return {name: stamp for name in names if (stamp := folder.stamp(name)) is not None}


def _small(folder: Folder, stamps: Mapping[str, Stamp]) -> dict[str, bytes]:
    names = [*_ALONE, *(name for name in stamps if _PLEDGE.fullmatch(name))]
    return {name: raw for name in names if (raw := folder.read(name)) is not None}


def _blobs(path: Path) -> dict[str, int]:
    try:
        with os.scandir(path / blobs.DIRECTORY) as found:
            return {each.name: each.stat().st_size for each in found if blobs.is_name(each.name)}
    except FileNotFoundError:
        return {}


def _copied(directory: Directory, cut: _Cut, deposit: Deposit) -> Outline:
    deposit.begin_again()
    deposit.expect(sum(size for _, size, _ in cut.logs.values()) + sum(cut.blobs.values()))
    for name, body in sorted(cut.small.items()):
        deposit.put(name, body)
    for name, stamp in sorted(cut.logs.items()):
        with directory.folder.reading(name) as handle:
            _copy(handle, name, stamp[1], deposit, inode=stamp[0])
    for name, size in sorted(cut.blobs.items()):
        try:
            handle = os.open(directory.folder.path / blobs.DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _Replaced from None
        try:
            _copy(handle, f"{blobs.DIRECTORY}/{name}", size, deposit)
        finally:
            os.close(handle)
    sessions = sum("@" not in name for name in cut.logs)
    return Outline(
        engine="file", store=directory.origin, counts={"session": sessions, "blob": len(cut.blobs)}, facts={}
    )


def _copy(handle: int | None, part: str, size: int, deposit: Deposit, inode: int | None = None) -> None:
    """Put the beginning of a file into a deposit. While the file only grows, its chunks stay the same."""
    if handle is None or (inode is not None and os.fstat(handle).st_ino != inode) or os.fstat(handle).st_size < size:
        raise _Replaced
    for start in range(0, max(size, 1), CHUNK):
        wanted = min(CHUNK, size - start)
        chunk = os.pread(handle, wanted, start)
        if len(chunk) != wanted:
            raise _Replaced
        deposit.put(part, chunk)


class FileLanding:
    """A place to restore a directory to. It is written under another name, and renamed when it is complete."""

    def __init__(self, path: Path, lock_timeout: float, made: Callable[[Path], FileEngine]) -> None:
        self._path = path
        self._timeout = lock_timeout
        self._made = made
        self._lock: RestoreLock | None = None

    @property
    def engine(self) -> FileEngine:
        return self._made(self._beside)

    @property
    def _beside(self) -> Path:
        return unfinished(self._path)

    async def begin(self) -> None:
        await self._aside(self._begin)

    async def take_in(self, outline: Outline, parts: Iterator[Part]) -> None:
        await self._aside(lambda: self._take_in(parts))

    async def publish(self) -> None:
        await self._aside(self._publish)

    async def end(self) -> None:
        if self._lock is not None:
            self._lock.give_back()

    async def _aside(self, step: Callable[[], None]) -> None:
        try:
            await aside(step)
        except OSError as error:
            raise not_restored(self._path, error) from None

    def _begin(self) -> None:
        require_directory(self._path.parent)
        make_directory(self._path.parent)
        self._lock = RestoreLock(self._path)
        self._require_empty()
        if self._beside.exists():
            shutil.rmtree(self._beside)

    def _require_empty(self) -> None:
        """Raise StoreError unless the path is free, or has a store without sessions."""
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_dir()):
            raise StoreError(f"{self._path} is not a directory.", ELSEWHERE)
        names = os.listdir(self._path) if self._path.exists() else []
        sessions = sum(_LOG.fullmatch(name) is not None for name in names)
        if sessions:
            raise StoreNotEmpty(self._path, sessions)
        others = [
            name for name in names if not (name.startswith(".") or name.endswith(".lock") or name == blobs.DIRECTORY)
        ]
        if others:
            raise StoreError(f"{self._path} has files that are not perdure's.", ELSEWHERE)

    def _take_in(self, parts: Iterator[Part]) -> None:
        os.mkdir(self._beside, 0o700)
        sync_directory(self._path.parent)  # after a power cut the store is unfinished, which opening it reports
        folder = Folder(self._beside)
        try:
            for part in parts:
                self._write(folder, part)
            folder.sync()
        finally:
            folder.close()
        directory = Directory(self._beside, self._timeout)
        try:
            desk = Desk(directory)
            for session_id in directory.ids():
                write_document(desk, session_id)
        finally:
            directory.close()

    def _write(self, folder: Folder, part: Part) -> None:
        name, body = part.name, b"".join(part.chunks)
        if name.startswith(f"{blobs.DIRECTORY}/") and blobs.is_name(name.partition("/")[2]):
            within = Folder(self._beside / blobs.DIRECTORY)
            try:
                within.write_new(name.partition("/")[2], body)
                within.sync()
            finally:
                within.close()
        elif name in _ALONE or _LOG.fullmatch(name):
            folder.write_new(name, body)
        elif pledge := _PLEDGE.fullmatch(name):
            folder.write_new(name, body)
            give_hint(folder, pledge["stem"])
        else:
            raise StoreError(f"The backup has a part {name!r}, which this release does not know.", "Upgrade perdure.")

    def _publish(self) -> None:
        # A directory is renamed onto an empty one only. What is there has no sessions: `_begin` has checked that.
        if self._path.exists():
            shutil.rmtree(self._path)
        os.rename(self._beside, self._path)
        sync_directory(self._path.parent)
