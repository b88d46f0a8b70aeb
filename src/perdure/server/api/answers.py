"""Answers: wait for one, or tell where it can be fetched.

A caller that waits can leave: the run continues without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypedDict, TypeVar

import msgspec
from starlette.requests import Request

from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.run_journal import loops_on_record
from perdure.server.call import Answer, Call
from perdure.sessions.cursors import Place
from perdure.sessions.following import progress_of
from perdure.sessions.json_forms import of_reply
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions

T = TypeVar("T")
_TO_READ = 10.0
"""The most seconds for reading the reply of a run that has ended."""


class UnansweredForm(TypedDict):
    session: str
    run: str


class WaitQuery(msgspec.Struct, kw_only=True):
    wait: float = 0.0
    """Seconds to wait for the answer."""


def checked_wait(call: Call, given: float) -> float:
    """Return the seconds that a request waits. Raise InvalidData if the service does not let it wait that long."""
    most = call.service.settings.limits.wait
    if not 0 <= given <= most:
        raise InvalidData("$.wait", f"expected 0 to {most:g} seconds, got {given:g}")
    return given


async def within(call: Call, seconds: float, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of work that only waits, or None if time is up, the client leaves, or the service stops."""
    wait = asyncio.ensure_future(work)
    reasons = {asyncio.ensure_future(call.service.closing.wait()), asyncio.ensure_future(_left(call.request))}
    try:
        await asyncio.wait({wait, *reasons}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else None
    finally:
        for each in (wait, *reasons):
            each.cancel()
        # Awaited, so that nothing reads from the request after its response.
        await asyncio.gather(wait, *reasons, return_exceptions=True)


async def _left(request: Request) -> None:
    # The body has been read, so all that can come is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def reply_of_run(call: Call, session_id: SessionId, run: str, wait: float, *, is_new: bool = False) -> Answer:
    """Return the reply of a run, or 202 while it is under way. A run that `is_new` has not ended."""
    sessions = call.service.sessions_of(call.caller)
    is_under_way = is_new or await _is_under_way(sessions, session_id, run)
    # A reply that is on record already is given to a client that does not wait, too.
    patience = wait if is_under_way else max(wait, _TO_READ)
    reply = await within(call, patience, _followed(sessions, session_id, run)) if patience else None
    if reply is not None:
        return Answer(of_reply(reply))
    return unanswered(session_id, run)


def unanswered(session_id: str, run: str) -> Answer:
    """Return a 202 with the address at which the answer of a run can be fetched."""
    body: UnansweredForm = {"session": session_id, "run": run}
    return Answer(body, 202, {"Location": f"/api/sessions/{session_id}/runs/{run}/reply"})


async def newest_run(sessions: Sessions, session_id: SessionId) -> str:
    """Return the run that began last, or an empty text if none has."""
    found = await loops_on_record(sessions._journal(), session_id, limit=1)
    return found[-1].loop_id if found else ""


async def _is_under_way(sessions: Sessions, session_id: SessionId, run: str) -> bool:
    is_newest = await newest_run(sessions, session_id) == run
    progress = await progress_of(sessions._journal(), session_id)
    return is_newest and (progress.is_claimed or progress.is_interrupted)


async def _followed(sessions: Sessions, session_id: SessionId, run: str) -> Reply[Any] | None:
    """Wait until a run has ended or waits for a person, however long it takes until a worker continues it."""
    async for chunk in sessions.follow(session_id, after=Place(run).cursor, timeout=float("inf")):
        if chunk.reply is not None:
            return chunk.reply
    return None
