"""The transcript: a piece table over logs. It is what the model is shown; the logs are what was said.

A `Tape` is the part of a log that is in memory. Tapes only grow, so any number of transcripts share one: each
names the span it shows and never sees what was appended after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, is_not
from typing import Any, NamedTuple, overload

from msgspec.structs import replace

from perdure.errors import InvalidData, NotLoaded
from perdure.model.ids import Time, new_id, now
from perdure.model.message import Message, Text, ToolCall, ToolResult
from perdure.model.value import Value, brief


class LogRef(NamedTuple):
    """A log in a store: `origin` is the store's own id, `key` the log's name in it."""

    origin: str
    key: int | str


class Tape:
    """Messages of one log from position `base` on. `ref` is None until a store has them; `items` None if unread.

    `found` is not part of it. A loop keeps there what it has worked out about a view that ends here, while the tape is
    in memory. What is kept there must not refer to the tape, which would then outlive its sessions.
    """

    __slots__ = ("base", "found", "items", "ref")

    def __init__(self, items: list[Message] | None, ref: LogRef | None = None, base: int = 0) -> None:
        self.items = items
        self.ref = ref
        self.base = base
        self.found: Any = None

    @property
    def end(self) -> int:
        """The position after the last message held here."""
        return self.base + len(self.items or ())

    def read(self, start: int, stop: int) -> list[Message]:
        if self.items is None:
            raise NotLoaded(f"log {self.ref.key if self.ref else '?'}, messages {start} to {stop}")
        return self.items[start - self.base : stop - self.base]

    def read_backwards(self, start: int, stop: int) -> Iterator[Message]:
        """Return the same messages one by one, from the last on: most callers read a few of very many."""
        if self.items is None:
            self.read(start, stop)
            return iter(())
        return map(self.items.__getitem__, range(stop - 1 - self.base, start - 1 - self.base, -1))

    def push(self, messages: tuple[Message, ...], at: int) -> bool:
        """Append at position `at`. Return False if that is not the end, or if another thread was first.

        The caller then starts another tape.
        """
        items = self.items
        if items is None or at != self.end:
            return False
        index = at - self.base
        items.extend(messages)  # in one step, so that no other thread's come between them
        # Another thread may have appended since the check: then its messages are at this place, and these are unused.
        return all(map(is_, items[index : index + len(messages)], messages))


class Span(NamedTuple):
    """Messages `start` to `stop` of a tape's log."""

    tape: Tape
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __reduce__(self) -> tuple[type[Span], tuple[Tape, int, int]]:
        return Span, (self.tape, self.start, self.stop)  # a tuple copies itself by its length, which here is the span's

    def messages(self) -> list[Message]:
        return self.tape.read(self.start, self.stop)

    def cut(self, start: int, stop: int) -> Span:
        return Span(self.tape, self.start + start, self.start + stop)


class Block(Value, frozen=True, gc=True, dict=True):
    """A compaction overlay. It shows some messages instead of the pieces it covers, which stay as they are.

    It has a `__dict__`, which is not part of its value: a store keeps there what it has found out about the block.
    """

    covered: tuple[Any, ...]
    """The pieces that are hidden."""
    shown: tuple[Any, ...]
    """The pieces that are shown instead."""
    by: str = ""
    """The strategy that made it."""
    id: str = ""
    """The id, for `uncompact`."""
    at: Time | None = None
    """The time at which it was made."""
    tokens_before: int | None = None
    """The estimate for the view before it."""
    tokens_after: int | None = None
    """The estimate for the view after it."""
    model: str | None = None
    """The model that wrote the summary, if one did."""

    def __len__(self) -> int:
        return sum(map(len, self.shown))

    @property
    def covered_count(self) -> int:
        """The number of messages that it covers in the view under it."""
        return sum(map(len, self.covered))


Piece = Span | Block


class Transcript(Sequence[Message]):
    """An immutable view over logs. As a sequence it is the messages that the view shows."""

    __slots__ = ("_length", "found", "pieces")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: tuple[Piece, ...] = _joined(pieces)
        self._length = sum(map(len, self.pieces))
        self.found: object = None
        """A store's findings about the view. They are not part of its value."""

    def __reduce__(self) -> tuple[Callable[..., Transcript], tuple[tuple[Piece, ...], int]]:
        return _unchecked, (self.pieces, self._length)

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Transcript:
        return cls().append(*messages)

    def append(self, *messages: Message) -> Transcript:
        """Return this transcript with messages at its end. That costs what is appended, not what is there."""
        if not messages:
            return self
        last = self.pieces[-1] if self.pieces else None
        # Only to a tape that no store has: the others are what their logs have, and only a store extends them.
        if isinstance(last, Span) and last.tape.ref is None and last.tape.push(messages, last.stop):
            return self.with_last(Span(last.tape, last.start, last.stop + len(messages)))
        return self._with_new(Span(Tape(list(messages)), 0, len(messages)))

    def then_last_of(self, other: Transcript, count: int) -> Transcript:
        """Return this view with the last messages of another at its end. They were appended there at once."""
        if not count:
            return self
        last, mine = other.pieces[-1], self.pieces[-1] if self.pieces else None
        assert isinstance(last, Span)
        if isinstance(mine, Span) and mine.tape is last.tape and mine.stop == last.stop - count:
            return self.with_last(Span(mine.tape, mine.start, last.stop))
        return self._with_new(Span(last.tape, last.stop - count, last.stop))

    def with_last(self, piece: Piece) -> Transcript:
        """Return this transcript with another piece in place of its last. It must not join the piece before it."""
        return _unchecked((*self.pieces[:-1], piece), self._length - len(self.pieces[-1]) + len(piece))

    def _with_new(self, piece: Piece) -> Transcript:
        return _unchecked((*self.pieces, piece), self._length + len(piece))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Message]:
        if len(self.pieces) == 1 and isinstance(self.pieces[0], Span):  # such as the output of a step
            return iter(self.pieces[0].messages())
        return chain.from_iterable(span.messages() for span in self.spans())

    def __reversed__(self) -> Iterator[Message]:
        return chain.from_iterable(
            span.tape.read_backwards(span.start, span.stop) for span in reversed(tuple(self.spans()))
        )

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Transcript: ...
    def __getitem__(self, index: int | slice) -> Message | Transcript:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                raise InvalidData("$.step", "a transcript can only be sliced in steps of 1")
            return self.cut(start, stop)
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"message {index} of a transcript of {self._length}")
        last = self.pieces[-1]
        if isinstance(last, Span) and place >= self._length - len(last):  # what most look at is near the end
            position = last.stop - (self._length - place)
            return last.tape.read(position, position + 1)[0]
        for span in self.spans():
            if place < len(span):
                return span.cut(place, place + 1).messages()[0]
            place -= len(span)
        raise AssertionError("a transcript's length is the sum of its spans")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transcript):
            return False
        # The same places in the same logs hold the same messages, whether or not both sides have read them.
        places = _places(self.pieces)
        if places is not None and places == _places(other.pieces):
            return True
        return _content(self.pieces) == _content(other.pieces)

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is not hashed

    def __repr__(self) -> str:
        return f"<Transcript of {self._length} messages in {len(self.pieces)} pieces>"

    def spans(self) -> Iterator[Span]:
        """Return the spans that are shown, in order."""
        return visible(self.pieces)

    def blocks(self) -> Iterator[Block]:
        """Return every compaction block, outermost first, including those inside other blocks."""
        return _blocks(self.pieces)

    def index(self, value: Message | str, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a message in this view. The message is given itself or by its id."""
        wanted = value if isinstance(value, str) else value.id
        start, stop, _ = slice(start, stop).indices(self._length)
        for place, message in enumerate(self[start:stop], start):
            if message.id == wanted:
                return place
        raise ValueError(f"message {wanted!r} is not in this transcript")

    def cut(self, start: int, stop: int) -> Transcript:
        """Return the messages from `start` to `stop` of this view. Nothing is copied."""
        start, stop, _ = slice(start, stop).indices(self._length)
        if (start, stop) == (0, self._length):
            return self
        return Transcript(_sliced(self.pieces, start, max(start, stop)))

    def extends(self, other: Transcript) -> bool:
        """Tell whether this view begins with all that another shows, as far as their pieces tell without being read."""
        if not other.pieces:
            return True
        *before, last = other.pieces
        place = len(before)
        if len(self.pieces) <= place or any(map(is_not, self.pieces, before)):
            return False
        here = self.pieces[place]
        if isinstance(here, Span) and isinstance(last, Span):
            return here.tape is last.tape and here.start == last.start and here.stop >= last.stop
        return here is last

    def differs_by_hidden(self, other: Transcript) -> bool:
        """Tell whether two views that differ show a reader the same: then they differ only by hidden messages."""
        for longer, shorter in ((self, other), (other, self)):
            if len(longer) > len(shorter) and longer.extends(shorter):
                return all(message.is_sealed for message in longer[len(shorter) :])
        mine, others = list(self), list(other)
        return mine != others and _shown(mine) == _shown(others)

    def place_of_last(self, count: int) -> int:
        """Return where the last `count` messages begin that are not hidden; 0 if there are fewer."""
        if count <= 0:
            return self._length
        for place, message in zip(range(self._length - 1, -1, -1), reversed(self), strict=True):
            count -= not message.is_sealed
            if not count:
                return place
        return 0

    def reset(self) -> Transcript:
        """Return an empty view. Every log keeps what it has."""
        return Transcript()

    def trim(self, keep_last: int) -> Transcript:
        """Return at least the last `keep_last` messages. The cut moves earlier if a result would lose its call.

        Hidden messages are not counted.
        """
        if keep_last < 0:
            raise InvalidData("$.keep_last", f"cannot keep {brief(keep_last)} messages; give 0 or more")
        return self.cut(self.safe_cut(self.place_of_last(keep_last)), self._length)

    def safe_cut(self, at: int) -> int:
        """Return the nearest place at or before `at` where a view may begin without parting a call from its result."""
        at = max(0, min(at, self._length))
        waiting: dict[str, int] = {}
        pairs: list[tuple[int, int]] = []
        for place, message in zip(range(self._length - 1, -1, -1), reversed(self), strict=True):
            if place < at and not waiting:
                break
            parts = message.parts
            # Most are so. A turn with a bounded view passes all that the view shows, so each step here counts.
            if len(parts) == 1 and type(parts[0]) is Text:
                continue
            for part in parts:
                if isinstance(part, ToolResult):
                    waiting.setdefault(part.call_id, place)
            for part in parts:
                if isinstance(part, ToolCall) and part.id in waiting:
                    pairs.append((waiting.pop(part.id), place))
        for result_at, call_at in sorted(pairs, reverse=True):
            if call_at < at <= result_at:
                at = call_at
        return at

    def cover(
        self,
        start: int,
        stop: int,
        shown: Iterable[Message],
        *,
        by: str,
        tokens_before: int | None = None,
        tokens_after: int | None = None,
        model: str | None = None,
        block_id: str | None = None,
        at: Time | None = None,
    ) -> Transcript:
        """Return a view with some messages in place of those from `start` to `stop`, which the new block keeps.

        Messages that are given as a transcript are shown from their own logs, and not stored again.
        """
        if not 0 <= start < stop <= self._length:
            raise InvalidData("$.cover", f"cannot cover {start} to {stop} of {self._length} messages")
        if not (self._is_edge(start) and self._is_edge(stop)):
            raise InvalidData("$.cover", f"{start} to {stop} ends inside a compaction block; cover the whole block")
        block = Block(
            covered=_sliced(self.pieces, start, stop),
            shown=(shown if isinstance(shown, Transcript) else Transcript.of(shown)).without_blocks().pieces,
            by=by,
            id=block_id or new_id(),
            at=at or now(),
            tokens_before=tokens_before,
            tokens_after=tokens_after,
            model=model,
        )
        return Transcript((*_sliced(self.pieces, 0, start), block, *_sliced(self.pieces, stop, self._length)))

    def without_blocks(self) -> Transcript:
        """Return the same view as spans alone: what was shown, without what it stood for."""
        return self if all(isinstance(piece, Span) for piece in self.pieces) else Transcript(self.spans())

    def edge_from(self, place: int) -> int:
        """Return the nearest place at or after `place` that is not inside a block."""
        passed = 0
        for piece in self.pieces:
            if isinstance(piece, Block) and passed < place < passed + len(piece):
                return passed + len(piece)
            passed += len(piece)
        return place

    def uncover(self, block_id: str | None = None) -> Transcript:
        """Return the view without one block (the last one, unless named). What it covered is shown again."""
        places = [i for i, piece in enumerate(self.pieces) if isinstance(piece, Block) and block_id in (None, piece.id)]
        if not places:
            known = ", ".join(piece.id for piece in self.pieces if isinstance(piece, Block)) or "none"
            raise InvalidData("$.block_id", f"no such compaction block on this view: {block_id}; there are: {known}")
        block = self.pieces[places[-1]]
        assert isinstance(block, Block)
        return Transcript((*self.pieces[: places[-1]], *block.covered, *self.pieces[places[-1] + 1 :]))

    def _is_edge(self, place: int) -> bool:
        return self.edge_from(place) == place


def _shown(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if not message.is_sealed]


def _unchecked(pieces: tuple[Piece, ...], length: int) -> Transcript:
    """Return a transcript of pieces that are known to be in normal form."""
    transcript = Transcript.__new__(Transcript)
    transcript.pieces = pieces
    transcript._length = length
    transcript.found = None
    return transcript


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return pieces in normal form: no span is empty, and neighbours on one tape are one span."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Span):
            if piece.start >= piece.stop:
                continue
            if isinstance(last, Span) and last.tape is piece.tape and last.stop == piece.start:
                joined[-1] = Span(last.tape, last.start, piece.stop)
                continue
        joined.append(piece)
    return tuple(joined)


def visible(pieces: Iterable[Piece]) -> Iterator[Span]:
    """Yield the spans that pieces show."""
    for piece in pieces:
        if isinstance(piece, Span):
            yield piece
        else:
            yield from piece.shown


def every_span(pieces: Iterable[Piece]) -> Iterator[Span]:
    """Yield the spans that pieces name, covered ones too."""
    todo = list(pieces)[::-1]  # not by recursion: each compaction may cover the one before, without end
    while todo:
        piece = todo.pop()
        if isinstance(piece, Span):
            yield piece
        else:
            todo += (*piece.covered, *piece.shown)[::-1]


def _blocks(pieces: Iterable[Piece]) -> Iterator[Block]:
    todo = list(pieces)[::-1]
    while todo:
        piece = todo.pop()
        if isinstance(piece, Block):
            yield piece
            todo += piece.covered[::-1]


def _sliced(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return pieces that show `start` to `stop`. A block that is cut dissolves into what is left of its view.

    A block that shows nothing goes with the message after it, or at the very end with the one before.
    """
    kept: list[Piece] = []
    to_the_end = start < sum(map(len, pieces)) <= stop
    for piece in pieces:
        length = len(piece)
        low, high = max(start, 0), min(stop, length)
        if length == 0 and start <= 0 and (stop > 0 or to_the_end):
            kept.append(piece)
        elif low < high:
            if low == 0 and high == length:
                kept.append(piece)
            elif isinstance(piece, Span):
                kept.append(piece.cut(low, high))
            else:
                kept.extend(_sliced(piece.shown, low, high))
        start, stop = start - length, stop - length
    return tuple(kept)


def _places(pieces: tuple[Piece, ...]) -> list[object] | None:
    """Return the places of pieces in logs, and blocks with all that is in them. None if a piece is in no log yet."""
    places: list[Any] = []
    for piece in _unfolded(pieces):
        if not isinstance(piece, Span):
            places.append(piece)
        elif piece.tape.ref is None:
            return None
        elif places and type(places[-1]) is tuple and places[-1][::2] == (piece.tape.ref, piece.start):
            places[-1] = (piece.tape.ref, places[-1][1], piece.stop)
        else:
            places.append((piece.tape.ref, piece.start, piece.stop))
    return places


def _content(pieces: tuple[Piece, ...]) -> list[object]:
    """Return what pieces mean, on whichever tapes: messages, unread spans, and blocks with what they cover."""
    content: list[object] = []
    for piece in _unfolded(pieces):
        if not isinstance(piece, Span):
            content.append(piece)
        elif piece.tape.items is None:
            content.append((piece.tape.ref, piece.start, piece.stop))
        else:
            content.extend(piece.messages())
    return content


def _unfolded(pieces: tuple[Piece, ...]) -> Iterator[object]:
    """Yield spans and blocks in order, each block emptied and followed by marks and what it shows and covers."""
    todo: list[Any] = list(pieces)[::-1]
    while todo:
        piece = todo.pop()
        if isinstance(piece, Block):
            yield replace(piece, covered=(), shown=())
            todo += ("shown", *piece.shown, "covered", *piece.covered, "end")[::-1]
        else:
            yield piece
