"""Turns any history into messages that every provider accepts, with one function, wherever the history comes from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from operator import is_
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.message import (
    CONTINUES,
    Envelope,
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
from perdure.model.transcript import Piece, Span, Transcript, visible

NO_RESULT = (
    "This call was interrupted and its outcome is unknown: it may or may not have taken effect. "
    "Check before you make it again."
)
EMPTY_RESULT = "(an empty text)"
"""The text for a tool that returned nothing but blanks, which some providers refuse."""


def compile_prompt(
    messages: Sequence[Message], *, keep_traces: bool = True, execution_id: str | None = None
) -> tuple[Message, ...]:
    """Return the messages to send. Every tool call is followed at once by exactly one result, and no result is alone.

    No text is blank, and no message is empty. Names and ids of calls have a form that every provider accepts, and each
    id is used once. With `keep_traces=False`, tool traces of other runs than `execution_id` are left out, except for
    those of runs that it continues.
    """
    shown = messages if keep_traces else _without_traces(messages, execution_id)
    return tuple(_paired(list(shown), _CallIds()))


class Prompt(Sequence[Message]):
    """A prompt that is compiled when it is first read: a driver that needs no history does not pay for it."""

    def __init__(
        self, messages: Sequence[Message], compiled: Callable[[Any], Sequence[Message]] = compile_prompt
    ) -> None:
        self._messages = messages
        self._compile = compiled

    @cached_property
    def _compiled(self) -> Sequence[Message]:
        return self._compile(self._messages)

    def __len__(self) -> int:
        return len(self._compiled)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._compiled[index]
        is_stretch = index.step in (None, 1)  # a transcript cuts this out without reading the rest
        return tuple(self._compiled[index]) if is_stretch else tuple(self._compiled)[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._compiled)

    def __reversed__(self) -> Iterator[Message]:
        return reversed(self._compiled)


class Prompts:
    """The prompts of one run. Each continues the last one that was compiled, so a step costs only what it adds.

    The first one continues what the last run has left on the tape at the end of the view's stored part. A redaction
    voids that with the tape: sessions that are read again afterwards have other tapes.
    """

    def __init__(self) -> None:
        self._seen: Transcript | None = None
        self._before = _Closed()
        """The compiled messages from before the run."""
        self._own = _Closed()

    def of(self, transcript: Transcript) -> Prompt:
        return Prompt(transcript, self._compiled)

    def _compiled(self, transcript: Transcript) -> Transcript:
        if self._seen is None or not transcript.extends(self._seen):
            # The first prompt, or one after a view was replaced, as by a compaction: nothing of the run's own holds.
            self._before = _closed_before(transcript)
            self._seen, self._own = transcript[: self._before.count], _Closed(ids=_CallIds(self._before.ids))
        new = list(transcript[len(self._seen) :])
        # A late answer to a call that was closed without one: the whole view is compiled again.
        if self._before.is_answered_by(new):
            self._before, self._own, new = _Closed(), _Closed(), list(transcript)
            self._seen = Transcript()
        answered = _answered_until(new)
        self._seen = transcript[: len(self._seen) + answered]
        self._own = self._own.and_then(new[:answered], self._own.ids)
        rest = Transcript.of(_paired(new[answered:], _CallIds(self._own.ids)))
        return Transcript((*self._before.messages.pieces, *self._own.messages.pieces, *rest.pieces))


class _Closed(msgspec.Struct, frozen=True):
    """The compiled beginning of a view. Nothing that comes after it changes it."""

    messages: Transcript = Transcript()
    """The messages that are sent for it, on a tape of their own."""
    ids: _CallIds | None = None
    count: int = 0
    """The number of messages of the view that it stands for."""
    open: frozenset[str] = frozenset()
    """Calls in it that were closed without a result, since none had come after many messages."""
    place: tuple[object, ...] = ()
    """The pieces that it was compiled from, without any reference to their tapes."""

    def and_then(self, new: Sequence[Message], ids: _CallIds | None) -> _Closed:
        """Return this with more messages at its end. `ids` gives their calls the ids that are sent."""
        ids = _CallIds() if ids is None else ids
        messages = self.messages.append(*_paired(list(new), ids))
        return replace(self, messages=messages, ids=ids, count=self.count + len(new))

    def is_answered_by(self, new: Iterable[Message]) -> bool:
        """Tell whether a result has come that may be for a call which was closed without one."""
        results = (result for message in new for result in message.tool_results) if self.open else ()
        return any(result.call_id in self.open for result in results)


MOST_OPEN = 100
"""The most messages after a call without a result that are compiled again for every run."""


def _closed_before(transcript: Transcript) -> _Closed:
    """Return the stored part of a view, compiled. Only what is new since the last time is read."""
    stored = Transcript(takewhile(_is_stored, transcript.pieces))
    last = stored.pieces[-1] if stored.pieces else None
    if not isinstance(last, Span):
        return _Closed()
    known = _known_of(stored)
    if known.is_answered_by(stored[known.count :]):
        known = _Closed()
    new = list(stored[known.count :])
    answered = _answered_until(new)
    until = len(new) if len(new) - answered > MOST_OPEN else answered
    if until:
        ids = _CallIds(known.ids)
        open_calls = known.open | _unanswered(new[:until]) if until > answered else known.open
        place = _place_of(stored[: known.count + until])
        known = replace(known.and_then(new[:until], ids), ids=ids.flat(), open=open_calls, place=place)
        last.tape.found = known
    return known


def _known_of(stored: Transcript) -> _Closed:
    """Return what was compiled of a view earlier. It is on the tape that the view ends on, or ended on when forked."""
    place = _place_of(stored)
    for piece in reversed(stored.pieces):
        found = piece.tape.found if isinstance(piece, Span) else None
        if isinstance(found, _Closed) and _goes_on_from(found.place, place):
            return found
    return _Closed()


def _is_stored(piece: Piece) -> bool:
    return all(span.tape.ref is not None for span in visible((piece,)))


def _place_of(transcript: Transcript) -> tuple[object, ...]:
    """Return the places of a stored view in its logs. A log's messages never change while their tape is in memory."""
    return tuple(
        (piece.tape.ref, piece.start, piece.stop) if isinstance(piece, Span) else (piece.id, len(piece))
        for piece in transcript.pieces
    )


def _goes_on_from(known: tuple[Any, ...], place: tuple[Any, ...]) -> bool:
    """Tell whether a view begins with all of another one."""
    if not known or len(known) > len(place) or known[:-1] != place[: len(known) - 1]:
        return False
    last, here = known[-1], place[len(known) - 1]
    return last == here or (len(last) == len(here) == 3 and last[:2] == here[:2] and last[2] <= here[2])


def _unanswered(messages: Iterable[Message]) -> frozenset[str]:
    """Return the calls among messages that have no result."""
    waiting: set[str] = set()
    for message in messages:
        waiting.update(call.id for call in message.tool_calls)
        waiting.difference_update(result.call_id for result in message.tool_results)
    return frozenset(waiting)


def _answered_until(messages: Sequence[Message]) -> int:
    """Return how many of the first messages contain no call that still waits for its result."""
    waiting: set[str] = set()
    until = 0
    for place, message in enumerate(messages, 1):
        if not _is_text(message):
            waiting.update(call.id for call in message.tool_calls)
            waiting.difference_update(result.call_id for result in message.tool_results)
        if not waiting:
            until = place
    return until


def _without_traces(messages: Sequence[Message], execution_id: str | None) -> Iterator[Message]:
    own = _continued_by(messages, execution_id)
    for message in messages:
        if not message.is_trace or message.metadata.get("execution_id") in own:
            yield message


def _continued_by(messages: Sequence[Message], execution_id: str | None) -> set[object]:
    """Return a run and those that it continues: the notes about these stand behind all other runs' answers."""
    own: set[object] = {execution_id}
    for message in reversed(messages):
        if message.metadata.get("execution_id", execution_id) not in own:
            break
        if message.is_note:
            own.add(message.metadata[CONTINUES])
    return own


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
"""The kinds of parts of which a message needs one: without any, a provider would be sent an empty message."""


def _said(message: Message, calls: Sequence[ToolCall], sent: Mapping[str, ToolCall]) -> Iterator[Part]:
    """Yield the parts of a message that are sent: its own calls, as they are sent, and what is not blank."""
    bound = False
    for part in message.parts:
        if isinstance(part, ToolCall):
            if any(part is call for call in calls):
                yield sent[part.id]
        elif not isinstance(part, ToolResult | Envelope) and (bound or not _is_blank(part)):
            yield part
        # In an answer, an opaque part may belong to the next one, even if that is blank.
        bound = isinstance(part, Opaque) and message.role == "assistant"


def _as_sent(call: ToolCall, ids: _CallIds) -> ToolCall:
    """Return a call under an id and a name that every provider accepts: models invent names of tools."""
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
    """The ids under which calls are sent. Two calls of a history may have one id, or ids that a provider refuses."""

    _VALID = re.compile(r"[a-zA-Z0-9_-]{1,40}")  # Anthropic's letters, and OpenAI's length

    def __init__(self, before: _CallIds | None = None) -> None:
        self._before = before
        self._times: dict[str, int] = {}

    def claim(self, call_id: str) -> str:
        """Return the id itself if it is valid and new. Otherwise return one made from it, the same in every prompt."""
        wanted = call_id if self._VALID.fullmatch(call_id) else _made_valid(call_id)
        sent = wanted
        while self._used(sent):
            self._times[wanted] = self._used(wanted) + 1
            sent = _made_valid(f"{wanted}-{self._times[wanted]}")
        self._times[sent] = 1
        return sent

    def _used(self, call_id: str) -> int:
        """Return how often an id was claimed, here or in the ids before."""
        ids: _CallIds | None = self
        while ids is not None:
            if call_id in ids._times:
                return ids._times[call_id]
            ids = ids._before
        return 0

    def flat(self) -> _CallIds:
        """Return the same ids in one object. The objects before stay as they are: others may continue from them."""
        if self._before is None or not self._times:
            return self._before or self
        made = _CallIds()
        made._times = {**self._before.flat()._times, **self._times}
        return made


def _made_valid(call_id: str) -> str:
    """Return a valid id that tells this one from all others."""
    # 23 characters, a dash and 16 of the digest: the 40 that `_VALID` allows.
    digest = hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', call_id)[:23] or 'call'}-{digest}"


def _is_text(message: Message) -> bool:
    """Tell whether a message is one text and nothing else. Most are, and need no further work."""
    return len(message.parts) == 1 and type(message.parts[0]) is Text


def _is_blank(part: Part) -> bool:
    return isinstance(part, Text) and (not part.text or part.text.isspace())


class _Results:
    """The results in a history. Each is taken by the call that it answers: the nearest earlier one with its id."""

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
        """Return the first result of a call before the next call with the same id, or else an error in its place."""
        until = next((place for place in self._places[call.id] if place > at), None)
        for place, message, result in self._by_call.get(call.id, ()):
            if place >= at and (until is None or place < until):
                is_bare = message.role == "tool" and len(message.parts) == 1
                return message if is_bare else replace(message, role="tool", parts=(result,))
        return Message.tool(call.id, NO_RESULT, name=call.name, is_error=True, id=f"unknown-{call.id}")


def _distinct(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Return the calls. Of those that share an id, return the first: it is the one that a run carries out."""
    by_id: dict[str, ToolCall] = {}
    for call in calls:
        by_id.setdefault(call.id, call)
    return tuple(by_id.values())
