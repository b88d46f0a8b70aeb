"""The stored form of compaction blocks: small ones are kept in place, large ones apart, as values under their hashes.

Each compaction covers the one before, so blocks nest without end. A block within a block is written into it, up to
CUT bytes. A larger one is stored apart, and is named. The inside of a block never changes, so the cuts stay where they
are. A further compaction writes what is new, and at most CUT bytes that were written before.

The stored form of a block is kept on the block, and goes with it. No save walks what an earlier one has walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.transcript import Block, LogRef, Piece, Span
from perdure.stores.format.rows import Namer, Values, hash_of

INLINE = 512
"""The most bytes of a block that is written into a view. A larger one is named there."""
CUT = 4096
"""The most bytes of a covered block that is written into the one that covers it. A larger one is named there."""
_MOST_PIECES = 1_000_000
"""The most pieces of a view. Names can be repeated, so a few bytes could otherwise expand to any number."""
_REMEMBERED = "stored"

Intervals = tuple[tuple[int, int], ...]
Reach = Mapping[LogRef, Intervals]


class StoredBlock:
    """The stored form of a block whose messages are all in logs."""

    __slots__ = ("_name", "inline", "name_of", "named", "reach", "value")

    def __init__(
        self,
        value: bytes,
        reach: Reach,
        named: tuple[StoredBlock, ...],
        inline: bytes | None = None,
        name: str | None = None,
        name_of: Namer = hash_of,
    ) -> None:
        self.name_of = None if name is not None else name_of
        """The function that makes its name; None if it was read under its name."""
        self.value = value
        self.reach = reach
        """The stretches of logs that it names, including those of blocks within it."""
        self.named = named
        """The blocks that it names."""
        self.inline = inline
        """Its bytes among the pieces that another block covers; None if it is named there."""
        self._name = name

    @property
    def name(self) -> str:
        if self._name is None:
            assert self.name_of is not None
            self._name = self.name_of(self.value)
        return self._name

    @property
    def is_small(self) -> bool:
        return len(self.value) <= INLINE

    def is_settled_in(self, origin: str) -> bool:
        return all(ref.origin == origin for ref in self.reach)


def stored(block: Block, name_of: Namer | None = None) -> StoredBlock:
    """Return the stored form of a block. With `name_of`, a form whose names were made in another way is not used."""
    made: dict[int, StoredBlock] = {}
    # No recursion: blocks may nest deeper than Python's stack.
    todo = [block]
    while todo:
        known = made.get(id(todo[-1])) or _named_so(todo[-1], name_of)
        if known is None:
            inner = [piece for piece in todo[-1].covered if isinstance(piece, Block)]
            missing = [piece for piece in inner if id(piece) not in made]
            if missing:
                todo += missing
                continue
            known = _stored(todo[-1], [made[id(piece)] for piece in inner], name_of or hash_of)
            _remember(todo[-1], known)
            _forget_inlined(inner)
        made[id(todo.pop())] = known
    return made[id(block)]


def _named_so(block: Block, name_of: Namer | None) -> StoredBlock | None:
    """Return the known form of a block, unless its name was made in another way, as with another owner's key."""
    known = remembered(block)
    return None if known is not None and name_of is not None and known.name_of not in (None, name_of) else known


def remembered(block: Block) -> StoredBlock | None:
    # On the block itself: a table by identity would keep erased text in memory, or forget what an open session needs.
    known: StoredBlock | None = block.__dict__.get(_REMEMBERED)
    return known


def _remember(block: Block, known: StoredBlock) -> None:
    block.__dict__[_REMEMBERED] = known


def _forget_inlined(blocks: Iterable[Block]) -> None:
    """Let go of the known forms of blocks within these, which are part of a larger form now.

    The forms of these blocks themselves are kept, since the steps of the last run may show them. If an inner block is
    shown again, its form is rebuilt.
    """
    for piece in (inner for block in blocks for inner in block.covered):
        if isinstance(piece, Block):
            known = remembered(piece)
            if known is not None and known.inline is not None:
                piece.__dict__.pop(_REMEMBERED, None)


def _stored(block: Block, inner: Sequence[StoredBlock], name_of: Namer) -> StoredBlock:
    blocks, items, named = iter(inner), list[bytes](), list[StoredBlock]()
    for piece in block.covered:
        if isinstance(piece, Span):
            items.append(msgspec.json.encode(codec.dump_span(piece, stored_name)))
            continue
        known = next(blocks)
        if known.inline is None:
            named.append(known)
            items.append(msgspec.json.encode(known.name))
        else:
            named += known.named
            items.append(known.inline)
    head, covered = msgspec.json.encode(codec.dump_block(block, stored_name))[:-1], b",".join(items)
    value = b'%b,"covered":[%b]}' % (head, covered)
    inline = None if len(value) > CUT else b"%b%b%b" % (covered, b"," if covered else b"", _with_count(head, block))
    spans = (piece for piece in (*block.covered, *block.shown) if isinstance(piece, Span))
    return StoredBlock(value, _reach(spans, (known.reach for known in inner)), tuple(named), inline, name_of=name_of)


def _with_count(head: bytes, block: Block) -> bytes:
    return b'%b,"covers":%d}' % (head, len(block.covered))


def stored_name(span: Span) -> int | str:
    if span.tape.ref is None:
        raise InvalidData("$", "a head can only name messages that are in a log")
    return span.tape.ref.key


def _reach(spans: Iterable[Span], others: Iterable[Reach]) -> Reach:
    found: dict[LogRef, list[tuple[int, int]]] = {}
    for span in spans:
        assert span.tape.ref is not None, "its name was asked for before"
        found.setdefault(span.tape.ref, []).append((span.start, span.stop))
    for reach in others:
        for ref, intervals in reach.items():
            found.setdefault(ref, []).extend(intervals)
    return {ref: _merged(intervals) for ref, intervals in found.items()}


def _merged(intervals: list[tuple[int, int]]) -> Intervals:
    intervals.sort()
    merged = intervals[:1]
    for start, stop in intervals[1:]:
        if start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def unsettled_spans(pieces: Iterable[Piece], origin: str) -> Iterator[Span]:
    """Yield the spans that pieces name, covered ones too, that are not in a log of this store."""
    todo = list(pieces)[::-1]
    while todo:
        piece = todo.pop()
        if isinstance(piece, Block):
            if not is_known_in(piece, origin):
                todo += (*piece.covered, *piece.shown)[::-1]
        elif piece.tape.ref is None or piece.tape.ref.origin != origin:
            yield piece


def is_known_in(block: Block, origin: str) -> bool:
    """Tell whether all of a block is known to be in this store, without a look inside."""
    known = remembered(block)
    return known is not None and known.is_settled_in(origin)


class BlocksApart:
    """The blocks that the views of one head name, by name, collected while the head is written."""

    def __init__(self, name_of: Namer = hash_of) -> None:
        self._name_of = name_of
        self._named: dict[str, StoredBlock] = {}

    def dump(self, block: Block) -> Any:
        """Return the form of a block in a view: its bytes or its name."""
        known = stored(block, self._name_of)
        if known.is_small:
            self._named |= {each.name: each for each in known.named}
            return msgspec.Raw(known.value)
        self._named[known.name] = known
        return known.name

    def names(self) -> list[str]:
        return [*self._named]

    def values(self) -> Values:
        """Return the values of these blocks and of all blocks within them."""
        values: Values = {}
        todo = [*self._named.values()]
        while todo:
            block = todo.pop()
            if block.name not in values:
                values[block.name] = block.value
                todo += block.named
        return values


class BlocksAtHand:
    """The blocks that a head names, read from its values. A call with a name returns the block."""

    def __init__(self, values: Mapping[str, bytes], span_of: codec.SpanOf) -> None:
        self._values = values
        self._span_of = span_of
        self._made: dict[str, Block] = {}
        self._sizes: dict[str, int] = {}

    def __call__(self, name: str) -> Block:
        # A block is made after those within it. One that is opened twice before it is made covers itself: damage.
        todo, opened = [name], set[str]()
        while todo:
            if todo[-1] in self._made:
                todo.pop()
                continue
            plain = codec.decode_plain(self._values[todo[-1]])
            inner = names_in(plain)
            missing = [each for each in inner if each not in self._made]
            if missing:
                if todo[-1] in opened:
                    raise ValueError("a block covers itself")
                opened.add(todo[-1])
                todo += missing
            else:
                self._make(todo.pop(), plain, inner)
        return self._made[name]

    def _make(self, name: str, plain: Any, inner: list[str]) -> None:
        self._sizes[name] = len(plain["covered"]) + sum(self._sizes[each] for each in inner)
        if self._sizes[name] > _MOST_PIECES:
            raise ValueError(f"a block of over {_MOST_PIECES:,} pieces")
        for each in inner:
            self._remember(each)
        (block,) = codec.load_pieces([plain], self._span_of, self._made.__getitem__)
        assert isinstance(block, Block), "it was loaded from an object"
        self._made[name] = block
        if len(self._values[name]) > CUT:
            self._remember(name)

    def _remember(self, name: str) -> None:
        """Keep the form of a block that was read, so that the next save need not make it again."""
        block = self._made[name]
        if remembered(block) is None:
            named = tuple(known for each in _blocks_named(block) if (known := remembered(each)) is not None)
            reach = _reach_within(block)
            if reach is not None:
                _remember(block, StoredBlock(self._values[name], reach, named, name=name))


def _blocks_named(block: Block) -> Iterator[Block]:
    """Yield the known blocks within a block. They are those that it names: blocks written into it are not known yet."""
    todo = [*block.covered]
    while todo:
        piece = todo.pop()
        if isinstance(piece, Block):
            if remembered(piece) is not None:
                yield piece
            else:
                todo += piece.covered


def _reach_within(block: Block) -> Reach | None:
    """Return the reach of a block, given the reach of those that it names; None if some of it is in no log."""
    spans: list[Span] = []
    others: list[Reach] = []
    todo: list[Piece] = [*block.covered, *block.shown]
    while todo:
        piece = todo.pop()
        if isinstance(piece, Span):
            if piece.tape.ref is None:
                return None
            spans.append(piece)
        elif (known := remembered(piece)) is not None:
            others.append(known.reach)
        else:
            todo += (*piece.covered, *piece.shown)
    return _reach(spans, others)


def names_in(plain: Any) -> list[str]:
    """Return the names of blocks in a stored block."""
    if not isinstance(plain, dict) or not isinstance(plain.get("covered"), list):
        raise InvalidData("$", "a block is an object that says what it covers")
    return [item for item in plain["covered"] if isinstance(item, str)]
