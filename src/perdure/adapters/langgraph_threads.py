"""LangGraph's threads in a store. This code runs in the store's event loop: see `Home`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from langgraph.checkpoint.base import CheckpointTuple, DeltaChannelHistory, PendingWrite

from perdure.adapters.home import Home
from perdure.adapters.langgraph_checkpoints import (
    Codec,
    NewCheckpoint,
    Note,
    Place,
    StoredCheckpoint,
    answers_interrupt,
    are_writes,
    emptied,
    read_writes,
)
from perdure.errors import InvalidData, PendingCallsChanged, SessionConflict, SessionNotFound, VersionForgotten
from perdure.model.ids import SessionId, mark_of
from perdure.model.lineage import SpawnRef
from perdure.model.session import AgentSession, AgentSessionInfo, forked_from
from perdure.model.transcript import Transcript
from perdure.paging import all_infos
from perdure.protocols import Entry, JournalEntry, Key
from perdure.runtime.repository import SessionFactory
from perdure.stores.cache import LRU

_PAGE = 50
_NOTHING = ""
"""The id that stands for the beginning of a thread without checkpoints."""
_MOST_SEEN = 4096
"""The number of remembered checkpoints that runs have begun from."""
_MOVED = (
    "what its interrupt asked about is not shown any more. "
    "Invoke the graph with a message, or fork a version that waits: `chat.fork(version=…)`"
)


class Listed(NamedTuple):
    """A checkpoint in a list: its place, and the version that keeps it."""

    place: Place
    version: int
    session_id: SessionId


class Threads:
    """The threads of one saver, with the verbs that load and save checkpoints."""

    def __init__(self, home: Home, *, strict: bool) -> None:
        self._home = home
        self._store = home.store
        self._strict = strict
        self._seen: LRU[tuple[SessionId, str], int] = LRU(_MOST_SEEN)
        """By session and checkpoint, the version that first showed the view which a run has begun with."""
        self._asked_for: LRU[tuple[SessionId, str], bool] = LRU(_MOST_SEEN)
        """The checkpoints that were asked for by their ids. A run that continues from one of them wants a branch."""
        self._plans: LRU[tuple[SessionId, int, str | None], bool] = LRU(_MOST_SEEN)
        """By session, version and checkpoint, whether the tasks that were planned belong to what it shows."""

    def id_of(self, place: Place) -> SessionId:
        """Return the id of the session of a thread, or of a namespace in it."""
        return self._home.id_of(place.thread, place.ns) if place.ns else self._home.id_of(place.thread)

    async def get(self, place: Place, codec: Codec) -> CheckpointTuple | None:
        """Return a checkpoint, or the newest one. Return None if there is none."""
        head = await self._head(place)
        found = None if head is None else await self._at(head, place.id)
        if head is None or found is None or found.id is None:
            if place.id is None:
                self._seen.keep((self.id_of(place), _NOTHING), 0)
            return None
        session_id = head.session.id
        if place.id is not None:
            self._asked_for.keep((session_id, found.id), True)
        self._seen.keep((session_id, found.id), found.session.state.shown_since)
        return await self._tuple(head, found, place, codec)

    async def _tuple(
        self, head: StoredCheckpoint, found: StoredCheckpoint, place: Place, codec: Codec
    ) -> CheckpointTuple:
        """Return a checkpoint as LangGraph reads it. What was planned goes with the messages it was planned from."""
        if not await self._has_plan(found):
            return found.without_plan(place, codec)
        return found.tuple_at(place, await self._writes(head, found), codec)

    async def _has_plan(self, found: StoredCheckpoint) -> bool:
        """Tell whether the tasks of a checkpoint belong to what it shows. A verb may have moved the messages since.

        If the version that LangGraph saved is gone, nobody can tell, so they do not.
        """
        if found.has_lost_plan or found.is_put or found.shown is None:
            return not found.has_lost_plan
        session, saved_in = found.session, self.id_of(Place(*found.names))
        if saved_in == session.id and 0 < session.state.shown_since <= found.saved_as:
            return True
        # With the checkpoint's id, since another session may get the id of one that was erased.
        key = (session.id, session.version, found.id)
        known = self._plans.get(key)
        if known is None:
            saved = await self._version(saved_in, found.saved_as)
            known = saved is not None and found.follows(StoredCheckpoint(saved))
            self._plans.keep(key, known)
        return known

    async def version_of(self, place: Place) -> int:
        """Return the version of a thread that keeps a checkpoint, or the newest one."""
        head = await self._head(place)
        found = None if head is None else await self._at(head, place.id)
        if head is None or found is None or found.id is None:
            wanted = "checkpoint" if place.id is None else f"checkpoint {place.id!r}"
            raise InvalidData("$.config", f"thread {place.thread!r} has no {wanted}; see get_state_history")
        if found.session.id != head.session.id:
            problem = f"this checkpoint is from before the fork; it is version {found.version} of {found.session.id!r}"
            raise InvalidData("$.config", f"{problem}, which you can fork")
        return found.version

    async def _head(self, place: Place) -> StoredCheckpoint | None:
        session = await self._home.load(self.id_of(place))
        return None if session is None else StoredCheckpoint(session)

    async def _at(self, head: StoredCheckpoint, checkpoint_id: str | None) -> StoredCheckpoint | None:
        """Return the version of a checkpoint. The newest one has what perdure's verbs have changed since."""
        wanted = head.latest if checkpoint_id is None else checkpoint_id
        if wanted is None or head.id == wanted:
            return head
        found = await self._version_of(head.session.id, wanted) or await self._before_fork(head, wanted)
        return head if found is None and checkpoint_id is None else found

    async def _version_of(self, session_id: SessionId, checkpoint_id: str) -> StoredCheckpoint | None:
        key = await self._store.find_key(session_id, checkpoint_id)
        session = None if key is None else await self._version(session_id, key[1])
        stored = None if session is None else StoredCheckpoint(session)
        return stored if stored is not None and stored.id == checkpoint_id else None

    async def _version(self, session_id: SessionId, version: int) -> AgentSession | None:
        """Return a version of a session, or None if it does not exist or was pruned."""
        with suppress(VersionForgotten):
            return await self._store.load(session_id, version)
        return None

    async def _before_fork(self, head: StoredCheckpoint, checkpoint_id: str) -> StoredCheckpoint | None:
        """Return a checkpoint of the thread that this one was forked from, if it existed at that time."""
        session = head.session
        while (origin := forked_from(session.info)) is not None:
            first = await self._version(session.id, 1)
            # Version 1 of a fork shows what the other thread had at that time.
            latest = None if first is None else StoredCheckpoint(first).latest
            if latest is None or checkpoint_id > latest:
                return None
            found = await self._version_of(origin, checkpoint_id)
            older = None if found is not None else await self._store.load(origin)
            if older is None:
                return found
            session = older
        return None

    async def _writes(self, head: StoredCheckpoint, found: StoredCheckpoint) -> Sequence[JournalEntry]:
        """Return the writes of a checkpoint's tasks."""
        assert found.id is not None
        own = await self._store.read(head.session.id, run=found.id)
        if found.session.id != head.session.id:
            return [*await self._store.read(found.session.id, run=found.id), *own]
        if found.is_put or forked_from(head.session.info) is None:
            return own
        return [*await self._writes_before_fork(found), *own]

    async def _writes_before_fork(self, first: StoredCheckpoint) -> Sequence[JournalEntry]:
        """Return the writes that waited at the checkpoint of a fork, such as an interrupt that is answered here.

        If the other thread had already continued from there, nothing waited.
        """
        info = first.session.info
        origin = forked_from(info)
        assert origin is not None
        assert first.id is not None
        key = await self._store.find_key(origin, first.id)
        if key is None:
            return ()
        after = await self._version(origin, key[1] + 1)
        if after is not None and after.info.updated_at <= info.created_at and StoredCheckpoint(after).id != first.id:
            return ()
        forked_at = info.created_at.timestamp()
        entries = await self._store.read(origin, run=first.id)
        return [entry for entry in entries if are_writes(entry) and entry.body["at"] <= forked_at]

    async def put(self, new: NewCheckpoint, codec: Codec) -> None:
        """Save a checkpoint. Raise SessionConflict if another run has continued from where this one began."""
        while True:
            # Read before the caller's view: a new subgraph must not show what is erased from now on.
            erasures = await self._store.erasures() if new.place.ns else None
            head = StoredCheckpoint(await self._session(new.place, new))
            self._require_newest(head, new)
            base = await self._base(head, new.place.id)
            session, drawn = new.on_top_of(head, base, await self._view(new.place, base), codec)
            try:
                saved = await self._saved(session, Key(new.id, new.place.id or ""), erasures)
            except SessionConflict:
                continue  # another writer came first: read the session again
            codec.views.remember(saved.state.transcript, drawn, codec.serde)
            self._seen.keep((saved.id, new.id), saved.state.shown_since)
            return

    async def _session(self, place: Place, new: NewCheckpoint | None = None) -> AgentSession:
        """Return the session of a namespace, or a new one at version 0. The session of its caller then exists."""
        session = await self._home.load(self.id_of(place))
        if session is not None:
            return session
        caller = (await self._opened(place.outer)).id if place.ns else None
        return self._new(place, None if caller is None else _spawn(place, caller, new))

    def _new(self, place: Place, spawn: SpawnRef | None) -> AgentSession:
        session_id, name = self.id_of(place), place.ns or place.thread
        return SessionFactory().create(
            self._home.agent,
            session_id=session_id,
            owner=self._home.owner,
            parent=None if spawn is None else spawn.parent_session_id,
            spawn=spawn,
            name=None if name == self._unmarked(session_id) else name,
        )

    async def _saved(self, session: AgentSession, key: Key, erasures: int | None = None) -> AgentSession:
        """Save a session, or create it unless something was erased since it read what it shows of others."""
        if session.version:
            return await self._store.save(session, key=key)
        return await self._store.create(session, key=key, erasures=erasures)

    async def _opened(self, place: Place) -> AgentSession:
        """Return the session of a namespace, which is created empty if it is missing."""
        while True:
            session = await self._session(place)
            if session.version:
                return session
            with suppress(SessionConflict):
                # On a conflict it has been created meanwhile, and is read in the next round.
                return await self._store.create(session)

    async def _base(self, head: StoredCheckpoint, parent: str | None) -> StoredCheckpoint:
        """Return the version that a new checkpoint is compared with: its parent's, or else the newest."""
        found = None if parent is None else await self._at(head, parent)
        return head if found is None else found

    async def _view(self, place: Place, base: StoredCheckpoint) -> Transcript:
        """Return the view that messages are compared with. A subgraph begins with the messages of its caller."""
        if base.shown is None and place.ns:
            caller = await self._head(place.outer)
            if caller is not None:
                return caller.session.state.transcript
        return base.session.state.transcript

    def _require_newest(self, head: StoredCheckpoint, new: NewCheckpoint) -> None:
        """Raise SessionConflict if a run would continue beside another without having asked for a branch."""
        parent, session = new.place.id, head.session
        if not self._strict or new.place.ns or head.latest is None or new.id == head.id or new.branches_off():
            return
        if parent is None:  # the run takes itself for the thread's first
            is_stale = (session.id, _NOTHING) in self._seen
        elif head.latest == parent:
            seen = self._seen.get((session.id, parent))
            is_stale = head.id == parent and seen not in (None, session.state.shown_since)
        else:
            is_stale = self._asked_for.pop((session.id, parent), None) is None
        if is_stale:
            reason = f"Thread {new.place.thread!r} has changed since this run began. This step was not saved."
            # LangGraph saves a step when its tasks have ended, so it is too late to keep them from running.
            advice = (
                "The tools of this run may have done their work: look at get_state before you invoke the graph again. "
                "Or let runs branch silently: PerdureSaver(strict=False)."
            )
            raise SessionConflict(session.id, session.version, session.version, reason, advice)

    async def note(self, place: Place, entry: Entry) -> None:
        """Put the writes of a task on record. They may come before the checkpoint that they belong to.

        Raise PendingCallsChanged if they answer an interrupt whose messages are not shown any more.
        """
        if answers_interrupt(entry):
            await self._require_waiting(place)
        try:
            await self._store.note(self.id_of(place), [entry])
        except SessionNotFound:
            await self._store.note((await self._opened(place)).id, [entry])

    async def _require_waiting(self, place: Place) -> None:
        head = await self._head(place)
        if head is not None and head.id == place.id and not await self._has_plan(head):
            raise PendingCallsChanged(head.session.id, (), (), _MOVED)

    async def matching(
        self,
        place: Place | None,
        *,
        every_ns: bool = False,
        filter: Mapping[str, Any] | None = None,
        before: str | None = None,
        limit: int | None = None,
    ) -> list[Listed]:
        """Return the checkpoints that match, the greatest id first."""
        wanted = _Wanted(None if place is None else place.id, filter or {}, before)
        found: list[Listed] = []
        for session in await self._sessions(place, every_ns=every_ns):
            found += await self._in_session(session, wanted, limit)
        # LangGraph's ids ascend with time, so the greatest is the newest.
        found.sort(key=lambda each: each.place.id or "", reverse=True)
        return found if limit is None else found[: max(limit, 0)]

    async def _sessions(self, place: Place | None, *, every_ns: bool) -> list[StoredCheckpoint]:
        if place is None:
            ids = [info.id for info in await self._all_infos()]
        elif every_ns:
            ids = await self.tree(place.thread)
        else:
            ids = [self.id_of(place)]
        loaded = [await self._home.load(session_id) for session_id in ids]
        return [StoredCheckpoint(session) for session in loaded if session is not None]

    async def _all_infos(self) -> list[AgentSessionInfo]:
        agent, owner = self._home.agent.name, self._home.owner
        if owner is None:
            return await all_infos(self._store.list, agent=agent)
        return await all_infos(self._store.list, agent=agent, owner=owner)

    async def tree(self, thread: str) -> list[SessionId]:
        """Return the sessions of a thread: its own first, then those of its namespaces."""
        ids = [self.id_of(Place(thread))]
        for session_id in ids:
            children = await all_infos(self._store.list, parent=session_id)
            ids += [child.id for child in children if child.spawn_ref is not None]
        return ids

    async def _in_session(self, head: StoredCheckpoint, wanted: _Wanted, limit: int | None) -> list[Listed]:
        """Return the checkpoints of one session that match. If their ids are in order, stop at `limit`."""
        found: list[Listed] = []
        place = self._place_of(head.session)
        async for stored in self._checkpoints(head):
            if wanted.matches(stored):
                found.append(Listed(place._replace(id=stored.id), stored.version, head.session.id))
                if head.is_in_order and limit is not None and len(found) >= limit:
                    break
        return found

    def _place_of(self, session: AgentSession) -> Place:
        """Return the place of a session. A fork is a thread of its own, and does not have its original's name."""
        place = Place(*StoredCheckpoint(session).names)
        return place if self.id_of(place) == session.id else Place(session.info.name or self._unmarked(session.id))

    def _unmarked(self, session_id: SessionId) -> str:
        """Return an id as its owner writes it."""
        return session_id if self._home.owner is None else session_id.removeprefix(mark_of(self._home.owner))

    async def _checkpoints(self, head: StoredCheckpoint) -> AsyncIterator[Note]:
        """Yield the checkpoints of a session, the last first. Each is as it was saved, and the head's as it is now."""
        met: set[str | None] = {None, head.id}
        if head.id is not None:
            yield head
        before = head.version
        while heads := await self._store.versions(head.session.id, before=before, limit=_PAGE):
            for each in heads:
                note = Note(each.metadata, each.info.version)
                if note.id not in met and (note.is_put or note.version == 1):
                    met.add(note.id)
                    yield note
            before = heads[-1].info.version

    async def listed(self, listed: Listed, codec: Codec) -> CheckpointTuple | None:
        """Return a checkpoint of a list, or None if it has been deleted meanwhile."""
        session = await self._version(listed.session_id, listed.version)
        head = await self._store.load(listed.session_id)
        if session is None or head is None:
            return None
        stored = StoredCheckpoint(session)
        return await self._tuple(StoredCheckpoint(head), stored, listed.place, codec)

    async def history(self, place: Place, channels: Sequence[str], codec: Codec) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes to channels before a checkpoint, back to where each has a value of its own."""
        writes: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
        seeds: dict[str, Any] = {}
        head = await self._head(place)
        stored = None if head is None else await self._at(head, place.id)
        while head is not None and stored is not None and stored.parent is not None and len(seeds) < len(writes):
            stored = await self._at(head, stored.parent)
            if stored is None:
                break
            for write in reversed(read_writes(await self._writes(head, stored), codec.serde)):
                if write[1] in writes and write[1] not in seeds:
                    writes[write[1]].append(write)
            for channel in writes.keys() - seeds.keys():
                if stored.has_channel(channel):
                    seeds[channel] = stored.channel(channel, codec)
        return {channel: _history(writes[channel], seeds, channel) for channel in channels}

    async def delete(self, thread: str) -> None:
        """Erase a thread and its namespaces in one commit. Raise SessionBusy if perdure is running one of them."""
        try:
            await self._store.delete_tree(self.id_of(Place(thread)))
        except SessionNotFound:  # the thread has no checkpoint yet, but its namespaces may have some
            await self._store.delete_many(await self.tree(thread))

    async def copy(self, source: str, target: str) -> None:
        """Copy a thread and its namespaces. Messages are not stored again. Raise SessionConflict if `target` exists."""
        if await self._store.exists(self.id_of(Place(target))):
            raise SessionConflict(self.id_of(Place(target)), 0, None)
        for session_id in await self.tree(source):
            session = await self._home.load(session_id)
            if session is not None:
                await self._copy(StoredCheckpoint(session), target)

    async def _copy(self, head: StoredCheckpoint, target: str) -> None:
        place = self._place_of(head.session)._replace(thread=target)
        copied = await self._opened(place)
        notes = [note async for note in self._checkpoints(head)]
        await self._save_again(head.session.id, notes, copied, place)
        entries = [entry for entry in await self._store.read(head.session.id) if are_writes(entry)]
        if entries:
            await self._store.note(copied.id, [Entry(each.kind, each.body, each.run) for each in entries])

    async def keep_latest(self, thread: str) -> None:
        """Erase all checkpoints of a thread except the newest of each namespace, and those that it needs."""
        for session_id in await self.tree(thread):
            session = await self._home.load(session_id)
            if session is not None:
                await self._keep_latest(StoredCheckpoint(session))

    async def _keep_latest(self, head: StoredCheckpoint) -> None:
        latest = await self._at(head, None)
        if latest is None or latest.id is None:
            return
        if latest.session is not head.session:  # the newest version has an older checkpoint, which is erased
            await self._keep_only(head.session, [latest])
            return
        if self._is_changed(latest) and not latest.unseeded:
            # The version that its tasks and their writes belong to is erased, so they are saved with the newest.
            writes = await self._store.read(head.session.id, run=latest.id)
            await self._save_again(head.session.id, [latest], head.session, self._place_of(head.session))
            await self._store.note(head.session.id, [Entry(each.kind, each.body, each.run) for each in writes])
            await self._store.forget(head.session.id, before=head.version + 1)
            return
        await self._store.forget(head.session.id, before=await self._oldest_needed(head, latest))

    def _is_changed(self, found: StoredCheckpoint) -> bool:
        """Tell whether a verb has changed a checkpoint since LangGraph saved it in the same session."""
        return not found.is_put and self.id_of(Place(*found.names)) == found.session.id

    async def _oldest_needed(self, head: StoredCheckpoint, kept: StoredCheckpoint) -> int:
        """Return the oldest version without which a checkpoint could not be read."""
        oldest, unseeded, stored = kept.version, kept.unseeded, kept
        while unseeded and stored.parent is not None:
            found = await self._at(head, stored.parent)
            if found is None or found.session.id != head.session.id:
                break
            stored, oldest = found, min(oldest, found.version)
            unseeded = {name for name in unseeded if not stored.has_channel(name)}
        return oldest

    async def delete_runs(self, run_ids: Collection[str]) -> None:
        """Erase the checkpoints that these runs have made, in all threads."""
        infos = await self._all_infos()
        for info in sorted(infos, key=lambda each: each.spawn_ref is None):  # subgraphs first
            while True:
                try:
                    await self._delete_runs_in(info.id, run_ids)
                    break
                except SessionConflict:
                    continue  # another writer has saved it meanwhile

    async def _delete_runs_in(self, session_id: SessionId, run_ids: Collection[str]) -> None:
        session = await self._home.load(session_id)
        notes = [] if session is None else [note async for note in self._checkpoints(StoredCheckpoint(session))]
        staying = [note for note in notes if note.metadata.get("run_id") not in run_ids]
        if session is None or len(staying) == len(notes):
            return
        if staying:
            await self._keep_only(session, staying)
        elif await self._has_subgraphs(session_id):
            # The session of a graph stays for its subgraphs, which are below it.
            saved = await self._store.save(emptied(session))
            await self._store.forget(session_id, before=saved.version)
        else:
            await self._store.delete(session_id)

    async def _keep_only(self, head: AgentSession, staying: Sequence[Note]) -> None:
        """Save checkpoints again after all others, and erase the others."""
        # First saved, then erased: a crash in between leaves too much, and never too little.
        await self._save_again(head.id, staying, head, self._place_of(head))
        await self._store.forget(head.id, before=head.version + 1)

    async def _save_again(self, source: SessionId, notes: Sequence[Note], head: AgentSession, place: Place) -> None:
        """Save checkpoints of a session again, as the next versions of the same or of another, the newest last."""
        latest = max((note.id or "" for note in notes), default="")
        for note in sorted(notes, key=lambda each: each.id or ""):
            session = await self._version(source, note.version)
            if session is not None:
                stored = StoredCheckpoint(session)
                has_plan = await self._has_plan(stored)
                head = await self._saved(stored.moved(head, place, latest, has_plan=has_plan), stored.key)

    async def _has_subgraphs(self, session_id: SessionId) -> bool:
        children = await all_infos(self._store.list, parent=session_id)
        return any(child.spawn_ref is not None for child in children)


class _Wanted(NamedTuple):
    """The conditions for a checkpoint to be listed."""

    id: str | None
    filter: Mapping[str, Any]
    before: str | None

    def matches(self, stored: Note) -> bool:
        if stored.id is None or (self.id is not None and stored.id != self.id):
            return False
        if self.before is not None and stored.id >= self.before:
            return False
        if not self.filter:
            return True
        metadata: Mapping[str, Any] = stored.metadata
        return all(metadata.get(key) == value for key, value in self.filter.items())


def _history(writes: list[PendingWrite], seeds: Mapping[str, Any], channel: str) -> DeltaChannelHistory:
    found: DeltaChannelHistory = {"writes": writes[::-1]}
    if channel in seeds:
        found["seed"] = seeds[channel]
    return found


def _spawn(place: Place, caller: SessionId, new: NewCheckpoint | None) -> SpawnRef:
    """Return the caller of a subgraph: a task of a node, at a checkpoint of the graph around it."""
    node, _, task = place.ns.rpartition("|")[2].partition(":")
    parents = new.metadata.get("parents", {}) if new is not None else {}
    return SpawnRef(caller, parents.get(place.outer.ns, ""), task or node, node)
