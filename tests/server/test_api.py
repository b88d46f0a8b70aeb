"""The HTTP API: sessions, messages, verbs, and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.server.serving import Served, in_service

from perdure.errors import PerdureError
from perdure.server.guard import PROBE
from perdure.server.openapi import document_of
from perdure.server.problems import STATUS, problem_of, status_of
from perdure.server.table import ROUTES


@in_service
async def test_a_session_is_created_once(served: Served) -> None:
    """The client gives an id, or a key for the request."""
    made = await served.ada.put("/api/sessions/order-7", json={"name": "Seven", "tags": ["north"]})
    assert made.status_code == 201
    assert made.headers["ETag"] == '"1"'
    assert made.json()["tags"] == ["north"]
    again = await served.ada.put("/api/sessions/order-7", json={"name": "Eight"})
    assert (again.status_code, again.json()["name"]) == (200, "Seven")
    first, second = [
        await served.ada.post("/api/sessions", json={}, headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert (await served.ada.get(first.headers["Location"])).json()["id"] == first.json()["id"]
    other = await served.bob.post("/api/sessions", json={}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 201


@in_service
async def test_an_agent_that_is_not_served_is_refused(served: Served) -> None:
    refused = await served.ada.post("/api/sessions", json={"agent": "nobody"})
    assert refused.status_code == 422
    assert refused.json()["path"] == "$.agent"
    assert (await served.ada.get("/api/sessions")).json()["sessions"] == []


@in_service
async def test_a_message_is_answered_once(served: Served) -> None:
    """The same key again gives the same answer; another body under it is refused."""
    await served.ada.put("/api/sessions/a", json={})
    key = {"Idempotency-Key": "evt-1"}
    first = await served.ada.post("/api/sessions/a/messages", json={"text": "hello"}, headers=key)
    assert first.status_code == 200
    assert "hello" in first.json()["text"]
    again = await served.ada.post("/api/sessions/a/messages", json={"text": "hello"}, headers=key)
    assert again.json() == first.json()
    other = await served.ada.post("/api/sessions/a/messages", json={"text": "bye"}, headers=key)
    assert other.status_code == 422
    said = (await served.ada.get("/api/sessions/a/messages")).json()
    assert [each["role"] for each in said["messages"]] == ["user", "assistant"]
    assert (said["total"], said["next"]) == (2, None)


@in_service
async def test_an_answer_can_be_fetched_later(served: Served) -> None:
    """Without waiting, the message is accepted, and `Location` leads to the answer."""
    await served.ada.put("/api/sessions/a", json={})
    taken = await served.ada.post("/api/sessions/a/messages", json={"text": "hello", "wait": 0})
    assert taken.status_code == 202
    found = await served.ada.get(taken.headers["Location"], params={"wait": 20})
    assert found.status_code == 200
    assert "hello" in found.json()["text"]


@in_service
async def test_pages_are_bounded(served: Served) -> None:
    for number in range(5):
        await served.ada.put(f"/api/sessions/s{number}", json={})
    seen: list[str] = []
    after: dict[str, Any] = {}
    while True:
        page = (await served.ada.get("/api/sessions", params={"limit": 2, **after})).json()
        seen += [each["id"].rpartition(".")[2] for each in page["sessions"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == ["s4", "s3", "s2", "s1", "s0"]
    assert (await served.ada.get("/api/sessions", params={"limit": 201})).status_code == 422


@in_service
async def test_a_search_finds_what_is_no_longer_shown(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    await served.ada.post("/api/sessions/a/messages", json={"text": "the parrot is blue"})
    await served.ada.post("/api/sessions/a/reset", json={})
    (found,) = (await served.ada.get("/api/sessions", params={"q": "parrot"})).json()["sessions"]
    assert "parrot" in found["hits"][0]["snippet"]
    assert (await served.bob.get("/api/sessions", params={"q": "parrot"})).json()["sessions"] == []


@in_service
async def test_a_change_can_be_bound_to_a_version(served: Served) -> None:
    """If the session has changed since, the answer is 412, and nothing is changed."""
    await served.ada.put("/api/sessions/a", json={})
    await served.ada.post("/api/sessions/a/messages", json={"text": "hello"})
    version = (await served.ada.get("/api/sessions/a")).headers["ETag"]
    changed = await served.ada.post("/api/sessions/a/trim", json={"keep_last": 1}, headers={"If-Match": version})
    assert changed.status_code == 200
    late = await served.ada.post("/api/sessions/a/undo", json={}, headers={"If-Match": version})
    assert late.status_code == 412
    assert (await served.ada.get("/api/sessions/a")).headers["ETag"] == changed.headers["ETag"]
    assert (await served.ada.post("/api/sessions/a/undo", json={})).status_code == 200
    odd = await served.ada.post("/api/sessions/a/undo", json={}, headers={"If-Match": "seven"})
    assert odd.status_code == 422


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("rewind", {"to": 1}),
        ("trim", {"keep_last": 1}),
        ("reset", {}),
        ("compact", {"compact_strategy": "truncate", "keep_last": 1}),
        ("suspend", {}),
        ("rename", {"name": "A name"}),
        ("tag", {"add": ["north"]}),
        ("inject", {"messages": [{"role": "user", "content": "by the way"}]}),
    ],
)
@in_service
async def test_verbs_make_a_version(served: Served, verb: str, body: dict[str, Any]) -> None:
    await served.ada.put("/api/sessions/a", json={})
    await served.ada.post("/api/sessions/a/messages", json={"text": "hello"})
    before = (await served.ada.get("/api/sessions/a")).json()["version"]
    changed = await served.ada.post(f"/api/sessions/a/{verb}", json=body)
    assert changed.status_code == 200, changed.text
    assert changed.json()["version"] == before + 1
    versions = (await served.ada.get("/api/sessions/a/versions")).json()["versions"]
    assert versions[0]["version"] == before + 1


@in_service
async def test_a_fork_is_a_session_of_its_own(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    await served.ada.post("/api/sessions/a/messages", json={"text": "hello"})
    made = await served.ada.post("/api/sessions/a/fork", json={"id": "b"})
    assert made.status_code == 201
    await served.ada.post("/api/sessions/b/messages", json={"text": "bye"})
    diff = (await served.ada.get("/api/sessions/a/diff", params={"with": "b"})).json()
    assert (diff["common"], len(diff["left"]), len(diff["right"])) == (2, 0, 2)
    family = (await served.ada.get("/api/sessions/b/ancestry")).json()
    assert family["parent"].endswith(".a")


@in_service
async def test_a_call_is_approved(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    asked = await served.ada.post("/api/sessions/a/messages", json={"text": "refund(order=7)"})
    (call,) = asked.json()["pending_calls"]
    assert call["name"] == "refund"
    other = await served.ada.post("/api/sessions/a/approve", json={"calls": ["0" * 64]})
    assert other.status_code == 409
    done = await served.ada.post("/api/sessions/a/approve", json={"calls": [call["digest"]]})
    assert done.status_code == 200, done.text
    assert "refunded" in done.json()["text"]
    for verb, body in (("approve", {}), ("deny", {"reason": "No."}), ("approve", {"calls": [call["digest"]]})):
        late = await served.ada.post(f"/api/sessions/a/{verb}", json=body)
        assert (late.status_code, late.json()["title"]) == (409, "PendingCallsChanged")
    runs = (await served.ada.get("/api/sessions/a/runs")).json()["runs"]
    whole = await served.ada.get(f"/api/sessions/a/runs/{runs[0]['loop_id']}")
    assert whole.json()["turns"]


@in_service
async def test_a_call_is_answered_from_outside(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    tools = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    body = {"text": 'call weather {"city": "Oslo"}', "external_tools": tools}
    asked = await served.ada.post("/api/sessions/a/messages", json=body)
    (call,) = asked.json()["pending_calls"]
    assert (call["name"], call["external"]) == ("weather", True)
    done = await served.ada.post("/api/sessions/a/answer", json={"answers": {call["id"]: "it snows"}})
    assert "it snows" in done.json()["text"]


@in_service
async def test_others_sessions_are_as_none(served: Served) -> None:
    """The bytes are the same, whether somebody else has such a session or nobody does."""
    await served.ada.put("/api/sessions/mine", json={})
    whole = (await served.ada.get("/api/sessions/mine")).json()["id"]
    for asked in (f"/api/sessions/{whole}", f"/api/sessions/{whole}/messages", f"/api/sessions/{whole}/events"):
        theirs = await served.bob.get(asked)
        await served.ada.delete("/api/sessions/mine", params={"erase": True})
        none = await served.bob.get(asked)
        assert (theirs.status_code, theirs.content) == (none.status_code, none.content)
        assert theirs.status_code == 404
        await served.ada.put("/api/sessions/mine", json={})


@in_service
async def test_a_session_is_hidden_or_erased(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    assert (await served.ada.delete("/api/sessions/a")).status_code == 204
    assert (await served.ada.get("/api/sessions")).json()["sessions"] == []
    assert (await served.ada.post("/api/sessions/a/restore", json={})).status_code == 200
    erased = await served.ada.delete("/api/sessions/a", params={"erase": True})
    assert len(erased.json()["erased"]) == 1
    assert (await served.ada.get("/api/sessions/a")).status_code == 404


@in_service
async def test_an_operator_sees_what_waits(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    at = "2126-01-31T18:00:00Z"
    later = await served.ada.post("/api/sessions/a/messages", json={"text": "hello", "at": at})
    assert later.status_code == 202
    assert len((await served.operator.get("/api/queue")).json()["delayed"]) == 1
    assert (await served.bob.get("/api/queue")).json()["delayed"] == []


@in_service
async def test_health_and_metrics(served: Served) -> None:
    assert (await served.nobody.get("/healthz")).text == "ok\n"
    assert (await served.nobody.get("/readyz")).status_code == 401
    assert (await served.ada.get("/readyz")).text == "ready\n"
    told = (await served.operator.get("/metrics")).text
    assert 'perdure_http_requests_total{method="GET",route="/readyz",status="200"} 1' in told
    assert "perdure_sessions_parked 0" in told
    assert told.endswith("# EOF\n")
    assert "perdure_sessions_parked" not in (await served.ada.get("/metrics")).text
    served.service.closing.set()
    assert (await served.ada.get("/readyz")).status_code == 503


def test_every_route_is_in_the_document() -> None:
    """One table makes the app and the document."""
    told = document_of(ROUTES)
    named = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    assert named == {(route.method, route.path.replace(":path", "")) for route in ROUTES if route.face != "page"}
    names = [operation["operationId"] for methods in told["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    text = json.dumps(told)
    for reference in {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in told["components"]["schemas"]


def test_every_error_has_a_status() -> None:
    """An error that is not the client's fault says only where to look."""
    import perdure.errors as errors

    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PerdureError)]
    assert kinds
    for kind in kinds:
        assert 400 <= status_of(kind) <= 599
    assert STATUS.keys() <= {kind.__name__ for kind in kinds}
    told = problem_of(errors.StoreError("postgresql://user:secret@host cannot be reached"))
    assert (told.status, "secret" in str(told.response().body)) == (503, False)
    told = problem_of(RuntimeError("a path: /etc"))
    assert (told.status, told.title, "/etc" in told.detail) == (500, "InternalError", False)


@in_service
async def test_events_are_followed_and_resumed(served: Served) -> None:
    """A stream that is cut and resumed by the id of its last event has exactly the events on record."""
    await served.ada.put("/api/sessions/a", json={})
    for text in ("one", "two", "three"):
        await served.ada.post("/api/sessions/a/messages", json={"text": text})
    page = (await served.ada.get("/api/sessions/a/events", params={"limit": 200})).json()["events"]
    whole = [each["cursor"] for each in page]
    seen: list[int] = []
    last = "0"
    while len(seen) < len(whole):
        left = min(4, len(whole) - len(seen))
        got = await _some_events(served.app, served.ada.headers["Authorization"], last, left)
        seen += [int(number) for number in got]
        last = got[-1]
    assert seen == whole


async def _some_events(app: Any, token: str, last: str, most: int) -> list[str]:
    """Return the ids of the next events of a stream, and cut it."""
    found: list[str] = []
    asked = [b""]
    is_cut = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("id: "):
                found.append(line.removeprefix("id: "))
        if len(found) >= most:
            is_cut.set()

    async def receive() -> dict[str, Any]:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await is_cut.wait()
        return {"type": "http.disconnect"}

    headers = {"host": "127.0.0.1:7433", "authorization": token, "accept": "text/event-stream", "last-event-id": last}
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/sessions/a/events",
        "query_string": b"",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7433),
        "http_version": "1.1",
        "root_path": "",
    }
    work = asyncio.ensure_future(app(scope, receive, send))
    cut = asyncio.ensure_future(is_cut.wait())
    await asyncio.wait({work, cut}, timeout=10, return_when="FIRST_COMPLETED")
    is_cut.set()
    await asyncio.wait({work}, timeout=5)
    work.cancel()
    cut.cancel()
    return found[:most]


@in_service
async def test_what_is_refused_before_it_is_routed(served: Served) -> None:
    """Refused are: another host, another site's page, no token, a read-only token, a large body and bad JSON."""
    await served.ada.put("/api/sessions/a", json={})
    path = "/api/sessions/a/undo"
    wrong: list[tuple[httpx.Response, int]] = [
        (await served.ada.get("/api/sessions", headers={"Host": "evil.example"}), 421),
        (await served.ada.post(path, json={}, headers={"Origin": "https://evil.example"}), 403),
        (await served.ada.post(path, json={}, headers={"Sec-Fetch-Site": "cross-site"}), 403),
        (await served.nobody.post(path, json={}), 401),
        (await served.reader.post(path, json={}), 403),
        (
            await served.ada.post(path, content=b"x" * (1 << 20) + b"x", headers={"Content-Type": "application/json"}),
            413,
        ),
        (await served.ada.post(path, content=b"a=b", headers={"Content-Type": "text/plain"}), 415),
        (await served.ada.post(path, content=b"{", headers={"Content-Type": "application/json"}), 400),
        (await served.ada.post(path, json={"more": 1}), 422),
        (await served.ada.post(path, content=b"[" * 90_000, headers={"Content-Type": "application/json"}), 400),
        (await served.ada.get("/api/sessions", params={"bogus": 1}), 422),
        (await served.ada.get("/api/nothing"), 404),
        (await served.ada.delete("/api/sessions"), 405),
    ]
    for response, status in wrong:
        assert response.status_code in (status, 422 if status == 400 else status), (response.request.url, response.text)
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.json()["type"].startswith("urn:perdure:problem:")
    assert (await served.ada.get("/api/sessions/a")).headers["ETag"] == '"1"'


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
@in_service
async def test_every_route_is_guarded(served: Served, route: Any) -> None:
    """Each route is asked without a token, by a reader, by another name and from another site."""
    path = route.path.replace("{session}", "a").replace("{run}", "r").replace("{key}", "k")
    is_page = route.face == "page"
    body: dict[str, Any] = {} if route.body is None else {"data": {"version": "1"}} if is_page else {"json": {}}
    nobody = await served.nobody.request(route.method, path, **body)
    refused = 303 if is_page and route.method == "GET" else 401  # a browser is sent to the page for signing in
    assert (nobody.status_code == refused) == (route.access != "open"), nobody.text
    elsewhere = await served.ada.request(route.method, path, headers={"Host": "x.example"}, **body)
    assert elsewhere.status_code == (200 if path == PROBE else 421)
    if route.access == "write":
        assert (await served.reader.request(route.method, path, **body)).status_code == 403
        foreign = await served.ada.request(route.method, path, headers={"Origin": "http://x.example"}, **body)
        assert foreign.status_code == 403


@in_service
async def test_a_value_that_is_not_known_is_answered_with_those_that_are(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    told = [
        (await served.ada.get("/api/sessions?status=asleep")).json()["detail"],
        (await served.ada.post("/api/sessions/a/messages", json={"text": "hi", "when_busy": "shout"})).json()["detail"],
        (await served.ada.post("/api/sessions/a/messages", json={"txt": "hi"})).json()["detail"],
    ]
    assert "there are: active, suspended" in told[0]
    assert "there are: " in told[1]
    assert "queue" in told[1]
    assert "there are: " in told[2]
    assert "text" in told[2]
