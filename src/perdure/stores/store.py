"""The store: each verb's checks, its job, and the sessions at hand. It is written once for all engines."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self, Unpack

from msgspec.structs import replace

from perdure import codec
from perdure.aio import aside
from perdure.errors import (
    CorruptRecord,
    InvalidSessionFile,
    KeyMissing,
    KeyUnavailable,
    PerdureError,
    SessionLocked,
    SessionNotFound,
    StoreError,
    UnreadableFile,
)
from perdure.model.checks import expect, expect_count
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, now
from perdure.model.message import Message, Text
from perdure.model.retention import Retention
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, check_owner
from perdure.model.transcript import LogRef
from perdure.protocols import (
    NOTHING_WRITTEN,
    Adopted,
    Appended,
    ArchivedSession,
    Change,
    Claim,
    Damage,
    Due,
    Entry,
    Erased,
    Filters,
    Forgotten,
    JournalEntry,
    Key,
    KeyRing,
    MessagePlace,
    Preview,
    Problem,
    Running,
    RunOnRecord,
    RunProgress,
    SearchHit,
    SessionHead,
    SessionHeads,
    SessionQuery,
    Sketch,
    StoredAt,
    Timer,
    Token,
    Waiting,
    checked_version,
)
from perdure.stores import checked
from perdure.stores.cache import LRU, CachedSession, SessionCache
from perdure.stores.engine import Count, Engine, IndexedEngine, Job, Kind, T, cannot_be_copied
from perdure.stores.format import packing
from perdure.stores.format.placement import Placement, has_end, is_at_hand
from perdure.stores.format.rows import LAST, Attachments, Batch, Namer, hash_of, prepare_batch
from perdure.stores.jobs import claiming, loading, record
from perdure.stores.jobs.listing import IdPart, Page
from perdure.stores.jobs.loading import Load, Loaded
from perdure.stores.jobs.saving import Append, Keep, KeepAll, Pack, Take
from perdure.stores.sealing import Sealing
from perdure.stores.tapes import consolidate, with_end_read

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit, Landing, Outline

# Seconds that closing may take. A database that does not answer must not keep a process from ending.
_LAST_WORD = 5.0
_DAMAGES = (CorruptRecord, InvalidSessionFile, UnreadableFile, KeyUnavailable)


class Store:
    """A store that keeps sessions in an engine's tables."""

    def __init__(self, engine: Engine, *, cache: int = 128, keys: KeyRing | None = None) -> None:
        self._engine = engine
        self._sealing = engine.sealing = Sealing(keys)
        self._owners: LRU[tuple[str, int], str | None] = LRU(1024)
        """The owners of claimed sessions, by session and epoch."""
        self._unopened: KeyMissing | None = None
        """The error of the newest session, if the store is sealed and was opened without keys."""
        self._cache = SessionCache(cache)
        self._definitions: LRU[str, AgentDefinition] = LRU(256)
        self._values: LRU[str, bytes] = LRU(256)
        self._claims: dict[tuple[str, int], Claim] = {}
        """The claims that were taken here and not given back. They lapse when the store is closed."""
        self._losses = 0
        """The number of forgotten keys when it was last looked at."""
        self._sketched: set[tuple[str, int]] = set()
        """The claims, by session and epoch, under which pieces of an answer may have been kept."""
        self._pack: Pack = packing.pack if engine.packs else bytes

    @property
    def keys(self) -> KeyRing | None:
        """The ring of keys that new rows are sealed with; None if the store has none."""
        return self._sealing.ring

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        try:
            await self._look_for_seal()
        except BaseException:
            await self._engine.__aexit__(None, None, None)
            raise
        return self

    async def _look_for_seal(self) -> None:
        """Note the error of the newest session if it is sealed, and there are no keys.

        A damaged row does not tell, so others are looked at then.
        """
        self._unopened = None
        if not self._engine.can_be_sealed or self._sealing.is_on:
            return
        for look in (loading.newest_head, loading.newest_message, loading.oldest_head):
            try:
                await self._engine.run(look, "glance")
            except KeyMissing as error:
                self._unopened = error
            except (StoreError, *_DAMAGES):  # damage does not prevent opening a store: a verb that meets it raises
                continue
            return

    def _require_keys(self) -> None:
        """Raise KeyMissing if a new session would be written unsealed into a sealed store."""
        if self._unopened is not None:
            raise KeyMissing(self._unopened.key_id, has_ring=False)

    async def __aexit__(self, *error: object) -> None:
        claims, self._claims = list(self._claims.values()), {}
        self._sketched.clear()
        self._forget_all()
        try:
            if claims:
                await self._lapse(claims)
        finally:
            await self._engine.__aexit__(*error)

    async def _lapse(self, claims: Sequence[Claim]) -> None:
        """Let claims lapse now. If that fails, they lapse at the end of their leases."""
        with suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await self._engine.run(partial(claiming.lapse, claims), "write")

    def pin(self, session_id: str) -> None:
        """Keep a session at hand, however long it is not used."""
        self._cache.pinned.add(SessionId(session_id))

    def unpin(self, session_id: str) -> None:
        self._cache.pinned.discard(SessionId(session_id))

    def evict(self, session_id: str) -> None:
        """Drop a session from memory. The next load reads it again."""
        self._cache.forget(SessionId(session_id))

    def _forget_all(self) -> None:
        """Drop everything from memory, because it may contain data that is about to be erased."""
        self._cache.forget_all()
        self._values.forget_all()
        self._definitions.forget_all()

    def _at_hand(self, session_id: str) -> CachedSession | None:
        """Return a session at hand, unless a key that it may be sealed with was forgotten since."""
        losses = self._sealing.losses
        if losses != self._losses:
            self._losses = losses
            self._forget_all()
            self._sealing.drop_keys()
        cached = self._cache.recall(session_id)
        return cached if cached is None or cached.losses == losses else None

    async def create(
        self,
        session: AgentSession,
        *,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        erasures: int | None = None,
        key: Key | None = None,
    ) -> AgentSession:
        checked.create(session, written, erasures, key)
        self._require_keys()
        change = self._kept_as(session, written, key=key, is_new=True, erasures=erasures)
        kept: CachedSession = await self._engine.commit(change)
        return kept.session if kept.at_hand else await self._read_again(change, kept)

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
        whole: bool = True,
    ) -> AgentSession:
        """Save a session. With `whole=False`, parts of its view that were not read before are not read now either."""
        checked.save(session, claim, written, entries, taken, key)
        expect(whole, bool, "$.whole")
        change = self._kept_as(session, written, claim, entries, taken, key)
        kept: CachedSession = await self._engine.commit(change)
        return kept.session if kept.at_hand or not whole else await self._read_again(change, kept)

    async def save_all(self, changes: Sequence[Change]) -> Sequence[AgentSession]:
        checked.save_all(changes)
        if any(change.session.version == 0 for change in changes):
            self._require_keys()
        together = KeepAll([self._kept_together(change) for change in changes])
        kept: Sequence[CachedSession] = await self._engine.commit_all(together)
        return [
            each.session if each.at_hand else await self._read_again(keep, each)
            for keep, each in zip(together.keeps, kept, strict=True)
        ]

    def _kept_together(self, change: Change) -> Keep:
        is_new = change.session.version == 0
        return self._kept_as(change.session, NOTHING_WRITTEN, entries=change.entries, key=change.key, is_new=is_new)

    async def erasures(self) -> int:
        return await self._engine.run(claiming.count_of_erasures, "glance")

    def is_waited_for(self, session_id: str) -> bool | None:
        cached = self._cache.get(SessionId(session_id))
        return None if cached is None else cached.is_waited_for

    def _kept_as(
        self,
        session: AgentSession,
        written: Mapping[str, StoredAt],
        claim: Claim | None = None,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
        *,
        is_new: bool = False,
        erasures: int | None = None,
    ) -> Keep:
        if key is not None:
            codec.check_text(f"{key.name}/{key.digest}", "$.key")
        origin = self._origin
        return Keep(
            session,
            Placement(session, origin, written),
            now(),
            origin=origin,
            pack=self._pack,
            known=self._known(session),
            claim=claim,
            batch=self._batch(entries),
            taken=taken,
            key=key,
            is_new=is_new,
            drops_sketches=bool(self._sketched) and claim is not None and self._has_sketches(claim),
            erasures=erasures,
            name_of=self._name_of(session.info.owner),
            parent=self._cache.get(session.info.parent_id) if is_new and session.info.parent_id else None,
            remember=self._remember,
        )

    def _name_of(self, owner: str | None) -> Namer:
        """Return the function that names an owner's values. If the store has keys, it uses the owner's key."""
        if not self._sealing.is_on:
            return hash_of
        if owner is not None:
            codec.check_text(owner, "$.info.owner")  # first, since the next line may make a key for the owner
        return self._sealing.root(owner).name_of

    async def _owner_of(self, session_id: str) -> str | None:
        """Return the owner of a session. Return None if the store has no keys, since only sealing needs it."""
        if not self._sealing.is_on:
            return None
        return await self._engine.run(partial(claiming.owner_by_id, SessionId(session_id)), "glance")

    async def _owner_of_claim(self, claim: Claim) -> str | None:
        """Return the owner of a claimed session. It is looked up once for each claim."""
        if not self._sealing.is_on:
            return None
        key = (claim.session_id, claim.epoch)
        if key not in self._owners:
            self._owners.keep(key, await self._owner_of(claim.session_id))
        return self._owners.get(key)

    def _known(self, session: AgentSession) -> CachedSession | None:
        """Return the session at hand if it has the version that is about to be replaced, and so is current."""
        cached = self._at_hand(session.id)
        return cached if cached is not None and cached.session.version == session.version else None

    def _batch(self, entries: Sequence[Entry]) -> Batch | None:
        return prepare_batch(entries, self._pack)

    async def _read_again(self, change: Keep, kept: CachedSession) -> AgentSession:
        """Return a saved session with its whole view, some of which was not at hand."""
        with suppress(CorruptRecord):  # the save has succeeded, even if older messages are damaged
            return await self.load(change.session_id, change.version) or kept.session
        return kept.session

    def _remember(self, change: Keep, kept: CachedSession) -> CachedSession:
        """Keep a saved session at hand, whether or not its caller still waits."""
        if change.claim is not None:
            self._forget_claim(change.claim)
        session = consolidate(kept.session) if change.moves else kept.session
        # The caller's session may be older than the loss of its key. So it is as stale as what was at hand before.
        losses = 0 if change.known is None else change.known.losses
        cached = replace(kept, session=session, at_hand=is_at_hand(session), losses=losses)
        self._remember_beginning(change)
        # A new fork's messages of others were read before it was created. They may have been redacted in between.
        if not (change.is_new and kept.refs):
            self._cache.keep(session.id, cached)
        return cached

    def _remember_beginning(self, change: Keep) -> None:
        """Keep what was looked up about the parent of a new fork, for the parent's next fork."""
        parent = change.parent
        if change.inherited.line is None or parent is None or parent.began_with is not None:
            return
        if self._cache.get(parent.session.id) is parent:
            self._cache.keep(parent.session.id, replace(parent, began_with=change.inherited.shown))

    @property
    def _origin(self) -> str:
        origin = self._engine.origin
        if not origin:
            raise StoreError(f"This store is not open. Use it inside `async with {type(self).__name__}(…) as store:`.")
        return origin

    async def load(
        self, session_id: str, version: int | None = None, *, last: int | None = None
    ) -> AgentSession | None:
        """Return a session. With `last`, only that many messages at the end of its view are read, or a few more.

        A look at a message that was not read raises NotLoaded. Such a session can still be appended to, and saved.
        """
        key, version = SessionId(session_id), checked_version(version)
        if last is not None:
            expect_count(last, "$.last")
        if version is not None and not 0 < version <= LAST:
            return None
        cached = self._at_hand(key)
        losses = self._losses  # read first: a key that is forgotten during the load makes its result stale
        load = Load(key, version, self._origin, cached, self._values, last=last)
        loaded = await self._engine.fetch(load)
        if loaded is not None and cached is not None and loaded.erasures != cached.erasures:
            # Something in the store was erased since then, perhaps messages that are at hand.
            load = Load(key, version, self._origin, None, self._values, last=last)
            loaded = await self._engine.fetch(load)
        if loaded is None:
            self._cache.forget(key)
            return None
        if loaded.head is None:
            assert cached is not None
            return cached.session
        session = self._assembled(load, loaded)
        is_whole = load.last is None or is_at_hand(session)
        if load.last is not None and not (is_whole or has_end(session.state.transcript, load.last)):
            if cached is None:
                return await self.load(session_id, version)  # the end begins inside a block
            # Less of the end is at hand than is asked for. Without it, only `last` messages are read, and not all.
            self._cache.forget(key)
            return await self.load(session_id, version, last=last)
        if version is None or (cached is not None and version == cached.session.version):
            metadata = loaded.head.stored_metadata(loaded.values)
            known = CachedSession(
                session,
                loaded.erasures,
                frozenset(loaded.values),
                at_hand=is_whole,
                metadata=metadata,
                losses=losses,
            )
            self._cache.keep(key, known)
        return session

    def glance(self, session_id: str, *, last: int | None = None) -> AgentSession | None:
        """Return the newest version of a session if it, or `last` messages of its end, are at hand; None otherwise.

        It waits for nothing and may be called in any thread.
        """
        key = SessionId(session_id)
        if last is not None:
            expect_count(last, "$.last")
        cached = self._at_hand(key)
        if cached is None or not self._engine.origin:
            return None
        load = Load(cached.session.id, None, self._engine.origin, cached, last=last)
        return cached.session if load.may_be_at_hand and self._engine.is_as_known(load) else None

    def _assembled(self, load: Load, loaded: Loaded) -> AgentSession:
        assert loaded.head is not None
        for log, start, messages in loaded.fetched:
            load.tapes.put(log, start, messages)
        key = loaded.head.head.definition
        session = loaded.head.session(loaded.values, load.tapes.span, self._definitions.recall(key))
        if load.last is not None:
            context = session.state.context
            context = replace(context, transcript=with_end_read(context.transcript, load.tapes))
            session = replace(session, state=replace(session.state, context=context))
        self._definitions.keep(key, session.definition)
        self._values.keep(key, loaded.values[key])
        return session

    async def exists(self, session_id: str) -> bool:
        return await self._engine.run(partial(loading.exists, SessionId(session_id)), "glance")

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        page = Page(SessionQuery.of(filters))
        return page.listed(await self._engine.page(page), self._sealing)

    async def previews(self, session_ids: Iterable[str]) -> Mapping[str, Preview]:
        # Here and below: jobs that not every program needs are imported when they are needed.
        from perdure.stores.jobs.previewing import previews

        keys = checked.session_ids(session_ids)
        try:
            return await self._engine.run(partial(previews, keys, self._values))
        except (CorruptRecord, KeyUnavailable):  # the engine has checked it in one state of all tables: it is damage
            return await self._engine.run(partial(previews, keys, self._values, is_strict=False))

    async def versions(self, session_id: str, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        from perdure.stores.jobs.versions import versions

        checked.versions(before, limit)
        known = self._definitions.snapshot()
        asked = (SessionId(session_id), before, limit, known)
        try:
            return await self._engine.run(partial(versions, *asked))
        except CorruptRecord as damage:  # the engine has checked it in one state of all tables: it is damage
            try:
                return await self._past_damage(partial(versions, *asked, is_strict=False))
            except SessionNotFound:  # the session exists, but cannot be read
                raise damage from None
        finally:
            self._keep_definitions(known)

    async def _past_damage(self, job: Callable[[], Job[T]]) -> T:
        """Drive a job that leaves out damaged rows."""
        return await self._engine.run(job)

    async def heads(self, session_ids: Iterable[str]) -> SessionHeads:
        keys = checked.session_ids(session_ids)
        try:
            return SessionHeads(await self._heads(keys))
        except _DAMAGES:
            return await self._heads_one_by_one(keys)

    async def _heads(self, keys: Iterable[SessionId]) -> Mapping[str, SessionHead]:
        from perdure.stores.jobs.heading import heads

        known = self._definitions.snapshot()
        found = await self._engine.run(partial(heads, keys, known))
        self._keep_definitions(known)
        return found

    def _keep_definitions(self, known: Mapping[str, AgentDefinition]) -> None:
        for key in known.keys() - self._definitions.keys():
            self._definitions.keep(key, known[key])

    async def _heads_one_by_one(self, keys: Iterable[SessionId]) -> SessionHeads:
        """Read heads one at a time, so that a damaged one does not stop the others."""
        found: dict[str, SessionHead] = {}
        damaged: dict[str, Damage] = {}
        for key in keys:
            try:
                found |= await self._heads([key])
            except _DAMAGES as damage:
                damaged[key] = damage
        return SessionHeads(found, damaged)

    async def line_of(self, session_id: str) -> Sequence[SessionId]:
        from perdure.stores.jobs.lineage import line_of

        return await self._engine.run(partial(line_of, SessionId(session_id)))

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        return await self._engine.run(IdPart.beginning(prefix, owner, deleted, limit).job)

    async def ids_with_suffix(
        self, suffix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        return await self._engine.run(IdPart.end(suffix, owner, deleted, limit).job)

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
        per_owner: int | None = None,
    ) -> tuple[Claim, Appended]:
        checked.claim(version, owner, lease, messages, entries, take_over, per_owner)
        asked = Claim(SessionId(session_id), 0, version, owner, lease)
        rows, attachments = _encoded(messages)
        change = Take(
            asked,
            self._origin,
            rows,
            self._batch(entries),
            take_over=take_over,
            attachments=attachments,
            note=self._note_claim_taken_over if take_over else self._note_claim,
            per_owner=per_owner,
            since=now().timestamp(),
        )
        change.owner = await self._owner_of(session_id)
        taken: tuple[Claim, Appended] = await self._engine.commit(change)
        return taken

    def _note_claim(self, claim: Claim) -> None:
        self._claims[claim.session_id, claim.epoch] = claim

    def _note_claim_taken_over(self, claim: Claim) -> None:
        self._sketched.add((claim.session_id, claim.epoch))  # the holder before may have left some
        self._note_claim(claim)

    def _forget_claim(self, claim: Claim) -> None:
        self._claims.pop((claim.session_id, claim.epoch), None)
        self._sketched.discard((claim.session_id, claim.epoch))

    def _has_sketches(self, claim: Claim) -> bool:
        """Tell whether pieces of an answer may have been kept under a claim, so that they have to be dropped."""
        return (claim.session_id, claim.epoch) in self._sketched

    async def sketch(self, claim: Claim, piece: Sketch) -> bool:
        from perdure.stores.jobs import sketching

        checked.sketch(claim, piece)
        self._sketched.add((claim.session_id, claim.epoch))  # first: a write that raises may still be committed
        return await self._engine.run(partial(sketching.keep, claim, piece), "write")

    async def progress(self, session_id: str, *, after: int = 0) -> RunProgress:
        from perdure.stores.jobs import sketching

        checked.progress(after)
        kind: Kind = "glance" if after else "read"  # if read from the beginning, there may be many rows
        return await self._engine.run(partial(sketching.progress, SessionId(session_id), after), kind)

    async def heartbeat(self, claim: Claim) -> None:
        checked.held(claim)
        await self._engine.run(partial(claiming.heartbeat, claim), "write")

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        checked.release(claim, interrupted)
        job = partial(claiming.release, claim, interrupted, sketched=self._has_sketches(claim))
        await self._engine.run(job, "write")
        self._forget_claim(claim)

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
        rows, attachments = _encoded(messages)
        drops = bool(self._sketched) and bool(rows) and self._has_sketches(claim)
        change = Append(
            claim,
            self._origin,
            rows,
            self._batch(entries),
            taken=taken,
            branch=log,
            attachments=attachments,
            drops_sketches=drops,
        )
        change.owner = await self._owner_of_claim(claim)
        appended: Appended = await self._engine.commit(change)
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
        job = record.read_whole_inbox if inbox else record.read_record
        return await self._engine.run(partial(job, SessionId(session_id), record.Asked(after, limit, last, run)))

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        checked.runs(limit, before, run)
        return await self._engine.run(partial(record.runs, SessionId(session_id), self._origin, limit, before, run))

    async def branches(self, session_id: str) -> Sequence[RunOnRecord]:
        return await self._engine.run(partial(record.branches, SessionId(session_id), self._origin))

    async def adoptions(self, session_id: str, version: int) -> Sequence[Adopted]:
        from perdure.stores.jobs.adoptions import adoptions

        checked.adoptions(version)
        return await self._engine.run(partial(adoptions, SessionId(session_id), version, self._origin), long=True)

    async def names_of(self, logs: Collection[LogRef]) -> Mapping[LogRef, str]:
        from perdure.stores.jobs.adoptions import names_of

        checked.names_of(logs)
        known = {log.key: log for log in logs if log.origin == self._origin and self._is_key(log.key)}
        names = await self._engine.run(partial(names_of, [*known])) if known else {}
        return {known[key]: name for key, name in names.items()}

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        checked.log_of(name)
        return await self._engine.run(partial(record.log_of, SessionId(session_id), name, self._origin))

    async def lapsed(self) -> Sequence[SessionId]:
        return await self._engine.run(claiming.lapsed)

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        checked.messages(log, start, stop, self._origin)
        if not self._is_key(log.key):
            raise SessionNotFound(f"log {log.key}")
        return await self._engine.run(partial(loading.read_log, log.key, start, stop))

    def _is_key(self, key: int | str) -> bool:
        """Tell whether a value may be the key of a log in this store."""
        return type(key) is self._engine.key_of_log and (not isinstance(key, int) or 0 <= key <= LAST)

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        checked.find_key(name)
        return await self._engine.run(partial(record.find_key, SessionId(session_id), name))

    async def is_claimed(self, session_id: str) -> bool:
        return await self._engine.run(partial(claiming.is_claimed, SessionId(session_id)))

    async def is_interrupted(self, session_id: str) -> bool:
        return await self._engine.run(partial(claiming.is_interrupted, SessionId(session_id)), "glance")

    async def post(
        self,
        session_id: str,
        entry: Entry,
        *,
        priority: int = 0,
        most: int | None = None,
        most_of_owner: int | None = None,
    ) -> int:
        checked.post(entry, priority, most, most_of_owner)
        item = record.Post.of(entry, priority, most, most_of_owner)
        return await self._engine.run(partial(record.post, SessionId(session_id), item), "write")

    async def waiting(self, limit: int = 100, *, idle_only: bool = True) -> Sequence[Waiting]:
        from perdure.stores.jobs import waiting

        checked.waiting(limit, idle_only)
        return await self._engine.run(partial(waiting.waiting, limit, idle_only))

    async def held(self, limit: int = 100) -> Sequence[Waiting]:
        from perdure.stores.jobs import waiting

        checked.waiting(limit, True)
        return await self._engine.run(partial(waiting.held, limit))

    async def in_turn(
        self, limit: int = 100, *, after: str | None = None, skip: Collection[str] = (), not_of: Collection[str] = ()
    ) -> Sequence[Waiting]:
        from perdure.stores.jobs import waiting

        checked.in_turn(limit, after, skip, not_of)
        return await self._engine.run(partial(waiting.in_turn, limit, after or "", frozenset(skip), frozenset(not_of)))

    async def has_waiting(self, session_id: str) -> bool:
        from perdure.stores.jobs import waiting

        return await self._engine.run(partial(waiting.has_waiting, SessionId(session_id)), "write")

    async def running(self) -> Sequence[Running]:
        return await self._engine.run(claiming.running)

    async def set_timer(self, timer: Timer, *, replace: bool = False) -> Timer:
        from perdure.stores.jobs import timers

        checked.set_timer(timer, replace)
        timers.encoded(timer)  # InvalidData before anything is written
        return await self._engine.run(partial(timers.set_timer, timer, replace), "write")

    async def timers(self, session_id: str | None = None, *, limit: int = 100, after: int = 0) -> Sequence[Timer]:
        from perdure.stores.jobs import timers

        checked.timers(limit, after)
        key = None if session_id is None else SessionId(session_id)
        return await self._engine.run(partial(timers.timers, key, limit, after))

    async def due(self, at: float, *, limit: int = 100) -> Sequence[Timer]:
        from perdure.stores.jobs import timers

        checked.due(at, limit)
        return await self._engine.run(partial(timers.due, float(at), limit))

    async def ring(
        self,
        timer: Timer,
        *,
        again: float | None = None,
        entry: Entry | None = None,
        most: int | None = None,
        later: float | None = None,
    ) -> bool | None:
        from perdure.stores.jobs import timers

        checked.ring(timer, again, entry, most, later)
        times = [None if each is None else float(each) for each in (again, later)]
        return await self._engine.run(partial(timers.ring, timer, times[0], entry, most, times[1]), "write")

    async def drop_timer(self, session_id: str, name: str) -> bool:
        from perdure.stores.jobs import timers

        checked.drop_timer(name)
        return await self._engine.run(partial(timers.drop_timer, SessionId(session_id), name), "write")

    async def reserve(self, name: str, *, cost: float, burst: float, most: float | None = None) -> float:
        from perdure.stores.jobs import rates

        checked.reserve(name, cost, burst, most)
        return await self._engine.run(partial(rates.reserve, name, cost, burst, most), "write")

    async def add_token(self, token: Token) -> None:
        from perdure.stores.jobs import tokens

        checked.add_token(token)
        await self._engine.run(partial(tokens.add_token, token), "write")

    async def token(self, digest: str) -> Token | None:
        from perdure.stores.jobs import tokens

        checked.token(digest)
        return await self._engine.run(partial(tokens.token, digest), "glance")

    async def tokens(self, owner: str | None = None) -> Sequence[Token]:
        from perdure.stores.jobs import tokens

        checked.tokens(owner)
        return await self._engine.run(partial(tokens.tokens, owner))

    async def drop_token(self, token_id: str) -> bool:
        from perdure.stores.jobs import tokens

        checked.drop_token(token_id)
        return await self._engine.run(partial(tokens.drop_token, token_id), "erase")

    async def note(self, session_id: str, entries: Sequence[Entry]) -> int:
        checked.note(entries)
        return await self._engine.run(partial(record.note, SessionId(session_id), self._batch(entries)), "write")

    async def attachments(self, session_id: str, hashes: Collection[str]) -> Mapping[str, bytes]:
        from perdure.stores.jobs import attachments

        wanted = checked.attachments(hashes)
        return await self._engine.run(partial(attachments.read, SessionId(session_id), wanted), long=True)

    async def delete(self, session_id: str, *, expected: AgentSessionInfo | None = None) -> None:
        from perdure.stores.jobs import erasing

        key = checked.delete(session_id, expected)
        self._forget_all()
        await self._engine.run(partial(erasing.delete, key, expected), "erase")

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        """Erase sessions at the cost of one erasure, and return their ids. Running or missing sessions are left out."""
        from perdure.stores.jobs import erasing

        keys = checked.session_ids(session_ids)
        self._forget_all()
        return await self._engine.run(partial(erasing.delete_many, keys), "erase", long=True)

    async def delete_tree(self, session_id: str) -> Sequence[SessionId]:
        from perdure.stores.jobs import erasing

        key = SessionId(session_id)
        self._forget_all()
        return await self._engine.run(partial(erasing.delete_tree, key), "erase", long=True)

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        from perdure.stores.jobs import redaction

        request = redaction.Request.of(session_id, message_ids, replacement)
        self._forget_all()
        try:
            return await self._engine.run(
                partial(redaction.redact, request, now(), self._pack, self._name_of), "erase", long=True
            )
        finally:
            self._forget_all()  # once more: a load that ran meanwhile may have cached the old text

    async def forget(self, session_id: str, *, before: int) -> Forgotten:
        from perdure.stores.jobs.forgetting import forget

        key = SessionId(session_id)
        checked.forget(before)
        self._forget_all()
        try:
            return await self._engine.run(partial(forget, key, before, now(), self._pack), "erase", long=True)
        finally:
            self._forget_all()

    async def holds(self, session_ids: Iterable[str]) -> Mapping[SessionId, str]:
        from perdure.stores.jobs.holding import holds

        return await self._engine.run(partial(holds, checked.session_ids(session_ids)))

    async def held_beside(self, owner: str) -> Mapping[SessionId, str]:
        from perdure.stores.jobs.holding import held_beside

        check_owner(expect(owner, str, "$.owner"))
        return await self._engine.run(partial(held_beside, owner), long=True)

    async def drop_hold(self, session_id: str, tag: str) -> None:
        from perdure.stores.jobs.holding import drop_hold

        key = SessionId(session_id)
        checked.drop_hold(tag)
        await self._engine.run(partial(drop_hold, key, tag), "write")

    async def own_rules(self) -> Sequence[Retention]:
        from perdure.stores.jobs.retiring import own_rules

        return await self._engine.run(own_rules)

    async def overgrown(
        self, versions: int, *, after: str = "", limit: int = 200
    ) -> tuple[Sequence[AgentSessionInfo], str | None]:
        from perdure.stores.jobs.retiring import overgrown

        checked.overgrown(versions, after, limit)
        return await self._engine.run(partial(overgrown, versions, after, limit), long=True)

    async def retire(self, due: Sequence[Due]) -> Erased:
        from perdure.stores.jobs.retiring import retire

        checked.retire(due)
        self._forget_all()
        return await self._engine.run(partial(retire, due), "erase", long=True)

    async def prune(self, due: Due, *, before: int) -> Erased:
        from perdure.stores.jobs.retiring import REFUSALS, left_by, prune

        checked.prune(due, before)
        self._forget_all()
        try:
            return await self._engine.run(partial(prune, due, before, now(), self._pack), "erase", long=True)
        except REFUSALS as error:
            return Erased(left=[left_by(due.session_id, error)])
        finally:
            self._forget_all()

    async def rehearse(self, batches: Sequence[Sequence[Due]], prunes: Sequence[tuple[Due, int]] = ()) -> Erased:
        from perdure.stores.jobs.retiring import rehearse

        checked.rehearse(batches, prunes)
        return await self._engine.run(partial(rehearse, batches, prunes, now(), self._pack), long=True)

    async def kept_of_log(self, session_id: str) -> Sequence[tuple[int, int]]:
        return await self._engine.run(partial(record.kept_of_log, SessionId(session_id)))

    async def gc(self) -> int:
        from perdure.stores.jobs import erasing

        self._forget_all()
        return await self._engine.run(erasing.gc, "erase", long=True)

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        from perdure.stores.search import Query, everywhere

        query = Query.of(text, owner, session_id, limit)
        return await self._engine.run(partial(everywhere, query), long=True)

    async def find_message(
        self, message_id: str, *, owner: str | None = None, limit: int = 10
    ) -> Sequence[MessagePlace]:
        from perdure.stores.jobs.finding import Asked, places_of

        checked.find_message(message_id, owner, limit)
        found = await self._named(message_id)
        asked = Asked(message_id, owner, limit)
        return await self._engine.run(partial(places_of, asked, found, self._origin)) if found else []

    async def _named(self, message_id: str) -> Sequence[tuple[int | str, int]]:
        """Return the places where a message may have this id. Without an index, all messages are read."""
        from perdure.stores.jobs.finding import named

        return await self._engine.run(partial(named, message_id), long=True)

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        from perdure.stores.jobs import archive

        checked.dump(alone)
        return await self._engine.run(partial(archive.dump, SessionId(session_id), self._origin, alone), long=True)

    async def restore(self, archived: ArchivedSession) -> bool:
        from perdure.stores.jobs import archive

        await aside(checked.restore, archived)  # the check of a large archive must not block the event loop
        self._require_keys()
        return await self._engine.run(
            partial(archive.restore, archived, self._origin, self._pack, self._name_of), "write", long=True
        )

    async def check(self) -> Sequence[Problem]:
        from perdure.stores.jobs import checking

        return [*await self._engine.faults(), *await self._engine.run(checking.check, long=True)]

    async def repair(
        self, *, dry_run: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Sequence[Problem]:
        """Rewrite wrong data that can be derived from versions and messages. Return what was wrong.

        The repairs of a session are put on its record. Each session is one transaction. With `dry_run` nothing is
        changed.
        """
        from perdure.stores.jobs import repairing

        self._forget_all()
        found = [*await self._engine.mend(dry_run=dry_run)]
        before, ids = len(found), list[str]()
        with suppress(*_DAMAGES):  # if a table cannot be read, no row may be treated as left over
            if left := await self._engine.run(partial(repairing.repair_left_over, dry_run=True), long=True):
                if not dry_run:
                    job = partial(repairing.repair_left_over, dry_run=False)
                    left = await self._engine.run(job, "write", long=True)
                found += left
        with suppress(*_DAMAGES):
            ids = await self._engine.run(repairing.sessions, long=True)
        for done, session_id in enumerate(ids, 1):
            with suppress(*_DAMAGES, SessionLocked):  # the check reports a damaged session, and others are repaired
                found += await self._repair_session(session_id, dry_run)
            if progress is not None:
                progress(done, len(ids))
        if len(found) > before and not dry_run:  # an engine may keep copies of rows that are repaired only now
            found += await self._engine.mend(dry_run=False)
        self._forget_all()
        return [*dict.fromkeys(found)]

    async def _repair_session(self, session_id: str, dry_run: bool) -> Sequence[Problem]:
        """Repair a session. A transaction is begun only if something is wrong with it."""
        from perdure.stores.jobs.repairing import repair_session

        wrong = await self._engine.run(partial(repair_session, session_id, self._pack, dry_run=True), long=True)
        if dry_run or not wrong:
            return wrong
        mend = partial(repair_session, session_id, self._pack, dry_run=False)
        return await self._engine.run(mend, "write", long=True)

    @property
    def origin(self) -> str:
        """The store's own id, which no other store has. Raise StoreError if the store is not open."""
        return self._origin

    @property
    def kind(self) -> str:
        """The kind of engine. Only a backup of the same kind can be restored here."""
        return self._engine.kind

    def require_copyable(self) -> None:
        """Raise ConfigurationError if the store cannot be backed up."""
        if not self._engine.kind:
            raise cannot_be_copied(self._engine)

    async def copy_out(self, deposit: Deposit) -> Outline:
        """Put one state of everything into a deposit, while others read and write."""
        return await self._engine.copy_out(deposit)

    def landing(self) -> Landing:
        """Return the place of this store as a landing for a copy. The store is not open."""
        return self._engine.landing()

    def at(self, engine: Engine) -> Self:
        """Return a store like this one, not open, on another engine."""
        other = copy.copy(self)  # a subclass may have fields of its own
        other._engine = engine
        engine.sealing = self._sealing
        other._cache, other._definitions, other._values = SessionCache(0), LRU(256), LRU(256)
        other._claims, other._sketched = {}, set()
        return other

    async def lapse_claims(self) -> int:
        """Let all claims lapse, for a store whose runners are gone. Return their number."""
        return await self._engine.run(claiming.lapse_all, "write")

    async def count(self, table: str) -> int:
        """Return the number of rows in a table."""
        return await self._engine.run(partial(_count, table))


class IndexedStore(Store):
    """A store whose engine searches by an index."""

    _engine: IndexedEngine

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        from perdure.stores.search import Query

        query = Query.of(text, owner, session_id, limit)
        if self._sealing.is_on and query.has_prefixes:
            # Tokens in a sealed index do not begin as their words do. So every message is opened and read.
            return await super().search(text, owner=owner, session_id=session_id, limit=limit)
        return await self._engine.search(query)

    async def _named(self, message_id: str) -> Sequence[tuple[int | str, int]]:
        return await self._engine.named(message_id)

    async def index(self, *, rebuild: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
        checked.index(rebuild, progress)
        return await self._engine.index(rebuild=rebuild, progress=progress)


def _count(table: str) -> Job[int]:
    ((count,),) = yield Count(table, {})
    return int(count)


def _encoded(messages: Sequence[Message]) -> tuple[list[tuple[str, bytes]], Attachments]:
    """Return messages as they are written, and the images and files that are stored apart from them."""
    rows, attachments = list[tuple[str, bytes]](), list[tuple[int, codec.Attachment]]()
    for message in messages:
        # First the cheap test: most messages are one text, and this is on the path of every append.
        if (len(message.parts) != 1 or type(message.parts[0]) is not Text) and codec.has_attachments(message):
            message, found = codec.detached(message)
            attachments += [(len(rows), each) for each in found]
        rows.append((message.id, codec.encode_message(message)))
    return rows, attachments
