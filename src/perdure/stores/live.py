"""The sessions at hand: what a store has read or written last, so that it need not read it again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec

from perdure.model.session import AgentSession

K = TypeVar("K")
T = TypeVar("T")


class LRU(OrderedDict[K, T], Generic[K, T]):
    """A mapping that forgets what was used longest ago, beyond a number of entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.pinned: set[K] = set()
        """What is never forgotten, however long ago it was used."""

    def recall(self, key: K) -> T | None:
        """The entry, and it is now the one used last."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def keep(self, key: K, entry: T) -> None:
        self[key] = entry
        self.move_to_end(key)
        while len(self) > self._most:
            oldest = next((each for each in self if each not in self.pinned), None)
            if oldest is None:
                break
            del self[oldest]


class Live(msgspec.Struct, frozen=True):
    """A session as it was last seen in the store, with what a save would otherwise have to look up."""

    session: AgentSession
    erasures: int
    hashes: frozenset[str] = frozenset()
    refs: frozenset[Any] = frozenset()
    at_hand: bool = True
