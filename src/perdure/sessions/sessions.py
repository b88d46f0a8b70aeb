"""Every verb on sessions, by id. A `Chat` has the same verbs for one session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from msgspec.structs import replace

from perdure.errors import ConfigurationError, InvalidData, SessionConflict, SessionNotFound
from perdure.loop.factory import LoopFactory
from perdure.model.checks import expect, expect_count
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.ids import SessionId
from perdure.model.retention import Retention, RetentionPolicy
from perdure.model.session import AgentSessionInfo, check_owner
from perdure.model.state import AgentState
from perdure.protocols import DEFAULT_TERMS, SessionController, SessionStore, Terms
from perdure.runtime.bus import EventBus, Subscriber
from perdure.sessions.changing import Changing
from perdure.sessions.chat import Chat
from perdure.sessions.connection import Connection
from perdure.sessions.open_sessions import LiveSubscription
from perdure.sessions.opening import OnChange, changed_agent, changed_fields, check_on_change
from perdure.sessions.operating import Operating
from perdure.sessions.retaining import Retaining
from perdure.sessions.talking import ASSISTANT, Talking


class Sessions(Operating, Changing, Retaining):
    """Sessions in a store, and an agent loop to run them. With an owner, no other owner's sessions exist.

    `connect` makes it. A session that keeps another model than `model` is changed to that when it is sent to.

    Most verbs are about one session, and take its `session_id` first. Parameters that several verbs have:

    - `message`: a text, a `Message`, a dict `{role, content}`, or an item of OpenAI's Responses API.
    - `parts`: images and files from `perdure.attach` or as paths, and further texts, which go with a text.
    - `output`: the form of the answer, as a type or a JSON schema. `reply.value` has it in that form.
    - `context`: the object that tools find in `ToolContext.context`. It is never stored.
    - `call_ids`: the pending calls that are decided on, as in `reply.pending_calls`, or their ids. None means all.
    - `answers`, `errors`: the results of calls that are made outside, or the reasons why they failed, by call ids.
    - `wait`: False to leave the run to a worker, after the decision is on record.
    - `detach`: True to let the run continue when you stop listening.
    - `limit`: the number of items that are returned at most.
    """

    def __init__(
        self,
        store: SessionStore,
        loops: LoopFactory,
        *,
        events: EventBus,
        owner: str | None = None,
        live: int = 128,
        model: ModelConfig | None = None,
        controller: SessionController | None = None,
        grace: float = 5.0,
        filters: Iterable[str] = (),
        recover: bool = False,
        terms: Terms = DEFAULT_TERMS,
        keep: Retention | RetentionPolicy | None = None,
    ) -> None:
        check_owner(owner)
        shared: dict[str, Any] = {"live": live, "model": model, "controller": controller, "grace": grace}
        super().__init__(
            Connection(store, loops, events=events, filters=filters, terms=terms, keep=keep, **shared), owner
        )
        self._connection.recovers = expect(recover, bool, "$.recover")
        if recover and self.runtime.journal is None:
            raise ConfigurationError("This store has no journal, so no run can be recovered. Leave recover=True out.")

    def of(self, owner: str) -> Sessions:
        """Return the sessions of one owner, with every verb, on the same connection: its store, cache and runs.

        They are open while this connection is. For them, no session of anybody but `owner` exists.
        """
        if self.owner is not None:
            raise ConfigurationError(
                f"These are the sessions of {self.owner!r}, who cannot speak for anybody else. Call of() on what "
                "connect() without an owner has returned."
            )
        if owner is None:
            raise InvalidData("$.owner", "an owner is a text; without one, use the connection itself")
        # Not by the constructor, which would make a new connection.
        hers = object.__new__(type(self))
        Talking.__init__(hers, self._connection, owner)
        return hers

    def expecting(self, version: int) -> Sessions:
        """Return these sessions for a change that is bound to a `version`: `sessions.expecting(7).trim("a", 4)`.

        If the session has another version by then, SessionConflict is raised and nothing is changed. A decision that is
        left to a worker is bound, too. Verbs that run an agent here are not: a message joins the conversation at
        whatever version it is.
        """
        expect_count(version, "$.version")
        bound = object.__new__(type(self))
        Talking.__init__(bound, self._connection, self.owner)
        bound._expected = version
        return bound

    async def __aenter__(self) -> Self:
        await self._connection.open()
        if self._connection.recovers:
            from perdure.sessions.recovering import Recovering

            every = self.runtime.terms.lease
            self._connection.recovering = Recovering(self._lapsed, self._recover_one, self._root_of, every)
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Let runs end before the store is closed. After an error they are interrupted, to be recovered later."""
        await self._connection.close(at_once=kind is not None)

    async def open(
        self,
        id: str | None = None,
        agent: AgentDefinition | None = None,
        *,
        tags: Iterable[str] = (),
        on_change: OnChange = "raise",
    ) -> Chat:
        """Return a handle on a session: on a new one, or on the one with an `id`, which is created if it is missing.

        A session that is created has the `agent`, by default a plain assistant with every tool, and the `tags`.

        `on_change` says what happens if the session keeps another definition of this agent. "raise" raises
        SessionConflict. With "keep" the session continues with its own. With "take" it is given the new one, on record.
        """
        check_on_change(on_change)
        if agent is not None and not isinstance(agent, AgentDefinition):
            raise InvalidData("$.agent", f"expected an AgentDefinition, got {type(agent).__name__}")
        if agent is not None:
            agent = self.loops.redacted(agent)  # otherwise it would differ from the stored one
            self.loops.learn_output(agent)
        found = None if id is None else await self._find(id)
        if found is None:
            new = SessionId.generate(self.owner) if id is None else self._named(id)
            found = await self._create(new, agent or ASSISTANT, tags)
        session_id = found.id
        if agent is not None and agent.name != found.agent_name:
            own = found.agent_name
            reason = f"Session {session_id!r} belongs to the agent {own!r}, not to {agent.name!r}."
            advice = "Open it without an agent, open another session, or give it another agent with ChangeDefinition."
            raise SessionConflict(session_id, found.version, found.version, reason, advice, agent=own)
        if agent is not None and id is not None:
            await self._settle_agent(session_id, agent, on_change)
        return self._handle(session_id)

    async def _settle_agent(self, session_id: SessionId, agent: AgentDefinition, on_change: OnChange) -> None:
        session = await self.store.load(session_id)  # not by the runtime, which would tell subscribers of a load
        if session is None:
            raise SessionNotFound(session_id)
        if on_change == "keep" or not changed_fields(session, agent):
            return
        if on_change == "raise":
            raise changed_agent(session, agent)
        from perdure.actions.definition import ChangeDefinition

        given = replace(agent, model=session.definition.model) if agent.model is None else agent
        await self.execute(session_id, ChangeDefinition(given))

    async def new_session(self, session_id: str) -> Chat:
        """Create a session with the agent, tags and model of another. A model that connect() names comes first."""
        like = await self.session(session_id)
        made = await self._create(
            SessionId.generate(self.owner), like.definition, like.info.tags, model=like.state.default_model
        )
        return self._handle(made.id)

    async def _create(
        self, session_id: SessionId, agent: AgentDefinition, tags: Iterable[str], model: ModelConfig | None = None
    ) -> AgentSessionInfo:
        seed = AgentState.of(agent).with_default_model(self.loops.model or model)
        try:
            made = await self.runtime.create(agent, seed=seed, session_id=session_id, owner=self.owner, tags=tags)
        except SessionConflict:  # somebody else has just created it
            found = await self._find(session_id)
            if found is None:
                raise
            return found
        self.live.touch(session_id).keeps_model = True
        return made.info

    def _handle(self, session_id: SessionId) -> Chat:
        self.live.touch(session_id)
        return Chat(self, session_id)

    async def close(self, session_id: str) -> None:
        """Drop a session from memory, and its subscribers with it. The store keeps the session."""
        self.live.close((await self.info(session_id)).id)

    async def subscribe(self, session_id: str, subscriber: Subscriber) -> LiveSubscription:
        """Call a function, the `subscriber`, plain or async, with every event of a session in this process.

        It is called until the returned subscription is cancelled, or the session is closed.
        """
        return self.live.subscribe((await self.info(session_id)).id, subscriber)
