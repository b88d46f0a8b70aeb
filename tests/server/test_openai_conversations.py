"""Conversations as OpenAI's own client uses them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pydantic
import pytest
from openai.types.conversations import Conversation, ConversationItem
from tests.server.openai_serving import Reached, checked, over_http

_items: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ConversationItem)
WEATHER: Any = {"type": "function", "name": "weather", "parameters": None, "strict": False}


@over_http
async def test_a_conversation_is_created_changed_and_deleted(served: Reached) -> None:
    said: Any = [{"type": "message", "role": "user", "content": "hello"}]
    made = await served.ada.conversations.create(items=said, metadata={"order": "7"})
    assert Conversation.model_validate(made.model_dump()) == made
    assert (await served.ada.conversations.retrieve(made.id)).metadata == {"order": "7"}
    changed = await served.ada.conversations.update(made.id, metadata={"order": "8"})
    assert changed.metadata == {"order": "8"}
    assert (await served.ada.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await served.ada.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await served.ada.responses.create(model="clerk", input="hello", conversation=made.id)


@over_http
async def test_responses_of_a_conversation_follow_each_other(served: Reached) -> None:
    """Responses that are requested at once wait for their turn."""
    conversation = await served.ada.conversations.create()
    made = await asyncio.gather(
        *(served.ada.responses.create(model="cook", input=word, conversation=conversation.id) for word in "xyz")
    )
    assert sorted(len(each.output_text.split(" / ")) for each in made) == [1, 2, 3]
    last = checked(await served.ada.responses.create(model="cook", input="one", conversation=conversation.id))
    assert last.conversation is not None
    assert (last.conversation.id, last.model) == (conversation.id, "cook")
    assert len(await served.sessions.headers()) == 1


@over_http
async def test_items_are_listed_page_by_page(served: Reached) -> None:
    conversation = await served.ada.conversations.create()
    await served.ada.responses.create(model="clerk", input="call stock", conversation=conversation.id)
    first = await served.ada.responses.create(
        model="clerk", input="call weather", conversation=conversation.id, tools=[WEATHER]
    )
    output: Any = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}]  # type: ignore[union-attr]
    second = await served.ada.responses.create(model="clerk", input=output, conversation=conversation.id)
    again = await served.ada.responses.create(model="clerk", input=output, conversation=conversation.id)
    assert again.id == second.id
    listed = [item async for item in served.ada.conversations.items.list(conversation.id, order="asc", limit=3)]
    assert [item.type for item in listed] == [
        "message",
        "mcp_call",
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    for item in listed:
        plain = item.model_dump(exclude_unset=True)
        assert _items.validate_python(plain).model_dump(exclude_unset=True) == plain
        found = await served.ada.conversations.items.retrieve(item.id or "", conversation_id=conversation.id)
        assert found == item
    newest = await served.ada.conversations.items.list(conversation.id, limit=1)
    assert newest.data[0].id == listed[-1].id


@over_http
async def test_items_are_added(served: Reached) -> None:
    conversation = await served.ada.conversations.create()
    said: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "yes?"}]
    added = await served.ada.conversations.items.create(conversation.id, items=said)
    assert [item.role for item in added.data] == ["user", "assistant"]  # type: ignore[union-attr]
    made = await served.ada.responses.create(model="clerk", input="two", conversation=conversation.id)
    assert made.output_text == "You said: one / two"
    with pytest.raises(openai.UnprocessableEntityError):
        await served.ada.conversations.items.create(conversation.id, items=[])


@over_http
async def test_the_same_key_is_the_same_conversation(served: Reached) -> None:
    said: Any = [{"role": "user", "content": "one"}]
    made = [await served.ada.conversations.create(items=said, extra_headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert made[0] == made[1]
    assert len((await served.ada.conversations.items.list(made[0].id)).data) == 1
