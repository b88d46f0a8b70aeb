"""The mapping between perdure's messages and pydantic-ai's, for cases that a loopback server can hardly produce."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai.messages import (
    BinaryImage,
    Citation,
    CompactionPart,
    DocumentUrl,
    FilePart,
    ModelRequest,
    ModelResponse,
    NativeToolCallPart,
    NativeToolReturnPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
    VideoUrl,
    WebCitationSource,
)

from perdure import codec
from perdure.loop.drivers.provider_messages import CallIds, Origin, from_pydantic, to_pydantic
from perdure.model.message import Media, Message, Opaque, Text, Thinking, ToolCall, UnknownPart

HERE = Origin("acme", "acme-system")
THERE = Origin("other", "other-system")
OWN: dict[str, Any] = {"provider_name": "acme-system"}


def stored(response: ModelResponse) -> Message:
    """Return the response as a message that went through the store."""
    return codec.decode_message(codec.encode_message(from_pydantic(response, HERE, CallIds(()))))


def back(message: Message, destination: Origin = HERE) -> ModelResponse:
    [response] = to_pydantic("", (message,), destination)
    assert isinstance(response, ModelResponse)
    return response


RICH = [
    TextPart("Oslo.", id="txt_1", provider_details={"phase": "final_answer"}, **OWN),
    TextPart("Cited.", citations=[Citation([WebCitationSource("https://a.example")])], **OWN),
    ThinkingPart("Hm.", id="rs_1", signature="sig", provider_details={"raw_content": ["h", "m"]}, **OWN),
    ToolCallPart("add", {"a": 1}, "call_1", id="fc_1", provider_details={"namespace": "n"}, **OWN),
    NativeToolCallPart("web_search", {"query": "Oslo"}, "ws_1", provider_details={"x": 1}, **OWN),
    NativeToolReturnPart("web_search", {"hits": [1, 2.5, None]}, "ws_1", **OWN),
    CompactionPart("Before: …", provider_details={"encrypted_content": "gA=="}, **OWN),
    FilePart(BinaryImage(b"\x89PNG\xff", media_type="image/png"), id="img_1", provider_details={"size": 1}, **OWN),
]


@pytest.mark.parametrize("part", RICH, ids=lambda part: part.part_kind)
def test_what_only_its_provider_understands_comes_back_equal(part: Any) -> None:
    """Every kind of part, with all of its provider's data, survives the store."""
    assert back(stored(ModelResponse([part]))).parts == [part]


@pytest.mark.parametrize("part", RICH, ids=lambda part: part.part_kind)
def test_what_only_its_provider_understands_is_left_out_elsewhere(part: Any) -> None:
    """Another provider gets only the plain words, calls and files."""
    turns = to_pydantic("", (stored(ModelResponse([part])),), THERE)
    assert "acme" not in repr(turns)
    assert not any(word in repr(turns) for word in ("txt_1", "sig", "fc_1", "ws_1", "gA==", "img_1", "a.example"))
    kept = [plain for turn in turns for plain in turn.parts]
    assert len(kept) == (1 if isinstance(part, TextPart | ToolCallPart | FilePart) else 0)


def test_what_belongs_to_the_whole_response_comes_back() -> None:
    """Response ids, containers and the like go back with the message, to the same provider only."""
    details = {"container_id": "c_1", "finish_reason": "stop"}
    response = ModelResponse(
        [TextPart("Hi.")],
        model_name="m-1",
        provider_name="acme-system",
        provider_url="https://acme.example",
        provider_response_id="resp_1",
        provider_details=details,
    )
    message = stored(response)
    sent = back(message)
    assert (sent.provider_name, sent.provider_url) == ("acme-system", "https://acme.example")
    assert (sent.provider_response_id, sent.provider_details) == ("resp_1", details)
    assert (back(message, THERE).provider_response_id, back(message, THERE).provider_details) == (None, None)


def test_a_plain_answer_carries_nothing_beside() -> None:
    """If a provider sends only what every answer has, a message is its text."""
    response = ModelResponse([TextPart("Hi.")], provider_response_id="r", provider_details={"finish_reason": "stop"})
    assert from_pydantic(response, HERE, CallIds(())).parts == (Text("Hi."),)


def test_json_that_this_pydantic_ai_cannot_read() -> None:
    """JSON of another release is left out, and the words stay."""
    message = Message.assistant(
        Opaque("acme", {"next": {"citations": "not a list"}}),
        "Hi.",
        Opaque("acme", {"part": {"part_kind": "from-the-future"}}),
        Opaque("acme", "not even an object"),
        Opaque("acme", {"response": {"provider_details": "not an object"}}),
        ToolCall("add", {}, "call_1", provider="acme", opaque={"provider_details": "not an object"}),
    )
    text, call = back(message).parts
    assert text == TextPart("Hi.")
    assert call == ToolCallPart("add", {}, "call_1")


def test_parts_of_a_newer_release_are_left_out() -> None:
    """A part that this release does not know cannot be sent."""
    message = Message.assistant(UnknownPart({"type": "hologram"}), "Hi.")
    assert back(message).parts == [TextPart("Hi.")]


def test_a_part_that_lost_its_neighbour() -> None:
    """If a part was removed, its provider data is not put on the next part of another kind."""
    message = Message.assistant(Opaque("acme", {"next": {"id": "txt_1"}}), ToolCall("add", {}, "call_1"), "Hi.")
    assert back(message).parts == [ToolCallPart("add", {}, "call_1"), TextPart("Hi.")]


def test_thinking_of_unknown_origin_stays_at_home() -> None:
    """Thinking that names no provider, such as imported thinking, is only for people."""
    assert back(Message.assistant(Thinking("Hm."), "Hi.")).parts == [TextPart("Hi.")]


def test_what_is_said_between_two_answers_is_one_request() -> None:
    """Results come together, with the name of their tool, before the user's addition."""
    calls = (ToolCall("add", {}, "call_1"), ToolCall("sub", {}, "call_2"))
    history = (
        Message.user("Do."),
        Message.assistant(tool_calls=calls),
        Message.tool("call_1", {"sum": 3}),
        Message.tool("call_2", "no", is_error=True),
        Message.user("And?"),
    )
    *_, last = to_pydantic("", history, HERE)
    first, second, added = last.parts
    assert isinstance(first, ToolReturnPart)
    assert (first.tool_name, first.content, first.outcome) == ("add", '{"sum":3}', "success")
    assert isinstance(second, ToolReturnPart)
    assert (second.tool_name, second.content, second.outcome) == ("sub", "no", "failed")
    assert isinstance(added, UserPromptPart)
    assert added.content == "And?"


def test_media_by_kind() -> None:
    """An address becomes the part that its media type names."""
    shown = Message.user(
        Media("video/mp4", url="https://example.com/v"), Media("application/pdf", url="https://example.com/d"), "See."
    )
    [request] = to_pydantic("", (shown,), HERE)
    assert isinstance(request, ModelRequest)
    [prompt] = request.parts
    assert isinstance(prompt, UserPromptPart)
    video, document, text = prompt.content
    assert isinstance(video, VideoUrl)
    assert isinstance(document, DocumentUrl)
    assert (document.media_type, text) == ("application/pdf", "See.")


def test_ids_are_claimed_once() -> None:
    """An id is kept unless it is empty or taken."""
    ids = CallIds([Message.assistant(ToolCall("add", {}, "a"))])
    assert [ids.claim(wanted) for wanted in ("b", "a", "a", "", "")] == ["b", "a-2", "a-3", "call-2", "call-3"]
