"""Answers reveal nothing about the sessions of others, in their bytes, their headers, or the time they take."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send
from tests.server.serving import Served, in_service

from perdure.server.guard import SAFE
from perdure.server.openai.ids import ResponseId, conversation_id
from perdure.server.routes import Route
from perdure.server.table import ROUTES

HERS, NOBODYS = "order-of-ada", "order-of-eve"
ROUNDS = 40
NOISE = 1.35
"""The largest ratio between two medians of the same work on a busy machine."""
NAMED = [route for route in ROUTES if re.search("{(session|response|conversation)}", route.path)]
SHOWN = [route for route in NAMED if route.method == "GET"]


class Seen(NamedTuple):
    """An answer as a client sees it, and the time it took."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    seconds: float


def path_of(route: Route, session: Any) -> str:
    """Return the path of a route of a session. Runs, keys and items get names as if they existed, too."""
    named = {"session": session, "response": ResponseId(session, "k"), "conversation": conversation_id(session)}
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: str(named.get(found[1], "k")), route.path)


async def seen(app: ASGIApp, secret: str, path: str, method: str = "GET", accept: str = "*/*") -> Seen:
    """Ask an app without any client, whose own time would hide small differences."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:7433"), (b"authorization", secret.encode()), (b"accept", accept.encode())]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    given = {"query_string": b"", "scheme": "http", "server": ("127.0.0.1", 7433), "client": ("127.0.0.1", 1)}
    began = time.perf_counter()
    async with asyncio.timeout(10):  # a stream would have no end
        await app({**scope, **given}, receive, send)
    taken = time.perf_counter() - began
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Seen(sent[0]["status"], tuple(sorted(sent[0]["headers"])), body, taken)


async def fill(served: Served) -> None:
    """Make a session of Ada's that has more than others: messages, runs, versions, a fork."""
    await served.ada.put(f"/api/sessions/{HERS}", json={"name": "the canary"})
    for number in range(6):
        given = {"text": f"the canary sings {number}", "wait": 20}
        headers = {"Idempotency-Key": "k"} if not number else {}
        await served.ada.post(f"/api/sessions/{HERS}/messages", json=given, headers=headers)
    await served.ada.post(f"/api/sessions/{HERS}/fork", json={})


async def medians(
    routes: Sequence[Route], ask: Callable[[Route, str], Awaitable[Seen]]
) -> dict[str, tuple[float, float]]:
    """Return the time of each route for another owner's session and for a missing one, asked in turns."""
    found = {}
    for route in routes:
        taken: dict[str, list[float]] = {HERS: [], NOBODYS: []}
        for number in range(ROUNDS):
            for session in (HERS, NOBODYS) if number % 2 else (NOBODYS, HERS):
                taken[session].append((await ask(route, session)).seconds)
        found[route.path] = median(taken[HERS]), median(taken[NOBODYS])
    return found


def apart(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the routes whose times reveal a session: by a ratio, and by more than a fifth of a millisecond."""
    return {
        path: times
        for path, times in found.items()
        if max(times) / min(times) > NOISE and abs(times[0] - times[1]) > 0.0002
    }


class Slower:
    """The app with a leak: it takes longer if a path names Ada's session."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if HERS in scope["path"]:
            await asyncio.sleep(0.003)
        await self._app(scope, receive, send)


@in_service
async def test_times_tell_nothing_of_others_sessions(served: Served) -> None:
    """The medians of each route are equal within noise. A difference is measured again before it is a finding."""
    await fill(served)
    secret = served.bob.headers["Authorization"]

    def asking(app: ASGIApp) -> Callable[[Route, str], Awaitable[Seen]]:
        return lambda route, session: seen(app, secret, path_of(route, session))

    suspects = list(SHOWN)
    for _ in range(8):
        found = apart(await medians(suspects, asking(served.app)))
        suspects = [route for route in suspects if route.path in found]
        if not suspects:
            break
    assert found == {}
    control = [route for route in SHOWN if "{session}" in route.path][:3]
    assert len(apart(await medians(control, asking(Slower(served.app))))) == len(control), "a hole would be seen"


@in_service
async def test_answers_are_the_same_bytes(served: Served) -> None:
    """This holds for every route that names a session, for every method, and for streams."""
    await fill(served)
    secret = served.bob.headers["Authorization"]
    for route in NAMED:
        if route.method == "PUT":  # which would make one
            continue
        for accept in ("*/*", "text/event-stream"):
            asked = [
                await seen(served.app, secret, path_of(route, each), route.method, accept) for each in (HERS, NOBODYS)
            ]
            one, other = (_without_names(each) for each in asked)
            assert one == other, route.path
            assert one[0] >= 400, route.path
            assert b"canary" not in one[2]


def _without_names(answer: Seen) -> tuple[object, ...]:
    """Return an answer without the names that the client itself has given."""
    body, length = answer.body, b"content-length"
    for session in (HERS, NOBODYS):
        for name in (session, str(ResponseId(session, "k")), conversation_id(session)):  # type: ignore[arg-type]
            body = body.replace(name.encode(), b"<session>")
    return answer.status, tuple(each for each in answer.headers if each[0] != length), body


@in_service
async def test_what_is_counted_of_everybody_is_an_operators(served: Served) -> None:
    """A count of requests would tell one owner when another approves something."""
    await fill(served)
    told = await served.bob.get("/metrics")
    assert (told.status_code, told.json()["title"]) == (403, "OperatorNeeded")
    assert "perdure_http_requests_total" in (await served.operator.get("/metrics")).text


def test_every_route_that_names_something_of_an_owner_is_looked_at() -> None:
    others = {route.path for route in ROUTES if "{" in route.path} - {route.path for route in NAMED}
    assert others == {"/agui/{agent}", "/v1/models/{model}", "/static/{file}"}
    assert {route.method for route in NAMED} - set(SAFE) == {"PUT", "POST", "DELETE"}
