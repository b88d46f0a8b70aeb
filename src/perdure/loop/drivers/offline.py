"""The driver that is always there: it needs no key and no network, and answers by fixed rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from perdure.loop.drivers.offline_calls import Lack, Wish, explicit_rounds, misread_call, plain_call, steps_of
from perdure.loop.drivers.offline_forms import instance
from perdure.loop.drivers.offline_sums import read_sum, written
from perdure.loop.drivers.offline_talk import Conversation, told_time, without_greeting
from perdure.loop.drivers.offline_text import Number, Reading, as_number, shortened
from perdure.model.message import Message, ToolCall, ToolResult
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.model.value import clean_text
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta

NAME = "offline"

_WORDS = re.compile(r"\S+\s*|\s+")
_NUMERIC = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_BACKWARD = re.compile(r"\b(?:it|that|the result|the answer)\b", re.IGNORECASE)


class OfflineDriver:
    """The embedded default, model name `offline`: deterministic, and not a language model.

    It holds a small conversation, works out sums, tells the time, and calls a tool where a plain request fits one.
    A call can also be written out: `call add {"a": 1, "b": 2}` or `add(a=1, b=2)`.
    """

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        """The answer to the last thing the user said, streamed word by word."""
        answer = _answer(request)
        if isinstance(answer, str):
            message = Message.assistant(answer)
            for words in _WORDS.findall(message.text):
                await on_delta(Delta("text", words))
        else:
            message = Message.assistant(tool_calls=_calls(answer, request.messages))
            for call in message.tool_calls:
                await on_delta(Delta("tool_call", _encoded(call), call.id, call.name))
        return ModelReply(message, _response(request, message))


class _Turn(NamedTuple):
    """What the user said last, what had been said before, and what tools have answered since."""

    text: str
    is_greeting: bool
    earlier: Sequence[Message]
    rounds: int
    results: list[ToolResult]
    names: dict[str, str]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> _Turn:
        spoken = [place for place, message in enumerate(messages) if message.role == "user"]
        last = spoken[-1] if spoken else -1
        text = clean_text(messages[last].text) if spoken else ""
        since = messages[last + 1 :]
        calls = [call for message in since for call in message.tool_calls]
        rounds = sum(1 for message in since if message.role == "assistant" and message.tool_calls)
        results = [result for message in since for result in message.tool_results]
        rest = without_greeting(text)
        names = {call.id: call.name for call in calls}
        return cls(rest, rest != text, messages[: max(last, 0)], rounds, results, names)


def _answer(request: ModelRequest) -> str | list[Wish]:
    turn = _Turn.of(request.messages)
    wishes, lack = _wishes(turn, request)
    if wishes:
        return wishes
    if request.response_format is not None:
        return _formed(turn, request)
    if turn.results:
        return _reported(turn)
    return _said(turn, request, lack)


def _wishes(turn: _Turn, request: ModelRequest) -> tuple[list[Wish], Lack | None]:
    """The calls to make now. One round for a message, or one for each of its steps parted by `then`."""
    if not request.tools:
        return [], None
    rounds = explicit_rounds(turn.text, request.tools)
    if rounds:
        return (rounds[turn.rounds] if turn.rounds < len(rounds) else []), None
    if turn.rounds:
        return _next_step(turn, request), None
    if Conversation(turn.earlier, request.tools).reply(turn.text) is not None or misread_call(turn.text, request.tools):
        return [], None
    steps = steps_of(turn.text)
    found = plain_call(steps[0], request.tools) if len(steps) > 1 else None
    if not isinstance(found, Wish):
        found = plain_call(turn.text, request.tools)
    return ([found], None) if isinstance(found, Wish) else ([], found)


def _next_step(turn: _Turn, request: ModelRequest) -> list[Wish]:
    steps = steps_of(turn.text)
    if turn.rounds >= len(steps) or not isinstance(plain_call(steps[0], request.tools), Wish):
        return []
    result = _numeric(turn.results)
    step = steps[turn.rounds]
    step = step if result is None else _BACKWARD.sub(written(result), step)
    found = plain_call(step, request.tools)
    return [found] if isinstance(found, Wish) else []


def _said(turn: _Turn, request: ModelRequest, lack: Lack | None) -> str:
    """An answer in words, where no tool is called."""
    conversation = Conversation(turn.earlier, request.tools)
    said = conversation.reply(turn.text) or misread_call(turn.text, request.tools) or _worked_out(turn.text)
    said = said or told_time(turn.text)
    if said is None and lack is not None:
        example = ", ".join(f"{name}=…" for name in lack.missing)
        said = f"To call {lack.tool.name} I need {', '.join(lack.missing)}; for example: {lack.tool.name}({example})."
    return said or conversation.last_resort(turn.text, is_greeting=turn.is_greeting)


def _worked_out(text: str) -> str | None:
    asked = read_sum(text)
    if asked is None:
        return None
    try:
        return f"The answer is {written(asked.value())}."
    except ZeroDivisionError:
        return "That has no answer: it divides by zero."
    except ArithmeticError as error:
        return f"I cannot work that out: {error}."


def _reported(turn: _Turn) -> str:
    """What the tools answered, in one sentence."""
    if len(turn.results) == 1:
        result = turn.results[0]
        number = _numeric(turn.results)
        if number is not None:
            return f"The answer is {written(number)}."
        return _ended(_outcome(result, turn.names))
    return _ended(", and ".join(_outcome(result, turn.names).rstrip(".") for result in turn.results))


def _outcome(result: ToolResult, names: dict[str, str]) -> str:
    name = result.name or names.get(result.call_id) or "the tool"
    text = shortened(result.text, 1_000)
    if result.is_error:
        return f"{name} failed: {text}"
    if result.content is None or not text:
        return f"{name} is done"
    return f"{name} says: {text}" if isinstance(result.content, str) and " " in text else f"{name} returned {text}"


def _ended(sentence: str) -> str:
    whole = sentence[:1].upper() + sentence[1:] if sentence.startswith("the tool") else sentence
    return whole if whole.endswith((".", "!", "?", "…")) else f"{whole}."


def _numeric(results: Sequence[ToolResult]) -> Number | None:
    """The last result, if it is a number."""
    if not results or results[-1].is_error or isinstance(results[-1].content, bool):
        return None
    text = results[-1].text.strip()
    return as_number(text) if _NUMERIC.fullmatch(text) else None


def _formed(turn: _Turn, request: ModelRequest) -> str:
    """The answer as JSON in the form that is asked for."""
    reading = Reading(turn.text, subject=turn.results[-1].text if turn.results else turn.text)
    number = _numeric(turn.results)
    asked = read_sum(turn.text)
    if number is None and asked is not None:
        try:
            number = asked.value()
        except ArithmeticError:
            number = None
    if number is not None:
        reading.numbers.insert(0, number)
    return json.dumps(instance(request.response_format, reading), ensure_ascii=False, default=str)


def _calls(wishes: Iterable[Wish], messages: Sequence[Message]) -> list[ToolCall]:
    """The calls, with ids that no other call in the conversation has, and that are the same each time."""
    taken = {call.id for message in messages for call in message.tool_calls}
    number = len(messages)
    while f"{NAME}-{number}-0" in taken:
        number += 1
    return [ToolCall(wish.tool, wish.arguments, f"{NAME}-{number}-{place}") for place, wish in enumerate(wishes)]


def _encoded(call: ToolCall) -> str:
    return msgspec.json.encode(call.arguments).decode()


def _response(request: ModelRequest, message: Message) -> InferenceResponse:
    read = len(request.system_prompt) + sum(len(message.text) for message in request.messages)
    calls = "".join(call.name + _encoded(call) for call in message.tool_calls)
    usage = Usage(input_tokens=read // 4 + 1, output_tokens=len(message.text + calls) // 4 + 1)
    reason = "tool_call" if message.tool_calls else "stop"
    return InferenceResponse(finish_reason=reason, usage=usage, model=NAME, provider=NAME)
