"""Erasure of the text that SQLite leaves in the unused middle of pages.

`secure_delete` overwrites a row in its place when it is deleted. But SQLite also moves rows between pages, to fill
pages that a deletion has left half empty. A copy stays in the old place of each row, even if the row is deleted later.
Here the unused middle of pages is overwritten.

Only nodes of b-trees have such a middle. In a file of up to 128 GiB the first byte of a page tells whether it is a
node. A page of text begins with the number of the next page. In a larger file this number may begin with the same byte
as a node, so the trees are walked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from perdure.stores.sqlite.schema import rows_of

_INNER, _LEAF = {2: 12, 5: 12}, {10: 8, 13: 8}  # the sizes of nodes' headers, by kind
_HEADER = _INNER | _LEAF
# Other writers wait a few milliseconds while these are written.
PAGES_AT_ONCE = 256
# The first page number whose own first byte is the mark of a node.
_UNCERTAIN = 2 << 24
OpenFile = Callable[[str, list[int]], apsw.VFSFile]
_ROOTS = "SELECT rootpage, tbl_name FROM sqlite_schema WHERE rootpage > 0"


def remains(
    db: apsw.Connection, path: Path, *, touched: Collection[int] = (), tables: Collection[str] | None = None
) -> list[int]:
    """Return the pages with something left in their unused middle: of those touched, and of tables and their indexes.

    None stands for all tables. The file must not change meanwhile, unless all tables are asked for. It may have a
    write-ahead log: the copies of these pages in the log have no remains that the pages do not have too.
    """
    with _opened(db, path) as pages:
        asked: Iterable[int] = range(1, pages.count + 1)
        if tables is not None:
            asked = sorted({*touched, *pages.of_trees(root for root, name in _roots(db) if name in tables)})
        return [number for number in asked if pages.has_remains(number)]


def overwrite(db: apsw.Connection, path: Path, numbers: Iterable[int], file: OpenFile | None = None) -> None:
    """Overwrite the unused middle of pages. `file` opens a file that keeps something of its own in each page.

    `db` holds the write lock, after a checkpoint that left the write-ahead log empty. Its commit makes every other
    connection drop its cached pages, and with them the old bytes. Readers are not disturbed: none of the overwritten
    bytes has a meaning.
    """
    with _opened(db, path, file) as pages:
        for number in numbers:
            pages.overwrite(number)
        pages.sync()


@contextmanager
def _opened(db: apsw.Connection, path: Path, opener: OpenFile | None = None) -> Iterator[_Pages]:
    # Through SQLite's own file layer: closing a file that was opened beside it would drop SQLite's locks.
    flags = [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0]
    file = apsw.VFSFile("", str(path), flags) if opener is None else opener(str(path), flags)
    try:
        yield _Pages(file, db)
    finally:
        file.xClose()


def _roots(db: apsw.Connection) -> list[tuple[int, str]]:
    return [(1, "sqlite_schema"), *rows_of(db, _ROOTS)]


class _Pages:
    """The pages of a database file."""

    def __init__(self, file: apsw.VFSFile, db: apsw.Connection) -> None:
        self._file = file
        self._db = db
        self._size: int = db.pragma("page_size")
        self.count = file.xFileSize() // self._size
        self._nodes: set[int] | None = None

    def of_trees(self, roots: Iterable[int]) -> set[int]:
        """Return the nodes of trees. The leaves, nearly all of them, are not read."""
        nodes: set[int] = set()
        for root in roots:
            level = [root]
            while level := [number for number in level if 0 < number <= self.count and number not in nodes]:
                nodes.update(level)
                # All leaves of a tree are on one level.
                is_inner = self._kind(self._read(level[0]), level[0]) in _INNER
                level = [child for number in level for child in self._children(number)] if is_inner else []
        return nodes

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

    def has_remains(self, number: int) -> bool:
        return self._remains(number) is not None

    def overwrite(self, number: int) -> None:
        found = self._remains(number)
        if found is not None:
            start, stop = found
            self._file.xWrite(bytes(stop - start), (number - 1) * self._size + start)

    def sync(self) -> None:
        self._file.xSync(apsw.SQLITE_SYNC_FULL)

    def _remains(self, number: int) -> tuple[int, int] | None:
        """Return where the unused middle of a page begins and ends; None if it is empty, or the page has none."""
        if not 0 < number <= self.count:
            return None
        page = self._read(number)
        start, stop = self._unused(page, number)
        is_empty = page.count(0, start, stop) == stop - start
        return None if is_empty or not self._is_node(number) else (start, stop)

    def _is_node(self, number: int) -> bool:
        """Tell whether a page is a node, given that its first byte is that of one."""
        if self.count < _UNCERTAIN:
            return True
        if self._nodes is None:
            self._nodes = self.of_trees(root for root, _ in _roots(self._db))
        return number in self._nodes

    def _unused(self, page: bytes, number: int) -> tuple[int, int]:
        """Return the unused middle of a node: from the end of its table of cells to the first of its cells."""
        header = _header(number)
        length = _HEADER.get(self._kind(page, number))
        if length is None:
            return 0, 0
        cells, first = struct.unpack_from(">HH", page, header + 3)
        start = header + length + 2 * cells
        # SQLite writes 65,536 as 0, since it does not fit into two bytes.
        return start, max(start, min(first or 65536, len(page)))

    def _kind(self, page: bytes, number: int) -> int:
        return page[_header(number)]

    def _read(self, number: int) -> bytes:
        return self._file.xRead(self._size, (number - 1) * self._size)


def _header(number: int) -> int:
    """Return where a node begins in its page. The first page begins with the 100 bytes of the file's header."""
    return 100 if number == 1 else 0
