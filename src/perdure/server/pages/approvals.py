"""The page of all calls that wait: for a person's decision, or for an answer from outside."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from perdure.actions.children import pending_now
from perdure.errors import (
    CorruptRecord,
    InvalidData,
    KeyUnavailable,
    PendingCallsChanged,
    PerdureError,
    SessionNotFound,
    UnreadableFile,
)
from perdure.model.execution import PendingCall
from perdure.model.session import AgentSessionInfo
from perdure.protocols import Filters
from perdure.server.call import Call
from perdure.server.pages.notices import Notice, back_to, notice_of
from perdure.server.pages.outside import result_of
from perdure.server.pages.render import page
from perdure.server.problems import problem_of
from perdure.sessions.sessions import Sessions

_LOOKED_AT = 50
"""The number of closed sessions that a page looks at."""


class ApprovalsQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    notice: str | None = None


class Decision(msgspec.Struct, kw_only=True):
    """A form that decides on one call, as it was shown."""

    decide: Literal["approve", "deny", "answer", "fail"]
    call: str
    """The digest of the call, which binds the decision to what was shown."""
    reason: str = ""
    answer: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits."""

    name: str
    digest: str
    arguments: Mapping[str, Any]
    is_external: bool
    warning: str
    """The sentence to be told before deciding: the call may have been done already."""
    session_id: str | None
    """The session of the sub-agent that wants it."""
    below: tuple[Wanted, ...] = ()
    """The calls that a sub-agent waits for: approving its caller's call approves these."""


class Asking(msgspec.Struct, frozen=True):
    """A session, and the calls that it waits for."""

    id: str
    name: str
    agent: str
    owner: str | None
    since: datetime
    run: str | None
    calls: tuple[Wanted, ...]


async def get_approvals(call: Call) -> Response:
    """Show every call that waits in a session within reach, the newest session first."""
    return await _page(call, call.query.after, notice_of(call.query.notice))


async def post_decision(call: Call) -> Response:
    """Put a decision on record, and leave the run to a worker. A decision that comes too late has no effect."""
    try:
        return back_to("/approvals", await _decide(call, call.body))
    except PendingCallsChanged:
        text = "Nothing was decided: by now the session waits for something else. Look at what it waits for below."
        return await _page(call, None, Notice(text, "bad"), 409)
    except PerdureError as error:
        told = problem_of(error)
        if told.status in (404, 500, 503):
            raise
        return await _page(call, None, Notice(f"Nothing was decided. {told.detail}", "bad"), told.status)


async def _decide(call: Call, decided: Decision) -> str:
    sessions, session_id = call.sessions, call.session_id
    if decided.decide == "approve":
        await sessions.approve(session_id, [decided.call], wait=False)
        return "approved"
    if decided.decide == "deny":
        await sessions.deny(session_id, decided.reason.strip() or "denied", [decided.call], wait=False)
        return "denied"
    if decided.decide == "fail":
        reason = _given(decided.reason, "reason")
        await sessions.answer(session_id, errors={decided.call: reason}, wait=False)
        return "failed"
    result, kind = result_of(_given(decided.answer, "answer"))
    await sessions.answer(session_id, {decided.call: result}, wait=False)
    return f"answered-{kind}"


def _given(text: str, name: str) -> str:
    if not text.strip():
        raise InvalidData(f"$.{name}", "it is blank; the model is told what you write here")
    return text


async def _page(call: Call, after: str | None, notice: Notice | None, status: int = 200) -> Response:
    sessions = call.service.sessions_of(call.caller)
    filters: Filters = {"status": "suspended", "top_level": True, "limit": _LOOKED_AT}
    if after is not None:
        filters["after"] = after
    found = await sessions.list(**filters)
    asking, damaged = (
        [],
        [each.session_id for each in found.damaged if isinstance(each, CorruptRecord | KeyUnavailable)],
    )
    for info in found:
        try:
            asking += await _asking(sessions, info)
        except (CorruptRecord, KeyUnavailable, UnreadableFile):
            damaged.append(info.id)
    told = sorted({each for each in damaged if each is not None})
    return page(call, "approvals.html", status, asking=asking, following=found.next, notice=notice, damaged=told)


async def _asking(sessions: Sessions, info: AgentSessionInfo) -> list[Asking]:
    """Return the calls that a session waits for. There are none if it was decided on, erased, or closed otherwise."""
    try:
        view = await sessions.view(info.id)
    except SessionNotFound:
        return []
    if view.activity != "waiting":
        return []
    execution = view.session.state.execution
    calls = tuple(_wanted(each) for each in await pending_now(view.session, sessions))
    title = getattr(info, "title", None) or info.name or info.id
    run = None if execution is None else execution.execution_id
    return [Asking(info.id, title, info.agent_name, info.owner, info.updated_at, run, calls)]


def _wanted(call: PendingCall) -> Wanted:
    return Wanted(
        name=call.name,
        digest=call.digest,
        arguments=call.arguments,
        is_external=call.external,
        warning=call.warning,
        session_id=call.session_id,
        below=tuple(map(_wanted, call.waits_for)),
    )
