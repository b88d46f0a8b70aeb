"""Plain, frozen JSON: no object that a caller keeps can change a value."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict, defaultdict
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from perdure import AgentDefinition, AgentState, InvalidData, Message, ModelConfig, Opaque, ToolCall, ToolResult
from perdure.model.value import FrozenDict, FrozenList, frozen, thawed


class Word(str):
    __slots__ = ()


class Colour(Enum):
    RED = "red"


class Mood(StrEnum):
    GOOD = "good"


class Level(IntEnum):
    HIGH = 3


class Weight(float):
    pass


def test_a_frozen_copy_has_plain_json_types_all_through() -> None:
    """Tuples, enums, subclasses and other mappings become the types that JSON gives."""
    given = {
        Word("tuple"): (1, (2,)),
        "enums": [Colour.RED, Mood.GOOD, Level.HIGH],
        "subclasses": OrderedDict(word=Word("x"), weight=Weight(1.5)),
        "mapping": MappingProxyType({"a": defaultdict(list, b=[None, True])}),
    }
    plain = frozen(given)
    assert plain == {
        "tuple": [1, [2]],
        "enums": ["red", "good", 3],
        "subclasses": {"word": "x", "weight": 1.5},
        "mapping": {"a": {"b": [None, True]}},
    }
    assert kinds_in(plain) <= {FrozenDict, FrozenList, str, int, float, bool, type(None)}
    assert json.loads(json.dumps(plain)) == plain


def kinds_in(value: Any) -> set[type]:
    inside = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(kinds_in, inside))


WHERE: dict[str, Any] = {
    "metadata of a message": lambda given: Message.user("x", metadata={"k": given}).metadata["k"],
    "arguments": lambda given: ToolCall("t", {"k": given}).arguments["k"],
    "opaque": lambda given: ToolCall("t", opaque=given).opaque,
    "result": lambda given: ToolResult("c", given).content,
    "tool message": lambda given: Message.tool("c", given).tool_results[0].content,
    "body": lambda given: Opaque("p", given).body,
    "metadata of a definition": lambda given: AgentDefinition("a", metadata={"k": given}).metadata["k"],
    "settings": lambda given: ModelConfig("m", settings={"k": given}).settings["k"],
    "metadata of a state": lambda given: AgentState().with_metadata("k", given).metadata["k"],
}


@pytest.mark.parametrize("where", WHERE)
def test_what_a_caller_keeps_in_hand_changes_no_value(where: str) -> None:
    """A caller may later change its list or dict at any depth: the value stays the same."""
    given = {"list": [1, {"deep": [2]}]}
    kept = WHERE[where](given)
    given["list"][1]["deep"].clear()  # type: ignore[index]
    given["list"].append(3)  # type: ignore[arg-type]
    assert kept == {"list": [1, {"deep": [2]}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept["list"].append(1),
        lambda kept: kept["list"].clear(),
        lambda kept: kept["list"].sort(),
        lambda kept: kept["list"].__setitem__(0, 1),
        lambda kept: kept["list"].__delitem__(0),
        lambda kept: kept["list"].__iadd__([1]),
        lambda kept: kept["list"][0].update(a=1),
        lambda kept: kept.pop("list"),
    ],
)
def test_a_frozen_value_refuses_every_change(change: Any) -> None:
    """A change to a frozen value is a TypeError that says how to make a changed copy."""
    kept = ToolCall("t", {"list": [{"a": 2}]}).arguments
    with pytest.raises(TypeError, match="frozen"):
        change(kept)
    assert kept == {"list": [{"a": 2}]}


def test_frozen_values_are_copied_and_pickled_as_what_they_are() -> None:
    """A copy is the value itself, and a pickled one is frozen again."""
    kept = frozen({"a": [1]})
    assert copy.deepcopy(kept) is copy.copy(kept) is kept
    assert copy.deepcopy(kept["a"]) is copy.copy(kept["a"]) is kept["a"]
    again = pickle.loads(pickle.dumps(kept))
    assert (again, type(again["a"])) == (kept, FrozenList)


def test_a_thawed_copy_may_be_changed() -> None:
    """Code that wants to change a value gets plain dicts and lists."""
    kept = frozen({"a": [{"b": 1}]})
    loose = thawed(kept)
    loose["a"][0]["b"] = 2
    loose["a"].append(3)
    assert kept == {"a": [{"b": 1}]}


def test_a_structure_that_holds_itself_is_refused_where_it_is_written() -> None:
    """It is neither copied without end nor stored."""
    loop: list[Any] = []
    loop.extend([loop, loop])
    with pytest.raises(InvalidData, match="nested deeper"):
        Message.user("x", metadata={"k": loop}).to_dict()
