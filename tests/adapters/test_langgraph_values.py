"""LangGraph's values as JSON, and the views of its messages: all of them come back the same."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import uuid
from typing import Any

import pytest

pytest.importorskip("langgraph.checkpoint.base")

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Interrupt, Send

from perdure import Message
from perdure.adapters.foreign import is_plain
from perdure.adapters.langgraph_messages import MessageViews
from perdure.adapters.langgraph_values import kept, value_of
from perdure.model.transcript import Transcript

SERDE = JsonPlusSerializer()


class Colour(enum.StrEnum):
    """An enum whose members are equal to texts."""

    RED = "red"


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8)
    | st.uuids()
    | st.datetimes()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.just(Colour.RED)
)
keys = st.text(max_size=4) | st.sampled_from(["$", "$map", "$5", "~", "~part", "json"]) | st.integers(0, 9)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | inner.map(lambda value: Send("node", value))
        | inner.map(lambda value: Interrupt(value=value, id="i"))
        | inner.map(lambda value: AIMessage("said", additional_kwargs={"v": value}))
    ),
    max_leaves=12,
)


@given(values)
def test_any_value_comes_back_as_langgraph_itself_would_read_it(value: Any) -> None:
    """It keeps its types, and is stored as JSON that perdure leaves unchanged."""
    stored = kept(value, SERDE)
    assert is_plain(stored)
    found, theirs = value_of(stored, SERDE), SERDE.loads_typed(SERDE.dumps_typed(value))
    assert repr(found) == repr(theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf, bytearray(b"x"), {1: {2: 3}}, {"$map": [[1, 2]]}, 2**64 - 1])
def test_what_json_cannot_say_is_told(value: Any) -> None:
    """Numbers that are not finite, bytes, and keys that are not texts or look like perdure's are marked."""
    assert repr(value_of(kept(value, SERDE), SERDE)) == repr(value)


def test_texts_in_objects_can_be_read() -> None:
    """A redaction can find them."""
    waiting = Interrupt(value="May I?", id="i")
    stored = kept([Send("n", {"m": [HumanMessage("Hello")]}), waiting, datetime.date(2026, 1, 2)], SERDE)
    assert "objects" in stored
    for text in ("Hello", "May I?", "langgraph.types"):
        assert text in str(stored)
    assert kept(uuid.UUID(int=7), SERDE)["objects"] == {"$0": ["uuid", "UUID", f"{7:032x}"]}
    assert value_of(kept(decimal.Decimal("1.10"), SERDE), SERDE) == decimal.Decimal("1.10")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
ids = st.sampled_from([f"m{number}" for number in range(6)]) | st.none()
spoken = st.text(max_size=5)
messages = st.one_of(
    st.builds(lambda text, own: HumanMessage(text, id=own), spoken, ids),
    st.builds(lambda text, own: SystemMessage(text, id=own), spoken, ids),
    st.builds(lambda text, own, more: AIMessage(text, id=own, additional_kwargs={"k": more}), spoken, ids, json_values),
    st.builds(lambda text, own: AIMessage(text, id=own, made_up=[text]), spoken, ids),  # LangChain allows such fields
    st.builds(lambda own, text: ToolMessage(text, tool_call_id="c", id=own, artifact={text}), ids, spoken),
)
lists = st.lists(messages, max_size=6)


@given(st.lists(lists, min_size=1, max_size=5))
def test_any_list_of_messages_comes_back_whatever_came_before(wanted: list[list[BaseMessage]]) -> None:
    """Each list is a view that reuses the previous one's messages where it can, and shows exactly its own."""
    views, base = MessageViews(), Transcript()
    for each in wanted:
        drawn = views.view(base, each, SERDE)
        views.remember(drawn.transcript, drawn, SERDE)
        assert dumped(views.messages(drawn.transcript, SERDE)) == dumped(each)
        assert dumped(MessageViews().messages(drawn.transcript, SERDE)) == dumped(each)
        again = views.view(drawn.transcript, views.messages(drawn.transcript, SERDE), SERDE)
        assert again.transcript is drawn.transcript
        base = drawn.transcript


@pytest.mark.parametrize("changed", [0, 1, 127, 128, 129, 255, 256, 299])
def test_one_message_of_many_that_was_changed_in_place_is_noticed(changed: int) -> None:
    """Only that message is stored again, at any position."""
    views, said = MessageViews(), [HumanMessage(f"{number}", id=f"id-{number}") for number in range(300)]
    drawn = views.view(Transcript(), said, SERDE)
    views.remember(drawn.transcript, drawn, SERDE)
    said[changed].additional_kwargs["edited"] = True
    again = views.view(drawn.transcript, said, SERDE)
    known = {message.id for message in drawn.transcript if message.id != f"id-{changed}"}
    kept_as_they_are = set(map(id, drawn.transcript)) & set(map(id, again.transcript))
    assert len(known) == len(kept_as_they_are) == 299
    assert dumped(views.messages(again.transcript, SERDE)) == dumped(said)


def dumped(found: list[BaseMessage]) -> list[Any]:
    return [(type(each), each.model_dump()) for each in found]


def test_what_stays_is_not_stored_again() -> None:
    """It is not, whether a message is removed, put in between, or moved to the end."""
    views = MessageViews()
    all_of_them = [HumanMessage(str(number), id=str(number)) for number in range(100)]
    base = views.view(Transcript(), all_of_them, SERDE).transcript
    known = set(map(id, base))
    for wanted in (
        all_of_them[1:],
        [*all_of_them[:50], HumanMessage("new", id="new"), *all_of_them[50:]],
        all_of_them[:10] + all_of_them[20:30] + all_of_them[90:],
        all_of_them[::2],
    ):
        drawn = views.view(base, wanted, SERDE).transcript
        assert [message.text for message in drawn] == [message.text for message in wanted]
        assert sum(id(message) not in known for message in drawn) == sum(each.id == "new" for each in wanted)


def test_a_message_with_several_results_is_several_messages() -> None:
    """perdure keeps the results of one answer together; LangChain has one message for each."""
    views = MessageViews()
    base = Transcript.of([Message.user("Go"), Message("tool", (*results("a"), *results("b"))), Message.user("Well?")])
    found = views.messages(base, SERDE)
    assert [each.type for each in found] == ["human", "tool", "tool", "human"]
    drawn = views.view(base, [*found, AIMessage("Fine", id="f")], SERDE).transcript
    assert len(drawn) == 4
    assert drawn.cut(0, 3) == base
    assert len(views.view(base, found[:2], SERDE).transcript) == 2


def results(call: str) -> tuple[Any, ...]:
    return Message.tool(call, "done").parts


def test_a_message_that_is_handed_out_is_its_receivers() -> None:
    """A change to one copy does not show in another, and is noticed when it comes back."""
    views = MessageViews()
    call = {"name": "look", "args": {"at": 1}, "id": "c"}
    base = views.view(Transcript(), [AIMessage("x", id="1", tool_calls=[call])], SERDE).transcript
    (one,), (other,) = views.messages(base, SERDE), views.messages(base, SERDE)
    assert isinstance(one, AIMessage)
    one.tool_calls[0]["args"]["at"] = 2
    one.additional_kwargs["more"] = True
    assert other == views.messages(base, SERDE)[0] != one
    changed = views.view(base, [one], SERDE).transcript
    assert views.messages(changed, SERDE) == [one]
    assert one.model_copy(deep=True) == one
