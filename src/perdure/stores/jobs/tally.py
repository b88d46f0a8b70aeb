"""Counting what is erased."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.stores.engine import Job, Select

_AT_ONCE = 1_000


class Tally:
    """How many messages were erased, and how many bytes all that was erased held."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    def add(self, bodies: Iterable[object]) -> None:
        """Count the bodies of rows; damage can have changed the type of one."""
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
