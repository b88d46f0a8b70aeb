"""The list of sessions: filters, one search box, and what needs a person's eye on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from perdure.errors import InvalidSessionId, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import ListedSession, SessionStatus
from perdure.protocols import SHORTEST_SUFFIX, Filters, Names, SearchHit
from perdure.server.call import Call
from perdure.server.pages.render import is_fragment, page
from perdure.server.pages.strips import NAMES, Concern, Strip, Strips
from perdure.sessions.sessions import Sessions

_PAGE = 50
_HITS = 60
_HITS_OF_SESSION = 3
_NAMED = 10
_STRIP = Strip()


class ListQuery(msgspec.Struct, kw_only=True):
    """The filters of the list."""

    q: str = ""
    status: Literal["", "active", "suspended", "completed", "failed", "deleted"] = ""
    agent: str = ""
    tag: str = ""
    owner: str = ""
    show: Literal["", "running", "waiting", "killed", "parked"] = ""
    after: str = ""
    mark: str = ""
    """The mark of the list that a page shows already."""


@dataclass(frozen=True)
class Piece:
    """A piece of a text, which matches what was searched for or does not."""

    text: str
    is_match: bool


@dataclass(frozen=True)
class Hit:
    """A message that was found."""

    message: str
    place: int
    role: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Row:
    """A session of the list."""

    session: ListedSession
    state: str
    """Its status, or what is more urgent to know."""
    hits: Sequence[Hit] = ()


@dataclass
class Listing:
    """A page of the list."""

    rows: list[Row] = field(default_factory=list)
    next: str | None = None
    mark: str = ""
    damaged: int = 0
    """The number of sessions on the page that cannot be read."""


async def list_sessions(call: Call) -> Response:
    """Return the list of sessions, or nothing to a script that has the same already."""
    asked: ListQuery = call.query
    sessions = call.sessions
    strips = await _STRIP.look(sessions)
    is_search = bool(asked.q.strip())  # a page does not repeat it by itself: it costs more than a list
    mark = "" if is_search else await _mark(sessions, asked, strips)
    if is_fragment(call.request) and mark and mark == asked.mark:
        # htmx leaves the page as it is on a 204.
        return Response(None, 204)
    listing = await _listing(sessions, asked, strips)
    listing.mark = mark
    values: dict[str, Any] = {
        "asked": asked,
        "listing": listing,
        "strips": [(key, NAMES[key], len(strips.ids[key])) for key in NAMES],
        "is_cut": strips.is_cut,
        "statuses": [each.value for each in SessionStatus],
        "here": _address(asked),
        "older": _address(asked, after=listing.next) if listing.next else None,
        "address": lambda **changed: _address(asked, **changed),
    }
    return page(call, "sessions.html", **values)


def _address(asked: ListQuery, **changed: str | None) -> str:
    """Return the address of this list with other filters."""
    given = {**msgspec.structs.asdict(asked), "mark": "", "after": "", **changed}
    wanted = {name: value for name, value in given.items() if value}
    return f"/?{urlencode(wanted)}" if wanted else "/"


async def _mark(sessions: Sessions, asked: ListQuery, strips: Strips) -> str:
    """Return a text that changes with the list. It reads headers, and no message."""
    headers = await sessions.headers(**_filters(asked))
    told = [[str(info.id), info.version] for info in headers], [list(map(str, ids)) for ids in strips.ids.values()]
    return blake2b(msgspec.json.encode(told), digest_size=8).hexdigest()


async def _listing(sessions: Sessions, asked: ListQuery, strips: Strips) -> Listing:
    if asked.q.strip():
        return await _found(sessions, asked, strips)
    if asked.show:
        return Listing(
            [row for each in strips.ids[asked.show][:_PAGE] for row in await _rows(sessions, asked, each, strips)]
        )
    listed = await sessions.list(**_filters(asked))
    return Listing([_row(each, strips) for each in listed], listed.next, damaged=len(listed.damaged))


def _filters(asked: ListQuery) -> Filters:
    filters: Filters = {"order": "updated", "limit": _PAGE, "top_level": True}
    if asked.status:
        filters["status"] = asked.status
    if asked.agent:
        filters["agent"] = asked.agent
    if asked.tag:
        filters["tag"] = asked.tag
    if asked.owner:
        filters["owner"] = asked.owner
    if asked.after:
        filters["after"] = asked.after
    return filters


async def _rows(
    sessions: Sessions, asked: ListQuery, session_id: str, strips: Strips, hits: Sequence[Hit] = ()
) -> list[Row]:
    """Return the row of one session, unless the filters leave it out."""
    filters = _filters(asked)
    filters["id"], filters["limit"], filters["top_level"] = session_id, 1, False
    filters.pop("after", None)
    return [_row(each, strips, hits) for each in await sessions.list(**filters)]


def _row(session: ListedSession, strips: Strips, hits: Sequence[Hit] = ()) -> Row:
    urgent: Sequence[Concern] = ("killed", "running", "parked", "waiting")
    state = next((each for each in urgent if session.id in strips.ids[each]), session.status.value)
    return Row(session, state, hits)


async def _found(sessions: Sessions, asked: ListQuery, strips: Strips) -> Listing:
    """Return the sessions with that id, then those in which the words were said, the best first."""
    words = asked.q.strip()
    hits: dict[str, list[Hit]] = {str(each): [] for each in await _named(sessions, words)}
    for found in await sessions.search(words, limit=_HITS):
        of_session = hits.setdefault(found.session_id, [])
        if len(of_session) < _HITS_OF_SESSION:
            of_session.append(hit_of(found))
    rows = [row for each, of in hits.items() for row in await _rows(sessions, asked, each, strips, of)]
    return Listing(rows[:_PAGE])


def hit_of(found: SearchHit) -> Hit:
    """Return a message that was found, cut into pieces that match and pieces that do not."""
    pieces, at = [], 0
    for start, stop in found.matches:
        pieces += [Piece(found.snippet[at:start], False), Piece(found.snippet[start:stop], True)]
        at = stop
    pieces.append(Piece(found.snippet[at:], False))
    return Hit(found.message_id, found.position, found.role, [each for each in pieces if each.text])


async def _named(sessions: Sessions, words: str) -> list[SessionId]:
    """Return the sessions whose id is the text, or begins or ends with it."""
    found = []
    try:
        found.append((await sessions.info(words)).id)
    except InvalidSessionId:  # words that no id can have
        return []
    except SessionNotFound:
        pass
    store = sessions.store
    if isinstance(store, Names) and len(words) >= SHORTEST_SUFFIX:
        found += await store.ids_with_prefix(words, owner=sessions.owner, limit=_NAMED)
        found += await store.ids_with_suffix(words, owner=sessions.owner, limit=_NAMED)
    return list(dict.fromkeys(found))
