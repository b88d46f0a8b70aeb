"""A file that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import BinaryIO

from perdure.errors import InvalidData, StoreError
from perdure.model.ids import new_id


@asynccontextmanager
async def whole_file(path: str) -> AsyncIterator[BinaryIO]:
    """Give a file to write. It takes its name once it is written and synced; after an error nothing is left."""
    unfinished = f"{path}.{new_id()}.tmp"
    try:
        # What was said is for its owner's eyes, wherever it goes; nor does it go where somebody's link leads.
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
        with suppress(OSError):
            os.unlink(unfinished)


def checked_path(given: str | os.PathLike[str], where: str) -> str:
    """Return the name of a file; InvalidData if the system cannot take it."""
    path = os.fspath(given)
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise InvalidData(where, f"{path!r} cannot be the name of a file")
    return path


def _sync_directory(path: str) -> None:
    """Make a renaming last: until then a power cut may undo it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
