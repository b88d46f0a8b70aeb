"""A session's relatives: what it was forked from, its forks, and the sessions of its sub-agents."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.model.session import AgentSessionInfo, ListedSession
from perdure.sessions.sessions import Sessions

_MOST = 20


@dataclass(frozen=True)
class Relative:
    """A session that belongs to another."""

    session: ListedSession
    kin: str
    """The kind of relative that it is."""
    may_differ: bool
    """True if a comparison of the two makes sense."""


@dataclass(frozen=True)
class Family:
    """The nearest relatives of a session."""

    relatives: list[Relative]
    has_more: bool


async def family_of(sessions: Sessions, info: AgentSessionInfo) -> Family:
    """Return the parent of a session and its newest children. Those that the caller cannot reach are left out."""
    relatives = []
    if info.parent_id is not None:
        is_fork = info.spawn_ref is None
        above = await sessions.list(id=info.parent_id, limit=1)
        relatives += [Relative(each, "forked from" if is_fork else "called by", is_fork) for each in above]
    below = await sessions.list(parent=info.id, limit=_MOST)
    for each in below:
        is_fork = each.spawn_ref is None
        relatives.append(Relative(each, "fork" if is_fork else "sub-agent", is_fork))
    return Family(relatives, below.next is not None)
