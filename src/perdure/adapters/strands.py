"""Sessions of Strands Agents in a store: `Agent(session_manager=PerdureSessionManager("s-1"))`.

A session of Strands is a session with the conversation of its first agent. Each further agent, and the state of each
multi-agent, is a child session. A message of Strands is a message with its number.

Sessions of the first layout have no messages: all of their agents are children. They are still read and continued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from perdure.adapters.extras import extra

with extra("strands"):
    from strands.session.repository_session_manager import RepositorySessionManager
    from strands.session.session_repository import SessionRepository
    from strands.types.content import Message as StrandsMessage
    from strands.types.exceptions import SessionException
    from strands.types.session import Session, SessionAgent, SessionMessage, SessionType, decode_bytes_values

from perdure.adapters.foreign import as_metadata, of_metadata
from perdure.adapters.forms.strands import FORM
from perdure.adapters.home import Change, Home, check_session_id
from perdure.errors import ConfigurationError, SessionConflict, SessionNotActive, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.protocols import SessionStore

if TYPE_CHECKING:
    from strands.multiagent.base import MultiAgentBase
    from strands.types.agent import LocalAgent

    from perdure.sessions.blocking import BlockingChat

T = TypeVar("T")
_SESSION, _AGENT, _MULTI_AGENT = "strands_session", "strands_agent", "strands_multi_agent"
"""The metadata keys of what Strands keeps for a session, for an agent, and for a multi-agent."""
_FIELDS = frozenset(field.name for field in fields(SessionMessage))


class PerdureSessionRepository(SessionRepository):
    """A repository of Strands' sessions. It may be called from any thread, including that of an event loop."""

    def __init__(self, *, store: str | SessionStore | None = None, owner: str | None = None) -> None:
        self._home = Home("strands", store, owner=owner)

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Keep a new session. Raise SessionException if the id is taken."""
        kept = {**session.to_dict(), "session_type": SessionType(session.session_type).value}
        session_id = self._home.id_of(session.session_id)
        made = self._home.new(session_id, name=session.session_id, metadata={_SESSION: kept})
        self._home.wait(self._create(made, f"Session {session.session_id} already exists"))
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """Return a session, or None if there is none. A fork of an agent's conversation is a session too."""
        found = self._home.wait(self._home.load(self._home.id_of(session_id)))
        if found is None:
            return None
        kept = of_metadata(found.state.metadata.get(_SESSION))
        if kept is not None:
            return Session.from_dict({**kept, "session_id": session_id})  # a fork's metadata has its original's id
        at, updated_at = (time.isoformat() for time in (found.info.created_at, found.info.updated_at))
        return Session(session_id, SessionType.AGENT, at, updated_at)

    def delete_session(self, session_id: str, **kwargs: Any) -> None:
        """Erase a session and its agents in one commit. Raise SessionException if there is none."""
        self._home.wait(self._delete(session_id))

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Keep a new agent of a session. The first is the session itself. Raise SessionException if the id is taken."""
        self._home.wait(self._create_agent(session_id, session_agent))

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """Return an agent as it was last kept, or None if there is none."""
        found = self._home.wait(self._find_agent(session_id, agent_id))
        return None if found is None else SessionAgent.from_dict(of_metadata(found.state.metadata[_AGENT]))

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Keep an agent as it is now. Raise SessionException if there is none."""

        def change(session: AgentSession) -> AgentSession:
            session_agent.created_at = of_metadata(session.state.metadata[_AGENT])["created_at"]
            return session.with_state(session.state.with_metadata(_AGENT, as_metadata(session_agent.to_dict())))

        self._home.wait(self._change_agent(session_id, session_agent.agent_id, change))

    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Keep a new message. Raise SessionException if its number is taken: the session was continued elsewhere."""

        def change(session: AgentSession) -> AgentSession:
            view = session.state.transcript
            place = _Numbered(view).place_of(session_message.message_id)
            if place.is_taken:
                raise SessionException(
                    f"Message {session_message.message_id} of agent {agent_id} in session {session_id} exists already: "
                    "the session was continued elsewhere. Make the agent again, which reads it, and ask again."
                )
            return _with(session, _spliced(view, place.index, place.index, kept))

        kept = FORM.message(cast("Any", session_message.to_dict()))
        self._home.wait(self._change_agent(session_id, agent_id, change))

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        """Return the message with a number, or None if there is none."""
        session = self._home.wait(self._find_agent(session_id, agent_id))
        if session is None:
            return None
        numbered = _Numbered(session.state.transcript)
        place = numbered.place_of(message_id)
        return numbered.message(place.index) if place.is_taken else None

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Replace the message that has the same number. Raise SessionException if there is none."""

        def change(session: AgentSession) -> AgentSession:
            numbered = _Numbered(session.state.transcript)
            place = numbered.place_of(session_message.message_id)
            if not place.is_taken:
                raise SessionException(f"Message {session_message.message_id} does not exist")
            session_message.created_at = numbered.message(place.index).created_at
            kept = FORM.message(cast("Any", session_message.to_dict()))
            return _with(session, _spliced(numbered.view, place.index, place.index + 1, kept))

        self._home.wait(self._change_agent(session_id, agent_id, change))

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Return an agent's messages without the first `offset`, and at most `limit` of them.

        Messages that perdure has cut off or replaced by a summary count among the first.
        """
        session = self._home.wait(self._find_agent(session_id, agent_id))
        if session is None:
            raise _missing(session_id, agent_id)
        numbered = _Numbered(session.state.transcript)
        start = numbered.place_of(offset).index if offset else 0
        stop = len(numbered.view) if limit is None else min(start + limit, len(numbered.view))
        return [numbered.message(index) for index in range(start, stop)]

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Keep the state of a multi-agent. An older state is replaced."""
        self._home.wait(self._keep_multi_agent(session_id, multi_agent.id, multi_agent.serialize_state()))

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """Return the state of a multi-agent, or None if there is none."""
        found = self._home.wait(self._home.load(self._multi_agent(session_id, multi_agent_id)))
        return None if found is None else of_metadata(found.state.metadata[_MULTI_AGENT])

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Keep the state of a multi-agent as it is now. Raise SessionException if none was kept before."""
        if self.read_multi_agent(session_id, multi_agent.id) is None:
            raise SessionException(f"MultiAgent state {multi_agent.id} in session {session_id} does not exist")
        self.create_multi_agent(session_id, multi_agent)

    def chat(self, session_id: str, agent_id: str = "default") -> BlockingChat:
        """Return a chat with every perdure verb for an agent's conversation, for code without an event loop."""
        found = self._home.wait(self._find_agent(session_id, agent_id))
        if found is None:
            raise _missing(session_id, agent_id)
        return self._home.blocking_chat(found.id)

    def _agent(self, session_id: str, agent_id: str) -> SessionId:
        return self._home.id_of(session_id, agent_id)

    def _multi_agent(self, session_id: str, multi_agent_id: str) -> SessionId:
        return self._home.id_of(session_id, "multi-agent", multi_agent_id)

    async def _find_agent(self, session_id: str, agent_id: str) -> AgentSession | None:
        """Return the session with an agent's conversation: the session of Strands itself, or a child of it."""
        found = await self._home.load(self._home.id_of(session_id))
        if found is not None and _agent_id(found) == agent_id:
            return found
        return await self._home.load(self._agent(session_id, agent_id))

    async def _create(self, session: AgentSession, taken: str) -> None:
        try:
            await self._home.store.create(session)
        except SessionConflict as error:
            raise SessionException(taken) from error

    async def _create_agent(self, session_id: str, session_agent: SessionAgent) -> None:
        """Make a session the conversation of this agent, or create a child if another agent has the session."""
        agent_id, metadata = session_agent.agent_id, as_metadata(session_agent.to_dict())
        taken = f"Agent {agent_id} in session {session_id} already exists"
        while True:
            session = await self._parent(session_id)
            if await self._find_agent(session_id, agent_id) is not None:
                raise SessionException(taken)
            if await self._has_agents(session_id, session):
                child_id = self._agent(session_id, agent_id)
                await self._create(await self._child(session_id, child_id, agent_id, {_AGENT: metadata}), taken)
                return
            with suppress(SessionConflict):  # another agent may get the session first: look again
                await self._home.keep(session.with_state(session.state.with_metadata(_AGENT, metadata)))
                return

    async def _has_agents(self, session_id: str, session: AgentSession) -> bool:
        """Tell whether a session is an agent's conversation, or has children that are, as in the first layout."""
        if _agent_id(session) is not None:
            return True
        after: str | None = None
        while True:
            page = await self._home.store.list(parent=session.id, after=after)
            spawned = [(info.id, info.spawn_ref.tool_name) for info in page if info.spawn_ref is not None]
            if any(child_id == self._agent(session_id, name) for child_id, name in spawned):
                return True
            if (after := page.next) is None:
                return False

    async def _child(self, session_id: str, child_id: SessionId, name: str, metadata: dict[str, Any]) -> AgentSession:
        parent = (await self._parent(session_id)).id
        spawn = SpawnRef(parent, "", "", name)
        return self._home.new(child_id, name=name, metadata=metadata, parent=parent, spawn=spawn)

    async def _parent(self, session_id: str) -> AgentSession:
        found = await self._home.load(self._home.id_of(session_id))
        if found is None:
            raise SessionException(f"Session {session_id} does not exist")
        return found

    async def _change_agent(self, session_id: str, agent_id: str, change: Change) -> None:
        """Change an agent's session and save it. On a conflict the change is applied again to the newer version."""
        while True:
            session = await self._find_agent(session_id, agent_id)
            if session is None:
                raise _missing(session_id, agent_id)
            with suppress(SessionConflict):
                await self._home.keep(change(session))
                return

    async def _keep_multi_agent(self, session_id: str, multi_agent_id: str, state: dict[str, Any]) -> None:
        child_id = self._multi_agent(session_id, multi_agent_id)
        kept = as_metadata(state)
        while True:
            found = await self._home.load(child_id)
            if found is None:
                changed = await self._child(session_id, child_id, multi_agent_id, {_MULTI_AGENT: kept})
            else:
                changed = found.with_state(found.state.with_metadata(_MULTI_AGENT, kept))
            with suppress(SessionConflict):
                await self._home.keep(changed)
                return

    async def _delete(self, session_id: str) -> None:
        missing = SessionException(f"Session {session_id} does not exist")
        key = self._home.id_of(session_id)
        with suppress(SessionNotActive):  # a hidden session is still in the store
            if await self._home.load(key) is None:
                raise missing
        try:
            await self._home.store.delete_tree(key)
        except SessionNotFound:
            raise missing from None


class PerdureSessionManager(RepositorySessionManager):
    """A session manager that keeps the agents of one session of Strands, and reads them when they are made again."""

    def __init__(
        self, session_id: str, *, store: str | SessionStore | None = None, owner: str | None = None, **kwargs: Any
    ) -> None:
        check_session_id(session_id)
        self.repository = PerdureSessionRepository(store=store, owner=owner)
        try:
            super().__init__(session_id, self.repository, **kwargs)
        except SessionException:  # another process has created it meanwhile: this time it is read
            super().__init__(session_id, self.repository, **kwargs)

    @property
    def chat(self) -> BlockingChat:
        """A chat with every perdure verb for the conversation of the agent. If there are several, use `chat_of`."""
        agents = [*self._latest_agent_message]
        if len(agents) != 1:
            raise ConfigurationError(
                f"Session {self.session_id!r} has {len(agents)} agents here. "
                "Make its agent first, or name one: `manager.chat_of('default')`."
            )
        return self.chat_of(agents[0])

    def chat_of(self, agent_id: str) -> BlockingChat:
        """Return the same verbs for the conversation of one of several agents."""
        return self.repository.chat(self.session_id, agent_id)

    def append_message(self, message: StrandsMessage, agent: LocalAgent, **kwargs: Any) -> None:
        """Keep a message of an agent. Raise SessionException if the session was continued elsewhere meanwhile."""
        before = self._latest_agent_message[agent.agent_id]
        try:
            super().append_message(message, agent, **kwargs)
        except BaseException:
            # It was not kept, so the next message must not be kept as if it followed this one.
            self._latest_agent_message[agent.agent_id] = before
            raise


def _missing(session_id: str, agent_id: str) -> SessionException:
    return SessionException(f"Agent {agent_id} in session {session_id} does not exist")


def _agent_id(session: AgentSession) -> str | None:
    """Return the id of a session's agent without unpacking its state, or None if the session has no agent."""
    kept = session.state.metadata.get(_AGENT)
    if not isinstance(kept, Mapping):
        return None
    return cast("str", kept["agent_id"] if "agent_id" in kept else of_metadata(kept)["agent_id"])


def _with(session: AgentSession, view: Transcript) -> AgentSession:
    return session.with_state(session.state.with_transcript(view))


def _spliced(view: Transcript, start: int, stop: int, message: Message) -> Transcript:
    """Return a view with a message in place of those from `start` to `stop`. Nothing is copied."""
    if start == len(view):
        return view.append(message)
    return Transcript((*view.cut(0, start).append(message).pieces, *view.cut(stop, len(view)).pieces))


class _Place:
    __slots__ = ("index", "is_taken")

    def __init__(self, index: int, *, is_taken: bool) -> None:
        self.index = index
        self.is_taken = is_taken


class _Numbered:
    """The messages of a view by the numbers that Strands has given them, which grow from each to the next.

    A message of perdure's own, such as a summary, counts back from the next one that has a number. At the end it counts
    forward from the last one that has a number.
    """

    def __init__(self, view: Transcript) -> None:
        self.view = view

    def place_of(self, number: int) -> _Place:
        """Return the place of the message with a number, or the place where it would be."""
        last = len(self.view) - 1
        if last < 0 or self.number(last) < number:  # true for each new message, without a search
            return _Place(last + 1, is_taken=False)
        index = bisect_left(range(last + 1), number, key=self.number)
        return _Place(index, is_taken=self.number(index) == number)

    def number(self, index: int) -> int:
        for step, place in enumerate(range(index, len(self.view))):
            number = _number_of(self.view[place])
            if number is not None:
                return number - step
        for step, place in enumerate(range(index, -1, -1)):
            number = _number_of(self.view[place])
            if number is not None:
                return number + step
        return index

    def message(self, index: int) -> SessionMessage:
        message = self.view[index]
        item = cast("dict[str, Any]", FORM.items(message)[0])
        known = {name: value for name, value in item.items() if name in _FIELDS}
        known["message_id"] = self.number(index)
        return SessionMessage(**decode_bytes_values(known))


def _number_of(message: Message) -> int | None:
    number = FORM.frame(message).get("message_id")
    return number if isinstance(number, int) else None
