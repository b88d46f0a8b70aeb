"""Erasing what SQLite leaves behind: text in the unused middle of pages.

`secure_delete` overwrites a row where it stands when it is deleted. But when SQLite moves rows between pages, as it
does to fill pages that a deletion has left half empty, it leaves a copy where each row stood; and if that row is
deleted later, the copy stays. Here the unused middle of pages is overwritten.

Only pages that hold nodes of b-trees have one. Which those are is found by walking the trees from their roots: by its
first byte alone, a page of text in a file beyond 128 GiB cannot be told from a node.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from pathlib import Path

import apsw

from perdure.stores.sqlite.schema import rows_of

_INNER, _LEAF = {2: 12, 5: 12}, {10: 8, 13: 8}  # the sizes of nodes' headers, by kind
_HEADER = _INNER | _LEAF
# About a fifth of a second, for which others wait.
PAGES_AT_ONCE = 16_384
_ROOTS = "SELECT rootpage, tbl_name FROM sqlite_schema WHERE rootpage > 0"


def scrub(
    db: apsw.Connection,
    path: Path,
    *,
    touched: Collection[int] = (),
    tables: Collection[str] | None = None,
    start: int = 1,
) -> int | None:
    """Overwrite what is unused in the pages that were touched, and in some of those of tables and their indexes.

    `tables` are all if None is given. Of their pages as many as can be done at once are, from the page `start` on;
    return where to continue, or None at the end.

    `db` is a connection of its own that holds the write lock, after a checkpoint that left the write-ahead log empty.
    Its commit makes every other connection forget the pages it has in memory, and with them the old bytes.
    Readers are not disturbed: nothing that is overwritten has a meaning.
    """
    # Through SQLite's own file layer: closing a file that was opened beside it would drop SQLite's locks.
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        pages = _Pages(file, db.pragma("page_size"))
        roots: list[tuple[int, str]] = [(1, "sqlite_schema"), *rows_of(db, _ROOTS, ())]
        pages.walk(root for root, _ in roots)
        pages.overwrite(number for number in touched if pages.is_node(number))
        asked = (
            pages.nodes if tables is None else _Pages(file, pages.size).walk(r for r, name in roots if name in tables)
        )
        chunk = [number for number in range(start, len(asked)) if asked[number]][: PAGES_AT_ONCE + 1]
        pages.overwrite(chunk[:PAGES_AT_ONCE])
        file.xSync(apsw.SQLITE_SYNC_FULL)
        return chunk[PAGES_AT_ONCE] if len(chunk) > PAGES_AT_ONCE else None
    finally:
        file.xClose()


class _Pages:
    """The pages of a database file, and which of them are known to be nodes of b-trees."""

    def __init__(self, file: apsw.VFSFile, size: int) -> None:
        self._file = file
        self.size = size
        self.nodes = bytearray(file.xFileSize() // size + 1)

    def is_node(self, number: int) -> bool:
        return 0 < number < len(self.nodes) and bool(self.nodes[number])

    def walk(self, roots: Iterable[int]) -> bytearray:
        """Find the nodes of trees and return a mark for each page. The leaves, nearly all of them, are not read."""
        for root in roots:
            level = [root]
            while level := [number for number in level if 0 < number < len(self.nodes) and not self.nodes[number]]:
                for number in level:
                    self.nodes[number] = 1
                # All leaves of a tree are on one level.
                is_inner = self._kind(self._read(level[0]), level[0]) in _INNER
                level = [child for number in level for child in self._children(number)] if is_inner else []
        return self.nodes

    def _children(self, number: int) -> list[int]:
        page, header = self._read(number), _header(number)
        if self._kind(page, number) not in _INNER:
            return []
        (count,) = struct.unpack_from(">H", page, header + 3)
        if header + 12 + 2 * count > len(page):
            return []
        cells = struct.unpack_from(f">{count}H", page, header + 12)
        return [
            *(struct.unpack_from(">I", page, cell)[0] for cell in cells if cell + 4 <= len(page)),
            struct.unpack_from(">I", page, header + 8)[0],
        ]

    def overwrite(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            page = self._read(number)
            start, stop = self._unused(page, number)
            if page.count(0, start, stop) != stop - start:
                self._file.xWrite(bytes(stop - start), (number - 1) * self.size + start)

    def _unused(self, page: bytes, number: int) -> tuple[int, int]:
        """The unused middle of a node: from the end of its table of cells to the first of its cells."""
        header = _header(number)
        length = _HEADER.get(self._kind(page, number))
        if length is None:
            return 0, 0
        cells, first = struct.unpack_from(">HH", page, header + 3)
        start = header + length + 2 * cells
        return start, max(start, min(first or 65536, len(page)))

    def _kind(self, page: bytes, number: int) -> int:
        return page[_header(number)]

    def _read(self, number: int) -> bytes:
        return self._file.xRead(self.size, (number - 1) * self.size)


def _header(number: int) -> int:
    """Where a node begins in its page: the first page begins with the header of the file."""
    return 100 if number == 1 else 0
