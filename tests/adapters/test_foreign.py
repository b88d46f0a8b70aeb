"""Lifting and filling of odd items, and of a message that a compaction has changed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from tests.adapters.items import json_items

from perdure import InvalidData, codec
from perdure.adapters.foreign import Form, Lifter, as_metadata, is_plain, of_metadata, same
from perdure.adapters.forms import claude, openai
from perdure.loop.compaction.draft import with_results
from perdure.model.message import Envelope, Message, Role, Text, ToolCall, ToolResult

FORM = openai.FORM
LINE = {
    "parentUuid": "p-1",
    "cwd": "/shop",
    "isSidechain": False,
    "type": "assistant",
    "message": {"model": "m", "id": "msg_1", "role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
    "uuid": "u-1",
    "version": "2",
    "timestamp": "2026-01-01T00:00:00Z",
}
"""A line of Claude's, with keys of the frame in two stretches and in a message."""


class Twice(Form):
    """A form with a mistake: it lifts another value than the one it leaves a hole for."""

    name = "twice"

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, Any]:
        lifter.text("something else")
        return "user", {**item, "text": lifter.again(0)}

    def give(self, message: Message) -> list[Any]:
        return []


def test_a_form_that_is_wrong_loses_nothing() -> None:
    """The item is read back before the message is returned; if it differs, it is kept whole."""
    message = Twice().message({"text": "Hi"})
    assert message.is_sealed
    assert Twice().items(message) == [{"text": "Hi"}]


@pytest.mark.parametrize("value", [float("nan"), 10**30, -(2**63) - 1, "\ud83d", {"\ud83d": 1}, "\x7f0\x7f", "\x7f"])
def test_what_is_odd_hides_nothing_else(value: Any) -> None:
    """The text can be read beside a value that perdure's JSON cannot hold, or that looks like a hole."""
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "odd": value}
    message = FORM.message(item)
    assert is_plain(item) == isinstance(value, str) * (value != "\ud83d")
    assert message.text == ("" if isinstance(value, str) and "\x7f" in value else "Hi")
    assert same(FORM.items(codec.decode_message(codec.encode_message(message))), [item])


@pytest.mark.parametrize("text", ["half \ud83d of it", "del \x7f0\x7f", "\x00"])
def test_an_odd_text_can_be_read(text: str) -> None:
    """Half a character is shown as U+FFFD, and comes back as it was."""
    message = FORM.message({"role": "user", "content": text, "type": "message"})
    assert message.text == text.replace("\ud83d", "\ufffd")
    assert FORM.items(message) == [{"role": "user", "content": text, "type": "message"}]


@pytest.mark.parametrize("text", ['{"a": 1', "[1]", '{"a": NaN}', '{"a": 1000000000000000000000}', "", "\ud83d"])
def test_arguments_that_are_not_an_object_can_be_read(text: str) -> None:
    """They are shown as one argument, named as drivers name it, and come back as the same text."""
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
    """An item comes back as it was, or it is refused."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for item in ({"a": b"x"}, {"a": object()}, {"a": {1, 2}}, deep):
        with pytest.raises(InvalidData, match="not JSON"):
            FORM.message(item)


def test_deep_json_is_kept() -> None:
    """It may be deeper than perdure's own values."""
    deep: Any = 1
    for _ in range(400):
        deep = {"a": [deep]}
    item = {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}", "deep": deep}
    message = codec.decode_message(codec.encode_message(FORM.message(item)))
    assert message.tool_calls
    assert same(FORM.items(message), [item])


def test_a_shorter_result_reaches_the_framework() -> None:
    """An observation mask shows in the item; if the item has no place for it, it is given as a text."""
    whole = {"type": "function_call_output", "call_id": "c", "output": "long", "status": "completed"}
    pieces = {**whole, "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    masked = [with_results(FORM.message(item), "short", strategy="observation_mask") for item in (whole, pieces)]
    assert FORM.items(masked[0]) == [{**whole, "output": "short"}]
    assert FORM.items(masked[1]) == [{"call_id": "c", "output": "short", "type": "function_call_output"}]


def test_an_envelope_of_another_form_means_nothing() -> None:
    """An item of one framework is given to another as the parts that perdure can read."""
    message = Message("assistant", (Text("Hi"), ToolCall("f", {}, "c"), Envelope("acme", "…")))
    assert [item.get("type", item.get("role")) for item in FORM.items(message)] == ["assistant", "function_call"]


@pytest.mark.parametrize(
    "body", ["", "{", '{"a":"\x7f7\x7f"}', '{"a":"\x7fx\x7f"}', None, {"a": 1}, '{"a":"\x7ff\x7f"}']
)
def test_an_envelope_that_cannot_be_read_is_passed_over(body: Any) -> None:
    """The message's text is still given."""
    message = Message("user", (Text("Hi"), Envelope("openai", body)))
    assert FORM.items(message) == [{"role": "user", "content": "Hi"}]


def test_a_result_without_pieces_is_empty() -> None:
    """A call keeps its result, even an empty one."""
    lifter = Lifter()
    assert lifter.results("c", [])[0] == []
    assert lifter.parts == [ToolResult("c", "")]


@given(json_items)
def test_metadata_keeps_any_json(value: Any) -> None:
    """A value that perdure's own JSON cannot hold is kept as a text, and so is one that looks like such a text."""
    for given_value in (value, {"$json": value}):
        kept = msgspec.json.decode(msgspec.json.encode(as_metadata(given_value)))
        assert same(of_metadata(kept), given_value)


def test_keys_of_the_frame_that_follow_each_other_have_one_hole() -> None:
    message = claude.FORM.message(LINE)
    body = json.loads(_envelope(message).body)
    assert list(body) == ["\x7f0:4\x7f", "message", "uuid", "\x7f4:6\x7f"]
    assert next(iter(body["message"])) == "\x7f0:2message\x7f"
    assert message.text == "Hi"
    for _ in range(2):  # the second time from the first one's result
        assert same(claude.FORM.items(codec.decode_message(codec.encode_message(message))), [LINE])


@pytest.mark.parametrize("value", [float("nan"), 10**30, "\ud83d"])
def test_a_stretch_stands_beside_what_is_odd(value: Any) -> None:
    """A body in Python's JSON has spaces, unlike perdure's own. An odd key of the frame ends a stretch."""
    for key in ("odd", "cwd"):
        item = {**LINE, key: value}
        message = claude.FORM.message(item)
        assert message.text == "Hi"
        assert same(claude.FORM.items(codec.decode_message(codec.encode_message(message))), [item])


@pytest.mark.parametrize("key", ["\x7f0:1\x7f", "\x7f0:99\x7f", "\x7f0:1nobody\x7f"])
@pytest.mark.parametrize("place", ["item", "message"])
def test_a_key_that_looks_like_a_stretch_is_kept(key: str, place: str) -> None:
    item = {**LINE, key: 0} if place == "item" else {**LINE, "message": {**LINE["message"], key: 0}}  # type: ignore[dict-item]
    message = claude.FORM.message(item)
    assert same(claude.FORM.items(codec.decode_message(codec.encode_message(message))), [item])


def test_a_copy_has_the_keys_of_its_original() -> None:
    """A compaction shows a copy in a message's place; the copy's frame begins with the original's id."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "long"}
    line = {**LINE, "type": "user", "message": {"role": "user", "content": [result]}}
    message = claude.FORM.message(line)
    (item,) = claude.FORM.items(with_results(message, "short", strategy="observation_mask"))
    assert same(item, {**line, "message": {"role": "user", "content": [{**result, "content": "short"}]}})


def test_a_frame_that_has_lost_something_leaves_what_perdure_makes_of_the_message() -> None:
    message = claude.FORM.message(LINE)
    left = msgspec.structs.replace(message, metadata={"claude": {"cwd": "/shop"}})
    (item,) = claude.FORM.items(left)
    assert item["cwd"] == "/shop"
    assert item["message"]["content"] == [{"type": "text", "text": "Hi"}]


def _envelope(message: Message) -> Envelope:
    envelope = message.parts[-1]
    assert isinstance(envelope, Envelope)
    return envelope
