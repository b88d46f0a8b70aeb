"""The lock of a restore: a file beside the place of a store, and what is asked of its directory before."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.errors import StoreError
from perdure.stores.file_lock import FileLock

ELSEWHERE = "Restore into another place."


class RestoreLock:
    """A lock that one restore into a place holds at a time."""

    def __init__(self, place: Path) -> None:
        self._path = place.with_name(f"{place.name}-restore-lock")
        try:
            self._lock = FileLock(self._path)
        except StoreError as error:
            raise StoreError(error.what, ELSEWHERE) from None
        if not self._lock.try_once():
            self._lock.close()
            raise StoreError(f"Another process is restoring {place}.", "Wait until it is over.")

    def give_back(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.close()


def require_directory(path: Path) -> None:
    """Raise StoreError unless a directory, or the nearest one above it, can be written to."""
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise StoreError(f"{nearest} is not a directory.", ELSEWHERE)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StoreError(f"You may not write into {nearest}.", f"Change its permissions. Or: {ELSEWHERE.lower()}")


def not_restored(place: Path, error: OSError) -> StoreError:
    """Return the error of a restore that the system has stopped."""
    what = f"The store {place} could not be restored: {error.strerror or error}."
    return StoreError(what, "Free some space or fix that, then repeat it. Or restore into another place.")
