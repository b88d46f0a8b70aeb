"""The catalog of a backup: the chunks of each part, as lines in chunks, so that backups can share these too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

import msgspec

from perdure.archive.backups.packs import Packs
from perdure.errors import BackupDamaged

_HASH = 32
_MOST = 256
"""The most chunks in one entry. The entries of a long part end at multiples of it, so that they stay when it grows."""
_FULL = 1 << 15
_ONE_IN = 32


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The hashes of a part's chunks, or of some of them. The next entry of the same part has those that follow."""

    part: str
    hashes: bytes

    @property
    def keys(self) -> list[bytes]:
        return [self.hashes[at : at + _HASH] for at in range(0, len(self.hashes), _HASH)]


class Catalog:
    """The parts of a backup that is being made, in order."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, bytearray]] = []
        self._names: set[str] = set()

    def add(self, part: str, key: bytes) -> None:
        if not self._entries or self._entries[-1][0] != part:
            assert part not in self._names, "parts come one after the other"
            self._names.add(part)
            self._entries.append((part, bytearray()))
        elif len(self._entries[-1][1]) == _MOST * _HASH:
            self._entries.append((part, bytearray()))
        self._entries[-1][1].extend(key)

    def chunks(self) -> Iterator[bytes]:
        """Yield the catalog as chunks. The end of a chunk depends on its content, not on what comes before."""
        lines = bytearray()
        for part, hashes in self._entries:
            lines += msgspec.json.encode(Entry(part, bytes(hashes))) + b"\n"
            # By the name of the part, so that a new or changed part alters few chunks of the catalog.
            is_whole = len(hashes) == _MOST * _HASH or crc32(part.encode()) % _ONE_IN == 0
            if is_whole or len(lines) >= _FULL:
                yield bytes(lines)
                lines = bytearray()
        if lines:
            yield bytes(lines)


def entries_in(packs: Packs, catalog: Iterable[str]) -> Iterator[Entry]:
    for key in catalog:
        raw = packs.read(bytes.fromhex(key))
        try:
            yield from (msgspec.json.decode(line, type=Entry) for line in raw.splitlines())
        except msgspec.MsgspecError as error:  # the hash is right: another program has written it
            raise BackupDamaged(packs.directory, f"it cannot be read ({error})", chunk=key) from None


def hashes_in(packs: Packs, catalog: Iterable[str]) -> Iterator[bytes]:
    """Yield the hashes of all chunks of all parts."""
    for entry in entries_in(packs, catalog):
        yield from entry.keys
