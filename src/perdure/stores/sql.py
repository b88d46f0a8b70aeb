"""Statements as SQL: their text, made once for each shape, and the values to bind. Databases differ in the dialect.

A shape is a statement without its values. A save runs about ten statements, all of shapes that were seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.stores.engine import (
    TABLES,
    Count,
    Delete,
    Insert,
    Later,
    Row,
    Select,
    Update,
    Where,
    condition_of,
    order_of,
    pair_of,
)
from perdure.stores.jobs.listing import Page
from perdure.stores.pages import FEW, PageText

Adapter = Callable[[Any], Any]
Sql = tuple[str, Sequence[Any]]
"""A text, and the values to bind."""
Steps = Generator[Sql, list[Any], list[Any]]
"""Statements, one after the other. Each is sent its rows, and the rows of the last are returned."""

_NULLABLE = frozenset({"owner", "parent", "claim", "expires", "run", "line", "since"})
"""The columns that may hold NULL. There `!=` compares as in Python: NULL differs from every value."""
_OF_ENDS, _OF_CLAIMS = "session_again", "session_claimed"
"""Indexes on the last four characters of ids, and on sessions with a claim, which are few. Statements name them, since
a planner could prefer another one."""


class Again(msgspec.Struct, frozen=True):
    """Another way to rows of a table: another source, and conditions in place of `column = value`."""

    source: str
    conditions: Mapping[str, str] = {}
    """By column. The value is bound to each mark in it."""


class Dialect:
    """The SQL of one database. Its methods are called once for each shape of statement."""

    mark = "?"
    """The placeholder for a value."""
    later = "?"
    """The placeholder for the clock's time plus a number of seconds; see `moment`."""
    again: Mapping[str, Again] = {}
    backdated = "session"
    """The source of sessions that were updated before they were created."""

    def by(self, index: str) -> str:
        """Return the suffix to a table's name that asks for an index; "" if the planner needs no help."""
        return ""

    def read(self, table: str, column: str) -> str:
        """Return the expression that a column is read by. `column` may be qualified by its table."""
        return column

    def adapter(self, table: str, column: str) -> Adapter | None:
        """Return a function that converts a column's values for the database; None if it takes them as they are."""
        return None

    def keeps(self, table: str, column: str) -> bool:
        """Tell whether the database has this column. Values for a column that it lacks are left out."""
        return True

    def among(self, column: str) -> str:
        """Return the condition that a column's value is one of those in a list, which is bound as one value."""
        raise NotImplementedError

    def ending(self, column: str) -> str:
        """Return the condition that a column's text ends with a value. Its first part can be served by an index."""
        raise NotImplementedError

    def adapted_list(self, adapter: Adapter | None, values: Iterable[Any]) -> Any:
        """Return a list as it is bound."""
        raise NotImplementedError

    def moment(self, at: float | None, seconds: float) -> tuple[Any, ...]:
        """Return the values to bind in `later`. `at` is the time of the caller's clock."""
        assert at is not None
        return (at + seconds,)


class _Bound(NamedTuple):
    """The binding of one value: its adapter, and the number of marks that it is bound to."""

    adapter: Adapter | None
    times: int = 1


class _Plan(NamedTuple):
    """The text of a shape. If all values are bound as they are, `values` and `where` are None."""

    text: str
    where: Sequence[_Bound] | None
    values: Sequence[_Bound] | None = None
    kept: Sequence[int] | None = None
    """For rows to insert: the places of the columns that the database has, if it lacks some."""


class Translator:
    """A translator of statements into SQL of one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._plans: dict[Any, _Plan] = {}

    def select(self, asked: Select) -> Sql:
        table, columns, where, order = asked.table, asked.columns, asked.where, asked.order
        limit, again = asked.limit, asked.again
        # A limit of 1, or none, is part of the text. Any other one is bound, so that it makes no further shape.
        fixed = limit if limit is None or limit == 1 else 0
        shape = (table, columns, *where, order, fixed, again, _nones(where))
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._plan_select(asked, fixed)
        bound = _bound(plan.where, where.values())
        return plan.text, bound if fixed != 0 else (*bound, limit)

    def _plan_select(self, asked: Select, fixed: int | None) -> _Plan:
        other = self._dialect.again.get(asked.table) if asked.again else None
        conditions, bound = self._conditions(asked.table, asked.where, other)
        read = ", ".join(self._dialect.read(asked.table, column) for column in asked.columns)
        text = f"SELECT {read} FROM {self._source(asked) if other is None else other.source}{conditions}"
        if asked.order:
            text += f" ORDER BY {', '.join(f'{name} DESC' if down else name for name, down in order_of(asked.order))}"
        if fixed is not None:
            text += f" LIMIT {fixed or self._dialect.mark}"
        return _Plan(text, bound)

    def _source(self, asked: Select) -> str:
        where = asked.where
        if asked.table == "session" and "id ends" in where:
            return asked.table + self._dialect.by(_OF_ENDS)
        if asked.table == "session" and where.get("claim !=", "") is None and "id" not in where and "sid" not in where:
            return asked.table + self._dialect.by(_OF_CLAIMS)
        return asked.table

    def count(self, asked: Count) -> Sql:
        return self._where_only("SELECT count(*)", asked.table, asked.where)

    def delete(self, asked: Delete) -> Sql:
        return self._where_only("DELETE", asked.table, asked.where)

    def _where_only(self, verb: str, table: str, where: Where) -> Sql:
        shape = (verb, table, *where, _nones(where))
        plan = self._plans.get(shape)
        if plan is None:
            conditions, bound = self._conditions(table, where)
            plan = self._plans[shape] = _Plan(f"{verb} FROM {table}{conditions}", bound)
        return plan.text, _bound(plan.where, where.values())

    def insert(self, asked: Insert) -> tuple[str, Iterable[Row]]:
        """Return the text for one row, and the rows to bind."""
        table, columns, rows, or_set = asked.table, asked.columns, asked.rows, asked.or_set
        shape = (Insert, table, columns, or_set)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._plan_insert(asked)
        if plan.kept is not None:
            rows = [tuple(row[place] for place in plan.kept) for row in rows]
        return plan.text, rows if plan.values is None else [_bound(plan.values, row) for row in rows]

    def _plan_insert(self, asked: Insert) -> _Plan:
        table, columns, or_set = asked.table, asked.columns, asked.or_set
        kept = [place for place, name in enumerate(columns) if self._dialect.keeps(table, name)]
        names = [columns[place] for place in kept]
        marks = ", ".join(self._dialect.mark for _ in names)
        text = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"
        if or_set is not None:
            text += f" ON CONFLICT {self._set_instead(table, names, or_set)}"
        if TABLES[table].number:
            text += f" RETURNING {TABLES[table].number}"
        bound = [_Bound(self._dialect.adapter(table, name)) for name in names]
        return _Plan(text, None, _unless_plain(bound), None if len(kept) == len(columns) else kept)

    def _set_instead(self, table: str, names: Sequence[str], or_set: Sequence[str]) -> str:
        if not or_set:
            return "DO NOTHING"
        key = next(each for each in TABLES[table].unique if set(each) <= set(names))
        changes = ", ".join(f"{name} = excluded.{name}" for name in or_set if self._dialect.keeps(table, name))
        return f"({', '.join(key)}) DO UPDATE SET {changes}"

    def update(self, asked: Update, at: float | None = None) -> Sql:
        """Return the text and its values. `at` is the caller's time, for values that are `Later`."""
        table, values, where = asked.table, asked.values, asked.where
        later = tuple([name for name, value in values.items() if type(value) is Later])
        shape = (Update, table, *values, later, *where, _nones(where))
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._plan_update(asked, later)
        new: Iterable[Any] = values.values()
        if later:
            settled = [self._dialect.moment(at, each.seconds) if type(each) is Later else (each,) for each in new]
            new = [each for group in settled for each in group]
        return plan.text, (*_bound(plan.values, new), *_bound(plan.where, where.values()))

    def _plan_update(self, asked: Update, later: Sequence[str]) -> _Plan:
        table, values, where = asked.table, asked.values, asked.where
        changes, bound = [], []
        for key in values:
            name, sign = condition_of(key)
            is_kept = self._dialect.keeps(table, name)
            mark = self._dialect.later if key in later else self._dialect.mark
            if is_kept:
                changes.append(f"{name} = {name} + {mark}" if sign == "+" else f"{name} = {mark}")
            adapter = None if key in later else self._dialect.adapter(table, name)
            bound += [_Bound(adapter, int(is_kept))] * mark.count(self._dialect.mark)
        conditions, bound_where = self._conditions(table, where)
        return _Plan(f"UPDATE {table} SET {', '.join(changes)}{conditions}", bound_where, _unless_plain(bound))

    def page(self, page: Page) -> Steps:
        """Yield the statements for a page of a list. The rows of the last one are `HeaderRow`s."""
        text, few = PageText(self._dialect, page), False
        if (count := text.count()) is not None:
            ((found,),) = yield count
            few = found <= FEW
        return (yield text.statement(few=few))

    def _conditions(self, table: str, where: Where, other: Again | None = None) -> tuple[str, Sequence[_Bound] | None]:
        parts = [self._condition(table, key, value, other) for key, value in where.items()]
        return _where([condition for condition, _ in parts]), _unless_plain([bound for _, bound in parts])

    def _condition(self, table: str, key: str, value: Any, other: Again | None) -> tuple[str, _Bound]:
        if pair_of(key) is not None:
            return key, _Bound(None, 0)
        column, sign = condition_of(key)
        name = column.rpartition(".")[2]
        if value is None:
            return f"{column} IS {'NOT ' if sign == '!=' else ''}NULL", _Bound(None, 0)
        adapter = self._dialect.adapter(table, name)
        if sign == "in":
            return self._dialect.among(column), _Bound(lambda values: self._dialect.adapted_list(adapter, values))
        if sign == "ends":
            condition = self._dialect.ending(column)
            return condition, _Bound(adapter, condition.count(self._dialect.mark))
        if other is not None and name in other.conditions:
            condition = other.conditions[name]
            return condition, _Bound(adapter, condition.count(self._dialect.mark))
        if sign == "!=":
            sign = "IS DISTINCT FROM" if name in _NULLABLE else "<>"
        return f"{column} {sign} {self._dialect.mark}", _Bound(adapter)


def _nones(where: Where) -> tuple[bool, ...] | None:
    """Return which values are None, if any is. They are compared by IS NULL, and so belong to the shape."""
    values = where.values()
    return tuple([value is None for value in values]) if None in values else None


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _unless_plain(bound: Sequence[_Bound]) -> Sequence[_Bound] | None:
    return None if all(each == (None, 1) for each in bound) else bound


def _bound(bound: Sequence[_Bound] | None, values: Iterable[Any]) -> tuple[Any, ...]:
    if bound is None:
        return tuple(values)
    found: list[Any] = []
    for (adapter, times), value in zip(bound, values, strict=True):
        found += [value if adapter is None or value is None else adapter(value)] * times
    return tuple(found)
