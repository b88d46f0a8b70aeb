"""Run an agent for a front end: take what is new in its input, and tell what the run says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from perdure.actions.inbox import under_way
from perdure.actions.waiting import not_active
from perdure.errors import InvalidData, PerdureError
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.model.usage import Usage
from perdure.server.agui.decisions import decisions_in
from perdure.server.agui.events import SNAPSHOT, VERSION, Event, Teller, failed, finished
from perdure.server.agui.inputs import RunAgentInput, ToolMessage
from perdure.server.agui.messages import front_end_messages
from perdure.server.agui.novelties import New, all_said, all_shown, new_in, options_in, sendable, tools_in, waits
from perdure.server.call import Call, encoded
from perdure.server.problems import Problem
from perdure.server.sse import FULL, Events, streamed
from perdure.sessions.cursors import Place
from perdure.sessions.queueing import Queued
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions
from perdure.sessions.viewing import View


class _Begun(msgspec.Struct):
    """A run to tell of: its session, the place to begin after, and the function that waits for its answer."""

    session_id: SessionId
    after: int
    answer: Callable[[], Coroutine[Any, Any, Reply[Any]]]
    teller: Teller
    shown: View | None = None
    """The state of the thread, if the front end has to be told that first."""


async def run_agent(call: Call) -> Response:
    """Run an agent in a thread, or show the state of the thread. The run continues if the client leaves."""
    given: RunAgentInput = call.body
    _require_supported(given)
    call.service.require_room(call.caller)
    agent, sessions, thread = _agent(call), call.sessions, SessionId.of(given.thread_id)
    is_there = await sessions.exists(thread)
    if not is_there and not given.messages and not given.resume:
        return streamed(call, _nothing(given), _farewell)
    if not is_there:  # what is refused leaves no session behind
        sendable(all_said(given), call.service.settings.limits.messages)
    first = next(iter(call.service.agents.values()))
    chat = await sessions.open(thread, agent if is_there else agent or first, on_change="keep")
    return streamed(call, _told(call, given, await _begin(call, given, chat.id)), _farewell)


def _require_supported(given: RunAgentInput) -> None:
    # Clients without a state send {}.
    if given.state:
        raise InvalidData("$.state", "a session has no state that a front end shares; leave it out")
    if given.forwarded_props is not None and not isinstance(given.forwarded_props, dict):
        raise InvalidData("$.forwardedProps", "expected an object: tools find it in their context")
    tools_in(given)


def _agent(call: Call) -> AgentDefinition | None:
    """Return the agent that the path names, or None if it names none."""
    name = call.request.path_params.get("agent")
    if name is None:
        return None
    if name not in call.service.agents:
        raise Problem(404, "AgentNotFound", "No agent of that name is served.")
    return call.service.agents[name]


async def _begin(call: Call, given: RunAgentInput, session_id: SessionId) -> _Begun:
    sessions = call.sessions
    after = await call.service.feeds.end_of(session_id)  # first, so that nothing is missed
    view = await sessions.view(session_id)
    new = await new_in(sessions, view, given)
    answers = [(path, each) for path, each in new if isinstance(each, ToolMessage) and waits(view, each)]
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
        raise not_active(view.session)  # the message would wait until the session is opened again
    return await _sent(call, given, session_id, rest, after)


async def _sent(call: Call, given: RunAgentInput, session_id: SessionId, new: New, after: int) -> _Begun:
    """Leave the new messages for a worker. The last one's id is the key, so the same request again sends nothing."""
    said = sendable(new, call.service.settings.limits.messages)
    key = said[-1].id
    queued = await call.sessions.enqueue(session_id, said, key=key, any_role=True, **options_in(given))
    return _Begun(session_id, after, partial(_reply_to, queued), Teller(key=key, known={each.id for each in said}))


async def _continued(
    sessions: Sessions, view: View, given: RunAgentInput, results: Sequence[ToolMessage], after: int
) -> _Begun:
    """Settle the calls that the front end has answered, in one commit. A worker continues the run."""
    decided = msgspec.structs.asdict(decisions_in(given.resume or (), results, view.pending_calls))
    reply = await sessions.settle(view.session.id, **decided, wait=False)
    run = reply.session.state.execution
    known = [each.id for each in all_shown(view)]
    teller = Teller(run=None if run is None else run.execution_id, known=known)
    return _Begun(view.session.id, after, partial(_followed, sessions, view, view.session.state.usage), teller)


async def _looked_at(sessions: Sessions, view: View, given: RunAgentInput, after: int) -> _Begun:
    """Return the state of the thread, and the run to follow: of the last message, or the one under way."""
    known = {each.id for each in all_shown(view)}
    queued_last = view.queued[-1].id if view.queued else ""
    last = given.messages[-1].id if given.messages else queued_last
    journal = sessions.runtime.journal
    found = await under_way(journal, view.session.id, last) if journal is not None and last else None
    if found is not None and found.kind != "agent_start":
        queued = Queued(sessions, view.session.id, last, found, None)
        return _Begun(view.session.id, after, partial(_reply_to, queued), Teller(key=last, known=known), view)
    run = None if view.cursor is None else Place.of(view.cursor).run
    # The usage of a run that is over was told when it ended.
    used = view.session.state.usage if view.activity in ("idle", "waiting") else Usage()
    return _Begun(view.session.id, after, partial(_followed, sessions, view, used), Teller(run=run, known=known), view)


async def _reply_to(queued: Queued) -> Reply[Any]:
    reply = await queued.reply()
    assert reply is not None  # without a time limit, `reply` waits until there is one
    return reply


async def _followed(sessions: Sessions, view: View, used: Usage) -> Reply[Any]:
    """Wait until the run under way, or the last one, is over or waits. `used` is the session's usage before it."""
    is_over = view.activity == "idle"
    async for chunk in sessions.follow(view.session.id, after=None if is_over else view.cursor, timeout=float("inf")):
        if chunk.reply is not None:
            return msgspec.structs.replace(chunk.reply, used_before=used)
    raise AssertionError("the last chunk has the reply")


async def _told(call: Call, given: RunAgentInput, begun: _Begun) -> Events:
    yield _event(_started(given))
    if begun.shown is not None:
        yield _event(_snapshot(begun.shown))
    answer = asyncio.ensure_future(begun.answer())
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
        # This only stops waiting: the run itself continues.
        answer.cancel()


async def _nothing(given: RunAgentInput) -> Events:
    """Yield the events for a thread that has nothing in it yet."""
    yield _event(_started(given))
    yield _event({"type": SNAPSHOT, "messages": []})
    outcome = {"type": "success"}
    yield _event({"type": "RUN_FINISHED", "threadId": given.thread_id, "runId": given.run_id, "outcome": outcome})


def _started(given: RunAgentInput) -> Event:
    parent = {} if given.parent_run_id is None else {"parentRunId": given.parent_run_id}
    ids = {"threadId": given.thread_id, "runId": given.run_id}
    return {"type": "RUN_STARTED", **ids, **parent, "protocolVersion": VERSION}


def _snapshot(view: View) -> Event:
    return {"type": SNAPSHOT, "messages": front_end_messages(all_shown(view))}


def _farewell(reason: str) -> ServerSentEvent:
    whys = {"shutdown": "The service stops", FULL: "Too many streams are open"}
    what = whys.get(reason, "The token is not valid any more")
    message = f"{what}. The run continues: send the thread's id with `messages: []` to see what has come of it."
    return _event({"type": "RUN_ERROR", "message": message, "code": reason})


def _event(event: Event) -> ServerSentEvent:
    return ServerSentEvent(encoded(event).decode(), sep="\n")
