"""A store that counts its statements, rows read, and rows and bytes written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from perdure.stores.engine import Insert, Select, Statement
from perdure.stores.memory import MemoryEngine
from perdure.stores.store import Store


class Counts:
    """The costs of a store in some time."""

    def __init__(self) -> None:
        self.statements = 0
        self.read: Counter[str] = Counter()
        """Rows read, by table."""
        self.written = 0
        """Rows written."""
        self.bytes = 0
        """Bytes in the rows written."""


class CountingEngine(MemoryEngine):
    packs = True  # like stores on disk, whose bytes count

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def _answer(self, statement: Statement) -> list[Any]:
        self.counts.statements += 1
        if isinstance(statement, Insert):
            statement = replace(statement, rows=[*statement.rows])
            self.counts.written += len(statement.rows)  # type: ignore[arg-type]  # it is a list by now
            self.counts.bytes += sum(map(_size, (each for row in statement.rows for each in row)))
        rows = super()._answer(statement)
        if isinstance(statement, Select):
            self.counts.read[statement.table] += len(rows)
        return rows


def _size(value: Any) -> int:
    return len(value if isinstance(value, bytes) else str(value))


class CountingStore(Store):
    """Keeps sessions in memory, and counts."""

    never_waits = True

    def __init__(self) -> None:
        self._counting = CountingEngine()
        super().__init__(self._counting)

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count the costs inside the block."""
        self._counting.counts = counts = Counts()
        yield counts
        self._counting.counts = Counts()
