"""Every form: any item comes back the same, a real one can be read, and a redacted one keeps its links to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapters.items import ITEMS, changed_items, json_items

from perdure import codec
from perdure.adapters.foreign import Form, is_plain, same
from perdure.adapters.forms import adk, agno, claude, langchain, openai, pydantic, strands
from perdure.model.message import Envelope, Message, Text, Thinking, ToolCall, ToolResult
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import Traces

FORMS: dict[str, Form] = {
    module.FORM.name: module.FORM for module in (openai, langchain, adk, claude, pydantic, strands, agno)
}


def stored(message: Message) -> Message:
    """Return a message as every store returns it."""
    return codec.decode_message(codec.encode_message(message))


def redacted(message: Message) -> Message:
    """Return a message as a redaction leaves it."""
    plain = json.loads(codec.encode_message(message))
    left = Replacement("[redacted]", Traces([message.id])).message(plain)
    return codec.decode_message(msgspec.json.encode(left))


def assert_kept(form: Form, item: Any) -> None:
    message = form.message(item)
    (back,) = form.items(stored(message))
    assert same(back, item)
    assert type(back) is type(item)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_any_item_comes_back_the_same(name: str, data: st.DataObject) -> None:
    """Keys keep their order and values their types in the stored bytes: NaN, half characters, huge numbers, holes."""
    assert_kept(FORMS[name], data.draw(json_items | changed_items(name)))


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_any_item_that_is_redacted_gives_json(name: str, data: st.DataObject) -> None:
    """The items left of any redacted item are plain JSON, without its content."""
    form = FORMS[name]
    item = data.draw(changed_items(name))
    left = redacted(stored(form.message(item)))
    assert not any(isinstance(part, Envelope) for part in left.parts)
    given_ = form.items(stored(left))
    assert given_
    assert json.loads(json.dumps(given_)) == given_


REAL = [(name, place) for name, items in ITEMS.items() for place in range(len(items))]


@pytest.mark.parametrize(("name", "place"), REAL)
def test_a_real_item_comes_back_the_same(name: str, place: int) -> None:
    """The objects in it are plain too, so the framework may change them."""
    item = ITEMS[name][place]
    assert is_plain(item)
    assert_kept(FORMS[name], item)
    (back,) = FORMS[name].items(FORMS[name].message(item))
    assert {type(each) for each in walked(back)} <= {dict, list, str, int, float, bool, type(None)}


def walked(value: Any) -> Any:
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walked(each)


def read(name: str, place: int) -> tuple[str, list[Any]]:
    message = FORMS[name].message(ITEMS[name][place])
    return message.role, [part for part in message.parts if not isinstance(part, Envelope)]


SAID = ("Look it up", "order", "One moment", "gone", "door", "It broke", "Be brief", "a.txt", "QUJDREVG")
NO_SHOP = {"type": "http_error", "code": 404, "message": "no such shop"}
CALL = ToolCall("look_up", {"order": 7}, "toolu_1")


@pytest.mark.parametrize(
    ("name", "place", "role", "parts"),
    [
        ("openai", 0, "user", [Text("Where is my order?")]),
        ("openai", 1, "system", [Text("Be brief.")]),
        ("openai", 3, "user", [Text("See:")]),
        ("openai", 4, "assistant", [Thinking("Look it up.", "c2ln", "openai", "rs_1")]),
        ("openai", 5, "assistant", [Thinking("", "c2ln", "openai", "rs_2")]),
        ("openai", 6, "assistant", [ToolCall("look_up", {"order": 7, "to": "Zoë"}, "call_1")]),
        ("openai", 7, "tool", [ToolResult("call_1", "sent")]),
        ("openai", 8, "tool", [ToolResult("call_2", ["one", "two"])]),
        ("openai", 9, "assistant", [Text("Sent.")]),
        (
            "openai",
            11,
            "assistant",
            [
                ToolCall("web_search", {"action": {"type": "search", "query": "orders"}}, "ws_1"),
                ToolResult("ws_1", "completed"),
            ],
        ),
        (
            "openai",
            12,
            "assistant",
            [ToolCall("list", {}, "mcp_1"), ToolResult("mcp_1", NO_SHOP, is_error=True)],
        ),
        ("openai", 14, "assistant", [ToolCall("python", {"input": "print(1)"}, "call_3")]),
        ("openai", 16, "assistant", [ToolCall("shell", {"action": {"commands": ["ls"]}}, "call_4")]),
        ("openai", 19, "tool", [ToolResult("call_5", "[file]")]),
        ("openai", 20, "system", []),
        ("langchain", 0, "user", [Text("Where is my order?")]),
        ("langchain", 1, "assistant", [Thinking("Look it up.", "c2ln", "anthropic"), Text("One moment."), CALL]),
        ("langchain", 2, "tool", [ToolResult("toolu_1", "It broke.", is_error=True)]),
        ("langchain", 3, "tool", [ToolResult("toolu_1", ["one", "two"])]),
        ("langchain", 6, "system", [Text("Be brief.")]),
        ("adk", 0, "user", [Text("Where is my order?")]),
        (
            "adk",
            1,
            "assistant",
            [Thinking("Look it up.", "AQI=", "google"), ToolCall("look_up", {"order": 7}, "adk-1")],
        ),
        ("adk", 2, "tool", [ToolResult("adk-1", {"error": "gone"}, "look_up", True)]),
        ("adk", 3, "assistant", [ToolCall("look_up", {}, "look_up"), Text("Wait.")]),
        ("adk", 4, "system", []),
        ("claude", 0, "user", [Text("Where is my order?")]),
        (
            "claude",
            1,
            "assistant",
            [
                Thinking("Look it up.", "c2ln", "anthropic"),
                Text("One moment."),
                ToolCall("Bash", {"command": "ls"}, "toolu_1"),
            ],
        ),
        ("claude", 2, "tool", [ToolResult("toolu_1", "a.txt", is_error=True)]),
        ("claude", 3, "tool", [ToolResult("toolu_2", ["one", "two"])]),
        ("claude", 4, "system", [Text("Conversation compacted")]),
        ("claude", 5, "system", [Text("Where the order is")]),
        ("pydantic-ai", 0, "user", [Text("Where is my order?")]),
        ("pydantic-ai", 1, "system", [Text("Be brief.")]),
        (
            "pydantic-ai",
            2,
            "assistant",
            [
                Thinking("Look it up.", "s", "p"),
                Text("One moment."),
                ToolCall("look_up", {"order": 7}, "t1"),
                ToolCall("look_up", {"order": 8}, "t2"),
            ],
        ),
        (
            "pydantic-ai",
            3,
            "tool",
            [ToolResult("t1", {"at": "door"}, "look_up"), ToolResult("t2", "gone", "look_up", True)],
        ),
        ("pydantic-ai", 4, "user", [Text("See:"), ToolResult("t3", "bad", "look_up", True)]),
        ("strands", 0, "user", [Text("Where is my order?")]),
        (
            "strands",
            1,
            "assistant",
            [Thinking("Look it up.", "s"), Text("One moment."), ToolCall("look_up", {"order": 7}, "t1")],
        ),
        ("strands", 2, "tool", [ToolResult("t1", ["one", {"a": 1}], is_error=True)]),
        ("strands", 3, "tool", [ToolResult("t1", {"a": 1})]),
        ("strands", 4, "assistant", [Text("On its way.")]),
        ("strands", 5, "user", [Text("[blocked]")]),
        ("agno", 0, "user", [Text("Where is my order?")]),
        (
            "agno",
            1,
            "assistant",
            [Thinking("Look it up."), Text("One moment."), ToolCall("look_up", {"order": 7}, "c-1")],
        ),
        ("agno", 2, "tool", [ToolResult("c-1", "lost", "look_up", is_error=True)]),
    ],
)
def test_an_item_can_be_read(name: str, place: int, role: str, parts: list[Any]) -> None:
    """Texts, thoughts, calls and results are parts, with ids, names and errors."""
    assert read(name, place) == (role, parts)


@pytest.mark.parametrize(
    ("name", "place", "message_id"), [("langchain", 1, "run--1"), ("adk", 0, "0d965fda-user"), ("claude", 1, "u-2")]
)
def test_a_message_has_the_items_id(name: str, place: int, message_id: str) -> None:
    """A redaction and a search then use the framework's id; another id can be given."""
    form, item = FORMS[name], ITEMS[name][place]
    assert form.message(item).id == message_id
    other = form.message(item, message_id="m-1")
    assert other.id == "m-1"
    assert form.items(other) == [item]


def test_a_message_of_strands_needs_no_envelope() -> None:
    """Its ids, times and counts are in the frame, and a redaction leaves them. Other metadata may have a text."""
    item = ITEMS["strands"][4]
    message = strands.FORM.message(item)
    assert message.parts == (Text("On its way."),)
    (left,) = strands.FORM.items(stored(redacted(message)))
    assert left == {**item, "message": {**item["message"], "content": [{"text": "[redacted]"}]}}
    noted = {**item, "message": {**item["message"], "metadata": {"custom": {"why": "4111"}, "usage": {"note": "4111"}}}}
    assert "4111" not in json.dumps(strands.FORM.items(stored(redacted(strands.FORM.message(noted)))))


def test_nothing_is_stored_twice() -> None:
    """Texts and arguments are only in the parts, also those of an answer that has them twice."""
    for name, items in ITEMS.items():
        for item in items:
            message = FORMS[name].message(item)
            said = [part for part in message.parts if isinstance(part, Text | Thinking | ToolCall | ToolResult)]
            left = msgspec.json.encode([part for part in message.parts if isinstance(part, Envelope)]).decode()
            for part in said:
                words = part.text if isinstance(part, Text | Thinking) else ""
                assert not words or words not in left, (name, words)
                if isinstance(part, ToolCall) and name != "openai":
                    assert json.dumps(dict(part.arguments))[1:-1] not in left or not part.arguments


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("openai", 0),
        ("openai", 1),
        ("openai", 4),
        ("openai", 7),
        ("openai", 10),
        ("langchain", 0),
        ("langchain", 2),
        ("langchain", 4),
    ],
)
def test_an_item_that_is_perdures_own_needs_no_envelope(name: str, place: int) -> None:
    """A part that the form makes by itself is not kept again."""
    assert not any(isinstance(part, Envelope) for part in FORMS[name].message(ITEMS[name][place]).parts)


GOLDEN = Path(__file__).parents[1] / "golden"


def test_what_was_stored_gives_its_item_for_ever() -> None:
    """Envelopes of earlier releases are read as they were meant; `make.py` there wrote them, once."""
    lines = [line for path in GOLDEN.glob("foreign-*/messages.jsonl") for line in path.read_text().splitlines()]
    assert {json.loads(line)["form"] for line in lines} == set(FORMS)
    for line in lines:
        kept = json.loads(line)
        message = codec.decode_message(kept["message"].encode())
        assert same(FORMS[kept["form"]].items(message), [kept["item"]])
        left = codec.decode_message(kept["redacted"].encode())
        assert same(FORMS[kept["form"]].items(left), kept["left"])


def test_a_redacted_item_keeps_its_place() -> None:
    """Ids, links and times stay, also those that tie a result to its call; no content does."""
    for name, items in ITEMS.items():
        form = FORMS[name]
        for item in items:
            message = form.message(item)
            left = redacted(stored(message))
            given_ = form.items(left)
            told = json.dumps(given_)
            for words in SAID:
                assert words not in told, (name, words, told)
            for part in message.parts:
                if isinstance(part, ToolCall):
                    assert f'"{part.id}"' in told
                if isinstance(part, ToolResult):
                    assert f'"{part.call_id}"' in told
    (entry,) = FORMS["claude"].items(redacted(FORMS["claude"].message(ITEMS["claude"][2])))
    assert (entry["uuid"], entry["parentUuid"], entry["type"]) == ("u-3", "b7c0", "user")
    (event,) = FORMS["adk"].items(redacted(FORMS["adk"].message(ITEMS["adk"][2])))
    assert (event["id"], event["author"], event["timestamp"]) == ("0d965fda-user", "user", 1794919649.404608)


def test_a_message_of_perdures_own_is_given_in_every_form() -> None:
    """A summary, an injected message or an answer by perdure's own agent reaches the framework in its items."""
    call = ToolCall("add", {"a": 1}, "c-1")
    said = [
        Message.user("Hi", id="1"),
        Message.assistant(Thinking("Hm."), "One moment.", tool_calls=[call], id="2"),
        Message.tool("c-1", {"sum": 3}, name="add", id="3"),
        Message.system("Be brief.", id="4"),
    ]
    for form in FORMS.values():
        items = [item for message in said for item in form.items(message)]
        told = json.dumps(items)
        assert [words in told for words in ("Hi", "One moment.", "add", "c-1", "sum", "Be brief.")] == [True] * 6
        again = [form.message(item) for item in items]
        assert {part.id for message in again for part in message.tool_calls} == {"c-1"}
        assert {part.call_id for message in again for part in message.tool_results} == {"c-1"}
        assert [item for message in again for item in form.items(message)] == items
