"""Responses as OpenAI's own client requests them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.server.openai_serving import Reached, checked, heard, over_http, text_in

pytestmark = pytest.mark.sample(2)  # make torture runs all

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
    """The pieces add up to the answer, and the end of the stream is what can be read afterwards."""
    events = await heard(await served.ada.responses.create(model="clerk", input="slow", stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1
    last = events[-1].response
    assert text_in(events) == last.output_text
    assert (await served.ada.responses.retrieve(last.id)).model_dump() == last.model_dump()


@over_http
async def test_the_newest_response_is_continued_in_its_session(served: Reached) -> None:
    first = await served.ada.responses.create(model="clerk", input="one")
    second = checked(await served.ada.responses.create(model="clerk", input="two", previous_response_id=first.id))
    assert second.output_text == "You said: one / two"
    assert second.previous_response_id == first.id
    assert len(await served.sessions.headers()) == 1


@over_http
async def test_an_older_response_is_continued_in_a_fork(served: Reached) -> None:
    """Later messages of the session are not part of the fork, and stay as they were."""
    first = await served.ada.responses.create(model="clerk", input="one")
    second = await served.ada.responses.create(model="clerk", input="two", previous_response_id=first.id)
    other = await served.ada.responses.create(model="clerk", input="three", previous_response_id=first.id)
    assert other.output_text == "You said: one / three"
    third = await served.ada.responses.create(model="clerk", input="four", previous_response_id=second.id)
    assert third.output_text == "You said: one / two / four"
    assert (await served.ada.responses.retrieve(first.id)).output_text == "You said: one"
    assert len(await served.sessions.headers()) == 2


@over_http
async def test_two_at_once_continue_one_response(served: Reached) -> None:
    """One continues in the session and the others in forks; none is refused, and none sees the others."""
    first = await served.ada.responses.create(model="clerk", input="one")
    made = await asyncio.gather(
        *(
            served.ada.responses.create(model="clerk", input=f"and {number}", previous_response_id=first.id)
            for number in range(4)
        )
    )
    assert [each.output_text for each in made] == [f"You said: one / and {number}" for number in range(4)]
    assert len({each.id for each in made}) == 4
    assert len(await served.sessions.headers()) == 4


@over_http
async def test_another_agent_continues(served: Reached) -> None:
    first = await served.ada.responses.create(model="clerk", input="one")
    second = await served.ada.responses.create(model="cook", input="two", previous_response_id=first.id)
    assert (second.model, second.output_text) == ("cook", "You said: one / two")
    assert served.driver.requests[-1].system_prompt == "Cook."


@over_http
async def test_instructions_are_for_one_response(served: Reached) -> None:
    first = checked(await served.ada.responses.create(model="clerk", input="one", instructions="Speak French."))
    assert first.instructions == "Speak French."
    second = await served.ada.responses.create(model="clerk", input="two", previous_response_id=first.id)
    assert second.instructions is None
    prompts = [request.system_prompt for request in served.driver.requests]
    assert prompts == ["Be brief.\n\nSpeak French.", "Be brief."]


@over_http
async def test_a_response_in_the_background_is_followed(served: Reached) -> None:
    """It exists at once, and a stream of it can be cut anywhere and continued."""
    made = checked(await served.ada.responses.create(model="clerk", input="slow", background=True))
    assert made.status in ("queued", "in_progress")
    assert made.background is True
    whole: list[Any] = []
    while not whole or whole[-1].type != "response.completed":
        after = whole[-1].sequence_number if whole else -1
        async with await served.ada.responses.retrieve(made.id, stream=True, starting_after=after) as stream:
            async for event in stream:
                whole.append(event)
                if len(whole) % 3 == 0:
                    break
    numbers = [event.sequence_number for event in whole]
    assert numbers == sorted(set(numbers))
    assert text_in(whole) == whole[-1].response.output_text == "".join(f"piece {number}, " for number in range(6))
    kinds = [event.type for event in whole]
    assert kinds.count("response.created") == kinds.count("response.output_item.added") == 1
    assert (await served.ada.responses.retrieve(made.id)).status == "completed"


@over_http
async def test_a_stream_of_the_record_agrees_with_the_live_one(served: Reached) -> None:
    """From every number that was sent, the rest is the same."""
    live = await heard(await served.ada.responses.create(model="clerk", input="slow", stream=True))
    response = live[-1].response
    for place, event in enumerate(live):
        rest = await heard(
            await served.ada.responses.retrieve(response.id, stream=True, starting_after=event.sequence_number)
        )
        assert text_in(rest) == text_in(live[place + 1 :])
        told = {each.sequence_number: each.type for each in live[place + 1 :]}
        assert [told.get(each.sequence_number) for each in rest] == [each.type for each in rest]


@over_http
async def test_a_response_is_cancelled(served: Reached) -> None:
    """The text so far is kept, and a stream of it ends."""
    made = await served.ada.responses.create(model="clerk", input="hang", background=True)
    stream = await served.ada.responses.retrieve(made.id, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    ended = checked(await served.ada.responses.cancel(made.id))
    assert ended.status == "cancelled"
    assert ended.output_text == "It takes "
    rest = [event async for event in stream]
    assert (rest[-1].type, rest[-1].response.status) == ("response.incomplete", "cancelled")
    assert (await served.ada.responses.cancel(made.id)).status == "cancelled"


@over_http
async def test_a_response_that_waits_is_cancelled(served: Reached) -> None:
    """A response that waits behind another cannot be cancelled, and the error says why."""
    conversation = await served.ada.conversations.create()
    begun = await served.ada.responses.create(
        model="clerk", input="hang", background=True, conversation=conversation.id
    )
    second = await served.ada.responses.create(
        model="clerk", input="two", background=True, conversation=conversation.id
    )
    assert second.status == "queued"
    async for event in await served.ada.responses.retrieve(begun.id, stream=True):
        if event.type == "response.in_progress":
            break
    with pytest.raises(openai.ConflictError):
        await served.ada.responses.cancel(second.id)
    await served.ada.responses.cancel(begun.id)


@over_http
async def test_a_tool_of_the_client_is_called(served: Reached) -> None:
    first = checked(await served.ada.responses.create(model="clerk", input="call weather", tools=[WEATHER]))
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.arguments, first.status) == ("weather", '{"city":"Oslo"}', "completed")
    assert first.tools[0].to_dict() == WEATHER
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = checked(
        await served.ada.responses.create(model="clerk", input=output, previous_response_id=first.id, tools=[WEATHER])
    )
    assert second.output_text == "It is: rain"
    assert second.previous_response_id == first.id
    assert (await served.ada.responses.retrieve(first.id)).model_dump() == first.model_dump()
    again = await served.ada.responses.create(model="clerk", input=output, previous_response_id=first.id)
    assert again.model_dump() == second.model_dump()
    output[0]["output"] = "sun"
    other = checked(await served.ada.responses.create(model="clerk", input=output, previous_response_id=first.id))
    assert other.output_text == "It is: sun"
    third = await served.ada.responses.create(model="clerk", input="thanks", previous_response_id=second.id)
    assert third.output_text == "You said: call weather / thanks"


@over_http
async def test_a_call_of_the_client_is_streamed(served: Reached) -> None:
    made = await heard(
        await served.ada.responses.create(model="clerk", input="call weather stock", tools=[WEATHER], stream=True)
    )
    kinds = [event.type for event in made]
    for kind in (
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
    ):
        assert kind in kinds
    last = made[-1].response
    assert sorted(item.type for item in last.output) == ["function_call", "mcp_call"]
    (call,) = [item for item in last.output if item.type == "function_call"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    rest = await heard(
        await served.ada.responses.create(model="clerk", input=output, previous_response_id=last.id, stream=True)
    )
    assert rest[-1].response.output_text == text_in(rest)
    assert "rain" in text_in(rest)
    assert (await served.ada.responses.retrieve(rest[-1].response.id)).model_dump() == rest[-1].response.model_dump()


@over_http
async def test_a_tool_of_the_agent_is_not_the_clients_to_call(served: Reached) -> None:
    made = checked(await served.ada.responses.create(model="clerk", input="call stock"))
    call, message = made.output
    assert call.type == "mcp_call"
    assert (call.name, call.output, call.status, call.server_label) == ("stock", "7 of tea", "completed", "perdure")
    assert message.type == "message"


@over_http
async def test_calls_are_approved_and_denied(served: Reached) -> None:
    first = checked(await served.ada.responses.create(model="clerk", input="call refund refund"))
    requests = first.output
    assert [each.type for each in requests] == ["mcp_approval_request"] * 2
    decided: Any = [
        {"type": "mcp_approval_response", "approval_request_id": requests[0].id, "approve": True},
        {"type": "mcp_approval_response", "approval_request_id": requests[1].id, "approve": False, "reason": "enough"},
    ]
    with pytest.raises(openai.UnprocessableEntityError):
        await served.ada.responses.create(model="clerk", input="never mind", previous_response_id=first.id)
    second = checked(await served.ada.responses.create(model="clerk", input=decided, previous_response_id=first.id))
    assert "order 7 is refunded" in second.output_text
    assert "enough" in second.output_text
    (call,) = [item for item in second.output if item.type == "mcp_call"]
    assert call.approval_request_id == requests[0].id
    again = await served.ada.responses.create(model="clerk", input=decided, previous_response_id=first.id)
    assert again.id == second.id
    decided[0]["approve"] = False
    with pytest.raises(openai.ConflictError):
        await served.ada.responses.create(model="clerk", input=decided, previous_response_id=first.id)
    items = await served.ada.responses.input_items.list(second.id, order="asc")
    assert [(item.approval_request_id, item.approve) for item in items.data] == [  # type: ignore[union-attr]
        (requests[0].id, True),
        (requests[1].id, False),
    ]


@over_http
async def test_an_answer_has_the_form_that_was_asked_for(served: Reached) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form: Any = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    made = checked(await served.ada.responses.create(model="clerk", input="json", text={"format": form}))
    assert made.output_text == '{"city": "Oslo"}'
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.to_dict() == form
    assert (await served.ada.responses.retrieve(made.id)).text == made.text


@over_http
async def test_a_conversation_that_was_held_elsewhere_is_continued(served: Reached) -> None:
    """All roles are accepted, and completed calls with their outputs."""
    history: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    made = await served.ada.responses.create(model="clerk", input=history)
    assert made.output_text == "It is: rain"
    replayed: Any = [{"role": "user", "content": "call stock"}]
    first = await served.ada.responses.create(model="clerk", input=replayed)
    replayed += [item.model_dump() for item in first.output] + [{"role": "user", "content": "thanks"}]
    second = await served.ada.responses.create(model="clerk", input=replayed)
    assert second.output_text == "You said: call stock / thanks"
    assert [message.role for message in served.driver.requests[-1].messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


@over_http
async def test_images_are_taken(served: Reached) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    given: Any = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": pixel}],
        }
    ]
    made = await served.ada.responses.create(model="clerk", input=given)
    assert made.output_text == "You said: What is it?"
    (item,) = (await served.ada.responses.input_items.list(made.id)).data
    assert item.content[1].image_url == pixel  # type: ignore[union-attr]
    given[0]["content"][1] = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(openai.UnprocessableEntityError):
        await served.ada.responses.create(model="clerk", input=given)


@over_http
async def test_nothing_is_kept_of_a_response_that_is_not_stored(served: Reached) -> None:
    made = checked(await served.ada.responses.create(model="clerk", input="hello", store=False))
    assert made.output_text == "You said: hello"
    with pytest.raises(openai.NotFoundError):
        await served.ada.responses.retrieve(made.id)
    events = await heard(
        await served.ada.responses.create(
            model="clerk", input="call weather stock", tools=[WEATHER], store=False, stream=True
        )
    )
    assert sorted(item.type for item in events[-1].response.output) == ["function_call", "mcp_call"]
    failed = await served.ada.responses.create(model="clerk", input="fail", store=False)
    assert failed.status == "failed"
    assert len(await served.sessions.headers()) == 0


@over_http
async def test_a_run_that_fails_is_a_response_that_failed(served: Reached) -> None:
    made = checked(await served.ada.responses.create(model="clerk", input="fail"))
    assert made.status == "failed"
    assert made.error is not None
    assert "the provider is down" in made.error.message
    events = await heard(await served.ada.responses.create(model="clerk", input="fail", stream=True))
    assert events[-1].type == "response.failed"
    again = await served.ada.responses.create(model="clerk", input="hello", previous_response_id=made.id)
    assert again.status == "completed"


@over_http
async def test_the_same_key_is_the_same_response(served: Reached) -> None:
    """This holds for the first, one that continues, and one that continues in a fork. Another body is refused."""
    key = {"Idempotency-Key": "k1"}
    first, same = [await served.ada.responses.create(model="clerk", input="one", extra_headers=key) for _ in range(2)]
    assert same.model_dump() == first.model_dump()
    for number in range(2):
        header = {"Idempotency-Key": f"next-{number}"}
        made = [
            await served.ada.responses.create(
                model="clerk", input="two", previous_response_id=first.id, extra_headers=header
            )
            for _ in range(2)
        ]
        assert made[0].model_dump() == made[1].model_dump()
    assert len(await served.sessions.headers()) == 2
    last = await served.ada.responses.create(model="clerk", input="three")
    at_once = await asyncio.gather(
        *(
            served.ada.responses.create(
                model="cook", input="four", previous_response_id=last.id, extra_headers={"Idempotency-Key": "once"}
            )
            for _ in range(4)
        )
    )
    assert len({each.id for each in at_once}) == 1
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await served.ada.responses.create(model="clerk", input="other", extra_headers=key)
    assert caught.value.param == "Idempotency-Key"
    assert (await served.bob.responses.create(model="clerk", input="mine", extra_headers=key)).id != first.id


@over_http
async def test_a_response_is_deleted(served: Reached) -> None:
    """A response that others continue stays."""
    made = await served.ada.responses.create(model="clerk", input="one")
    await served.ada.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await served.ada.responses.retrieve(made.id)
    first = await served.ada.responses.create(model="clerk", input="one")
    await served.ada.responses.create(model="clerk", input="two", previous_response_id=first.id)
    with pytest.raises(openai.ConflictError):
        await served.ada.responses.delete(first.id)


@over_http
async def test_a_conversation_is_compacted(served: Reached) -> None:
    """The returned item is the input of later responses; the response itself stays as it was."""
    made = await served.ada.responses.create(model="clerk", input="first words")
    for number in range(8):
        made = await served.ada.responses.create(model="clerk", input=f"number {number}", previous_response_id=made.id)
    short = await served.ada.responses.compact(model="clerk", previous_response_id=made.id)
    (item,) = short.output
    assert (item.type, short.object) == ("compaction", "response.compaction")
    given: Any = [item.to_dict(), {"role": "user", "content": "go on"}]
    after = checked(await served.ada.responses.create(model="clerk", input=given))
    assert "first words" not in after.output_text
    assert after.output_text.endswith("go on")
    still = await served.ada.responses.create(model="clerk", input="and you?", previous_response_id=made.id)
    assert "first words" in still.output_text


@over_http
async def test_the_model_is_asked_as_one_request_says(served: Reached) -> None:
    """The response shows the settings that were used, and the next one has none of them."""
    asked: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "max_output_tokens": 77, "reasoning": {"effort": "low"}}
    first = checked(await served.ada.responses.create(model="clerk", input="one", **asked))
    assert (first.temperature, first.top_p, first.max_output_tokens) == (0.2, 0.9, 77)
    assert first.reasoning is not None
    assert first.reasoning.effort == "low"
    await served.ada.responses.create(model="clerk", input="two", previous_response_id=first.id)
    models = [request.model for request in served.driver.requests]
    assert [(each.temperature, each.max_tokens, each.thinking) for each in models] == [(0.2, 77, "low"), (None,) * 3]
    assert [each.settings.get("top_p") for each in models] == [0.9, None]
    once = await served.ada.responses.create(model="clerk", input="three", store=False, **asked)
    assert (once.temperature, served.driver.requests[-1].model.temperature) == (0.2, 0.2)


@over_http
async def test_calls_of_a_sub_agent_are_settled(served: Reached) -> None:
    """The client sees the calls that would be made, and decides on them."""
    first = checked(await served.ada.responses.create(model="clerk", input="call helper"))
    (request,) = [item for item in first.output if item.type == "mcp_approval_request"]
    assert request.name == "helper"
    assert '"refund"' in request.arguments
    decided: Any = [{"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}]
    second = checked(await served.ada.responses.create(model="clerk", input=decided, previous_response_id=first.id))
    assert "order 7 is refunded" in second.output_text
