"""A directory whose files are written whole or not at all, and shared by any number of processes.

Nothing here follows a symbolic link. A failed fsync is final: the kernel may have dropped the bytes, so a later
success would prove nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from perdure.errors import ConfigurationError, StoreError, UnreadableFile
from perdure.stores.file_lock import close_handle, open_handle
from perdure.stores.lock_holder import locked_error

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe in place of a file must not block the reader.
_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFE
_CHUNK = 4096
# Any other error, such as too many open handles, says nothing about this file and concerns every file.
_OF_ONE_FILE = frozenset({errno.EACCES, errno.EPERM, errno.EIO})


class NotAFile(OSError):
    """A link, a pipe or a directory has the name of a file."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ELOOP, "it is a symbolic link or another thing that is not a plain file", name)


class PutBack(Exception):
    """A session's lock is not free. The job that needs it has changed nothing, and may be done again later."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id


class Turn:
    """A job's attempt: the time until which a lock may put it back, and the locks that earlier jobs wait for."""

    def __init__(self, deadline: float, *, blocked: Container[str] = ()) -> None:
        self.deadline = deadline
        self.blocked = blocked


class Folder:
    """An open directory. Every name is relative to it, even after the directory was moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: StoreError | None = None
        self._handle = _open_directory(path)
        self._turn: Turn | None = None
        self._has_written = False

    def close(self) -> None:
        os.close(self._handle)

    def require_in_place(self) -> None:
        """Raise StoreError if another directory, or none, has its name now. Nobody would find what is written."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._handle)):
            raise StoreError(
                f"The directory {self.path} has been removed, renamed or replaced since this store was opened. "
                "Nothing was read or written. Put it back if you need it; then close this store and open it again."
            )

    @contextmanager
    def taking(self, turn: Turn | None) -> Iterator[None]:
        """Put the job back when it meets a lock that is not free, while it has written nothing."""
        self._turn, self._has_written = turn, False
        try:
            yield
        finally:
            self._turn = None

    def names(self) -> list[str]:
        return os.listdir(self._handle)

    def size(self, name: str) -> int | None:
        """Return a file's size; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def stamp(self, name: str) -> tuple[int, int, int] | None:
        """Return a value that changes once a file is appended to or replaced; None if it does not exist."""
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    @contextmanager
    def reading(self, name: str) -> Iterator[int | None]:
        """Open a file to read, and yield its handle, or None if it does not exist.

        Raise UnreadableFile if the error concerns this file alone.
        """
        try:
            handle = self._open_to_read(name)
            try:
                yield handle
            finally:
                if handle is not None:
                    os.close(handle)
        except OSError as error:
            if error.errno not in _OF_ONE_FILE:
                raise
            raise UnreadableFile(self.path / name, os.strerror(error.errno)) from None

    def _open_to_read(self, name: str) -> int | None:
        try:
            handle = os.open(name, _READ, dir_fd=self._handle)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotAFile(name) if error.errno == errno.ELOOP else error from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise NotAFile(name)
        return handle

    def read(self, name: str) -> bytes | None:
        with self.reading(name) as handle:
            return None if handle is None else read_from(handle, 0)

    def append(self, name: str, end: int, body: bytes) -> None:
        """Write bytes durably at the end of a file, which is at `end`, or leave the file as it was."""
        is_new = self.size(name) is None
        self._has_written = True
        # A file that was removed meanwhile must not come back with only its end.
        flags = os.O_WRONLY | os.O_APPEND | _SAFE | (0 if end else os.O_CREAT)
        handle = os.open(name, flags, 0o600, dir_fd=self._handle)
        try:
            with ExitStack() as undo:
                undo.callback(_cut, handle, end)
                _write_all(handle, body)
                self._sync(handle)
                if is_new:  # its name is on the disk only once the directory is
                    self.sync()
                # Last, since the file may be replaced at any moment before.
                self._require_named(handle, name)
                undo.pop_all()
        finally:
            os.close(handle)

    def cut(self, name: str, end: int) -> None:
        """Shorten a file, for good."""
        self._has_written = True
        handle = os.open(name, os.O_WRONLY | _SAFE, dir_fd=self._handle)
        try:
            os.ftruncate(handle, end)
            self._sync(handle)
        finally:
            os.close(handle)

    def stage(self, name: str, body: bytes) -> None:
        """Write a temporary file, which `put_in_place` renames to this name."""
        self.remove(temporary(name))  # a writer that was killed may have left one
        with ExitStack() as undo:
            undo.callback(self.discard, temporary(name))
            self.write_new(temporary(name), body)
            undo.pop_all()

    def discard(self, *names: str) -> None:
        """Remove files, as far as possible."""
        for name in names:
            with suppress(OSError):  # cleanup: its error must neither hide another one nor fail finished work
                os.unlink(name, dir_fd=self._handle)

    def write_new(self, name: str, body: bytes) -> None:
        """Write a new file, whose name must not exist yet."""
        self._has_written = True
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._handle)
        try:
            _write_all(handle, body)
            self._sync(handle)
        finally:
            os.close(handle)

    def put_in_place(self, name: str) -> None:
        os.rename(temporary(name), name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        self.sync()

    def replace(self, name: str, body: bytes) -> None:
        self.stage(name, body)
        self.put_in_place(name)

    def remove(self, *names: str) -> None:
        """Remove these files. Those that do not exist are ignored."""
        self._has_written = True
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._handle)

    def flag(self, directory: str, name: str) -> None:
        """Put an empty file into a directory inside this one. The few flags that are there are found quickly."""
        self._has_written = True
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700, dir_fd=self._handle)
            self.sync()
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=self._handle)
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | _SAFE, 0o600, dir_fd=handle))
            self._sync(handle)
        finally:
            os.close(handle)

    def flags(self, directory: str) -> list[str]:
        """Return the names that `flag` has put into a directory and that were not removed."""
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=self._handle)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(handle))
        finally:
            os.close(handle)

    def sync(self) -> None:
        """Make durable what was created, renamed or removed in the directory."""
        self._sync(self._handle)

    def _sync(self, handle: int) -> None:
        try:
            os.fsync(handle)
        except OSError as error:
            self.broken = StoreError(
                f"{self.path} could not be synced ({error.strerror}), and this store refuses more. "
                "Check the disk, then reopen the store."
            )
            raise self.broken from None

    @contextmanager
    def locked(self, ids: Iterable[str], timeout: float) -> Iterator[None]:
        """Hold the locks of several sessions. Raise SessionLocked if that takes too long."""
        # A job that has written cannot be put back: it would write the same again.
        turn = None if self._has_written else self._turn
        deadline = time.monotonic() + timeout if turn is None else turn.deadline
        with ExitStack() as held:
            for session_id in sorted(ids):  # one order for all processes: no two wait for each other
                if turn is not None and session_id in turn.blocked and time.monotonic() < deadline:
                    raise PutBack(session_id)
                handle = self._lock(session_id, deadline, timeout, turn)
                held.callback(_unlock, handle)
            yield

    def is_free(self, name: str) -> bool:
        """Tell whether nobody holds a lock just now."""
        handle = open_handle(lock_file(name), directory=self._handle)
        try:
            return _flock(handle, 0.0)
        finally:
            close_handle(handle)

    def _lock(self, session_id: str, deadline: float, timeout: float, turn: Turn | None) -> int:
        name = lock_file(session_id)
        while True:
            handle = open_handle(name, directory=self._handle)
            if not _flock(handle, deadline if turn is None else 0.0):
                close_handle(handle)
                if turn is not None and time.monotonic() < deadline:
                    raise PutBack(session_id)
                raise locked_error(session_id, self.path / name, timeout)
            if self._is_named(handle, name):
                return handle
            # A deletion has removed the file of this lock. The next process would lock another file of that name.
            close_handle(handle)

    def _require_named(self, handle: int, name: str) -> None:
        """Raise StoreError if the bytes were written to a file that nobody finds any more."""
        self.require_in_place()
        if not self._is_named(handle, name):
            raise StoreError(
                f"The file {self.path / name} was removed or replaced while it was written. Nothing was kept. "
                "Put it back if you need it, and repeat this."
            )

    def _is_named(self, handle: int, name: str) -> bool:
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(handle))


def lock_file(session_id: str) -> str:
    return f"{session_id}.lock"


def temporary(name: str) -> str:
    return f"{name}.tmp"


def read_from(handle: int, start: int) -> bytes:
    """Return all bytes of a file from `start` to its end."""
    parts: list[bytes] = []
    while part := os.pread(handle, max(_CHUNK, os.fstat(handle).st_size - start), start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def first_lines(handle: int, count: int) -> list[bytes]:
    """Return the first lines of a file. Little more of it is read."""
    head = b""
    while head.count(b"\n") < count and (part := os.pread(handle, _CHUNK, len(head))):
        head += part
    return head.split(b"\n")[:count]


def _open_directory(path: Path) -> int:
    try:
        if path.is_symlink():
            raise ConfigurationError(
                f"{path} is a symbolic link, which a store does not follow. Name the directory itself."
            )
        make_directory(path)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
    except OSError as error:
        raise StoreError(f"{path} cannot be used as a directory of sessions: {error.strerror}.") from None


def make_directory(path: Path) -> None:
    """Create a directory that only its owner can use, and the missing ones above it."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make durable what was created in a directory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, body: bytes) -> None:
    """Write all bytes. On a full disk a single write may come back short and raise nothing."""
    left = memoryview(body)
    while left:
        written = os.write(handle, left)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[written:]


def _cut(handle: int, end: int) -> None:
    """Cut off a failed write. If that fails too, the next writer finds the torn end and cuts it."""
    with suppress(OSError):
        os.ftruncate(handle, end)


def _flock(handle: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            # Waiters that pause at random do not starve each other.
            time.sleep(random.uniform(0.0005, 0.003))


def _unlock(handle: int) -> None:
    # Not left to the close: a process that was started otherwise than by `os.fork` may have this handle too.
    fcntl.flock(handle, fcntl.LOCK_UN)
    close_handle(handle)
