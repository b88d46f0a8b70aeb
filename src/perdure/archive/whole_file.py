"""A file that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import BinaryIO

from perdure.errors import InvalidData, StoreError
from perdure.model.ids import new_id
from perdure.model.value import brief


@asynccontextmanager
async def whole_file(path: str) -> AsyncIterator[BinaryIO]:
    """Yield a file to write. It gets its name once it is written and synced. After an error nothing is left of it."""
    _require_regular(path)
    unfinished = f"{path}.{new_id()}.tmp"
    try:
        # Only its owner may read what was said, and a symbolic link must not lead it to another place.
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        os.replace(unfinished, path)
        await asyncio.to_thread(_sync_directory, os.path.dirname(path) or ".")
    except OSError as error:
        what = f"{path} could not be written: {error.strerror}."
        raise StoreError(what, "Name another file, or make room.") from None
    finally:
        with suppress(OSError):  # it has its name by now, or could not be created
            os.unlink(unfinished)


def _require_regular(path: str) -> None:
    """Raise StoreError for a device, a pipe or a link. A superuser could replace /dev/null or /dev/stdout by a file."""
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        raise StoreError(f"{path} is not a regular file.", "Name another file, or write to stdout: `-o -`.")


def checked_path(given: str | os.PathLike[str], where: str) -> str:
    """Return the name of a file. Raise InvalidData if the system cannot take it."""
    if not isinstance(given, str | os.PathLike):
        raise InvalidData(where, f"expected a path, got {brief(given)}")
    path = os.fspath(given)
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise InvalidData(where, f"{path!r} cannot be the name of a file")
    return path


def _sync_directory(path: str) -> None:
    """Make a renaming durable. Before that, a power cut may undo it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
