"""A chat for each user behind HTTP: answers stream, and outlive the browser tab that asked for them.

    pip install 'perdure[serve]'
    uvicorn web_app:app                         # in this folder; then, in another terminal:
    curl -N localhost:8000/chats/order-7 -H 'X-User: ada' -H 'Content-Type: application/json' \
         -d '{"text": "call refund {\"order\": 7}", "key": "request-1"}'

`X-User` stands for whatever your sign-in gives you. Do not take it from a header of the browser's.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import perdure
from perdure import Sessions, ToolContext


@dataclass
class User:
    name: str


@perdure.tool(needs_approval=True)
def refund(order: int, asking: ToolContext[User]) -> str:
    """Give the money for an order back."""
    return f"{asking.context.name} gets the money for order {order} back"


CLERK = perdure.AgentDefinition("clerk", system_prompt="You help customers. Be brief.")


def user_of(session: perdure.AgentSession, data: Any) -> User:
    """Make a context for runs without a caller: a crash or a restart has ended the request."""
    return User(session.info.owner or "nobody")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    store, model = os.environ.get("CHAT_STORE", "sqlite:///chats.db"), os.environ.get("CHAT_MODEL", "offline")
    async with perdure.connect(store, model=model, tools=[refund], context=user_of) as sessions:
        await sessions.recover()  # what the last process left behind
        yield {"sessions": sessions}


def mine(request: Request) -> Sessions:
    """Return the sessions of whoever is asking. No other user's exist there."""
    sessions: Sessions = request.state.sessions
    return sessions.of(request.headers["X-User"])


def events(chunks: AsyncIterator[perdure.Chunk]) -> EventSourceResponse:
    """Stream an answer. The id of an event is where a browser that reconnects reads on."""

    async def told() -> AsyncIterator[ServerSentEvent]:
        async for chunk in chunks:
            if chunk.reply is None:
                kind = "restart" if chunk.restarts else "text"
                yield ServerSentEvent(chunk, event=kind, id=chunk.cursor)
            else:
                waits = [{"id": call.digest, "name": call.name} for call in chunk.reply.pending_calls]
                yield ServerSentEvent("waits" if waits else "done", event="end", id=chunk.cursor)

    return EventSourceResponse(told())


async def say(request: Request) -> EventSourceResponse:
    """Send a message. A double click is one request, since it has the same key; a closed tab stops nothing."""
    chat = await mine(request).open(request.path_params["chat"], agent=CLERK, on_change="take")
    body = await request.json()
    run = await chat.start(body["text"], key=body["key"], context=User(request.headers["X-User"]), when_busy="queue")
    return events(run.stream())


async def listen(request: Request) -> EventSourceResponse:
    """Follow the run under way, from where this browser has stopped."""
    chat = await mine(request).open(request.path_params["chat"])
    return events(chat.follow(after=request.headers.get("Last-Event-ID")))


async def sidebar(request: Request) -> JSONResponse:
    page = await mine(request).list(order="updated", top_level=True, limit=30, after=request.query_params.get("after"))
    rows = [{"chat": each.id, "title": each.title, "last": each.last_words, "status": each.status} for each in page]
    return JSONResponse({"chats": rows, "next": page.next})


async def not_found(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=404)


async def bad_request(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=400)


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/chats", sidebar),
        Route("/chats/{chat}", say, methods=["POST"]),
        Route("/chats/{chat}", listen, methods=["GET"]),
    ],
    exception_handlers={
        perdure.SessionNotFound: not_found,
        perdure.InvalidData: bad_request,
        perdure.InvalidSessionId: bad_request,
    },
)
