"""Where a framework's sessions live: a store that the whole process shares, from any event loop or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from perdure.errors import SessionConflict, SessionNotActive
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.session import AgentSession, SessionStatus, check_owner
from perdure.protocols import SessionStore
from perdure.runtime.repository import SessionFactory
from perdure.sessions.blocking import BlockingChat
from perdure.sessions.chat import Chat
from perdure.sessions.connect import connect
from perdure.sessions.shared import SharedStore, shared

if TYPE_CHECKING:
    from perdure.stores.store import Store

T = TypeVar("T")
Change = Callable[[AgentSession], AgentSession]


class Home:
    """The sessions of one framework in a store, and of one owner there. Make one for each adapter that is made."""

    def __init__(self, framework: str, store: str | SessionStore | None = None, *, owner: str | None = None) -> None:
        check_owner(owner)
        self.agent = AgentDefinition(framework, description=f"Kept for {framework} by an adapter.")
        self.shared: SharedStore = shared(store)
        self.owner = owner

    @property
    def store(self) -> Store:
        """The verbs of the store. Call them in work that is given to `run` or `wait`: it goes there once as a whole."""
        return self.shared

    async def run(self, work: Awaitable[T]) -> T:
        """Return what work comes to, to a task of any event loop. A cancelled caller cancels nothing."""
        return await self.shared.run(work)

    def wait(self, work: Awaitable[T]) -> T:
        """Return what work comes to, to code without an event loop."""
        return self.shared.wait(work)

    def id_of(self, *names: str) -> SessionId:
        """Return the id of the session that has these names in its framework."""
        named = SessionId.of(*names)
        return named if self.owner is None else SessionId.under(self.owner, named)

    async def load(self, session_id: SessionId, version: int | None = None) -> AgentSession | None:
        """Return a session of this framework, None if there is none.

        SessionConflict if another agent has that id, and SessionNotActive if it has been deleted.
        """
        session = await self.store.load(session_id, version)
        if session is not None:
            self._require_own(session)
        return session

    def _require_own(self, session: AgentSession) -> None:
        agent = session.info.agent_name
        if agent != self.agent.name:
            reason = f"Session {session.id!r} belongs to the agent {agent!r}, not to {self.agent.name!r}."
            advice = "Use another id, or another store, for each framework."
            raise SessionConflict(session.id, session.version, session.version, reason, advice, agent=agent)
        if session.status is SessionStatus.DELETED:
            raise SessionNotActive(session.id, session.status.value)

    def new(
        self,
        session_id: SessionId,
        *,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent: SessionId | None = None,
        spawn: SpawnRef | None = None,
    ) -> AgentSession:
        """Return a session that is not in the store yet, of version 0. With `spawn` it is a sub-agent's."""
        made = SessionFactory().create(self.agent, session_id=session_id, owner=self.owner)
        made = replace(made, info=replace(made.info, parent_id=parent, spawn_ref=spawn))
        for key, value in (metadata or {}).items():
            made = made.with_state(made.state.with_metadata(key, value))
        return made if name is None or name == session_id else made.with_name(name)

    async def change(self, session_id: SessionId, change: Change, *, name: str | None = None) -> AgentSession:
        """Save what a change makes of a session, which is created unless it is there. Return it as saved.

        If somebody else saves it meanwhile, the change is made again on top of that, as often as it takes.
        """
        while True:
            session = await self.load(session_id)
            try:
                return await self.keep(change(self.new(session_id, name=name) if session is None else session))
            except SessionConflict as error:
                if error.agent is not None:
                    raise

    async def keep(self, session: AgentSession) -> AgentSession:
        """Save a session, or create it. SessionConflict if somebody else did meanwhile."""
        return await (self.store.save(session) if session.version else self.store.create(session))

    async def erase(self, session_id: SessionId) -> None:
        """Erase a session and those of its sub-agents. SessionNotFound if there is none."""
        from perdure.actions.children import spawned_by

        for each in await spawned_by(self.store, session_id, deleted=True):
            await self.store.delete(each.id)
        await self.store.delete(session_id)

    def chat(self, session_id: SessionId) -> Chat:
        """Return every verb of perdure for a session, to be awaited in the event loop of the caller."""
        sessions = connect(self.shared, owner=self.owner)
        sessions._connection.begin()
        return Chat(sessions, session_id)

    def blocking_chat(self, session_id: SessionId) -> BlockingChat:
        """Return the same verbs for code without an event loop."""
        return BlockingChat(self.chat(session_id), self.shared.loop)
