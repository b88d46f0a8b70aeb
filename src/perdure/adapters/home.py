"""The home of a framework's sessions: a store that the whole process shares, from any event loop or none."""

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
    """Raise InvalidData unless a framework's id of a session is a text of any length that is not blank."""
    if not isinstance(session_id, str) or not session_id.strip():
        given = "a blank text" if isinstance(session_id, str) else type(session_id).__name__
        raise InvalidData("$.session_id", f"expected the id of a session, got {given}")


class Home:
    """The sessions of one framework and one owner in a store. Each adapter object makes its own."""

    def __init__(self, framework: str, store: str | SessionStore | None = None, *, owner: str | None = None) -> None:
        check_owner(owner)
        self.agent = AgentDefinition(framework, description=f"Kept for {framework} by an adapter.")
        self.shared: SharedStore = shared(store)
        self.owner = owner
        self._reads_ends = hasattr(self.shared, "glance")
        """True for a store of perdure's. A store that the caller has written may have fewer verbs."""

    @property
    def store(self) -> Store:
        """The verbs of the store. Call them in work for `run` or `wait`: it goes to the store's loop as a whole."""
        return self.shared

    async def run(self, work: Awaitable[T]) -> T:
        """Run work in the store's loop and return its result, in any event loop. A cancelled caller cancels nothing."""
        return await self.shared.run(work)

    def wait(self, work: Awaitable[T]) -> T:
        """Run work in the store's loop and return its result, in code without an event loop."""
        return self.shared.wait(work)

    def id_of(self, *names: str) -> SessionId:
        """Return the id of the session that has these names in its framework."""
        named = SessionId.of(*names)
        return named if self.owner is None else SessionId.under(self.owner, named)

    async def load(
        self, session_id: SessionId, version: int | None = None, *, last: int | None = None
    ) -> AgentSession | None:
        """Return a session of this framework, or None if there is none. With `last`, only the end of its view is read.

        Raise SessionConflict if the id belongs to another agent, and SessionNotActive if the session has been deleted.
        """
        bounded = {"last": last} if last is not None and self._reads_ends else {}
        session = await self.store.load(session_id, version, **bounded)
        if session is not None:
            self._require_own(session)
        return session

    async def read(self, session_id: SessionId, *, last: int | None = None) -> AgentSession | None:
        """Return the same as `load`, in any event loop. A session at hand is returned at once."""
        session = self.at_hand(session_id, last=last)
        return await self.run(self.load(session_id, last=last)) if session is None else session

    def at_hand(self, session_id: SessionId, *, last: int | None = None) -> AgentSession | None:
        """Return the same in any thread without waiting, or None if the session has to be loaded."""
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
        """Return a session at version 0, which is not in the store yet. With `spawn`, it is a sub-agent's."""
        shown = as_name(name, session_id, self.owner)
        made = SessionFactory().create(
            self.agent, session_id=session_id, owner=self.owner, parent=parent, spawn=spawn, name=shown
        )
        for key, value in (metadata or {}).items():
            made = made.with_state(made.state.with_metadata(key, value))
        return made

    async def change(self, session_id: SessionId, change: Change, *, name: str | None = None) -> AgentSession:
        """Change a session, which is created if it is missing. Return it as saved.

        On a conflict the change is applied again to the newer version, as often as it takes.
        """
        while True:
            session = await self.load(session_id)
            try:
                return await self.keep(change(self.new(session_id, name=name) if session is None else session))
            except SessionConflict as error:
                # Another framework has the id: to try again would not help.
                if error.agent is not None:
                    raise

    async def keep(self, session: AgentSession, *, whole: bool = True) -> AgentSession:
        """Save a session, or create it. Raise SessionConflict if another writer has done so meanwhile.

        With `whole=False`, the part of its view that has not been read is not read now either.
        """
        if not session.version:
            return await self.store.create(session)
        if whole or not self._reads_ends:
            return await self.store.save(session)
        return await self.store.save(session, whole=False)

    def chat(self, session_id: SessionId) -> Chat:
        """Return a chat with every perdure verb for a session, to be awaited in the caller's event loop."""
        sessions = connect(self.shared, owner=self.owner)
        # A shared store opens itself, so no `async with` is needed.
        sessions._connection.begin()
        return Chat(sessions, session_id)

    def blocking_chat(self, session_id: SessionId) -> BlockingChat:
        """Return the same verbs for code without an event loop."""
        return BlockingChat(self.chat(session_id), self.shared.loop)
