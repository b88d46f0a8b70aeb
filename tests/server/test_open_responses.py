"""Open Responses: the cases of its compliance suite, with words of our own, checked against its schema.

The specification is that of 2026-04-24. The cases are those of openresponses/openresponses, src/lib/compliance-tests.ts
at 0cb939c, and the required fields those of schema/components/schemas/ResponseResource.json at 3452c01. The suite
itself is a program for Bun, and is not run here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import httpx
import pytest
from tests.server.openai_serving import Reached, over_http

NUMBER, TEXT, NOTHING = (int, float), (str,), (type(None),)
RESPONSE: dict[str, tuple[type, ...]] = {
    "id": TEXT,
    "object": TEXT,
    "created_at": (int,),
    "completed_at": (int, *NOTHING),
    "status": TEXT,
    "incomplete_details": (dict, *NOTHING),
    "model": TEXT,
    "previous_response_id": (*TEXT, *NOTHING),
    "instructions": (*TEXT, list, *NOTHING),
    "output": (list,),
    "error": (dict, *NOTHING),
    "tools": (list,),
    "tool_choice": (*TEXT, dict),
    "truncation": TEXT,
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": (int,),
    "temperature": NUMBER,
    "reasoning": (dict, *NOTHING),
    "user": (*TEXT, *NOTHING),
    "usage": (dict, *NOTHING),
    "max_output_tokens": (int, *NOTHING),
    "max_tool_calls": (int, *NOTHING),
    "store": (bool,),
    "background": (bool,),
    "service_tier": TEXT,
    "metadata": (dict,),
    "safety_identifier": (*TEXT, *NOTHING),
    "prompt_cache_key": (*TEXT, *NOTHING),
}
"""The fields that every response has, and their types."""
ITEMS: dict[str, tuple[str, ...]] = {
    "message": ("id", "status", "role", "content"),
    "function_call": ("id", "call_id", "name", "arguments", "status"),
}
PLACE = ("item_id", "output_index", "content_index")
EVENTS: dict[str, tuple[str, ...]] = {
    "response.created": ("response",),
    "response.queued": ("response",),
    "response.in_progress": ("response",),
    "response.completed": ("response",),
    "response.output_item.added": ("output_index", "item"),
    "response.output_item.done": ("output_index", "item"),
    "response.content_part.added": (*PLACE, "part"),
    "response.content_part.done": (*PLACE, "part"),
    "response.output_text.delta": (*PLACE, "delta", "logprobs"),
    "response.output_text.done": (*PLACE, "text", "logprobs"),
    "response.function_call_arguments.delta": ("item_id", "output_index", "delta"),
    "response.function_call_arguments.done": ("item_id", "output_index", "arguments"),
}
"""The fields of the events that a stream of the suite's cases may have. An event that is not here is not allowed."""
DOT = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Look at the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": [user("Say hello in three words.")]},
    "system prompt": {
        "input": [{"type": "message", "role": "system", "content": "Speak as a sailor."}, user("Say hello.")]
    },
    "image": {
        "input": [
            user(
                [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{DOT}"},
                ]
            )
        ]
    },
    "multi-turn": {
        "input": [
            user("My name is Ada."),
            {"type": "message", "role": "assistant", "content": "Hello Ada!"},
            user("What is my name?"),
        ]
    },
    "tool calling": {"input": [user("call weather")], "tools": [WEATHER]},
}
GIVES = {"tool calling": "function_call"}
"""The kind of item that a case has to return, if it is not a message."""


def check(response: dict[str, Any]) -> dict[str, Any]:
    """Require the fields of a response and of everything in it."""
    for name, types in RESPONSE.items():
        assert name in response, f"it has no {name}"
        assert isinstance(response[name], types), f"{name}: {response[name]!r}"
    assert response["object"] == "response"
    for item in response["output"]:
        check_item(item)
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= tool.keys()
    if response["usage"] is not None:
        counted = {"input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"}
        assert counted <= response["usage"].keys()
    assert response["text"]["format"]["type"] == "text"
    return response


def check_item(item: dict[str, Any]) -> None:
    assert set(ITEMS[item["type"]]) <= item.keys()
    for part in item.get("content", ()):
        assert part.keys() >= {"type", "text", "annotations", "logprobs"}


def check_event(event: dict[str, Any]) -> None:
    assert isinstance(event["sequence_number"], int)
    assert set(EVENTS[event["type"]]) <= event.keys()
    if "response" in event:
        check(event["response"])
    if "item" in event:
        check_item(event["item"])


async def posted(served: Reached, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {served.ada.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=20) as client:
        response = await client.post(f"{served.url}/v1/responses", json={"model": "clerk", **body})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("case", CASES)
@over_http
async def test_a_case_is_answered(served: Reached, case: str) -> None:
    response = check((await posted(served, {**CASES[case], "stream": False})).json())
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == [GIVES.get(case, "message")]


@pytest.mark.parametrize("case", CASES)
@over_http
async def test_a_case_is_streamed(served: Reached, case: str) -> None:
    told = await posted(served, {**CASES[case], "stream": True})
    assert told.headers["content-type"].startswith("text/event-stream")
    *blocks, done = [block for block in told.text.split("\n\n") if "data: " in block]
    assert done.endswith("data: [DONE]")
    events = [json.loads(block.split("data: ", 1)[1]) for block in blocks]
    for block, event in zip(blocks, events, strict=True):
        assert f"event: {event['type']}\n" in block
        check_event(event)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    piece = "function_call_arguments" if case == "tool calling" else "output_text"
    expected = ["response.output_item.added", f"response.{piece}.delta", f"response.{piece}.done"]
    assert [kind for kind in dict.fromkeys(kinds) if kind in expected] == expected
    items = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert items == [GIVES.get(case, "message")]
