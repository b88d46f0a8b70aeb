"""The stretches of logs that a stored view names, read without the messages in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perdure import codec
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.rows import Stretch


def part_of_view(head: StoredHead, name: str, values: Mapping[str, bytes]) -> bytes:
    """Return one of the two lists of pieces of a version's view: its `prefix` or its `transcript`."""
    if name in head.head.hashed:
        return values[head.head.hashed[name]]
    return bytes(head.head.parts.get(name, b"[]"))


def stretches_in(pieces: Iterable[Any], values: Mapping[str, bytes]) -> Iterator[Stretch]:
    """Yield the stretches that stored pieces name, covered pieces before those shown in their place.

    Blocks whose values are not given are left out.
    """
    # No recursion: blocks may nest deeper than Python's stack.
    todo = [*pieces][::-1]
    while todo:
        piece = todo.pop()
        if isinstance(piece, str):
            if piece in values:
                todo.append(codec.decode_plain(values[piece]))
        elif isinstance(piece, dict):
            todo += [*piece.get("covered", ()), *piece["shown"]][::-1]
        else:
            log, start, stop = piece
            yield log, start, stop


def stretches_of_view(head: StoredHead, values: Mapping[str, bytes]) -> Iterator[Stretch]:
    """Yield the stretches that a version shows and covers, in order."""
    for name in ("prefix", "transcript"):
        yield from stretches_in(codec.decode_plain(part_of_view(head, name, values)), values)
