"""The page that shows two sessions, or two versions of one, side by side from where they part."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from starlette.responses import Response

from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.server.call import Call
from perdure.server.pages.conversation import SaidBox, boxes_of
from perdure.server.pages.render import page
from perdure.server.pages.texts import counted, moment
from perdure.server.pages.titles import title_of
from perdure.sessions.lineage import diff_of
from perdure.sessions.sessions import Sessions

_SHOWN = 100
"""The number of messages of each side on a page."""
_COMMON = 10
"""The number of common messages that are shown when the fold is opened: the last ones."""
_VERSIONS = 20


class DiffQuery(msgspec.Struct, kw_only=True):
    left: str = ""
    """A session's id, or `id@version`."""
    right: str = ""
    after: int = 0
    """The number of messages after the parting to skip."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the comparison."""

    id: str
    name: str
    version: int
    agent: str
    at: datetime
    messages: Sequence[SaidBox]
    count: int
    """The number of messages that it has after the parting."""


class Fold(msgspec.Struct, frozen=True):
    """The messages that both begin with."""

    count: int
    words: str
    last: Sequence[SaidBox]


class Relative(msgspec.Struct, frozen=True):
    """Something that a session can be compared with."""

    given: str
    title: str
    words: str


async def get_diff(call: Call) -> Response:
    """Show two sessions side by side, or a form that asks which."""
    asked: DiffQuery = call.query
    if not asked.left or not asked.right:
        given = asked.left or asked.right
        kin = await _relatives(call.sessions, given) if given else []
        return page(call, "diff.html", left=given, right="", sides=(), fold=None, kin=kin, pages=(None, None))
    ours, theirs = await _session(call.sessions, asked.left), await _session(call.sessions, asked.right)
    found = diff_of(ours, theirs)
    after = max(0, asked.after)
    names = [await title_of(call.sessions, each.id, each.info.name or each.id) for each in (ours, theirs)]
    sides = _side(names[0], ours, found.left, after), _side(names[1], theirs, found.right, after)
    return page(
        call,
        "diff.html",
        left=asked.left,
        right=asked.right,
        sides=sides,
        fold=_folded(found.common),
        kin=[],
        pages=_pages(sides, after),
    )


async def _session(sessions: Sessions, given: str) -> AgentSession:
    name, version = _named(given)
    return await sessions.session(name, version)


def _named(given: str) -> tuple[str, int | None]:
    """Return an id and a version of `id@version`, or an id alone."""
    name, at, version = given.strip().partition("@")
    # 18 digits always fit into 64 bits. A longer number could not be a version.
    if at and not (version.isdecimal() and len(version) < 19):
        raise InvalidData("$.left", "expected an id, or an id and a version: order-7@3")
    return name, int(version) if at else None


def _side(name: str, session: AgentSession, own: Sequence[Message], after: int) -> Side:
    info = session.info
    return Side(
        id=info.id,
        name=name,
        version=session.version,
        agent=info.agent_name,
        at=info.updated_at,
        messages=boxes_of(list(own[after : after + _SHOWN])),
        count=len(own),
    )


def _folded(common: Sequence[Message]) -> Fold:
    return Fold(len(common), counted(len(common), "message"), boxes_of(list(common[-_COMMON:])))


def _pages(sides: tuple[Side, Side], after: int) -> tuple[int | None, int | None]:
    """Return the `after` of the pages before and after this one, or None where there is none."""
    most = max(side.count for side in sides)
    return max(0, after - _SHOWN) if after else None, after + _SHOWN if after + _SHOWN < most else None


async def _relatives(sessions: Sessions, given: str) -> list[Relative]:
    """Return what a session may be compared with: its origin, its forks, and its own older versions."""
    name, version = _named(given)
    info, kin = await sessions.info(name), await sessions.ancestry(name)
    found = [Relative(each, each, "forked from") for each in reversed(kin.line)]
    found += [Relative(each, each, "its fork") for each in kin.children]
    for head in await sessions.versions(info.id, limit=_VERSIONS):
        number = head.info.version
        if number != (version or info.version):
            found.append(Relative(f"{info.id}@{number}", f"version {number}", moment(head.info.updated_at)))
    return found
