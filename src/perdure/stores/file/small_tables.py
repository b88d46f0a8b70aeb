"""Small tables of a directory that belong to no session. Each is one file, which is replaced as a whole.

A job that writes holds the table's lock from its first look until the new file is in place, so that no row is lost. A
job that reads takes no lock: a file is put in place in one step, and is always whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import msgspec

from perdure.errors import CorruptRecord
from perdure.stores.engine import Count, Insert, Row, Select, Statement
from perdure.stores.folder import Folder, NotAFile, temporary
from perdure.stores.format.rows import checksum
from perdure.stores.tables import Tables


class SmallTable:
    """A table in a file, for one job at a time. Each kind says how its rows are written."""

    name: ClassVar[str]
    file: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Folder, lock_timeout: float) -> None:
        self._folder = folder
        self._timeout = lock_timeout
        self._is_writing = False
        self._is_read = False
        self._raw: bytes | None = None
        self._rows = Tables()
        """The rows in the bytes of `_raw`, with the job's changes."""
        self.is_changed = False

    def begin(self, *, is_writing: bool) -> None:
        """Forget the changes of the last job. With `is_writing` the next one may write."""
        if self.is_changed:  # the changes may not have been written, so the rows may differ from the file
            self._raw, self._rows = None, Tables()
        self._is_writing, self._is_read, self.is_changed = is_writing, False, False

    def answer(self, statement: Statement, locks: ExitStack) -> list[Any]:
        """Carry out a statement. A lock that it takes is held until the job is committed."""
        if not self._is_read:
            if self._is_writing:
                locks.enter_context(self._folder.locked([self.file], self._timeout))
            self._read()
        self.is_changed = self.is_changed or not isinstance(statement, Select | Count)
        return self._rows.answer(statement)

    def _read(self) -> None:
        """Read the file. If its bytes have not changed, the rows are kept: most jobs look up a single one."""
        try:
            raw = self._folder.read(self.file)
        except NotAFile as error:
            raise self._damaged(str(error.strerror)) from None
        if raw != self._raw:
            rows = Tables()
            with rows.unnoted():
                rows.answer(Insert(self.name, self.columns, [] if raw is None else self._decoded(raw)))
            self._raw, self._rows = raw, rows
        self._is_read = True

    def write(self) -> None:
        rows = self._rows.answer(Select(self.name, self.columns, order=self.columns[0]))
        if rows:
            self._folder.replace(self.file, self._encoded(rows))
        else:  # a killed writer's leftover goes too, since rows may be deleted to erase them
            self._folder.remove(self.file, temporary(self.file))
            self._folder.sync()

    def _decoded(self, raw: bytes) -> Sequence[Row]:
        raise NotImplementedError

    def _encoded(self, rows: Sequence[Row]) -> bytes:
        raise NotImplementedError

    def _damaged(self, reason: str) -> CorruptRecord:
        return CorruptRecord(None, self.file, reason)


class Rates(SmallTable):
    """The rates that processes share. A damaged file counts as an empty one: places may be given too early once."""

    name, file, columns = "rate", ".rates", ("name", "until")

    def _decoded(self, raw: bytes) -> Sequence[Row]:
        try:
            return list(msgspec.json.decode(raw, type=dict[str, int]).items())
        except msgspec.MsgspecError:
            return []

    def _encoded(self, rows: Sequence[Row]) -> bytes:
        return msgspec.json.encode(dict(rows))


class Tokens(SmallTable):
    """The access tokens. A damaged file is an error for every caller: it must not pass for one without tokens.

    One checksum protects all rows, so that a missing row is noticed too. `crc` is read as None.
    """

    name, file, columns = "token", ".tokens", ("digest", "id", "owner", "crc", "body")

    def _decoded(self, raw: bytes) -> Sequence[Row]:
        try:
            found = msgspec.json.decode(raw, type=_TokenFile)
            if found.crc != _crc_of(found.rows):
                raise self._damaged("its checksum does not match")
            rows = msgspec.json.decode(found.rows, type=list[_TokenRow])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from None
        return [(digest, token_id, owner, None, bytes(body)) for digest, token_id, owner, body in rows]

    def _encoded(self, rows: Sequence[Row]) -> bytes:
        kept = [(digest, token_id, owner, msgspec.Raw(body)) for digest, token_id, owner, _, body in rows]
        raw = msgspec.Raw(msgspec.json.encode(kept))
        return msgspec.json.encode(_TokenFile(format=1, crc=_crc_of(raw), rows=raw)) + b"\n"

    def _damaged(self, reason: str) -> CorruptRecord:
        advice = (
            "No token is valid until that is fixed: restore the file from a backup, or remove it and make new tokens."
        )
        return CorruptRecord(None, self.file, reason, advice)


_TokenRow = tuple[str, str, str | None, msgspec.Raw]


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    crc: str
    rows: msgspec.Raw


def _crc_of(rows: msgspec.Raw) -> str:
    return f"{checksum(bytes(rows)):08x}"
