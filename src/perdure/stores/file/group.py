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


class Step(msgspec.Struct, frozen=True):
    """Bytes to be put at the end of a session's file, which is at `end`."""

    session_id: str
    file: str
    end: int
    body: bytes


class _Header(msgspec.Struct, frozen=True):
    """The first line of the file. The bodies of the steps follow it, one after the other."""

    steps: list[tuple[str, str, int, int]]
    """Each step's session, file, end, and how many bytes its body has."""
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
    return frozenset(step.session_id for step in steps_left(folder) or ())


def finish(folder: Folder, timeout: float) -> None:
    """Do what a killed writer has left, while all locks are held that it held."""
    with folder.locked([GROUP], timeout):
        for step in steps_left(folder) or ():
            _append(folder, step)
        _forget(folder)


def clear(folder: Folder, timeout: float) -> None:
    """Remove what a writer has left that was killed before it had decided: it has texts in it."""
    if folder.size(temporary(GROUP)) is not None:
        with folder.locked([GROUP], timeout):
            folder.remove(temporary(GROUP))


def steps_left(folder: Folder) -> list[Step] | None:
    """Return what was decided; None if there is nothing, or nothing that can be read."""
    try:
        return read_steps(folder)
    except CorruptRecord:  # which `faults` tells of. Each session is sound by itself
        return None


def read_steps(folder: Folder) -> list[Step] | None:
    """Return what was decided; None if there is nothing, CorruptRecord if it is damaged."""
    raw = folder.read(GROUP)
    if raw is None:
        return None
    seal, _, rest = raw.partition(b" ")
    if seal != b"%08x" % checksum(rest):
        raise CorruptRecord(None, GROUP, "its checksum does not match")
    first, _, bodies = rest.partition(b"\n")
    header = codec.decode(_Header, first)
    codec.check_format(header.format)
    steps, at = list[Step](), 0
    for session_id, file, end, size in header.steps:
        steps.append(Step(session_id, file, end, bodies[at : at + size]))
        at += size
    return steps


def encoded(steps: Sequence[Step]) -> bytes:
    header = _Header([(step.session_id, step.file, step.end, len(step.body)) for step in steps])
    rest = b"%b\n%b" % (msgspec.json.encode(header), b"".join(step.body for step in steps))
    return b"%08x %b" % (checksum(rest), rest)


def _append(folder: Folder, step: Step) -> None:
    """Append what is missing of a step. A file that has moved on was written by a release that knows no groups."""
    size = folder.size(step.file) or 0
    written = (folder.read(step.file) or b"")[step.end :] if size > step.end else b""
    if size < step.end or written.startswith(step.body) or not step.body.startswith(written):
        return
    if written:
        folder.cut(step.file, step.end)
    folder.append(step.file, step.end, step.body)


def _take_back(folder: Folder, steps: Sequence[Step]) -> None:
    """Undo steps, since one of them has failed. If that fails too, all are done by whoever comes next."""
    for step in steps:
        size = folder.size(step.file)
        if size is not None and size > step.end:
            folder.cut(step.file, step.end)
        if size is not None and step.end == 0:
            folder.remove(step.file)
    _forget(folder)


def _forget(folder: Folder) -> None:
    folder.remove(GROUP, temporary(GROUP))
    # Before the locks are let go: come back after a power cut, it would bring back what was erased since.
    folder.sync()
