"""Erasing what SQLite leaves behind: text in the unused middle of pages.

`secure_delete` overwrites a row where it stands when it is deleted. But when SQLite moves rows between pages, as it
does to fill pages that a deletion has left half empty, it leaves a copy where each row stood; and if that row is
deleted later, the copy stays. Here the unused middle of every page is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw

_HEADER = {2: 12, 5: 12, 10: 8, 13: 8}  # by the kind of b-tree page; other pages have no unused middle
_PAGES_AT_ONCE = 256


def scrub(db: apsw.Connection, path: Path) -> None:
    """Overwrite what is unused in every page of a database file.

    `db` is a connection of its own that holds the write lock, after a checkpoint that left the write-ahead log empty.
    Its commit makes every other connection forget the pages it has in memory, and with them the old bytes.
    Readers are not disturbed: nothing that is overwritten has a meaning.
    """
    size = db.pragma("page_size")
    # Through SQLite's own file layer: closing a file that was opened beside it would drop SQLite's locks.
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        for start, stop in list(_remains(file, size)):
            file.xWrite(bytes(stop - start), start)
        file.xSync(apsw.SQLITE_SYNC_FULL)
    finally:
        file.xClose()


def _remains(file: apsw.VFSFile, size: int) -> Iterator[tuple[int, int]]:
    """Where in the file there are bytes that belong to nothing."""
    end = file.xFileSize()
    for offset in range(0, end, size * _PAGES_AT_ONCE):
        chunk = file.xRead(min(size * _PAGES_AT_ONCE, end - offset), offset)
        for place in range(0, len(chunk), size):
            start, stop = _unused(chunk[place : place + size], first=offset + place == 0)
            if chunk.count(0, place + start, place + stop) != stop - start:
                yield offset + place + start, offset + place + stop


def _unused(page: bytes, *, first: bool) -> tuple[int, int]:
    """The unused middle of a page: from the end of its table of cells to the first of its cells."""
    header = 100 if first else 0
    length = _HEADER.get(page[header])
    if length is None:
        return 0, 0
    cells = int.from_bytes(page[header + 3 : header + 5], "big")
    start = header + length + 2 * cells
    stop = int.from_bytes(page[header + 5 : header + 7], "big") or 65536
    return start, max(start, min(stop, len(page)))
