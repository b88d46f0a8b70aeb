"""The pieces of a transcript as plain data: spans of named logs, and blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from perdure.codec.unknown import stashed, type_info
from perdure.model.transcript import Block, Piece, Span

_MAX_POSITION = 2**40  # so that the length of any view is a number that len() can return

LogName = int | str
NameOf = Callable[[Span], LogName]
SpanOf = Callable[[LogName, int, int], Span]
DumpBlock = Callable[[Block], Any]
"""A function that returns a block of a view as plain data, or the name under which it is stored apart."""
BlockOf = Callable[[str], Block]
"""A function that returns the block stored apart under a name."""


def dump_pieces(pieces: Sequence[Piece], name_of: NameOf, dump_block: DumpBlock | None = None) -> list[Any]:
    """Return pieces as plain data: `[log, start, stop]` for a span, an object or a stored name for a block."""
    dump = dump_block or functools.partial(_dump_block_whole, name_of=name_of)
    return [dump_span(piece, name_of) if isinstance(piece, Span) else dump(piece) for piece in pieces]


def load_pieces(plain: object, span_of: SpanOf, block_of: BlockOf | None = None) -> tuple[Piece, ...]:
    """Return pieces from plain data. Raise ValueError if something is wrong with it."""
    return tuple(
        _load_block(item, _load_covered(item.get("covered"), span_of, block_of), span_of)
        if isinstance(item, Mapping)
        else _load_piece(item, span_of, block_of)
        for item in _list(plain)
    )


def dump_span(span: Span, name_of: NameOf) -> list[Any]:
    return [name_of(span), span.start, span.stop]


def dump_block(block: Block, name_of: NameOf, **extent: Any) -> dict[str, Any]:
    """Return a block as plain data, without what it covers. `extent` has that."""
    plain = msgspec.to_builtins(msgspec.structs.replace(block, covered=(), shown=(), unknown={}))
    for name in ("~", "covered"):
        plain.pop(name, None)
    plain["shown"] = [dump_span(span, name_of) for span in block.shown]
    return {**block.unknown, **plain, **extent}


def _dump_block_whole(block: Block, name_of: NameOf) -> dict[str, Any]:
    return dump_block(block, name_of, covered=_dump_covered(block.covered, name_of))


def _dump_covered(pieces: Sequence[Piece], name_of: NameOf) -> list[Any]:
    """Return covered pieces as a flat list, since blocks in blocks would nest without end.

    A block comes after the pieces that it covers, and says how many these are.
    """
    plain: list[Any] = []
    todo: list[tuple[Piece, bool]] = [(piece, False) for piece in reversed(pieces)]
    while todo:
        piece, is_block_behind_its_pieces = todo.pop()
        if isinstance(piece, Span):
            plain.append(dump_span(piece, name_of))
        elif is_block_behind_its_pieces:
            plain.append(dump_block(piece, name_of, covers=len(piece.covered)))
        else:
            todo.append((piece, True))
            todo += [(covered, False) for covered in reversed(piece.covered)]
    return plain


def _load_covered(plain: object, span_of: SpanOf, block_of: BlockOf | None) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for item in _list(plain):
        if not isinstance(item, Mapping):
            pieces.append(_load_piece(item, span_of, block_of))
            continue
        count = item.get("covers")
        if type(count) is not int or not 0 <= count <= len(pieces):
            raise ValueError("a covered block says how many of the pieces before it it covers")
        first = len(pieces) - count
        pieces[first:] = [_load_block(item, tuple(pieces[first:]), span_of)]
    return tuple(pieces)


def _load_block(plain: Mapping[str, Any], covered: tuple[Piece, ...], span_of: SpanOf) -> Block:
    head = {name: item for name, item in plain.items() if name not in _EXTENT}
    if not _BLOCK_FIELDS.issuperset(head):
        head = stashed(type_info(Block), head)
    block = msgspec.convert({**head, "covered": (), "shown": ()}, Block)
    shown = tuple([_load_span(item, span_of) for item in _list(plain.get("shown"))])
    return msgspec.structs.replace(block, covered=covered, shown=shown)


_EXTENT = frozenset({"covered", "covers", "shown"})
_BLOCK_FIELDS = frozenset(Block.__struct_encode_fields__) - {"~"}


def _load_piece(plain: object, span_of: SpanOf, block_of: BlockOf | None) -> Piece:
    if isinstance(plain, str) and block_of is not None:
        return block_of(plain)
    return _load_span(plain, span_of)


def _list(plain: object) -> Sequence[Any]:
    if not isinstance(plain, list | tuple):
        raise ValueError("a transcript is a list of pieces")
    return plain


def _load_span(plain: object, span_of: SpanOf) -> Span:
    if not isinstance(plain, list | tuple) or len(plain) != 3:
        raise ValueError("a piece is [log, start, stop] or a block, and a block shows the former alone")
    log, start, stop = plain
    if not isinstance(log, int | str) or isinstance(log, bool) or type(start) is not int or type(stop) is not int:
        raise ValueError("a span is [log, start, stop] with whole numbers")
    if not 0 <= start < stop <= _MAX_POSITION:
        raise ValueError("a span goes from a position in its log to a later one")
    return span_of(log, start, stop)
