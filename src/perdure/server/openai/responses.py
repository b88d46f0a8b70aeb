"""Responses: create, look at, follow, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
from starlette.responses import Response

from perdure.errors import SessionBusy
from perdure.model.loop_events import MessageEnd
from perdure.run_journal import loops_on_record
from perdure.server.call import Answer, Call
from perdure.server.openai.asking import read_asked
from perdure.server.openai.creating import Beginning
from perdure.server.openai.errors import invalid
from perdure.server.openai.finding import Found, events_of, find, journal_of, outcome_of, settled
from perdure.server.openai.ids import ResponseId
from perdure.server.openai.inputs import read_input
from perdure.server.openai.items import Item, decision_item, input_items, output_item
from perdure.server.openai.once import answered_once
from perdure.server.openai.paging import ListForm, page_of
from perdure.server.openai.streams import stream_of
from perdure.server.openai.telling import told_whole
from perdure.server.problems import Problem
from perdure.sessions.following import is_answer

_CANCELS_WITHIN = 10.0


class RetrieveQuery(msgspec.Struct, kw_only=True):
    stream: bool = False
    starting_after: int | None = None
    """The `sequence_number` after which the stream begins."""


class DeletedForm(TypedDict):
    id: str
    object: str
    deleted: bool


async def create_response(call: Call) -> Answer | Response:
    """Answer an input: at once, as a stream, or in the background."""
    asked = read_asked(call)
    wanted = asked.wanted
    given = read_input(wanted.input or "", call.service.settings.limits.messages)
    if wanted.store is False:
        return await answered_once(call, asked, given)
    if wanted.stream:  # checked first, so that a response that cannot be streamed is not begun
        call.service.require_room(call.caller)
    response = await Beginning(call, asked, given).begin()
    if wanted.stream:
        return stream_of(call, await find(call.sessions, str(response)))
    if not wanted.background:
        await _waited_for(call, response, call.service.settings.limits.wait)
    return Answer(await _told(call, await find(call.sessions, str(response))))


async def get_response(call: Call) -> Answer | Response:
    """Return a response as it is now, or as a stream of its events."""
    asked: RetrieveQuery = call.query
    found = await find(call.sessions, call.path("response"))
    if asked.stream:
        return stream_of(call, found, -1 if asked.starting_after is None else asked.starting_after)
    if asked.starting_after is not None:
        raise invalid("starting_after", "it is the place in a stream; give `stream=true`, too")
    return Answer(await _told(call, found))


async def cancel_response(call: Call) -> Answer:
    """End a response where it is now. One that is over stays as it is."""
    given, sessions = call.path("response"), call.sessions
    found = await find(sessions, given)
    if found.state == "running":
        await sessions.cancel(found.info.id, run=found.run)
    elif found.state == "queued":
        await _taken_back(call, found)
    await _waited_for(call, found.id, _CANCELS_WITHIN)
    return Answer(await _told(call, await find(sessions, given)))


async def _taken_back(call: Call, found: Found) -> None:
    """Take back a message that waits. Raise a Problem if another one has to be answered before it."""
    try:
        if await call.sessions.drop_waiting(found.info.id, key=found.id.key):
            return
    except SessionBusy:
        pass  # its run may have begun meanwhile: look at it again
    found = await find(call.sessions, str(found.id))
    if found.state == "queued":
        detail = "This response waits behind another one of its conversation. Cancel that first, or try again later."
        raise Problem(409, "WaitsBehindAnother", detail, headers={"Retry-After": "2"})
    if found.state == "running":  # it has begun by now, and no other run must be cancelled
        await call.sessions.cancel(found.info.id, run=found.run)


async def delete_response(call: Call) -> DeletedForm:
    """Delete a response, and the session that was made for it. Raise a Problem if others are built on it."""
    given, sessions = call.path("response"), call.sessions
    found = await find(sessions, given)
    if found.state != "over":
        raise Problem(409, "ResponseInProgress", "This response has not ended. Cancel it first, then delete it.")
    # Two runs are enough to see that there are others.
    if len(await loops_on_record(journal_of(sessions), found.info.id, limit=2)) > 1 or found.kept.get("conversation"):
        detail = (
            "Other responses continue this one, or are in its conversation. Delete the conversation, or the session."
        )
        raise Problem(409, "ResponseContinued", detail)
    await sessions.delete(found.info.id)
    return {"id": given, "object": "response", "deleted": True}


async def list_input(call: Call) -> ListForm:
    """Return the input of a response: messages, or decisions on calls that waited."""
    found = await find(call.sessions, call.path("response"))
    return page_of(await _input_of(call, found), call.query, call.service.settings.limits.page)


async def _input_of(call: Call, found: Found) -> Sequence[Item]:
    if found.previous is not None:
        execution = (await call.sessions.session(found.info.id, found.base)).state.execution
        pending = () if execution is None else execution.pending_calls
        return _decisions_in(found.entries[0].body, {each.id: each.digest for each in pending})
    events = await events_of(call.sessions, found)
    items: list[Item] = []
    for event in events:
        if isinstance(event, MessageEnd) and is_answer(event.message, event.loop_id):
            break
        if isinstance(event, MessageEnd):
            items += input_items(event.message, lambda message, made: True, {})
    return items


def _decisions_in(start: Mapping[str, Any], digests: Mapping[str, str]) -> list[Item]:
    """Return the decisions that a run was continued with, on calls that had these digests."""
    items = [output_item(each["call"], each.get("result")) for each in start.get("answers") or ()]
    items += [decision_item(digest) for digest in (start.get("approved") or {}).values()]
    denied = (start.get("denied") or {}).items()
    return items + [decision_item(digests.get(call, call), reason) for call, reason in denied]


async def _waited_for(call: Call, response: ResponseId, seconds: float) -> None:
    """Wait until a response is over, the time has passed, or the service stops. The response itself continues."""
    over = asyncio.ensure_future(settled(call.sessions, response))
    closing = asyncio.ensure_future(call.service.closing.wait())
    try:
        await asyncio.wait({over, closing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()
    finally:
        over.cancel()
        closing.cancel()
        await asyncio.gather(over, closing, return_exceptions=True)


async def _told(call: Call, found: Found) -> Mapping[str, Any]:
    return told_whole(found, await events_of(call.sessions, found), await outcome_of(call.sessions, found))
