"""How sessions belong together: what one was forked from, what was forked from it, and where two part."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, forked_from
from perdure.paging import all_infos
from perdure.protocols import Lineage, SessionStore


class Ancestry(msgspec.Struct, frozen=True):
    """What a session was forked from, and its forks. Sub-agents' sessions are none: `list(parent=)` finds them too."""

    parent: SessionId | None
    children: tuple[SessionId, ...]
    """Its forks, oldest first."""
    root: SessionId
    """The first of the line; of a line whose beginning is erased, the oldest that is known by name."""
    line: tuple[SessionId, ...] = ()
    """All that it was forked from, the root first and the parent last."""


async def ancestry_of(store: SessionStore, info: AgentSessionInfo) -> Ancestry:
    children = [child.id for child in await all_infos(store.list, parent=info.id) if child.spawn_ref is None]
    line = await _line_of(store, info)
    return Ancestry(forked_from(info), tuple(reversed(children)), line[0] if line else info.id, tuple(line))


async def _line_of(store: SessionStore, info: AgentSessionInfo) -> Sequence[SessionId]:
    if isinstance(store, Lineage):
        return await store.line_of(info.id)
    line, parent = [info.id], forked_from(info)
    while parent is not None and parent not in line:  # one that was erased and made anew may be its own fork's fork
        line.append(parent)
        page = await store.list(id=parent, limit=1)
        parent = forked_from(page.all()[0]) if page else None
    return line[:0:-1]


class Diff(msgspec.Struct, frozen=True):
    """What two views have in common from their beginning on, and how each goes on."""

    common: Sequence[Message]
    left: Sequence[Message]
    right: Sequence[Message]


def diff_of(left: AgentSession, right: AgentSession) -> Diff:
    ours, theirs = left.state.transcript, right.state.transcript
    shared = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine.id != other.id:
            break
        shared += 1
    return Diff(ours[:shared], ours[shared:], theirs[shared:])
