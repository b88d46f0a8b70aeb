"""Responses beside others: keys, cancels, a full service, sessions that are closed or go away during a stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from tests.server.openai_serving import Reached, heard, over_http, reached, text_in

from perdure.server.openai.ids import ResponseId
from perdure.server.settings import Limits, Settings

WEATHER: Any = {"type": "function", "name": "weather", "description": "Look outside.", "parameters": {"type": "object"}}


def keyed(key: str) -> dict[str, Any]:
    return {"extra_headers": {"Idempotency-Key": key}}


async def ask(served: Reached, text: str, **more: Any) -> Response:
    made: Response = await served.ada.responses.create(model="clerk", input=text, **more)
    return made


def session_of(response: Response) -> str:
    found = ResponseId.of(response.id)
    assert found is not None
    return found.session


async def refused(work: Any, about: str, status: int = 422) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await work
    assert caught.value.status_code == status, caught.value.response.text
    assert about in caught.value.response.text


@over_http
async def test_a_key_stands_for_one_place(served: Reached) -> None:
    """The same message under the same key is refused behind another response, wherever that is."""
    one = await ask(served, "one")
    two = await ask(served, "two", previous_response_id=one.id)
    elsewhere = await ask(served, "elsewhere")
    said = {"text": "three", **keyed("k")}
    third = await ask(served, **said, previous_response_id=two.id)
    assert (await ask(served, **said, previous_response_id=two.id)).id == third.id
    for previous in (one.id, third.id, elsewhere.id, None):
        await refused(ask(served, **said, previous_response_id=previous), "Idempotency-Key")
    await refused(ask(served, **said, previous_response_id=two.id, metadata={"a": "b"}), "Idempotency-Key")
    await refused(ask(served, "four", previous_response_id=two.id, **keyed("k")), "Idempotency-Key")
    forked = await ask(served, "other", previous_response_id=one.id, **keyed("f"))
    assert session_of(forked) != session_of(one)
    await refused(ask(served, "other", previous_response_id=elsewhere.id, **keyed("f")), "Idempotency-Key")
    assert (await ask(served, "other", previous_response_id=one.id, **keyed("f"))).id == forked.id


@over_http
async def test_a_key_that_is_refused_changes_nothing(served: Reached) -> None:
    first = await ask(served, "one", **keyed("k"))
    before = await served.sessions.info(session_of(first))
    again = {"input": "one", "previous_response_id": first.id, **keyed("k")}
    await refused(served.ada.responses.create(model="cook", **again), "Idempotency-Key")
    assert (await served.sessions.info(session_of(first))).version == before.version


@over_http
async def test_the_same_request_may_be_told_in_another_way(served: Reached) -> None:
    """Streaming is not part of the request that a key stands for."""
    first = await ask(served, "one", **keyed("k"))
    stream = await served.ada.responses.create(model="clerk", input="one", stream=True, **keyed("k"))
    events = await heard(stream)
    assert events[-1].response.id == first.id


@over_http
async def test_cancelling_a_response_that_is_over_stops_no_other(served: Reached) -> None:
    conversation = await served.ada.conversations.create()
    waiting = [
        await ask(served, text, conversation=conversation.id, background=True) for text in ("slow", "slow again", "one")
    ]
    over = await ended(served, waiting[0].id)
    assert over.status == "completed"
    await served.ada.responses.cancel(waiting[0].id)
    assert (await ended(served, waiting[1].id)).status == "completed"
    assert (await ended(served, waiting[2].id)).status == "completed"


async def ended(served: Reached, response_id: str) -> Response:
    async with asyncio.timeout(15):
        while True:
            found: Response = await served.ada.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)


async def test_nothing_is_begun_if_there_is_no_room_for_its_stream(tmp_path: Path) -> None:
    settings = Settings(limits=Limits(streams_of_owner=0))
    async with reached(f"sqlite:///{tmp_path}/served.db", settings=settings) as served:
        with pytest.raises(openai.RateLimitError):
            await served.ada.responses.create(model="clerk", input="hello", stream=True)
        assert not (await served.sessions.list()).all()


@over_http
async def test_a_stream_tells_that_its_session_is_gone(served: Reached) -> None:
    response = await ask(served, "slow", background=True)
    stream = await served.ada.responses.retrieve(response.id, stream=True)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if len(events) == 3:
            await served.sessions.cancel(session_of(response))
            await erased(served, session_of(response))
    assert events[-1].type == "error"
    assert events[-1].code in ("not_found", "session_not_found")


async def erased(served: Reached, session_id: str) -> None:
    from perdure.errors import SessionBusy

    async with asyncio.timeout(10):
        while True:
            try:
                await served.sessions.erase(session_id)
                return
            except SessionBusy:
                await asyncio.sleep(0.01)


@over_http
async def test_what_is_not_kept_is_streamed_in_pieces(served: Reached) -> None:
    stream = await served.ada.responses.create(model="clerk", input="slow", store=False, stream=True)
    events = await heard(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 2
    assert text_in(events) == events[-1].response.output_text == "".join(f"piece {number}, " for number in range(6))
    assert events[-1].type == "response.completed"
    assert not (await served.sessions.list()).all()


@over_http
async def test_what_is_not_kept_tells_of_its_calls(served: Reached) -> None:
    called = await served.ada.responses.create(model="clerk", input="call stock", store=False, stream=True)
    events = await heard(called)
    assert [item.type for item in events[-1].response.output] == ["mcp_call", "message"]
    outside = await served.ada.responses.create(
        model="clerk", input="call weather", store=False, stream=True, tools=[WEATHER]
    )
    events = await heard(outside)
    assert [item.type for item in events[-1].response.output] == ["function_call"]
    assert "response.function_call_arguments.done" in [event.type for event in events]


@over_http
async def test_what_is_not_kept_is_refused_in_its_stream_too(served: Reached) -> None:
    clash = {**WEATHER, "name": "stock"}
    asked: dict[str, Any] = {"model": "clerk", "input": "one", "store": False, "tools": [clash]}
    await refused(served.ada.responses.create(**asked), "stock")
    events = [event async for event in await served.ada.responses.create(**asked, stream=True)]
    assert (events[-1].type, events[-1].code) == ("error", "invalid_parameter")


@over_http
async def test_a_client_that_leaves_stops_what_is_not_kept(served: Reached) -> None:
    stream = await served.ada.responses.create(model="clerk", input="hang", store=False, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    async with asyncio.timeout(5):
        while served.service.open_streams or served.sessions._connection.alone:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.02)


@over_http
async def test_a_conversation_that_is_closed_takes_no_response(served: Reached) -> None:
    conversation = await served.ada.conversations.create()
    first = await ask(served, "one", conversation=conversation.id)
    await served.sessions.suspend(session_of(first))
    await refused(ask(served, "two", conversation=conversation.id), "session_not_active", 409)
    assert (await ask(served, "two", previous_response_id=first.id)).status == "completed"  # in a fork


@over_http
async def test_a_compaction_refuses_another_agent_than_the_conversation_has(served: Reached) -> None:
    first = await ask(served, "one")
    url, headers = f"{served.url}/v1/responses/compact", {"Authorization": f"Bearer {served.ada.api_key}"}
    async with httpx.AsyncClient(headers=headers) as client:
        for model, status in (("clerk", 200), ("cook", 422), ("nobody", 422)):
            body = {"model": model, "previous_response_id": first.id}
            assert (await client.post(url, json=body)).status_code == status, model
