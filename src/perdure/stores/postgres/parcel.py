"""A batch of changes as one statement: its rows, and the parts of `write.sql` that they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from perdure.stores.format.rows import seed_of
from perdure.stores.postgres.rows import GATE

_TEXT = Path(__file__).with_name("write.sql").read_text()
PARTS = frozenset(re.findall(r"^-- if (\w+)$", _TEXT, re.MULTILINE))


Seal = Callable[[Sequence[int], Sequence[bytes]], tuple[Sequence[int], Sequence[bytes]]]
"""A function that turns checksums and bodies into those that the table holds."""


class Parcel:
    """The rows of a batch of changes, on their way into one statement."""

    def __init__(self) -> None:
        names = ("ops", "runs", "values", "refs", "files")
        self._tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self._needed: set[str] = set()
        self._pieces: list[bytes] = []
        self._size = 0

    def need(self, part: str) -> None:
        """Add a part to the statement."""
        self._needed.add(part)

    def put(self, table: str, columns: dict[str, Any]) -> None:
        self._tables[table].append(columns)

    def bytes_at(self, body: bytes) -> int:
        """Add bytes. Return their place among all that is sent, counted from 1 as SQL does."""
        self._pieces.append(body)
        self._size += len(body)
        return self._size - len(body) + 1

    def messages(self, log: int, start: int, bodies: Sequence[bytes], seal: Seal | None = None) -> dict[str, Any]:
        """Add messages that follow each other in a log. Return the columns that describe them."""
        if not bodies:
            return {}
        sums: Sequence[int] = [*map(crc32, bodies, count(seed_of(log) + start))]
        if seal is not None:
            sums, bodies = seal(sums, bodies)
        self.need("messages")
        sizes, first = [*map(len, bodies)], self._size + 1
        self._pieces += bodies
        self._size += sum(sizes)
        return {
            "said_in": log,
            "said_from": start,
            "said_sums": [*sums],
            "said_starts": [*accumulate(sizes[:-1], initial=first)],
            "said_sizes": sizes,
        }

    def statement(self, channel: str, *, waits: bool) -> tuple[str, dict[str, Any]]:
        """Return the statement and its values. If it `waits`, it does not pass over sessions that are locked."""
        parts = self._needed if waits else self._needed | {"together"}
        tables = {name: msgspec.json.encode(rows).decode() for name, rows in self._tables.items()}
        values = {**tables, "blob": b"".join(self._pieces), "gate": GATE, "channel": channel}
        return statement(frozenset(parts)), values


@cache
def statement(parts: frozenset[str]) -> str:
    """Return `write.sql` with only these optional parts, and without comments."""
    lines: list[str] = []
    is_kept = True
    for line in _TEXT.splitlines():
        mark, _, name = line.removeprefix("-- ").partition(" ")
        if line.startswith("-- ") and mark in ("if", "end"):
            is_kept = mark == "end" or name in parts
        elif is_kept and not line.lstrip().startswith("--"):
            lines.append(line.strip())
    # A name behind a single colon is a value; behind two of them it is a type.
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", "\n".join(lines))
