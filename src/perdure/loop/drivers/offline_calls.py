"""Which tools a message asks for: written out, or meant by a plain request that one of them fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perdure.codec import check_json
from perdure.errors import InvalidData
from perdure.loop.drivers.offline_forms import (
    MISSING,
    coerce,
    fill_arguments,
    is_number,
    mapping,
    options,
    required_names,
)
from perdure.loop.drivers.offline_sums import Sum, read_sum
from perdure.loop.drivers.offline_talk import asks_time
from perdure.loop.drivers.offline_text import LONGEST, plain, split_name, stem, stems, vocabulary
from perdure.model.value import JSON
from perdure.protocols import ToolSpec

_MOST_CALLS = 64


class Wish(NamedTuple):
    """A call that should be made."""

    tool: str
    arguments: dict[str, JSON]


class Lack(NamedTuple):
    """A tool that fits a request, and the parameters that the request says nothing about."""

    tool: ToolSpec
    missing: list[str]


def explicit_rounds(text: str, tools: Sequence[ToolSpec]) -> list[list[Wish]]:
    """The calls that a text writes out: `call add {"a": 1, "b": 2}` or `add(a=1, b=2)`. `then` starts a new round."""
    rounds: list[list[Wish]] = []
    last = 0
    for start, end, wish in _written_calls(text, {tool.name: tool for tool in tools}):
        if not rounds or _THEN.search(text, last, start):
            rounds.append([])
        rounds[-1].append(wish)
        last = end
    return rounds


def misread_call(text: str, tools: Sequence[ToolSpec]) -> str | None:
    """What to say of a call that is written out and cannot be made."""
    called = _CALLED.search(text)
    if called is None:
        return None
    names = [tool.name for tool in tools]
    if called[1] in names:
        return f"I could not read the arguments of {called[1]}; write them as one JSON object."
    return f"There is no tool named {called[1]}; I have {', '.join(names[:20]) or 'none'}."


def plain_call(text: str, tools: Sequence[ToolSpec]) -> Wish | Lack | None:
    """The call that a plain request comes to, if a tool fits it."""
    asked = read_sum(text)
    if asked is not None:
        return _for_sum(asked, tools)
    return _for_request(text, tools)


def steps_of(text: str) -> list[str]:
    """The parts of a request that are parted by `then`."""
    return [step.strip(" ,.;") for step in _THEN.split(text) if step.strip(" ,.;")]


_THEN = re.compile(r"\bthen\b", re.IGNORECASE)
_OPENING = re.compile(r"(?<![\w.-])(?:(call)\s{1,8})?`?([\w.-]{1,128})`?\s{0,8}", re.IGNORECASE)
_CALLED = re.compile(r"\bcall\s{1,8}([\w.-]{1,128})\s{0,8}\{", re.IGNORECASE)
_KEYWORD = re.compile(r"([A-Za-z_]\w{0,63})\s{0,8}[=:]\s{0,8}")
_LITERAL = re.compile(r"'([^'\\\n]{0,2000})'|(True|False|None)\b")
_GAP = re.compile(r"[\s,]{0,100}")
_LITERALS = {"True": True, "False": False, "None": None}
_json = json.JSONDecoder()


def _written_calls(text: str, tools: dict[str, ToolSpec]) -> Iterator[tuple[int, int, Wish]]:
    at, count = 0, 0
    while count < _MOST_CALLS and (opening := _OPENING.search(text, at)):
        at = opening.end()
        tool = tools.get(opening[2])
        if tool is None:
            continue
        count += 1
        read = _arguments_at(text, at, tool, is_called=opening[1] is not None)
        if read is not None:
            at = read[1]
            yield opening.start(), at, Wish(tool.name, read[0])


def _arguments_at(text: str, at: int, tool: ToolSpec, *, is_called: bool) -> tuple[dict[str, JSON], int] | None:
    following = text[at : at + 1]
    if following == "{":
        value, end = _json_at(text, at)
        return (value, end) if isinstance(value, dict) else None
    if following == "(":
        return _listed_at(text, at + 1, tool)
    if not is_called:
        return None
    end = min(_end_of_phrase(text, at), at + 500)
    return fill_arguments(tool.parameters, text[at:end], stems(split_name(tool.name)) | _WITH)[0], end


_WITH = {"with", "on", "for", "using"}
_NEXT_CALL = re.compile(r"\n|;|\b(?:and\s+)?call\b|\bthen\b", re.IGNORECASE)


def _end_of_phrase(text: str, at: int) -> int:
    found = _NEXT_CALL.search(text, at, at + 500)
    return found.start() if found else len(text)


def _listed_at(text: str, at: int, tool: ToolSpec) -> tuple[dict[str, JSON], int] | None:
    """Arguments up to a closing bracket, by name or in the order of the parameters."""
    arguments: dict[str, JSON] = {}
    names = [str(name) for name in mapping(tool.parameters.get("properties"))]
    for _ in range(100):
        at = _end_of_gap(text, at)
        if text.startswith(")", at):
            return arguments, at + 1
        keyword = _KEYWORD.match(text, at)
        value, at = _literal_at(text, keyword.end() if keyword else at)
        left = [name for name in names if name not in arguments]
        name = keyword[1] if keyword else (left[0] if left else None)
        if value is MISSING or name is None:
            return None
        arguments[name] = value
    return None


def _end_of_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _literal_at(text: str, at: int) -> tuple[JSON, int]:
    literal = _LITERAL.match(text, at)
    if literal:
        return (_LITERALS[literal[2]] if literal[2] else literal[1]), literal.end()
    return _json_at(text, at)


def _json_at(text: str, at: int) -> tuple[JSON, int]:
    """The JSON value that stands here, if it is one that can be stored, and where it ends."""
    try:
        value, end = _json.raw_decode(text, at)
        check_json(value, depth=10)
    except (ValueError, RecursionError, InvalidData):
        return MISSING, at
    return value, end


_OPERATION_WORDS = {
    "+": {"add", "sum", "plus", "addition", "total"},
    "-": {"subtract", "minus", "difference", "subtraction"},
    "*": {"multiply", "product", "time", "multiplication", "mul"},
    "/": {"divide", "division", "quotient", "div"},
    "//": {"floor", "floordiv"},
    "%": {"modulo", "mod", "remainder"},
    "**": {"power", "pow", "exponent"},
}
_CALCULATORS = {"calculate", "calculator", "calc", "arithmetic", "evaluate", "expression", "math"}


def _for_sum(asked: Sum, tools: Sequence[ToolSpec]) -> Wish | None:
    if asked.operator is not None:
        for words_of in (_name_words, _all_words):
            for tool in tools:
                if _OPERATION_WORDS[asked.operator] & words_of(tool):
                    fitted = _operands_for(asked, tool)
                    if fitted is not None:
                        return Wish(tool.name, fitted)
    return next(filter(None, (_calculation(asked, tool) for tool in tools)), None)


def _operands_for(asked: Sum, tool: ToolSpec) -> dict[str, JSON] | None:
    """The sum's numbers as the arguments of a tool that takes just these: one by one, or in a list."""
    required = _required(tool)
    if len(required) == len(asked.operands) == 2 and all(map(is_number, required.values())):
        pairs = zip(required.items(), asked.operands, strict=True)
        fitted = {name: _fit(number, kinds) for (name, kinds), number in pairs}
        return None if MISSING in fitted.values() else fitted
    if len(required) == 1:
        ((name, kinds),) = required.items()
        items = [mapping(kind.get("items")) for kind in kinds if kind.get("type") == "array"]
        numbers = [_fit(number, items) for number in asked.operands]
        return {name: numbers} if is_number(items) and MISSING not in numbers else None
    return None


def _fit(number: int | float, kinds: Sequence[Mapping[str, Any]]) -> JSON:
    values = (coerce(number, kind) for kind in kinds if is_number([kind]))
    return next((value for value in values if value is not MISSING), MISSING)


def _calculation(asked: Sum, tool: ToolSpec) -> Wish | None:
    required = _required(tool)
    if len(required) != 1 or not _CALCULATORS & _all_words(tool):
        return None
    ((name, kinds),) = required.items()
    takes_text = any(kind.get("type") == "string" and "enum" not in kind for kind in kinds)
    return Wish(tool.name, {name: asked.expression}) if takes_text else None


def _required(tool: ToolSpec) -> dict[str, list[Mapping[str, Any]]]:
    properties = mapping(tool.parameters.get("properties"))
    return {name: options(properties.get(name), tool.parameters) for name in required_names(tool.parameters)}


_COMMON = vocabulary(
    "the a an is are was be of to and or in for on at by with from me my i you your it its this that what who where "
    "when which how please can could would will do does did not no given some any all as if there use used using value "
    "return returns result number string text name one two"
)
_VERBS = vocabulary("get show fetch tell give check list do run make read see")
_SAME = {
    **dict.fromkeys(vocabulary("lookup find query google look"), "search"),
    **dict.fromkeys(vocabulary("day today time clock calendar weekday datetime now month year"), "date"),
}
_ASKING = vocabulary(
    "what which who whose where when why how is are was do does did has have can could would will please get show find "
    "fetch list check tell give look lookup search read see use ask let convert translate count calculate"
)
_ACTS = vocabulary(  # a tool that does one of these is called only when the request says so
    "send create make set add remove delete update cancel book buy pay write post start stop open close run move"
)
_POLITE = vocabulary("please can could would will you kindly i want to need like")
_BY_NAME, _ENOUGH = 3, 2


def _for_request(text: str, tools: Sequence[ToolSpec]) -> Wish | Lack | None:
    """The best of the tools whose words overlap with those of the request."""
    said = plain(text[:LONGEST]).replace("look up", "lookup").split()
    said = said[next((place for place, word in enumerate(said) if word not in _POLITE), 0) :]
    if not said:
        return None
    said = [word for word in said if word not in ("today", "now")] + ["date"] * asks_time(text)
    scored = [(_score(said, text, tool), tool) for tool in tools]
    fitting = sorted((pair for pair in scored if pair[0] >= _ENOUGH), key=lambda pair: -pair[0])
    lack = None
    for score, tool in fitting:
        arguments, missing = fill_arguments(tool.parameters, text, _name_words(tool))
        if not missing:
            return Wish(tool.name, arguments)
        if lack is None and score >= _BY_NAME:
            lack = Lack(tool, missing)
    return lack


def _score(said: list[str], text: str, tool: ToolSpec) -> int:
    """How well a tool fits a request: words of its name count for more than words of its description."""
    name, described = _name_words(tool), _all_words(tool)
    if "?" not in text and said[0] not in _ASKING | _ACTS and stem(said[0]) not in name:
        return 0
    if not name & _ACTS <= set(said) or (said[0] in _ACTS and said[0] not in described):
        return 0
    own = _forms(name) - _VERBS - _COMMON or _forms(name) - _VERBS or _forms(name)
    wanted = _forms(said) - (_COMMON - own)
    other = _forms(described) - own - _VERBS - _COMMON
    return _BY_NAME * len(wanted & own) + len(wanted & other)


def _forms(words: Iterable[str]) -> set[str]:
    """Words in one form for all that mean the same."""
    return {_SAME.get(word, word) for word in stems(words)}


def _name_words(tool: ToolSpec) -> set[str]:
    return stems(split_name(tool.name))


def _all_words(tool: ToolSpec) -> set[str]:
    described = (word for word in plain(tool.description[:1_000]).split() if word not in _COMMON)
    return _name_words(tool) | stems(described)
