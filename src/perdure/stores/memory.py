"""Sessions in this process's memory: for tests, prototypes, and runs that need not last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Self, Unpack

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import ClaimLost, RunInterrupted, SessionBusy, SessionConflict, SessionNotFound
from perdure.model.ids import SessionId, new_id, now
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.model.transcript import LogRef
from perdure.protocols import (
    NOTHING_WRITTEN,
    Appended,
    ArchivedSession,
    Claim,
    Entry,
    Filters,
    JournalEntry,
    Key,
    Problem,
    RunOnRecord,
    SearchHit,
    SessionQuery,
    StoredAt,
    checked_version,
)
from perdure.stores import checked, memory_archive, memory_check
from perdure.stores.beginnings import Beginning
from perdure.stores.format.heads import encode_head
from perdure.stores.format.placement import Placement, consolidate, foreign_stretches
from perdure.stores.format.rows import ListPlace, another_session, page_start, runs_in
from perdure.stores.landing import Landing, require_same
from perdure.stores.memory_erasure import MemoryBench
from perdure.stores.moving import MOVED, Material, archive, busy
from perdure.stores.redaction import Request, redact
from perdure.stores.search import Lent, Place, Query, attributed, rank


class _Shelved:
    """All that the store holds of one session."""

    def __init__(self, number: int, first: AgentSession) -> None:
        self.number = number
        self.versions = [first]
        self.record: list[JournalEntry] = []
        self.inbox: list[JournalEntry] = []
        self.taken = 0
        self.keys: dict[str, tuple[Key, int]] = {}
        # Numbers are never used twice: a claim on an erased session is none on its successor of the same id.
        self.epoch = number << 20
        self.claim: Claim | None = None
        self.expires = now()

        self.place = ListPlace(first.info.created_at.timestamp(), number)

    @property
    def info(self) -> AgentSessionInfo:
        return self.versions[-1].info


class MemoryStore:
    """Keeps every version in memory. What it accepts, every other store accepts."""

    never_waits = True
    """Whether every call is carried out at once, so that nothing can be cancelled in its middle."""

    def __init__(self) -> None:
        self._origin = new_id()
        self._numbers = count(1)
        self._sessions: dict[str, _Shelved] = {}
        self._logs: dict[int | str, list[Message | None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def create(self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> AgentSession:
        checked.create(session, written)
        found = self._sessions.get(session.id)
        if found is not None:
            raise SessionConflict(session.id, 0, found.info.version)
        shelved = _Shelved(next(self._numbers), session)
        kept = self._settled(shelved, session, written)
        shelved.versions = [kept]
        self._sessions[session.id] = shelved
        return kept

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
    ) -> AgentSession:
        checked.save(session, claim, written, entries, taken, key)
        shelved = self._find(session.id)
        if claim is not None:
            self._held(claim)
        else:
            _require_unclaimed(shelved)
        if shelved.info.version != session.version:
            raise SessionConflict(session.id, session.version, shelved.info.version)
        if shelved.info.created_at != session.info.created_at:
            raise another_session(session)
        _check_entries(entries)
        if key is not None:
            codec.check_text(f"{key.name}/{key.digest}", "$.key")
        kept = self._settled(shelved, session, written)
        shelved.versions.append(kept)
        _enter(shelved.record, entries)
        shelved.taken = max(shelved.taken, taken)
        if key is not None:
            shelved.keys[key.name] = (key, kept.version)
        shelved.claim = None
        return kept

    def _settled(self, shelved: _Shelved, session: AgentSession, written: Mapping[str, StoredAt]) -> AgentSession:
        placement = Placement(session, self._origin, written)
        ref = self._log(shelved, "")
        log = self._logs.get(ref.key, [])
        settled = placement.settle(ref, len(log))
        kept = AgentSession.reconstitute(settled, version=session.version + 1, updated_at=now())
        encode_head(kept, "")
        self._check_foreign(kept, ref)
        self._logs[ref.key] = log
        log.extend(placement.new_messages)
        return consolidate(kept)

    def _check_foreign(self, session: AgentSession, own: LogRef) -> None:
        for key, start, stop in foreign_stretches(session, own):
            if None in self._logs.get(key, [None])[start:stop]:
                raise SessionNotFound(session.info.parent_id or str(key))

    def _log(self, shelved: _Shelved, name: str) -> LogRef:
        return LogRef(self._origin, f"{shelved.number}/{name}" if name else shelved.number)

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        shelved = self._sessions.get(SessionId(session_id))
        version = checked_version(version)
        if shelved is None:
            return None
        if version is None:
            return shelved.versions[-1]
        return shelved.versions[version - 1] if 1 <= version <= len(shelved.versions) else None

    async def exists(self, session_id: str) -> bool:
        return SessionId(session_id) in self._sessions

    async def delete(self, session_id: str) -> None:
        shelved = self._find(session_id)
        if shelved.claim is not None and shelved.expires > now():
            raise SessionBusy(session_id, shelved.claim.owner)
        del self._sessions[shelved.info.id]
        self._erase_unnamed()

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        request, at = Request.of(session_id, message_ids, replacement), now()
        self._find(request.session_id)
        bench = MemoryBench(self._origin, self._sessions, self._logs, _number_in, _readable, at)
        return redact(bench, request, at)

    async def gc(self) -> int:
        return self._erase_unnamed()

    def _erase_unnamed(self) -> int:
        """Forget every message in the logs of deleted sessions that no other session's version names; how many."""
        erased = 0
        owned = {shelved.number for shelved in self._sessions.values()}
        orphaned = {key for key in self._logs if _number_in(key) not in owned}
        named: dict[int | str, set[int]] = {}
        for shelved in self._sessions.values():
            for session in shelved.versions if orphaned else ():
                for key, start, stop in foreign_stretches(session, self._log(shelved, "")):
                    named.setdefault(key, set()).update(range(start, stop))
        for key in orphaned:
            kept = named.get(key, set())
            erased += sum(m is not None and place not in kept for place, m in enumerate(self._logs[key]))
            self._logs[key] = [m if place in kept else None for place, m in enumerate(self._logs[key])]
            if not kept:
                del self._logs[key]
        return erased

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        query = SessionQuery.of(filters)
        before = page_start(query.after)
        found: list[tuple[ListPlace, AgentSessionInfo]] = []
        for shelved in sorted(self._sessions.values(), key=lambda each: each.place, reverse=True):
            if (before is None or shelved.place < before) and matches(shelved.info, query):
                found.append((shelved.place, shelved.info))
                if len(found) > query.limit:
                    break
        page = found[: query.limit]
        more = page[-1][0].next if len(found) > query.limit else None
        return SessionInfoList((info for _, info in page), next=more)

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        sought = Beginning.of(prefix, owner, deleted, limit)
        found = sorted(key for key, shelved in self._sessions.items() if sought.is_met_by(key, shelved.info))
        return list(map(SessionId, found[:limit]))

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        query = Query.of(text, owner, session_id, limit)
        return rank(self._places(query), query)

    def _places(self, query: Query) -> Iterator[Place]:
        infos = {shelved.number: shelved.info for shelved in self._sessions.values()}
        lent: dict[int | str, list[Lent]] = {}
        for shelved in self._sessions.values():
            for session in shelved.versions:
                for key, start, stop in foreign_stretches(session, self._log(shelved, "")):
                    lent.setdefault(key, []).append(Lent(start, stop, shelved.info))
        for key, log in self._logs.items():
            held = ((place, message) for place, message in enumerate(log) if message is not None)
            yield from attributed(infos.get(_number_in(key)), held, lent.get(key, ()), query)

    async def claim(
        self,
        session_id: str,
        *,
        version: int,
        owner: str,
        lease: float = 30.0,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        take_over: bool = False,
    ) -> tuple[Claim, Appended]:
        checked.claim(version, owner, lease, messages, entries, take_over)
        shelved = self._find(session_id)
        _require_unclaimed(shelved, take_over)
        if shelved.info.version != version:
            raise SessionConflict(session_id, version, shelved.info.version)
        _check_entries(entries, messages)
        shelved.epoch += 1
        shelved.claim = Claim(shelved.info.id, shelved.epoch, version, owner, lease)
        return shelved.claim, self._put(shelved, shelved.claim, "", messages, entries)

    async def heartbeat(self, claim: Claim) -> None:
        checked.held(claim)
        shelved = self._held(claim)
        shelved.expires = now() + timedelta(seconds=claim.lease)

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        checked.release(claim, interrupted)
        shelved = self._sessions.get(claim.session_id)
        if shelved is None or shelved.epoch != claim.epoch:
            return
        if interrupted:
            shelved.expires = datetime.min.replace(tzinfo=UTC)
        else:
            shelved.claim = None

    async def append(
        self,
        claim: Claim,
        *,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        log: str = "",
        taken: int = 0,
    ) -> Appended:
        checked.append(claim, messages, entries, log, taken)
        shelved = self._held(claim)
        _check_entries(entries, messages)
        shelved.taken = max(shelved.taken, taken)
        return self._put(shelved, claim, log, messages, entries)

    def _put(
        self, shelved: _Shelved, claim: Claim, name: str, messages: Sequence[Message], entries: Sequence[Entry]
    ) -> Appended:
        ref = self._log(shelved, name)
        log = self._logs.setdefault(ref.key, [])
        written = {message.id: StoredAt(ref, place) for place, message in enumerate(messages, len(log))}
        log.extend(map(codec.settled, messages))
        _enter(shelved.record, entries)
        shelved.expires = now() + timedelta(seconds=claim.lease)
        return Appended(written, len(shelved.record))

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        checked.messages(log, start, stop, self._origin)
        found = [m for m in self._logs.get(log.key, [])[start:stop] if m is not None]
        if len(found) != stop - start:
            raise SessionNotFound(f"log {log.key}")
        return found

    async def read(
        self,
        session_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        last: int | None = None,
        run: str | None = None,
        inbox: bool = False,
    ) -> Sequence[JournalEntry]:
        checked.read(after, limit, last, run, inbox)
        shelved = self._find(session_id)
        found = (shelved.inbox if inbox else shelved.record)[max(after, shelved.taken) if inbox else after :]
        if run is not None:
            found = [entry for entry in found if entry.run == run]
        chosen = found[:limit] if last is None else found[max(0, len(found) - last) :]
        return list(map(_readable, chosen))

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        checked.runs(limit, before, run)
        shelved = self._find(session_id)

        def stretch_of(loop: str) -> tuple[LogRef, int, int]:
            branch, main = self._log(shelved, loop), self._log(shelved, "")
            ref = branch if branch.key in self._logs else main
            return ref, 0, len(self._logs.get(ref.key, ()))

        found = runs_in(shelved.record, stretch_of, limit=limit, before=before, run=run)
        return [replace(each, first=_readable(each.first), last=_readable(each.last)) for each in found]

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        checked.log_of(name)
        ref = self._log(self._find(session_id), name)
        if name and ref.key not in self._logs:
            raise SessionNotFound(f"{session_id}/{name}")
        return ref, len(self._logs.get(ref.key, ()))

    async def lapsed(self) -> Sequence[SessionId]:
        claimed = (shelved for shelved in self._sessions.values() if shelved.claim is not None)
        return [shelved.info.id for shelved in claimed if shelved.expires <= now()]

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        checked.find_key(name)
        shelved = self._sessions.get(SessionId(session_id))
        return None if shelved is None else shelved.keys.get(name)

    async def is_claimed(self, session_id: str) -> bool:
        shelved = self._find(session_id)
        return shelved.claim is not None and shelved.expires > now()

    async def is_interrupted(self, session_id: str) -> bool:
        shelved = self._sessions.get(SessionId(session_id))
        return shelved is not None and shelved.claim is not None and shelved.expires <= now()

    async def post(self, session_id: str, entry: Entry) -> int:
        checked.post(entry)
        shelved = self._find(session_id)
        _check_entries((entry,))
        _enter(shelved.inbox, (entry,))
        return len(shelved.inbox)

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        checked.dump(alone)
        shelved = self._find(session_id)
        if shelved.claim is not None and shelved.expires > now():
            raise busy(session_id, shelved.claim.owner)
        logs = memory_archive.MemoryLogs(self._origin, self._sessions, self._logs)
        heads, values = memory_archive.stored_heads(shelved.versions)
        material = Material(
            shelved.info.id,
            heads,
            values.__getitem__,
            dict(logs.own(shelved.number)),
            memory_archive.plain(await self.read(session_id)),
            memory_archive.plain(await self.read(session_id, inbox=True)),
            {name: (key.digest, version) for name, (key, version) in shelved.keys.items()},
            shelved.claim is not None,
        )
        return archive(material, logs, alone=alone)

    async def restore(self, archived: ArchivedSession) -> bool:
        checked.restore(archived)
        landing = Landing(archived, memory_archive.MemoryLogs(self._origin, self._sessions, self._logs))
        if archived.session_id in self._sessions:
            require_same(archived, await self.dump(archived.session_id, alone=bool(archived.lent)))
            return False
        number = next(self._numbers)
        versions, logs = memory_archive.brought_in(landing, number, self._origin, self._logs)
        shelved = _Shelved(number, versions[0])
        shelved.versions = versions
        _enter(shelved.record, archived.entries)
        _enter(shelved.inbox, archived.inbox)
        shelved.keys = {name: (Key(name, digest), version) for name, (digest, version) in archived.keys.items()}
        if archived.interrupted:
            shelved.claim = Claim(archived.session_id, shelved.epoch, len(versions), MOVED.owner, 0)
        self._logs.update(logs)
        self._sessions[archived.session_id] = shelved
        return True

    async def check(self) -> Sequence[Problem]:
        return memory_check.check(self._origin, self._sessions, self._logs)

    def _find(self, session_id: str) -> _Shelved:
        shelved = self._sessions.get(SessionId(session_id))
        if shelved is None:
            raise SessionNotFound(session_id)
        return shelved

    def _held(self, claim: Claim) -> _Shelved:
        shelved = self._sessions.get(claim.session_id)
        if shelved is None or shelved.claim is None or shelved.epoch != claim.epoch:
            raise ClaimLost(claim.session_id, claim.epoch)
        return shelved


def _number_in(key: int | str) -> int:
    """The number of the session whose log has this key."""
    return int(str(key).partition("/")[0])


def matches(info: AgentSessionInfo, query: SessionQuery) -> bool:
    """Whether a header is one that a query asks for."""
    if info.status is SessionStatus.DELETED and not query.shows_deleted:
        return False
    wanted = (
        (query.id, info.id),
        (query.agent, info.agent_name),
        (query.status, info.status),
        (query.owner, info.owner),
        (query.parent, info.parent_id),
    )
    if any(asked is not None and asked != found for asked, found in wanted):
        return False
    if query.tag is not None and query.tag not in info.tags:
        return False
    return not (
        (query.created_after is not None and info.created_at <= query.created_after)
        or (query.created_before is not None and info.created_at >= query.created_before)
        or (query.updated_after is not None and info.updated_at <= query.updated_after)
        or (query.updated_before is not None and info.updated_at >= query.updated_before)
    )


def _require_unclaimed(shelved: _Shelved, take_over: bool = False) -> None:
    """Raise for a claim that lies on a session; one that has lapsed may be taken over."""
    if shelved.claim is None:
        return
    if shelved.expires > now():
        raise SessionBusy(shelved.info.id, shelved.claim.owner)
    if not take_over:
        raise RunInterrupted(shelved.info.id)


def _check_entries(entries: Sequence[Entry], messages: Sequence[Message] = ()) -> None:
    for entry in entries:
        if not (entry.kind.isascii() and (entry.run is None or entry.run.isascii())):
            codec.check_text(f"{entry.kind}/{entry.run}", "$.kind")
        if type(entry.body) is not msgspec.Raw:
            codec.encode_json(entry.body, f"$.{entry.kind}")
    for message in messages:
        codec.encode_message(message)


def _enter(record: list[JournalEntry], entries: Sequence[Entry]) -> None:
    record += [JournalEntry(seq, each.kind, each.body, each.run) for seq, each in enumerate(entries, len(record) + 1)]


def _readable(entry: JournalEntry) -> JournalEntry:
    """An entry as it is read: data, where the writer has given bytes."""
    return replace(entry, body=codec.decode_plain(entry.body)) if type(entry.body) is msgspec.Raw else entry
