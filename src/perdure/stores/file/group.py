"""Logs that change together. All steps are written down first, so that a kill leaves all of them or none.

`.group` exists from the moment of the decision until the last log is written. Its writer holds the locks of all its
sessions and then the lock `.group`, both for at least as long. If `.group` is found without that lock, its writer was
killed. The process that finds it does the rest, with the same locks. A job that reads one of the sessions waits for it.
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
"""The name of the file, and of its lock. There is one group at a time."""


class Growth(msgspec.Struct, frozen=True):
    """Bytes to append to a session's file, which ends at `end`."""

    session_id: str
    file: str
    end: int
    body: bytes

    def carry_out(self, folder: Folder) -> None:
        """Append what is missing. If the file has grown further, a release without groups has written it."""
        written = (folder.read(self.file) or b"")[self.end :]
        is_here = (folder.size(self.file) or 0) >= self.end
        if is_here and self._is_torn(written):
            if written:
                folder.cut(self.file, self.end)
            folder.append(self.file, self.end, self.body)

    def _is_torn(self, written: bytes) -> bool:
        """Tell whether these bytes may be a part of this growth. A power cut leaves zeros where bytes are missing.

        Complete ones count too, and are written again: a writer that was killed may not have synced them.
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
    """The first line of the file. The bytes that are appended to files follow it, one after the other."""

    grows: list[tuple[str, str, int, int]]
    """Sessions with their files, the ends of these, and the number of bytes to append."""
    removes: list[tuple[str, str]] = []
    format: int = codec.FORMAT


@contextmanager
def decided(folder: Folder, steps: Sequence[Step], timeout: float) -> Iterator[None]:
    """Make all steps of the block happen, or none. If this process is killed in it, the next one does the rest."""
    with folder.locked([GROUP], timeout):
        # The commit: from this rename on, a kill leads to all of the steps.
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
    """Do what a killed writer has left undone. The caller holds all locks that the writer held."""
    with folder.locked([GROUP], timeout):
        for step in _steps_left(folder):
            step.carry_out(folder)
        # The removals are on the disk before the note of them goes.
        folder.sync()
        _forget(folder)


def clear(folder: Folder, timeout: float) -> None:
    """Remove what a writer has left that was killed before its decision, since it contains texts."""
    if folder.size(temporary(GROUP)) is not None:
        with folder.locked([GROUP], timeout):
            folder.remove(temporary(GROUP))


def _steps_left(folder: Folder) -> Sequence[Step]:
    """Return the steps that were decided; none if they cannot be read."""
    try:
        return read_steps(folder)
    except CorruptRecord:  # `faults` reports it, and each session is sound by itself
        return ()


def read_steps(folder: Folder) -> Sequence[Step]:
    """Return the steps that were decided. Raise CorruptRecord if they are damaged."""
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
    # The file may come from elsewhere, and must not lead to writes outside of the directory.
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
    """Undo steps, since one of them has failed. If that fails too, the next process does all of them.

    It also does if a session is erased already, which happens only after all logs have grown.
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
    # Before the locks are released: if it came back after a power cut, it would bring back what was erased since.
    folder.sync()
