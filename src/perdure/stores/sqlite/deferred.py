"""Rows that wait for the end of the transaction in which many sessions are saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

# Beyond this, another call costs nothing, and freeing a long list of rows makes every thread wait.
_MOST = 4_096


class DeferredRows:
    """New rows of the jobs that share a transaction, kept until its end and then written with one call a table."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._connection: apsw.Connection | None = None

    @contextmanager
    def gathering(self, connection: apsw.Connection) -> Iterator[DeferredRows]:
        """Keep rows back within this block. Rows that are not written by its end are dropped."""
        self._connection = connection
        try:
            yield self
        finally:
            self._connection = None
            self._clear()

    def take(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> bool:
        """Keep rows for later. Return False if they have to be written now."""
        if self._connection is None or self.count >= _MOST:
            return False
        kept = self._rows.setdefault(sql, [])
        before = len(kept)
        kept.extend(rows)
        self.count += len(kept) - before
        return True

    def write(self) -> None:
        """Write what was kept back: at the end, and before any of its tables is read."""
        if self._connection is not None and self.count:
            for sql, rows in self._rows.items():
                self._connection.executemany(sql, rows)
            self._clear()

    def _clear(self) -> None:
        self.count = 0
        self._rows = {}
