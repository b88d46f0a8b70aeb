"""Packs: files of chunks. Each chunk is named by its SHA-256, and a file is never changed once it has its name.

    perdure pack 1\\n | chunks | index: 44 bytes for each chunk | number of chunks | SHA-256 of all but the chunks

A file has many chunks, since each file costs a sync, and a store of 50 MB has 1,600 chunks.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from perdure.errors import BackupDamaged, StoreError
from perdure.stores.folder import sync_directory

_HEADER = b"perdure pack 1\n"
_ENTRY = struct.Struct(">32sQI")
_COUNT = struct.Struct(">Q")
_SUM = 32
_TAIL = _COUNT.size + _SUM
FULL = 1 << 26
"""The bytes after which a file is closed. The next backup need not write again what a killed one has closed."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_WRITTEN_AT_ONCE = 1 << 20
_MOST_WAITING = 8
_MOST_PARTS = 512
"""The system writes up to 1,024 parts with one call."""
TEMPORARY = ".tmp"
SUFFIX = ".pack"


class Place(NamedTuple):
    """The place of a chunk."""

    pack: Path
    offset: int
    size: int


class PackWriter:
    """A file that is being written. `finish` gives it its name, when all of it is on the disk.

    A thread of its own writes while the next chunks are read and hashed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[bytes, Place] = {}
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._end = len(_HEADER)
        self._waiting = [_HEADER]
        self._size_waiting = 0
        self._thread = ThreadPoolExecutor(1, "perdure backup")
        self._writes: deque[Future[None]] = deque()
        self._handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)

    @property
    def is_full(self) -> bool:
        return self._end >= FULL

    def add(self, key: bytes, chunk: bytes) -> None:
        self.places[key] = Place(self.path, self._end, len(chunk))
        self._end += len(chunk)
        self._waiting.append(chunk)
        self._size_waiting += len(chunk)
        if self._size_waiting >= _WRITTEN_AT_ONCE or len(self._waiting) >= _MOST_PARTS:
            self._write()

    def finish(self) -> int:
        """Close the file, give it its name, and return its size."""
        index = b"".join(_ENTRY.pack(key, place.offset, place.size) for key, place in self.places.items())
        rest = index + _COUNT.pack(len(self.places))
        self._waiting.append(rest + sha256(_HEADER + rest).digest())
        self._write()
        while self._writes:
            self._writes.popleft().result()
        self._thread.shutdown()
        os.fsync(self._handle)
        os.close(self._handle)
        os.rename(self._temporary, self.path)
        sync_directory(self.path.parent)
        return self._end + len(rest) + _SUM

    def discard(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._handle)
        self._temporary.unlink(missing_ok=True)

    def _write(self) -> None:
        waiting, self._waiting, self._size_waiting = self._waiting, [], 0
        if len(self._writes) >= _MOST_WAITING:
            self._writes.popleft().result()
        self._writes.append(self._thread.submit(_write_all, self._handle, waiting))


def _write_all(handle: int, parts: list[bytes]) -> None:
    size = sum(map(len, parts))
    written = os.writev(handle, parts)
    _begin_to_sync(handle, written)
    if written < size:  # on a full disk a write may come back short, and only the next one raises
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            rest = rest[os.write(handle, rest) :]


def _begin_to_sync(handle: int, size: int) -> None:
    """Have the disk begin to write what was written last, so that the sync at the end waits for less.

    On Linux, this is what DONTNEED does with pages that are not on the disk yet.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some file systems cannot, and the sync does it all
            end = os.lseek(handle, 0, os.SEEK_CUR)
            os.posix_fadvise(handle, end - size, size, os.POSIX_FADV_DONTNEED)


class Packs:
    """The files of a directory, and the places of their chunks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: dict[Path, int] = {}
        self.places: dict[bytes, Place] = {}
        self.others: dict[bytes, list[Place]] = {}
        """Further copies of a chunk."""
        self.damaged: list[BackupDamaged] = []

    def open(self) -> None:
        """Read the places of all chunks. If the index of a file is damaged, note it; its chunks are then unknown."""
        self.close()
        self.places.clear()
        self.others.clear()
        self.damaged.clear()
        for path in self.paths():
            try:
                self.add(read_index(path))
            except BackupDamaged as error:
                self.damaged.append(error)

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def paths(self) -> list[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if path.suffix == SUFFIX)
        except FileNotFoundError:
            return []

    def add(self, places: Mapping[bytes, Place]) -> None:
        for key, place in places.items():
            if self.places.setdefault(key, place) is not place:
                self.others.setdefault(key, []).append(place)

    def read(self, key: bytes) -> bytes:
        """Return a chunk with the right hash. Raise BackupDamaged if no copy of it has that."""
        damage: BackupDamaged | None = None
        for place in (*([self.places[key]] if key in self.places else ()), *self.others.get(key, ())):
            try:
                return self.read_at(key, place)
            except BackupDamaged as error:
                damage = error
        raise damage or BackupDamaged(self.directory, "it is missing", chunk=key.hex())

    def read_at(self, key: bytes, place: Place) -> bytes:
        try:
            if place.pack not in self._handles:
                self._handles[place.pack] = os.open(place.pack, os.O_RDONLY | _SAFE)
            chunk = os.pread(self._handles[place.pack], place.size, place.offset)
        except FileNotFoundError:
            raise BackupDamaged(place.pack, "the file is missing", chunk=key.hex()) from None
        except OSError as error:
            raise StoreError(f"{place.pack} could not be read: {error.strerror}.", "Check the disk.") from None
        if sha256(chunk).digest() != key:
            raise BackupDamaged(place.pack, "its hash does not match", chunk=key.hex())
        return chunk


def read_index(path: Path) -> dict[bytes, Place]:
    """Return the places of the chunks in a file. Raise BackupDamaged if they cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | _SAFE)
    except OSError as error:
        raise BackupDamaged(path, f"it cannot be opened: {error.strerror}") from None
    try:
        size = os.fstat(handle).st_size
        tail = os.pread(handle, _TAIL, size - _TAIL) if size >= len(_HEADER) + _TAIL else b""
        count = _COUNT.unpack(tail[: _COUNT.size])[0] if tail else -1
        start = size - _TAIL - count * _ENTRY.size
        if count < 0 or start < len(_HEADER):
            raise BackupDamaged(path, "its end is not that of a whole file")
        rest = os.pread(handle, size - start - _SUM, start)
        if sha256(os.pread(handle, len(_HEADER), 0) + rest).digest() != tail[_COUNT.size :]:
            raise BackupDamaged(path, "the checksum of its index does not match")
        # The checksum covers the header, so a header that is not ours is not damage.
        if not os.pread(handle, len(_HEADER), 0) == _HEADER:
            raise BackupDamaged(path, "a newer release has written it; upgrade perdure")
    finally:
        os.close(handle)
    entries = _ENTRY.iter_unpack(rest[: -_COUNT.size])
    return {key: Place(path, offset, length) for key, offset, length in entries}


def chunks_in(path: Path) -> Iterator[tuple[bytes, Place]]:
    """Yield the chunks of a file in their order there, so that they are read from front to back."""
    yield from sorted(read_index(path).items(), key=lambda item: item[1].offset)
