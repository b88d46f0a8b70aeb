"""Callers' dicts: OpenAI's chat completions and Responses items, both read with nothing ignored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import json_values

from perdure import InvalidData, Media, Message, Opaque, Text, ToolCall
from perdure.errors import PerdureError
from perdure.model.given_messages import messages_of
from perdure.model.message import Part, Thinking, ToolResult

PNG = "data:image/png;base64,iVBORw=="
IMAGE = Media("image/png", data=b"\x89PNG")


def parts_of(**given: Any) -> tuple[Part, ...]:
    return Message.of({"role": "user", **given}).parts


def test_a_chat_completion_is_read() -> None:
    """It is read in the API's form and in that of OpenAI's client, with its empty fields."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    dumped = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
    said = Message.of({"role": "assistant", "content": None, "tool_calls": [call], **dumped})
    assert said.parts == (ToolCall("add", {"a": 2}, "c1"),)
    assert said.metadata == {}
    answer = Message.of({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]})
    assert answer.parts == (ToolResult("c1", "2"),)


@pytest.mark.parametrize("arguments", ["", "  ", "{}", {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    """Servers also write that as an empty text."""
    call = {"id": "c1", "function": {"name": "now", "arguments": arguments}}
    assert Message.of({"role": "assistant", "tool_calls": [call]}).tool_calls == (ToolCall("now", {}, "c1"),)


def test_what_has_no_place_here_is_kept_beside() -> None:
    """A developer is a system message that keeps its role; names, details and annotations are in the metadata."""
    developer = Message.of({"role": "developer", "content": "Be brief.", "name": "ops"})
    assert (developer.role, developer.metadata["openai"]) == ("system", {"role": "developer", "name": "ops"})
    shown = Message.of(
        {
            "role": "user",
            "content": ["text", "image"] and [{"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}],
        }
    )
    assert shown.metadata["openai"] == {"parts": {"0": {"detail": "low"}}}
    cited = Message.of({"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]})
    assert cited.metadata["openai"] == {"annotations": [{"type": "url_citation"}]}
    refused = Message.of({"role": "assistant", "content": None, "refusal": "No."})
    assert (refused.text, refused.metadata["openai"]) == ("No.", {"parts": {"0": {"refusal": True}}})
    thought = Message.of({"role": "assistant", "content": "x", "reasoning_content": "Hm.", "refusal": "No."})
    assert thought.parts == (Thinking("Hm."), Text("x"), Text("No."))
    assert thought.metadata["openai"] == {"parts": {"2": {"refusal": True}}}


@pytest.mark.parametrize(
    ("part", "read"),
    [
        ({"type": "text", "text": "a"}, Text("a")),
        ({"type": "input_text", "text": "a"}, Text("a")),
        ({"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, Text("a")),
        ({"type": "refusal", "refusal": "no"}, Text("no")),
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}}, IMAGE),
        ({"type": "image_url", "image_url": PNG}, IMAGE),
        (
            {"type": "image_url", "image_url": "https://x.org/a.JPG?b=c.png#d"},
            Media("image/jpeg", url="https://x.org/a.JPG?b=c.png#d"),
        ),
        ({"type": "input_image", "image_url": "http://x.org/a"}, Media("image/*", url="http://x.org/a")),
        ({"type": "input_image", "image_url": PNG, "detail": "auto", "file_id": None}, IMAGE),
        (
            {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERg=="},
            Media("application/pdf", b"%PDF", name="a.pdf"),
        ),
        (
            {"type": "input_file", "file_url": "https://x.org/a.pdf"},
            Media("application/pdf", url="https://x.org/a.pdf"),
        ),
        (
            {"type": "file", "file": {"filename": "a", "file_data": "data:text/plain;charset=utf-8;base64,aGk="}},
            Media("text/plain;charset=utf-8", b"hi", name="a"),
        ),
        ({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}}, Media("audio/mpeg", b"hi")),
    ],
)
def test_parts_of_both_apis_are_read(part: dict[str, Any], read: Part) -> None:
    """Texts, images and files, inline or by their address."""
    assert parts_of(content=[part]) == (read,)


def test_responses_items_of_one_answer_are_one_message() -> None:
    """Thinking, text and calls come back together, with the ids that their provider needs again."""
    items = [
        {"role": "user", "content": "2 + 3?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Add."}],
            "encrypted_content": "xyz",
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"a": 2}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "6"}],
            "id": "fo_1",
        },
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "5", "annotations": [{"type": "x"}], "logprobs": []}],
        },
        {"type": "message", "role": "assistant", "id": "msg_2", "status": "incomplete", "content": "and"},
    ]
    asked, called, first, second, answer, more = messages_of(items, "$")
    assert asked.role == "user"
    assert called.parts == (
        Thinking("Add.", "xyz", "openai", "rs_1"),
        ToolCall("add", {"a": 2}, "c1", "openai", {"id": "fc_1"}),
        ToolCall("add", {}, "c2"),
    )
    assert (first.parts, second.parts, second.id) == ((ToolResult("c1", "5"),), (ToolResult("c2", "6"),), "fo_1")
    named = Opaque("openai", {"next": {"id": "msg_1"}})
    assert (answer.id, answer.parts) == ("msg_1", (Thinking("", None, "openai", "rs_2"), named, Text("5")))
    assert answer.metadata["openai"] == {"parts": {"2": {"annotations": [{"type": "x"}]}}}
    assert (more.id, more.text, more.is_incomplete) == ("msg_2", "and", True)


def test_a_chat_message_is_never_joined_with_another() -> None:
    """Only Responses items are joined; two answers of a chat are two messages."""
    assert len(messages_of([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "$")) == 2


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"type": "web_search_call", "id": "ws"}, "$.type"),
        ({"type": 5}, "$.type"),
        ({"role": "function", "content": "x", "name": "f"}, "$.role"),
        ({"role": "user", "content": "x", "refusal": "no"}, "$.refusal"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "$.audio"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "$.function_call"),
        ({"role": "assistant", "tool_calls": [CALL, {**CALL, "index": 0}]}, "$.tool_calls[1].index"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "$.tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}, "$.tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
            "$.tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}]},
            "$.tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}, "$.tool_calls[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "$.content[0].image_url.url"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG, "size": 1}}]},
            "$.content[0].image_url.size",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "file:///a"}]}, "$.content[0].image_url"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png,x"}]},
            "$.content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,é"}]},
            "$.content[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "$.content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_file", "filename": "a"}]}, "$.content[0]"),
        ({"role": "user", "content": [{"type": "input_file", "file_data": "!"}]}, "$.content[0].file_data"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, "$.content[0].file.file_id"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "ogg"}}]},
            "$.content[0].input_audio.format",
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": "a", "colour": 1}]}, "$.content[0].colour"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "$.call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "status": "incomplete"}, "$.status"),
        ({"type": "function_call_output", "call_id": "c"}, "$.output"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": PNG}]},
            "$.output",
        ),
        ({"type": "message", "role": "assistant", "content": "x", "status": "in_progress"}, "$.status"),
        ({"type": "reasoning", "summary": [{"type": "text", "text": "x"}]}, "$.summary[0].type"),
        ({"type": "reasoning", "summary": [], "colour": 1}, "$.colour"),
    ],
)
def test_what_cannot_be_kept_is_an_error_there(given: dict[str, Any], path: str) -> None:
    """Nothing is dropped silently: the error names the place."""
    with pytest.raises(InvalidData) as caught:
        Message.of(given)
    assert caught.value.path == path


def test_an_error_in_a_list_names_its_message() -> None:
    """The place in the list comes first."""
    with pytest.raises(InvalidData) as caught:
        messages_of([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "x"}]}], "$.messages")
    assert caught.value.path == "$.messages[1].content[0]"


KEYS = "role content type id name parts tool_calls tool_call_id metadata status summary output call_id arguments"
WORDS = "user assistant tool developer message reasoning function_call function_call_output image_url text"
hostile = st.recursive(
    st.sampled_from([*WORDS.split(), PNG, "", "\ud800"]) | json_values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS.split(), *WORDS.split(), "function"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(items=st.lists(st.dictionaries(st.sampled_from(KEYS.split()), hostile, max_size=5), max_size=3))
def test_whatever_is_given_is_a_message_or_a_typed_error(items: list[Any]) -> None:
    """Any dict, however strange, gives messages or one of perdure's own errors."""
    try:
        made = messages_of(items, "$")
    except PerdureError:
        return
    assert all(isinstance(message, Message) for message in made)


@pytest.mark.parametrize(
    "given",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "system"},
        {"role": "developer", "content": None},
        {"role": "assistant"},
        {"type": "message", "role": "user"},
    ],
)
def test_a_message_needs_content(given: dict[str, Any]) -> None:
    """An empty message is more likely a mistake; the error names the place and the form."""
    with pytest.raises(InvalidData, match="needs content: a text or a list of parts") as caught:
        Message.of(given)
    assert caught.value.path == "$.content"


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": ""},
        {"role": "user", "parts": []},
    ],
)
def test_what_providers_return_without_words_is_taken(given: dict[str, Any]) -> None:
    """An assistant says null beside its calls, and real conversations have empty texts."""
    assert Message.of(given).role == given["role"]
