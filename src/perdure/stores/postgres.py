"""Sessions in a PostgreSQL database, which any number of processes on any number of machines may share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, Unpack

from perdure import codec
from perdure.errors import ConfigurationError, CorruptRecord, InvalidData, StoreError
from perdure.model.checks import expect_count
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, now
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionInfoList
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

try:
    import psycopg_pool as psycopg_pool
except ImportError:
    raise ConfigurationError(
        "PostgresStore needs psycopg and its pool. Install them: pip install 'perdure[postgres]'."
    ) from None

from perdure.aio import finish_despite_cancel
from perdure.stores import checked
from perdure.stores import postgres_archive as archive
from perdure.stores import postgres_erasure as erasure
from perdure.stores import postgres_journal as journal
from perdure.stores import postgres_reads as reads
from perdure.stores import postgres_redaction as redaction
from perdure.stores import postgres_search as search
from perdure.stores import postgres_words as words
from perdure.stores.beginnings import Beginning
from perdure.stores.cache import LRU, CachedSession
from perdure.stores.format.placement import Placement, consolidate, is_at_hand
from perdure.stores.format.rows import LAST, page_start, prepare_batch, prepare_entries
from perdure.stores.format.tapes import TapeCache
from perdure.stores.postgres_changes import Append, Change, Keep, Take
from perdure.stores.postgres_check import check
from perdure.stores.postgres_events import Listener
from perdure.stores.postgres_link import Link
from perdure.stores.postgres_rows import given_time
from perdure.stores.postgres_schema import check_schema, migrate
from perdure.stores.postgres_writer import Writer
from perdure.stores.redaction import Request
from perdure.stores.search import Query


class PostgresStore:
    """Keeps sessions in PostgreSQL: one statement a save, and one for all the saves of a process that wait together.

    `schema` keeps tenants apart within a database, and is created if there is none. `pool` is the most connections
    that are held; `cache` is how many sessions are kept at hand, each checked against the database at every load.
    """

    def __init__(self, dsn: str, *, schema: str = "perdure", pool: int = 8, cache: int = 128) -> None:
        if not isinstance(dsn, str) or not dsn.strip():
            raise InvalidData("$.dsn", "a PostgresStore needs the address of a database, as postgresql://host/name")
        self._dsn = dsn
        self._schema = check_schema(schema)
        self._pool = expect_count(pool, "$.pool", least=1)
        self._live: LRU[str, CachedSession] = LRU(expect_count(cache, "$.cache"))
        self._definitions: LRU[str, AgentDefinition] = LRU(256)
        self._open: _Open | None = None
        self._claims: dict[tuple[str, int], Claim] = {}

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise StoreError("This store is open already.")
        await migrate(self._dsn, self._schema)
        link = Link(self._dsn, self._schema, self._pool)
        try:
            await link.open()
            origin = str((await link.row("SELECT uid FROM meta"))[0])
        except BaseException:
            await link.close()
            raise
        self._open = _Open(link, origin, Writer(link, self._finish))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            claims, self._claims = list(self._claims.values()), {}
            self._live.clear()
            if opened.link.is_abandoned:
                opened.link.abandon()
            else:
                await finish_despite_cancel(opened.close(claims))

    @property
    def _db(self) -> _Open:
        if self._open is None:
            raise StoreError("This store is not open. Use it inside `async with PostgresStore(dsn) as store:`.")
        self._open.link.check()
        return self._open

    def pin(self, session_id: str) -> None:
        """Keep a session at hand, however long it is not used."""
        self._live.pinned.add(SessionId(session_id))

    def unpin(self, session_id: str) -> None:
        self._live.pinned.discard(SessionId(session_id))

    def evict(self, session_id: str) -> None:
        """Let go of a session that is at hand; the next load reads it again."""
        self._live.pop(SessionId(session_id), None)

    async def create(self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> AgentSession:
        checked.create(session, written)
        origin = self._db.origin
        placement = Placement(session, origin, written)
        return await self._keep(Keep(session, placement, now(), origin=origin, is_new=True))

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
        origin = self._db.origin
        change = Keep(
            session,
            Placement(session, origin, written),
            now(),
            origin=origin,
            live=self._known(session),
            claim=claim,
            batch=prepare_batch(entries),
            taken=taken,
            key=key,
        )
        return await self._keep(change)

    def _known(self, session: AgentSession) -> CachedSession | None:
        """What is cached of a session, if it is of the version to be replaced: only then has nothing changed since."""
        live = self._live.get(session.id)
        return live if live is not None and live.session.version == session.version else None

    async def _keep(self, change: Keep) -> AgentSession:
        live: CachedSession = await self._db.writer.make(change)
        if not live.at_hand:
            with suppress(CorruptRecord):  # it is saved all the same
                return await self.load(live.session.id, live.session.version) or live.session
        return live.session

    def _finish(self, change: Change, result: Any) -> Any:
        """Called by the writer with what came of a change, whether or not its caller still waits."""
        self._note_claim(change, result)
        if not isinstance(change, Keep):
            return result
        session = consolidate(result.session)
        kept = CachedSession(session, result.erasures, result.hashes, result.refs, is_at_hand(session))
        if self._open is not None:
            self._live.keep(session.id, kept)
        return kept

    def _note_claim(self, change: Change, result: Any) -> None:
        """Know the claims that were taken here and not given back: they lapse when the store is closed."""
        if isinstance(change, Take):
            self._claims[change.session_id, result[0].epoch] = result[0]
        elif isinstance(change, Keep) and change.claim is not None:
            self._claims.pop((change.session_id, change.claim.epoch), None)

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        key = SessionId(session_id)
        self._db.link.check()
        version = checked_version(version)
        if version is not None and not 0 < version <= LAST:
            return None
        try:
            return await self._load(key, version, self._live.recall(key))
        except CorruptRecord:  # an erasure between two statements looks like damage; damage is there the next time too
            self._live.pop(key, None)
            return await self._load(key, version, None)

    async def _load(self, key: SessionId, version: int | None, live: CachedSession | None) -> AgentSession | None:
        link = self._db.link
        known = None
        if live is not None and live.at_hand and version in (None, live.session.version):
            known = (live.session.version, live.erasures)
        shelf = TapeCache(self._db.origin, live.session if live is not None else None)
        loaded = await reads.load(link, key, version, known, shelf, cold=live is None)
        if loaded is None:
            self._live.pop(key, None)
            return None
        if loaded.head is None:
            assert live is not None
            return live.session
        if live is not None and live.erasures != loaded.erasures:
            return await self._load(key, version, None)  # what was at hand may be of what has been erased
        session = loaded.head.session(loaded.values, shelf.span, self._definitions.recall(loaded.head.head.definition))
        self._definitions.keep(loaded.head.head.definition, session.definition)
        if version is None:
            self._db.writer.note(key, loaded.place)
            self._live.keep(key, CachedSession(session, loaded.erasures, frozenset(loaded.values)))
        return session

    async def exists(self, session_id: str) -> bool:
        return await self._db.link.row("SELECT 1 FROM session WHERE id = %s", (str(SessionId(session_id)),)) is not None

    async def delete(self, session_id: str) -> None:
        key = SessionId(session_id)
        self._db.writer.forget(key)
        self._live.pop(key, None)
        self._definitions.clear()
        await erasure.delete(self._db.link, key)

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        """Erase sessions at the price of one, and say which; those that are being run, or gone already, are left."""
        keys = checked.session_ids(session_ids)
        for key in keys:
            self._db.writer.forget(key)
        self._forget_all()
        return await erasure.delete_many(self._db.link, keys)

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        request = Request.of(session_id, message_ids, replacement)
        self._forget_all()
        job = partial(redaction.redact, request=request, at=now(), time=given_time())
        try:
            return await self._db.link.whole(job)
        finally:
            self._forget_all()

    async def gc(self) -> int:
        self._forget_all()
        return await self._db.link.whole(redaction.gc)

    def _forget_all(self) -> None:
        """What is at hand may be of what is about to be erased."""
        self._live.clear()
        self._definitions.clear()

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        query = SessionQuery.of(filters)
        page_start(query.after)
        return await reads.list_sessions(self._db.link, query)

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        return await reads.ids_with_prefix(self._db.link, Beginning.of(prefix, owner, deleted, limit))

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        return await search.search(self._db.link, Query.of(text, owner, session_id, limit))

    async def index(self, *, anew: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
        checked.index(anew, progress)
        return await words.index(self._db.link, anew=anew, progress=progress)

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
        asked = Claim(SessionId(session_id), 0, version, owner, lease)
        change = Take(asked, self._db.origin, _encoded(messages), prepare_batch(entries), take_over=take_over)
        taken: tuple[Claim, Appended] = await self._db.writer.make(change)
        return taken

    async def heartbeat(self, claim: Claim) -> None:
        checked.held(claim)
        await journal.heartbeat(self._db.link, claim)

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        checked.release(claim, interrupted)
        await journal.release(self._db.link, claim, interrupted)
        self._claims.pop((claim.session_id, claim.epoch), None)

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
        batch = prepare_batch(entries)
        change = Append(claim, self._db.origin, _encoded(messages), batch, taken=taken, branch=log)
        appended: Appended = await self._db.writer.make(change)
        return appended

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
        key = SessionId(session_id)
        if inbox:
            return await journal.read_inbox(self._db.link, key, after, limit)
        return await journal.read_record(self._db.link, key, after, limit, last, run)

    async def changed(self, session_id: str, after: int, most: float) -> None:
        checked.changed(after, most)
        await self._db.listener.changed(SessionId(session_id), after, most)

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        checked.runs(limit, before, run)
        return await journal.runs(self._db.link, SessionId(session_id), self._db.origin, limit, before, run)

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        checked.log_of(name)
        return await journal.log_of(self._db.link, SessionId(session_id), name, self._db.origin)

    async def lapsed(self) -> Sequence[SessionId]:
        return await journal.lapsed(self._db.link)

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        checked.messages(log, start, stop, self._db.origin)
        return await reads.read_log(self._db.link, checked.log_number(log), start, stop)

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        checked.find_key(name)
        return await journal.find_key(self._db.link, SessionId(session_id), name)

    async def is_claimed(self, session_id: str) -> bool:
        return await journal.is_claimed(self._db.link, SessionId(session_id))

    async def is_interrupted(self, session_id: str) -> bool:
        return await journal.is_interrupted(self._db.link, SessionId(session_id))

    async def post(self, session_id: str, entry: Entry) -> int:
        checked.post(entry)
        ((given, body),) = prepare_entries([entry])
        return await journal.post(self._db.link, SessionId(session_id), given, body)

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        checked.dump(alone)
        key, origin, at = SessionId(session_id), self._db.origin, given_time()
        job = partial(archive.dump, session_id=key, origin=origin, at=at, alone=alone)
        return await self._db.link.whole(job, snapshot=True)

    async def restore(self, archived: ArchivedSession) -> bool:
        checked.restore(archived)
        job = partial(archive.restore, archived=archived, origin=self._db.origin, at=given_time())
        return await self._db.link.whole(job)

    async def check(self) -> Sequence[Problem]:
        return await self._db.link.whole(check, snapshot=True)


class _Open:
    """An open store: its connections, and the tasks that write and listen."""

    def __init__(self, link: Link, origin: str, writer: Writer) -> None:
        self.link = link
        self.origin = origin
        self.writer = writer
        self.listener = Listener(link)

    async def close(self, claims: Sequence[Claim]) -> None:
        """Carry out what is waiting, have these claims lapse, and let go of the connections."""
        try:
            await self.writer.close()
            await journal.lapse(self.link, claims)
        finally:
            self.link.closed = True
            await self.listener.close()
            await self.link.close()


def _encoded(messages: Sequence[Message]) -> list[tuple[str, bytes]]:
    return [(message.id, codec.encode_message(message)) for message in messages]
