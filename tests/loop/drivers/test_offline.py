"""The offline driver: its answers, its calls, and its behaviour on any input."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import codec
from perdure.errors import DriverError
from perdure.loop.drivers.offline import OfflineDriver
from perdure.loop.tools import FunctionTool, tool
from perdure.model.definition import ModelConfig
from perdure.model.message import Media, Message, Text, ToolCall
from perdure.protocols import Delta, ModelReply, ModelRequest, ToolSpec


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


def spec(made: FunctionTool) -> ToolSpec:
    return ToolSpec(made.name, made.description, made.parameters)


TOOLS = tuple(
    map(
        spec,
        (add, subtract, multiply, current_time, get_weather, get_order, cancel_order, search_docs),
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


def answered(text: str, *results: tuple[str, object] | tuple[str, object, bool]) -> list[Message]:
    """Return a user's message, the calls it led to, and their results."""
    calls = [ToolCall(result[0], id=f"call-{place}") for place, result in enumerate(results)]
    outcomes = [
        Message.tool(f"call-{place}", result[1], is_error=len(result) > 2) for place, result in enumerate(results)
    ]
    return [Message.user(text), Message.assistant(tool_calls=calls), *outcomes]


@pytest.mark.parametrize("text", ["Who are you?", "hello", "help", "What is love?", "tell me a joke"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without tools", "with tools"])
async def test_repeats_what_it_has_no_rule_for(text: str, tools: tuple[ToolSpec, ...]) -> None:
    """Any other text is repeated, with a note that this is a stand-in and not a language model."""
    said = await text_of(text, tools=tools)
    assert f"“{text}”" in said
    assert "offline stand-in, not a language model" in said


CHAT = (
    Message.user("Hello, my name is Ann. My favourite colour is dark green."),
    Message.assistant("Nice to meet you, Ann."),
    Message.user("My cats are Tom and Kit"),
    Message.assistant("Noted."),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is my name?", "Your name is Ann."),
        ("what is my favourite colour?", "Your favourite colour is dark green."),
        ("Who are my cats?", "Your cats are Tom and Kit."),
        ("Where is my hat?", "You have not told me your hat."),
        ("My name is Bea.", "Nice to meet you, Bea."),
        ("My hat is red.", "I will remember that as long as this conversation shows it."),
        ("Repeat that", "Noted."),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without tools", "with tools"])
async def test_recalls_what_it_was_told(text: str, expected: str, tools: tuple[ToolSpec, ...]) -> None:
    """Questions about earlier messages are answered from the conversation, whatever tools there are."""
    assert await text_of(*CHAT, text, tools=tools) == expected


async def test_admits_what_it_was_not_told() -> None:
    """It makes nothing up about a conversation that has only begun."""
    assert await text_of("what is my name?") == "You have not told me your name."
    assert await text_of("repeat") == "I have not said anything yet."


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("What is 2 + 3?", "5"),
        ("2+3", "5"),
        ("Hello! What is 10 - 3", "7"),
        ("And 4 + 5?", "9"),
        ("what's -3 * 7 =", "-21"),
        ("What is 10 / 4?", "2.5"),
        ("what is 0.1 + 0.2", "0.3"),
    ],
)
async def test_works_out_sums_without_a_tool(text: str, result: str) -> None:
    """A sum is answered directly if no tool fits it."""
    assert await text_of(text) == f"The answer is {result}."


async def test_says_why_a_sum_has_no_answer() -> None:
    """A sum without a result is refused."""
    assert "divides by zero" in await text_of("what is 1 / 0?")


@pytest.mark.parametrize("text", ["2025-01-31", "I bought 3 - 4 apples", "call 555-1234", "__import__('os') + 1"])
async def test_leaves_alone_what_is_no_sum(text: str) -> None:
    """Dates, ranges, telephone numbers and code are not taken for sums."""
    assert "answer is" not in await text_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is 2 + 3?", ("add", {"a": 2, "b": 3})),
        ("And 3 * 7?", ("multiply", {"x": 3, "y": 7})),
        ("10 - 2.5", ("subtract", {"a": 10, "b": 2.5})),
    ],
)
async def test_gives_a_sum_to_the_tool_that_fits_it(text: str, expected: tuple[str, dict[str, Any]]) -> None:
    """A sum is given to a tool with a matching name or description that takes two numbers."""
    assert await calls_of(text) == [expected]


async def test_a_sum_that_does_not_fit_the_tool_is_worked_out() -> None:
    """Fractions are not given to a tool for whole numbers."""
    assert await text_of("What is 2.5 + 3?", tools=[spec(add)]) == "The answer is 5.5."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('call add {"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})]),
        ("add(a=1, b=2)", [("add", {"a": 1, "b": 2})]),
        ("call add(1, 2)", [("add", {"a": 1, "b": 2})]),
        ("get_weather(city='Paris', unit=None)", [("get_weather", {"city": "Paris", "unit": None})]),
        (
            'call add {"a": 1, "b": 2} and call multiply {"x": 3, "y": 4}, add(a=5, b=6)',
            [("add", {"a": 1, "b": 2}), ("multiply", {"x": 3, "y": 4}), ("add", {"a": 5, "b": 6})],
        ),
        ('call search_docs {"query": "now and then"}', [("search_docs", {"query": "now and then"})]),
    ],
)
async def test_makes_the_calls_that_are_written_out(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    """A call that is written out is made as written, and several are made at once."""
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
    """Calls parted by `then` are made in turn, each after the one before it is answered."""
    written = "add(2, 3) then multiply(x=7, y=8)"
    assert await calls_of(written) == [("add", {"a": 2, "b": 3})]
    assert await calls_of(*answered(written, ("add", 5))) == [("multiply", {"x": 7, "y": 8})]


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
    """A message without text is still answered."""
    assert "only read text" in await text_of(Message.user(Media("image/png", data=b"")))
    assert "only read text" in await text_of()


async def test_answers_in_no_form() -> None:
    """A response format is refused at once, with a way out in the error."""
    with pytest.raises(DriverError, match=r"answers in no response format.*ScriptedDriver"):
        await respond("What is 2 + 3?", response_format={"type": "object"})


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
WILD_SCHEMAS = st.dictionaries(st.sampled_from((*KEYWORDS, "minLength", "maxLength")), WILD, max_size=6)
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
)
async def test_nothing_throws_it(messages: list[Message], tools: list[ToolSpec]) -> None:
    """It answers any conversation and any tool schemas with an assistant's message that says or calls something."""
    reply, deltas = await respond(*messages, tools=tools)
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
    """It answers a hundred thousand characters made to confuse a parser within a second, in a short text."""
    started = time.process_time()  # a busy machine must not fail the test
    reply, _ = await respond(*CHAT, text, tools=TOOLS)
    assert time.process_time() - started < 1
    assert len(reply.message.text) < 5_000
