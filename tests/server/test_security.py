"""Attacks that no route lets through. Each test tries the whole table, so that a new route cannot be forgotten."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from tests.server.serving import Served, in_service

from perdure.server.guard import HEADERS, PROBE, SAFE
from perdure.server.routes import Route
from perdure.server.table import ROUTES

STREAM = {"Accept": "text/event-stream"}
HOSTILE = (
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "%00",
    "a%0d%0aX-Injected:%20yes",
    "a%0aX-Injected:%20yes",
    "%ff%fe",
    "~",
    "%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "x" * 5_000,
    "café",
)


def path_of(route: Route, name: str = "s") -> str:
    """Return the path of a route: of the session `s`, and of objects that do not exist."""
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: name if found[1] == "session" else "none", route.path)


def unsafe(routes: Iterable[Route] = ROUTES) -> list[Route]:
    return [route for route in routes if route.method not in SAFE]


def body_of(route: Route) -> dict[str, object]:
    """Return an empty body of the kind that a route takes."""
    if route.face == "page":
        return {"content": b"a=1", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}
    return {"json": {}}


async def ask(client: httpx.AsyncClient, route: Route, **options: object) -> httpx.Response:
    """Ask a route. A stream is not waited for: such requests are refused before they begin."""
    path = options.pop("path", None) or path_of(route)
    return await client.request(route.method, str(path), **options)  # type: ignore[arg-type]


async def findings(
    routes: Iterable[Route], asked: Callable[[Route], AsyncIterator[httpx.Response]], is_right: Callable[..., bool]
) -> list[str]:
    """Return the faults in the answers of routes, one line each."""
    wrong = []
    for route in routes:
        async for response in asked(route):
            if not is_right(response, route):
                wrong.append(f"{route.method} {route.path}: {response.status_code} {response.text[:80]}")
    return wrong


@in_service
async def test_a_name_that_is_not_the_services_own_is_refused(served: Served) -> None:
    """Somebody else's DNS can point a name at this machine, and a browser would send its cookie along."""

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:7433", "", "127.0.0.1@evil.example"):
            yield await ask(served.operator, route, headers={"Host": host})

    named = [route for route in ROUTES if route.path != PROBE]  # it reveals nothing, and answers any address
    assert await findings(named, asked, lambda response, _: response.status_code == 421) == []


@in_service
async def test_pages_of_other_sites_are_refused(served: Served) -> None:
    signs = (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    )

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        for sign in signs:
            if route.method not in SAFE:
                yield await ask(served.operator, route, headers=sign)
            yield await ask(served.operator, route, headers={**sign, **STREAM})

    assert await findings(ROUTES, asked, lambda response, _: response.status_code == 403) == []


@in_service
async def test_nobody_is_let_in_without_a_token(served: Served) -> None:
    """A browser is sent to the page for signing in; every other client is told to bring a token."""

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        for given in ("", "Bearer ", "Bearer pdr_" + "x" * 43, "Basic YWRhOmFkYQ==", "Bearer \x00"):
            headers = {"Authorization": given} if given else {}
            yield await ask(served.nobody, route, headers=headers)
        yield await ask(served.nobody, route, headers={"Cookie": "perdure=pdr_" + "x" * 43})

    def is_right(response: httpx.Response, route: Route) -> bool:
        if route.face == "page" and route.method in SAFE:
            return response.status_code == 303 and response.headers["Location"].startswith("/login?next=/")
        return response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"

    closed = [route for route in ROUTES if route.access != "open"]
    assert await findings(closed, asked, is_right) == []


@in_service
async def test_a_token_that_may_only_read_changes_nothing(served: Served) -> None:
    await served.ada.put("/api/sessions/s", json={})

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        yield await ask(served.reader, route)

    closed = [route for route in unsafe() if route.access != "open"]
    assert await findings(closed, asked, lambda response, _: response.status_code == 403) == []
    assert all(route.access in ("write", "open") for route in unsafe()), "an unsafe method is there to write"
    assert (await served.ada.get("/api/sessions/s")).headers["ETag"] == '"1"'


@in_service
async def test_another_owners_session_is_as_if_there_were_none(served: Served) -> None:
    """The bytes are the same: nobody learns of a session by asking for it."""
    routes = [route for route in ROUTES if "{session}" in route.path and route.method != "PUT"]
    before = [seen(await ask(served.bob, route, **body_of(route))) for route in routes]
    await served.ada.put("/api/sessions/s", json={"name": "the canary"})
    await served.ada.post("/api/sessions/s/messages", json={"text": "the canary sings"})
    after = [seen(await ask(served.bob, route, **body_of(route))) for route in routes]
    assert [route.path for route, one, other in zip(routes, before, after, strict=True) if one != other] == []
    assert [route.path for route, (status, *_) in zip(routes, before, strict=True) if status < 400] == []
    full = (await served.ada.get("/api/sessions/s")).json()["id"]
    by_full_id = [seen(await ask(served.bob, route, path=path_of(route, full))) for route in routes]
    assert [route.path for route, (status, *_) in zip(routes, by_full_id, strict=True) if status < 400] == []
    assert not any(b"canary" in body for _, body, _ in (*after, *by_full_id))


def seen(response: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return what distinguishes two responses for a client. A logged problem's number is new each time."""
    assert response.status_code != 500
    return response.status_code, response.content, sorted(response.headers.items())


@in_service
async def test_no_route_takes_more_than_it_should(served: Served) -> None:
    """The limit counts the length that is announced, and the bytes that come."""
    most = served.service.settings.limits.body
    large = b'{"text": "' + b"x" * most + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 65_536):
            yield large[start : start + 65_536]

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        headers = {"Content-Type": kind_of(route)}
        yield await ask(served.operator, route, content=large, headers=headers)
        if route.body is not None:
            yield await ask(served.operator, route, content=pieces(), headers=headers)

    assert await findings(unsafe(), asked, lambda response, _: response.status_code == 413) == []


def kind_of(route: Route) -> str:
    return "application/x-www-form-urlencoded" if route.face == "page" else "application/json"


@in_service
async def test_bodies_that_are_not_json_are_refused(served: Served) -> None:
    """A page of another site can send texts and forms without the browser's permission."""

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/xml", ""):
            yield await ask(served.operator, route, content=b"a=1", headers={"Content-Type": kind})
        other = "application/json" if route.face == "page" else "application/x-www-form-urlencoded"
        yield await ask(served.operator, route, content=b"a=1", headers={"Content-Type": other})

    assert await findings(unsafe(), asked, lambda response, _: response.status_code == 415) == []


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": 1e999}',
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"unknown": 1}',
        b'{"text": {"a": [1]}, "wait": "soon", "to": [], "calls": 7, "name": {}, "add": "x"}',
    ],
    ids=["deep", "deep objects", "bytes", "surrogate", "infinite", "half", "list", "null", "text", "unknown", "types"],
)
@in_service
async def test_a_body_that_makes_no_sense_is_a_clients_mistake(served: Served, content: bytes) -> None:
    """The answer is a 4xx with a reason, and nothing changes."""
    await served.ada.put("/api/sessions/s", json={})

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        yield await ask(served.ada, route, content=content, headers={"Content-Type": kind_of(route)})

    routes = [route for route in unsafe() if route.face not in ("page",) and route.body is not None]
    assert await findings(routes, asked, lambda response, _: 400 <= response.status_code < 500) == []
    assert (await served.ada.get("/api/sessions/s")).headers["ETag"] == '"1"'


@in_service
async def test_forms_of_many_fields_are_refused_at_once(served: Served) -> None:
    """Reading them would keep every other client waiting."""

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        for content in (b"&a=1" * 250_000, b"a&" * 500_000):
            yield await ask(served.ada, route, content=content, headers={"Content-Type": kind_of(route)})

    forms = [route for route in unsafe() if route.face == "page"]
    assert await findings(forms, asked, lambda response, _: response.status_code == 422) == []


@in_service
async def test_numbers_that_are_too_large_are_a_clients_mistake(served: Served) -> None:
    """They may be in queries, or a body's length."""
    await served.ada.put("/api/sessions/s", json={})

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        if not route.is_stream:
            for name in () if route.query is None else route.query.__struct_fields__:  # type: ignore[attr-defined]
                for number in ("9" * 30, "-1", "9223372036854775808", "1e400", "%00"):
                    yield await ask(served.ada, route, path=f"{path_of(route)}?{name}={number}", **body_of(route))
        yield await ask(served.ada, route, headers={"Content-Length": "9" * 5_000})

    assert await findings(ROUTES, asked, lambda response, _: response.status_code < 500) == []


@in_service
async def test_tricks_in_paths_and_queries_are_refused(served: Served) -> None:
    """Nothing fails, no file is reached, and no header can be forged."""

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        body = body_of(route) if route.method not in SAFE else {}
        for trick in HOSTILE:
            if "{" in route.path:
                path = re.sub(r"{\w+(?::\w+)?}", lambda _, trick=trick: trick, route.path)
                yield await ask(served.operator, route, path=path, **body)
            yield await ask(served.operator, route, path=f"{path_of(route)}?version={trick}&next={trick}", **body)
        yield await ask(served.operator, route, path=f"{path_of(route)}?limit=1&limit=2", **body)

    def is_right(response: httpx.Response, route: Route) -> bool:
        is_refused = response.status_code < 500 and "root:" not in response.text
        leads_away = "evil" in response.headers.get("location", "")
        return is_refused and not leads_away and "x-injected" not in response.headers

    assert await findings(ROUTES, asked, is_right) == []


@in_service
async def test_no_stored_text_makes_a_header(served: Served) -> None:
    """A name, a tag, a message or a key may contain ends of lines: no header has them."""
    trick = "a\r\nX-Injected: yes\r\n\r\n<b>"
    await served.ada.put("/api/sessions/s", json={"name": trick, "tags": [trick]})
    await served.ada.put("/api/sessions/s", json={})
    await served.ada.post("/api/sessions/s/messages", json={"text": trick, "wait": 10})
    for verb, body in (("rename", {"name": trick}), ("tag", {"add": [trick]}), ("fork", {"name": trick})):
        assert (await served.ada.post(f"/api/sessions/s/{verb}", json=body)).status_code < 500

    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        if route.method == "GET" and not route.is_stream:
            for query in ("", "?format=markdown") if route.path.endswith("/export") else ("",):
                yield await ask(served.ada, route, path=path_of(route) + query)

    def is_right(response: httpx.Response, _: Route) -> bool:
        lines = [part for header in response.headers.raw for part in header]
        return response.status_code < 500 and not any(b"\r" in part or b"\n" in part for part in lines)

    assert await findings(ROUTES, asked, is_right) == []


@in_service
async def test_paths_that_are_not_in_the_table_are_nothing(served: Served) -> None:
    for path in ("/api/../api/sessions", "//api/sessions", "/api//sessions", "/static/../app.py", "/static/%2e%2e/x"):
        assert await status_of(served, path) == 404, path
    seen = await served.operator.get("/nowhere", headers={"Accept": "text/html,*/*"})
    assert (seen.status_code, seen.headers["Content-Type"]) == (404, "text/html; charset=utf-8")
    program = await served.operator.get("/api/nowhere", headers={"Accept": "text/html,*/*"})
    assert (program.status_code, program.headers["Content-Type"]) == (404, "application/problem+json")
    for method in ("TRACE", "CONNECT", "PATCH", "PROPFIND", "OPTIONS"):
        response = await served.operator.request(method, "/api/sessions")
        assert response.status_code == 405, method


async def status_of(served: Served, path: str) -> int:
    """Ask for a path as it is: httpx would normalise it first."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    secret = served.operator.headers["Authorization"].encode()
    headers = [(b"host", b"127.0.0.1:7433"), (b"authorization", secret)]
    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "headers": headers}
    given = {"query_string": b"", "scheme": "http", "server": ("127.0.0.1", 7433), "client": ("127.0.0.1", 1)}
    await served.app({**scope, **given}, receive, send)
    return int(sent[0]["status"])


@in_service
async def test_every_response_has_the_headers_that_protect_browsers(served: Served) -> None:
    async def asked(route: Route) -> AsyncIterator[httpx.Response]:
        if not route.is_stream:
            yield await ask(served.operator, route)
        yield await ask(served.nobody, route)
        yield await ask(served.operator, route, headers={"Host": "evil.example"})

    def is_right(response: httpx.Response, _: Route) -> bool:
        has_all = all(response.headers.get(name) == value for name, value in HEADERS.items())
        return has_all and "cache-control" in response.headers and "access-control-allow-origin" not in response.headers

    assert await findings(ROUTES, asked, is_right) == []
