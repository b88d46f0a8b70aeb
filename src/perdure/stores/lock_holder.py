"""The process that holds a lock on a file, as Linux reports it, for an error that says what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from perdure.errors import SessionLocked


class Holder(NamedTuple):
    """A process that holds a lock. `is_stopped`: a signal (SIGSTOP, Ctrl-Z) or a debugger keeps it from letting go."""

    pid: int
    command: str
    is_stopped: bool


def locked_error(session_id: str | None, path: Path, timeout: float, beside: Iterable[Path] = ()) -> SessionLocked:
    """Return an error that names the process with the lock on a file, or on one of those beside it."""
    found = holder_of(path, *beside)
    if found is None:
        return SessionLocked(session_id, path, timeout)
    return SessionLocked(
        session_id, path, timeout, holder=found.pid, command=found.command, is_stopped=found.is_stopped
    )


def holder_of(*paths: Path) -> Holder | None:
    """Return the process that holds a lock for writing on one of these files; None if that is not known.

    It is not known on a system without /proc/locks, or if the process is in another pid namespace.
    """
    for path in paths:
        for pid in _pids(path, "WRITE"):
            with suppress(OSError):  # it may have ended since
                return Holder(pid, _command(pid), _state(pid) in ("T", "t"))
    return None


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open. The process must lock it for that long, as SQLite does."""
    return pid in (*_pids(path, "READ"), *_pids(path, "WRITE"))


def _pids(path: Path, how: str) -> Iterator[int]:
    """Yield the processes that /proc/locks shows with a lock of this kind on a file.

    One of its lines: `1: FLOCK  ADVISORY  WRITE 2421 fe:00:131 0 EOF`. A line with an arrow shows a process that waits.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split()
        is_whole = len(parts) == 8 and parts[3] == how and parts[4].isdecimal()
        # The device is not compared: some file systems report another one there.
        if is_whole and int(parts[4]) > 0 and parts[5].rpartition(":")[2] == str(found.st_ino):
            yield int(parts[4])


def _command(pid: int) -> str:
    # Its name alone: there may be secrets among the arguments.
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
