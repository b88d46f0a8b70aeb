"""Run an agent for a front end: take what is new in its input, and tell what the run says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from perdure.actions.inbox import under_way
from perdure.actions.waiting import not_active
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.loop.external import ExternalTool, external_tool, specs_of
from perdure.model.definition import AgentDefinition
from perdure.model.execution import PendingCall
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import SessionStatus
from perdure.protocols import FindsMessages
from perdure.server.agui.events import SNAPSHOT, VERSION, Event, Teller, failed, finished
from perdure.server.agui.inputs import (
    ActivityMessage,
    ReasoningMessage,
    ResumeEntry,
    RunAgentInput,
    Said,
    ToolMessage,
    UserMessage,
)
from perdure.server.agui.messages import BESIDE, front_end_messages, session_messages, text_of
from perdure.server.call import Call, encoded
from perdure.server.problems import Problem
from perdure.server.sse import Events, streamed
from perdure.sessions.queueing import Queued
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions
from perdure.sessions.viewing import View

_CANCELLED = "It was cancelled by the user."
_DENIED = "No reason was given."
New = list[tuple[str, Said]]


class _Begun(msgspec.Struct):
    """What is told: of which run, from where on, and what tells that it is over."""

    session_id: SessionId
    after: int
    answer: Coroutine[Any, Any, Reply[Any]]
    teller: Teller
    shown: View | None = None
    """How the thread stands, where the front end is to be told that first."""


async def run_agent(call: Call) -> Response:
    """Run an agent in a thread, or tell how the thread stands. The run goes on if the client leaves."""
    given: RunAgentInput = call.body
    _require_supported(call, given)
    call.service.require_room(call.caller)
    agent, sessions, thread = _agent(call), call.sessions, SessionId.of(given.thread_id)
    is_there = await sessions.exists(thread)
    if not is_there and not given.messages:
        return streamed(call, _nothing(given), _farewell)
    if not is_there:  # what is refused leaves no session behind
        _sendable(call, _all_said(given))
    first = next(iter(call.service.agents.values()))
    chat = await sessions.open(thread, agent if is_there else agent or first, on_change="keep")
    return streamed(call, _told(call, given, await _begin(call, given, chat.id)), _farewell)


def _require_supported(call: Call, given: RunAgentInput) -> None:
    if call.expected is not None:
        raise InvalidData("If-Match", "a run is not bound to a version; leave it out")
    if given.state:
        raise InvalidData("$.state", "a session has no state that a front end shares; leave it out")
    if given.forwarded_props is not None and not isinstance(given.forwarded_props, dict):
        raise InvalidData("$.forwardedProps", "expected an object: tools find it in their context")
    _tools(given)


def _agent(call: Call) -> AgentDefinition | None:
    """Return the agent that the path names; None if it names none."""
    name = call.request.path_params.get("agent")
    if name is None:
        return None
    if name not in call.service.agents:
        raise Problem(404, "AgentNotFound", "No agent of that name is served.")
    return call.service.agents[name]


async def _begin(call: Call, given: RunAgentInput, session_id: SessionId) -> _Begun:
    sessions = call.sessions
    after = await call.service.feeds.end_of(session_id)  # before anything is looked at or begun
    view = await sessions.view(session_id)
    new = await _new(sessions, view, given)
    answers = [(path, each) for path, each in new if isinstance(each, ToolMessage) and _waits(view, each)]
    rest = [each for each in new if each not in answers]
    if not new and not given.resume:
        return await _looked_at(sessions, view, given, after)
    if given.resume or answers:
        if rest:
            raise InvalidData(rest[0][0], "a run is continued first: send what is new when it has ended")
        return await _continued(sessions, view, given, [each for _, each in answers], after)
    if view.pending_calls:
        what = "The thread waits for answers. Send them as `resume`, or as messages of tools, before anything else."
        raise Problem(409, "InterruptsOpen", what, facts={"interrupts": [each.digest for each in view.pending_calls]})
    if view.activity == "idle" and view.session.status is not SessionStatus.ACTIVE:
        raise not_active(view.session)  # it would wait until somebody opens the session
    return await _sent(call, given, session_id, rest, after)


async def _new(sessions: Sessions, view: View, given: RunAgentInput) -> New:
    """Return the messages behind the last one that the session has, each with its path."""
    new: New = []
    for path, message in reversed(_all_said(given)):
        if await _is_known(sessions, view, message):
            break
        new.append((path, message))
    return new[::-1]


def _all_said(given: RunAgentInput) -> New:
    """Return the messages that are part of the conversation, each with its path.

    Activities are a front end's own, and the thoughts of a model were told by us.
    """
    numbered = enumerate(given.messages)
    return [
        (f"$.messages[{n}]", each) for n, each in numbered if not isinstance(each, ActivityMessage | ReasoningMessage)
    ]


async def _is_known(sessions: Sessions, view: View, message: Said) -> bool:
    shown = (*view.messages, *view.asked, *view.said, *view.queued)
    if any(each.id == message.id for each in shown):
        return True
    if isinstance(message, ToolMessage):  # the result of a call has an id of our own
        is_ours = any(each.id == message.tool_call_id for said in shown for each in said.tool_calls)
        return is_ours and not _waits(view, message)
    if view.session.version == 1:
        return False
    store = sessions.store
    places = await sessions.find(message.id) if isinstance(store, FindsMessages) else ()
    return any(place.session_id == view.session.id for place in places)


def _waits(view: View, message: ToolMessage) -> bool:
    return any(call.external and call.id == message.tool_call_id for call in view.pending_calls)


async def _sent(call: Call, given: RunAgentInput, session_id: SessionId, new: New, after: int) -> _Begun:
    """Leave the new messages for a worker. The last one's id is the key: the same request again sends nothing."""
    said = _sendable(call, new)
    key = said[-1].id
    queued = await call.sessions.enqueue(session_id, said, key=key, any_role=True, **_options(given))
    return _Begun(session_id, after, _reply_to(queued), Teller(key=key, known={each.id for each in said}))


def _sendable(call: Call, new: New) -> list[Message]:
    """Return new messages as those of a session. InvalidData if they are too many, or there is nothing to answer."""
    most = call.service.settings.limits.messages
    if len(new) > most:
        raise InvalidData("$.messages", f"expected at most {most} new messages, got {len(new)}")
    path, last = new[-1] if new else ("$.messages", None)
    if not isinstance(last, UserMessage):
        raise InvalidData(path, "there is nothing to answer: the last message has to be a user's")
    return session_messages(new)


def _tools(given: RunAgentInput) -> list[ExternalTool]:
    """Return the front end's tools. InvalidData if one of them cannot be called, or there are too many."""
    tools = []
    for place, each in enumerate(given.tools or ()):
        try:
            tools.append(external_tool(each.name, each.description, each.parameters))
        except ConfigurationError as error:  # of which the front end is the author
            raise InvalidData(f"$.tools[{place}]", error.what) from None
    specs_of(tools)
    return tools


def _options(given: RunAgentInput) -> dict[str, Any]:
    tools = _tools(given)
    told = "\n\n".join(f"{each.description}:\n{each.value}" for each in given.context or ())
    ids = {"threadId": given.thread_id, "runId": given.run_id, "parentRunId": given.parent_run_id}
    options = {
        "external_tools": tools or None,
        "instructions": told or None,
        "context_data": given.forwarded_props or None,
        "metadata": {BESIDE: {name: value for name, value in ids.items() if value is not None}},
    }
    return {name: value for name, value in options.items() if value is not None}


async def _continued(
    sessions: Sessions, view: View, given: RunAgentInput, messages: Sequence[ToolMessage], after: int
) -> _Begun:
    """Settle what the front end has answers to, in one commit. A worker continues the run."""
    waiting = {leaf.digest: leaf for call in view.pending_calls for leaf in (call, *call.leaves)}
    settled = _Settled()
    for place, entry in enumerate(given.resume or ()):
        if entry.interrupt_id not in waiting:
            what = "Nothing waits under that id any more. Send `messages: []` alone to see how the thread stands."
            raise Problem(409, "InterruptClosed", what, facts={"interrupt": entry.interrupt_id})
        settled.take(entry, waiting[entry.interrupt_id], f"$.resume[{place}]")
    for message in messages:
        if message.error is None:
            settled.answers[message.tool_call_id] = text_of(message)
        else:
            settled.errors[message.tool_call_id] = message.error
    reply = await sessions.settle(view.session.id, **msgspec.structs.asdict(settled), wait=False)
    run = reply.session.state.execution
    known = [each.id for each in (*view.messages, *view.asked, *view.said)]
    teller = Teller(run=None if run is None else run.execution_id, known=known)
    return _Begun(view.session.id, after, _followed(sessions, view), teller)


class _Settled(msgspec.Struct):
    """Decisions on calls that wait, by their digests."""

    approve: list[str] = []
    deny: dict[str, str] = {}
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def take(self, entry: ResumeEntry, call: PendingCall, path: str) -> None:
        """Take an answer to an interrupt."""
        name, payload = entry.interrupt_id, entry.payload
        if call.external:
            if entry.status == "cancelled":
                self.errors[name] = _CANCELLED
            else:
                self.answers[name] = payload
        elif entry.status == "cancelled":
            self.deny[name] = _CANCELLED
        elif _is_approval(payload, path):
            self.approve.append(name)
        else:
            self.deny[name] = str(payload.get("reason") or _DENIED) if isinstance(payload, dict) else _DENIED


def _is_approval(payload: Any, path: str) -> bool:
    if isinstance(payload, bool):
        return payload
    if not isinstance(payload, dict) or not isinstance(payload.get("approved"), bool):
        raise InvalidData(f"{path}.payload", 'expected {"approved": true}, or {"approved": false, "reason": "…"}')
    for name in payload.keys() - {"approved", "reason"}:
        raise InvalidData(
            f"{path}.payload.{name}", "a call is approved as it was shown; deny it, and say what is wrong"
        )
    approved: bool = payload["approved"]
    return approved


async def _looked_at(sessions: Sessions, view: View, given: RunAgentInput, after: int) -> _Begun:
    """Tell how the thread stands, and what comes of the run that answers the last message, or is under way."""
    known = {each.id for each in (*view.messages, *view.asked, *view.said)}
    last = given.messages[-1].id if given.messages else ""
    journal = sessions.runtime.journal
    found = await under_way(journal, view.session.id, last) if journal is not None and last else None
    if found is not None and found.kind != "agent_start":
        queued = Queued(sessions, view.session.id, last, found, None)
        return _Begun(view.session.id, after, _reply_to(queued), Teller(key=last, known=known), view)
    run = view.session.state.execution
    under = found.run if found is not None else None if run is None else run.execution_id
    return _Begun(view.session.id, after, _followed(sessions, view), Teller(run=under, known=known), view)


async def _reply_to(queued: Queued) -> Reply[Any]:
    reply = await queued.reply()
    assert reply is not None  # without a time limit it is waited for
    return reply


async def _followed(sessions: Sessions, view: View) -> Reply[Any]:
    """Wait until the run that is under way, or that was the last, is over or waits."""
    is_over = view.activity == "idle"
    async for chunk in sessions.follow(view.session.id, after=None if is_over else view.cursor, timeout=float("inf")):
        if chunk.reply is not None:
            return chunk.reply
    raise AssertionError("the last chunk has the reply")


async def _told(call: Call, given: RunAgentInput, begun: _Begun) -> Events:
    yield _event(_started(given))
    if begun.shown is not None:
        yield _event(_snapshot(begun.shown))
    answer = asyncio.ensure_future(begun.answer)
    try:
        async with aclosing(call.service.feeds.until(begun.session_id, begun.after, answer)) as news:
            async for each in news:
                for event in begun.teller.hear(each):
                    is_due = event["type"] == SNAPSHOT
                    yield _event(_snapshot(await call.sessions.view(begun.session_id)) if is_due else event)
        for event in begun.teller.end():
            yield _event(event)
        yield _event(finished(answer.result(), thread=given.thread_id, run=given.run_id))
    except PerdureError as error:
        for event in begun.teller.end():
            yield _event(event)
        yield _event(failed(error))
    finally:
        answer.cancel()


async def _nothing(given: RunAgentInput) -> Events:
    """Tell that there is nothing in a thread yet."""
    yield _event(_started(given))
    yield _event({"type": SNAPSHOT, "messages": []})
    outcome = {"type": "success"}
    yield _event({"type": "RUN_FINISHED", "threadId": given.thread_id, "runId": given.run_id, "outcome": outcome})


def _started(given: RunAgentInput) -> Event:
    parent = {} if given.parent_run_id is None else {"parentRunId": given.parent_run_id}
    ids = {"threadId": given.thread_id, "runId": given.run_id}
    return {"type": "RUN_STARTED", **ids, **parent, "protocolVersion": VERSION}


def _snapshot(view: View) -> Event:
    return {"type": SNAPSHOT, "messages": front_end_messages((*view.messages, *view.asked, *view.said))}


def _farewell(reason: str) -> ServerSentEvent:
    what = "The service stops" if reason == "shutdown" else "The token is no longer valid"
    message = f"{what}. The run goes on: send the thread's id with `messages: []` to see what has come of it."
    return _event({"type": "RUN_ERROR", "message": message, "code": reason})


def _event(event: Event) -> ServerSentEvent:
    return ServerSentEvent(encoded(event).decode(), sep="\n")
