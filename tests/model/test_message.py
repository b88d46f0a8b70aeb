"""Messages and their parts."""

from __future__ import annotations

import copy
import pickle
from enum import Enum
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import messages

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.message import (
    ROLES,
    Envelope,
    Media,
    Message,
    Opaque,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from perdure.model.value import ErrorRecord, clean_text


def test_the_constructors_set_role_and_text():
    """Each role has a constructor that takes the text, and gives the message an id of its own."""
    made = [Message.system("s"), Message.user("u"), Message.assistant("a"), Message.tool("call-1", "t", name="look")]
    assert [message.role for message in made] == ["system", "user", "assistant", "tool"]
    assert [message.text for message in made] == ["s", "u", "a", "t"]
    assert len({message.id for message in made}) == 4


def test_id_and_metadata_can_be_given():
    """A caller's own id and metadata are kept."""
    for make in (Message.user, Message.system, Message.assistant):
        message = make("x", id="m1", metadata={"lang": "en"})
        assert (message.id, message.metadata) == ("m1", {"lang": "en"})
    assert Message.tool("c", "x", id="m1", metadata={"lang": "en"}).id == "m1"


def test_text_joins_texts_and_results():
    """`text` joins text parts and tool results, without thinking and media."""
    message = Message.user("a", Thinking("hm"), Media("image/png", data=b"x"), "b", ToolResult("c", {"n": 1}))
    assert message.text == 'ab{"n":1}'


def test_tool_calls_and_results_are_picked_out_in_order():
    """The calls and results among the parts, each in order."""
    calls = (ToolCall("a", {"x": 1}), ToolCall("b"))
    message = Message.assistant("wait", tool_calls=calls)
    assert message.tool_calls == calls
    assert message.tool_results == ()
    answer = Message.tool(calls[0].id, {"ok": True}, is_error=True)
    assert answer.tool_results == (ToolResult(calls[0].id, {"ok": True}, is_error=True),)
    assert answer.tool_calls == ()


def test_an_assistant_without_words_has_only_its_calls():
    """An empty text beside tool calls makes no part."""
    call = ToolCall("a")
    assert Message.assistant("", tool_calls=[call]).parts == (call,)


def test_tool_calls_have_ids_of_their_own():
    """A call that came without an id gets one."""
    assert ToolCall("a").id != ToolCall("a").id


@pytest.mark.parametrize(("content", "text"), [("x", "x"), (None, "null"), ({"a": [1]}, '{"a":[1]}'), (1.5, "1.5")])
def test_a_tool_result_reads_as_json(content, text):
    """A result that is not text is shown to a model as JSON."""
    assert ToolResult("c", content).text == text


@pytest.mark.parametrize("given", [{}, {"data": b"x", "url": "https://x"}])
def test_media_has_either_bytes_or_an_address(given):
    """An image or file with neither, or both, is refused."""
    with pytest.raises(InvalidData):
        Media("image/png", **given)


@pytest.mark.parametrize("body", [{}, {"type": 5}, {"type": "text", "text": "x"}, {"type": "tool_call"}])
def test_an_unknown_part_is_of_an_unknown_kind(body):
    """An unknown part needs a kind, and not a known one."""
    with pytest.raises(InvalidData):
        UnknownPart(body)


@pytest.mark.parametrize("role", ["robot", "", None, 5, [], "User"])
def test_a_role_is_one_of_four(role):
    """A message of any other role is refused at once, for it could not be read again."""
    with pytest.raises(InvalidData) as caught:
        Message(role)
    assert caught.value.path == "$.role"
    assert all(known in str(caught.value) for known in ROLES)


@pytest.mark.parametrize("content", [5, None, b"x", {"type": "text"}, ["a"]])
def test_content_is_text_or_parts(content):
    """Any other value is refused, with its place."""
    with pytest.raises(InvalidData) as caught:
        Message.user("ok", content)
    assert caught.value.path == "$.parts[1]"


@pytest.mark.parametrize("metadata", [5, "abc", [("a", 1)], None])
def test_metadata_is_a_mapping(metadata):
    """Metadata and arguments that are not a mapping are refused."""
    with pytest.raises(InvalidData):
        Message.user("x", metadata=metadata)
    with pytest.raises(InvalidData):
        ToolCall("x", metadata)


def test_any_mapping_will_do():
    """Metadata may come as any mapping; it is copied."""
    source = {"a": 1}
    message = Message.user("x", metadata=MappingProxyType(source))
    source["a"] = 2
    assert message.metadata == {"a": 1}


MUTATIONS = [
    lambda m: m.__setitem__("a", 2),
    lambda m: m.__delitem__("a"),
    lambda m: m.update(a=2),
    lambda m: m.setdefault("b", 2),
    lambda m: m.pop("a"),
    lambda m: m.popitem(),
    lambda m: m.clear(),
    lambda m: m.__ior__({"b": 2}),
]


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize(
    "mapping",
    [
        Message.user("x", metadata={"a": 1}).metadata,
        Message.user("x").with_metadata(a=1).metadata,
        ToolCall("x", {"a": 1}).arguments,
        UnknownPart({"type": "new", "a": 1}).body,
        Message.from_dict({"format": 1, "role": "user", "metadata": {"a": 1}}).metadata,
    ],
)
def test_mappings_refuse_mutation(mapping, mutate):
    """No mapping of a message can be changed, however the message was made."""
    before = dict(mapping)
    with pytest.raises(TypeError, match="frozen"):
        mutate(mapping)
    assert mapping == before


def test_a_frozen_mapping_is_the_start_of_a_changed_copy():
    """Unpacking and `|` make ordinary dicts, and leave the frozen one alone."""
    frozen = Message.user("x", metadata={"a": 1}).metadata
    assert {**frozen, "b": 2} == frozen | {"b": 2} == {"a": 1, "b": 2}
    assert frozen == {"a": 1}


def test_fields_cannot_be_assigned():
    """A message and its parts are frozen."""
    message = Message.user("x")
    with pytest.raises(AttributeError):
        message.role = "system"
    with pytest.raises(AttributeError):
        message.parts[0].text = "y"


def test_with_metadata_adds_and_replaces():
    """with_metadata gives a new message under the same id, and leaves the old one as it was."""
    before = Message.user("x", metadata={"a": 1, "b": 1})
    after = before.with_metadata(b=2, c=3)
    assert after.metadata == {"a": 1, "b": 2, "c": 3}
    assert before.metadata == {"a": 1, "b": 1}
    assert (after.id, after.parts) == (before.id, before.parts)


def test_is_trace_is_read_from_the_metadata():
    """A message is a trace if its metadata says so."""
    assert not Message.user("x").is_trace
    assert Message.user("x", metadata={"is_trace": True}).is_trace
    assert not Message.user("x", metadata={"is_trace": False}).is_trace


@given(messages())
def test_copies_are_equal(message):
    """deepcopy and pickle give an equal message, still frozen."""
    for twin in (copy.deepcopy(message), copy.copy(message), pickle.loads(pickle.dumps(message))):
        assert twin == message
        with pytest.raises(TypeError):
            twin.metadata["a"] = 1


def test_lone_surrogates_are_replaced_where_text_comes_in():
    """Text that UTF-8 cannot encode gets U+FFFD; whole characters stay as they are."""
    assert Message.user("a\ud83d b \U0001f600").text == "a\ufffd b \U0001f600"
    assert Message.tool("c", "\udc80").text == "\ufffd"
    assert clean_text("\ud83d\ude00") == "\U0001f600"


@given(st.text(st.characters(), max_size=20))
def test_cleaned_text_is_utf8_and_whole_text_is_left_alone(text):
    """Cleaning always gives encodable text, and leaves encodable text unchanged."""
    cleaned = clean_text(text)
    cleaned.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert "\ufffd" in cleaned or len(cleaned) < len(text)
    else:
        assert cleaned == text


def test_an_error_on_record_can_be_stored_whatever_it_said():
    """An error's text and traceback are cleaned like any other text."""
    record = ErrorRecord.of(ValueError("bad \ud800"), traceback="line \udfff")
    assert (record.type, record.message, record.traceback) == ("ValueError", "bad \ufffd", "line \ufffd")
    assert ErrorRecord.of(KeyError("k")).traceback is None


class Colour(str, Enum):
    RED = "red"


class Stringable:
    def __str__(self) -> str:
        return "as text"


@pytest.mark.parametrize(("value", "text"), [("hi", "hi"), (Stringable(), "as text"), (Colour.RED, "red"), ("", "")])
def test_of_takes_texts_and_what_turns_into_text(value, text):
    """A text, or an object with a text form of its own, becomes a user's message."""
    message = Message.of(value)
    assert (message.role, message.text) == ("user", text)
    assert Message.of(value, role="system").role == "system"


@pytest.mark.parametrize("value", [None, 5, 1.5, b"bytes", bytearray(b"x"), ["a"], object(), {1}])
def test_of_refuses_what_is_no_message(value):
    """A value without a text form of its own is InvalidData, not its repr."""
    with pytest.raises(InvalidData):
        Message.of(value)


def test_of_returns_a_message_as_it_is():
    """A message is returned unchanged, whatever role is given."""
    message = Message.assistant("x")
    assert Message.of(message, role="user") is message


def test_of_reads_the_form_that_chat_apis_share():
    """Dicts with role and content, tool calls and tool results become the same messages."""
    call = {"name": "look", "arguments": {"at": "sky"}, "id": "c1"}
    said = Message.of({"role": "assistant", "content": "Let me see.", "tool_calls": [call]})
    assert said.parts == (Text("Let me see."), ToolCall("look", {"at": "sky"}, "c1"))
    answer = Message.of({"role": "tool", "tool_call_id": "c1", "content": "blue", "name": "look", "is_error": True})
    assert answer.parts == (ToolResult("c1", "blue", "look", True),)
    assert Message.of({"role": "user", "content": "hi", "id": "m1", "metadata": {"a": 1}}) == Message.user(
        "hi", id="m1", metadata={"a": 1}
    )


def test_of_reads_parts():
    """Content may be a list of parts, as dicts or as values, under either name."""
    parts = [{"type": "text", "text": "a"}, Opaque("acme", {"k": 1})]
    for key in ("content", "parts"):
        assert Message.of({"role": "user", key: parts}).parts == (Text("a"), Opaque("acme", {"k": 1}))
    assert Message.of({"role": "assistant", "content": None, "parts": parts}).text == "a"
    assert Message.of({"role": "assistant", "content": None}).parts == ()


def test_a_tool_message_without_content_is_empty():
    """A missing result is an empty text, not the word null."""
    assert Message.of({"role": "tool", "tool_call_id": "c1"}).text == ""


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "$.role"),
        ({"content": "x"}, "$.role"),
        ({"role": "robot"}, "$.role"),
        ({"role": []}, "$.role"),
        ({"role": 10**5000}, "$.role"),
        ({"role": "user", "colour": "red"}, "$.colour"),
        ({"role": "user", 5: "x"}, "$"),
        ({"role": "user", 10**5000: "x"}, "$"),
        ({"role": "user", "content": 5}, "$.content"),
        ({"role": "user", "content": ["x"]}, "$.content[0]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "$.content[0]"),
        ({"role": "user", "content": [{"type": "media", "media_type": "image/png"}]}, "$.content[0]"),
        ({"role": "user", "content": "x", "parts": []}, "$.parts"),
        ({"role": "user", "content": "x", "metadata": 5}, "$.metadata"),
        ({"role": "user", "content": "x", "id": 5}, "$.id"),
        ({"role": "user", "content": "x", "name": 5}, "$.name"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "$.tool_call_id"),
        ({"role": "user", "content": "x", "is_error": True}, "$.is_error"),
        ({"role": "tool", "content": "x"}, "$.tool_call_id"),
        ({"role": "tool", "tool_call_id": 5}, "$.tool_call_id"),
        ({"role": "tool", "tool_call_id": "c", "is_error": "yes"}, "$.is_error"),
        ({"role": "tool", "tool_call_id": "c", "name": 5}, "$.name"),
        ({"role": "tool", "tool_call_id": "c", "tool_calls": []}, "$.tool_calls"),
        ({"role": "assistant", "tool_calls": 5}, "$.tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "$.tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"name": "x", "function": {}}]}, "$.tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{"name": "x", "arguments": "{}"}]}, "$.tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "text", "text": "x"}]}, "$.tool_calls[0]"),
    ],
)
def test_of_ignores_nothing(given, path):
    """A dict with a missing role, a wrong type, or a key that means nothing for its role is InvalidData there."""
    with pytest.raises(InvalidData) as caught:
        Message.of(given)
    assert caught.value.path == path


def test_a_list_of_parts_is_copied():
    """A later change to the caller's list changes no message."""
    parts = [Text("x"), "y"]
    message = Message("user", parts)
    parts.clear()
    assert message.parts == (Text("x"), Text("y"))


@pytest.mark.parametrize("parts", [5, "x", None, {"text": "x"}, [5]])
def test_parts_are_a_list_of_parts(parts):
    """Anything else is InvalidData, at once."""
    with pytest.raises(InvalidData) as caught:
        Message("user", parts)
    assert caught.value.path.startswith("$.parts")


def test_neighbours_share_what_is_the_same_in_their_metadata() -> None:
    """The messages of a run carry the same ids: each text is in memory once, and equal metadata once as a whole."""
    raws = [
        b'{"role":"assistant","id":"1","metadata":{"run":"run one","step":"step one","is_trace":true}}',
        b'{"role":"tool","id":"2","metadata":{"run":"run one","step":"step one","is_trace":true}}',
        b'{"role":"assistant","id":"3","metadata":{"run":"run one","step":"step two"}}',
    ]
    one, two, three = codec.decode_messages(raws)
    assert one.metadata is two.metadata
    assert three.metadata["run"] is one.metadata["run"]
    assert three.metadata == {"run": "run one", "step": "step two"}


@pytest.mark.parametrize("others", [(1, True, 1.0), ("1", 1, "1"), ([1], [True], [1.0]), ({"a": 1}, {"a": True}, {})])
def test_metadata_that_is_only_equal_keeps_its_types_and_its_order(others: tuple[Any, ...]) -> None:
    """1, True and 1.0 are equal in Python and different in JSON; so are two orders of one object."""
    given = [{"a": each, "b": "x"} for each in others]
    made = [
        Message.user("hi", metadata=each).metadata for each in (*given, *({"b": "x", "a": each} for each in others))
    ]
    assert [msgspec.json.encode(each) for each in made[:3]] == [msgspec.json.encode(each) for each in given]
    assert [list(each) for each in made] == 3 * [["a", "b"]] + 3 * [["b", "a"]]


def test_what_a_caller_does_to_metadata_later_reaches_no_message() -> None:
    """Neither the message it was given to changes, nor the next one with the same metadata."""
    given = {"note": "mine", "list": [1]}
    first = Message.user("a", metadata=given)
    given["note"] = "changed"
    given["list"].append(2)  # type: ignore[attr-defined]
    assert first.metadata == {"note": "mine", "list": [1]}
    assert Message.user("b", metadata={"note": "mine", "list": [1]}).metadata == first.metadata


def test_an_envelope_keeps_any_json_and_says_nothing() -> None:
    """It is frozen like other parts, and adds nothing to the message's text."""
    message = Message.user("Hi", Envelope("acme", {"a": [1, {"b": None}]}))
    assert message.text == "Hi"
    assert message.parts[1].body == {"a": [1, {"b": None}]}
    with pytest.raises(TypeError, match="frozen"):
        message.parts[1].body["a"].append(2)
    assert Message.from_dict(message.to_dict()) == message


def test_an_older_release_keeps_an_envelope() -> None:
    """A release that does not know it reads an unknown part, and writes it unchanged."""
    plain = Message.user("Hi", Envelope("acme", {"a": {"$": 0}})).to_dict()
    plain["parts"][1]["type"] = "envelope-2"
    kept = Message.from_dict(plain)
    assert kept.parts[1] == UnknownPart(plain["parts"][1])
    assert kept.to_dict() == plain
