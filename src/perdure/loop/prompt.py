"""From any history to a list of messages that every provider accepts: one function, wherever the history comes from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any

from msgspec.structs import replace

from perdure.model.message import (
    Media,
    Message,
    Opaque,
    Part,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from perdure.model.transcript import Transcript

NO_RESULT = (
    "This call was interrupted and its outcome is unknown: it may or may not have taken effect. "
    "Check before you make it again."
)
EMPTY_RESULT = "(an empty text)"
"""What the model is told of a tool that returned nothing but blanks, which some providers refuse."""


def compile_prompt(
    messages: Sequence[Message], *, keep_traces: bool = True, execution_id: str | None = None
) -> tuple[Message, ...]:
    """Return the messages to send: every tool call is followed at once by exactly one result, no result stands alone.

    No text is blank, no message is empty, and the names and ids of calls are such as every provider takes, each id used
    once. With `keep_traces=False` the tool traces of earlier runs than `execution_id` are left out.
    """
    shown = messages if keep_traces else _without_traces(messages, execution_id)
    return tuple(_paired(list(shown), _CallIds()))


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
        self._ids = _CallIds()

    def of(self, transcript: Transcript) -> Prompt:
        return Prompt(transcript, self._compiled)

    def _compiled(self, transcript: Transcript) -> tuple[Message, ...]:
        if not transcript.extends(self._seen):
            self._seen, self._closed, self._ids = Transcript(), (), _CallIds()
        new = list(transcript[len(self._seen) :])
        answered = _answered_until(new)
        self._seen = transcript[: len(self._seen) + answered]
        self._closed += tuple(_paired(new[:answered], self._ids))
        return self._closed + tuple(_paired(new[answered:], _CallIds(self._ids)))


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


def _paired(messages: list[Message], ids: _CallIds) -> Iterator[Message]:
    results = _Results(messages)
    for place, message in enumerate(messages):
        if _is_text(message) and message.role != "tool":
            if not _is_blank(message.parts[0]):
                yield message
            continue
        calls = _distinct(message.tool_calls) if message.role == "assistant" else ()
        sent = {call.id: _as_sent(call, ids) for call in calls}
        said = tuple(_said(message, calls, sent))
        if any(isinstance(part, _CAN_SAY[message.role]) for part in said):
            is_whole = len(said) == len(message.parts) and all(map(is_, said, message.parts))
            yield message if is_whole else replace(message, parts=said)
        for call in calls:
            yield _answering(results.take(call, at=place), call, sent[call.id])


_CAN_SAY: Mapping[Role, tuple[type[Part], ...]] = {
    "system": (Text,),
    "user": (Text, Media),
    "assistant": (Text, Media, Thinking, ToolCall, Opaque, UnknownPart),
    "tool": (),  # its results follow their calls
}
"""The parts of which a message needs one, or a provider would be sent an empty one."""


def _said(message: Message, calls: Sequence[ToolCall], sent: Mapping[str, ToolCall]) -> Iterator[Part]:
    """Return the parts of a message that are sent: its own calls, as they are sent, and what is not blank."""
    bound = False
    for part in message.parts:
        if isinstance(part, ToolCall):
            if any(part is call for call in calls):
                yield sent[part.id]
        elif not isinstance(part, ToolResult) and (bound or not _is_blank(part)):
            yield part
        # In an answer it may belong to the part behind it, also to a blank one.
        bound = isinstance(part, Opaque) and message.role == "assistant"


def _as_sent(call: ToolCall, ids: _CallIds) -> ToolCall:
    """Return a call under an id and a name that every provider takes; models make up names of tools."""
    call_id, name = ids.claim(call.id), call.name
    if not _NAME.fullmatch(name):
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"
    return call if (call_id, name) == (call.id, call.name) else replace(call, id=call_id, name=name)


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _answering(message: Message, call: ToolCall, sent: ToolCall) -> Message:
    """Return a result, under the id and the name that its call is sent under."""
    (result,) = message.tool_results
    if isinstance(result.content, str) and not result.content.strip():
        result = replace(result, content=EMPTY_RESULT)
    if sent is not call:
        name = result.name if sent.name == call.name else sent.name
        result = replace(result, call_id=sent.id, name=name)
    return message if result is message.parts[0] else replace(message, parts=(result,))


class _CallIds:
    """The ids that calls are sent under. Histories may name two calls alike, or come from where other ids are usual."""

    _VALID = re.compile(r"[a-zA-Z0-9_-]{1,40}")  # Anthropic's letters, and OpenAI's length

    def __init__(self, before: _CallIds | None = None) -> None:
        self._times: dict[str, int] = dict(before._times) if before else {}

    def claim(self, call_id: str) -> str:
        """Return the id itself if it is valid and new; else one that is made from it, the same in every prompt."""
        wanted = call_id if self._VALID.fullmatch(call_id) else _made_valid(call_id)
        sent = wanted
        while sent in self._times:
            self._times[wanted] += 1
            sent = _made_valid(f"{wanted}-{self._times[wanted]}")
        self._times[sent] = 1
        return sent


def _made_valid(call_id: str) -> str:
    """A valid id that tells this one from all others."""
    digest = hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', call_id)[:23] or 'call'}-{digest}"


def _is_text(message: Message) -> bool:
    """Whether a message is a text and nothing else, as most are; the rest of the work is for the others."""
    return len(message.parts) == 1 and type(message.parts[0]) is Text


def _is_blank(part: Part) -> bool:
    return isinstance(part, Text) and (not part.text or part.text.isspace())


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
