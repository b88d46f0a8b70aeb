"""Tools: descriptions from hints and docstrings, fitting arguments, and the agents that may use a tool."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from perdure import ConfigurationError, FunctionTool, ToolCall, ToolContext, ToolError, ToolRegistry, tool
from perdure.loop import tools

CONTEXT = ToolContext("call", "run", "agent")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Size(TypedDict):
    width: int


class Street(BaseModel):
    name: str


class Address(BaseModel):
    street: Street
    others: list[Street] = []


class Node(BaseModel):
    children: list[Node] = []


MISSING = object()


@tool
def everything(
    text: str,
    colour: Colour,
    unit: Literal["m", "km"],
    points: list[Point],
    size: Size,
    address: Address,
    node: Node,
    limit: Annotated[int, msgspec.Meta(ge=1, le=9)] = 5,
    note: str | None = None,
    lenient: int = None,  # type: ignore[assignment]  # noqa: RUF013  # as many write it
    places: tuple[int, ...] = (1, 2),
    sentinel: Any = MISSING,
    context: ToolContext | None = None,
) -> str:
    """Do everything.

    And say so.

    Args:
        text: what to do,
            and how
        limit (int): at most so much
        *points: where

    Returns:
        text: nothing to describe a parameter with
    """
    return text


FITTING: dict[str, Any] = {
    "text": "go",
    "colour": "red",
    "unit": "km",
    "points": [{"x": 1}],
    "size": {"width": 2},
    "address": {"street": {"name": "High St"}},
    "node": {"children": [{}]},
}


def schema_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = everything.parameters["properties"][name]
    return found


def test_a_tool_is_described_by_its_function() -> None:
    """Its name is the function's, and its description is the docstring before the section on arguments."""
    assert (everything.name, everything.description) == ("everything", "Do everything.\n\nAnd say so.")
    assert schema_of("text") == {"type": "string", "description": "what to do, and how"}
    assert schema_of("limit")["description"] == "at most so much"
    assert schema_of("points")["description"] == "where"


def test_the_schema_tells_what_is_optional() -> None:
    """Parameters with a default are not required; a plain default is shown; the context is hidden."""
    assert everything.parameters["type"] == "object"
    assert everything.parameters["required"] == list(FITTING)
    assert everything.parameters["additionalProperties"] is False
    assert "context" not in everything.parameters["properties"]
    assert schema_of("limit")["default"] == 5
    assert (schema_of("limit")["minimum"], schema_of("limit")["maximum"]) == (1, 9)
    assert schema_of("lenient")["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert "default" not in schema_of("sentinel")


def test_the_schema_stands_on_its_own() -> None:
    """Every type used, however deep, is defined at the schema's root: a validator accepts what the tool accepts."""
    validator = Draft202012Validator(everything.parameters)
    validator.check_schema(everything.parameters)
    validator.validate(FITTING)
    assert not validator.is_valid({**FITTING, "address": {"street": {"name": 1}}})
    assert not validator.is_valid({**FITTING, "colour": "green"})
    assert not validator.is_valid({**FITTING, "points": [{"y": 1}]})


def test_arguments_arrive_as_the_function_takes_them() -> None:
    """Enums, dataclasses and pydantic models are made from JSON; a missing argument has its default."""
    fitted = everything.check({**FITTING, "limit": "7", "lenient": None})
    assert fitted["colour"] is Colour.RED
    assert fitted["points"] == [Point(1, 0)]
    assert fitted["address"] == Address(street=Street(name="High St"))
    assert fitted["node"] == Node(children=[Node()])
    assert (fitted["limit"], fitted["note"], fitted["places"]) == (7, None, (1, 2))
    assert fitted["sentinel"] is MISSING


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"colour": "green"}, "green"),
        ({"unit": "mile"}, "mile"),
        ({"limit": 10}, r"<= 9.*\$\.limit"),
        ({"points": [{"x": "one"}]}, r"\$\.points\[0\]\.x"),
        ({"address": {"street": {}}}, r"name(.|\n)*required(.|\n)*\$\.address"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"text": None}, r"\$\.text"),
    ],
)
def test_what_does_not_fit_is_told_so_that_it_can_be_mended(wrong: dict[str, Any], told: str) -> None:
    """The error names the place and the problem, and repeats the schema."""
    with pytest.raises(ToolError, match=told) as raised:
        everything.check({**FITTING, **wrong})
    assert "Its schema: {" in str(raised.value)


def test_a_missing_argument_is_named() -> None:
    """The error has the name of a required argument that is left out."""
    with pytest.raises(ToolError, match="missing required field `unit`"):
        everything.check({name: value for name, value in FITTING.items() if name != "unit"})


def test_a_parameter_type_may_be_named_like_the_tool() -> None:
    """A tool's own name is not mistaken for that of a type it takes."""

    def Point_tool(p: Point) -> int:
        return p.x

    made = FunctionTool(Point_tool, name="Point")
    assert made.parameters["properties"] == {"p": {"$ref": "#/$defs/Point"}}
    assert "x" in made.parameters["$defs"]["Point"]["properties"]


def test_a_function_without_hints_or_docstring_is_a_tool_too() -> None:
    """A parameter without a hint accepts any value."""

    @tool
    def bare(x, y=2):  # type: ignore[no-untyped-def]
        return x

    assert bare.description == ""
    assert bare.parameters["properties"] == {"x": {}, "y": {"default": 2}}
    assert bare(3) == 3, "it can still be called directly"


def _hidden(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda *args: args, "cannot be filled in"),
        (lambda **kwargs: kwargs, "cannot be filled in"),
        (lambda x, /: x, "cannot be filled in"),
        (lambda: None, "cannot name a tool"),
        (_hidden, "NoSuchType"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, told: str) -> None:
    """A function that a model could not call is a ConfigurationError when the tool is made."""
    with pytest.raises(ConfigurationError, match=told):
        FunctionTool(function, name=None if told == "cannot name a tool" else "odd")


def test_a_type_without_a_schema_is_refused() -> None:
    """A parameter that no JSON can fill is a ConfigurationError."""

    class Opaque:
        pass

    def handle(thing: object) -> None: ...

    handle.__annotations__["thing"] = Opaque
    with pytest.raises(ConfigurationError, match="Opaque"):
        FunctionTool(handle)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_is_over_zero(timeout: float) -> None:
    """A tool without any time is a mistake."""
    with pytest.raises(ConfigurationError, match="over 0"):
        FunctionTool(lambda: None, name="x", timeout=timeout)


def test_a_registry_keeps_tools_by_name() -> None:
    """Functions become tools; a second tool of a name, and values that are not tools, are refused."""

    def one() -> None: ...
    def two() -> None: ...

    registry = ToolRegistry([one, tool(two), everything])
    assert [each.name for each in registry] == ["one", "two", "everything"]
    assert ("one" in registry, "three" in registry, len(registry)) == (True, False, 3)
    with pytest.raises(ConfigurationError, match="Two tools are named 'one'"):
        registry.add(one)
    with pytest.raises(ConfigurationError, match="'spanner' is not a tool"):
        registry.add("spanner")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allow", "deny", "left"),
    [
        (None, (), ["one", "two", "three"]),
        ((), (), []),
        (("three", "one"), (), ["three", "one"]),
        (None, ("two",), ["one", "three"]),
        (("one", "two"), ("two",), ["one"]),
    ],
)
def test_tools_are_allowed_and_denied_by_name(allow: Any, deny: tuple[str, ...], left: list[str]) -> None:
    """None allows all, an empty list none, and a denial wins."""
    registry = ToolRegistry(FunctionTool(lambda: None, name=name) for name in ("one", "two", "three"))
    assert [each.name for each in registry.select(allow, deny)] == left


@pytest.mark.parametrize(("allow", "deny"), [(("four",), ()), (None, ("four",))])
def test_a_name_that_is_not_registered_is_an_error(allow: Any, deny: tuple[str, ...]) -> None:
    """A typing mistake in a list of tools is an error with the registered names."""
    with pytest.raises(ConfigurationError, match=r"No tool is named 'four'\. Registered are: one\."):
        ToolRegistry([FunctionTool(lambda: None, name="one")]).select(allow, deny)


async def test_slow_plain_tools_do_not_keep_a_quick_one_waiting() -> None:
    """However many block, a quick one begins at once: its time-out and the loop's executor are not affected."""
    release, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> str:
        begun.release()
        assert release.wait(30)
        return "slow"

    @tool(timeout=5)
    def quick() -> str:
        return "quick"

    many = [asyncio.create_task(FunctionTool(slow).call({}, CONTEXT)) for _ in range(100)]
    try:
        async with asyncio.timeout(20):
            assert await quick.call({}, CONTEXT) == "quick"
            assert await asyncio.to_thread(begun.acquire, timeout=10)
    finally:
        release.set()
    assert set(await asyncio.gather(*many)) == {"slow"}


async def test_a_plain_tool_knows_the_context_it_is_called_in() -> None:
    """Its thread has the caller's context variables, and its exceptions reach the caller."""
    where: ContextVar[str] = ContextVar("where")
    where.set("here")
    assert await FunctionTool(lambda: where.get(), name="look").call({}, CONTEXT) == "here"
    with pytest.raises(SystemExit):
        await FunctionTool(lambda: sys.exit(3), name="leave").call({}, CONTEXT)


async def test_a_tool_that_changes_its_argument_changes_nothing_else() -> None:
    """It gets a deep copy: the stored call stays as the model made it."""
    call = ToolCall("drain", {"items": [1, {"deep": [2]}], "options": {"a": [3]}})

    def drain(items: list[Any], options: dict[str, Any]) -> int:
        items[1]["deep"].clear()
        items.clear()
        options["a"].append(4)
        return 0

    await FunctionTool(drain).call(call.arguments, CONTEXT)
    assert call.arguments == {"items": [1, {"deep": [2]}], "options": {"a": [3]}}


async def test_plain_functions_called_in_turn_share_a_thread() -> None:
    """Starting a thread takes longer than most tools, so a free one is used again."""
    served: set[threading.Thread] = set()
    serve = FunctionTool(lambda: served.add(threading.current_thread()), name="serve")
    for _ in range(20):
        await serve.call({}, CONTEXT)
    assert len(served) <= tools._KEPT_THREADS


async def test_what_a_plain_function_sets_in_its_context_is_gone_in_the_next_call() -> None:
    """Calls that share a thread do not share context variables."""
    seen: ContextVar[str] = ContextVar("seen", default="nothing")

    @tool
    def look_and_leave() -> str:
        found = seen.get()
        seen.set("left behind")
        return found

    assert {await look_and_leave.call({}, CONTEXT) for _ in range(2 * tools._KEPT_THREADS)} == {"nothing"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_starts_threads_of_its_own() -> None:
    """The threads kept for later calls are the parent's: a child that waited for one would wait for ever."""
    await FunctionTool(lambda: None, name="nothing").call({}, CONTEXT)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        done = threading.Event()
        tools._threads.begin("child", done.set)
        os._exit(0 if done.wait(10) else 1)
    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0


def test_a_tool_has_the_types_of_its_function() -> None:
    """The code in tool_types.py, which mypy checks, runs as well."""
    runpy.run_path(str(Path(__file__).parent / "tool_types.py"))["calls"]()
