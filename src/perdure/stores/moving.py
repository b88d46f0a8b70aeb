"""A session on its way between stores: what is the same for every store that gives one out or takes one in.

In an archive a log is named by its session's id (`id`, `id/branch`); see `ArchivedSession`. In a store that keeps
another's messages on behalf of a session, they stand in a log of that session's own, whose branch begins with LENT.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from perdure.errors import CorruptRecord, SessionBusy
from perdure.model.ids import SessionId
from perdure.model.value import EMPTY
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.claims import Holder
from perdure.stores.format.rows import Stretch
from perdure.stores.renaming import OpenHead
from perdure.stores.tapes import TapeCache

LENT = "~"
MOVED = Holder("a run that was interrupted before its session was moved here")
"""Who holds the claim on an interrupted session that has been taken in: nobody that could come back."""

Rows = Mapping[int, bytes]


class Owner(NamedTuple):
    """Whose log it is: a session that is in the store, the branch, and when the session was created."""

    session_id: str
    branch: str
    created: float


class LogsAtHand(Protocol):
    """The logs of one store, as those who dump and restore look at them."""

    origin: str

    def owner_of(self, log: int | str) -> Owner | None:
        """Whose a log is; None if its session is gone."""
        ...

    def log_of(self, owner: str, branch: str, created: float) -> int | str | None:
        """The log of a session that was created at that time; None if there is none."""
        ...

    def rows(self, log: int | str, start: int, stop: int) -> Rows:
        """The messages of a stretch that are there, by position; CorruptRecord if one is damaged."""
        ...

    def holds(self, log: int | str, start: int, stop: int) -> bool:
        """Whether all messages of a stretch are there."""
        ...


class Material(NamedTuple):
    """What a store holds of a session, in its own terms: own logs by branch, all else as it goes into an archive."""

    session_id: SessionId
    heads: Mapping[int, bytes]
    value_of: Callable[[str], bytes]
    own: Mapping[str, Rows]
    entries: tuple[Entry, ...] = ()
    inbox: tuple[Entry, ...] = ()
    keys: Mapping[str, tuple[str, int]] = EMPTY
    interrupted: bool = False
    version: int = 0
    """The newest version, as another row than its head tells."""
    ends: Mapping[str, int] = EMPTY
    """How far own logs go at least, by branch, as other rows than their messages tell."""


def archive(material: Material, logs: LogsAtHand, *, alone: bool) -> ArchivedSession:
    """A session as it leaves a store; CorruptRecord if anything of it is missing or cannot be read."""
    _require_whole(material)
    naming = _Naming(material.session_id, logs)
    heads, values = _portable(material, naming)
    lent: dict[str, dict[int, bytes]] = {}
    for name, start, stop in naming.stretches():
        if naming.is_carried(str(name), alone):
            lent.setdefault(str(name), {}).update(
                _all_rows(material.session_id, naming.logs[str(name)], start, stop, logs)
            )
    own = {own_name(material.session_id, branch): rows for branch, rows in material.own.items() if rows}
    return ArchivedSession(
        session_id=material.session_id,
        heads=heads,
        values=values,
        logs={name: rows for name, rows in own.items() if _is_of(material.session_id, name)},
        lent=lent,
        owners=naming.owners,
        entries=material.entries,
        inbox=material.inbox,
        keys=material.keys,
        interrupted=material.interrupted,
    )


def _require_whole(material: Material) -> None:
    """Raise CorruptRecord if versions or messages are missing: a damaged index gives fewer rows, and no error."""
    for version in range(1, material.version + 1):
        if version not in material.heads:
            raise CorruptRecord(material.session_id, f"head {version}", "it is missing")
    for branch in {*material.own, *material.ends}:
        rows = material.own.get(branch, {})
        end = max(material.ends.get(branch, 0), max(rows, default=-1) + 1)
        # A log that holds others' messages on their behalf has only those that are shown.
        if not branch.startswith(LENT) and len(rows) != end:
            missing = next(position for position in range(end) if position not in rows)
            name = own_name(material.session_id, branch)
            raise CorruptRecord(material.session_id, f"message {missing} of log {name}", "it is missing")


def _portable(material: Material, naming: _Naming) -> tuple[tuple[bytes, ...], dict[str, bytes]]:
    """The versions with logs by name, and the values that they name."""
    written, values, found = list[bytes](), dict[str, bytes](), material.heads
    value_of = functools.cache(material.value_of)
    missing = next(number for number in range(1, len(found) + 2) if number not in found)
    if not found or missing <= len(found):
        raise CorruptRecord(material.session_id, f"head {missing}", "it is missing")
    for version in range(1, missing):
        raw, named = OpenHead(found[version], material.session_id, version, value_of).renamed(naming.rename)
        written.append(raw)
        values |= named
    return tuple(written), values


def _all_rows(session_id: str, log: int | str, start: int, stop: int, logs: LogsAtHand) -> Rows:
    rows = logs.rows(log, start, stop)
    for at in range(start, stop):
        if at not in rows:
            raise CorruptRecord(session_id, f"message {at} of log {log}", "it is missing")
    return rows


def own_name(session_id: str, branch: str) -> str:
    """The name in an archive of a session's own log, or of one that it keeps on another's behalf."""
    return branch.removeprefix(LENT) if branch.startswith(LENT) else name_of_log(session_id, branch)


def name_of_log(session_id: str, branch: str) -> str:
    return f"{session_id}/{branch}" if branch else str(session_id)


def split_name(name: str) -> tuple[str, str]:
    """The session and the branch that a name stands for."""
    owner, _, branch = name.partition("/")
    return owner, branch


def _is_of(session_id: str, name: str) -> bool:
    return split_name(name)[0] == session_id


class _Naming:
    """Gives the logs that a session names their names in its archive."""

    def __init__(self, session_id: str, logs: LogsAtHand) -> None:
        self._session_id = session_id
        self._here = logs
        self._names: dict[int | str, str] = {}
        self.logs: dict[str, int | str] = {}
        self.owners: dict[str, float] = {}
        self._linked: set[str] = set()
        self._met: set[Stretch] = set()

    def rename(self, log: int | str, start: int, stop: int) -> str:
        name = self.name_of(log)
        self._met.add((name, start, stop))
        return name

    def stretches(self) -> list[Stretch]:
        """The stretches that were named, merged and in order."""
        return merged(self._met)

    def name_of(self, log: int | str) -> str:
        if log not in self._names:
            name = self._new_name(log)
            self._names[log] = name
            self.logs[name] = log
        return self._names[log]

    def _new_name(self, log: int | str) -> str:
        owner = self._here.owner_of(log)
        if owner is None:
            return f"{self._here.origin[:8]}:{log}"
        if owner.session_id == self._session_id:
            return self._free(own_name(self._session_id, owner.branch))
        name = name_of_log(owner.session_id, owner.branch)
        if name in self.logs:
            return self._free(name)
        self.owners[owner.session_id] = owner.created
        self._linked.add(name)
        return name

    def _free(self, name: str) -> str:
        """The name, or one like it if a session shows both a log and a copy of it that it keeps."""
        while name in self.logs:
            name += ":2"
        return name

    def is_carried(self, name: str, alone: bool) -> bool:
        """Whether a log's messages go along though it is not one that the session has written."""
        return not _is_of(self._session_id, name) and (alone or name not in self._linked)


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Stretches in order, those that touch made one."""
    return TapeCache("").missing(stretches)


def busy(session_id: str, owner: str | None) -> SessionBusy:
    by = f" by {owner}" if owner else ""
    return SessionBusy(
        session_id,
        owner,
        f"Session {session_id!r} is being run{by}, and a run cannot move. Wait for it to end, or cancel it, and begin "
        "again: what has been brought over is not brought over twice.",
    )
