"""An engine of your own: the tables in memory, and each commit as a frame with a checksum at the end of one file."""

from __future__ import annotations

import asyncio
import fcntl
import operator
import os
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import msgspec

import perdure
from perdure.model.ids import new_id
from perdure.stores import engine as port
from perdure.stores.store import Store

Row = dict[str, Any]
Change = tuple[str, int, Row | None]  # a table, the number of a row, and the row, or None if it is not there
FRAME = msgspec.msgpack.Decoder(tuple[int, list[Change]])  # the highest number given out, and changes
COMPARE: dict[str, Callable[[Any, Any], Any]] = {"=": operator.eq, "!=": operator.ne, "in": lambda a, b: a in b}
COMPARE |= {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class FrameEngine(port.Engine):
    """Tables in a file that several processes may open: its lock lets in one job at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget(b"")

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1)  # jobs run here, so that none blocks the event loop
        self.origin = await self.run(identify, "write")
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.shutdown)  # waits for the writes of cancelled callers

    async def run(self, job: Callable[[], port.Job[port.T]], kind: port.Kind = "read", *, long: bool = False) -> port.T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._run, job, kind))

    def _run(self, job: Callable[[], port.Job[port.T]], kind: port.Kind) -> port.T:
        """Drive a job while the file is locked. Undo its changes if it fails, or if they cannot be written."""
        with open(f"{self.path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            self._catch_up()
            try:
                result = port.drive(job(), self._answer)
                if self._undo or kind == "erase":
                    self._commit(whole=kind == "erase" or not self._birth)
                return result
            except BaseException:
                for change in self._undo[::-1]:
                    self._put(*change)
                raise

    def _forget(self, birth: bytes) -> None:
        """Start with empty tables, at the beginning of the file that has this id."""
        self._birth, self._end, self._last = birth, len(birth), 0
        self._undo: list[Change] = []
        self._rows: dict[str, dict[int, Row]] = {name: {} for name in port.TABLES}
        self._index: dict[str, dict[str, dict[Any, set[int]]]] = {
            name: {column: defaultdict(set) for key in table.unique + table.ways for column in key}
            for name, table in port.TABLES.items()
        }

    def _catch_up(self) -> None:
        """Apply the frames that were not read yet: all of them if the file was replaced by an erasure."""
        with open(self.path, "a+b") as file:
            file.seek(0)
            if (birth := file.read(len(new_id()))) != self._birth:
                self._forget(birth)
            file.seek(self._end)
            for size, (self._last, changes) in frames(file.read()):
                self._end += size
                for change in changes:
                    self._put(*change)
        self._undo.clear()

    def _commit(self, *, whole: bool) -> None:
        """Append the changes as a frame, or replace the file by one that holds only the rows there are now."""
        rows = {(table, number): None for table, number, _ in self._undo}
        if whole:
            rows = {(table, number): None for table, rows in self._rows.items() for number in rows}
        body = msgspec.msgpack.encode((self._last, [(table, n, self._rows[table].get(n)) for table, n in rows]))
        head = struct.pack(">II", len(body), crc32(body))
        frame = head + struct.pack(">I", crc32(head)) + body
        new = Path(f"{self.path}.new")
        with open(new, "wb") if whole else open(self.path, "r+b") as file:
            file.truncate(0 if whole else self._end)  # a torn frame goes
            file.seek(0, os.SEEK_END)
            file.write(new_id().encode() + frame if whole else frame)
            file.flush()
            os.fsync(file.fileno())
        if whole:
            new.replace(self.path)  # its id is another, so that all engines read it again
            directory = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        else:
            self._end += len(frame)

    def _put(self, table: str, number: int, row: Row | None) -> None:
        """Set a row, or delete it if `row` is None, and note what was there."""
        old = self._rows[table].pop(number, None)
        self._undo.append((table, number, old))
        for column, numbers in self._index[table].items():
            if old:
                numbers[old[column]].remove(number)
            if row:
                numbers[row[column]].add(number)
        if row:
            self._rows[table][number] = row

    def _find(self, table: str, where: port.Where) -> dict[int, Row]:
        """Return the rows that meet all conditions, looked up by the rarest of the indexed values."""
        rows, index = self._rows[table], self._index[table]
        terms = [(*port.condition_of(key), value) for key, value in where.items()]
        sets = [
            set[int]().union(*(index[column].get(each, ()) for each in (value if by == "in" else [value])))
            for column, by, value in terms
            if column in index and by in ("=", "in")
        ]
        return {n: rows[n] for n in min(sets, key=len, default=rows) if all(holds(rows[n][c], *t) for c, *t in terms)}

    def _answer(self, statement: port.Statement) -> list[Any]:
        """Carry out one statement."""
        match statement:
            case port.Select(table, columns, where, order, limit):
                rows = list(self._find(table, where).values())
                for column, down in reversed(port.order_of(order)):
                    rows.sort(key=lambda row, by=column: (row[by] is not None, row[by]), reverse=down)  # type: ignore
                return [tuple(row[column] for column in columns) for row in rows[:limit]]
            case port.Count(table, where):
                return [(len(self._find(table, where)),)]
            case port.Insert(table, columns, values, or_set):
                numbers = [self._insert(table, dict(zip(columns, row, strict=True)), or_set) for row in values]
                return [(number,) for number in numbers[-1:]]
            case port.Update(table, changes, where):
                found = self._find(table, where)
                for number, row in found.items():
                    self._put(table, number, row | dict(changed(row, *change) for change in changes.items()))
                return [(len(found),)]
            case port.Delete(table, where):
                for number in self._find(table, where):
                    self._put(table, number, None)
            case port.Clock():
                return [(time.time(),)]
        return []  # Lock and Pledge: only one job runs at a time, and a frame is whole or torn

    def _insert(self, table: str, row: Row, or_set: tuple[str, ...] | None) -> int:
        """Insert a row, or do what `or_set` says to the one that has its key. Return the row's number."""
        shape = port.TABLES[table]
        row = dict.fromkeys(shape.columns) | row
        for key in shape.unique:
            for number, old in self._find(table, {column: row[column] for column in key}).items():
                if or_set is None:
                    raise ValueError(f"The table {table} already has a row with this {' and '.join(key)}.")
                self._put(table, number, old | {column: row[column] for column in or_set})
                return number
        self._last += 1
        self._put(table, self._last, row | ({shape.number: self._last} if shape.number else {}))
        return self._last


def identify() -> port.Job[str]:
    """Return the store's id. Make it the first time."""
    yield port.Insert("meta", ("key", "value"), [("uid", new_id()), ("erasures", 0)], or_set=())
    return str((yield port.Select("meta", ("value",), {"key": "uid"}))[0][0])


def holds(found: Any, by: str, value: Any) -> bool:
    """Tell whether a condition holds. None is neither less nor greater than a value."""
    return (found is not None or by in ("=", "!=", "in")) and bool(COMPARE[by](found, value))


def changed(row: Row, key: str, value: Any) -> tuple[str, Any]:
    """Return a column of an Update and its new value."""
    column, sign = port.condition_of(key)
    value = time.time() + value.seconds if isinstance(value, port.Later) else value
    return column, row[column] + value if sign == "+" else value


def frames(data: bytes) -> Iterator[tuple[int, tuple[int, list[Change]]]]:
    """Yield each frame's size and content. Leave out a torn last one; raise CorruptRecord if others follow it."""
    at = 0
    while at + 12 <= len(data):
        length, crc, check = struct.unpack_from(">III", data, at)
        body = data[at + 12 : at + 12 + length]
        sound = crc32(data[at : at + 8]) == check
        if not sound or crc32(body) != crc:
            if any(data[at + 12 + length :] if sound else data[at:]):
                raise perdure.CorruptRecord(None, f"the frame at byte {at}", "its checksum does not match")
            return
        yield 12 + length, FRAME.decode(body)
        at += 12 + length


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions"
        async with perdure.connect(Store(FrameEngine(path)), model="offline") as sessions:
            chat = await sessions.open("ada", agent=perdure.AgentDefinition("clerk"))
            print((await chat.send("My name is Ada.")).text)
        async with perdure.connect(Store(FrameEngine(path)), model="offline") as sessions:
            chat = await sessions.open("ada")
            print((await chat.send("What is my name?")).text)


if __name__ == "__main__":
    asyncio.run(main())
