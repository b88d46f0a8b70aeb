"""The real Gemini client against a server that speaks its API."""

from __future__ import annotations

import pytest

from perdure import codec
from perdure.model.message import Media, Message, Text, Thinking
from perdure.protocols import Delta

from . import wire
from .asking import ADD, KEY, asking
from .loopback import Stream

MODEL = "google-gla:gemini-3-pro"
HELLO = wire.gemini([{"text": "Hello."}])
THOUGHT = wire.gemini(
    [{"text": "Two and three.", "thought": True}],
    [{"text": "Let me see.", "thoughtSignature": "dGV4dA=="}],
    [{"functionCall": {"name": "add", "args": {"a": 2, "b": 3}}, "thoughtSignature": "Y2FsbA=="}],
)


async def test_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts, words and calls are parts of the message; Gemini's former provider name still works."""
    async with asking(monkeypatch, Stream(THOUGHT)) as made:
        reply = await made.ask(MODEL, system_prompt="You add.", tools=(ADD,), temperature=0.3, max_tokens=77)
    assert [part.text for part in reply.message.parts if isinstance(part, Text | Thinking)] == [
        "Two and three.",
        "Let me see.",
    ]
    [call] = reply.message.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 2, "b": 3})
    assert made.deltas[2] == Delta("tool_call", '{"a":2,"b":3}', call.id, "add")
    assert (reply.response.usage.input_tokens, reply.response.usage.reasoning_tokens) == (10, 3)
    assert made.sent["systemInstruction"]["parts"] == [{"text": "You add."}]
    assert made.sent["tools"][0]["functionDeclarations"][0]["name"] == "add"
    assert (made.sent["generationConfig"]["temperature"], made.sent["generationConfig"]["maxOutputTokens"]) == (0.3, 77)
    assert made.server.requests[0].headers["x-goog-api-key"] == KEY


async def test_thought_signatures_go_back_where_they_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signature survives the store, returns on the part it came with, and goes to no other provider."""
    async with asking(monkeypatch, Stream(THOUGHT), Stream(HELLO), Stream(wire.chat({"content": "5"}))) as made:
        reply = await made.ask(MODEL, tools=(ADD,))
        stored = codec.decode_message(codec.encode_message(reply.message))
        history = (Message.user("2 + 3?"), stored, Message.tool(stored.tool_calls[0].id, 5))
        await made.ask(MODEL, history, tools=(ADD,))
        _, answer, answered = made.sent["contents"]
        await made.ask("openai:gpt-4o", history, tools=(ADD,))
    assert [part.get("thoughtSignature") for part in answer["parts"]] == [None, "dGV4dA==", "Y2FsbA=="]
    assert answered["parts"][0]["functionResponse"]["name"] == "add"
    assert "dGV4dA==" not in repr(made.sent)
    assert "Y2FsbA==" not in repr(made.sent)
    assert KEY.encode() not in codec.encode_message(stored)


async def test_the_name_and_the_type_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name goes before the file, whose bytes and type are sent unchanged."""
    shown = Message.user("Read", Media("application/pdf", data=b"%PDF", name="a.pdf"))
    async with asking(monkeypatch, Stream(HELLO)) as made:
        await made.ask(MODEL, (shown,))
    text, name, file = made.sent["contents"][0]["parts"]
    assert (text["text"], name["text"]) == ("Read", "[file: a.pdf]")
    assert file["inlineData"] == {"data": "JVBERg==", "mime_type": "application/pdf"}


async def test_structured_answers_beside_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot have both a schema and tools is asked in words while it has tools."""
    city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    async with asking(monkeypatch, Stream(HELLO), Stream(HELLO)) as made:
        await made.ask("google:gemini-2.5-flash", response_format=city)
        assert made.sent["generationConfig"]["responseMimeType"] == "application/json"
        await made.ask("google:gemini-2.5-flash", response_format=city, tools=(ADD,))
    assert "responseMimeType" not in made.sent["generationConfig"]
    assert "name" in repr(made.sent["systemInstruction"])
