"""From any history to a list of messages that every provider accepts: one function, wherever the history comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from perdure.model.message import Message, Part, Text, ToolCall, ToolResult
from perdure.model.transcript import Transcript

NO_RESULT = (
    "This call was interrupted and its outcome is unknown: it may or may not have taken effect. "
    "Check before you make it again."
)


def compile_prompt(
    messages: Sequence[Message], *, keep_traces: bool = True, execution_id: str | None = None
) -> tuple[Message, ...]:
    """The messages to send: every tool call is followed at once by exactly one result, and no result stands alone.

    With `keep_traces=False` the tool traces of earlier runs than `execution_id` are left out.
    """
    shown = messages if keep_traces else _without_traces(messages, execution_id)
    return tuple(_paired(list(shown)))


class Prompt(Sequence[Message]):
    """A compiled prompt, compiled when it is first looked at: a driver that needs no history pays for none."""

    def __init__(
        self, messages: Sequence[Message], compiled: Callable[[Any], tuple[Message, ...]] = compile_prompt
    ) -> None:
        self._messages = messages
        self._compile = compiled

    @cached_property
    def _compiled(self) -> tuple[Message, ...]:
        return self._compile(self._messages)

    def __len__(self) -> int:
        return len(self._compiled)

    def __getitem__(self, index: Any) -> Any:
        return self._compiled[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._compiled)


class Prompts:
    """The prompts of one run. Each goes on from the last one that was compiled: a step costs what the step adds.

    No longer than a run: between runs a message may be redacted, and is to be forgotten here too.
    """

    def __init__(self) -> None:
        self._seen = Transcript()
        self._closed: tuple[Message, ...] = ()

    def of(self, transcript: Transcript) -> Prompt:
        return Prompt(transcript, self._compiled)

    def _compiled(self, transcript: Transcript) -> tuple[Message, ...]:
        if not transcript.extends(self._seen):
            self._seen, self._closed = Transcript(), ()
        new = list(transcript[len(self._seen) :])
        answered = _answered_until(new)
        self._seen = transcript[: len(self._seen) + answered]
        self._closed += tuple(_paired(new[:answered]))
        return self._closed + tuple(_paired(new[answered:]))


def _answered_until(messages: Sequence[Message]) -> int:
    """How many of the first messages have no call among them that still waits for its result."""
    waiting: set[str] = set()
    until = 0
    for place, message in enumerate(messages, 1):
        if not _is_text(message):
            waiting.update(call.id for call in message.tool_calls)
            waiting.difference_update(result.call_id for result in message.tool_results)
        if not waiting:
            until = place
    return until


def _without_traces(messages: Iterable[Message], execution_id: str | None) -> Iterator[Message]:
    for message in messages:
        if not message.is_trace or message.metadata.get("execution_id") == execution_id:
            yield message


def _paired(messages: list[Message]) -> Iterator[Message]:
    results = _Results(messages)
    for place, message in enumerate(messages):
        if _is_text(message) and message.role != "tool":
            yield message
            continue
        calls = _distinct(message.tool_calls) if message.role == "assistant" else ()
        said = tuple(part for part in message.parts if _stands_alone(part) or any(part is call for call in calls))
        if said and message.role != "tool":
            yield message if len(said) == len(message.parts) else replace(message, parts=said)
        for call in calls:
            yield results.take(call, at=place)


def _is_text(message: Message) -> bool:
    """Whether a message is a text and nothing else, as most are; the rest of the work is for the others."""
    return len(message.parts) == 1 and type(message.parts[0]) is Text


def _stands_alone(part: Part) -> bool:
    return not isinstance(part, ToolCall | ToolResult)


class _Results:
    """The results in a history, each to be taken by the call it answers: the nearest earlier one with its id."""

    def __init__(self, messages: list[Message]) -> None:
        self._by_call: dict[str, list[tuple[int, Message, ToolResult]]] = {}
        self._places: dict[str, list[int]] = {}
        for place, message in enumerate(messages):
            if _is_text(message):
                continue
            for result in message.tool_results:
                self._by_call.setdefault(result.call_id, []).append((place, message, result))
            for call in message.tool_calls if message.role == "assistant" else ():
                self._places.setdefault(call.id, []).append(place)

    def take(self, call: ToolCall, at: int) -> Message:
        """The first result of a call that stands before the next call with the same id."""
        until = next((place for place in self._places[call.id] if place > at), None)
        for place, message, result in self._by_call.get(call.id, ()):
            if place >= at and (until is None or place < until):
                is_bare = message.role == "tool" and len(message.parts) == 1
                return message if is_bare else replace(message, role="tool", parts=(result,))
        return Message.tool(call.id, NO_RESULT, name=call.name, is_error=True, id=f"unknown-{call.id}")


def _distinct(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls, but of those that share an id the first: it is the one that a run carries out."""
    by_id: dict[str, ToolCall] = {}
    for call in calls:
        by_id.setdefault(call.id, call)
    return tuple(by_id.values())
