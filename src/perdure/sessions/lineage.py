"""The lineage of sessions: what one was forked from, what was forked from it, and where two of them diverge."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, forked_from
from perdure.paging import all_infos
from perdure.protocols import Lineage, SessionStore


class Ancestry(msgspec.Struct, frozen=True):
    """The sessions that one was forked from, and its forks. `list(parent=)` finds the sessions of sub-agents, too."""

    parent: SessionId | None
    children: tuple[SessionId, ...]
    """Its forks, oldest first."""
    root: SessionId
    """The first session of the line, or the oldest that is known by name if the beginning of the line was erased."""
    line: tuple[SessionId, ...] = ()
    """The sessions that it was forked from, the root first and the parent last."""


async def ancestry_of(store: SessionStore, info: AgentSessionInfo) -> Ancestry:
    children = [child.id for child in await all_infos(store.list, parent=info.id) if child.spawn_ref is None]
    line = await _line_of(store, info)
    return Ancestry(forked_from(info), tuple(reversed(children)), line[0] if line else info.id, tuple(line))


async def _line_of(store: SessionStore, info: AgentSessionInfo) -> Sequence[SessionId]:
    if isinstance(store, Lineage):
        return await store.line_of(info.id)
    line, parent = [info.id], forked_from(info)
    # A session that was erased and created again may be its own fork's fork: the second test ends that loop.
    while parent is not None and parent not in line:
        line.append(parent)
        page = await store.list(id=parent, limit=1)
        parent = forked_from(page.all()[0]) if page else None
    return line[:0:-1]


class Diff(msgspec.Struct, frozen=True):
    """The messages that two views have in common from their beginning on, and those that each continues with."""

    common: Sequence[Message]
    """The messages of both."""
    left: Sequence[Message]
    """The messages of the first view alone."""
    right: Sequence[Message]
    """The messages of the second view alone."""


def diff_of(left: AgentSession, right: AgentSession) -> Diff:
    ours, theirs = left.state.transcript, right.state.transcript
    shared = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine.id != other.id:
            break
        shared += 1
    return Diff(ours[:shared], ours[shared:], theirs[shared:])
