"""The shared library between a process and its disk. It is compiled when it is first needed, then preloaded.

A process that was started with `preloaded(…)` records what it writes and syncs. Inside that process, `Switch` puts
marks into the recording, and makes calls fail.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from perdure.errors import ConfigurationError

_SOURCE = Path(__file__).with_name("recorder.c")
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11")
SHORT = -1
"""In place of an error number: the write takes half of its bytes, and returns their number."""


def is_available() -> bool:
    """Tell whether this machine can watch a process: it needs Linux and a C compiler."""
    return os.uname().sysname == "Linux" and _compiler() is not None


def preloaded(root: Path, log: Path | None = None) -> Mapping[str, str]:
    """Return the environment for a process that is watched below `root`, and records what it does in `log`."""
    watched = {"LD_PRELOAD": str(library()), "PERDURE_DISK_ROOT": str(root.resolve())}
    return {**os.environ, **watched, **({} if log is None else {"PERDURE_DISK_LOG": str(log)})}


def library() -> Path:
    """Return the compiled library. It is built once for each text of its source, in the temporary directory."""
    compiler = _compiler()
    if compiler is None:
        raise ConfigurationError("No C compiler was found to build the recorder with. Install gcc.")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"perdure-disk-{os.getuid()}-{digest}.so"
    if not made.exists():
        # Several test processes may build it at once: each builds its own file, and the rename is atomic.
        draft = made.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *_FLAGS, "-o", str(draft), str(_SOURCE)], check=True)
        draft.rename(made)
    return made


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


class Switch:
    """The library as the watched process sees it. Raises ConfigurationError if that was not started by `preloaded`."""

    def __init__(self) -> None:
        # The library is loaded already: its functions are symbols of the process itself.
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "perdure_disk_mark"):
            raise ConfigurationError("This process is not watched. Start it with the environment of `preloaded(…)`.")
        # Declared, or ctypes would pass and return each of these numbers as an int.
        self._library.perdure_disk_mark.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.perdure_disk_fail.argtypes = [
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int)
        ]
        self._library.perdure_disk_room.argtypes = [ctypes.c_long]
        self._library.perdure_disk_heal.restype = ctypes.c_long
        self._library.perdure_disk_struck.restype = ctypes.c_long

    def mark(self, text: bytes) -> None:
        """Put a mark into the recording, behind everything that was written so far."""
        self._library.perdure_disk_mark(text, len(text))

    def fail(self, calls: str, error: int, *, pattern: str = "*", after: int = 0, count: int = 1) -> None:
        """Make `count` calls fail (-1: all) once `after` calls have passed, on files whose path fits the pattern.

        `calls` names some of open, open-write, read, write, sync, rename, link, unlink, truncate, allocate and mkdir.
        """
        if self._library.perdure_disk_fail(calls.encode(), pattern.encode(), after, count, error) < 0:
            raise ConfigurationError("There are too many faults, or one has too long a name. Call heal() first.")

    def leave_room(self, size: int) -> None:
        """Let files grow by this many bytes, then make writes fail for want of space."""
        self._library.perdure_disk_room(size)

    def lie(self) -> None:
        """Report failing calls as done from now on, except for those that open or read something."""
        self._library.perdure_disk_lie()

    @property
    def struck(self) -> int:
        """Return how many calls have failed since the last `heal`."""
        return int(self._library.perdure_disk_struck())

    def heal(self) -> int:
        """Remove all faults. Return how many calls they have made fail."""
        return int(self._library.perdure_disk_heal())

    @contextmanager
    def failing(self, calls: str, error: int, *, pattern: str = "*", after: int = 0, count: int = 1) -> Iterator[None]:
        """Make calls fail within a block."""
        self.fail(calls, error, pattern=pattern, after=after, count=count)
        try:
            yield
        finally:
            self.heal()
