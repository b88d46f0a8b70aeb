"""Redaction in memory: messages are replaced on every tape, and versions are made anew from their heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from perdure import codec
from perdure.errors import SessionBusy
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, Tape, every_span
from perdure.protocols import Entry, JournalEntry
from perdure.stores.format.heads import StoredHead, encode_head
from perdure.stores.format.placement import foreign_stretches, transcripts_of
from perdure.stores.redaction import Log, Places, Redone, Row, Version, next_version

Logs = dict[Log, list[Message | None]]


class MemoryBench:
    """The logs and sessions of a MemoryStore; `number_in` tells whose a log is, `readable` what an entry says."""

    def __init__(
        self,
        origin: str,
        sessions: Mapping[str, Any],
        logs: Logs,
        number_in: Callable[[Log], int],
        readable: Callable[[JournalEntry], JournalEntry],
        at: datetime,
    ) -> None:
        self._origin = origin
        self._sessions = sessions
        self._logs = logs
        self._number_in = number_in
        self._readable = readable
        self._at = at
        self._heads: dict[str, list[Version]] = {}
        self._tapes: dict[Log, Tape] = {}

    def history(self, session_id: str) -> Iterator[Row]:
        shelved = self._sessions[session_id]
        places = {(key, 0, len(log)) for key, log in self._logs.items() if self._number_in(key) == shelved.number}
        for key, start, stop in places | self._shown(shelved):
            for position, message in enumerate(self._logs[key][start:stop], start):
                if message is not None:
                    yield Row(key, position, codec.encode_message(message))

    def _shown(self, shelved: Any) -> set[tuple[Log, int, int]]:
        own = LogRef(self._origin, shelved.number)
        return {stretch for session in shelved.versions for stretch in foreign_stretches(session, own)}

    def row(self, log: Log, position: int) -> bytes:
        message = self._logs[log][position]
        assert message is not None, "somebody shows it"
        return codec.encode_message(message)

    def concerned(self, places: Places) -> Collection[str]:
        owners = {self._number_in(log) for log in places}
        found = {
            session_id
            for session_id, shelved in self._sessions.items()
            if shelved.number in owners
            or any(start <= at < stop for log, start, stop in self._shown(shelved) for at in places.get(log, ()))
        }
        while forks := {key for key, each in self._sessions.items() if each.info.parent_id in found} - found:
            found |= forks
        return found

    def require_free(self, session_id: str) -> None:
        shelved = self._sessions[session_id]
        if shelved.claim is not None and shelved.expires > self._at:
            raise SessionBusy(session_id, shelved.claim.owner)

    def versions(self, session_id: str) -> list[Version]:
        if session_id not in self._heads:
            kept = self._sessions[session_id].versions
            self._heads[session_id] = [Version(each.version, *encode_head(each, "")) for each in kept]
        return self._heads[session_id]

    def entries(self, session_id: str) -> list[Entry]:
        return self._plain(self._sessions[session_id].record)

    def inbox(self, session_id: str) -> list[Entry]:
        return self._plain(self._sessions[session_id].inbox)

    def _plain(self, record: Sequence[JournalEntry]) -> list[Entry]:
        return [Entry(each.kind, each.body, each.run) for each in map(self._readable, record)]

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        for row in rows:
            self._replace_message(row.log, row.position, codec.decode_message(row.body))
        for redone in sessions:
            self._replace_session(redone)

    def _replace_message(self, log: Log, position: int, message: Message) -> None:
        self._logs[log][position] = message
        for shelved in self._sessions.values():
            for session in shelved.versions:
                for transcript in transcripts_of(session.state):
                    for span in every_span(transcript.pieces):
                        tape = span.tape
                        is_there = tape.ref == (self._origin, log) and tape.base <= position < tape.end
                        if is_there and tape.items is not None:
                            tape.items[position - tape.base] = message

    def _replace_session(self, redone: Redone) -> None:
        shelved = self._sessions[redone.session_id]
        changed = {version.number: version for version in redone.versions}
        heads = [changed.get(version.number, version) for version in self.versions(redone.session_id)]
        # Those without a change too: their steps were made whole from messages that have been replaced.
        shelved.versions = [self._made(*pair) for pair in zip(heads, shelved.versions, strict=True)]
        for record, entries in ((shelved.record, redone.entries), (shelved.inbox, redone.inbox)):
            for place, entry in entries.items():
                record[place] = JournalEntry(place + 1, entry.kind, entry.body, entry.run)
        shelved.record.append(JournalEntry(len(shelved.record) + 1, redone.told.kind, redone.told.body))
        if shelved.claim is None:
            newest = heads[-1]
            further = Version(newest.number + 1, next_version(newest.raw, self._at), newest.values)
            shelved.versions.append(self._made(further, shelved.versions[-1]))

    def _made(self, version: Version, like: AgentSession) -> AgentSession:
        return StoredHead(version.raw, like.id, version.number).session(version.values, self._span)

    def _span(self, log: Log, start: int, stop: int) -> Span:
        if log not in self._tapes:
            # Where a message has been erased, nobody shows one.
            self._tapes[log] = Tape(cast(list[Message], list(self._logs[log])), LogRef(self._origin, log))
        return Span(self._tapes[log], start, stop)
