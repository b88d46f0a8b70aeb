"""What is said: read it, say something, follow what happens."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypedDict

import msgspec
from starlette.responses import Response

from perdure.errors import InvalidData
from perdure.loop.external import external_tool
from perdure.model.given_messages import messages_of
from perdure.server.api.sessions import page_limit
from perdure.server.call import Answer, Call
from perdure.server.sse import event_stream, place_of
from perdure.sessions.json_forms import ReplyForm, of_reply
from perdure.sessions.queueing import Queued
from perdure.sessions.reply import Reply


class MessagesQuery(msgspec.Struct, kw_only=True):
    view: Literal["shown", "said"] = "shown"
    """`shown` is what the model sees, `said` all that was said: covered, trimmed and rewound parts too."""
    version: int | None = None
    limit: int = 100
    after: int = 0
    """How many messages to pass over."""


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
    limit: int = 100


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
    if asked.view == "said":
        if asked.version is not None:
            raise InvalidData("$.version", "all that was said belongs to no version; leave it out, or ask for `shown`")
        said = await call.sessions.history(call.session_id)
    else:
        said = (await call.sessions.session(call.session_id, asked.version)).state.messages
    if asked.after < 0:
        raise InvalidData("$.after", "expected 0 or more")
    page, end = said[asked.after : asked.after + limit], asked.after + limit
    following = end if end < len(said) else None
    return {"messages": [each.to_dict() for each in page], "total": len(said), "next": following}


async def post_message(call: Call) -> Answer:
    """Say something. It is durable before anything is answered, and a worker answers it."""
    wanted: NewMessage = call.body
    wait = checked_wait(call, wanted.wait)
    if call.expected is not None:
        raise InvalidData("If-Match", "a message is not bound to a version; leave it out")
    if wanted.when_busy != "queue":
        return await _sent_now(call, wanted)
    queued = await call.sessions.enqueue(
        call.session_id, _said(call, wanted), priority=wanted.priority, at=wanted.at, **_options(call, wanted)
    )
    reply = await queued.reply(timeout=wait) if wait and wanted.at is None else None
    return _accepted(queued) if reply is None else Answer(of_reply(reply))


def checked_wait(call: Call, given: float) -> float:
    most = call.service.settings.limits.wait
    if not 0 <= given <= most:
        raise InvalidData("$.wait", f"expected 0 to {most:g} seconds, got {given:g}")
    return given


async def _sent_now(call: Call, wanted: NewMessage) -> Answer:
    """Take a message into the run under way, or refuse it if there is one; without a run, begin one here."""
    if not call.service.runs_here:
        raise InvalidData("$.when_busy", "no agent is run by this service; leave it out, and a worker answers")
    if wanted.at is not None:
        raise InvalidData("$.at", "what is sent later always waits for its turn; leave `when_busy` out")
    options = {**_options(call, wanted), "when_busy": "steer" if wanted.when_busy == "steer" else "raise"}
    run = await call.sessions.start(call.session_id, _said(call, wanted), **options)
    reply: Reply[Any] = await run.result()
    return Answer(of_reply(reply), 202 if reply.queued else 200)


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


def _accepted(queued: Queued) -> Answer:
    body: QueuedForm = {"session": queued.session_id, "key": queued.key, "at": queued.at}
    return Answer(body, 202, {"Location": f"/api/sessions/{queued.session_id}/replies/{queued.key}"})


class ReplyQuery(msgspec.Struct, kw_only=True):
    wait: float = 0.0


async def get_reply(call: Call) -> Answer:
    """Return the answer to a message by its key: 202 while there is none yet."""
    wait, key = checked_wait(call, call.query.wait), call.path("key")
    sessions = call.sessions
    reply = await sessions.result(call.session_id, key)
    if wait and (reply is None or reply.queued):
        queued = Queued(sessions, (await sessions.info(call.session_id)).id, key, None, None)
        reply = await queued.reply(timeout=wait)
    if reply is None or reply.queued:
        return Answer({"session": call.session_id, "key": key, "at": None}, 202)
    return Answer(of_reply(reply))


async def list_events(call: Call) -> EventsForm | Response:
    """Return a page of what happened, or with `Accept: text/event-stream` all of it, and what comes."""
    info = await call.sessions.info(call.session_id)
    if call.wants_stream:
        return await event_stream(call, info.id, place_of(call, call.query.after))
    limit = page_limit(call, call.query.limit)
    events: list[dict[str, Any]] = []
    following = None
    async for event in call.sessions.events(info.id, after=call.query.after or 0):
        if len(events) == limit:
            following = events[-1]["cursor"]
            break
        events.append(event.to_dict())
    return {"events": events, "next": following}


__all__ = ["ReplyForm", "get_reply", "list_events", "list_messages", "post_message"]
