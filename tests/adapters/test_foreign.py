"""Lifting and filling: what happens to what is odd, and to a message that a compaction has changed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from tests.adapters.items import json_items

from perdure import InvalidData, codec
from perdure.adapters.foreign import Form, Lifter, as_metadata, is_plain, of_metadata, same
from perdure.adapters.forms import openai
from perdure.loop.compaction.draft import with_results
from perdure.model.message import Envelope, Message, Role, Text, ToolCall, ToolResult

FORM = openai.FORM


class Twice(Form):
    """A form that makes a mistake: what it lifts is not what it leaves a hole for."""

    name = "twice"

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, Any]:
        lifter.text("something else")
        return "user", {**item, "text": lifter.again(0)}

    def give(self, message: Message) -> list[Any]:
        return []


def test_a_form_that_is_wrong_loses_nothing() -> None:
    """The item is read back before the message is handed out; if it is another one, it is kept whole."""
    message = Twice().message({"text": "Hi"})
    assert message.is_sealed
    assert Twice().items(message) == [{"text": "Hi"}]


@pytest.mark.parametrize("value", [float("nan"), 10**30, -(2**63) - 1, "\ud83d", {"\ud83d": 1}, "\x7f0\x7f", "\x7f"])
def test_what_is_odd_hides_nothing_else(value: Any) -> None:
    """Beside a value that perdure's JSON cannot say, or that looks like a hole, what is said can still be read."""
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "odd": value}
    message = FORM.message(item)
    assert is_plain(item) == isinstance(value, str) * (value != "\ud83d")
    assert message.text == ("" if isinstance(value, str) and "\x7f" in value else "Hi")
    assert same(FORM.items(codec.decode_message(codec.encode_message(message))), [item])


@pytest.mark.parametrize("text", ["half \ud83d of it", "del \x7f0\x7f", "\x00"])
def test_an_odd_text_can_be_read(text: str) -> None:
    """Half a character is shown as none, and comes back as it was."""
    message = FORM.message({"role": "user", "content": text, "type": "message"})
    assert message.text == text.replace("\ud83d", "\ufffd")
    assert FORM.items(message) == [{"role": "user", "content": text, "type": "message"}]


@pytest.mark.parametrize("text", ['{"a": 1', "[1]", '{"a": NaN}', '{"a": 1000000000000000000000}', "", "\ud83d"])
def test_arguments_that_are_not_an_object_can_be_read(text: str) -> None:
    """They are one argument that says so, as drivers name it, and come back as the text they were."""
    item = {"type": "function_call", "name": "look", "call_id": "c", "arguments": text}
    (call,) = FORM.message(item).tool_calls
    assert list(call.arguments) == ["INVALID_JSON"]
    assert same(FORM.items(FORM.message(item)), [item])


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2.5]}', '{"a":[1,2.5]}', '{"é": "ü"}', '{"\\u00e9": "x"}', '{"é":1}', '{ "a":1e5}', '{"a":1,"a":2}'],
)
def test_arguments_keep_the_style_they_were_written_in(text: str) -> None:
    """JSON text comes back letter by letter; in the usual styles it is not stored beside the arguments."""
    item = {"type": "function_call", "name": "look", "call_id": "c", "arguments": text}
    message = FORM.message(item)
    assert message.tool_calls[0].arguments == json.loads(text)
    assert FORM.items(message) == [item]


def test_what_is_not_json_is_refused() -> None:
    """An item comes back as it was or it is not taken."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for item in ({"a": b"x"}, {"a": object()}, {"a": {1, 2}}, deep):
        with pytest.raises(InvalidData, match="not JSON"):
            FORM.message(item)


def test_deep_json_is_kept() -> None:
    """Deeper than perdure's own values may be."""
    deep: Any = 1
    for _ in range(400):
        deep = {"a": [deep]}
    item = {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}", "deep": deep}
    message = codec.decode_message(codec.encode_message(FORM.message(item)))
    assert message.tool_calls
    assert same(FORM.items(message), [item])


def test_a_shorter_result_reaches_the_framework() -> None:
    """An observation mask shows in the item; one that the item has no place for is given in the form of a text."""
    whole = {"type": "function_call_output", "call_id": "c", "output": "long", "status": "completed"}
    pieces = {**whole, "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    masked = [with_results(FORM.message(item), "short", strategy="observation_mask") for item in (whole, pieces)]
    assert FORM.items(masked[0]) == [{**whole, "output": "short"}]
    assert FORM.items(masked[1]) == [{"call_id": "c", "output": "short", "type": "function_call_output"}]


def test_an_envelope_of_another_form_means_nothing() -> None:
    """What one framework left is given to another as what perdure can read of it."""
    message = Message("assistant", (Text("Hi"), ToolCall("f", {}, "c"), Envelope("acme", "…")))
    assert [item.get("type", item.get("role")) for item in FORM.items(message)] == ["assistant", "function_call"]


@pytest.mark.parametrize(
    "body", ["", "{", '{"a":"\x7f7\x7f"}', '{"a":"\x7fx\x7f"}', None, {"a": 1}, '{"a":"\x7ff\x7f"}']
)
def test_an_envelope_that_cannot_be_read_is_passed_over(body: Any) -> None:
    """What is said in the message is given all the same."""
    message = Message("user", (Text("Hi"), Envelope("openai", body)))
    assert FORM.items(message) == [{"role": "user", "content": "Hi"}]


def test_a_result_without_pieces_is_empty() -> None:
    """A call keeps its result, also one that says nothing."""
    lifter = Lifter()
    assert lifter.results("c", [])[0] == []
    assert lifter.parts == [ToolResult("c", "")]


@given(json_items)
def test_metadata_keeps_any_json(value: Any) -> None:
    """What perdure's own JSON cannot say is kept as a text, and so is what looks like that."""
    for given_value in (value, {"$json": value}):
        kept = msgspec.json.decode(msgspec.json.encode(as_metadata(given_value)))
        assert same(of_metadata(kept), given_value)
