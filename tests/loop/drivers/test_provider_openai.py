"""The real OpenAI client against a server that speaks chat completions, and one that speaks responses."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Mapping

import pytest

from perdure import RequestRefused, codec
from perdure.model.message import Media, Message, Opaque, Text, Thinking, ToolCall
from perdure.model.usage import Usage
from perdure.protocols import Delta

from . import wire
from .asking import ADD, KEY, asking
from .loopback import Stream

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 50,
    "total_tokens": 150,
    "prompt_tokens_details": {"cached_tokens": 40},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
HELLO = wire.chat({"role": "assistant", "content": "Hel"}, {"content": "lo."}, usage=USAGE)


async def test_text_is_streamed_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text comes in pieces as it is written, and whole at the end, with the provider's metadata."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        reply = await made.ask("openai:gpt-4o")
    assert made.deltas == [Delta("text", "Hel"), Delta("text", "lo.")]
    assert reply.message.parts == (Text("Hello."),)
    assert reply.message.role == "assistant"
    assert (reply.response.finish_reason, reply.response.model) == ("stop", "gpt-4o")
    assert (reply.response.provider, reply.response.response_id) == ("openai", "chatcmpl-1")


async def test_usage_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the provider's, priced from the list that comes with the package."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        reply = await made.ask("openai:gpt-4o")
    used = reply.response.usage
    assert used == Usage(100, 50, cache_read_tokens=40, reasoning_tokens=20, cost=used.cost)
    assert 0.0 < used.cost < 0.01


async def test_an_unknown_model_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no price list knows is not an error."""
    chunks = [chunk.replace(b"gpt-4o", b"my-own-model") for chunk in HELLO]
    async with asking(monkeypatch, Stream(chunks)) as made:
        reply = await made.ask("openai:my-own-model")
    assert (reply.response.usage.output_tokens, reply.response.usage.cost) == (50, 0.0)


async def test_the_request_holds_the_prompt_and_the_history_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system prompt comes first, then every message in its place, with results paired with their calls."""
    history = (
        Message.user("What is 2 + 3, and 1 + 1?"),
        Message.assistant(
            "Let me see.",
            tool_calls=(ToolCall("add", {"a": 2, "b": 3}, "call_1"), ToolCall("add", {"a": 1, "b": 1}, "call_2")),
        ),
        Message.tool("call_1", 5, name="add"),
        Message.tool("call_2", "out of order", name="add", is_error=True),
        Message.assistant("5, and I do not know."),
        Message.system("Be brief."),
        Message.user("Thanks."),
    )
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", history, system_prompt="You add.", tools=(ADD,))
    arguments = ['{"a":2,"b":3}', '{"a":1,"b":1}']
    assert made.server.requests[0].path == "/v1/chat/completions"
    assert made.sent["messages"] == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "What is 2 + 3, and 1 + 1?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": arguments[n - 1]}}
                for n in (1, 2)
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "tool", "tool_call_id": "call_2", "content": '{"error":"out of order"}'},
        {"role": "assistant", "content": "5, and I do not know."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Thanks."},
    ]


async def test_the_system_prompt_stands_before_system_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's own prompt comes first even if the history begins with a system message."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", (Message.system("So far: …"), Message.user("Go on.")), system_prompt="You add.")
    assert [message["content"] for message in made.sent["messages"]] == ["You add.", "So far: …", "Go on."]


async def test_the_request_holds_tools_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools go with name, description and schema; the model's settings go under the provider's names."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", tools=(ADD,), temperature=0.3, max_tokens=77, settings={"seed": 7})
    [tool] = made.sent["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("add", "Add two numbers.")
    assert tool["function"]["parameters"]["properties"] == ADD.parameters["properties"]
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    assert (made.sent["temperature"], made.sent["max_completion_tokens"], made.sent["seed"]) == (0.3, 77, 7)
    assert (made.sent["model"], made.sent["stream"]) == ("gpt-4o", True)


async def test_a_tool_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call keeps the provider's id, and its arguments are streamed as they are written."""
    deltas = wire.chat_calls(("call_9", "add", ['{"a": 2,', ' "b": 3}']))
    async with asking(monkeypatch, Stream(wire.chat(*deltas, finish="tool_calls"))) as made:
        reply = await made.ask("openai:gpt-4o", tools=(ADD,))
    assert reply.message.parts == (ToolCall("add", {"a": 2, "b": 3}, "call_9"),)
    assert reply.response.finish_reason == "tool_call"
    assert {(delta.kind, delta.call_id, delta.name) for delta in made.deltas} == {("tool_call", "call_9", "add")}
    assert "".join(delta.text for delta in made.deltas) == '{"a": 2, "b": 3}'


async def test_parallel_tool_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose arguments come interleaved are kept apart."""
    deltas = wire.chat_calls(("call_1", "add", ['{"a": 2,', ' "b": 3}']), ("call_2", "add", ['{"a": 1', ', "b": 1}']))
    async with asking(monkeypatch, Stream(wire.chat(*deltas, finish="tool_calls"))) as made:
        reply = await made.ask("openai:gpt-4o", tools=(ADD,))
    first, second = reply.message.tool_calls
    assert (first.id, first.arguments) == ("call_1", {"a": 2, "b": 3})
    assert (second.id, second.arguments) == ("call_2", {"a": 1, "b": 1})
    assert "".join(delta.text for delta in made.deltas if delta.call_id == "call_2") == '{"a": 1, "b": 1}'


async def test_a_server_that_repeats_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that a small server repeats, in one answer or in two, becomes distinct, also in the deltas."""
    deltas = wire.chat_calls(("call_0", "add", ["{}"]), ("call_0", "add", ["{}"]))
    earlier = (Message.user("hi"), Message.assistant(ToolCall("add", {}, "call_0")), Message.tool("call_0", 1))
    async with asking(monkeypatch, Stream(wire.chat(*deltas, finish="tool_calls"))) as made:
        reply = await made.ask("openai:gpt-4o", earlier, tools=(ADD,))
    ids = [call.id for call in reply.message.tool_calls]
    assert len({"call_0", *ids}) == 3
    assert {delta.call_id for delta in made.deltas} == set(ids)


async def test_arguments_that_are_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that cannot be read or stored reach the tool's own check as text."""
    bad = ['{"a": 2', '{"a": NaN}', '{"a": 123456789012345678901234567890}', "[1]"]
    deltas = wire.chat_calls(*((f"call_{place}", "add", [text]) for place, text in enumerate(bad)))
    async with asking(monkeypatch, Stream(wire.chat(*deltas, finish="tool_calls"))) as made:
        reply = await made.ask("openai:gpt-4o", tools=(ADD,))
    assert [call.arguments for call in reply.message.tool_calls] == [{"INVALID_JSON": text} for text in bad]
    assert codec.decode_message(codec.encode_message(reply.message)) == reply.message


async def test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is sent as its bytes or its address, in its place among the words."""
    shown = Message.user(
        "Compare", Media("image/png", data=b"\x89PNG"), "with", Media("image/png", url="https://example.com/b.png")
    )
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", (shown,))
    [message] = made.sent["messages"]
    text, first, with_, second = message["content"]
    assert (text["text"], with_["text"]) == ("Compare", "with")
    assert first["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert second["image_url"]["url"] == "https://example.com/b.png"


async def test_the_name_and_the_type_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of OpenAI's API get the name, before the file; texts go as plain ones."""
    shown = Message.user(
        "Compare",
        Media("application/pdf", data=b"%PDF", name="report.pdf"),
        Media("image/png", data=b"\x89PNG", name="plot.png"),
        Media("application/json", data=b'{"a":1}', name="data.json"),
    )
    async with asking(monkeypatch, Stream(HELLO), Stream(wire.responses(message_item("Hello.")))) as made:
        await made.ask("openai:gpt-4o", (shown,))
        content = made.sent["messages"][0]["content"]
        await made.ask("openai-responses:gpt-5", (shown,))
        given = made.sent["input"][0]["content"]
    assert [part.get("text") for part in content[:2]] == ["Compare", "[file: report.pdf]"]
    assert content[2]["file"]["file_data"] == "data:application/pdf;base64,JVBERg=="
    assert (content[3]["text"], content[5]["text"]) == ("[image: plot.png]", "[file: data.json]")
    assert content[4]["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert 'id="data.json" type="text/plain"' in content[6]["text"]
    assert '{"a":1}' in content[6]["text"]
    assert [part.get("text") for part in given[1::2]] == [
        "[file: report.pdf]",
        "[image: plot.png]",
        "[file: data.json]",
    ]
    assert given[2]["file_data"] == "data:application/pdf;base64,JVBERg=="
    assert given[4]["image_url"] == "data:image/png;base64,iVBORw=="


async def test_a_file_that_the_model_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is sent, and the error says so."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        with pytest.raises(RequestRefused, match="does not take a file of this type"):
            await made.ask("openai:gpt-4o", (Message.user("See", Media("video/mp4", data=b"x")),))
        assert made.server.requests == []


async def test_a_file_in_a_store_is_read_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message names it by its hash; the request has the function that reads it."""
    body = b"\x89PNG" + bytes(5000)
    key = codec.hash_of_bytes(body)
    asked: list[str] = []

    async def read(hashes: Collection[str]) -> Mapping[str, bytes]:
        asked.extend(hashes)
        return {key: body}

    shown = Message.user("See", Media("image/png", hash=key, size=len(body)))
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", (shown, Message.assistant("Yes."), shown), read_files=read)
    urls = [message["content"][1]["image_url"]["url"] for message in made.sent["messages"][::2]]
    assert urls == [f"data:image/png;base64,{b64encode(body).decode()}"] * 2
    assert asked == [key]


async def test_reasoning_of_a_compatible_server_goes_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning that a server streams is thinking, and is sent back under the name it came with."""
    thought = wire.chat({"reasoning_content": "Two and "}, {"reasoning_content": "three."}, {"content": "5"})
    async with asking(monkeypatch, Stream(thought), Stream(HELLO)) as made:
        reply = await made.ask("openai:deep")
        assert made.deltas == [Delta("thinking", "Two and "), Delta("thinking", "three."), Delta("text", "5")]
        await made.ask("openai:deep", (Message.user("2 + 3?"), reply.message, Message.user("Sure?")))
    [thinking] = [part for part in reply.message.parts if isinstance(part, Thinking)]
    assert thinking.text == "Two and three."
    assert made.sent["messages"][1] == {"role": "assistant", "content": "5", "reasoning_content": "Two and three."}


async def test_structured_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider enforces a schema, also one whose root is a reference, as msgspec writes them."""
    city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema = {"$ref": "#/$defs/City", "$defs": {"City": city}}
    answer = wire.chat({"content": '{"name": "Oslo"}'})
    async with asking(monkeypatch, Stream(answer), Stream(answer)) as made:
        reply = await made.ask("openai:gpt-4o", response_format=city)
        assert made.sent["response_format"]["json_schema"]["schema"]["properties"] == city["properties"]
        await made.ask("openai:gpt-4o", response_format=schema)
    assert reply.message.text == '{"name": "Oslo"}'
    form = made.sent["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["type"] == "object"


async def test_a_form_that_is_no_object_is_asked_for_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers enforce objects only, so a list is described to the model."""
    schema = {"type": "array", "items": {"type": "integer"}}
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask("openai:gpt-4o", system_prompt="You count.", response_format=schema)
    assert "response_format" not in made.sent
    words = [message["content"] for message in made.sent["messages"] if message["role"] == "system"]
    assert words[0] == "You count."
    assert '{"type":"array","items":{"type":"integer"}}' in words[1]


async def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in the header that the provider reads, and in nothing that could be stored."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        reply = await made.ask("openai:gpt-4o", system_prompt="You add.", tools=(ADD,))
    assert made.server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY.encode() not in codec.encode_message(reply.message) + codec.encode(reply.response)
    assert KEY not in repr(made.sent)


async def test_a_refusal_is_what_the_model_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal comes apart from the text, and is not an empty answer."""
    refused = wire.chat({"refusal": "I will "}, {"refusal": "not."}, usage=USAGE)
    async with asking(monkeypatch, Stream(refused)) as made:
        reply = await made.ask("openai:gpt-4o")
    assert (reply.message.text, reply.response.finish_reason) == ("I will not.", "content_filter")


async def test_characters_cut_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that comes as two halves is whole in the answer, and no invalid UTF-8 gets further."""
    halves = [
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"content":"%s"},"finish_reason":null}]}\n\n' % half
        for half in (b"\\ud83d", b"\\ude00")
    ]
    async with asking(monkeypatch, Stream([*halves, *wire.chat()])) as made:
        reply = await made.ask("openai:gpt-4o")
    assert reply.message.text == "😀"
    assert codec.decode_message(codec.encode_message(reply.message)) == reply.message
    assert all(codec.encode(delta) for delta in made.deltas)


def message_item(text: str) -> dict[str, object]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_7", "role": "assistant", "status": "completed", "content": content}


REASONED = wire.responses(
    {
        "type": "reasoning",
        "id": "rs_7",
        "summary": [{"type": "summary_text", "text": "Add."}],
        "encrypted_content": "gA==",
    },
    message_item("Let me see."),
    {
        "type": "function_call",
        "id": "fc_7",
        "call_id": "call_7",
        "name": "add",
        "arguments": '{"a":2,"b":3}',
        "status": "completed",
    },
)


async def test_responses_come_back_to_the_responses_api_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypted reasoning and the ids of items survive the store and go back byte-identical."""
    async with asking(monkeypatch, Stream(REASONED), Stream(wire.responses(message_item("5")))) as made:
        reply = await made.ask("openai-responses:gpt-5", tools=(ADD,))
        stored = codec.decode_message(codec.encode_message(reply.message))
        history = (Message.user("2 + 3?"), stored, Message.tool("call_7", 5))
        await made.ask("openai-responses:gpt-5", history, system_prompt="You add.", tools=(ADD,))
    assert made.server.requests[0].path == "/v1/responses"
    assert reply.message.text == "Let me see."
    assert reply.message.tool_calls[0].arguments == {"a": 2, "b": 3}
    assert reply.response.usage == Usage(
        100, 30, cache_read_tokens=40, reasoning_tokens=20, cost=reply.response.usage.cost
    )
    items = {item.get("type"): item for item in made.sent["input"]}
    assert items["reasoning"]["id"] == "rs_7"
    assert items["reasoning"]["encrypted_content"] == "gA=="
    assert items["reasoning"]["summary"] == [{"type": "summary_text", "text": "Add."}]
    assert (items["message"]["id"], items["message"]["content"][0]["text"]) == ("msg_7", "Let me see.")
    assert (items["function_call"]["id"], items["function_call"]["call_id"]) == ("fc_7", "call_7")
    assert (items["function_call_output"]["call_id"], items["function_call_output"]["output"]) == ("call_7", "5")


async def test_responses_lose_what_is_theirs_on_the_way_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat API of the same company counts as another provider: it gets the words and calls, no ids or ciphers."""
    async with asking(monkeypatch, Stream(REASONED), Stream(HELLO)) as made:
        reply = await made.ask("openai-responses:gpt-5", tools=(ADD,))
        assert any(isinstance(part, Opaque) for part in reply.message.parts)
        await made.ask("openai:gpt-4o", (Message.user("2 + 3?"), reply.message, Message.tool("call_7", 5)))
    assert made.sent["messages"][1]["content"] == "Let me see."
    assert made.sent["messages"][1]["tool_calls"][0]["id"] == "call_7"
    for secret in ("rs_7", "gA==", "msg_7", "fc_7", "Add."):
        assert secret not in repr(made.sent)
