"""Headers, parameters and options that a service cannot follow are refused, never ignored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from tests.server.serving import Served, in_service, serving

from perdure.server.call import Call
from perdure.server.gate import Caller
from perdure.server.settings import Limits, Settings
from perdure.server.sse import until_told

OPENAI = {"model": "assistant", "input": "hello"}


def refused(response: httpx.Response, about: str) -> None:
    """Require a 422 that names the wrong part."""
    assert response.status_code == 422, (response.status_code, response.text)
    assert about in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/sessions/a/undo", {}),
        ("/api/sessions/a/fork", {}),
        ("/api/sessions/a/inject", {"messages": [{"role": "user", "content": "one"}]}),
        ("/api/sessions/a/approve", {}),
        ("/v1/responses/compact", {"input": "hello"}),
        ("/v1/responses", {**OPENAI, "store": False}),
        ("/agui", {"threadId": "a", "runId": "r", "messages": []}),
    ],
)
@in_service
async def test_a_key_is_refused_where_a_request_is_done_twice(served: Served, path: str, body: Any) -> None:
    await served.ada.put("/api/sessions/a", json={})
    refused(await served.ada.post(path, json=body, headers={"Idempotency-Key": "k"}), "Idempotency-Key")


@in_service
async def test_a_version_is_refused_where_nothing_is_bound_to_it(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    bound = {"If-Match": '"1"'}
    refused(await served.ada.post("/v1/responses", json=OPENAI, headers=bound), "If-Match")
    refused(await served.ada.get("/v1/models", headers=bound), "If-Match")
    agui = {"threadId": "a", "runId": "r", "messages": []}
    refused(await served.ada.post("/agui", json=agui, headers=bound), "If-Match")


@in_service
async def test_a_parameter_is_refused_where_there_is_none(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    refused(await served.ada.post("/api/sessions/a/messages?wait=0", json={"text": "hello"}), "wait")
    refused(await served.ada.post("/v1/responses?stream=true", json=OPENAI), "stream")
    refused(await served.ada.get("/v1/models?limit=1"), "limit")
    assert (await served.ada.get("/api/sessions/a/messages")).json()["total"] == 0
    refused(await served.ada.get("/api/sessions?q=tea&order=updated"), "order")
    streamed = {"Accept": "text/event-stream"}
    refused(await served.ada.get("/api/sessions/a/events?limit=2", headers=streamed), "limit")


@in_service
async def test_a_body_is_refused_where_there_is_none(served: Served) -> None:
    made = (await served.ada.post("/v1/responses", json=OPENAI)).json()
    refused(await served.ada.post(f"/v1/responses/{made['id']}/cancel", json={"reason": "no"}), "reason")


@in_service
async def test_a_priority_is_refused_for_what_does_not_wait(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    for when_busy in ("refuse", "steer"):
        sent = {"text": "hello", "when_busy": when_busy, "priority": 3}
        refused(await served.ada.post("/api/sessions/a/messages", json=sent), "priority")


@in_service
async def test_a_key_that_was_never_used_has_no_reply(served: Served) -> None:
    await served.ada.put("/api/sessions/a", json={})
    assert (await served.ada.get("/api/sessions/a/replies/nothing")).status_code == 404
    later = {"text": "later", "at": "2999-01-01T00:00:00Z"}
    headers = {"Idempotency-Key": "later"}
    assert (await served.ada.post("/api/sessions/a/messages", json=later, headers=headers)).status_code == 202
    assert (await served.ada.get("/api/sessions/a/replies/later")).status_code == 202


@in_service
async def test_a_key_stands_for_one_new_session(served: Served) -> None:
    """The same request returns it, another body is refused, and a session with a given name is there in any case."""
    headers, body = {"Idempotency-Key": "k"}, {"tags": ["x"], "name": "One"}
    first, again = [await served.ada.post("/api/sessions", json=body, headers=headers) for _ in range(2)]
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    for other in ({"tags": ["y"], "name": "One"}, {"tags": ["x"], "name": "Two"}, {}):
        refused(await served.ada.post("/api/sessions", json=other, headers=headers), "Idempotency-Key")
    assert (await served.bob.post("/api/sessions", json={}, headers=headers)).status_code == 201


@in_service
async def test_a_key_stands_for_one_conversation(served: Served) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"items": [{"role": "user", "content": "hello"}], "metadata": {"topic": "tea"}}
    made = await asyncio.gather(*(served.ada.post("/v1/conversations", json=body, headers=headers) for _ in range(4)))
    assert {each.status_code for each in made} == {200}
    (found,) = {each.json()["id"] for each in made}
    items = (await served.ada.get(f"/v1/conversations/{found}/items")).json()
    assert len(items["data"]) == 1
    assert (await served.ada.get(f"/v1/conversations/{found}")).json()["metadata"] == {"topic": "tea"}
    refused(await served.ada.post("/v1/conversations", json={}, headers=headers), "Idempotency-Key")


@in_service
async def test_a_front_end_may_send_what_is_empty_or_not_meant_for_us(served: Served) -> None:
    """It may be the state of a client that has none, or something that another agent has sealed."""
    said = {"id": "m1", "role": "user", "content": "hello", "encryptedValue": "sealed"}
    given = {"threadId": "t", "runId": "r", "messages": [said], "forwardedProps": {}, "tools": [], "context": []}
    empty: tuple[Any, ...] = ({}, None, [])
    for state in empty:
        told = await served.ada.post("/agui", json={**given, "state": state})
        assert told.status_code == 200, told.text
        assert "RUN_FINISHED" in told.text
    refused(await served.ada.post("/agui", json={**given, "state": {"page": 2}}), "$.state")


@in_service
async def test_an_owner_has_keys_of_their_own(served: Served) -> None:
    headers = {"Idempotency-Key": "k"}
    clients = (served.ada, served.bob, served.operator)
    made = [await client.post("/v1/responses", json=OPENAI, headers=headers) for client in clients]
    assert [each.status_code for each in made] == [200, 200, 200]
    assert len({each.json()["id"] for each in made}) == 3


async def test_a_stream_that_finds_no_room_says_so(tmp_path: Path) -> None:
    """There was room at the request, but other streams took it first."""
    settings = Settings(limits=Limits(streams_of_owner=1))
    async with serving(f"sqlite:///{tmp_path}/a.db", settings) as served:
        call = Call(served.service, Request({"type": "http", "headers": []}), Caller("ada"), None, None)
        ready = asyncio.Event()

        async def events() -> AsyncIterator[ServerSentEvent]:
            yield ServerSentEvent("one")
            await ready.wait()

        first, second = (until_told(call, events()) for _ in range(2))  # type: ignore[arg-type]  # as they are made
        assert (await anext(first)).data == "one"
        assert [each.event async for each in second] == ["end"]
        ready.set()
        assert [each async for each in first] == []
        assert served.service.open_streams == 0
