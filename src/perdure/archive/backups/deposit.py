"""The deposit for an engine's copy: chunks that the directory has are only named, others go into new packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from time import perf_counter, sleep

from perdure.archive.backups.catalog import Catalog, entries_in
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.packs import PackWriter
from perdure.archive.backups.target import Target, as_store_error
from perdure.errors import BackupDamaged
from perdure.stores.copies import Outline

Tell = Callable[[int, int], None]
_TOLD_AFTER = 1 << 20
# Each hash releases the GIL, and has it again before a waiting thread is awake. Saves in the process of a backup took
# three times as long. So this thread sleeps now and then, as `aio.in_turns` does.
_TURN = 0.0005
_PAUSE = 0.00025


class Stopped(Exception):
    """The error that stops a backup whose caller was cancelled."""


class Packing:
    """A copy on its way into a directory of backups. `full` writes all chunks, `gentle` pauses for others."""

    def __init__(
        self, target: Target, name: str, before: Backup | None, tell: Tell, *, full: bool, gentle: bool
    ) -> None:
        self._is_gentle = gentle
        self._target = target
        self._before = None if full else before
        self._known = {} if full else target.packs.places
        self._writers: Iterator[PackWriter] = target.writers(name)
        self._writer: PackWriter | None = None
        self._written: set[bytes] = set()
        self._tell = tell
        self._told = 0
        self._expected = 0
        self._catalog = Catalog()
        self.size = 0
        self.chunks = 0
        self.added = 0
        self.is_stopped = False
        self._due = 0.0

    @property
    def last(self) -> Outline | None:
        return None if self._before is None else self._before.outline

    def chunks_of_last(self, part: str) -> Sequence[bytes]:
        assert self._before is not None, "there is none"
        try:
            entries = entries_in(self._target.packs, self._before.catalog)
            keys = [key for entry in entries if entry.part == part for key in entry.keys]
        except BackupDamaged:
            return ()
        return keys if self._known.keys() >= {*keys} else ()

    def expect(self, size: int) -> None:
        self._expected = size

    def put(self, part: str, chunk: bytes) -> None:
        key = sha256(chunk).digest()
        if key not in self._known and key not in self._written:
            self._add(key, chunk)
        self._note(part, key, len(chunk))

    def put_known(self, part: str, chunk: bytes) -> None:
        self._note(part, chunk, self._target.packs.places[chunk].size)

    def _note(self, part: str, key: bytes, size: int) -> None:
        if self.is_stopped:
            raise Stopped
        if self._is_gentle and perf_counter() > self._due:
            sleep(_PAUSE)
            self._due = perf_counter() + _TURN
        self._catalog.add(part, key)
        self.size += size
        self.chunks += 1
        if self.size >= self._told + _TOLD_AFTER:
            self._told = self.size
            self._tell(self.size, max(self._expected, self.size))

    def _add(self, key: bytes, chunk: bytes) -> None:
        with as_store_error(self._target.path):  # here, so that it does not look like an error of the copied store
            if self._writer is None:
                self._writer = next(self._writers)
            self._written.add(key)
            self._writer.add(key, chunk)
        if self._writer.is_full:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            with as_store_error(self._target.path):
                self.added += self._writer.finish()
            self._target.packs.add(self._writer.places)
            self._writer = None

    def begin_again(self) -> None:
        self._catalog = Catalog()
        self.size = self.chunks = self._told = 0

    def finish(self) -> tuple[str, ...]:
        """Write the catalog as chunks, sync all packs, and return the names of the catalog's chunks."""
        names: list[str] = []
        for chunk in self._catalog.chunks():
            key = sha256(chunk).digest()
            if key not in self._known and key not in self._written:
                self._add(key, chunk)
            names.append(key.hex())
        self._close()
        self._tell(self.size, self.size)
        return tuple(names)

    def discard(self) -> None:
        """Drop the unfinished pack. Packs that are complete stay, and the next backup uses them."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
