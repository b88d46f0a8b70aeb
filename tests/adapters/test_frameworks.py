"""A redacted item, and a message of perdure's own, are valid for the framework's own types."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.adapters.items import ITEMS
from tests.adapters.test_forms import FORMS, redacted, stored

from perdure import Media, Message, Text, Thinking, ToolCall
from perdure.loop.compaction.draft import with_results

OWN = [
    Message.user("Hi", id="1"),
    Message.user("See:", Media("image/png", data=b"abc", name="a.png"), id="2"),
    Message.user("See:", Media("image/png", url="https://a.example/b.png"), id="3"),
    Message.assistant(Thinking("Hm."), "One moment.", tool_calls=[ToolCall("add", {"a": 1}, "c-1")], id="4"),
    Message.tool("c-1", {"sum": 3}, name="add", id="5"),
    Message.tool("c-1", "broken", name="add", is_error=True, id="6"),
    Message.system("Be brief.", id="7"),
    Message("assistant", (Text("a"), Text("b")), "8"),
]


def given(name: str) -> list[Any]:
    """Return a form's items in all the ways that they differ from the framework's own."""
    form = FORMS[name]
    kept = [stored(form.message(item)) for item in ITEMS[name]]
    masked = [with_results(message, "[masked]", strategy="observation_mask") for message in kept]
    messages = [*map(redacted, kept), *masked, *map(redacted, masked), *OWN, *map(redacted, OWN)]
    return [json.loads(msgspec.json.encode(item)) for message in messages for item in form.items(message)]


def test_openai_takes_them() -> None:
    """Every item is one that a request to the Responses API may have."""
    pytest.importorskip("agents")
    from openai.types.responses.response_input_item_param import ResponseInputItemParam
    from pydantic import TypeAdapter

    adapter = TypeAdapter(list[ResponseInputItemParam])
    for item in given("openai"):
        assert msgspec.json.encode(list(adapter.validate_python([item])[0])), item


def test_langchain_takes_them() -> None:
    """Every item becomes a message with the same id, and a result names its call."""
    messages = pytest.importorskip("langchain_core.messages")
    for item in given("langchain"):
        typed = item if "data" in item else {"type": item["type"], "data": item}
        (message,) = messages.messages_from_dict([typed])
        assert message.id == typed["data"]["id"]
        if message.type == "tool":
            assert message.tool_call_id in ("toolu_1", "c-1")


def test_adk_takes_them() -> None:
    """Every item is an event, and none of its keys is unknown."""
    events = pytest.importorskip("google.adk.events")
    for item in given("adk"):
        event = events.Event.model_validate(item)
        assert event.id == item["id"]
        assert event.author


def test_claude_takes_them() -> None:
    """The transcript with one entry redacted is still one chain, from the first entry to the last."""
    sessions = pytest.importorskip("claude_agent_sdk._internal.sessions")
    form = FORMS["claude"]
    chained = [dict(item) for item in ITEMS["claude"] if item["type"] in ("user", "assistant")]
    for before, item in pairwise(chained):
        item["parentUuid"] = before["uuid"]
    for place in range(len(chained)):
        kept = [form.message(item) for item in chained]
        kept[place] = redacted(kept[place])
        (*back,) = (item for message in kept for item in form.items(message))
        assert [entry["uuid"] for entry in sessions._build_conversation_chain(back)] == [e["uuid"] for e in chained]


def test_pydantic_ai_takes_them() -> None:
    """Every item is a request or a response."""
    messages = pytest.importorskip("pydantic_ai.messages")
    for item in given("pydantic-ai"):
        (message,) = messages.ModelMessagesTypeAdapter.validate_python([item])
        assert message.kind == item["kind"]


def test_strands_takes_them() -> None:
    """Every item is a session message, and Strands knows each of its blocks."""
    session = pytest.importorskip("strands.types.session")
    from pydantic import TypeAdapter
    from strands.types.content import ContentBlock

    adapter = TypeAdapter(ContentBlock)
    for item in given("strands"):
        message = session.SessionMessage.from_dict(item).to_message()
        assert message["role"] in ("user", "assistant")
        for block in message["content"]:
            assert adapter.validate_python(block) == block


def test_agno_takes_them() -> None:
    """Every item is a message of Agno's."""
    message = pytest.importorskip("agno.models.message")
    for item in given("agno"):
        assert message.Message.model_validate(item).role in ("system", "user", "assistant", "tool")
