"""Gathering the values that versions name by hash. Blocks name further ones, so they are found step by step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.stores.format.blocks import names_in
from perdure.stores.format.heads import StoredHead, is_block
from perdure.stores.format.rows import Values


class Gathering:
    """The values of one version. Blocks that were `met` before are left out, with all that is within them.

    Versions next to each other show mostly the same blocks, nested without end. A job that reads many versions reads
    each block once. Use it as `for key in gathering: gathering.put(key, …)`.
    """

    def __init__(self, head: StoredHead, met: Container[str] = ()) -> None:
        named = head.head.hashed
        self.values: Values = {}
        self._session_id = head.head.info.id
        self._met = met
        self._named = {head.head.definition, *(key for part, key in named.items() if not is_block(part))}
        self._todo = [*self._named]
        self._found = set(self._named)
        self._find(key for part, key in named.items() if is_block(part))

    def _find(self, blocks: Iterable[str]) -> None:
        for key in blocks:
            if key not in self._found and key not in self._met:
                self._found.add(key)
                self._todo.append(key)

    def __iter__(self) -> Iterator[str]:
        while self._todo:
            yield self._todo.pop()

    def put(self, key: str, value: bytes) -> None:
        """Put a value that was asked for. A block's value may name further ones, which are asked for next."""
        self.values[key] = value
        if key in self._named:
            return
        try:
            self._find(names_in(codec.decode_plain(value)))
        except InvalidData as error:
            raise CorruptRecord(self._session_id, f"value {key}", str(error)) from None

    @property
    def parts(self) -> Values:
        """The values that the version names itself, except for blocks."""
        return {key: self.values[key] for key in self._named}

    @property
    def blocks(self) -> set[str]:
        """The names of the blocks among the values."""
        return self.values.keys() - self._named


def gathered(head: StoredHead, value_of: Callable[[str], bytes], met: Container[str] = ()) -> Gathering:
    """Return the values of a version. `value_of` finds one by its name."""
    gathering = Gathering(head, met)
    for key in gathering:
        gathering.put(key, value_of(key))
    return gathering
