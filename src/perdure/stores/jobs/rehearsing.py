"""Rehearsals: jobs that erase are driven as always, but nothing is written.

The writes of a job are kept in memory, and its later reads see them. So it returns the same figures as a real run.
Several jobs can be rehearsed one after the other, each on what the ones before it would leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import CorruptRecord
from perdure.stores.engine import (
    TABLES,
    Clock,
    Count,
    Delete,
    Insert,
    Job,
    Lock,
    Pledge,
    Select,
    Statement,
    T,
    Update,
    Where,
    condition_of,
    order_of,
)
from perdure.stores.tables import Record, Tables, holds


class Rehearsal:
    """The tables as they would be after all jobs that were rehearsed so far."""

    def __init__(self) -> None:
        self._new = Tables()
        """The rows that would be added or changed."""
        self._gone: dict[tuple[str, str, Any], list[Where]] = {}
        """Conditions on stored rows that would be deleted or changed, by table, column, and value of the column."""
        self._asked: dict[str, set[str]] = {}
        """The columns in these conditions, by table."""
        self._filed_by: dict[str, set[str]] = {}

    def of(self, job: Job[T]) -> Job[T]:
        """Return a job that reads what another job reads, and returns its result, without its writes."""
        try:
            statement = next(job)
            while True:
                try:
                    rows = yield from self._answer(statement)
                except CorruptRecord as damage:
                    statement = job.throw(damage)
                else:
                    statement = job.send(rows)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here
        finally:
            job.close()

    def _answer(self, statement: Statement) -> Job[list[Any]]:
        match statement:
            case Lock() | Pledge():
                return []  # nothing is written, so nobody has to be kept out
            case Clock():
                return (yield statement)
            case Select():
                return (yield from self._select(statement))
            case Count(table, where):
                return [(len((yield from self._select(Select(table, TABLES[table].unique[0], where)))),)]
            case Insert():
                return self._new.answer(statement)
            case Update(table, values, where):
                return (yield from self._update(table, values, where))
            case Delete(table, where):
                self._new.answer(statement)
                self._file(table, where)
                return []

    def _select(self, asked: Select) -> Job[list[Any]]:
        table, new = asked.table, self._new.tables[asked.table].find(asked.where)
        if not new and table not in self._asked:
            return (yield asked)
        further = {*(column for column, _ in order_of(asked.order)), *self._asked.get(table, ())} - {*asked.columns}
        columns = (*asked.columns, *sorted(further))
        limit = asked.limit
        while True:
            stored = yield Select(table, columns, asked.where, asked.order, limit, asked.again)
            found = [row for row in map(_named(columns), stored) if not self._is_gone(table, row)]
            if limit is None or len(stored) < limit or len(found) >= (asked.limit or 0):
                break
            limit *= 2  # some of the rows are gone, so there may be more after them
        found += new
        for column, goes_down in reversed(order_of(asked.order)) if new else ():
            found.sort(key=lambda row: row[column], reverse=goes_down)
        return [tuple(row[column] for column in asked.columns) for row in found[: asked.limit]]

    def _update(self, table: str, values: Any, where: Where) -> Job[list[Any]]:
        if table == "meta":  # the count of erasures, none of which is carried out
            return [(1,)]
        columns, key = TABLES[table].columns, TABLES[table].unique[0]
        rows = yield from self._select(Select(table, columns, where))
        known = {tuple(row[name] for name in key) for row in self._new.tables[table].find(where)}
        for row in map(_named(columns), rows):
            if tuple(row[name] for name in key) not in known:
                self._file(table, {name: row[name] for name in key})
                self._new.answer(Insert(table, columns, [tuple(row.values())]))
        return self._new.answer(Update(table, values, where))

    def _file(self, table: str, where: Where) -> None:
        """Note that the stored rows which meet these conditions are gone."""
        column, values = _narrowest(where)
        for value in values:
            self._gone.setdefault((table, column, value), []).append(where)
        self._filed_by.setdefault(table, set()).add(column)
        self._asked.setdefault(table, set()).update(condition_of(key)[0] for key in where)

    def _is_gone(self, table: str, row: Record) -> bool:
        filed = [self._gone.get((table, column, row[column]), ()) for column in self._filed_by.get(table, ())]
        return any(holds(where, row) for several in filed for where in several)


def _narrowest(where: Where) -> tuple[str, Sequence[Any]]:
    """Return the first column with a condition by value, and the values that it may have."""
    for key, value in where.items():
        column, sign = condition_of(key)
        if sign == "=":
            return column, [value]
        if sign == "in":
            return column, [*value]
    raise AssertionError(f"these rows are not told apart by the value of a column: {[*where]}")


def _named(columns: Sequence[str]) -> Any:
    return lambda row: dict(zip(columns, row, strict=True))
