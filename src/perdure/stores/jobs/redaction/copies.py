"""Copies of logs. A session that was imported without its parent has copies of the parent's messages in its own logs.

Such a log is named after its original, and has the messages at the same positions. So a copy and its original can be
matched, and two copies as well, no matter which sessions between them are in the store.
"""

from __future__ import annotations

from collections.abc import Collection

from perdure.stores.engine import Job, Select
from perdure.stores.jobs.archive.archived import LENT, own_name, split_name
from perdure.stores.jobs.redaction.places import Log

_BEHIND_LENT = chr(ord(LENT) + 1)


def copies_of(log: Log) -> Job[list[Log]]:
    """Return the other logs that may have the same messages at the same positions."""
    origins = yield from _origins(log)
    found: set[Log] = set()
    for owner, branch in map(split_name, origins):
        for (sid,) in (yield Select("session", ("sid",), {"id": owner})):
            found |= {each for (each,) in (yield Select("log", ("log",), {"sid": sid, "name": branch}))}
    # Names have no index: this reads every log's row, and returns the few that are copies.
    for each, name in (yield Select("log", ("log", "name"), {"name >=": LENT, "name <": _BEHIND_LENT})):
        if _origin(name.removeprefix(LENT)) in origins:
            found.add(each)
    return sorted(found - {log}, key=str)


def _origins(log: Log) -> Job[Collection[str]]:
    """Return the names of a log's original, which is the log itself unless it is a copy."""
    found: set[str] = set()
    for sid, branch in (yield Select("log", ("sid", "name"), {"log": log})):
        names = [own_name(owner, branch) for (owner,) in (yield Select("session", ("id",), {"sid": sid}))]
        # If its session was erased, its forks still name it as their parent.
        found |= {_origin(name) for name in names or (yield from _remembered(log, branch))}
    return found


def _remembered(log: Log, branch: str) -> Job[list[str]]:
    showing = sorted({child for (child,) in (yield Select("ref", ("child",), {"log": log}))})
    rows = (yield Select("session", ("parent",), {"sid in": showing})) if showing else []
    return [own_name(parent, branch) for (parent,) in rows if parent is not None]


def _origin(name: str) -> str:
    """Return the name of the log from which a copy, or a copy of a copy, was made."""
    while name.endswith(":2"):  # one of several copies in one session
        name = name.removesuffix(":2")
    return name.rpartition(f"/{LENT}")[2]
