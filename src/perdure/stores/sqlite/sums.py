"""A layer below SQLite that keeps a checksum in every page of the search index, and verifies it on every read.

SQLite has no checksums of its own: a flipped bit in the index would make a search silently find less. With them, a
damaged page is a damaged file, and the index is rebuilt. Each page ends with eight bytes that SQLite leaves alone:
four are a checksum of the page and its number, and four are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import apsw

RESERVED = 8
"""The bytes at the end of each page that are not SQLite's."""
_PAGE = 4096
_UNUSED = bytes(4)
_NAME = "perdure-sums"
# A reference is kept here, since apsw unregisters a layer whose object is freed.
_registered: list[apsw.VFS] = []


def summed(page: bytes, number: int) -> bytes:
    """Return a page with its checksum."""
    body = page[:-RESERVED]
    return body + crc32(body, number).to_bytes(4, "big") + _UNUSED


def is_sound(page: bytes, number: int) -> bool:
    """Tell whether a page has the right checksum."""
    return crc32(page[:-RESERVED], number) == int.from_bytes(page[-RESERVED:-4], "big")


class SummedFile(apsw.VFSFile):
    """A database file with a checksum in each page, if it is new or `has_sums` says so of its first 100 bytes."""

    def __init__(
        self, name: str | apsw.URIFilename, flags: list[int], has_sums: Callable[[bytes], bool] = lambda header: True
    ) -> None:
        super().__init__("", name, flags)
        self._has_sums = self.xFileSize() == 0 or has_sums(super().xRead(min(100, self.xFileSize()), 0))

    def xRead(self, amount: int, offset: int) -> bytes:
        page = super().xRead(amount, offset)
        # SQLite also reads parts of the header, before it knows the size of pages. They have no checksum of their own.
        if self._has_sums and amount == _PAGE and len(page) == _PAGE and not offset % _PAGE:
            number = offset // _PAGE + 1
            if not is_sound(page, number):
                raise apsw.CorruptError(f"the checksum of page {number} does not match")
        return page

    def xWrite(self, data: bytes, offset: int) -> None:
        if not self._has_sums:
            super().xWrite(data, offset)
        elif len(data) == _PAGE and not offset % _PAGE:
            super().xWrite(summed(bytes(data), offset // _PAGE + 1), offset)
        else:
            self._write_inside(bytes(data), offset)

    def _write_inside(self, data: bytes, offset: int) -> None:
        """Write a part of one page, and its checksum again."""
        number, place = divmod(offset, _PAGE)
        page = bytearray(super().xRead(_PAGE, number * _PAGE))
        page[place : place + len(data)] = data
        super().xWrite(summed(bytes(page), number + 1), number * _PAGE)


def connect_with_sums(path: Path, has_sums: Callable[[bytes], bool]) -> apsw.Connection:
    """Open a file whose pages have checksums. A new one is made so."""
    _register(has_sums)
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW, vfs=_NAME)
    if not path.stat().st_size:  # neither can be changed once a page is written
        db.pragma("page_size", _PAGE)
        db.reserve_bytes(reserve=RESERVED)
    return db


def _register(has_sums: Callable[[bytes], bool]) -> None:
    if not _registered:
        _registered.append(_Sums(has_sums))


class _Sums(apsw.VFS):
    def __init__(self, has_sums: Callable[[bytes], bool]) -> None:
        super().__init__(_NAME, "")
        self._has_sums = has_sums

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is not None and flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            return SummedFile(name, flags, self._has_sums)
        return super().xOpen(name, flags)
