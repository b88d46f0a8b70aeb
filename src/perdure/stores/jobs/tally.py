"""Counting what is erased."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.stores.engine import Job, Select

_AT_ONCE = 1_000
_NUMBERED = {"head": "version", "batch": "last", "inbox": "seq", "sketch": "start", "timer": "timer"}
"""The tables in which a session has rows with a body, and the columns that number these rows."""


class Tally:
    """The numbers of sessions, versions and messages that were erased, and of the bytes in all erased rows."""

    def __init__(self) -> None:
        self.sessions = 0
        self.versions = 0
        self.messages = 0
        self.bytes = 0

    def add(self, bodies: Iterable[object]) -> None:
        """Count the bytes of rows' bodies."""
        # Damage can have changed the type of one.
        self.bytes += sum(len(body) for body in bodies if isinstance(body, bytes | str))

    def measure(self, log: int | str, start: int, stop: int) -> Job[None]:
        """Count the messages of a stretch that is about to be erased, some at a time."""
        while True:
            where = {"log": log, "pos >=": start, "pos <": stop}
            rows = yield Select("msg", ("pos", "body"), where, order="pos", limit=_AT_ONCE, lenient=True)
            self.messages += len(rows)
            self.add(body for _, body in rows)
            if len(rows) < _AT_ONCE:
                return
            start = rows[-1][0] + 1

    def measure_session(self, sid: int) -> Job[None]:
        """Count a session that is about to be erased, without its messages."""
        self.sessions += 1
        for table, number in _NUMBERED.items():
            last = -1
            while True:
                where = {"sid": sid, f"{number} >": last}
                rows = yield Select(table, (number, "body"), where, order=number, limit=_AT_ONCE)
                self.versions += len(rows) if table == "head" else 0
                self.add(body for _, body in rows)
                if len(rows) < _AT_ONCE:
                    break
                last = rows[-1][0]
