"""A lock between processes that has a time-out, and that no forked child keeps."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from perdure.errors import StoreError
from perdure.stores.lock_holder import locked_error

LOCK_TIMEOUT = 10.0

# The open handles of all locks. A child forked from here closes its copies: a lock lasts as long as any copy does.
_handles: set[int] = set()
# Held while the process forks, so that the child never gets the set half changed. Reentrant, because the child closes
# the handles before it releases this.
_forking = threading.RLock()


class FileLock:
    """An OS lock on a side file that is never replaced. It is a `flock`: any unrelated close would drop a `lockf`.

    Only one thread may use it at a time. It raises SessionLocked if another process keeps it beyond the time-out.
    """

    def __init__(self, path: Path, timeout: float = LOCK_TIMEOUT) -> None:
        self._path = path
        self._timeout = timeout
        self._handle = _open(path)
        self._waiter: _Waiter | None = None

    def __enter__(self) -> None:
        waiter = self._waiter
        if waiter is None or not waiter.is_claimed():
            if self.try_once():
                return
            waiter = _Waiter(self._path)
        if not waiter.wait(self._timeout):
            self._waiter = waiter  # still in the kernel's queue: the next attempt keeps that place
            raise locked_error(None, self._path, self._timeout)
        self._waiter = None
        close_handle(self._handle)
        self._handle = waiter.handle

    def try_once(self) -> bool:
        """Take the lock if nobody has it. Return True if it was taken; then `let_go` gives it back."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        close_handle(self._handle)


class _Waiter:
    """A thread that waits for the lock with a handle of its own, because `flock` has no time-out.

    If processes asked again and again instead, the one with the longest pauses would never get the lock.
    """

    def __init__(self, path: Path) -> None:
        self.handle = _open(path)
        self._mutex = threading.Lock()
        self._came = threading.Event()
        self._is_wanted = True
        self._is_over = False
        self._error: OSError | None = None
        threading.Thread(target=self._serve, name=f"perdure lock {path.name}", daemon=True).start()

    def is_claimed(self) -> bool:
        """Say that the lock is wanted again. Return True if the thread is still waiting for it, or has it."""
        with self._mutex:
            self._is_wanted = not self._is_over
            return self._is_wanted

    def wait(self, timeout: float) -> bool:
        """Return True if the lock came in time. If not, the thread lets it go as soon as it comes."""
        self._came.wait(timeout)
        with self._mutex:
            self._is_wanted = self._came.is_set()
            if self._error is not None:
                raise self._error
            return self._is_wanted

    def _serve(self) -> None:
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX)
        except OSError as error:
            self._error = error  # raised in the thread that waits
        with self._mutex:
            if self._is_wanted:
                self._came.set()
            else:
                self._is_over = True
                close_handle(self.handle)


def open_handle(path: Path | str, *, directory: int | None = None) -> int:
    """Open a lock's file, by a path or by a name in an open directory. A forked child closes its copy at once."""
    with _forking:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        _handles.add(handle)
    return handle


def close_handle(handle: int) -> None:
    """Close a handle of `open_handle`, unless this is a forked child, which has closed it already."""
    with _forking:
        if handle in _handles:  # in a forked child it is closed already, and its number may be another file's
            _handles.discard(handle)
            os.close(handle)


def _open(path: Path) -> int:
    try:
        return open_handle(path)
    except OSError as error:
        raise StoreError(f"The lock file {path} cannot be opened: {error.strerror}.") from None


def _let_go_in_child() -> None:
    for handle in tuple(_handles):
        close_handle(handle)
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go_in_child)
