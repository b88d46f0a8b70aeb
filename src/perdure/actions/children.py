"""The sub-agents of a session: their sessions, their depth, and the calls they wait for."""

from __future__ import annotations

import hashlib

from perdure.model.execution import PendingCall
from perdure.model.ids import SessionId, mark_of
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.protocols import ActionContext, Filters, Kept, SessionStore


def child_session_id(parent: AgentSessionInfo, execution_id: str, call_id: str) -> SessionId:
    """Return the id of the session that a tool call spawns. The same call always gives the same id.

    The id has the owner's mark if the parent's id has it. Earlier releases set no mark, and their runs can still be
    recovered.
    """
    digest = hashlib.blake2b(f"{execution_id}/{call_id}".encode(), digest_size=16)
    mark = mark_of(parent.owner) if parent.owner is not None else ""
    return SessionId(f"{mark if parent.id.startswith(mark) else ''}sub-{digest.hexdigest()}")


async def depth_of(session: AgentSession, context: ActionContext | None) -> int:
    """Return how many calls of sub-agents lead to a session: 0 for a session that no agent has begun."""
    depth, spawned = 0, session.info.spawn_ref
    while spawned is not None:
        depth += 1
        page = await context.store.list(id=spawned.parent_session_id, limit=1) if context is not None else ()
        spawned = page[0].spawn_ref if page else None
    return depth


async def pending_now(session: AgentSession, context: Kept | None) -> tuple[PendingCall, ...]:
    """Return a session's pending calls. A call of a sub-agent shows what the sub-agent waits for now."""
    execution = session.state.execution
    if execution is None or context is None:
        return execution.pending_calls if execution else ()
    return tuple([await _as_it_is(call, context) for call in execution.pending_calls])


async def _as_it_is(call: PendingCall, context: Kept) -> PendingCall:
    if call.session_id is None:
        return call
    child = await context.store.load(call.session_id)
    return PendingCall.of(call) if child is None else PendingCall.of(call, child.id, await pending_now(child, context))


async def spawned_by(store: SessionStore, session_id: str, *, deleted: bool = False) -> list[AgentSessionInfo]:
    """Return the sessions of a session's sub-agents, and of theirs, each after the sessions that it has spawned itself.

    Deleted sessions are included only with `deleted`.
    """
    # A list leaves deleted sessions out unless it asks for their status, so they take a list of their own.
    filters: list[Filters] = [{"parent": session_id}]
    if deleted:
        filters.append({"parent": session_id, "status": SessionStatus.DELETED})
    found: list[AgentSessionInfo] = []
    for each in filters:
        for info in await _spawned_among(store, each):
            found += [*await spawned_by(store, info.id, deleted=deleted), info]
    return found


async def _spawned_among(store: SessionStore, filters: Filters) -> list[AgentSessionInfo]:
    found: list[AgentSessionInfo] = []
    while True:
        page = await store.list(**filters)
        found += [info for info in page if info.spawn_ref is not None]
        if page.next is None:
            return found
        filters = {**filters, "after": page.next}
