"""Sessions of a memory store given out and taken in whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Protocol

from perdure import codec
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Entry, JournalEntry
from perdure.stores.format.heads import StoredHead, encode_head
from perdure.stores.format.tapes import TapeCache
from perdure.stores.landing import Landing
from perdure.stores.moving import Owner, Rows

Logs = MutableMapping[int | str, list[Message | None]]


class Numbered(Protocol):
    """What has to be known of a session to find its logs."""

    @property
    def number(self) -> int: ...
    @property
    def versions(self) -> list[AgentSession]: ...


class MemoryLogs:
    """The logs of a memory store."""

    def __init__(self, origin: str, sessions: Mapping[str, Numbered], logs: Logs) -> None:
        self.origin = origin
        self._sessions = sessions
        self._logs = logs
        self._ids = {shelved.number: session_id for session_id, shelved in sessions.items()}

    def owner_of(self, log: int | str) -> Owner | None:
        number, _, branch = str(log).partition("/")
        session_id = self._ids.get(int(number))
        return None if session_id is None else Owner(session_id, branch, self._created(session_id))

    def _created(self, session_id: str) -> float:
        return self._sessions[session_id].versions[-1].info.created_at.timestamp()

    def log_of(self, owner: str, branch: str, created: float) -> int | str | None:
        if owner not in self._sessions or self._created(owner) != created:
            return None
        return log_key(self._sessions[owner].number, branch)

    def rows(self, log: int | str, start: int, stop: int) -> Rows:
        found = enumerate(self._logs.get(log, [])[start:stop], start)
        return {at: codec.encode_message(message) for at, message in found if message is not None}

    def holds(self, log: int | str, start: int, stop: int) -> bool:
        found = self._logs.get(log, [])[start:stop]
        return len(found) == stop - start and None not in found

    def own(self, number: int) -> Iterator[tuple[str, Rows]]:
        """The logs of a session, by branch."""
        for key, log in self._logs.items():
            owner, _, branch = str(key).partition("/")
            if int(owner) == number:
                yield branch, self.rows(key, 0, len(log))


def log_key(number: int, branch: str) -> int | str:
    return f"{number}/{branch}" if branch else number


def stored_heads(versions: Sequence[AgentSession]) -> tuple[dict[int, bytes], dict[str, bytes]]:
    """The versions as other stores keep them, and the values that they name."""
    heads: dict[int, bytes] = {}
    values: dict[str, bytes] = {}
    for session in versions:
        heads[session.version], named = encode_head(session, "")
        values |= named
    return heads, values


def plain(entries: Sequence[JournalEntry]) -> tuple[Entry, ...]:
    return tuple(Entry(entry.kind, entry.body, entry.run) for entry in entries)


def brought_in(landing: Landing, number: int, origin: str, logs: Logs) -> tuple[list[AgentSession], Logs]:
    """The versions of an archived session on the logs here, and the logs to be added for them."""
    added = {log_key(number, branch): _spread(rows) for branch, rows in landing.own.items() if rows}
    shelf = TapeCache(origin)
    for key, start, stop in landing.settled_stretches(lambda branch: log_key(number, branch)):
        items = [message for message in (added.get(key) or logs[key])[start:stop] if message is not None]
        shelf.put(key, start, items)
    heads = landing.heads(lambda branch: log_key(number, branch))
    session_id = landing.archived.session_id
    numbered = enumerate(heads, 1)
    return [StoredHead(raw, session_id, at).session(values, shelf.span) for at, (raw, values) in numbered], added


def _spread(rows: Rows) -> list[Message | None]:
    """Messages at their positions, with nothing at those that are not there."""
    spread: list[Message | None] = [None] * (max(rows) + 1)
    for at, body in rows.items():
        spread[at] = codec.decode_message(body)
    return spread
