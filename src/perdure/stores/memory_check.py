"""A memory store looked at beneath its sessions: numbers, counters, and what is left of those that were erased."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.protocols import Claim, JournalEntry, Key, Problem
from perdure.stores.format.placement import foreign_stretches
from perdure.stores.format.rows import Stretch
from perdure.stores.memory_archive import Logs, log_key
from perdure.stores.noted import without

_COPY = "Copy the sessions into another store, and go on with that; if it happens again, please report it."

_LEFT_OVER = "Call `gc`, which erases what nobody shows."


class Shelved(Protocol):
    """What has to be known of a session to check it."""

    number: int
    versions: list[AgentSession]
    record: list[JournalEntry]
    inbox: list[JournalEntry]
    taken: int
    keys: dict[str, tuple[Key, int]]
    epoch: int
    claim: Claim | None


def check(origin: str, sessions: Mapping[str, Shelved], logs: Logs) -> list[Problem]:
    found = [
        Problem(session_id, where, what, _COPY)
        for session_id, shelved in sessions.items()
        for where, what in _faults(session_id, shelved)
    ]
    return [*found, *_left_over(origin, sessions, logs)]


def _faults(session_id: str, shelved: Shelved) -> Iterator[tuple[str, str]]:
    for number, session in enumerate(shelved.versions, 1):
        if (session.id, session.version) != (session_id, number):
            yield f"version {number}", f"it is version {session.version} of {session.id!r}"
    for where, entries in (("its record", shelved.record), ("its inbox", shelved.inbox)):
        if not _is_dense(entries):
            yield where, "its entries are not numbered from 1 on"
    if not 0 <= shelved.taken <= len(shelved.inbox):
        yield "how far its inbox is taken", "it is noted to be taken to where it does not reach"
    if not shelved.number << 20 <= shelved.epoch < (shelved.number + 1) << 20:
        yield "its epoch", "it is out of the session's range"
    claim = shelved.claim
    if claim is not None and (claim.session_id, claim.epoch) != (session_id, shelved.epoch):
        yield "its claim", f"it is one on {claim.session_id!r}, or of another epoch"
    for name, (_, version) in shelved.keys.items():
        if not 1 <= version <= len(shelved.versions):
            yield f"idempotency key {name!r}", f"there is no version {version}"


def _is_dense(entries: Sequence[JournalEntry]) -> bool:
    return all(entry.seq == place for place, entry in enumerate(entries, 1))


def _left_over(origin: str, sessions: Mapping[str, Shelved], logs: Logs) -> Iterator[Problem]:
    owned = {str(shelved.number) for shelved in sessions.values()}
    orphaned = {key: log for key, log in logs.items() if str(key).partition("/")[0] not in owned}
    if not orphaned:
        return
    shown: set[Stretch] = set()
    for shelved in sessions.values():
        for session in shelved.versions:
            shown |= foreign_stretches(session, LogRef(origin, log_key(shelved.number, "")))
    held = [(key, at, at + 1) for key, log in orphaned.items() for at, each in enumerate(log) if each is not None]
    for key, start, stop in without(held, shown):
        what = "they are left of an erased session, and nobody shows them"
        yield Problem(None, f"messages {start} to {stop} of log {key}", what, _LEFT_OVER)
