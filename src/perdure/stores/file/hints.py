"""Hints to the sessions of a directory that have something waiting, or timers, so that not all have to be read.

`.waiting/{id}` and `.timers/{id}` exist before the lines that they point to. They may stay when these are dealt with,
so a reader looks into the log. A directory of an older release has no hints until they are first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perdure.stores.file.log import SessionLog
from perdure.stores.folder import Folder

WAITING, TIMERS = ".waiting", ".timers"
_ALL = "+"
"""A name that no session has. It exists once all sessions were looked at."""


def hinted(folder: Folder, kind: str) -> list[str]:
    """Return the sessions that may have something waiting, or timers."""
    return [name for name in folder.flags(kind) if name != _ALL]


def needed_by(log: SessionLog) -> Iterator[str]:
    """Yield the hints that a session has to have."""
    if log.version and len(log.inbox) > log.taken:
        yield WAITING
    if log.version and log.timers:
        yield TIMERS


def missing(folder: Folder, log: SessionLog) -> list[str]:
    return [kind for kind in needed_by(log) if folder.size(f"{kind}/{log.stem}") is None]


def is_surveyed(folder: Folder) -> bool:
    """Tell whether all sessions have the hints that they need."""
    return folder.size(f"{WAITING}/{_ALL}") is not None


def survey(folder: Folder, logs: Iterable[SessionLog]) -> None:
    """Give all sessions the hints that they need."""
    for log in logs:
        for kind in needed_by(log):
            give(folder, kind, log.stem)
    # Last: if this is killed before, the survey is repeated.
    give(folder, WAITING, _ALL)


def forget_survey(folder: Folder) -> None:
    """Make the next caller look at all sessions. Hints may be lost, or an older release may have written."""
    take(folder, WAITING, _ALL)


def give(folder: Folder, kind: str, session_id: str) -> None:
    if folder.size(f"{kind}/{session_id}") is None:
        folder.flag(kind, session_id)


def take(folder: Folder, kind: str, session_id: str) -> None:
    """Remove a hint, without a sync: one that comes back only costs a look."""
    folder.discard(f"{kind}/{session_id}")
