"""A chat for each user behind HTTP: answers stream, and outlive the browser tab that asked for them.

    pip install 'perdure[serve]'
    uvicorn web_app:app                         # in this folder; then, in another terminal:
    curl -N localhost:8000/chats/a -H 'X-User: ada' -d '{"text": "call refund {\"order\": 7}", "key": "request-1"}'

`X-User` stands for whatever your sign-in gives you. Do not take it from a header of the browser's.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from json import JSONDecodeError
from typing import Any

from sse_starlette import EventSourceResponse, JSONServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import perdure

STORE, MODEL = os.environ.get("CHAT_STORE", "sqlite:///chats.db"), os.environ.get("CHAT_MODEL", "offline")
CLERK = perdure.AgentDefinition("clerk", system_prompt="You help customers. Be brief.")
CONFLICTS = (perdure.SessionBusy, perdure.SessionNotActive, perdure.SessionConflict, perdure.PendingCallsChanged)
MISTAKES = (perdure.InvalidData, perdure.InvalidSessionId, JSONDecodeError)
STATUS = {**dict.fromkeys(CONFLICTS, 409), **dict.fromkeys(MISTAKES, 400)}
STATUS |= {perdure.SessionNotFound: 404, perdure.QueueFull: 429}


@perdure.tool(needs_approval=True)
def refund(order: int, asking: perdure.ToolContext[str]) -> str:
    """Give the money for an order back."""
    return f"{asking.context} gets the money for order {order} back"


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    options: Any = {"tools": [refund], "context": lambda session, data: session.info.owner}  # for runs without a caller
    async with perdure.connect(STORE, model=MODEL, recover=True, **options) as sessions:
        yield {"sessions": sessions}


async def asked(request: Request, **kinds: type) -> Any:
    """Return the caller's sessions, the name of the chat, and fields of the JSON that was sent."""
    body = await request.json() if kinds else {}
    for name, kind in kinds.items():
        if not isinstance(body, dict) or not isinstance(body.get(name), kind) or not body[name]:
            raise perdure.InvalidData(f"$.{name}", f"expected an object with {name!r}, a {kind.__name__}, not empty")
    mine = request.state.sessions.of(request.headers.get("X-User", ""))  # no other user's sessions exist there
    return mine, request.path_params.get("chat"), *(body[name] for name in kinds)


async def events(chunks: AsyncIterator[perdure.Chunk]) -> AsyncIterator[JSONServerSentEvent]:
    """Yield an answer's text. The id of an event is where a browser that reconnects reads on."""
    try:
        async for chunk in chunks:
            kind = "end" if chunk.reply else "restart" if chunk.restarts else "text"
            end = {"calls": calls_in(chunk.reply), "queued": chunk.reply.queued} if chunk.reply else {}
            yield JSONServerSentEvent({"text": chunk, "offset": chunk.offset, **end}, event=kind, id=chunk.cursor)
    except perdure.PerdureError as error:  # the response has begun: it is too late for a status
        told = {"kind": type(error).__name__, "error": str(error)}
        yield JSONServerSentEvent(told, event="failed")


def calls_in(found: perdure.View | perdure.Reply[Any]) -> list[dict[str, Any]]:
    return [{"id": each.digest, "name": each.name, "arguments": dict(each.arguments)} for each in found.pending_calls]


async def say(request: Request) -> EventSourceResponse:
    """Send a message. A double click is one request, since it has the same key; a closed tab stops nothing."""
    mine, name, text, key = await asked(request, text=str, key=str)
    chat = await mine.open(name, agent=CLERK, on_change="take")
    run = await chat.start(text, key=key, context=mine.owner, when_busy="queue")
    return EventSourceResponse(events(run.stream()))


async def show(request: Request) -> JSONResponse:
    """Return what a page shows that is loaded now. It then listens behind the cursor."""
    mine, name = await asked(request)
    view = await mine.view(name)
    said = [each for each in (*view.messages, *view.asked) if each.text and each.role in ("user", "assistant")]
    now = {"activity": view.activity, "text": view.text, "calls": calls_in(view), "cursor": view.cursor}
    rows = [{"id": each.id, "role": each.role, "text": each.text} for each in said]
    return JSONResponse({"messages": rows, "queued": [each.text for each in view.queued], **now})


async def listen(request: Request) -> EventSourceResponse:
    """Follow the run under way, from where this browser has stopped."""
    mine, name = await asked(request)
    await mine.info(name)  # raises SessionNotFound before the response begins
    after = request.headers.get("Last-Event-ID", request.query_params.get("after"))
    return EventSourceResponse(events(mine.follow(name, after=after)))


async def decide(request: Request) -> EventSourceResponse:
    """Approve the calls that a person was shown, or deny them. If others wait by now, or they run, it is a conflict."""
    mine, name, calls = await asked(request, calls=list)
    if request.url.path.endswith("/approve"):
        run = await mine.start_settle(name, approve=calls, context=mine.owner)
    else:
        run = await mine.start_settle(name, deny=dict.fromkeys(calls, "No."), context=mine.owner)
    return EventSourceResponse(events(run.stream()))


async def retry(request: Request) -> EventSourceResponse:
    """Send the last message again, because its answer has failed. The key makes two clicks one try."""
    mine, name, key = await asked(request, key=str)
    run = await mine.start_retry(name, key=key, context=mine.owner)
    return EventSourceResponse(events(run.stream()))


async def stop(request: Request) -> JSONResponse:
    """Stop the run under way, in whatever process it is. What it has said is kept."""
    mine, name = await asked(request)
    return JSONResponse({"stopped": await mine.cancel(name)})


async def sidebar(request: Request) -> JSONResponse:
    mine, _ = await asked(request)
    page = await mine.list(order="updated", top_level=True, limit=30, after=request.query_params.get("after"))
    rows = [{"chat": each.id, "title": each.title, "last": each.last_words, "status": each.status} for each in page]
    return JSONResponse({"chats": rows, "next": page.next})


async def refused(request: Request, error: Exception) -> JSONResponse:
    told = {"kind": type(error).__name__, "error": str(error)}  # the kind is for the page, the error for its developer
    return JSONResponse(told, next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS))


chats: Any = [Route("/chats", sidebar), Route("/chats/{chat}", show), Route("/chats/{chat}", say, methods=["POST"])]
runs = [Route("/chats/{chat}/events", listen), Route("/chats/{chat}/stop", stop, methods=["POST"])]
runs += [Route("/chats/{chat}/retry", retry, methods=["POST"])]
runs += [Route(f"/chats/{{chat}}/{verb}", decide, methods=["POST"]) for verb in ("approve", "deny")]
app = Starlette(routes=[*chats, *runs], lifespan=lifespan, exception_handlers=dict.fromkeys(STATUS, refused))
