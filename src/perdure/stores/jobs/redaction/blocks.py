"""The compaction blocks in a session's versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perdure import codec
from perdure.model.transcript import Block, LogRef, Span, Tape, Transcript
from perdure.stores.format.blocks import BlocksAtHand
from perdure.stores.format.rows import Stretch
from perdure.stores.jobs.redaction.versions import Version


def blocks_of(version: Version) -> Iterator[Block]:
    """Yield every compaction block in a version, those of its steps' views too."""
    if b'"covered"' not in version.raw and not any(b'"covered"' in each for each in version.values.values()):
        return
    plain = codec.decode_plain(version.raw)
    block_of = BlocksAtHand(version.values, _span_of)
    for name in ("prefix", "transcript", "execution"):
        hashed = plain.get("hashed", {}).get(name)
        part = codec.decode_plain(version.values[hashed]) if hashed else plain.get("parts", {}).get(name)
        for pieces in _piece_lists(part):
            yield from Transcript(codec.load_pieces(pieces, _span_of, block_of)).blocks()


class BlocksMet:
    """Tells blocks that were not met before from those that stand in many versions, as most do."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def new_ones(self, blocks: Iterable[Block]) -> Iterator[Block]:
        numbers: dict[int, int] = {}
        for block in reversed(list(blocks)):  # those within come first
            covered = [stretch_of(each) if isinstance(each, Span) else numbers[id(each)] for each in block.covered]
            key = (block.id, *covered, None, *map(stretch_of, block.shown))
            is_new = key not in self._numbers
            numbers[id(block)] = self._numbers.setdefault(key, len(self._numbers))
            if is_new:
                yield block


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
