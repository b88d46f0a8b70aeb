"""The tables in this process's memory, for engines that keep them there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from perdure.errors import StoreError
from perdure.stores.engine import (
    TABLES,
    Count,
    Delete,
    Insert,
    Row,
    Select,
    Statement,
    Table,
    Update,
    Where,
    condition_of,
    order_of,
)

Record = dict[str, Any]
"""A row by the names of its columns."""

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, among: found in among,
}


class Touched(NamedTuple):
    """A row that was added, changed or removed, and what it was before: None if it was not there."""

    table: str
    row: Record
    before: Record | None


class Tables:
    """All tables. What was changed since `begin` is known, and can be taken back."""

    def __init__(self) -> None:
        self.tables = {name: Rows(name, table, self._note) for name, table in TABLES.items()}
        self.touched: list[Touched] = []
        self._is_noting = True

    def _note(self, touched: Touched) -> None:
        if self._is_noting:
            self.touched.append(touched)

    def begin(self) -> None:
        self.touched.clear()

    def take_back(self) -> None:
        """Undo every change since `begin`, the last one first."""
        for each in reversed(self.touched):
            self.tables[each.table].restore(each.row, each.before)
        self.touched.clear()

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Change rows for good, as an engine does that reads them from elsewhere."""
        before, self._is_noting = self._is_noting, False
        try:
            yield
        finally:
            self._is_noting = before

    def answer(self, statement: Statement) -> list[Any]:
        """Carry out a statement on rows; others are the engine's own."""
        match statement:
            case Select(table, columns, where, order, limit, _):
                return list(map(_picker(columns), self._selected(table, where, order, limit)))
            case Count(table, where):
                return [(sum(1 for _ in self.tables[table].find(where)),)]
            case Insert(table, columns, rows, or_set):
                return self._insert(self.tables[table], columns, rows, or_set)
            case Update(table, values, where):
                return self._update(self.tables[table], values, where)
            case Delete(table, where):
                for row in list(self.tables[table].find(where)):
                    self.tables[table].remove(row)
                return []
        raise AssertionError(f"{type(statement).__name__} is for the engine to answer")

    def _selected(self, table: str, where: Where, order: str, limit: int | None) -> list[Record]:
        found = list(self.tables[table].find(where))
        for column, goes_down in reversed(order_of(order)):
            found.sort(key=operator.itemgetter(column), reverse=goes_down)
        return found[:limit]

    def _insert(
        self, table: Rows, columns: tuple[str, ...], rows: Iterable[Row], or_set: tuple[str, ...] | None
    ) -> list[Any]:
        number: Any = None
        for row in rows:
            number = table.put(dict(zip(columns, row, strict=True)), or_set)
        return [(number,)]

    def _update(self, table: Rows, values: Mapping[str, Any], where: Where) -> list[Any]:
        found = list(table.find(where))
        for row in found:
            table.change(row, values)
        return [(len(found),)]


class Rows:
    """One table. `note` is told of each change."""

    def __init__(self, name: str, table: Table, note: Callable[[Touched], None]) -> None:
        self._name = name
        self._table = table
        self._note = note
        self._numbers = count(1)
        self.number_for: Callable[[Record], Any] = lambda row: next(self._numbers)
        """Gives a new row its number, if the table is numbered."""
        self._all: dict[int, Record] = {}
        ways = {way[:length] for way in (*table.unique, *table.ways) for length in range(1, len(way) + 1)}
        self._ways: dict[tuple[str, ...], dict[Row, dict[int, Record]]] = {way: {} for way in ways}
        self._unique = set(table.unique)

    def find(self, where: Where) -> Iterator[Record]:
        """Yield the rows that meet all conditions, by the narrowest way there is."""
        conditions = [(*condition_of(key), value) for key, value in where.items()]
        exact = {column: value for column, sign, value in conditions if sign == "="}
        way = max((each for each in self._ways if exact.keys() >= set(each)), key=len, default=())
        near: Any = self._ways[way].get(tuple(exact[name] for name in way), {}) if way else self._all
        near, narrowed = self._between(way, near, exact, where)
        known = {*way, narrowed}
        left = [(column, _COMPARE[sign], value) for column, sign, value in conditions if column not in known]
        for row in near:
            if all(_holds(compare, row[column], value) for column, compare, value in left):
                yield row

    def _between(
        self, way: Row, near: dict[int, Record], exact: Mapping[str, Any], where: Where
    ) -> tuple[Iterable[Record], str]:
        """Narrow rows down to a stretch of positions, or to a few values, where the next column of a key says so.

        Return that column too; "" if it is not narrowed down.
        """
        for full, bucket in self._ways.items():
            if len(full) != len(way) + 1 or full[:-1] != way or full not in self._unique:
                continue
            wanted = _wanted(full[-1], where, len(near))
            if wanted is not None:
                fixed = tuple(exact[name] for name in way)
                found = [row for each in wanted if (at := bucket.get((*fixed, each))) for row in at.values()]
                return found, full[-1]
        return list(near.values()), ""

    def put(self, row: Record, or_set: tuple[str, ...] | None) -> Any:
        """Add a row and return its number; see `Insert.or_set` for one that is there."""
        there = next((found for way in self._table.unique for found in self._same(row, way)), None)
        if there is None:
            return self.add(row)
        if or_set is None:
            raise StoreError(f"There is such a row already: {self._table.unique}.")
        if or_set:
            self.change(there, {name: row[name] for name in or_set})
        return there.get(self._table.number)

    def _same(self, row: Record, way: tuple[str, ...]) -> list[Record]:
        if any(name not in row for name in way):
            return []
        return list(self._ways[way].get(tuple(row[name] for name in way), {}).values())

    def add(self, row: Record) -> Any:
        """Add a row of which it is known that there is none like it, and return its number."""
        numbered = self._table.number
        if numbered and row.get(numbered) is None:
            row[numbered] = self.number_for(row)
        whole = {name: row.get(name) for name in self._table.columns}
        self._enter(whole)
        self._note(Touched(self._name, whole, None))
        return whole.get(numbered)

    def remove(self, row: Record) -> None:
        self._leave(row)
        self._note(Touched(self._name, row, dict(row)))

    def change(self, row: Record, values: Mapping[str, Any]) -> None:
        """Give a row other values; `"column +"` adds to the one there."""
        before = dict(row)
        self._leave(row)
        for key, value in values.items():
            column, sign = condition_of(key)
            row[column] = row[column] + value if sign == "+" else value
        self._enter(row)
        self._note(Touched(self._name, row, before))

    def holds(self, row: Record) -> bool:
        """Tell whether a row is still there."""
        return id(row) in self._all

    def restore(self, row: Record, before: Record | None) -> None:
        """Make a row what it was before; None if it was not there."""
        if self.holds(row):
            self._leave(row)
        if before is not None:
            row |= before
            self._enter(row)

    def _enter(self, row: Record) -> None:
        self._all[id(row)] = row
        for way, bucket in self._ways.items():
            bucket.setdefault(tuple(row[name] for name in way), {})[id(row)] = row

    def _leave(self, row: Record) -> None:
        del self._all[id(row)]
        for way, bucket in self._ways.items():
            key = tuple(row[name] for name in way)
            del bucket[key][id(row)]
            if not bucket[key]:
                del bucket[key]


def _holds(compare: Callable[[Any, Any], bool], found: Any, value: Any) -> bool:
    """Tell whether a condition holds. As in SQL, nothing but = and != can be said of what is not there."""
    if found is None and value is not None and compare not in (operator.eq, operator.ne):
        return False
    return compare(found, value)


def _wanted(column: str, where: Where, most: int) -> Iterable[Any] | None:
    """Return the values of a column that conditions ask for, if they are few and this is all that is asked of it."""
    asked = {sign: value for key, value in where.items() for name, sign in [condition_of(key)] if name == column}
    if asked.keys() == {"in"}:
        return list(dict.fromkeys(asked["in"]))
    if asked.keys() == {">=", "<"}:
        low, high = asked[">="], asked["<"]
        if type(low) is int and type(high) is int and high - low <= most:
            return range(low, high)
    return None


def _picker(columns: tuple[str, ...]) -> Callable[[Record], Row]:
    if len(columns) == 1:
        (only,) = columns
        return lambda row: (row[only],)
    return operator.itemgetter(*columns)
