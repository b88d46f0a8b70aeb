"""The mark beside a SQLite file: it names the last commit, so that a log that has lost it is noticed.

SQLite takes a log that ends early for one that a crash has cut short, and ignores a log with a damaged header. The mark
tells these cases apart. Each writer sets it after its commit has returned, while it holds the lock: the commit is on
the disk by then. The mark itself is not synced. After a power cut it may name an earlier commit: it then claims less,
and never more than is true. A mark that is damaged, missing, or older than the log claims nothing.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from perdure.stores.claims import boot_id

FRAME = struct.Struct(">6I")
"""The head of a frame: page, size of the file after a commit or 0, salt 1 and 2, checksum 1 and 2."""
HEADER_SIZE = 32
_KIND = b"pmk1"
_BODY = struct.Struct(">4s10I2Q")
_FIRST, _LAST = struct.Struct(">4sI"), struct.Struct(">I2Q")
_SIZE = _BODY.size + 4
_NO_COMMIT = bytes(4)
Pair = tuple[int, int]


def mark_path(path: Path) -> Path:
    """Return where the mark of a store is."""
    return path.with_name(path.name + "-mark")


def log_path(path: Path) -> Path:
    """Return where the write-ahead log of a store is."""
    return path.with_name(path.name + "-wal")


class Mark(NamedTuple):
    """A commit: its last frame in the log, and the state of the database file when the mark was set."""

    frame: int
    page: int
    commits: int
    salts: Pair
    before: Pair
    """The checksum of the frame before it, or of the log's header."""
    sum: Pair
    boot: int
    """A number for this start of the machine; 0 if that is unknown."""
    changed: int
    """When the database file was last written, in nanoseconds."""
    length: int

    @classmethod
    def of(cls, raw: bytes) -> Mark | None:
        """Return the mark that bytes hold; None if they are damaged."""
        if len(raw) != _SIZE or crc32(raw[:-4]) != int.from_bytes(raw[-4:], "big") or not raw.startswith(_KIND):
            return None
        _, frame, page, commits, salt1, salt2, old1, old2, sum1, sum2, boot, changed, length = _BODY.unpack(raw[:-4])
        return cls(frame, page, commits, (salt1, salt2), (old1, old2), (sum1, sum2), boot, changed, length)

    def encoded(self) -> bytes:
        salts, before, found = self.salts, self.before, self.sum
        numbers = (self.frame, self.page, self.commits, *salts, *before, *found, self.boot, self.changed, self.length)
        body = _BODY.pack(_KIND, *numbers)
        return body + crc32(body).to_bytes(4, "big")


def read_mark(path: Path) -> Mark | None:
    """Return the mark of a store; None if it is missing, damaged or unreadable."""
    try:
        handle = os.open(mark_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Mark.of(os.read(handle, _SIZE + 1))
    except OSError:
        return None
    finally:
        os.close(handle)


def number_of_boot() -> int:
    """Return the number that a mark has for this start of the machine; 0 if that is unknown."""
    found = boot_id()
    return crc32(found.encode()) if found else 0


class Marker:
    """A writer of the mark, for one thread at a time, which has to hold the lock on the file."""

    def __init__(self, path: Path, page_size: int) -> None:
        self._path = path
        self._file = str(path)
        self._frame_size = FRAME.size + page_size
        self._boot = number_of_boot()
        self._frames = 0
        self._last = b""
        self._log: int | None = None
        self._mark: int | None = None

    def set(self, frames: int) -> None:
        """Mark the commit that ends with frame number `frames` of the log.

        If the mark cannot be written, the old one stays, and is still true. So this never makes a commit fail.
        """
        with suppress(OSError):
            self._set(frames)

    def _set(self, frames: int) -> None:
        if self._log is None:
            self._log = os.open(log_path(self._path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        place = HEADER_SIZE + (frames - 1) * self._frame_size
        head = os.pread(self._log, FRAME.size, place)
        # The checksum of the frame before it, or of the header, each of which ends its 24 or 32 bytes.
        before = os.pread(self._log, 8, place - self._frame_size + 16 if frames > 1 else HEADER_SIZE - 8)
        if len(head) != FRAME.size or head[4:8] == _NO_COMMIT:
            return  # not the end of a commit, so nothing certain can be claimed
        if frames < self._frames or not self._frames:
            # The log was restarted, so the file has been written. If another process writes it in between, the mark
            # has an older time than the file, and claims less.
            found = os.stat(self._file)
            self._last = _LAST.pack(self._boot, found.st_mtime_ns, found.st_size)
        self._frames = frames
        # The same bytes as `Mark.encoded`, made of bytes that are in that order already: a save waits for this.
        body = _FIRST.pack(_KIND, frames) + head[:16] + before + head[16:] + self._last
        if self._mark is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._mark = os.open(mark_path(self._path), flags, 0o600)
        os.pwrite(self._mark, body + crc32(body).to_bytes(4, "big"), 0)

    def close(self) -> None:
        for handle in (self._log, self._mark):
            if handle is not None:
                os.close(handle)
        self._log = self._mark = None
