"""A view on its way to being compacted: which of its messages stay, and what is shown in place of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from perdure.errors import InvalidData
from perdure.model.ids import new_id
from perdure.model.loop_events import CompactionPart
from perdure.model.message import Media, Message, Opaque, Text, ToolResult
from perdure.model.transcript import Transcript

MARK = "compaction"
"""The key in a message's metadata that names the strategy by which it was made."""
_KEPT_TAGS = ("is_trace", "execution_id")


class Draft:
    """A view as a list of items. An item is a message's place in the view before, or a message made for this one."""

    def __init__(self, view: Transcript, open_calls: Collection[str] = ()) -> None:
        self.before: Sequence[Message] = tuple(view)
        self._view = view
        self._open_calls = frozenset(open_calls)
        self._items: list[int | Message] = list(range(len(view)))
        self._is_touched = False

    def messages(self) -> list[Message]:
        if not self._is_touched:
            return list(self.before)
        return [self.before[item] if isinstance(item, int) else item for item in self._items]

    def items(self) -> list[int | Message]:
        """Return what is shown: places in the view before, and messages that were made since."""
        return list(self._items)

    @property
    def is_changed(self) -> bool:
        return self._is_touched and self._items != list(range(len(self.before)))

    def cut_for(self, keep_last: int) -> int:
        """Return a cut that keeps at least `keep_last` messages. It moves earlier if a result would lose its call.

        Hidden messages are not counted.
        """
        return min(self._shown().safe_cut(self.cut_at(keep_last)), self._first_open())

    def cut_at(self, keep_last: int) -> int:
        """Return where the last `keep_last` messages begin, even if a cut there parts a call from its result."""
        return self._shown().place_of_last(keep_last)

    def cut_after(self, place: int) -> int:
        """Return the first place from `place` on where a cut parts no result from its call; at worst, the last."""
        shown, last = self._shown(), max(0, len(self._items) - 1)
        places = (at for at in range(place, last) if shown.safe_cut(at) == at)
        return min(next(places, shown.safe_cut(last)), self._first_open())

    def _shown(self) -> Transcript:
        return Transcript.of(self.messages()) if self._is_touched else self._view

    def _first_open(self) -> int:
        """Return the place of the first call that still waits for its result: the result must find it in the view."""
        for place, message in enumerate(self.messages() if self._open_calls else ()):
            if any(call.id in self._open_calls for call in message.tool_calls):
                return place
        return len(self._items)

    def replace_before(self, cut: int, shown: Iterable[Message]) -> None:
        """Show these messages in place of all before the cut. A message that is already there is not made again."""
        given = list(shown)
        wanted = {message.id for message in given}
        taken = {message.id for message in self.before if message.id in wanted}
        standing = [item for item in self._items[:cut] if isinstance(item, int)] if taken else []
        places = {self.before[item].id: item for item in standing}
        new: list[int | Message] = []
        for message in given:
            place = places.get(message.id)
            if place is not None and self.before[place] == message:
                new.append(place)
            else:  # a log has only one message of each id
                new.append(replace(message, id=new_id()) if message.id in taken else message)
                taken.add(message.id)
        self._items[:cut] = new
        self._is_touched = True

    def put(self, place: int, message: Message) -> None:
        self._items[place] = message
        self._is_touched = True

    def overlay(self) -> tuple[int, list[CompactionPart]]:
        """Return how many messages of the view before are covered, and what is shown instead.

        The end that has not changed stays outside. A block that the cut would go through is covered whole.
        """
        total, kept = len(self.before), 0
        limit = min(total - 1, len(self._items))  # a block covers one message at least
        while kept < limit and self._items[-1 - kept] == total - 1 - kept:
            kept += 1
        stop = self._view.edge_from(total - kept)
        return stop, _parts([*self._items[: len(self._items) - kept], *range(total - kept, stop)])


def _parts(items: Iterable[int | Message]) -> list[CompactionPart]:
    """Return items as parts. Neighbours in the view before become one stretch."""
    parts: list[CompactionPart] = []
    for item in items:
        if isinstance(item, Message):
            parts.append(CompactionPart(item))
        elif parts and parts[-1].message is None and parts[-1].stop == item:
            parts[-1] = CompactionPart(start=parts[-1].start, stop=item + 1)
        else:
            parts.append(CompactionPart(start=item, stop=item + 1))
    return parts


def view_of(parts: Iterable[CompactionPart], before: Transcript) -> Transcript:
    """Return the view that a compaction shows. `before` is the view that it was made from."""
    pieces = [
        piece
        for part in parts
        for piece in (Transcript.of([part.message]) if part.message else before[part.start : part.stop]).pieces
    ]
    return Transcript(pieces)


def summary_message(text: str, strategy: str) -> Message:
    """Return a message in place of those no longer shown. It is a user's, which every provider accepts as the first."""
    return Message.user(text, metadata={MARK: strategy})


def is_summary(message: Message, *strategies: str) -> bool:
    """Tell whether a message replaces others that a compaction (by one of these strategies) no longer shows."""
    return message.metadata.get(MARK) in (strategies or ("llm", "truncate"))


def with_results(message: Message, text: str | None = None, *, chars: int = 0, strategy: str) -> Message:
    """Return a tool's message with a text in place of its results, or with each result cut to `chars` characters."""
    parts = tuple(
        replace(part, content=shortened(part.text, chars) if text is None else text, unknown={})
        if isinstance(part, ToolResult) and (text is not None or len(part.text) > chars)
        else part
        for part in message.parts
    )
    return Message(message.role, parts, metadata={**_tags(message), MARK: strategy})


def without_files(message: Message) -> Message:
    """Return a message with a few words in place of each image and file; itself if it has none.

    An answer with data that only its provider understands stays as it is: the data may be about a file.
    """
    if not any(isinstance(part, Media) for part in message.parts):
        return message
    if any(isinstance(part, Opaque) for part in message.parts):
        return message
    parts = tuple(Text(f"[{part.label}: left out]") if isinstance(part, Media) else part for part in message.parts)
    return Message(message.role, parts, metadata={**_tags(message), MARK: "observation_mask"})


def _tags(message: Message) -> dict[str, Any]:
    """Return the metadata for a message that replaces another: its run, and what its envelope needs."""
    tags = {name: message.metadata[name] for name in _KEPT_TAGS if name in message.metadata}
    return {**tags, **message.frame_for_copy}


def shortened(text: str, chars: int) -> str:
    """Return a text, or its beginning with a note of how much is left out."""
    if len(text) <= chars:
        return text
    return f"{text[:chars]}[… {len(text) - chars} characters left out]"


def check_valid(given: Sequence[Message], made: Sequence[Message]) -> None:
    """Raise InvalidData if a custom compactor leaves a result without its call before it, or a call without result."""
    answered = {result.call_id for message in given for result in message.tool_results}
    called: set[str] = set()
    open_calls: set[str] = set()
    for message in made:
        for result in message.tool_results:
            if result.call_id not in called:
                raise InvalidData("$.custom_compactor", f"it returned a result of {result.call_id!r} without its call")
            open_calls.discard(result.call_id)
        ids = {call.id for call in message.tool_calls}
        called |= ids
        open_calls |= ids & answered  # a call that had no result before need not have one now
    if open_calls:
        names = ", ".join(sorted(open_calls)[:5])
        raise InvalidData("$.custom_compactor", f"it returned calls without their results: {names}")
