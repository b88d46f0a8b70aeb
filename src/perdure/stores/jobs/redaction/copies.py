"""Copies of logs: a session that came without the one it was forked from keeps what it shows of that in its own logs.

Such a log is named after the one that it was copied from, and has its messages at the same positions. So a copy and its
original find each other, and two copies too, whichever sessions between them are in the store.
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
    # There is no index of names: this looks at every log, and returns the few that are copies.
    for each, name in (yield Select("log", ("log", "name"), {"name >=": LENT, "name <": _BEHIND_LENT})):
        if _origin(name.removeprefix(LENT)) in origins:
            found.add(each)
    return sorted(found - {log}, key=str)


def _origins(log: Log) -> Job[Collection[str]]:
    """Return the names under which a log is known elsewhere."""
    found: set[str] = set()
    for sid, branch in (yield Select("log", ("sid", "name"), {"log": log})):
        names = [own_name(owner, branch) for (owner,) in (yield Select("session", ("id",), {"sid": sid}))]
        # If its session was erased, those that were forked from it remember the name.
        found |= {_origin(name) for name in names or (yield from _remembered(log, branch))}
    return found


def _remembered(log: Log, branch: str) -> Job[list[str]]:
    showing = sorted({child for (child,) in (yield Select("ref", ("child",), {"log": log}))})
    rows = (yield Select("session", ("parent",), {"sid in": showing})) if showing else []
    return [own_name(parent, branch) for (parent,) in rows if parent is not None]


def _origin(name: str) -> str:
    """Return the name of the log that a copy, or a copy of a copy, was made of."""
    while name.endswith(":2"):  # one of several copies in one session
        name = name.removesuffix(":2")
    return name.rpartition(f"/{LENT}")[2]
