"""Redaction of session records, which hold whole messages, tool calls and events of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from perdure import codec
from perdure.model.loop_events import AgentEnd, AnyLoopEvent, Compaction, LoopEvent, MessageEnd, MessageUpdate
from perdure.model.message import CONTINUES, Message
from perdure.model.record import LoopRecord
from perdure.model.value import Value
from perdure.redaction.replacement import Replacement
from perdure.redaction.traces import Traces

REPLACEMENT = "[redacted]"
"""The text that replaces another in a record. The event of a redaction does not say which one a store has used."""

V = TypeVar("V", bound=Value)
E = TypeVar("E", bound=LoopEvent)


class RecordRedaction:
    """A redaction of one session's record, and of later events about its messages. It remembers ids, and no text."""

    def __init__(self) -> None:
        self._known = Traces(())
        self._later = Replacement(REPLACEMENT, self._known)

    def redact(self, loops: Sequence[LoopRecord], message_ids: Collection[str]) -> list[LoopRecord]:
        """Return loops of the record with these messages replaced, and everything that may tell of them.

        A record does not say which messages a summary covers, so each summary is replaced.
        """
        # All loops first: one may tell of messages, calls and runs that another contains.
        traces = Traces(tuple(message_ids))
        for loop in loops:
            _learn(traces, loop)
        if traces.calls:
            for loop in loops:
                _learn_notes(traces, loop)
        redacted = [_Redacting(traces, loop.loop_id).loop(loop) for loop in loops]
        self._known.ids |= traces.ids
        self._known.calls |= traces.calls
        self._known.results |= traces.results
        return redacted

    def later(self, event: AnyLoopEvent) -> AnyLoopEvent:
        """Return an event that came after the redaction, without what the messages said.

        Summaries and errors stay: they were made from redacted texts.
        """
        return _changed(event, lambda plain: self._later.told_later(plain["type"], plain))


def names_any(loop: LoopRecord, message_ids: Collection[str]) -> bool:
    """Tell whether a record has one of these messages, or a streamed piece of one."""
    pieces = (event.message_id for event in loop.events if isinstance(event, MessageUpdate))
    return any(each in message_ids for each in pieces) or any(each.id in message_ids for each in _messages_in(loop))


def _messages_in(loop: LoopRecord) -> Iterator[Message]:
    """Yield every message in a record. One that the loop's end does not name is in its own event only."""
    yield from loop.messages
    for event in loop.events:
        match event:
            case MessageEnd():
                yield event.message
            case AgentEnd():
                yield from event.messages
            case Compaction():
                yield from (part.message for part in event.shown if part.message is not None)


def _learn(traces: Traces, loop: LoopRecord) -> None:
    if names_any(loop, traces.ids):
        traces.runs.add(loop.loop_id)
    for message in _messages_in(loop):
        if message.id in traces.ids:
            traces.learn(_plain(message))


def _learn_notes(traces: Traces, loop: LoopRecord) -> None:
    """Learn the notes that list calls which are replaced."""
    for message in _messages_in(loop):
        if message.is_note and message.metadata[CONTINUES] in traces.runs:
            traces.ids.add(message.id)


class _Redacting:
    """A replacement in one loop's record, part by part: many MB together could not be encoded."""

    def __init__(self, traces: Traces, loop_id: str) -> None:
        self._ids = traces.ids
        self._is_touched = loop_id in traces.runs
        self._replacement = Replacement(REPLACEMENT, traces)

    def loop(self, loop: LoopRecord) -> LoopRecord:
        block = loop.compaction_block
        return replace(
            self._part(replace(loop, messages=(), turns=(), events=(), compaction_block=None)),
            messages=tuple(map(self._message, loop.messages)),
            turns=tuple(map(self._part, loop.turns)),
            events=tuple(map(self._event, loop.events)),
            compaction_block=None if block is None else _changed(block, self._replacement.block),
        )

    def _message(self, message: Message) -> Message:
        """Return a message, redacted if its id is named. One that only quotes another stays, as in a store."""
        return self._part(message) if message.id in self._ids else message

    def _event(self, event: AnyLoopEvent) -> AnyLoopEvent:
        match event:
            case MessageEnd():
                return replace(event, message=self._message(event.message))
            case AgentEnd():
                return replace(
                    self._told(replace(event, messages=())), messages=tuple(map(self._message, event.messages))
                )
            case _:
                return self._told(event)

    def _told(self, event: E) -> E:
        told = self._replacement.told
        return _changed(event, lambda plain: told(plain["type"], plain, is_touched=self._is_touched))

    def _part(self, value: V) -> V:
        return _changed(value, lambda plain: self._replacement.walked(plain, is_touched=self._is_touched))


def _changed(value: V, change: Callable[[Any], Any]) -> V:
    plain = _plain(value)
    changed = change(plain)
    return value if changed == plain else codec.convert(type(value), changed)


def _plain(value: Value) -> Any:
    return codec.decode_plain(codec.encode(value))
