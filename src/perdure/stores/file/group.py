"""Logs that change together: what is to be done to them is written down first, so that a kill leaves all of it or none.

`.group` is there from the moment in which it is decided until the last log is written. Its writer holds the locks of
all sessions concerned and then the lock `.group`, both for at least as long. Found without that lock, its writer was
killed: whoever finds it does the rest, with the same locks. A job that looks at one of these sessions waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord
from perdure.stores.folder import Folder, temporary
from perdure.stores.format.rows import checksum

GROUP = ".group"
"""The name of the file, and of the lock that keeps groups apart: there is one at a time."""


class Growth(msgspec.Struct, frozen=True):
    """Bytes to be put at the end of a session's file, which is at `end`."""

    session_id: str
    file: str
    end: int
    body: bytes

    def carry_out(self, folder: Folder) -> None:
        """Append what is missing. A file that has moved on was written by a release that knows no groups."""
        written = (folder.read(self.file) or b"")[self.end :]
        is_here = (folder.size(self.file) or 0) >= self.end
        if is_here and self._is_torn(written):
            if written:
                folder.cut(self.file, self.end)
            folder.append(self.file, self.end, self.body)

    def _is_torn(self, written: bytes) -> bool:
        """Tell whether these bytes are what is left of a growth: a power cut leaves zeros where some are missing.

        If all are there they are written again: who was killed before it could sync them has left them in memory.
        """
        return len(written) <= len(self.body) and all(
            have in (want, 0) for have, want in zip(written, self.body, strict=False)
        )

    def take_back(self, folder: Folder) -> None:
        size = folder.size(self.file)
        if size is not None and size > self.end:
            folder.cut(self.file, self.end)
        if self.end == 0:
            folder.remove(self.file)


class Removal(msgspec.Struct, frozen=True):
    """A file of a session that is erased."""

    session_id: str
    file: str

    def carry_out(self, folder: Folder) -> None:
        folder.remove(self.file)


Step = Growth | Removal


class _Header(msgspec.Struct, frozen=True):
    """The first line of the file. The bytes that files grow by follow it, one after the other."""

    grows: list[tuple[str, str, int, int]]
    """Sessions with their files, where these end, and by how many bytes they grow."""
    removes: list[tuple[str, str]] = []
    format: int = codec.FORMAT


@contextmanager
def decided(folder: Folder, steps: Sequence[Step], timeout: float) -> Iterator[None]:
    """Have all steps of a block happen, or none: by whoever comes next, if this process is killed in its middle."""
    with folder.locked([GROUP], timeout):
        folder.replace(GROUP, encoded(steps))
        try:
            yield
        except Exception:
            _take_back(folder, steps)
            raise
        _forget(folder)


def members(folder: Folder) -> frozenset[str]:
    """Return the sessions whose files are being changed together, or were when their writer was killed."""
    if folder.size(GROUP) is None:
        return frozenset()
    return frozenset(step.session_id for step in _steps_left(folder))


def finish(folder: Folder, timeout: float) -> None:
    """Do what a killed writer has left, while all locks are held that it held."""
    with folder.locked([GROUP], timeout):
        for step in _steps_left(folder):
            step.carry_out(folder)
        folder.sync()
        _forget(folder)


def clear(folder: Folder, timeout: float) -> None:
    """Remove what a writer has left that was killed before it had decided: it has texts in it."""
    if folder.size(temporary(GROUP)) is not None:
        with folder.locked([GROUP], timeout):
            folder.remove(temporary(GROUP))


def _steps_left(folder: Folder) -> Sequence[Step]:
    """Return what was decided; nothing if that cannot be read."""
    try:
        return read_steps(folder)
    except CorruptRecord:  # which `faults` tells of. Each session is sound by itself
        return ()


def read_steps(folder: Folder) -> Sequence[Step]:
    """Return what was decided; CorruptRecord if it is damaged."""
    raw = folder.read(GROUP)
    if raw is None:
        return ()
    seal, _, rest = raw.partition(b" ")
    if seal != b"%08x" % checksum(rest):
        raise CorruptRecord(None, GROUP, "its checksum does not match")
    first, _, bodies = rest.partition(b"\n")
    header = codec.decode(_Header, first)
    codec.check_format(header.format)
    steps, at = list[Step](), 0
    for session_id, file, end, size in header.grows:
        steps.append(Growth(session_id, file, end, bodies[at : at + size]))
        at += size
    steps += [Removal(*each) for each in header.removes]
    if any("/" in step.file for step in steps):
        raise CorruptRecord(None, GROUP, "it names a file of another directory")
    return steps


def encoded(steps: Sequence[Step]) -> bytes:
    grows = [step for step in steps if isinstance(step, Growth)]
    header = _Header(
        [(step.session_id, step.file, step.end, len(step.body)) for step in grows],
        [(step.session_id, step.file) for step in steps if isinstance(step, Removal)],
    )
    rest = b"%b\n%b" % (msgspec.json.encode(header), b"".join(step.body for step in grows))
    return b"%08x %b" % (checksum(rest), rest)


def _take_back(folder: Folder, steps: Sequence[Step]) -> None:
    """Undo steps, since one of them has failed. If that fails too, all are done by whoever comes next.

    So are they if a session is erased already, which can only have happened after all logs had grown.
    """
    logs = [step.file for step in steps if isinstance(step, Removal) and step.file.endswith(".jsonl")]
    if any(folder.size(name) is None for name in logs):
        return
    for step in steps:
        if isinstance(step, Growth):
            step.take_back(folder)
    _forget(folder)


def _forget(folder: Folder) -> None:
    folder.remove(GROUP, temporary(GROUP))
    # Before the locks are let go: come back after a power cut, it would bring back what was erased since.
    folder.sync()
