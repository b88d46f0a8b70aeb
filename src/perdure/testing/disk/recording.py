"""What a watched process has done to its disk, in order: the log that `recorder.c` writes, read back."""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("=IBBHHHIQqQ")


class Kind(IntEnum):
    """Kinds of operations, by the numbers that recorder.c gives them."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC_BEGIN = 4
    SYNC_END = 5
    RENAME = 6
    LINK = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    MARK = 11
    MAP = 12


class Operation(NamedTuple):
    """One thing that was done. Paths are relative to the directory that is watched."""

    kind: Kind
    flags: int
    path: str
    other: str
    """The new name of what was renamed or linked."""
    process: int
    inode: int
    place: int
    """Where it was written, the size after a truncation, or which sync it is."""
    data: bytes


def read_recording(log: Path) -> list[Operation]:
    """Return the operations in a log."""
    raw, at = log.read_bytes(), 0
    found = []
    while at + _HEAD.size <= len(raw):
        length, kind, flags, path, other, _, process, inode, place, _ = _HEAD.unpack_from(raw, at)
        names = at + _HEAD.size
        data = names + path + other
        found.append(
            Operation(
                Kind(kind),
                flags,
                raw[names : names + path].decode(),
                raw[names + path : data].decode(),
                process,
                inode,
                place,
                raw[data : at + length],
            )
        )
        at += length
    return found
