"""The versions of a session as a list: headers, definitions and metadata, page by page, without messages."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import CorruptRecord
from perdure.protocols import SessionHead
from perdure.stores.engine import Job, Row, Select
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import LAST
from perdure.stores.jobs.claiming import number, sid_of
from perdure.stores.jobs.heading import Definitions
from perdure.stores.jobs.values import unpacked_value

_VALUES_AT_ONCE = 256


def versions(
    session_id: str, before: int | None, limit: int, definitions: Definitions, is_strict: bool = True
) -> Job[list[SessionHead]]:
    """Return the newest versions before a number, newest first.

    If it is strict, damage is raised. Others may have erased something between two statements, so the engine looks
    again. Otherwise a damaged version is left out, and an older one takes its place.
    """
    sid = yield from sid_of(session_id)
    page = _Page(session_id, definitions, is_strict)
    before = LAST if before is None else before
    while len(page.found) < limit:
        where = {"sid": sid, "version <": before}
        left = limit - len(page.found)
        rows = yield Select("head", ("version", "crc", "body"), where, order="-version", limit=left)
        yield from page.add(sid, rows)
        if len(rows) < left:
            break
        before = number(rows[-1][0], session_id, "head")
    return page.found


class _Page:
    """A page of versions, with the definitions that most of them share."""

    def __init__(self, session_id: str, definitions: Definitions, is_strict: bool) -> None:
        self.found: list[SessionHead] = []
        self._session_id = session_id
        self._is_strict = is_strict
        self._values: dict[str, bytes | CorruptRecord] = {}
        self._definitions = definitions

    def add(self, sid: int, rows: Sequence[Row]) -> Job[None]:
        heads: list[StoredHead] = []
        for version, crc, body in rows:
            try:
                raw = unpacked_head(body, crc, self._session_id, sid, version)
                heads.append(StoredHead(raw, self._session_id, version))
            except CorruptRecord:
                if self._is_strict:
                    raise
        yield from self._read_values({key for head in heads for key in head.named_beside_view()})
        for head in heads:
            try:
                self.found.append(self._read(head))
            except CorruptRecord:
                if self._is_strict:
                    raise

    def _read_values(self, keys: set[str]) -> Job[None]:
        """Read values, many at a time, since each version may have metadata of its own."""
        missing = sorted(key for key in keys if key not in self._values and key not in self._definitions)
        for first in range(0, len(missing), _VALUES_AT_ONCE):
            some = missing[first : first + _VALUES_AT_ONCE]
            there = dict((yield Select("value", ("hash", "body"), {"hash in": some})))
            for key in some:
                try:
                    self._values[key] = unpacked_value(self._session_id, key, there.get(key))
                except CorruptRecord as damage:
                    self._values[key] = damage

    def _read(self, head: StoredHead) -> SessionHead:
        needed = [key for key in head.named_beside_view() if key not in self._definitions]
        return head.without_view({key: self._value(key) for key in needed}, self._definitions)

    def _value(self, key: str) -> bytes:
        value = self._values[key]
        if isinstance(value, CorruptRecord):
            raise value
        return value
