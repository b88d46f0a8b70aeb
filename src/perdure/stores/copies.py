"""What a backup is made of: parts, which an engine copies out chunk by chunk, and takes in again.

An engine copies bytes as they are and decodes no body, so that a store that is sealed is copied without its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from perdure.stores.engine import Engine

CHUNK = 1 << 15
"""Bytes of a chunk. A turn changes some twenty pages all over a SQLite file, and one changed byte costs a chunk."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of a copy beside its bytes."""

    engine: str
    store: str
    """The store's own id."""
    schema: int = 0
    """The number of its schema; 0 if the engine has none."""
    counts: Mapping[str, int] = {}
    """Rows of tables, by the names that all engines know."""
    facts: Mapping[str, Any] = {}
    """What this engine needs to take it in, or to make the next copy of the same store quicker."""


class Deposit(Protocol):
    """Where an engine puts what it copies. One thread uses it at a time."""

    @property
    def last(self) -> Outline | None:
        """The outline of the last copy of this store that is kept here."""
        ...

    def chunks_of_last(self, part: str) -> Sequence[bytes]:
        """Return the hashes of a part's chunks in the last copy."""
        ...

    def expect(self, size: int) -> None:
        """Say how many bytes there are about to be, for those who are told how far it is."""
        ...

    def put(self, part: str, chunk: bytes) -> None:
        """Add the next chunk of a part. The parts come one after the other."""
        ...

    def put_known(self, part: str, chunk: bytes) -> None:
        """Add a chunk that is in the deposit, by its hash."""
        ...

    def begin_again(self) -> None:
        """Forget all parts, since others have come in between. Chunks that were put stay, and are not written twice."""
        ...


class Part(NamedTuple):
    """A part that is taken in."""

    name: str
    chunks: Iterator[bytes]


class Landing(Protocol):
    """A place where a copy is taken in. Nobody takes it for a store before `publish`."""

    async def begin(self) -> None:
        """Take the place, and remove what an unfinished restore has left. StoreNotEmpty if it has sessions."""
        ...

    async def take_in(self, outline: Outline, parts: Iterator[Part]) -> None: ...

    @property
    def engine(self) -> Engine:
        """An engine for what was taken in, not open yet."""
        ...

    async def publish(self) -> None:
        """Make it the store, all at once."""
        ...

    async def end(self) -> None:
        """Let go of the place, whatever has become of it."""
        ...
