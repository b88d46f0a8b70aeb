"""Tables in this process's memory, for engines that keep them there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
    pair_of,
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
    "ends": str.endswith,
}


class Touched(NamedTuple):
    """A row that was added, changed or removed, with its values before that; None if it was not there."""

    table: str
    row: Record
    before: Record | None


class Tables:
    """All tables. The changes since `begin` are noted, and can be taken back."""

    def __init__(self) -> None:
        self.tables = {name: Rows(name, table, self._note) for name, table in TABLES.items()}
        self.touched: list[Touched] = []
        self._is_noting = True
        # By type, since a match over all of them takes longer than most statements.
        self._answers: Mapping[type, Callable[[Any], list[Any]]] = {
            Select: self._select,
            Count: self._count,
            Insert: self._insert,
            Update: self._update,
            Delete: self._delete,
        }

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
        """Change rows without notes, for an engine that reads them from elsewhere."""
        before, self._is_noting = self._is_noting, False
        try:
            yield
        finally:
            self._is_noting = before

    def answer(self, statement: Statement) -> list[Any]:
        """Carry out a statement on rows. An engine carries out all other statements itself."""
        return self._answers[type(statement)](statement)

    def _select(self, asked: Select) -> list[Any]:
        found = self.tables[asked.table].find(asked.where)
        if asked.order:
            for column, goes_down in reversed(order_of(asked.order)):
                found.sort(key=operator.itemgetter(column), reverse=goes_down)
        return list(map(_picker(asked.columns), found if asked.limit is None else found[: asked.limit]))

    def _count(self, asked: Count) -> list[Any]:
        return [(len(self.tables[asked.table].find(asked.where)),)]

    def _insert(self, new: Insert) -> list[Any]:
        table, columns, number = self.tables[new.table], new.columns, None
        for row in new.rows:
            number = table.put(dict(zip(columns, row, strict=True)), new.or_set)
        return [(number,)]

    def _update(self, changed: Update) -> list[Any]:
        table = self.tables[changed.table]
        found = table.find(changed.where)
        for row in found:
            table.change(row, changed.values)
        return [(len(found),)]

    def _delete(self, gone: Delete) -> list[Any]:
        table = self.tables[gone.table]
        for row in table.find(gone.where):
            table.remove(row)
        return []


class Rows:
    """One table. It calls `note` for each change."""

    def __init__(self, name: str, table: Table, note: Callable[[Touched], None]) -> None:
        self._name = name
        self._table = table
        self._note = note
        self._numbers = count(1)
        self.number_for: Callable[[Record], Any] = lambda row: next(self._numbers)
        """The function that gives a new row its number, if the table is numbered."""
        # By `id(row)`, here and in every index: rows are dicts, and a table without a key may have equal ones.
        self._all: dict[int, Record] = {}
        ways = {way[:length] for way in (*table.unique, *table.ways) for length in range(1, len(way) + 1)}
        self._ways: dict[tuple[str, ...], dict[Row, dict[int, Record]]] = {way: {} for way in ways}
        self._key_of = {way: _picker(way) for way in ways}
        self._indexes = [(bucket, self._key_of[way]) for way, bucket in self._ways.items()]
        self._unique = set(table.unique)
        self._uneven: dict[tuple[str, str], dict[int, Record]] = {pair: {} for pair in table.pairs}
        """The rows in which the first column of a pair is greater than the second."""
        # The last of each says whether it is the index by number: a new row without a number repeats none.
        self._likes = [(self._ways[way], self._key_of[way], way == (table.number,)) for way in table.unique]
        self._blank: Record = dict.fromkeys(table.columns)
        self._ways_by = {name: [way for way in self._ways if name in way] for name in table.columns}
        self._unindexed = {name for name, ways in self._ways_by.items() if not ways}
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def find(self, where: Where) -> list[Record]:
        """Return the rows that meet all conditions, by the narrowest index. The caller may keep the list."""
        shape = tuple(where)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = _Plan.of(shape, self._ways, self._unique)
        fixed = tuple([where[key] for key in plan.keys])
        if plan.pair is not None:
            near: Mapping[int, Record] = self._uneven[plan.pair]
        else:
            near = self._ways[plan.way].get(fixed, _NONE) if plan.way else self._all
        left = plan.left
        wanted = plan.wanted(where, len(near)) if plan.narrow else None
        if wanted is None:
            rows = list(near.values())
        else:
            bucket = self._ways[plan.narrow]
            rows = [row for each in wanted for row in bucket.get((*fixed, each), _NONE).values()]
            left = plan.left_if_narrow
        if not left:
            return rows
        asked = [(column, compare, where[key]) for key, column, compare in left]
        return [row for row in rows if all(_holds(compare, row[column], value) for column, compare, value in asked)]

    def only(self, column: str, value: Any) -> Record | None:
        """Return the row with a value in a unique column; None if there is none."""
        found = self._ways[column,].get((value,))
        return next(iter(found.values())) if found else None

    def put(self, row: Record, or_set: tuple[str, ...] | None) -> Any:
        """Add a row and return its number. `Insert.or_set` says what happens if its key is there already."""
        there = self._like(row)
        if there is None:
            return self.add(row)
        if or_set is None:
            raise StoreError(f"There is such a row already: {self._table.unique}.")
        if or_set:
            self.change(there, {name: row[name] for name in or_set})
        return there.get(self._table.number)

    def _like(self, row: Record) -> Record | None:
        """Return the row whose key a new row would repeat; None if there is none."""
        for bucket, key_of, is_number in self._likes:
            if is_number and self._table.number not in row:
                continue
            found = bucket.get(key_of(row))
            if found:
                return next(iter(found.values()))
        return None

    def add(self, row: Record) -> Any:
        """Add a row whose key is known to be new, and return its number."""
        numbered = self._table.number
        if numbered and row.get(numbered) is None:
            row[numbered] = self.number_for(row)
        whole = row if len(row) == len(self._blank) else {**self._blank, **row}
        self._enter(whole)
        self._note(Touched(self._name, whole, None))
        return whole.get(numbered)

    def remove(self, row: Record) -> None:
        self._leave(row)
        self._note(Touched(self._name, row, dict(row)))

    def change(self, row: Record, values: Mapping[str, Any]) -> None:
        """Change values in a row. `"column +"` adds to the present one."""
        before, moved = dict(row), set[tuple[str, ...]]()
        for key, value in values.items():
            if key in self._unindexed:
                row[key] = value
                continue
            column, sign = condition_of(key)
            row[column] = row[column] + value if sign == "+" else value
            if row[column] != before[column]:
                moved.update(self._ways_by.get(column, ()))
        for way in moved:
            self._leave_way(way, before, row)
            self._ways[way].setdefault(self._key_of[way](row), {})[id(row)] = row
        if self._uneven:
            self._compare(row)
        self._note(Touched(self._name, row, before))

    def _compare(self, row: Record) -> None:
        """Note the pairs of columns in which a row is uneven."""
        for (first, second), uneven in self._uneven.items():
            if (row[first] or 0) > (row[second] or 0):  # a row that was read from a header alone has neither
                uneven[id(row)] = row
            else:
                uneven.pop(id(row), None)

    def holds(self, row: Record) -> bool:
        """Tell whether a row is still there."""
        return id(row) in self._all

    def restore(self, row: Record, before: Record | None) -> None:
        """Make a row what it was before. None means that it was not there."""
        if self.holds(row):
            self._leave(row)
        if before is not None:
            row |= before
            self._enter(row)

    def _enter(self, row: Record) -> None:
        identity = id(row)
        self._all[identity] = row
        for bucket, key_of in self._indexes:
            key = key_of(row)
            there = bucket.get(key)
            if there is None:
                bucket[key] = {identity: row}
            else:
                there[identity] = row
        if self._uneven:
            self._compare(row)

    def _leave(self, row: Record) -> None:
        del self._all[id(row)]
        for way in self._ways:
            self._leave_way(way, row, row)
        for uneven in self._uneven.values():
            uneven.pop(id(row), None)

    def _leave_way(self, way: tuple[str, ...], before: Record, row: Record) -> None:
        """Take a row out of an index, which has it under the values that it had before."""
        bucket, key = self._ways[way], self._key_of[way](before)
        del bucket[key][id(row)]
        if not bucket[key]:
            del bucket[key]


_NONE: Mapping[int, Record] = {}


class _Plan(NamedTuple):
    """A plan to find rows for conditions of one shape."""

    way: tuple[str, ...]
    """The longest index all of whose columns have a condition with `=`."""
    keys: tuple[str, ...]
    """The keys of those conditions."""
    left: Sequence[tuple[str, str, Callable[[Any, Any], bool]]]
    """The other conditions: their keys, columns, and functions that compare."""
    narrow: tuple[str, ...] = ()
    """An index with one more column, for conditions that give it a few values or a range of them."""
    left_if_narrow: Sequence[tuple[str, str, Callable[[Any, Any], bool]]] = ()
    pair: tuple[str, str] | None = None
    """Columns of which the first has to be greater. These rows are few, so no index is used."""

    @classmethod
    def of(cls, shape: tuple[str, ...], ways: Iterable[tuple[str, ...]], unique: Container[tuple[str, ...]]) -> _Plan:
        pairs = [pair for key in shape if (pair := pair_of(key)) is not None]
        conditions = [(key, *condition_of(key)) for key in shape if pair_of(key) is None]
        if pairs:
            (pair,) = pairs  # no statement has two
            return cls((), (), [(key, column, _COMPARE[sign]) for key, column, sign in conditions], pair=pair)
        exact = {column: key for key, column, sign in conditions if sign == "="}
        way = max((each for each in ways if exact.keys() >= set(each)), key=len, default=())
        keys = tuple(exact[column] for column in way)
        left = [(key, column, _COMPARE[sign]) for key, column, sign in conditions if sign != "=" or column not in way]
        for full in ways:
            if (
                full[:-1] == way
                and full in unique
                and {key for key, column, _ in left if column == full[-1]}
                in (
                    {f"{full[-1]} in"},
                    {f"{full[-1]} >=", f"{full[-1]} <"},
                )
            ):
                return cls(way, keys, left, full, [each for each in left if each[1] != full[-1]])
        return cls(way, keys, left)

    def wanted(self, where: Where, most: int) -> Iterable[Any] | None:
        """Return the values that the column after `way` may have; None if they are more than `most`."""
        column = self.narrow[-1]
        if f"{column} in" in where:
            return dict.fromkeys(where[f"{column} in"])
        low, high = where[f"{column} >="], where[f"{column} <"]
        return range(low, high) if type(low) is int and type(high) is int and high - low <= most else None


def holds(where: Where, row: Record) -> bool:
    """Tell whether a row meets conditions, none of which compares two columns."""
    asked = ((*condition_of(key), value) for key, value in where.items())
    return all(_holds(_COMPARE[sign], row[column], value) for column, sign, value in asked)


def _holds(compare: Callable[[Any, Any], bool], found: Any, value: Any) -> bool:
    """Tell whether a condition is true. As in SQL, a value that is None meets no condition except = and !=."""
    if found is None and value is not None and compare not in (operator.eq, operator.ne):
        return False
    return compare(found, value)


def _picker(columns: tuple[str, ...]) -> Callable[[Record], Row]:
    if len(columns) == 1:  # `itemgetter` with one name returns a value, not a tuple
        (only,) = columns
        return lambda row: (row[only],)
    return operator.itemgetter(*columns)
