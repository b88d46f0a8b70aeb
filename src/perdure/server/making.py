"""Sessions that requests make, each in one commit with all that it begins with, and once for each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from perdure.actions.transcript import InjectMessage
from perdure.errors import InvalidData, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentState
from perdure.model.value import EMPTY
from perdure.runtime.repository import SessionFactory
from perdure.server.call import Call
from perdure.sessions.pages import glimpse

_REQUEST = "request_digest"
"""The metadata key for the digest of the request that made a session, if the request has a key."""


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """The content that a session begins with."""

    agent: AgentDefinition
    tags: Sequence[str] = ()
    name: str | None = None
    messages: Sequence[Message] = ()
    metadata: Mapping[str, Any] = EMPTY


def digest_of(request: Any) -> str:
    """Return a digest that tells two requests under one key apart."""
    # A repeated request may have its keys in another order.
    return sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()


def used_for_another() -> InvalidData:
    """Return the error for a key that was used for another request."""
    return InvalidData("Idempotency-Key", "it was used for another request; a new request needs a new key")


async def make_session(call: Call, session_id: str | None, seed: Seed) -> tuple[AgentSessionInfo, bool]:
    """Make a session under an id, or under a new one. Return its header, and True if it is new.

    One that is there is left as it is. Raise InvalidData if the request's key has made it with another body.
    """
    digest = None if call.key is None else digest_of(call.body)
    if session_id is None or not await call.sessions.exists(session_id):
        try:
            made = await call.sessions.runtime.add(await _new(call, session_id, seed, digest))
            return made.info, True
        except SessionConflict:  # another request has made it in this moment
            if session_id is None:
                raise
    return await _there(call, session_id, seed.agent, digest), False


async def _new(call: Call, session_id: str | None, seed: Seed, digest: str | None) -> AgentSession:
    sessions, agent = call.sessions, seed.agent
    sessions.loops.learn_output(agent)
    state = AgentState.of(agent).with_default_model(sessions.loops.model)
    for name, value in seed.metadata.items():
        state = state.with_metadata(name, value)
    if digest is not None:
        state = state.with_metadata(_REQUEST, digest)
    named = None if session_id is None else sessions._named(session_id)
    given = {"session_id": named, "owner": sessions.owner, "tags": seed.tags, "name": seed.name}
    session = SessionFactory().create(agent, state, **given)  # type: ignore[arg-type]  # as their names say
    return await InjectMessage(*seed.messages).execute_on(session) if seed.messages else session


async def _there(call: Call, session_id: str, agent: AgentDefinition, digest: str | None) -> AgentSessionInfo:
    session = await glimpse(call.sessions, session_id)
    if digest is not None and session.state.metadata.get(_REQUEST, digest) != digest:
        raise used_for_another()
    await call.sessions.open(session_id, agent, on_change="keep")
    return session.info
