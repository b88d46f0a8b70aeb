"""Recordings of what a watched process does to its disk, in order. `recorder.c` writes them, this module reads them."""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

# `struct record` of recorder.c. Its order leaves no gaps, so `=` (no padding) fits it.
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
    """One recorded operation. Paths are relative to the directory that is watched."""

    kind: Kind
    flags: int
    path: str
    other: str
    """The new name after a rename or a link."""
    process: int
    inode: int
    place: int
    """The place of a write, the size after a truncation, or the number of a sync."""
    data: bytes


def read_recording(log: Path) -> list[Operation]:
    """Return the operations of a recording."""
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
