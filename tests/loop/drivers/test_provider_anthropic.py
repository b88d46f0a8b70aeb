"""The real Anthropic client against a server that speaks its messages API."""

from __future__ import annotations

import pytest

from perdure import codec
from perdure.model.message import Media, Message, Text, Thinking, ToolCall
from perdure.protocols import Delta

from . import wire
from .asking import ADD, KEY, asking
from .loopback import Stream

MODEL = "anthropic:claude-haiku-4-5"
SIGNATURE = "EqQBCgIYAhIM+/Zk0==\u2028 any bytes a signature may hold"
HELLO = wire.claude({"type": "text", "text": "Hello."})
THOUGHT = wire.claude(
    {"type": "thinking", "thinking": "Two and three.", "signature": SIGNATURE},
    {"type": "redacted_thinking", "data": "cmVkYWN0ZWQ="},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 3}},
    {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {"a": 1, "b": 1}},
    stop="tool_use",
    cache_read_input_tokens=90,
    cache_creation_input_tokens=20,
)


async def test_thinking_text_and_parallel_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of an answer is a part of its message, in order, and streamed in pieces."""
    async with asking(monkeypatch, Stream(THOUGHT)) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
    thinking, redacted, text, first, second, _ = reply.message.parts
    assert isinstance(thinking, Thinking)
    assert (thinking.text, thinking.signature) == ("Two and three.", SIGNATURE)
    assert isinstance(redacted, Thinking)
    assert (redacted.text, redacted.signature) == ("", "cmVkYWN0ZWQ=")
    assert text == Text("Let me see.")
    assert (first, second) == (
        ToolCall("add", {"a": 2, "b": 3}, "toolu_1"),
        ToolCall("add", {"a": 1, "b": 1}, "toolu_2"),
    )
    assert made.deltas[:3] == [Delta("thinking", "Two and"), Delta("thinking", " three."), Delta("text", "Let m")]
    assert {delta.call_id for delta in made.deltas if delta.kind == "tool_call"} == {"toolu_1", "toolu_2"}
    assert reply.response.finish_reason == "tool_call"


async def test_usage_counts_the_cache_as_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic counts cached tokens beside the input; perdure counts them as part of it."""
    async with asking(monkeypatch, Stream(THOUGHT)) as made:
        used = (await made.ask(MODEL)).response.usage
    assert (used.input_tokens, used.cache_read_tokens, used.cache_write_tokens) == (120, 90, 20)
    assert used.cost > 0.0


async def test_thinking_goes_back_byte_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed and redacted thinking survives the store and goes back as it came; results follow their calls."""
    async with asking(monkeypatch, Stream(THOUGHT), Stream(HELLO)) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
        stored = codec.decode_message(codec.encode_message(reply.message))
        results = (Message.tool("toolu_1", 5), Message.tool("toolu_2", "refused", is_error=True))
        await made.ask(MODEL, (Message.user("Add."), stored, *results), tools=(ADD,))
    _, answer, answered = made.sent["messages"]
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Two and three.", "signature": SIGNATURE},
        {"type": "redacted_thinking", "data": "cmVkYWN0ZWQ="},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 3}},
        {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {"a": 1, "b": 1}},
    ]
    assert [(part["type"], part["tool_use_id"], part["is_error"]) for part in answered["content"]] == [
        ("tool_result", "toolu_1", False),
        ("tool_result", "toolu_2", True),
    ]
    assert answered["content"][1]["content"] == [{"type": "text", "text": "refused"}]


async def test_thinking_is_left_out_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of model, the other provider gets words and calls, but no thinking."""
    openai = wire.chat({"content": "Hello."})
    async with asking(monkeypatch, Stream(THOUGHT), Stream(openai)) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
        results = (Message.tool("toolu_1", 5), Message.tool("toolu_2", 2))
        await made.ask("openai:gpt-4o", (Message.user("Add."), reply.message, *results), tools=(ADD,))
    answer = made.sent["messages"][1]
    assert answer["content"] == "Let me see."
    assert [call["id"] for call in answer["tool_calls"]] == ["toolu_1", "toolu_2"]
    for secret in (SIGNATURE[:12], "cmVkYWN0ZWQ=", "Two and three.", "msg_1"):
        assert secret not in repr(made.sent)


async def test_another_server_is_another_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature from one server is not sent to another that speaks the same protocol."""
    async with asking(monkeypatch, Stream(THOUGHT)) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
    results = (Message.tool("toolu_1", 5), Message.tool("toolu_2", 2))
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, (Message.user("Add."), reply.message, *results), tools=(ADD,))
    assert [part["type"] for part in made.sent["messages"][1]["content"]] == ["text", "tool_use", "tool_use"]


async def test_an_answer_of_nothing_but_foreign_thinking_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No provider accepts an empty message, so none is sent."""
    thought = Message.assistant(Thinking("Hm.", signature="s", provider="elsewhere"))
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, (Message.user("One."), thought, Message.user("Two.")))
    assert [message["role"] for message in made.sent["messages"]] == ["user"]
    assert [part["text"] for part in made.sent["messages"][0]["content"]] == ["One.", "Two."]


async def test_the_request_holds_prompt_tools_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system prompt, the tools' schemas and the settings go under Anthropic's names, with the key."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, system_prompt="You add.", tools=(ADD,), temperature=0.3, max_tokens=77)
    assert made.server.requests[0].path.startswith("/v1/messages")
    assert "You add." in repr(made.sent["system"])
    [tool] = made.sent["tools"]
    assert (tool["name"], tool["description"], tool["input_schema"]) == (ADD.name, ADD.description, ADD.parameters)
    assert (made.sent["temperature"], made.sent["max_tokens"], made.sent["stream"]) == (0.3, 77, True)
    assert any(KEY in value for value in made.server.requests[0].headers.values())


async def test_thinking_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`thinking` in the model's configuration turns thinking on, in the provider's terms."""
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, thinking="low")
    assert made.sent["thinking"]["type"] == "enabled"


async def test_system_messages_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system message in mid-conversation stays there, for a model that takes a system prompt only at the start."""
    history = (Message.user("One."), Message.assistant("Two."), Message.system("Be brief."), Message.user("Three."))
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, history, system_prompt="You count.")
    assert [part["text"] for part in made.sent["messages"][2]["content"]] == ["<system>Be brief.</system>", "Three."]


async def test_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is sent as bytes, an image as its address."""
    shown = Message.user(
        "Read", Media("application/pdf", data=b"%PDF"), Media("image/png", url="https://example.com/a.png")
    )
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, (shown,))
    _, document, image = made.sent["messages"][0]["content"]
    assert (document["type"], document["source"]["data"]) == ("document", "JVBERg==")
    assert image["source"] == {"type": "url", "url": "https://example.com/a.png"}


async def test_the_name_and_the_type_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name goes before the file; Claude accepts only plain texts, so all texts are sent as such."""
    shown = Message.user(
        "Read", Media("image/png", data=b"\x89PNG", name="a.png"), Media("text/csv", data=b"a,b", name="b.csv")
    )
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, (shown,))
    _, name, image, other, text = made.sent["messages"][0]["content"]
    assert (name["text"], other["text"]) == ("[image: a.png]", "[file: b.csv]")
    assert image["source"] == {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}
    assert text["source"] == {"type": "text", "media_type": "text/plain", "data": "a,b"}


async def test_a_structured_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema is enforced natively by a model that can, and put in words for one that cannot."""
    city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    async with asking(monkeypatch, Stream(HELLO), Stream(HELLO)) as made:
        await made.ask(MODEL, response_format=city)
        assert "json_schema" in repr(made.sent["output_config"])
        await made.ask("anthropic:claude-3-haiku-20240307", response_format=city)
    assert "output_config" not in made.sent
    assert '"name"' in repr(made.sent["system"])


async def test_the_key_is_stored_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored answer has ids and signatures, but no key."""
    async with asking(monkeypatch, Stream(THOUGHT)) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
    assert KEY.encode() not in codec.encode_message(reply.message) + codec.encode(reply.response)
