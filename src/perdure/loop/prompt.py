"""From any history to a list of messages that every provider accepts: one function, wherever the history comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from perdure.model.message import Message, ToolCall, ToolResult

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

    def __init__(self, messages: Sequence[Message], *, keep_traces: bool, execution_id: str | None) -> None:
        self._messages = messages
        self._keep_traces = keep_traces
        self._execution_id = execution_id

    @cached_property
    def _compiled(self) -> tuple[Message, ...]:
        return compile_prompt(self._messages, keep_traces=self._keep_traces, execution_id=self._execution_id)

    def __len__(self) -> int:
        return len(self._compiled)

    def __getitem__(self, index: Any) -> Any:
        return self._compiled[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._compiled)


def _without_traces(messages: Iterable[Message], execution_id: str | None) -> Iterator[Message]:
    for message in messages:
        if not message.is_trace or message.metadata.get("execution_id") == execution_id:
            yield message


def _paired(messages: list[Message]) -> Iterator[Message]:
    results = _Results(messages)
    for place, message in enumerate(messages):
        if message.tool_results:
            rest = tuple(part for part in message.parts if not isinstance(part, ToolResult))
            if rest and message.role != "tool":
                yield _with_parts(message, rest)
            continue
        calls = _distinct(message.tool_calls)
        if calls and message.role == "assistant":
            yield message if len(calls) == len(message.tool_calls) else _with_calls(message, calls)
            for call in calls:
                yield results.take(call, after=place)
        elif message.parts:
            yield message


class _Results:
    """The results in a history, each to be taken by the call it answers: the nearest earlier one with its id."""

    def __init__(self, messages: list[Message]) -> None:
        self._by_call: dict[str, list[tuple[int, Message, ToolResult]]] = {}
        for place, message in enumerate(messages):
            for result in message.tool_results:
                self._by_call.setdefault(result.call_id, []).append((place, message, result))
        self._next_call: dict[str, list[int]] = {}
        for place, message in enumerate(messages):
            for call in message.tool_calls:
                self._next_call.setdefault(call.id, []).append(place)

    def take(self, call: ToolCall, after: int) -> Message:
        later = [place for place in self._next_call.get(call.id, ()) if place > after]
        until = later[0] if later else None
        for place, message, result in self._by_call.get(call.id, ()):
            if place > after and (until is None or place < until):
                return message if len(message.parts) == 1 else _with_parts(message, (result,), role="tool")
        return Message.tool(call.id, NO_RESULT, name=call.name, is_error=True, id=f"unknown-{call.id}")


def _distinct(calls: tuple[ToolCall, ...]) -> list[ToolCall]:
    return list({call.id: call for call in calls}.values())


def _with_calls(message: Message, calls: list[ToolCall]) -> Message:
    others = tuple(part for part in message.parts if not isinstance(part, ToolCall))
    return _with_parts(message, (*others, *calls))


def _with_parts(message: Message, parts: tuple[object, ...], role: str | None = None) -> Message:
    return Message(role or message.role, parts, message.id, message.metadata)  # type: ignore[arg-type]  # parts of a message
