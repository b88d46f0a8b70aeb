"""Messages: read them, say something, follow what happens."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypedDict
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from perdure.aio import finish_despite_cancel
from perdure.errors import InvalidData
from perdure.loop.external import external_tool
from perdure.model.given_messages import messages_of
from perdure.model.ids import new_id
from perdure.server.api.answers import checked_wait, newest_run, unanswered, within
from perdure.server.api.sessions import page_limit
from perdure.server.call import Answer, Call
from perdure.server.problems import Problem
from perdure.server.sse import event_stream, place_of
from perdure.sessions.graphs import require_no_graph
from perdure.sessions.json_forms import of_reply
from perdure.sessions.pages import page_of_said, page_of_shown
from perdure.sessions.queueing import Queued
from perdure.sessions.reply import Reply


class MessagesQuery(msgspec.Struct, kw_only=True):
    view: Literal["shown", "said"] = "shown"
    """`shown` is what the model sees, `said` all that was said: covered, trimmed and rewound parts too."""
    version: int | None = None
    limit: int = 100
    after: int = 0
    """The number of places to skip. A place is a message, or in `said` what a compaction has put instead of some."""


class MessagesForm(TypedDict):
    messages: list[dict[str, Any]]
    total: int
    next: int | None


class OutsideTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client calls itself: the run waits for its answer."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class NewMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Something to be said to an agent."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """Instead of a text: messages of users, `{"role": "user", "content": …}`, with images and files."""
    wait: float = 60.0
    """Seconds to wait for the answer."""
    when_busy: Literal["queue", "steer", "refuse"] = "queue"
    at: datetime | None = None
    priority: int = 0
    instructions: str | None = None
    external_tools: list[OutsideTool] = []
    output: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    context_data: dict[str, Any] | None = None


class EventsQuery(msgspec.Struct, kw_only=True):
    after: int | None = None
    limit: int | None = None
    """The most events of a page, 100 by default; a stream has no end."""


class EventsForm(TypedDict):
    events: list[dict[str, Any]]
    next: int | None


class QueuedForm(TypedDict):
    session: str
    key: str
    at: datetime | None


async def list_messages(call: Call) -> MessagesForm:
    """Return a page of what the model is shown, or of all that was said."""
    asked: MessagesQuery = call.query
    limit = page_limit(call, asked.limit)
    if asked.after < 0:
        raise InvalidData("$.after", "expected 0 or more")
    end = asked.after + limit
    if asked.view == "shown":
        page = await page_of_shown(call.sessions, call.session_id, asked.after, end, asked.version)
    elif asked.version is not None:
        raise InvalidData("$.version", "all that was said belongs to no version; leave it out, or ask for `shown`")
    else:
        page = await page_of_said(call.sessions, call.session_id, asked.after, end)
    following = end if end < page.total else None
    return {"messages": [each.to_dict() for each in page.messages], "total": page.total, "next": following}


async def post_message(call: Call) -> Answer:
    """Say something. It is durable before anything is answered, and a worker answers it."""
    wanted: NewMessage = call.body
    wait = checked_wait(call, wanted.wait)
    await require_no_graph(call.sessions, call.session_id)
    if wanted.when_busy != "queue":
        return await _sent_now(call, wanted, wait)
    queued = await call.sessions.enqueue(
        call.session_id, _said(call, wanted), priority=wanted.priority, at=wanted.at, **_options(call, wanted)
    )
    # A message with a time is answered later, so there is nothing to wait for.
    reply = await within(call, wait, queued.reply()) if wait and wanted.at is None else None
    return _accepted(queued.session_id, queued.key, queued.at) if reply is None else Answer(of_reply(reply))


async def _sent_now(call: Call, wanted: NewMessage, wait: float) -> Answer:
    """Add a message to the run under way, or refuse it if there is one. Without a run, begin one here.

    The run belongs to this process, not to the request: the client may leave. A message that joins a run has no key:
    its answer is that of the run.
    """
    if not call.service.runs_here:
        raise InvalidData("$.when_busy", "no agent is run by this service; leave it out, and a worker answers")
    if wanted.at is not None or wanted.priority:
        name = "priority" if wanted.at is None else "at"
        raise InvalidData(f"$.{name}", "it is for what waits for its turn; leave it out, or leave `when_busy` out")
    if call.service.closing.is_set():
        raise Problem(503, "Stopping", "This service is about to stop. Try again.", headers={"Retry-After": "5"})
    is_refused = wanted.when_busy == "refuse"
    options = {"key": new_id() if is_refused else None, **_options(call, wanted)}
    options["when_busy"] = "raise" if is_refused else "steer"
    # If the client leaves just now, the run is begun all the same.
    run = await finish_despite_cancel(call.sessions.start(call.session_id, _said(call, wanted), **options))
    reply: Reply[Any] | None = await within(call, wait, run.result()) if wait else None
    if reply is not None and not reply.queued:
        return Answer(of_reply(reply))
    if options["key"] is not None:
        return _accepted(run.session_id, options["key"], None)
    return unanswered(run.session_id, await newest_run(call.sessions, run.session_id))


def _said(call: Call, wanted: NewMessage) -> Any:
    most = call.service.settings.limits.messages
    if (wanted.text is None) == (wanted.messages is None):
        raise InvalidData("$.text", "give `text` or `messages`, one of them")
    if wanted.messages is None:
        return wanted.text
    if not 1 <= len(wanted.messages) <= most:
        raise InvalidData("$.messages", f"expected 1 to {most} messages, got {len(wanted.messages)}")
    return messages_of(wanted.messages, "$.messages")


def _options(call: Call, wanted: NewMessage) -> dict[str, Any]:
    tools = [external_tool(each.name, each.description, each.parameters) for each in wanted.external_tools]
    given = {
        "key": call.key,
        "external_tools": tools or None,
        "instructions": wanted.instructions,
        "output": wanted.output,
        "metadata": wanted.metadata,
        "context_data": wanted.context_data,
    }
    return {name: value for name, value in given.items() if value is not None}


def _accepted(session_id: str, key: str, at: datetime | None) -> Answer:
    body: QueuedForm = {"session": session_id, "key": key, "at": at}
    return Answer(body, 202, {"Location": f"/api/sessions/{session_id}/replies/{quote(key, safe='')}"})


async def get_reply(call: Call) -> Answer:
    """Return the answer to a message by its key. Return 202 while it has none yet, and 404 for an unknown key."""
    wait, key = checked_wait(call, call.query.wait), call.path("key")
    sessions = call.sessions
    reply = await sessions.result(call.session_id, key)
    if reply is None and not await _is_delayed(call, key):
        reply = await sessions.result(call.session_id, key)  # it may just have become due
        if reply is None:
            raise Problem(404, "NoSuchKey", "No message of that key is here: it was not sent, or was taken back.")
    if wait and (reply is None or reply.queued):
        queued = Queued(sessions, (await sessions.info(call.session_id)).id, key, None, None)
        reply = await within(call, wait, queued.reply())
    if reply is None or reply.queued:
        return Answer({"session": call.session_id, "key": key, "at": None}, 202)
    return Answer(of_reply(reply))


async def _is_delayed(call: Call, key: str) -> bool:
    return any(timer.name == key for timer in await call.sessions.timers(call.session_id))


async def list_events(call: Call) -> EventsForm | Response:
    """Return a page of what happened, or with `Accept: text/event-stream` a stream of it and of what comes."""
    info = await call.sessions.info(call.session_id)
    if call.wants_stream:
        if call.query.limit is not None:
            raise InvalidData("$.limit", "a stream has no pages; leave it out, or ask for JSON")
        return await event_stream(call, info.id, place_of(call, call.query.after))
    limit = page_limit(call, 100 if call.query.limit is None else call.query.limit)
    events: list[dict[str, Any]] = []
    following = None
    async for event in call.sessions.events(info.id, after=call.query.after or 0):
        if len(events) == limit:
            following = events[-1]["cursor"]
            break
        events.append(event.to_dict())
    return {"events": events, "next": following}
