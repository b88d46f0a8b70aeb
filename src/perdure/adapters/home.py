"""Where a framework's sessions live: a store that the whole process shares, from any event loop or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.adapters.foreign import as_name
from perdure.errors import InvalidData, SessionConflict, SessionNotActive
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


def check_session_id(session_id: object) -> None:
    """Raise InvalidData unless a framework's session is named by a text, of whatever length, that is not blank."""
    if not isinstance(session_id, str) or not session_id.strip():
        given = "a blank text" if isinstance(session_id, str) else type(session_id).__name__
        raise InvalidData("$.session_id", f"expected the id of a session, got {given}")


class Home:
    """The sessions of one framework in a store, and of one owner there. Make one for each adapter that is made."""

    def __init__(self, framework: str, store: str | SessionStore | None = None, *, owner: str | None = None) -> None:
        check_owner(owner)
        self.agent = AgentDefinition(framework, description=f"Kept for {framework} by an adapter.")
        self.shared: SharedStore = shared(store)
        self.owner = owner
        self._reads_ends = hasattr(self.shared, "glance")
        """Whether it is a store of perdure's, and not one of the caller's own with fewer verbs."""

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

    async def load(
        self, session_id: SessionId, version: int | None = None, *, last: int | None = None
    ) -> AgentSession | None:
        """Return a session of this framework, None if there is none. With `last`, only the end of its view is read.

        SessionConflict if another agent has that id, and SessionNotActive if it has been deleted.
        """
        bounded = {"last": last} if last is not None and self._reads_ends else {}
        session = await self.store.load(session_id, version, **bounded)
        if session is not None:
            self._require_own(session)
        return session

    async def read(self, session_id: SessionId, *, last: int | None = None) -> AgentSession | None:
        """Return the same to a task of any event loop: at once if it is at hand."""
        session = self.at_hand(session_id, last=last)
        return await self.run(self.load(session_id, last=last)) if session is None else session

    def at_hand(self, session_id: SessionId, *, last: int | None = None) -> AgentSession | None:
        """Return the same in any thread and without waiting; None if it has to be loaded."""
        session = self.store.glance(session_id, last=last) if self._reads_ends else None
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
        shown = as_name(name, session_id)
        made = SessionFactory().create(
            self.agent, session_id=session_id, owner=self.owner, parent=parent, spawn=spawn, name=shown
        )
        for key, value in (metadata or {}).items():
            made = made.with_state(made.state.with_metadata(key, value))
        return made

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

    async def keep(self, session: AgentSession, *, whole: bool = True) -> AgentSession:
        """Save a session, or create it. SessionConflict if somebody else did meanwhile.

        Unless it is to be returned `whole`, what was not read of its view is not read now either.
        """
        if not session.version:
            return await self.store.create(session)
        if whole or not self._reads_ends:
            return await self.store.save(session)
        return await self.store.save(session, whole=False)

    def chat(self, session_id: SessionId) -> Chat:
        """Return every verb of perdure for a session, to be awaited in the event loop of the caller."""
        sessions = connect(self.shared, owner=self.owner)
        sessions._connection.begin()
        return Chat(sessions, session_id)

    def blocking_chat(self, session_id: SessionId) -> BlockingChat:
        """Return the same verbs for code without an event loop."""
        return BlockingChat(self.chat(session_id), self.shared.loop)
