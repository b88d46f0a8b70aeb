"""The compaction blocks in a session's versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perdure import codec
from perdure.model.transcript import Block, LogRef, Piece, Span, Tape
from perdure.stores.format.blocks import BlocksAtHand
from perdure.stores.format.rows import Stretch
from perdure.stores.jobs.redaction.versions import Version
from perdure.stores.tapes import merged


class MetBlock(NamedTuple):
    """A block, and the stretches of logs that it covers, with all that is within it."""

    block: Block
    covered: Sequence[Stretch]


class BlocksMet:
    """The blocks that were met so far. Most blocks are in many versions, and each is handled once.

    `values` has those of all versions. Facts about a block within another are not worked out again. So the cost of a
    version is what is new in it, at any depth of its blocks.
    """

    def __init__(self, values: Mapping[str, bytes]) -> None:
        self._block_of = BlocksAtHand(values, _span_of)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._met: list[MetBlock] = []
        """The blocks by their numbers."""
        self._known: dict[int, tuple[Block, int]] = {}
        """The numbers of blocks that were read, by `id()`, with the blocks: an id is reused once its object is gone."""

    def new_ones(self, version: Version) -> Iterator[MetBlock]:
        """Yield the blocks in a version, and in its steps' views, that were not met before. Inner ones come first."""
        for piece in self._pieces(version):
            if isinstance(piece, Block):
                yield from self._new_ones(piece)

    def _pieces(self, version: Version) -> Iterator[Piece]:
        holders = (version.raw, *version.parts.values())
        if not version.names_blocks and not any(b'"covered"' in each for each in holders):
            return
        plain = codec.decode_plain(version.raw)
        for name in ("prefix", "transcript", "execution"):
            hashed = plain.get("hashed", {}).get(name)
            part = codec.decode_plain(version.parts[hashed]) if hashed else plain.get("parts", {}).get(name)
            for pieces in _piece_lists(part):
                yield from codec.load_pieces(pieces, _span_of, self._block_of)

    def _new_ones(self, outermost: Block) -> Iterator[MetBlock]:
        """Yield the new blocks in a block, and then itself if it is new."""
        # No recursion: blocks may nest deeper than Python's stack.
        todo = [outermost]
        while todo:
            block = todo[-1]
            inner = [piece for piece in block.covered if isinstance(piece, Block) and id(piece) not in self._known]
            if inner and id(block) not in self._known:
                todo += inner
                continue
            todo.pop()
            if id(block) not in self._known:
                yield from self._number(block)

    def _number(self, block: Block) -> Iterator[MetBlock]:
        covered = [stretch_of(each) if isinstance(each, Span) else self._known[id(each)][1] for each in block.covered]
        key = (block.id, *covered, None, *map(stretch_of, block.shown))
        number = self._numbers.setdefault(key, len(self._met))
        self._known[id(block)] = (block, number)
        if number == len(self._met):
            self._met.append(MetBlock(block, merged(self._stretches(block.covered))))
            yield self._met[-1]

    def _stretches(self, covered: Iterable[Piece]) -> Iterator[Stretch]:
        for piece in covered:
            if isinstance(piece, Span):
                yield stretch_of(piece)
            else:
                yield from self._met[self._known[id(piece)][1]].covered
                yield from map(stretch_of, piece.shown)


def _piece_lists(part: Any) -> Iterator[list[Any]]:
    """Yield the lists of pieces in a part of a head: the part itself, or the views in a run's steps."""
    if isinstance(part, list):
        yield part
    elif isinstance(part, dict):
        for done in (*part.get("step_executions", ()), {"step": part.get("current_step") or {}}):
            for view in ("input_messages", "output_messages"):
                yield done["step"].get(view) or []


def _span_of(log: int | str, start: int, stop: int) -> Span:
    return Span(Tape(None, LogRef("", log)), start, stop)


def stretch_of(span: Span) -> Stretch:
    assert span.tape.ref is not None
    return span.tape.ref.key, span.start, span.stop
