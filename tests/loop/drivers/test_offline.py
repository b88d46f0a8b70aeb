"""The driver that is always there: what it says, what it calls, and that nothing throws it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import codec
from perdure.loop.drivers.offline import OfflineDriver
from perdure.loop.tools import FunctionTool, tool
from perdure.model.definition import ModelConfig
from perdure.model.ids import use
from perdure.model.message import Media, Message, Text, ToolCall
from perdure.protocols import Delta, ModelReply, ModelRequest, ToolSpec
from perdure.testing.clock import FrozenClock


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def subtract(a: float, b: float) -> float:
    """Subtract b from a."""
    return a - b


@tool
def multiply(x: float, y: float) -> float:
    """Multiply two numbers."""
    return x * y


@tool
def current_time(timezone: str = "UTC") -> str:
    """The current date and time."""
    return timezone


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Get the weather forecast for a city."""
    return city + unit


@tool
def get_order(order_id: int, verbose: bool = False) -> dict[str, int]:
    """Fetch an order by its id."""
    return {"id": order_id}


@tool
def cancel_order(order_id: int) -> str:
    """Cancel an order."""
    return str(order_id)


@tool
def search_docs(query: str, limit: int = 5) -> list[str]:
    """Search the documentation."""
    return [query] * limit


@tool
def book_flight(origin: str, destination: str, passengers: int = 1) -> str:
    """Book a flight between two cities."""
    return origin + destination


@tool
def calculator(expression: str) -> float:
    """Evaluate an expression."""
    return float(expression)


@tool
def total(numbers: list[float]) -> float:
    """Sum up a list of numbers."""
    return sum(numbers)


def spec(made: FunctionTool) -> ToolSpec:
    return ToolSpec(made.name, made.description, made.parameters)


TOOLS = tuple(
    map(
        spec,
        (add, subtract, multiply, current_time, get_weather, get_order, cancel_order, search_docs, book_flight),
    )
)


async def respond(
    *said: str | Message, tools: Sequence[ToolSpec] = (), response_format: Mapping[str, Any] | None = None
) -> tuple[ModelReply, list[Delta]]:
    messages = [Message.user(given) if isinstance(given, str) else given for given in said]
    request = ModelRequest(ModelConfig("offline"), messages, tools=tuple(tools), response_format=response_format)
    deltas: list[Delta] = []

    async def keep(delta: Delta) -> None:
        deltas.append(delta)

    return await OfflineDriver().respond(request, keep), deltas


async def text_of(*said: str | Message, tools: Sequence[ToolSpec] = ()) -> str:
    reply, _ = await respond(*said, tools=tools)
    assert reply.message.tool_calls == ()
    return reply.message.text


async def calls_of(*said: str | Message, tools: Sequence[ToolSpec] = TOOLS) -> list[tuple[str, dict[str, Any]]]:
    reply, _ = await respond(*said, tools=tools)
    return [(call.name, dict(call.arguments)) for call in reply.message.tool_calls]


async def form_of(text: str, schema: Mapping[str, Any]) -> Any:
    reply, _ = await respond(text, response_format=schema)
    return json.loads(reply.message.text)


def answered(text: str, *results: tuple[str, object] | tuple[str, object, bool]) -> list[Message]:
    """A user's message, the calls it led to, and what came of them."""
    calls = [ToolCall(result[0], id=f"call-{place}") for place, result in enumerate(results)]
    outcomes = [
        Message.tool(f"call-{place}", result[1], is_error=len(result) > 2) for place, result in enumerate(results)
    ]
    return [Message.user(text), Message.assistant(tool_calls=calls), *outcomes]


@pytest.mark.parametrize(
    "text", ["Who are you?", "what are you", "are you a language model?", "hello", "Hello Bob!", "help"]
)
async def test_says_what_it_is(text: str) -> None:
    """It says plainly that it is not a language model but a stand-in."""
    said = await text_of(text)
    assert "not a language model" in said
    assert "offline stand-in" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thanks!", "You are welcome."),
        ("thank you very much", "You are welcome."),
        ("bye", "Goodbye."),
        ("my name is Ann", "Nice to meet you, Ann."),
        ("Hello, call me Ann Lee please", "Nice to meet you, Ann Lee."),
        ("repeat after me: all is well", "all is well"),
        ("", "I can only read text, and there is none in your message."),
    ],
)
async def test_has_manners(text: str, expected: str) -> None:
    """Greetings, thanks and the like are answered in kind."""
    assert await text_of(text) == expected


async def test_help_names_the_tools() -> None:
    """Whoever asks for help is told which tools there are."""
    assert "add, subtract, multiply" in await text_of("what can you do?", tools=TOOLS)
    assert "no tools" in await text_of("help")


CHAT = (
    Message.user("Hello, my name is Ann. My favourite colour is dark green."),
    Message.assistant("Nice to meet you, Ann."),
    Message.user("I like tea"),
    Message.assistant("Noted."),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is my name?", "Your name is Ann."),
        ("who am I?", "Your name is Ann."),
        ("what's my favourite colour?", "Your favourite colour is dark green."),
        (
            "What did I say first?",
            "The first thing you said was: “Hello, my name is Ann. My favourite colour is dark green.”",
        ),
        ("what did I just say?", "Before this you said: “I like tea”"),
        ("what did I say about tea?", "About tea you said: “I like tea”."),
        ("what did I say about coffee?", "You said nothing about coffee."),
        ("repeat", "Noted."),
        (
            "Please summarise our conversation so far",
            "So far you said: “Hello, my name is Ann. My favourite colour is dark green.”; “I like tea”.",
        ),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without tools", "with tools"])
async def test_recalls_what_was_said(text: str, expected: str, tools: tuple[ToolSpec, ...]) -> None:
    """Questions about the conversation are answered from it, whatever tools there are."""
    assert await text_of(*CHAT, text, tools=tools) == expected


async def test_admits_what_it_was_not_told() -> None:
    """It makes nothing up about a conversation that has only begun."""
    assert await text_of("what is my name?") == "You have not told me your name."
    assert await text_of("what did I say first?") == "You have not said anything before this."
    assert await text_of("summarise") == "Nothing has been said before this."
    assert await text_of("repeat") == "I have not said anything yet."


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("What is 2 + 3?", "5"),
        ("2+3", "5"),
        ("add 4 and 5", "9"),
        ("What is the sum of 1, 2 and 3?", "6"),
        ("multiply 3 by 7", "21"),
        ("subtract 3 from 10", "7"),
        ("what's 10 divided by 4?", "2.5"),
        ("what is 0.1 + 0.2", "0.3"),
        ("what is (2 + 3) * -4", "-20"),
        ("what is 1,000 + 005", "1005"),
        ("20% of 50", "10"),
        ("what is 2 to the power of 100?", str(2**100)),
        ("what is 7 × 6", "42"),
    ],
)
async def test_works_out_sums_without_a_tool(text: str, result: str) -> None:
    """A sum is answered directly where no tool fits it."""
    assert await text_of(text) == f"The answer is {result}."


@pytest.mark.parametrize(
    ("text", "expected"),
    [("what is 1 / 0?", "divides by zero"), ("9**9**9", "too large"), ("what is (0-8)**0.5", "real number")],
)
async def test_says_why_a_sum_has_no_answer(text: str, expected: str) -> None:
    """A sum without a result, or with one too large, is refused and not attempted."""
    assert expected in await text_of(text)


@pytest.mark.parametrize("text", ["2025-01-31", "I bought 3 - 4 apples", "call 555-1234", "__import__('os') + 1"])
async def test_leaves_alone_what_is_no_sum(text: str) -> None:
    """Dates, ranges, telephone numbers and code are not taken for sums."""
    assert "answer is" not in await text_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is 2 + 3?", ("add", {"a": 2, "b": 3})),
        ("Hi there, add 4 and 5", ("add", {"a": 4, "b": 5})),
        ("multiply 3 by 7", ("multiply", {"x": 3, "y": 7})),
        ("subtract 3 from 10", ("subtract", {"a": 10, "b": 3})),
        ("what day is it?", ("current_time", {})),
        ("What is today's date?", ("current_time", {})),
        ("look up the weather in Paris", ("get_weather", {"city": "Paris"})),
        ("What's the weather like in New York today?", ("get_weather", {"city": "New York"})),
        ("weather in Berlin in fahrenheit", ("get_weather", {"city": "Berlin", "unit": "fahrenheit"})),
        ("weather city=Oslo", ("get_weather", {"city": "Oslo"})),
        ("Could you get order 1234?", ("get_order", {"order_id": 1234})),
        ("show me order 77 verbose", ("get_order", {"order_id": 77, "verbose": True})),
        ("show order 77 without verbose", ("get_order", {"order_id": 77, "verbose": False})),
        ("cancel order 12", ("cancel_order", {"order_id": 12})),
        ("search for retry policy", ("search_docs", {"query": "retry policy"})),
        ("look up the capital of France", ("search_docs", {"query": "capital of France"})),
        ('search the docs for "exact words", limit: 3', ("search_docs", {"query": "exact words", "limit": 3})),
        (
            "book a flight from Paris to London for 2 passengers",
            ("book_flight", {"origin": "Paris", "destination": "London", "passengers": 2}),
        ),
    ],
)
async def test_calls_the_tool_that_a_plain_request_fits(text: str, expected: tuple[str, dict[str, Any]]) -> None:
    """A plain request is matched to a tool by its words, and its parameters are filled from the text."""
    assert await calls_of(text) == [expected]


async def test_gives_sums_to_calculators_and_lists() -> None:
    """A tool that takes a whole expression, or a list of numbers, is given just that."""
    assert await calls_of("what is 6 * 7?", tools=[spec(calculator)]) == [("calculator", {"expression": "6 * 7"})]
    assert await calls_of("sum of 1, 2 and 3", tools=[spec(total)]) == [("total", {"numbers": [1, 2, 3]})]


async def test_a_sum_that_does_not_fit_the_tool_is_worked_out() -> None:
    """Fractions are not given to a tool for whole numbers."""
    assert await text_of("What is 2.5 + 3?", tools=[spec(add)]) == "The answer is 5.5."


@pytest.mark.parametrize("text", ["I like the weather", "get me a coffee", "tell me a joke", "What is love?", "thanks"])
async def test_calls_nothing_that_was_not_asked_for(text: str) -> None:
    """Talk that only shares a word with a tool, or none, leads to no call."""
    assert await calls_of(text) == []


async def test_an_act_is_only_done_when_it_is_named() -> None:
    """A request to see something never calls a tool that changes it."""
    assert await calls_of("show order 12", tools=[spec(cancel_order)]) == []
    assert await calls_of("cancel order 12", tools=[spec(get_order)]) == []


async def test_says_what_a_tool_still_needs() -> None:
    """A request that leaves out what a tool requires is answered with what is missing."""
    said = await text_of("weather", tools=TOOLS)
    assert said == "To call get_weather I need city; for example: get_weather(city=…)."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('call add {"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})]),
        ("add(a=1, b=2)", [("add", {"a": 1, "b": 2})]),
        ("call add(1, 2)", [("add", {"a": 1, "b": 2})]),
        ("get_weather(city='Paris', unit=None)", [("get_weather", {"city": "Paris", "unit": None})]),
        ("call current_time", [("current_time", {})]),
        ("please call get_order with order_id 5", [("get_order", {"order_id": 5})]),
        (
            'call add {"a": 1, "b": 2} and call multiply {"x": 3, "y": 4}, add(a=5, b=6)',
            [("add", {"a": 1, "b": 2}), ("multiply", {"x": 3, "y": 4}), ("add", {"a": 5, "b": 6})],
        ),
        ('call search_docs {"query": "now and then"}', [("search_docs", {"query": "now and then"})]),
    ],
)
async def test_makes_the_calls_that_are_written_out(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    """A call that is written out is made as it stands, and several are made at once."""
    assert await calls_of(text) == expected


async def test_says_why_a_written_call_cannot_be_made() -> None:
    """An unknown tool and unreadable arguments are named."""
    assert "no tool named frob; I have add" in await text_of('call frob {"a": 1}', tools=TOOLS)
    for arguments in ('{"a": [broken', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}', '{"a": ' + "9" * 30 + "}"):
        assert "could not read the arguments of add" in await text_of(f"call add {arguments}", tools=TOOLS)


async def test_call_ids_are_the_same_each_time_and_never_used_twice() -> None:
    """Ids follow from the request alone, and avoid those that the conversation already has."""
    text = "add(1, 2) multiply(3, 4)"
    first, _ = await respond(text, tools=TOOLS)
    again, _ = await respond(text, tools=TOOLS)
    ids = [call.id for call in first.message.tool_calls]
    assert ids == [call.id for call in again.message.tool_calls] == ["offline-1-0", "offline-1-1"]
    trimmed = [Message.assistant(tool_calls=[ToolCall("add", id="offline-3-0")]), Message.tool("offline-3-0", 3)]
    later, _ = await respond(*trimmed, text, tools=TOOLS)
    assert [call.id for call in later.message.tool_calls] == ["offline-4-0", "offline-4-1"]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([("add", 5)], "The answer is 5."),
        ([("add", "5.0")], "The answer is 5."),
        ([("get_weather", "Sunny, 21 °C.")], "get_weather says: Sunny, 21 °C."),
        ([("get_order", {"id": 1})], 'get_order returned {"id":1}.'),
        ([("add", "a is missing", True)], "add failed: a is missing."),
        ([("cancel_order", None)], "cancel_order is done."),
        ([("add", 5), ("multiply", "too large", True)], "add returned 5, and multiply failed: too large."),
    ],
)
async def test_answers_with_what_the_tools_returned(results: list[Any], expected: str) -> None:
    """Results are told in one sentence, errors as errors, and no tool is called again."""
    assert await text_of(*answered("What is 2 + 3?", *results), tools=TOOLS) == expected


async def test_then_makes_one_round_a_step() -> None:
    """Steps parted by `then` are called in turn, each with the result of the one before it."""
    plain, written = "add 2 and 3 then multiply it by 4", "add(2, 3) then multiply(x=7, y=8)"
    assert await calls_of(plain) == [("add", {"a": 2, "b": 3})]
    assert await calls_of(*answered(plain, ("add", 5))) == [("multiply", {"x": 5, "y": 4})]
    assert await calls_of(written) == [("add", {"a": 2, "b": 3})]
    assert await calls_of(*answered(written, ("add", 5))) == [("multiply", {"x": 7, "y": 8})]


async def test_tells_the_time_by_the_clock_it_is_given() -> None:
    """The date comes from the replaceable clock."""
    with use(clock=FrozenClock()):
        assert await text_of("What day is it?") == "It is Wednesday, 1 January 2025, 00:00 UTC."


async def test_streams_word_by_word() -> None:
    """The pieces of text add up to the message, and a call comes as one piece."""
    reply, deltas = await respond("who are you?")
    assert len(deltas) > 10
    assert {delta.kind for delta in deltas} == {"text"}
    assert "".join(delta.text for delta in deltas) == reply.message.text
    reply, deltas = await respond("add(1, 2)", tools=TOOLS)
    assert deltas == [Delta("tool_call", '{"a":1,"b":2}', "offline-1-0", "add")]


async def test_says_what_it_used() -> None:
    """The response names the model, why it ended, and tokens by rule of thumb at no cost."""
    reply, _ = await respond("who are you?")
    response = reply.response
    assert (response.model, response.provider, response.finish_reason) == ("offline", "offline", "stop")
    assert (response.usage.input_tokens, response.usage.cost) == (len("who are you?") // 4 + 1, 0.0)
    assert response.usage.output_tokens == len(reply.message.text) // 4 + 1
    called, _ = await respond("add(1, 2)", tools=TOOLS)
    assert called.response.finish_reason == "tool_call"


async def test_reads_no_pictures() -> None:
    """A message without text is answered all the same."""
    assert "only read text" in await text_of(Message.user(Media("image/png", data=b"")))
    assert "only read text" in await text_of()


class Item(msgspec.Struct):
    name: str
    price: float
    next: Item | None


class Order(msgspec.Struct):
    total: int
    customer: str
    colour: Literal["red", "green"]
    items: tuple[Item, Item]
    is_paid: bool
    note: str | None = None


async def test_answers_in_the_form_that_is_asked_for() -> None:
    """A response format is filled with what the text says, and validates."""
    (schema,), components = msgspec.json.schema_components([Order], ref_template="#/$defs/{name}")
    made = await form_of("What is 2 + 3? customer: Ann, green please", {**schema, "$defs": components})
    order = msgspec.convert(made, Order)
    assert (order.total, order.customer, order.colour, order.note) == (5, "Ann", "green", None)


async def test_forms_take_words_and_results() -> None:
    """Text is filled with words of the request, or with what a tool returned."""
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    assert await form_of("Tell me about otters", schema) == {"answer": "Tell me about otters"}
    reply, _ = await respond(
        *answered("weather in Paris", ("get_weather", "Sunny")), tools=TOOLS, response_format=schema
    )
    assert json.loads(reply.message.text) == {"answer": "Sunny"}


async def test_schemas_that_go_in_circles_come_to_an_end() -> None:
    """A form that refers to itself is cut off where it may be, and one without a finite value still gets an answer."""
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
    made = await form_of("go", {"$ref": "#/$defs/Node", "$defs": {"Node": {**node, "required": ["next"]}}})
    while made is not None:
        made = made["next"]
    names = [f"child{place}" for place in range(9)]
    endless = {"properties": {name: {"$ref": "#"} for name in names}, "required": names}
    assert isinstance(await form_of("go", endless), dict)
    union = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 9}}, "required": ["a"]}
    assert await calls_of("get order 5", tools=[ToolSpec("get_order", "Fetch an order.", union)]) == []


def validates(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """A validator for the schemas below, written apart from the code it checks."""
    if "$ref" in schema:
        return validates(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(validates(value, branch, root) for branch in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    check: dict[str, Callable[[], bool]] = {
        "null": lambda: value is None,
        "boolean": lambda: isinstance(value, bool),
        "string": lambda: isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"],
        "integer": lambda: type(value) is int and schema["minimum"] <= value <= schema["maximum"],
        "number": lambda: type(value) in (int, float) and schema["exclusiveMinimum"] < value,
        "array": lambda: (
            isinstance(value, list)
            and len(value) >= schema["minItems"]
            and all(validates(item, schema["items"], root) for item in value)
        ),
        "object": lambda: (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value)
            and all(validates(item, schema["properties"][key], root) for key, item in value.items())
        ),
    }
    return check[schema["type"]]()


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any]) -> st.SearchStrategy[Any]:
        required = st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([])
        return required.map(lambda names: {"type": "object", "properties": properties, "required": names})

    return st.dictionaries(st.text(max_size=8), inner, max_size=4).flatmap(made)


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": 7}, {"$ref": "#/$defs/Leaf"}]),
    st.lists(st.sampled_from(["red", "green", 3, None]), min_size=1).map(lambda members: {"enum": members}),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(
        lambda sizes: {"type": "string", "minLength": min(sizes), "maxLength": max(sizes)}
    ),
    st.tuples(st.integers(-99, 99), st.integers(-99, 99)).map(
        lambda limits: {"type": "integer", "minimum": min(limits), "maximum": max(limits)}
    ),
    st.integers(-99, 99).map(lambda limit: {"type": "number", "exclusiveMinimum": limit}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        st.tuples(inner, st.integers(0, 3)).map(lambda it: {"type": "array", "items": it[0], "minItems": it[1]}),
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS, text=st.text(max_size=60) | st.just("name: Ann, 3 reds and 12 greens"))
async def test_forms_always_validate(schema: dict[str, Any], text: str) -> None:
    """Whatever the form and the text, the answer is JSON that validates."""
    root = {**schema, "$defs": {"Leaf": {"type": "boolean"}}}
    assert validates(await form_of(text, root), root, root)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
KEYWORDS = ("type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "items", "$ref", "$defs")
KINDS = ("object", "array", "string", "integer", "number", "boolean", "null", "#", "#/$defs/a", "a", "b")
WILD = st.recursive(
    st.sampled_from(KINDS) | st.integers(-9, 9) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from((*KEYWORDS, "a", "b", "minItems", "minimum", "multipleOf")), inner, max_size=4
        )
    ),
    max_leaves=12,
)
WILD_SCHEMAS = st.dictionaries(st.sampled_from((*KEYWORDS, "minLength", "maxLength")), WILD, max_size=6) | SCHEMAS
PHRASES = ("what is", "add", "a", "b", "=", ":", "2", "3.5", "-7", "then", "call", "tool_a", "{", "}", "(", ")", '"')
PHRASES += ("order", "look up", "in", "for", "the time", "my name is", "?", "'", ",", "\ud800", "\x00", "٣", "🙂", "\n")
TEXTS = st.text(max_size=80) | st.lists(st.sampled_from(PHRASES), max_size=20).map(" ".join)
SPECS = st.builds(
    ToolSpec,
    st.sampled_from(["tool_a", "add", "getOrder", "order", "now"]) | st.text(min_size=1, max_size=10),
    TEXTS,
    WILD_SCHEMAS,
)
MESSAGES = st.one_of(
    TEXTS.map(lambda text: Message("user", (Text(text),))),
    TEXTS.map(Message.assistant),
    TEXTS.map(Message.system),
    st.builds(lambda name: Message.assistant(tool_calls=[ToolCall(name, id="offline-1-0")]), st.text(max_size=5)),
    st.builds(lambda content, bad: Message.tool("offline-1-0", content, is_error=bad), JSONS, st.booleans()),
)


@given(
    messages=st.lists(MESSAGES, max_size=6),
    tools=st.lists(SPECS, max_size=4, unique_by=lambda given: given.name),
    response_format=st.none() | WILD_SCHEMAS,
)
async def test_nothing_throws_it(
    messages: list[Message], tools: list[ToolSpec], response_format: dict[str, Any] | None
) -> None:
    """Any conversation and any tool schemas lead to an assistant's message that says or calls something."""
    reply, deltas = await respond(*messages, tools=tools, response_format=response_format)
    message = reply.message
    assert message.role == "assistant"
    assert message.tool_calls or message.text
    assert {call.name for call in message.tool_calls} <= {given.name for given in tools}
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == message.text
    assert codec.decode_message(codec.encode_message(message)) == message


HOSTILE = {
    "brackets": "(" * 100_000,
    "squares": "call add {" + "[" * 100_000,
    "braces": 'call add {"a":' * 10_000,
    "calls": "add(" * 25_000,
    "minuses": "what is " + "-" * 100_000 + "1",
    "sum": "what is " + "1+" * 50_000 + "1",
    "digits": "what is 2 + " + "9" * 100_000,
    "powers": "what is " + "9**" * 60 + "9",
    "spaces": "hello" + " " * 100_000 + "x",
    "prepositions": "look up " + "in for of " * 10_000,
    "steps": "add 1 and 2 then " * 6_000,
    "quotes": "search for " + "'\"“`" * 25_000,
    "word": "a" * 100_000 + "!",
    "names": "my name is " * 10_000,
    "pairs": "city: " * 20_000,
    "summary": "summarise " * 10_000,
    "marks": "\u0301" * 100_000,
    "right to left": "\u202e\u0000🙂" * 30_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_text_is_answered_at_once(text: str) -> None:
    """A hundred thousand characters made to confuse a parser are answered within a second, shortly."""
    started = time.process_time()  # a busy machine is no reason to fail
    reply, _ = await respond(*CHAT, text, tools=TOOLS)
    assert time.process_time() - started < 1
    assert len(reply.message.text) < 5_000
