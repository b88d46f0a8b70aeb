"""Sessions: list, create, look at, hide, erase."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, TypedDict

import msgspec

from perdure.errors import InvalidData
from perdure.model.definition import AgentDefinition
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import Filters
from perdure.server.call import Answer, Call
from perdure.server.making import Seed, make_session
from perdure.sessions.json_forms import (
    CallForm,
    HeadForm,
    HitForm,
    InfoForm,
    ListedForm,
    UsageForm,
    of_calls,
    of_head,
    of_hit,
    of_info,
    of_listed,
    of_usage,
)
from perdure.sessions.pages import glimpse
from perdure.sessions.sessions import Sessions

_MOST_HITS = 2_000
"""The most hits that the pages of a search reach. The best come first, and each page searches for all before it."""


class ListQuery(msgspec.Struct, kw_only=True):
    """The filters of a list of sessions."""

    agent: str | None = None
    status: Literal["active", "suspended", "completed", "failed", "deleted"] | None = None
    owner: str | None = None
    tag: str | None = None
    parent: str | None = None
    top_level: bool = False
    order: Literal["created", "updated"] | None = None
    """`created` by default. The hits of a search come with the best first."""
    q: str | None = None
    """Words to find in all that was said, covered and trimmed parts too."""
    limit: int = 50
    after: str | None = None


class FoundForm(ListedForm):
    hits: list[HitForm]
    """The places where words were found, if words were asked for."""


class ListForm(TypedDict):
    sessions: list[FoundForm]
    next: str | None


class NewSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A session to be created."""

    agent: str | None = None
    """The name of an agent that is served. Without it, the first is meant."""
    tags: list[str] = []
    name: str | None = None


class DetailForm(InfoForm):
    title: str | None
    model: str | None
    system_prompt: str
    task: str | None
    metadata: dict[str, Any]
    pending_calls: list[CallForm]
    message_count: int
    usage: UsageForm | None


class VersionQuery(msgspec.Struct, kw_only=True):
    version: int | None = None


class VersionsQuery(msgspec.Struct, kw_only=True):
    limit: int = 50
    before: int | None = None


class VersionsForm(TypedDict):
    versions: list[HeadForm]
    next: int | None


class DeleteQuery(msgspec.Struct, kw_only=True):
    erase: bool = False


class ErasedForm(TypedDict):
    erased: list[str]


def page_limit(call: Call, given: int) -> int:
    """Return the length of a page. Raise InvalidData if it is longer than the service allows."""
    most = call.service.settings.limits.page
    if not 1 <= given <= most:
        raise InvalidData("$.limit", f"expected 1 to {most}, got {given}")
    return given


def tagged(version: int) -> dict[str, str]:
    """Return the header that names a version of a session."""
    return {"ETag": f'"{version}"'}


async def list_sessions(call: Call) -> ListForm:
    asked: ListQuery = call.query
    limit = page_limit(call, asked.limit)
    if asked.q is not None:
        return await _found(call, asked, limit)
    filters = _filters(asked)
    if asked.after is not None:
        filters["after"] = asked.after
    filters["limit"] = limit
    page = await call.sessions.list(**filters)
    return {"sessions": [{**of_listed(each), "hits": []} for each in page], "next": page.next}


def _filters(asked: ListQuery) -> Filters:
    names = ("agent", "owner", "tag", "parent")
    given: Any = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    filters: Filters = given
    filters["top_level"], filters["order"] = asked.top_level, asked.order or "created"
    if asked.status is not None:
        filters["status"] = SessionStatus(asked.status)
    return filters


async def _found(call: Call, asked: ListQuery, limit: int) -> ListForm:
    """Return the sessions in which words were said, the best first, each with its hits.

    A page has `limit` hits, and a session with more of them comes again on the next page.
    """
    if asked.order is not None:
        raise InvalidData("$.order", "what is searched for comes with the best first; leave it out")
    passed = _passed_over(asked.after)
    sessions = call.sessions if asked.owner is None else _only_of(call, asked.owner)
    # One more than the page shows tells whether there is another page.
    found_hits = await sessions.search(asked.q or "", limit=passed + limit + 1) if sessions is not None else []
    hits: dict[str, list[HitForm]] = {}
    for hit in found_hits[passed : passed + limit]:
        hits.setdefault(hit.session_id, []).append(of_hit(hit))
    found: list[FoundForm] = []
    for session_id in hits:
        filters = _filters(asked)
        # The filters of a list hold for a search too, so a session that was found may be left out.
        filters["id"], filters["limit"] = session_id, 1
        page = await call.sessions.list(**filters)
        found += [{**of_listed(each), "hits": hits[session_id]} for each in page]
    following = str(passed + limit) if passed + limit < min(len(found_hits), _MOST_HITS) else None
    return {"sessions": found, "next": following}


def _passed_over(after: str | None) -> int:
    """Return how many hits come before a page."""
    if after is not None and not (after.isdecimal() and int(after) < _MOST_HITS):
        raise InvalidData("$.after", "expected the `next` of a page with the same words")
    return int(after or 0)


def _only_of(call: Call, owner: str) -> Sessions | None:
    """Return the sessions of one owner, if the caller reaches them."""
    sessions = call.sessions
    if sessions.owner is None:
        return sessions.of(owner)
    return sessions if sessions.owner == owner else None


async def create_session(call: Call) -> Answer:
    """Create a session. With an `Idempotency-Key`, the same request again returns the one that it made."""
    key = call.key
    # The id is made of the key: any process finds what the same request has made.
    session_id = None if key is None else "r-" + blake2b(key.encode(), digest_size=16).hexdigest()
    return await _created(call, session_id)


async def put_session(call: Call) -> Answer:
    """Create a session under an id that the client chose. One that is there already is left as it is."""
    return await _created(call, call.session_id)


async def _created(call: Call, session_id: str | None) -> Answer:
    wanted: NewSession = call.body
    seed = Seed(agent=agent_named(call, wanted.agent), tags=wanted.tags, name=wanted.name)
    info, is_new = await make_session(call, session_id, seed)
    headers = {**tagged(info.version), "Location": f"/api/sessions/{info.id}"}
    return Answer(of_info(info), 201 if is_new else 200, headers)


def agent_named(call: Call, name: str | None) -> AgentDefinition:
    """Return an agent that is served. Without a name, return the first."""
    agents = call.service.agents
    if name is None:
        return next(iter(agents.values()))
    if name not in agents:
        raise InvalidData("$.agent", f"no agent of that name is served; there are: {', '.join(agents)}")
    return agents[name]


async def get_session(call: Call) -> Answer:
    """Return a session's header, its agent's facts, and its counts, now or as of a version."""
    session = await glimpse(call.sessions, call.session_id, call.query.version)
    return Answer(detail_of(session), headers=tagged(session.version))


def detail_of(session: AgentSession) -> DetailForm:
    """Return everything about a session except its messages."""
    state = session.state
    model = state.model_for(session.definition)
    used = session.info.usage
    return {
        **of_info(session.info),
        "title": session.info.name,
        "model": model.name if model is not None else None,
        "system_prompt": state.context.system_prompt,
        "task": state.task,
        "metadata": dict(state.metadata),
        "pending_calls": of_calls(state.execution.pending_calls if state.execution else ()),
        "message_count": len(state.transcript),
        "usage": None if used is None else of_usage(used),
    }


async def delete_session(call: Call) -> ErasedForm | None:
    """Hide a session from lists, or erase it for good."""
    if not call.query.erase:
        await call.sessions.delete(call.session_id)
        return None
    if call.expected is not None:
        raise InvalidData("If-Match", "an erasure is not bound to a version; leave it out")
    return {"erased": [str(each) for each in await call.sessions.erase(call.session_id)]}


async def list_versions(call: Call) -> VersionsForm:
    limit = page_limit(call, call.query.limit)
    heads = await call.sessions.versions(call.session_id, before=call.query.before, limit=limit)
    following = heads[-1].info.version if len(heads) == limit and heads[-1].info.version > 1 else None
    return {"versions": [of_head(each) for each in heads], "next": following}
