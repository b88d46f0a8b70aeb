"""The model `offline`, which is always there: no key, no network, and answers by a handful of fixed rules.

It makes the calls that a message writes out, works out a sum of two numbers, recalls what it was told, and repeats
the rest. Where an answer is to have a form, it repeats the JSON that a message contains. Every pattern is bounded, so
that no text can hold up a run.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.codec import check_json
from perdure.errors import DriverError
from perdure.model.message import Message, ToolCall, ToolResult
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.model.value import JSON, clean_text
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta, ToolSpec

NAME = "offline"
LONGEST = 2_000  # a plain message is short: what comes after this many characters is ignored

Number = int | float
_Arguments = dict[str, JSON]


class OfflineDriver:
    """The embedded default, model name `offline`: deterministic, and not a language model.

    Write a call out to have it made: `call add {"a": 1, "b": 2}` or `add(a=1, b=2)`; `then` between two calls makes
    it wait for the first. `What is 2 + 3?` calls a tool that adds, if there is one.
    """

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        """Answer the last message of the user in a `request`, streamed word by word to `on_delta`."""
        answer = _answer(request)
        if isinstance(answer, str):
            message = Message.assistant(answer)
            for words in _PIECES.findall(message.text):
                await on_delta(Delta("text", words))
        else:
            message = Message.assistant(tool_calls=_numbered(answer, request.messages))
            for call in message.tool_calls:
                await on_delta(Delta("tool_call", _encoded(call), call.id, call.name))
        return ModelReply(message, _response(request, message))


_PIECES = re.compile(r"\S+\s*|\s+")


class _Wish(NamedTuple):
    """A call that should be made."""

    tool: str
    arguments: _Arguments


class _Turn(NamedTuple):
    """The user's last message, what was said before it, and what tools have answered since."""

    text: str
    earlier: Sequence[Message]
    rounds: int
    results: list[ToolResult]
    names: dict[str, str]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> _Turn:
        last = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
        text = clean_text(messages[last].text) if last >= 0 else ""
        asked = [message.tool_calls for message in messages[last + 1 :] if message.tool_calls]
        results = [result for message in messages[last + 1 :] for result in message.tool_results]
        names = {call.id: call.name for calls in asked for call in calls}
        return cls(text, messages[: max(last, 0)], len(asked), results, names)


def _answer(request: ModelRequest) -> str | list[_Wish]:
    turn = _Turn.of(request.messages)
    rounds = _written_rounds(turn.text, request.tools)
    if turn.rounds < len(rounds):
        return rounds[turn.rounds]
    if request.response_format is not None:
        return _written_json(turn.text)
    if turn.results:
        return _reported(turn)
    return (
        _recalled(turn)
        or _misread(turn.text, request.tools)
        or _worked_out(turn.text, request.tools)
        or _noted(turn.text)
        or _echo(turn.text)
    )


_JSON_OPENING = re.compile(r"[{\[]")


def _written_json(text: str) -> str:
    """Return the JSON that a message writes out: this model can give no other answer in a form."""
    found = _JSON_OPENING.search(text[:LONGEST])
    try:
        value, _ = json.JSONDecoder().raw_decode(text[:LONGEST], found.start() if found else 0)
    except (ValueError, RecursionError):
        raise DriverError(
            "The model 'offline' answers in no response format unless the message has the JSON in it: it is not a "
            "language model. Name one, such as 'openai:gpt-5', or play it with perdure.testing.ScriptedDriver."
        ) from None
    return json.dumps(value, ensure_ascii=False)


_MOST_CALLS, _MOST_ARGUMENTS = 64, 100
_THEN = re.compile(r"\bthen\b", re.IGNORECASE)
_OPENING = re.compile(r"(?<![\w.-])`?([\w.-]{1,128})`?\s{0,8}(?=[{(])")
_CALLED = re.compile(r"\bcall\s{1,8}([\w.-]{1,128})\s{0,8}\{", re.IGNORECASE)
_KEYWORD = re.compile(r"([A-Za-z_]\w{0,63})\s{0,8}[=:]\s{0,8}")
_LITERAL = re.compile(r"'([^'\\\n]{0,2000})'|(True|False|None)\b")
_LITERALS = {"True": True, "False": False, "None": None}
_GAP = re.compile(r"[\s,]{0,100}")
_json = json.JSONDecoder()


def _written_rounds(text: str, tools: Sequence[ToolSpec]) -> list[list[_Wish]]:
    """Return the calls that a text writes out. Those before a `then` are made and answered before those after it."""
    rounds: list[list[_Wish]] = []
    last = 0
    for start, end, wish in _written_calls(text, {tool.name: tool for tool in tools}):
        if not rounds or _THEN.search(text, last, start):
            rounds.append([])
        rounds[-1].append(wish)
        last = end
    return rounds


def _written_calls(text: str, tools: Mapping[str, ToolSpec]) -> Iterator[tuple[int, int, _Wish]]:
    at, tried = 0, 0
    while tried < _MOST_CALLS and (opening := _OPENING.search(text, at)):
        at = opening.end()
        tool = tools.get(opening[1])
        if tool is None:
            continue
        tried += 1
        try:
            arguments, at = _arguments_at(text, at, tool)
        except (ValueError, RecursionError):
            continue  # it only looks like a call: the search continues behind its name
        yield opening.start(), at, _Wish(tool.name, arguments)


def _arguments_at(text: str, at: int, tool: ToolSpec) -> tuple[_Arguments, int]:
    """Return the arguments that begin here, by name or in the order of the parameters, and where they end."""
    if text[at] == "{":
        return _value_at(text, at)
    arguments: _Arguments = {}
    at += 1
    for _ in range(_MOST_ARGUMENTS):
        gap = _GAP.match(text, at)
        at = gap.end() if gap else at
        if text.startswith(")", at):
            return arguments, at + 1
        keyword = _KEYWORD.match(text, at)
        left = (name for name in _mapping(tool.parameters.get("properties")) if name not in arguments)
        name = keyword[1] if keyword else next(left, None)
        if name is None:
            break
        arguments[name], at = _value_at(text, keyword.end() if keyword else at)
    raise ValueError("more arguments than there are parameters")


def _value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins here, in JSON or as Python writes it, and where it ends. Else raise ValueError."""
    literal = _LITERAL.match(text, at)
    if literal:
        return (_LITERALS[literal[2]] if literal[2] else literal[1]), literal.end()
    value, end = _json.raw_decode(text, at)
    check_json(value, depth=10)
    return value, end


def _misread(text: str, tools: Sequence[ToolSpec]) -> str | None:
    """Explain why a call that is written out cannot be made."""
    called = _CALLED.search(text)
    if called is None:
        return None
    names = [tool.name for tool in tools]
    if called[1] in names:
        return f"I could not read the arguments of {called[1]}; write them as one JSON object."
    return f"I have no tool named {called[1]}; I have {', '.join(names[:20]) or 'none'}."


def _numbered(wishes: Iterable[_Wish], messages: Sequence[Message]) -> list[ToolCall]:
    """Return the calls, with ids that no other call in the conversation has, and that are the same each time."""
    taken = {call.id for message in messages for call in message.tool_calls}
    number = len(messages)
    while f"{NAME}-{number}-0" in taken:
        number += 1
    return [ToolCall(wish.tool, wish.arguments, f"{NAME}-{number}-{place}") for place, wish in enumerate(wishes)]


_NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
_SUM = re.compile(
    rf"(?:^|\b(?:and|is|what's|what’s|calculate|compute)\s{{1,9}})({_NUMBER})\s{{0,4}}([-+*/])\s{{0,4}}({_NUMBER})"
    r"[\s?=.!]{0,9}$",
    re.IGNORECASE,
)
_OPERATORS = {
    "+": (operator.add, {"add", "addition", "plus", "sum"}),
    "-": (operator.sub, {"subtract", "subtraction", "minus", "difference"}),
    "*": (operator.mul, {"multiply", "multiplication", "times", "product"}),
    "/": (operator.truediv, {"divide", "division", "quotient"}),
}


def _worked_out(text: str, tools: Sequence[ToolSpec]) -> str | list[_Wish] | None:
    """Give the sum that a text asks for to a tool that fits it, or work it out."""
    found = _SUM.search(text.strip()) if len(text) <= LONGEST else None
    if found is None:
        return None
    left, symbol, right = _as_number(found[1]), found[2], _as_number(found[3])
    work_out, words = _OPERATORS[symbol]
    # A tool that is named so comes before one that is only described so.
    for tool in sorted(tools, key=lambda tool: not words & _words(tool.name)):
        arguments = _operands(tool, left, right)
        if arguments is not None and words & _words(f"{tool.name} {tool.description[:LONGEST]}"):
            return [_Wish(tool.name, arguments)]
    if symbol == "/" and not right:
        return "That has no answer: it divides by zero."
    return f"The answer is {_written(work_out(left, right))}."


def _operands(tool: ToolSpec, *numbers: Number) -> _Arguments | None:
    """Return the arguments of a tool that requires just these numbers, in the order of its parameters."""
    properties = _mapping(tool.parameters.get("properties"))
    required = tool.parameters.get("required")
    names = [name for name in properties if name in required] if isinstance(required, list | tuple) else []
    if len(names) != len(numbers):
        return None
    fitted = dict(zip(names, numbers, strict=True))
    kinds = {name: _mapping(properties[name]).get("type") for name in names}
    fits = (kinds[name] == "number" or (kinds[name] == "integer" and type(fitted[name]) is int) for name in names)
    return fitted if all(fits) else None


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def _as_number(digits: str) -> Number:
    return float(digits) if "." in digits else int(digits)


def _written(value: Number) -> str:
    """Return a number as people write it."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


_NUMERIC = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")


def _reported(turn: _Turn) -> str:
    """Say what the tools answered, in one sentence."""
    outcomes = [_outcome(result, turn.names) for result in turn.results]
    if len(outcomes) == 1:
        result = turn.results[0]
        number = result.text.strip()
        if not result.is_error and not isinstance(result.content, bool) and _NUMERIC.fullmatch(number):
            return f"The answer is {_written(_as_number(number))}."
    else:
        outcomes = [outcome.rstrip(".") for outcome in outcomes]
    said = ", and ".join(outcomes)
    return said if said.endswith((".", "!", "?", "…")) else f"{said}."


def _outcome(result: ToolResult, names: Mapping[str, str]) -> str:
    name = result.name or names.get(result.call_id) or "the tool"
    text = _shortened(result.text, 1_000)
    if result.is_error:
        return f"{name} failed: {text}"
    if result.content is None or not text:
        return f"{name} is done"
    return f"{name} says: {text}" if isinstance(result.content, str) and " " in text else f"{name} returned {text}"


_WHAT = r"(?:\w{1,40} ){0,3}"
_FACT = re.compile(rf"\bmy ({_WHAT}?\w{{1,40}}) (is|are) ([^.!?\n]{{1,200}})", re.IGNORECASE)
_FACT_ASKED = re.compile(rf"(?:what|who|where|when) (?:is|are|was) my ({_WHAT}\w{{1,40}})\W{{0,9}}", re.IGNORECASE)
_REPEAT = re.compile(r"repeat(?: that)?\W{0,9}", re.IGNORECASE)


def _recalled(turn: _Turn) -> str | None:
    """Answer a question about what was said before: it shows that a session is remembered."""
    text = turn.text[:LONGEST].strip()
    if _REPEAT.fullmatch(text):
        said = [message.text for message in turn.earlier if message.role == "assistant" and message.text.strip()]
        return said[-1] if said else "I have not said anything yet."
    asked = _FACT_ASKED.fullmatch(text)
    if asked is None:
        return None
    told = [message.text[:LONGEST] for message in turn.earlier if message.role == "user"]
    for fact in (fact for text in reversed(told) for fact in _FACT.finditer(text)):
        if fact[1].lower() == asked[1].lower():
            return f"Your {asked[1]} {fact[2].lower()} {fact[3].strip()}."
    return f"You have not told me your {asked[1]}."


def _noted(text: str) -> str | None:
    """Answer a user who tells something about themselves."""
    fact = _FACT.search(text[:LONGEST])
    if fact is None or "?" in text:
        return None
    if fact[1].lower() == "name":
        return f"Nice to meet you, {_shortened(fact[3], 80)}."
    return "I will remember that as long as this conversation shows it."


def _echo(text: str) -> str:
    if not text.strip():
        return "I can only read text, and there is none in your message."
    return (
        f"You said: “{_shortened(text, 80)}”. I am perdure's offline stand-in, not a language model: I make calls that "
        "are written out, such as add(a=1, b=2), and work out sums, such as 2 + 3. For more, choose a model."
    )


def _shortened(text: str, length: int) -> str:
    """Return a text on one line, and no longer than this."""
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a part of a tool's schema, which may come from anywhere: what is not a mapping counts as an empty one."""
    return value if isinstance(value, Mapping) else {}


def _encoded(call: ToolCall) -> str:
    return msgspec.json.encode(call.arguments).decode()


def _response(request: ModelRequest, message: Message) -> InferenceResponse:
    read = len(request.system_prompt) + sum(len(message.text) for message in request.messages)
    calls = "".join(call.name + _encoded(call) for call in message.tool_calls)
    usage = Usage(input_tokens=read // 4 + 1, output_tokens=len(message.text + calls) // 4 + 1)
    reason = "tool_call" if message.tool_calls else "stop"
    return InferenceResponse(finish_reason=reason, usage=usage, model=NAME, provider=NAME)
