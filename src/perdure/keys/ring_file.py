"""The file of a key ring: what it holds, and how it is read, replaced and locked."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from perdure.errors import StoreError

_FORMAT = 1


class Wrapped(msgspec.Struct, frozen=True):
    id: str
    owner: str | None
    made: str
    master: str
    wrapped: str


class Gone(msgspec.Struct, frozen=True):
    """The rest of a forgotten key. Not even its owner is kept."""

    id: str
    at: str


class Ring(msgspec.Struct, frozen=True):
    """The content of the file. Every field is required, so that no other JSON file is taken for a ring."""

    keys: list[Wrapped]
    forgotten: list[Gone]
    format: int

    @classmethod
    def of(cls, keys: Iterable[Wrapped] = (), forgotten: Iterable[Gone] = ()) -> Ring:
        return cls([*keys], [*forgotten], _FORMAT)


def identity(path: Path) -> tuple[int, ...] | None:
    # The inode too: each change replaces the file, and two changes may have the same time and size.
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(path: Path) -> Ring:
    while True:
        seen = identity(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            what = f"The key ring {path} could not be read ({error.strerror})."
            raise StoreError(f"{what} Check its permissions, or restore it from a backup.") from None
        try:
            ring = msgspec.json.decode(raw, type=Ring)
        except msgspec.MsgspecError as error:
            if seen != identity(path):
                continue  # while it was read, it was replaced and the old file overwritten
            what = f"{path} is not a key ring, or is damaged ({error})."
            raise StoreError(f"{what} Name another, or restore it from a backup.") from None
        if ring.format > _FORMAT:
            raise StoreError(f"The key ring {path} was written by a newer release of perdure. Install that one.")
        return ring


def write(path: Path, ring: Ring, *, overwrites: bool = False) -> None:
    """Replace the file as a whole: after a power cut, either the old or the new one is there.

    With `overwrites`, the content of the old file is then overwritten, as far as its disk allows that.
    """
    # One name is enough, since writers hold the lock. A rest of a killed one is truncated.
    temporary = path.with_name(f"{path.name}.new")
    _write_out(temporary, msgspec.json.format(msgspec.json.encode(ring)), os.O_CREAT | os.O_TRUNC)
    # Opened before it is replaced: afterwards the old file has no name.
    old = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if overwrites else None
    try:
        os.replace(temporary, path)
        _fsync_directory(path.parent)
        # Last, once the new file is durable: a crash before this leaves a readable ring.
        if old is not None:
            _write_all(old, bytes(os.fstat(old).st_size))
    finally:
        if old is not None:
            os.close(old)


def _write_out(path: Path, raw: bytes, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        _write_all(handle, raw)
    finally:
        os.close(handle)


def _write_all(handle: int, raw: bytes) -> None:
    written = 0
    while written < len(raw):  # on a full disk a write is short, and raises no error
        written += os.write(handle, raw[written:])
    os.fsync(handle)


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path) -> Iterator[Any]:
    """Hold a lock on a file beside the ring. Unlike the ring, that file is never replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = path.with_name(f"{path.name}.lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"The key ring {path} could not be locked ({error.strerror}). Check the directory.") from None
    try:
        # flock, not lockf: a lock of lockf ends when this process closes any other handle of the file.
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
