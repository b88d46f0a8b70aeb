"""A thin layer over a store, for code that has a session at hand: a fork, or one built by a factory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

from msgspec.structs import asdict, replace

from perdure.errors import ConfigurationError, InvalidData, SessionNotFound
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, now
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message, require_distinct
from perdure.model.session import (
    AgentSession,
    AgentSessionInfo,
    SessionInfoList,
    check_name,
    check_owner,
    check_spawn,
    check_tags,
)
from perdure.model.state import AgentState
from perdure.protocols import (
    CountsErasures,
    Entry,
    Filters,
    Journal,
    KnowsWaiting,
    Saving,
    SessionStore,
    checked_version,
)


class SessionRepository:
    """A store whose `load` raises SessionNotFound if there is nothing to load."""

    def __init__(self, store: SessionStore) -> None:
        if not isinstance(store, SessionStore):
            raise ConfigurationError(f"{store!r} is not a session store; see perdure.protocols.SessionStore.")
        self.store = store
        self.journal: Journal | None = store if isinstance(store, Journal) else None  # looked for once: it is not cheap
        """The store's journal; None if its runs are unrecorded."""
        self._counting: CountsErasures | None = store if isinstance(store, CountsErasures) else None
        self._waiting: KnowsWaiting | None = store if isinstance(store, KnowsWaiting) else None

    async def create(
        self, session: AgentSession, saving: Saving | None = None, *, erasures: int | None = None
    ) -> AgentSession:
        """Store a new session. With `saving`, a run has written its messages to a journal already.

        With `erasures`, raise ErasedMeanwhile if something was erased since that was the count.
        """
        if saving is None and erasures is not None and self._counting is not None:
            return await self._counting.create(session, erasures=erasures)
        if saving is None:
            return await self.store.create(session)
        return await self.recorded().create(session, written=saving.written)

    async def erasures(self) -> int | None:
        """Return how often something was erased in the store, or None if the store does not count."""
        return None if self._counting is None else await self._counting.erasures()

    async def save(
        self, session: AgentSession, saving: Saving | None = None, *, notes: Sequence[Entry] = ()
    ) -> AgentSession:
        """Store the next version. With `saving`, it is that of a run, and the store has a journal.

        `notes` are put on record with it, if there is a record.
        """
        if notes and saving is not None:
            saving = replace(saving, entries=(*saving.entries, *notes))
        if saving is None and notes and self.journal is not None:
            return await self.journal.save(session, entries=notes)
        if saving is None:
            return await self.store.save(session)
        return await self.recorded().save(session, **asdict(saving))

    def may_be_waited_for(self, session_id: str) -> bool:
        """Tell whether something may wait in the inbox of a session that was just saved."""
        return self._waiting is None or self._waiting.is_waited_for(session_id) is not False

    def recorded(self) -> Journal:
        """Return the store's journal. Raise ConfigurationError if it has none."""
        if self.journal is None:
            raise ConfigurationError("This store has no journal, so its runs are unrecorded.")
        return self.journal

    async def load(self, session_id: str, version: int | None = None) -> AgentSession:
        session = await self.store.load(SessionId(session_id), checked_version(version))
        if session is None:
            raise SessionNotFound(session_id, version)
        return session

    async def exists(self, session_id: str) -> bool:
        return await self.store.exists(session_id)

    async def delete(self, session_id: str) -> None:
        """Erase this one session. The sessions of its sub-agents stay: `Sessions.erase` erases them with it."""
        await self.store.delete(session_id)

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        return await self.store.list(**filters)

    async def info(self, session_id: str) -> AgentSessionInfo:
        """Return a session's header, without its transcript."""
        page = await self.store.list(id=SessionId(session_id), limit=1)
        if page.damaged:
            raise page.damaged[0]
        if not page:
            raise SessionNotFound(session_id)
        return page.all()[0]


class SessionFactory:
    """A factory of new sessions, of version 0, from a definition."""

    def create(
        self,
        definition: AgentDefinition,
        seed: AgentState | None = None,
        *,
        session_id: str | None = None,
        owner: str | None = None,
        tags: Iterable[str] = (),
        parent: str | None = None,
        spawn: SpawnRef | None = None,
        name: str | None = None,
    ) -> AgentSession:
        """Return a new session. With a `parent` it is a child of that session, which need not exist yet.

        `spawn` makes it the session of a sub-agent, and names the call of the parent's that it serves. Lists with
        `top_level` leave it out. Without `spawn` the child counts as a fork of its parent.
        """
        if not isinstance(definition, AgentDefinition):
            raise InvalidData("$.definition", f"expected an AgentDefinition, got {type(definition).__name__}")
        check_owner(owner)
        check_name(name)
        key = SessionId.generate(owner) if session_id is None else SessionId(session_id)
        parent_id = None if parent is None else SessionId(parent)
        if parent_id == key:
            raise InvalidData("$.parent", f"session {key!r} cannot be its own parent")
        check_spawn(spawn, parent_id)
        at = now()
        info = AgentSessionInfo(
            id=key,
            agent_name=definition.name,
            created_at=at,
            updated_at=at,
            parent_id=parent_id,
            spawn_ref=spawn,
            owner=owner,
            tags=check_tags(tags),
            name=name,
        )
        state = AgentState.of(definition) if seed is None else _seeded(seed, definition)
        return AgentSession(info, definition, state)


def _unsaved(seed: AgentState) -> list[Message]:
    """Return the messages of a seed that no store has yet. A stored one may repeat: it was sent twice in a session."""
    return [message for span in seed.transcript.spans() if span.tape.ref is None for message in span.messages()]


def _seeded(seed: AgentState, definition: AgentDefinition) -> AgentState:
    """Return the seed, with what it leaves open filled in from the definition."""
    if not isinstance(seed, AgentState):
        raise InvalidData("$.seed", f"expected an AgentState, got {type(seed).__name__}")
    metadata: Mapping[str, object] = {**definition.metadata, **seed.metadata}
    prompt = seed.context.system_prompt or definition.system_prompt
    require_distinct(_unsaved(seed), "$.seed.messages")
    return seed.for_another_session().with_context(replace(seed.context, metadata=metadata, system_prompt=prompt))
