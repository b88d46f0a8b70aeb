"""The parts of a backup, which an engine copies out chunk by chunk, and takes in again.

An engine copies bytes as they are and decodes no body. So a sealed store is copied without its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from perdure.stores.engine import Engine

CHUNK = 1 << 15
"""Bytes in a chunk. One changed byte rewrites a chunk, and a turn changes about twenty pages all over a SQLite file."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's description of a copy, kept beside its bytes."""

    engine: str
    store: str
    """The store's own id."""
    schema: int = 0
    """The number of its schema; 0 if the engine has none."""
    counts: Mapping[str, int] = {}
    """Rows of tables, by the names that all engines know."""
    facts: Mapping[str, Any] = {}
    """Facts that this engine needs to take the copy in, or to make the next copy of the same store quicker."""


class Deposit(Protocol):
    """The place that an engine copies to. One thread uses it at a time."""

    @property
    def last(self) -> Outline | None:
        """The outline of the last copy of this store that is kept here."""
        ...

    def chunks_of_last(self, part: str) -> Sequence[bytes]:
        """Return the hashes of a part's chunks in the last copy."""
        ...

    def expect(self, size: int) -> None:
        """Announce the approximate number of bytes to come, for reports of progress."""
        ...

    def put(self, part: str, chunk: bytes) -> None:
        """Add the next chunk of a part. The parts come one after the other."""
        ...

    def put_known(self, part: str, chunk: bytes) -> None:
        """Add a chunk that is in the deposit already, by its hash."""
        ...

    def begin_again(self) -> None:
        """Forget all parts, because another process has written meanwhile. Chunks stay, and are not written twice."""
        ...


class Part(NamedTuple):
    """A part of a copy that is taken in."""

    name: str
    chunks: Iterator[bytes]


class Landing(Protocol):
    """A place where a copy is taken in. Nobody can open it as a store before `publish`."""

    async def begin(self) -> None:
        """Take the place, and remove what an unfinished restore has left. Raise StoreNotEmpty if it has sessions."""
        ...

    async def take_in(self, outline: Outline, parts: Iterator[Part]) -> None: ...

    @property
    def engine(self) -> Engine:
        """An engine for the copy that was taken in, not open yet."""
        ...

    async def publish(self) -> None:
        """Make it the store, all at once."""
        ...

    async def end(self) -> None:
        """Release the place, whether or not it was published."""
        ...
