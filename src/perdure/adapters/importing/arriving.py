"""The arrival of other libraries' sessions in a store. Each arrives in one commit, and later only what is new.

The metadata of an imported session says under `imported` how much of its source has arrived, and what that was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from perdure.adapters.foreign import as_name
from perdure.errors import SessionBusy, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.value import EMPTY, JSON
from perdure.runtime.repository import SessionFactory

if TYPE_CHECKING:
    from perdure.stores.store import Store

NOTE = "imported"
"""The key of the metadata that tells what of a source has arrived."""


class Refused(msgspec.Struct, frozen=True):
    """A session of a source that was left alone, and why."""

    session_id: str
    reason: str


class ImportReport(msgspec.Struct, frozen=True):
    """The result of an import. Sessions that had arrived completely before are `skipped`."""

    sessions: int = 0
    messages: int = 0
    skipped: int = 0
    refused: tuple[Refused, ...] = ()
    diverged: tuple[str, ...] = ()
    """The threads that have continued both here and in the source. What is new there has arrived as a branch."""

    def __add__(self, other: ImportReport) -> ImportReport:
        return ImportReport(
            self.sessions + other.sessions,
            self.messages + other.messages,
            self.skipped + other.skipped,
            self.refused + other.refused,
            self.diverged + other.diverged,
        )


class Piece(Protocol):
    """A part of a source that arrives by itself."""

    async def arrive(self, target: Target) -> ImportReport: ...


Pieces = Sequence[Callable[[], Iterable[Piece]]]
"""A source: a function for each of its sessions, which reads it."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A session of a source: the items that were said in it, as messages, and what it is kept with."""

    names: tuple[str, ...]
    """The session's names in its framework. The id is made of them as the framework's adapter makes it."""
    names_of_all: tuple[str, ...] = ()
    """The names to use if one owner gets all that arrives. These names tell users apart."""
    items: Sequence[JSON]
    read: Callable[[JSON], Message]
    """The function that makes a message of an item."""
    name: str | None = None
    metadata: Mapping[str, Any] = EMPTY
    indexed: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    owner: str | None = None
    """The owner in the framework. An owner that was given to the import comes first."""
    spawned_by: tuple[tuple[str, ...], str] | None = None
    """The names of the session that this sub-agent belongs to, and the sub-agent's name there."""
    created_at: datetime | None = None

    async def arrive(self, target: Target) -> ImportReport:
        names = self.names_of_all if target.owner is not None and self.names_of_all else self.names
        session_id = target.id_of(*names, owner=self.owner)
        found = await target.store.load(session_id)
        try:
            if found is None:
                return await self._created(target, session_id)
            return await self._grown(target, found)
        except (SessionBusy, SessionConflict) as error:
            return _refused(session_id, str(error))

    async def _created(self, target: Target, session_id: SessionId) -> ImportReport:
        made = target.new(
            session_id,
            name=self.name,
            owner=self.owner,
            tags=self.tags,
            spawn=self._spawn(target),
            created_at=self.created_at,
        )
        await target.store.create(self._with_items(made, target.framework, 0))
        return ImportReport(sessions=1, messages=len(self.items))

    def _spawn(self, target: Target) -> SpawnRef | None:
        if self.spawned_by is None:
            return None
        names, name = self.spawned_by
        return SpawnRef(target.id_of(*names, owner=self.owner), "", "", name)

    async def _grown(self, target: Target, found: AgentSession) -> ImportReport:
        """Add what is new. A session that was changed on both sides since is left alone."""
        note = found.state.metadata.get(NOTE)
        if not isinstance(note, Mapping) or note.get("from") != target.framework or note.get("id") != found.id:
            return _refused(found.id, _not_imported(found, target.framework))
        had = int(note["items"])
        # New items can only follow what arrived if the source still begins with it.
        if had > len(self.items) or note["digest"] != _digest(self.items[:had]):
            reason = "what had arrived of it has been changed in the source since"
            return _refused(found.id, _AGAIN.format(id=found.id, reason=reason))
        if had == len(self.items) and note["metadata"] == _digest([self._kept]):
            return ImportReport(skipped=1)
        if note["version"] != found.version or found.status is SessionStatus.DELETED:
            reason = "it was changed in this store and in its source since it arrived"
            return _refused(found.id, _AGAIN.format(id=found.id, reason=reason))
        await target.store.save(self._with_items(found, target.framework, had))
        return ImportReport(sessions=1, messages=len(self.items) - had)

    def _with_items(self, session: AgentSession, framework: str, had: int) -> AgentSession:
        state = session.state.with_messages(*map(self.read, self.items[had:]))
        note = {
            "from": framework,
            "id": session.id,
            "items": len(self.items),
            "digest": _digest(self.items),
            "metadata": _digest([self._kept]),
            # The version of this save. If the session has a later one, it was changed here.
            "version": session.version + 1,
        }
        for key, value in {**self.metadata, NOTE: note}.items():
            state = state.with_metadata(key, value)
        return session.with_state(state).with_indexed(self.indexed)

    @property
    def _kept(self) -> JSON:
        return {**self.metadata}


_AGAIN = (
    "Session {id!r} stays as it is: {reason}. "
    "Import into another store, or erase it here (`perdure erase {id} --yes`) and import again."
)


def _not_imported(found: AgentSession, framework: str) -> str:
    """Explain that a session which was not imported has the id of one that arrives."""
    if found.info.agent_name != framework:
        return f"Another session has the id {found.id!r}. Import into another store."
    return _AGAIN.format(id=found.id, reason=f"the adapter for {framework} keeps it in this store already")


class Target:
    """The store that sessions of one framework arrive in."""

    def __init__(self, store: Store, framework: str, owner: str | None = None) -> None:
        self.store = store
        self.framework = framework
        self.owner = owner
        self._agent = AgentDefinition(framework, description=f"Kept for {framework} by an adapter.")

    def id_of(self, *names: str, owner: str | None = None) -> SessionId:
        """Return the id that the framework's adapter gives to the session of these names."""
        named, whose = SessionId.of(*names), self.owner or owner
        return named if whose is None else SessionId.under(whose, named)

    def new(
        self,
        session_id: SessionId,
        *,
        name: str | None = None,
        owner: str | None = None,
        tags: Sequence[str] = (),
        spawn: SpawnRef | None = None,
        created_at: datetime | None = None,
    ) -> AgentSession:
        """Return a session of version 0 for what arrives."""
        made = SessionFactory().create(self._agent, session_id=session_id, owner=self.owner or owner, tags=tags)
        info = made.info
        if created_at is not None:
            info = replace(info, created_at=created_at)
        if spawn is not None:
            info = replace(info, parent_id=SessionId(spawn.parent_session_id), spawn_ref=spawn)
        made = replace(made, info=info)
        shown = as_name(name, session_id, info.owner)
        return made if shown is None else made.with_name(shown)


async def take_in(
    pieces: Pieces, target: Target, progress: Callable[[int, int], Awaitable[None] | None] | None = None
) -> ImportReport:
    """Import a source, session by session."""
    report = ImportReport()
    for done, read in enumerate(pieces, 1):
        for piece in read():
            report += await piece.arrive(target)
        if progress is not None:
            progress(done, len(pieces))
    return report


def _refused(session_id: str, reason: str) -> ImportReport:
    return ImportReport(refused=(Refused(session_id, reason),))


def _digest(items: Iterable[JSON]) -> str:
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps(item, default=str).encode())
        found.update(b"\n")
    return found.hexdigest()
