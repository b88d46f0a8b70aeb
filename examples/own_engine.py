"""An engine of your own: the tables in memory, and each commit as a frame with a checksum at the end of one file."""

import asyncio
import fcntl
import os
import struct
import tempfile
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
Key = tuple[str, int]  # a table, and the number of a row
COMPARE: dict[str, Any] = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
COMPARE |= {"in": lambda a, b: a in b, "ends": str.endswith}
BODY = msgspec.msgpack.Decoder(tuple[int, list[tuple[Key, Row | None]]])  # the last number given out, and rows


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
        self._rows: dict[str, dict[int, Row]] = {table: {} for table in port.TABLES}
        self._changed: set[Key] = set()

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
                for key, row in rows:
                    self._put(key, row)
                self._end = file.tell()
        self._changed.clear()

    def _write(self, *, whole: bool) -> None:
        """Append a frame with the rows that have changed, or replace the file by one with all rows there are."""
        keys = {(table, number) for table, rows in self._rows.items() for number in rows} if whole else self._changed
        body = msgspec.msgpack.encode((self._last, [(key, self._rows[key[0]].get(key[1])) for key in keys]))
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
            os.fsync(directory := os.open(self.path.parent, os.O_RDONLY))
            os.close(directory)
        self._changed.clear()

    def _put(self, key: Key, row: Row | None) -> None:
        """Set a row, or delete it if `row` is None."""
        self._rows[key[0]].pop(key[1], None)
        self._rows[key[0]].update({key[1]: row} if row else {})
        self._changed.add(key)

    def _find(self, table: str, where: port.Where) -> list[tuple[Key, Row]]:
        """Return the rows that meet all conditions. Every row is looked at: give yours indexes for `Table.ways`."""
        found = [((table, number), row) for number, row in self._rows[table].items()]
        for term, value in where.items():
            if pair := port.pair_of(term):  # two columns of the row
                found = [each for each in found if each[1][pair[0]] > each[1][pair[1]]]
                continue
            column, by = port.condition_of(term)  # as in SQL, None meets no condition with a value
            found = [each for each in found if each[1][column] is not None or value is None]
            found = [each for each in found if COMPARE[by](each[1][column], value)]
        return found

    def _answer(self, statement: port.Statement) -> list[Any]:
        """Carry out one statement. `Lock` and `Pledge` need nothing: one job runs at a time, and a frame is whole."""
        match statement:
            case port.Select(table, columns, where, order, limit):
                rows = [row for _, row in self._find(table, where)]
                for column, down in reversed(port.order_of(order)):
                    rows.sort(key=itemgetter(column), reverse=down)
                return [tuple(row[column] for column in columns) for row in rows[:limit]]
            case port.Count(table, where):
                return [(len(self._find(table, where)),)]
            case port.Insert(table, columns, values, or_set):
                return [(self._insert(table, dict(zip(columns, row, strict=True)), or_set),) for row in values][-1:]
            case port.Update(table, changes, where):
                return [(sum(self._change(key, row, changes) for key, row in self._find(table, where)),)]
            case port.Delete(table, where):
                for key, _ in self._find(table, where):
                    self._put(key, None)
            case port.Clock():
                return [(ids.now().timestamp(),)]
        return []

    def _change(self, key: Key, row: Row, changes: Any) -> int:
        for term, value in changes.items():
            column, sign = port.condition_of(term)
            value = ids.now().timestamp() + value.seconds if isinstance(value, port.Later) else value
            row = row | {column: row[column] + value if sign == "+" else value}
        self._put(key, row)
        return 1

    def _insert(self, table: str, row: Row, or_set: tuple[str, ...] | None) -> int:
        """Insert a row, or do what `or_set` says to the one that has its key. Return the row's number."""
        numbered, unique = port.TABLES[table].number, port.TABLES[table].unique
        row = dict.fromkeys(port.TABLES[table].columns) | row
        for key, old in (found for way in unique for found in self._find(table, {each: row[each] for each in way})):
            if or_set is None:
                raise perdure.StoreError(f"The table {table!r} has a row with this key already: {row}")
            self._put(key, old | {column: row[column] for column in or_set})
            return key[1]
        self._last += 1
        self._put((table, self._last), row | ({numbered: self._last} if numbered else {}))
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
