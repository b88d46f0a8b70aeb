"""Responses as OpenAI's own client asks for them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.server.openai_serving import Reached, checked, heard, over_http, text_in

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Look at the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


@over_http
async def test_a_response_is_created_and_read_again(served: Reached) -> None:
    made = checked(await served.ada.responses.create(model="clerk", input="hello", metadata={"order": "7"}))
    assert made.output_text == "You said: hello"
    assert (made.status, made.model, made.metadata) == ("completed", "clerk", {"order": "7"})
    assert made.usage is not None
    assert made.usage.total_tokens == 15
    assert checked(await served.ada.responses.retrieve(made.id)).model_dump() == made.model_dump()


@over_http
async def test_a_response_is_streamed(served: Reached) -> None:
    """The pieces add up to the answer, and what the stream ends with is what can be read afterwards."""
    events = await heard(await served.ada.responses.create(model="clerk", input="slow", stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1
    last = events[-1].response
    assert text_in(events) == last.output_text
    assert (await served.ada.responses.retrieve(last.id)).model_dump() == last.model_dump()
