"""The sessions that an owner can reach, and their names. Every verb begins here."""

from __future__ import annotations

from contextlib import suppress

from perdure.actions.send import waiting_messages
from perdure.errors import ConfigurationError, InvalidSessionId, SessionNotFound
from perdure.loop.factory import LoopFactory
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus, check_owner
from perdure.protocols import Action, Filters, Journal, Queue, SessionStore, is_queue
from perdure.runtime.runtime import OnConflict, SessionRuntime
from perdure.sessions.connection import Connection
from perdure.sessions.open_sessions import LiveSet

NO_OWNER = "Call it on sessions that were connected without an owner."


class Reach:
    """A connection, seen by one owner. Without an owner, every session is within reach.

    Ids are one namespace for the whole store, and an owner must not learn from it what others have. So an owner's ids
    begin with the owner's mark, which need not be written: `order-7` is the session `o….order-7`. A session that was
    created for the owner without the mark is found by its whole id.
    """

    def __init__(self, connection: Connection, owner: str | None) -> None:
        check_owner(owner)
        self._connection = connection
        self.owner = owner
        """The owner whose sessions these are, or None for those of everybody."""
        self._expected: int | None = None
        """The version that a session must have to be changed; None for any."""

    @property
    def store(self) -> SessionStore:
        """The store that has the sessions."""
        return self._connection.store

    @property
    def loops(self) -> LoopFactory:
        """The factory of the loops that run agents."""
        return self._connection.loops

    @property
    def runtime(self) -> SessionRuntime:
        """The runtime under the verbs."""
        return self._connection.runtime

    @property
    def journal(self) -> Journal | None:
        """The part of the store that records runs; None if it records none."""
        return self.runtime.journal

    def _queue(self) -> Queue:
        """Return the part of the store that keeps work for workers. Raise ConfigurationError if it has none."""
        journal = self.runtime.journal
        if journal is None or not is_queue(journal):
            raise cannot(self.store, "keep anything for workers")
        return journal

    @property
    def live(self) -> LiveSet:
        """The sessions that somebody has open on this connection."""
        return self._connection.live

    def _require_open(self) -> None:
        self._connection.require_open()

    def _require_no_owner(self, what: str) -> None:
        if self.owner is not None:
            raise ConfigurationError(what, NO_OWNER)

    async def _find(self, session_id: str) -> AgentSessionInfo | None:
        """Return the header of a session within reach, or None."""
        self._require_open()
        given = SessionId(session_id)
        if self.owner is None:
            return await self._header(Filters(id=given, limit=1))
        # Looked up one after the other, no matter who has the second, so that neither answer nor time tells of that.
        with suppress(InvalidSessionId):  # the id is too long for a mark: only an older session can have it
            found = await self._own(self._named(given))
            if found is not None:
                return found
        return await self._own(given)

    async def _own(self, session_id: SessionId) -> AgentSessionInfo | None:
        # By the owner, too: an error about another owner's session must not show here.
        return await self._header(Filters(id=session_id, owner=self.owner, limit=1))

    async def _header(self, wanted: Filters) -> AgentSessionInfo | None:
        page = await self.store.list(**wanted)
        if page.damaged:
            raise page.damaged[0]
        return page.all()[0] if page else None

    def _named(self, name: str) -> SessionId:
        """Return the id that a session of this name has if it is created now."""
        return SessionId(name) if self.owner is None else SessionId.under(self.owner, name)

    async def _reach(self, session_id: str) -> SessionId:
        """Return the id of a session within reach. Without an owner, the verb itself finds out whether it exists."""
        self._require_open()
        return SessionId(session_id) if self.owner is None else (await self.info(session_id)).id

    async def info(self, session_id: str) -> AgentSessionInfo:
        """Return a session's header."""
        found = await self._find(session_id)
        if found is None:
            raise SessionNotFound(session_id)
        return found

    async def execute(self, session_id: str, action: Action, *, on_conflict: OnConflict = "retry") -> AgentSession:
        """Execute any `action` on a session. After a conflict, one that may be repeated is applied again.

        `on_conflict` is "retry" for that, or "raise" for SessionConflict. With "fork", the change is kept as a fork,
        and the error names it.
        """
        if self.owner is not None and getattr(action, "lifts_hold", False):
            what = f"These are the sessions of {self.owner!r}. An owner cannot lift a hold."
            raise ConfigurationError(what, NO_OWNER)
        key = await self._reach(session_id)
        with self.live.running(key):
            after = await self.runtime.execute(key, action, on_conflict=on_conflict, expected=self._expected)
        waiting = waiting_messages(self.runtime, key, self.loops)
        if waiting is not None and after.status is SessionStatus.ACTIVE:  # perhaps only since this action
            await self.runtime.follow(waiting)
        return after


def cannot(store: SessionStore, what: str) -> ConfigurationError:
    """Explain that a store lacks what a verb needs."""
    return ConfigurationError(f"A {type(store).__name__} cannot {what}. Use a store of perdure's own that can.")
