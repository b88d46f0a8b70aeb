"""An engine of your own: the tables in memory, and each commit as a frame with a checksum at the end of one file."""

import asyncio
import fcntl
import os
import struct
import tempfile
from collections import defaultdict
from collections.abc import Callable
from operator import eq, ge, gt, itemgetter, le, lt, ne
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import msgspec

import perdure
from perdure.model import ids
from perdure.stores import engine as port
from perdure.stores.store import Store

Row = dict[str, Any]
COMPARE: dict[str, Any] = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge, "in": lambda a, b: a in b}
INDEXED = {name: {column for key in (*t.unique, *t.ways) for column in key} for name, t in port.TABLES.items()}
BODY = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, int, Row | None]]])  # the last number given out, and rows


class FrameEngine(port.Engine):
    """Tables in a file that several processes may open: a lock lets in one job at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    async def __aenter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.origin = await self.run(identify, "write")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass  # each job opens the files, and closes them

    async def run(self, job: Callable[[], port.Job[port.T]], kind: port.Kind = "read", *, long: bool = False) -> port.T:
        return await asyncio.shield(asyncio.to_thread(self._run, job, kind))  # a cancelled caller cancels no write

    async def commit(self, change: port.Change) -> Any:
        return await asyncio.shield(super().commit(change))  # and the change is finished

    def _run(self, job: Callable[[], port.Job[port.T]], kind: port.Kind) -> port.T:
        """Drive a job while the file is locked, and write its changes. If it fails, drop them."""
        with open(f"{self.path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            self._catch_up()
            try:
                result = port.drive(job(), self._answer)
                if self._changed or kind == "erase":
                    self._write(whole=kind == "erase" or not self._birth)
                return result
            finally:
                if self._changed:  # and not written, so the tables are read again
                    self._forget()

    def _forget(self, birth: bytes = b"") -> None:
        """Start with empty tables, before the first frame of the file that begins with `birth`, 16 random bytes."""
        self._birth, self._end, self._last = birth, len(birth), 0
        self._rows: dict[str, dict[int, Row]] = {name: {} for name in port.TABLES}
        self._index: dict[tuple[str, str, Any], set[int]] = defaultdict(set)
        self._changed: set[tuple[str, int]] = set()

    def _catch_up(self) -> None:
        """Read the frames that are new: all of them if an erasure has replaced the file. Leave out a torn last one."""
        with open(self.path, "a+b") as file:
            file.seek(0)
            if (birth := file.read(16)) != self._birth:
                self._forget(birth)
            file.seek(self._end)
            while len(head := file.read(12)) == 12:
                size, again, crc = struct.unpack(">III", head)
                body = file.read(size if size == again else 0)
                if not body or crc32(body) != crc:
                    if any(file.read()):  # more than the rest of one frame: this one was not torn
                        raise perdure.CorruptRecord(None, f"at byte {self._end}", "its checksum does not match")
                    break
                self._last, rows = BODY.decode(body)
                for row in rows:
                    self._put(*row)
                self._end = file.tell()
        self._changed.clear()

    def _write(self, *, whole: bool) -> None:
        """Append a frame with the rows that have changed, or replace the file by one with all rows there are."""
        numbers = {(name, n) for name, rows in self._rows.items() for n in rows} if whole else self._changed
        body = msgspec.msgpack.encode((self._last, [(name, n, self._rows[name].get(n)) for name, n in numbers]))
        path = Path(f"{self.path}.new") if whole else self.path
        with open(path, "ab") as file:
            file.truncate(0 if whole else self._end)  # a torn frame goes
            file.write(os.urandom(16) if whole else b"")
            file.write(struct.pack(">III", len(body), len(body), crc32(body)) + body)
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        if whole:
            path.replace(self.path)
            directory = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        self._changed.clear()

    def _put(self, table: str, number: int, row: Row | None) -> None:
        """Set a row, or delete it if `row` is None."""
        old = self._rows[table].pop(number, None)
        for column in INDEXED[table]:
            if old:
                self._index[table, column, old[column]].remove(number)
            if row:
                self._index[table, column, row[column]].add(number)
        if row:
            self._rows[table][number] = row
        self._changed.add((table, number))

    def _find(self, table: str, where: port.Where) -> list[tuple[int, Row]]:
        """Return the rows that meet all conditions. Look them up by the rarest of the indexed values."""
        terms = [(*port.condition_of(key), value) for key, value in where.items()]
        numbers: Any = self._rows[table]
        for column, by, value in terms:
            if column in INDEXED[table] and by in ("=", "in"):
                keys = [(table, column, each) for each in (value if by == "in" else [value])]
                numbers = min(numbers, set().union(*(self._index.get(key, ()) for key in keys)), key=len)
        rows = [(number, self._rows[table][number]) for number in numbers]
        for c, by, value in terms:  # as in SQL, None meets no condition with a value
            rows = [(n, row) for n, row in rows if (row[c] is not None or value is None) and COMPARE[by](row[c], value)]
        return rows

    def _answer(self, statement: port.Statement) -> list[Any]:
        """Carry out one statement."""
        match statement:
            case port.Select(table, columns, where, order, limit):
                rows = [row for _, row in self._find(table, where)]
                for column, down in reversed(port.order_of(order)):
                    rows.sort(key=itemgetter(column), reverse=down)
                return [tuple(row[column] for column in columns) for row in rows[:limit]]
            case port.Count(table, where):
                return [(len(self._find(table, where)),)]
            case port.Insert(table, columns, values, or_set):
                numbers = [self._insert(table, dict(zip(columns, row, strict=True)), or_set) for row in values]
                return [(number,) for number in numbers[-1:]]
            case port.Update(table, changes, where):
                found, now = self._find(table, where), ids.now().timestamp()
                new = [now + value.seconds if isinstance(value, port.Later) else value for value in changes.values()]
                terms = [(*port.condition_of(key), value) for key, value in zip(changes, new, strict=True)]
                for number, row in found:
                    self._put(table, number, row | {c: row[c] + v if sign == "+" else v for c, sign, v in terms})
                return [(len(found),)]
            case port.Delete(table, where):
                for number, _ in self._find(table, where):
                    self._put(table, number, None)
            case port.Clock():
                return [(ids.now().timestamp(),)]
        return []  # Lock and Pledge: one job runs at a time, and a frame is whole or torn

    def _insert(self, table: str, row: Row, or_set: tuple[str, ...] | None) -> int:
        """Insert a row, or do what `or_set` says to the one that has its key. Return the row's number."""
        columns, unique, _, numbered = port.TABLES[table]
        row = dict.fromkeys(columns) | row
        for number, old in (found for key in unique for found in self._find(table, {c: row[c] for c in key})):
            if or_set is None:
                raise perdure.StoreError(f"The table {table!r} has a row with this key already: {row}")
            self._put(table, number, old | {column: row[column] for column in or_set})
            return number
        self._last += 1
        self._put(table, self._last, row | ({numbered: self._last} if numbered else {}))
        return self._last


def identify() -> port.Job[str]:
    """Return the store's id. Make it the first time."""
    yield port.Insert("meta", ("key", "value"), [("uid", ids.new_id()), ("erasures", 0)], or_set=())
    return str((yield port.Select("meta", ("value",), {"key": "uid"}))[0][0])


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for text in ("My name is Ada.", "What is my name?"):  # the second in a store that was opened again
            async with perdure.connect(Store(FrameEngine(Path(directory) / "sessions")), model="offline") as sessions:
                chat = await sessions.open("ada", agent=perdure.AgentDefinition("clerk"))
                print((await chat.send(text)).text)


if __name__ == "__main__":
    asyncio.run(main())
