"""The write-ahead log of a SQLite file, read beside SQLite: which pages it names, and whether it has lost a commit.

SQLite takes the first frame that fails its checksum for the torn end of the log, and ignores all frames after it.
After a power cut that is right. But a flipped bit would silently take back everything that was committed later. Damage
before the last commit shows by the sound frames after it. Damage in the last one shows by the mark beside the file.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import apsw

from perdure.errors import CorruptRecord
from perdure.stores.sqlite.marks import FRAME, Mark, log_path, number_of_boot, read_mark

_HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint number, salt 1 and 2, checksum 1 and 2
_MAGIC = 0x377F0682  # its last bit says that checksums are of big-endian words
_Sum = tuple[int, int]
_FRAMES_AT_ONCE = 64


_ADVICE = (
    "Stop all processes that use the file. Copy it with its -wal and -mark files, then restore a backup. To continue "
    "without the lost commits, type: perdure fsck --accept-lost-commits."
)


def require_sound_log(db: apsw.Connection, path: Path) -> None:
    """Raise CorruptRecord if SQLite would drop what was committed. Change nothing.

    `db` must not empty the log when it is closed, and no process may write meanwhile.
    """
    page_size, mark = db.pragma("page_size"), read_mark(path)
    with _opened(path, page_size) as log:
        known = 0
        if log is not None:
            known = max(db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0], 0)
            damaged = log.damage_behind(known)
            if damaged is not None:
                reason = "what was committed after it is still there, and SQLite would drop it"
                raise CorruptRecord(None, f"{damaged} of {log.name}", reason, _ADVICE)
        if mark is not None and _is_lost(mark, log, known, path, page_size):
            reason = f"a commit was acknowledged at frame {mark.frame}, and SQLite finds {known or 'no'} sound frames"
            raise CorruptRecord(None, f"the end of {log_path(path).name}", reason, _ADVICE)


def _is_lost(mark: Mark, log: _Log | None, known: int, path: Path, page_size: int) -> bool:
    """Tell whether the marked commit is gone. Return False where that is not certain.

    A log is restarted, or removed, only when all of it is in the database file.
    """
    if log is not None and log.is_sound:
        # With other salts, the log was restarted since, or a backup was put back.
        if log.salts != mark.salts or log.has(mark, known):
            return False
        # SQLite drops nothing of a log that is whole: all of it is in the file. It has begun the log again in the index
        # that it shares with other processes, and was stopped, or failed, before it had emptied the log.
        return not log.is_whole_until(mark)
    if _is_in_file(mark, path, page_size):
        return False
    is_same_boot = mark.boot != 0 and mark.boot == number_of_boot()
    if log is None or log.is_blank:
        # After a power cut the time says nothing: `fdatasync` may have left it as it was.
        found = os.stat(path, follow_symlinks=False)
        return is_same_boot and (found.st_mtime_ns, found.st_size) == (mark.changed, mark.length)
    # A power cut may tear the header of a log that is restarted: then neither salt is that of the old one.
    return log.holds(mark) and (is_same_boot or log.has_salt_of(mark))


def _is_in_file(mark: Mark, path: Path, page_size: int) -> bool:
    """Tell whether the database file has the last page that the marked commit wrote."""
    # Through SQLite's own file layer: closing a file that was opened beside it would drop SQLite's locks.
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
    try:
        if mark.page * page_size > file.xFileSize():
            return False
        page = file.xRead(page_size, (mark.page - 1) * page_size)
    finally:
        file.xClose()
    head = FRAME.pack(mark.page, mark.commits, 0, 0, 0, 0)[:8]
    # The log's header, which says the byte order, may be gone or damaged here.
    return any(_sum_of(head + page, mark.before, order) == mark.sum for order in "<>")


def pages_in_log(path: Path, page_size: int) -> frozenset[int]:
    """Return the numbers of all pages that have been written since the log was begun."""
    with _opened(path, page_size) as log:
        # All frames after the first one of an earlier log are of an earlier log too.
        return (
            frozenset() if log is None else frozenset(frame.page for frame in takewhile(log.is_current, log.frames()))
        )


class Snapshot:
    """The pages that the log has of one state of the file, and those written since an earlier place in it.

    The log must not be restarted while pages are read from it; the caller's read transaction prevents that. If all
    of it is in the file already, it may be restarted, but then none of its pages is read. No process may write while
    a snapshot is made.
    """

    def __init__(self, log: _Log | None, frames: int, since: list[int] | None, *, is_moved: bool, handle: int | None):
        self._log = log
        self._handle = handle
        self.place: list[int] | None = None if log is None or not frames else [*log.salts, frames, *log.sum_at(frames)]
        """The end of the log: its salts, which tell it from others, the last frame, and the checksum up to there."""
        behind = self._frames_until(since)
        first = 0 if not is_moved else frames if behind is None else behind
        named = [] if log is None else log.pages(first + 1, frames)
        self.pages = {} if is_moved else {page: number for number, page in enumerate(named, 1)}
        """The pages that have to be read from the log, each with its last frame."""
        self.changed = None if behind is None else frozenset(named[behind - first :])
        """The pages written since the given place; None if that is not a place in this log."""

    def _frames_until(self, place: list[int] | None) -> int | None:
        if place is None or self.place is None or self._log is None or place[:2] != self.place[:2]:
            return None
        frames = place[2]
        return frames if frames <= self.place[2] and [*self._log.sum_at(frames)] == place[3:] else None

    def read(self, page: int) -> bytes:
        assert self._log is not None, "it names the page"
        return self._log.page_in(self.pages[page])

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def snapshot_of_log(path: Path, page_size: int, frames: int, since: list[int] | None, *, is_moved: bool) -> Snapshot:
    """Return the pages that the first frames of the log hold. No process may write meanwhile."""
    name = path.with_name(path.name + "-wal")
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Snapshot(None, 0, None, is_moved=True, handle=None)
    if os.fstat(handle).st_size <= _HEADER.size:
        return Snapshot(None, 0, None, is_moved=True, handle=handle)
    return Snapshot(_Log(handle, name.name, page_size), frames, since, is_moved=is_moved, handle=handle)


class _Frame(NamedTuple):
    page: int
    commits: int
    salts: tuple[int, int]
    sum: _Sum


class _Log:
    def __init__(self, handle: int, name: str, page_size: int) -> None:
        self.name = name
        self._handle = handle
        self._page_size = page_size
        self._raw = os.pread(handle, _HEADER.size, 0)
        magic, _, _, _, salt1, salt2, *found = _HEADER.unpack(self._raw)
        is_known = magic & ~1 == _MAGIC
        # SQLite sums words in the order of the machine that writes. If the magic is damaged, that is most likely ours.
        self._order = "><"[not magic & 1] if is_known else "<>"[sys.byteorder == "big"]
        self.salts: tuple[int, int] = (salt1, salt2)
        self.is_blank = not any(self._raw)
        self._sum: _Sum = (found[0], found[1])
        self.is_sound = is_known and _sum_of(self._raw[:24], (0, 0), self._order) == self._sum
        self._count = (os.fstat(handle).st_size - _HEADER.size) // (FRAME.size + page_size)

    def frames(self, first: int = 1) -> Iterator[_Frame]:
        for number in range(first, self._count + 1):
            yield self._frame(number)

    def pages(self, first: int, last: int) -> list[int]:
        """Return the pages of some frames. Many are read at once: one by one, a long log would take 0.1 s."""
        size, found = FRAME.size + self._page_size, list[int]()
        for start in range(first, last + 1, _FRAMES_AT_ONCE):
            count = min(_FRAMES_AT_ONCE, last + 1 - start)
            raw = os.pread(self._handle, count * size, self._place(start))
            found += [int.from_bytes(raw[at : at + 4], "big") for at in range(0, count * size, size)]
        return found

    def sum_at(self, number: int) -> _Sum:
        """Return the checksum of all frames up to this one."""
        return self._frame(number).sum

    def page_in(self, number: int) -> bytes:
        return os.pread(self._handle, self._page_size, self._place(number) + FRAME.size)

    def is_current(self, frame: _Frame) -> bool:
        """Tell whether a frame is of this log, and not left from before it was restarted."""
        return frame.salts == self.salts

    def has(self, mark: Mark, known: int) -> bool:
        """Tell whether the marked commit is among the first `known` frames, which are those that SQLite reads."""
        return mark.frame <= known and self.holds(mark)

    def holds(self, mark: Mark) -> bool:
        """Tell whether the marked frame is still in its place."""
        if mark.frame > self._count:
            return False
        return self._frame(mark.frame) == (mark.page, mark.commits, mark.salts, mark.sum)

    def is_whole_until(self, mark: Mark) -> bool:
        """Tell whether the frame that was marked and all before it are what was written."""
        numbered = enumerate(islice(self.frames(), mark.frame), 1)
        return self.holds(mark) and all(self.is_current(frame) and self._is_next(at, frame) for at, frame in numbered)

    def has_salt_of(self, mark: Mark) -> bool:
        """Tell whether the header was the marked log's. One damaged place leaves one salt right, or only zeros."""
        return self.salts[0] == mark.salts[0] or self.salts[1] == mark.salts[1] or not any(self._raw)

    def damage_behind(self, known: int) -> str | None:
        """Return the name of what is damaged after the frames that SQLite reads; None if it is only the torn end.

        The last commit may be torn in its middle, since its frames reach the disk in any order. But nothing is written
        after a commit before it is on the disk. So a sound frame there proves that all before it was sound once.
        """
        if not self.is_sound:
            return "the header" if known == 0 and self._has_frames_of_damaged_header() else None
        bad, is_committed = 0, False
        for number, frame in enumerate(self.frames(known + 1), known + 1):
            is_sound = self.is_current(frame) and self._is_next(number, frame)
            if is_sound and bad and is_committed:
                return f"frame {bad}"
            bad = bad or (0 if is_sound else number)
            if bad and frame.commits and self._resembles(frame):
                is_committed = True
        return None

    def _has_frames_of_damaged_header(self) -> bool:
        """Tell whether frames follow that were written under this header. It is on the disk before the first."""
        # From the second frame: the checksum of the first continues the header's, which is damaged.
        numbered = enumerate(self.frames(2), 2)
        # A power cut may leave zeros, whose checksum is right; no frame is of page 0.
        return any(frame.page and self._resembles(frame) and self._is_next(number, frame) for number, frame in numbered)

    def _resembles(self, frame: _Frame) -> bool:
        """Tell whether at least one salt is this log's. A stale frame has neither, a damaged one mostly both."""
        return frame.salts[0] == self.salts[0] or frame.salts[1] == self.salts[1]

    def _is_next(self, number: int, frame: _Frame) -> bool:
        """Tell whether a frame's checksum is right, given that of the frame before it."""
        before = self._frame(number - 1).sum if number > 1 else self._sum
        # SQLite sums the first 8 bytes of a frame's head and the page, but not the salts and the checksum itself.
        raw = os.pread(self._handle, FRAME.size + self._page_size, self._place(number))
        return _sum_of(raw[:8] + raw[FRAME.size :], before, self._order) == frame.sum

    def _frame(self, number: int) -> _Frame:
        page, commits, salt1, salt2, *found = FRAME.unpack(os.pread(self._handle, FRAME.size, self._place(number)))
        return _Frame(page, commits, (salt1, salt2), (found[0], found[1]))

    def _place(self, number: int) -> int:
        return _HEADER.size + (number - 1) * (FRAME.size + self._page_size)


def _sum_of(raw: bytes, before: _Sum, order: str) -> _Sum:
    """Return SQLite's running checksum after the words in `raw`."""
    first, second = before
    words = struct.unpack(f"{order}{len(raw) // 4}I", raw)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


@contextmanager
def _opened(path: Path, page_size: int) -> Iterator[_Log | None]:
    """Open the log of a database file; yield None if it is empty. SQLite has no locks on it that this could drop."""
    name = log_path(path)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield _Log(handle, name.name, page_size) if os.fstat(handle).st_size >= _HEADER.size else None
    finally:
        os.close(handle)
