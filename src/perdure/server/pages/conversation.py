"""The conversation as a page shows it: a call and its result are one box, and a compaction is a block that unfolds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from perdure.loop.compaction.draft import MARK
from perdure.loop.compaction.options import STRATEGIES
from perdure.model.execution import PendingCall
from perdure.model.message import Envelope, Media, Message, Text, Thinking, ToolCall, ToolResult
from perdure.model.transcript import Block, Piece, Span
from perdure.server.pages.texts import indented, shortened
from perdure.server.pages.windows import is_there
from perdure.sessions.pages import SpanReader

_UNKNOWN = "OutcomeUnknown"
"""The beginning of the result of a call that was cut off. Its effect is unknown."""


@dataclass(frozen=True)
class CallBox:
    """A tool call and what came of it."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    """None if the call itself is not on the page."""
    result: str | None
    is_error: bool = False
    is_unknown: bool = False
    is_pending: bool = False
    is_over: bool = False
    """True if no result can come any more."""

    @property
    def outcome(self) -> str:
        """Return in a few words how the call ended."""
        if self.is_unknown:
            return "✗ outcome unknown"
        if self.result is None:
            return "waits for you" if self.is_pending else "no result" if self.is_over else "no result yet"
        return ("✗ " if self.is_error else "→ ") + shortened(self.result, 60)


@dataclass(frozen=True)
class Part:
    """A part of a message that is not a call: its kind, which is its style too, and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class SaidBox:
    """A message."""

    id: str
    role: str
    parts: Sequence[Part]
    calls: Sequence[CallBox]
    is_incomplete: bool = False
    is_summary: bool = False
    kind: str = "said"


@dataclass(frozen=True)
class BlockBox:
    """A compaction: what is shown, and how much it covers."""

    id: str
    by: str
    model: str | None
    covered: int
    shown: Sequence[SaidBox]
    tokens_before: int | None
    tokens_after: int | None
    is_top: bool
    """True if it is on the view itself, and can be taken off."""
    kind: str = "block"


@dataclass(frozen=True)
class RunLine:
    """A line where the messages of another run begin."""

    run: str
    kind: str = "run"

    @property
    def short(self) -> str:
        return self.run[-6:]


Entry = SaidBox | BlockBox | RunLine


@dataclass
class Conversation:
    """A window of a conversation."""

    entries: list[Entry]
    start: int
    stop: int
    total: int
    messages: list[Message] = field(default_factory=list)
    """The messages of the window, whose tokens are estimated."""

    @property
    def earlier(self) -> int | None:
        """Return where the window before this one ends."""
        return self.start if self.start > 0 else None

    @property
    def later(self) -> int | None:
        """Return where the window after this one ends."""
        return min(self.total, 2 * self.stop - self.start) if self.stop < self.total else None


async def view_entries(
    reader: SpanReader,
    pieces: Sequence[Piece],
    start: int,
    stop: int,
    pending: Iterable[PendingCall] = (),
    *,
    top: bool,
) -> tuple[list[Entry], list[Message]]:
    """Return what pieces show between two places, as entries and as messages."""
    sections = [(piece, await reader.messages(spans)) for piece, spans in _sections(pieces, start, stop)]
    messages = [message for _, some in sections for message in some]
    waiting = {call.id for call in pending}
    boxes = _Boxes(messages, waiting, is_over=not waiting)  # what a run under way has said is in no version yet
    entries: list[Entry] = []
    for is_block, group in groupby(sections, key=lambda section: isinstance(section[0], Block)):
        if is_block:
            entries += [_block(piece, boxes.of(some), is_top=top) for piece, some in group if isinstance(piece, Block)]
        else:  # a run may have been asked in one log and have answered in another
            entries += _with_runs((message for _, some in group for message in some), boxes)
    return entries, messages


def plain_entries(messages: Sequence[Message], pending: Iterable[PendingCall] = ()) -> list[Entry]:
    """Return messages that were said, without those that compactions have made and those that were forgotten."""
    said = [each for each in messages if is_there(each) and each.metadata.get(MARK) not in STRATEGIES]
    return _with_runs(said, _Boxes(said, {call.id for call in pending}))


def boxes_of(messages: Sequence[Message], pending: Iterable[PendingCall] = ()) -> Sequence[SaidBox]:
    """Return boxes for the messages of a run."""
    return _Boxes(messages, {call.id for call in pending}).of(messages)


def _sections(pieces: Sequence[Piece], start: int, stop: int) -> Iterable[tuple[Piece, Sequence[Span]]]:
    """Yield the pieces between two places, each with its spans that are shown. A block is shown whole."""
    at = 0
    for piece in pieces:
        length = len(piece)
        low, high = max(start - at, 0), min(stop - at, length)
        if isinstance(piece, Block):
            # A block may show no message, but its box can still be unfolded.
            if low < high or (length == 0 and start <= at < stop):
                yield piece, piece.shown
        elif low < high:
            yield piece, (piece.cut(low, high),)
        at += length


def _with_runs(messages: Iterable[Message], boxes: _Boxes) -> list[Entry]:
    """Return boxes of messages, and a line above what each run was asked and has said."""
    entries: list[Entry] = []
    last: object = None
    asked_from = 0
    """The index of the first entry that no run has answered yet."""
    for message in messages:
        run = message.metadata.get("execution_id")
        if isinstance(run, str) and run != last:
            entries.insert(asked_from, RunLine(run))
            last = run
        entries += boxes.of([message])
        if isinstance(run, str) or message.role != "user":
            asked_from = len(entries)
    return entries


def _block(block: Block, shown: Sequence[SaidBox], *, is_top: bool) -> BlockBox:
    counts = (block.tokens_before, block.tokens_after)
    return BlockBox(block.id, block.by, block.model, block.covered_count, shown, *counts, is_top)


class _Boxes:
    """A maker of boxes for messages that are shown together."""

    def __init__(self, messages: Iterable[Message], pending: set[str], *, is_over: bool = False) -> None:
        self._results: dict[tuple[str, str], ToolResult] = {}
        """The result of each call, by its message and its id: some providers use an id again in the next run."""
        self._shown_with_call: set[tuple[str, str]] = set()
        self._pending = pending
        self._is_over = is_over
        asked_in: dict[str, str] = {}
        for message in messages:
            asked_in |= {call.id: message.id for call in message.tool_calls}
            for result in message.tool_results:
                if result.call_id in asked_in:
                    self._results[asked_in.pop(result.call_id), result.call_id] = result
                    self._shown_with_call.add((message.id, result.call_id))

    def of(self, messages: Iterable[Message]) -> list[SaidBox]:
        made = (self._box(message) for message in messages if not message.is_sealed)
        return [box for box in made if box.parts or box.calls or box.role != "tool"]

    def _box(self, message: Message) -> SaidBox:
        calls = [self._call(message.id, part) for part in message.parts if isinstance(part, ToolCall)]
        results = [each for each in message.tool_results if (message.id, each.call_id) not in self._shown_with_call]
        calls += map(_result_alone, results)
        parts = [part for part in map(_part, message.parts) if part is not None]
        is_summary = message.metadata.get(MARK) in STRATEGIES
        return SaidBox(message.id, message.role, parts, calls, message.is_incomplete, is_summary)

    def _call(self, message_id: str, call: ToolCall) -> CallBox:
        result = self._results.get((message_id, call.id))
        if result is None:
            is_pending = call.id in self._pending
            return CallBox(call.id, call.name, call.arguments, None, is_pending=is_pending, is_over=self._is_over)
        is_unknown = _is_unknown(result)
        return CallBox(call.id, call.name, call.arguments, result.text, result.is_error, is_unknown)


def _result_alone(result: ToolResult) -> CallBox:
    name = result.name or "result"
    return CallBox(result.call_id, name, None, result.text, result.is_error, _is_unknown(result))


def _is_unknown(result: ToolResult) -> bool:
    return result.is_error and result.text.startswith(_UNKNOWN)


def _part(part: object) -> Part | None:
    match part:
        case Text(text=text):
            return Part("text", text) if text else None
        case Thinking(text=text):
            return Part("thinking", text) if text else None
        case Media():
            return Part("media", part.label)
        case ToolCall() | ToolResult() | Envelope():
            return None
    return Part("other", indented(getattr(part, "body", None)))
