"""Rates that processes share: the table `rate` of a directory, in the file `.rates`.

Whoever changes one holds the lock of that name until the new file is in place. A damaged file counts as none: places
may be given too early once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec

from perdure.stores.engine import Insert, Select, Statement
from perdure.stores.folder import Folder
from perdure.stores.tables import Tables

_FILE = ".rates"


class Rates:
    """The rates of a directory, for one job at a time."""

    def __init__(self, folder: Folder, lock_timeout: float) -> None:
        self._folder = folder
        self._timeout = lock_timeout
        self._table = Tables()
        self._is_read = False
        self.is_changed = False

    def begin(self) -> None:
        self._is_read = self.is_changed = False

    def answer(self, statement: Statement, locks: ExitStack) -> list[Any]:
        """Carry out a statement. The lock is held until the job is committed."""
        if not self._is_read:
            locks.enter_context(self._folder.locked([_FILE], self._timeout))
            self._read()
        self.is_changed = self.is_changed or not isinstance(statement, Select)
        return self._table.answer(statement)

    def _read(self) -> None:
        self._table = Tables()
        self._is_read = True
        try:
            found = msgspec.json.decode(self._folder.read(_FILE) or b"{}", type=dict[str, int])
        except msgspec.MsgspecError:
            found = {}
        self._table.answer(Insert("rate", ("name", "until"), list(found.items())))

    def write(self) -> None:
        rows = self._table.answer(Select("rate", ("name", "until"), order="name"))
        self._folder.replace(_FILE, msgspec.json.encode(dict(rows)))
