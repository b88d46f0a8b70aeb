"""The sessions at hand: a cache of those that a store has read or written last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from perdure.model.session import AgentSession
from perdure.model.value import EMPTY

K = TypeVar("K")
T = TypeVar("T")


class LRU(OrderedDict[K, T], Generic[K, T]):
    """A mapping with a limited number of entries, which drops the least recently used one.

    Event loops in several threads may share one, so everything that takes more than one step is done under a lock.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        # Reentrant: `SessionCache.keep` compares under it, and then calls the `keep` of this class.
        self._changing = threading.RLock()
        self.pinned: set[K] = set()
        """The keys that are never forgotten, however long ago they were used."""

    def recall(self, key: K) -> T | None:
        """Return an entry, which is now the one used last; None if there is none."""
        with self._changing:
            found = self.get(key)
            if found is not None:
                self.move_to_end(key)
            return found

    def keep(self, key: K, entry: T) -> None:
        if not self._most:  # even if it is pinned: the owner of the cache wants nothing to be kept
            return
        with self._changing:
            self[key] = entry
            self.move_to_end(key)
            while len(self) > self._most:
                oldest = next((each for each in self if each not in self.pinned), None)
                if oldest is None:
                    break
                del self[oldest]

    def forget(self, key: K) -> None:
        """Drop an entry, if it is there."""
        with self._changing:
            self.pop(key, None)

    def forget_all(self) -> None:
        with self._changing:
            self.clear()

    def snapshot(self) -> dict[K, T]:
        """Return all entries as they are now."""
        with self._changing:
            return dict(self)


class SessionCache(LRU[str, "CachedSession"]):
    """The sessions at hand. An older state of a session never replaces a newer one.

    If two event loops run in two threads, a save and a load may end in one order and be reported in the other.
    """

    def keep(self, key: str, entry: CachedSession) -> None:
        with self._changing:
            known = self.get(key)
            if known is None or (known.erasures, known.session.version) <= (entry.erasures, entry.session.version):
                super().keep(key, entry)


class StoredMetadata(msgspec.Struct, frozen=True):
    """Metadata in bytes, with null in the place of each value that is stored apart."""

    rest: bytes
    apart: Mapping[str, str] = EMPTY
    """The names of those values, by their keys."""


class CachedSession(msgspec.Struct, frozen=True):
    """A session as it was last seen in the store, with facts that a save would otherwise have to look up."""

    session: AgentSession
    erasures: int
    hashes: frozenset[str] = frozenset()
    refs: frozenset[Any] | None = None
    """The stretches of others' logs that are known to be noted. None if it was loaded: then all that it shows are."""
    began_with: frozenset[Any] | None = None
    """The stretches that its first version shows; None if that is not known."""
    at_hand: bool = True
    is_waited_for: bool | None = None
    """True if the save that it comes from left items in the inbox; None if it was loaded."""
    metadata: StoredMetadata | None = None
    """Its metadata as it is stored; None if it has none."""
    losses: int = 0
    """The number of forgotten keys when it was read. If it has grown, this session may be sealed with one of them."""
