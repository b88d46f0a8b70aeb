"""A page of a list as SQL: the index that leads to its sessions in their order, and the further conditions.

The cost of a page depends on what it shows, not on the number of sessions. So one index, which ends with the order,
serves the filters. A list may leave sessions out by their status, or because they belong to sub-agents. Then its page
is merged from one for each shelf that it shows: the sessions of one status, of sub-agents or not. Lists by time of
update use the minute, which an index has, and are sorted within each minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET

from perdure.model.session import SessionStatus
from perdure.stores.engine import condition_of
from perdure.stores.format.rows import Order, minute_of
from perdure.stores.jobs.listing import HeaderRow, Page

if TYPE_CHECKING:
    from perdure.stores.sql import Dialect

FEW = 256
"""The most sessions to sort. If a bound on one time leaves more, reading in the order of the other soon finds some."""
# More than any list reaches: the limit is there for the planner, see `_sorted`.
_UNLIMITED = 1_000_000
_SHOWN = tuple(status.value for status in SessionStatus if status is not SessionStatus.DELETED)
_COLUMNS = [f"{'head' if name in ('crc', 'body') else 'session'}.{name}" for name in HeaderRow._fields[2:]]
_OF_TAGS = frozenset({"tag", "owner", "agent", "status", "spawned", "created", "recent"})
"""The columns that a tag has of its session."""
_APART = frozenset({"status", "status !=", "spawned", "created >", "created <", "updated >", "updated <"})


class _Condition(NamedTuple):
    text: str
    values: Sequence[Any] = ()


class _Shelf(NamedTuple):
    """The sessions of one status, of sub-agents or not. None means all that are shown."""

    status: str | None
    spawned: int | None


class PageText:
    """The statements for a page of a list, in one dialect."""

    def __init__(self, dialect: Dialect, page: Page) -> None:
        self._dialect = dialect
        self._page = page
        self._query = page.query
        self._order = page.query.order
        self._other: Order = "updated" if self._order == "created" else "created"
        self._asked = {key: value for key, value in page.where.items() if key not in _APART}
        # A session has few children, so further conditions on them need no index.
        is_by_tag = bool(page.query.marks) and page.query.parent is None
        self._table = "tag" if is_by_tag else "session"

    def count(self) -> tuple[str, Sequence[Any]] | None:
        """Return a statement that counts the sessions within the bounds on the other time, up to one more than FEW.

        The other time is the one that the list is not ordered by. Return None if there are no bounds on it, or if
        the sessions are found in another way.
        """
        bounds = self._bounds(self._table, self._other)
        if not bounds or self._query.id is not None or self._query.parent is not None:
            return None
        parts = [self._found(shelf, bounds, "1 AS one", FEW + 1) for shelf in self._shelves()]
        text, values = _together(parts)
        return f"SELECT count(*) FROM ({text}) AS counted", values

    def statement(self, *, few: bool) -> tuple[str, Sequence[Any]]:
        """Return the statement for the page. Its rows are `HeaderRow`s. `few` is true if at most FEW were counted."""
        text, values = _together([*(self._sorted() if few else self._in_order())])
        read = [self._dialect.read(name.partition(".")[0], name) for name in _COLUMNS]
        text = (
            f"SELECT page.time, page.sid, {', '.join(read)} FROM ({text}) AS page"
            " LEFT JOIN session ON session.sid = page.sid"
            " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
            f" ORDER BY page.time DESC, page.sid DESC LIMIT {self._page.most:d}"
        )
        return text, values

    def _in_order(self) -> Iterator[_Condition]:
        """Yield the parts of the page, each read in the order of the list, and as long as the page may be."""
        table = self._table
        if self._query.id is not None:
            yield self._part("session", "session", [*self._hidden(), *self._of("session"), *self._within("session")])
            return
        # A session that is not backdated was created before it was updated, so this bounds its creation, too. The
        # few backdated ones are read by an index of their own.
        before = _time(self._query.updated_before) if self._order == "created" else None
        for shelf in (_Shelf(None, None),) if self._is_plain else self._shelves():
            conditions = [*self._on(table, shelf), *self._of(table), *self._within(table, before)]
            yield self._part(table, f"{table}{self._dialect.by(self._index(self._order))}", conditions)
        if before is not None:
            backdated = [_Condition("session.updated < session.created"), *self._of("session"), *self._hidden()]
            backdated += [self._condition("session", "created >=", before), *self._within("session")]
            yield self._part("session", self._dialect.backdated, backdated)

    def _sorted(self) -> Iterator[_Condition]:
        """Yield the parts of a page of few sessions, which are found by the other time and then sorted."""
        for shelf in self._shelves():
            # With a limit, so that no plan searches in the order of the list after all.
            found = self._found(shelf, self._bounds(self._table, self._other), f"{self._table}.sid AS sid", _UNLIMITED)
            source = f"({found.text}) AS found JOIN session ON session.sid = found.sid"
            text, values = self._part("session", source, [*self._within("session")])
            yield _Condition(text, [*found.values, *values])

    def _found(self, shelf: _Shelf, bounds: Sequence[_Condition], what: str, most: int) -> _Condition:
        """Return the sessions of a shelf that are within the bounds on the other time."""
        source = f"{self._table}{self._dialect.by(self._index(self._other))}"
        conditions = [*self._on(self._table, shelf), *self._of(self._table), *bounds]
        # In the index's own order, so that a planner without statistics chooses that index.
        time = f"{self._table}.{'recent' if self._other == 'updated' else 'created'}"
        return _select(what, source, conditions, f"{self._ordered(self._table, time)} LIMIT {most:d}")

    def _part(self, table: str, source: str, conditions: Sequence[_Condition]) -> _Condition:
        time = "session.updated" if self._order == "updated" else f"{table}.created"
        if table == "tag" and (self._order == "updated" or any("session." in each.text for each in conditions)):
            source += " JOIN session ON session.sid = tag.sid"
        order = [f"{table}.recent", time, f"{table}.sid"] if self._order == "updated" else [time, f"{table}.sid"]
        tail = f"{self._ordered(table, *order)} LIMIT {self._page.most:d}"  # a plan may depend on it
        return _select(f"{time} AS time, {table}.sid AS sid", source, conditions, tail)

    def _ordered(self, table: str, *names: str) -> str:
        # An index has the owner before the time. Not every planner sees that all rows without an owner are in order.
        nobody = [f"{table}.owner"] if self._query.owner is None else []
        return f"ORDER BY {', '.join(f'{name} DESC' for name in (*nobody, *names))}"

    @property
    def _is_plain(self) -> bool:
        """True if one index has all sessions that the list shows, of all shelves."""
        query = self._query
        is_filtered = query.owner is not UNSET or any((query.status, query.agent, query.parent, query.marks))
        return self._order == "created" and not is_filtered and not query.top_level

    def _shelves(self) -> Iterator[_Shelf]:
        query = self._query
        statuses = _SHOWN if query.status is None else (query.status.value,)
        spawned: Sequence[int | None] = (0,) if query.top_level else (None,) if query.parent is not None else (0, 1)
        yield from (_Shelf(*each) for each in product(statuses, spawned))

    def _index(self, time: Order) -> str:
        query = self._query
        if query.parent is not None:
            return "session_by_parent"
        if time == "created" and self._is_plain and self._order == time:
            return "session_by_created"
        names = ["owner"] if query.owner is not UNSET else []
        if query.agent is not None and query.owner is not None:
            names.append("agent")
        return f"{self._table}_by_{'_'.join([*names, 'shelf'])}{'_recent' if time == 'updated' else ''}"

    def _on(self, table: str, shelf: _Shelf) -> Iterator[_Condition]:
        if shelf.status is None:
            yield from self._hidden()
        else:
            yield self._condition(table, "status", shelf.status)
        if shelf.spawned is not None:
            yield _Condition(f"{table}.spawned = {shelf.spawned:d}")

    def _hidden(self) -> Iterator[_Condition]:
        """Yield the conditions that leave out sessions of shelves that the list does not show."""
        query = self._query
        if query.status is not None:
            yield self._condition("session", "status", query.status.value)
        elif not query.shows_deleted:
            yield _Condition(f"session.status <> '{SessionStatus.DELETED.value}'")
        if query.top_level:
            yield _Condition("session.spawned = 0")

    def _of(self, table: str) -> Iterator[_Condition]:
        """Yield the conditions except for shelf and time, on a table's own columns where it has them."""
        for key, value in self._asked.items():
            is_own = table == "session" or condition_of(key)[0] in _OF_TAGS
            yield self._condition(table if is_own else "session", key, value)
        # The index of the first mark leads to the sessions, in their order. Each other mark is looked up.
        first, *others = self._query.marks or (None,)
        if table == "tag":
            yield from (self._condition("tag", "tag", first), _Condition("tag.created IS NOT NULL"))
        elif first is not None:
            others = [first, *others]
        for mark in others:
            text, values = self._condition("tag", "tag", mark)
            tagged = text.replace("tag.", "other.")
            yield _Condition(f"EXISTS (SELECT 1 FROM tag AS other WHERE {tagged} AND other.sid = {table}.sid)", values)

    def _bounds(self, table: str, time: Order) -> list[_Condition]:
        """Return the conditions on a time that an index can be entered by."""
        if time == "created":
            asked = {"created >": self._query.created_after, "created <": self._query.created_before}
            return [self._condition(table, key, each.timestamp()) for key, each in asked.items() if each is not None]
        asked = {"recent >=": self._query.updated_after, "recent <=": self._query.updated_before}
        minutes = {key: minute_of(each.timestamp()) for key, each in asked.items() if each is not None}
        return [self._condition(table, key, minute) for key, minute in minutes.items()]

    def _within(self, table: str, before: float | None = None) -> Iterator[_Condition]:
        """Yield the conditions on both times, with the place that the page starts behind."""
        for key in ("updated >", "updated <"):
            if key in self._page.where:
                yield self._condition("session", key, self._page.where[key])
        if "created >" in self._page.where:
            yield self._condition(table, "created >", self._page.where["created >"])
        yield from self._behind_created(table, before) if self._order == "created" else self._behind_updated(table)

    def _behind_created(self, table: str, before: float | None) -> Iterator[_Condition]:
        """Yield the strictest of the upper bounds on the time of creation, as an index is entered by one bound."""
        start, asked = self._page.start, self._page.where.get("created <")
        times = [time for time in (asked, before) if time is not None]
        if times and (start is None or min(times) <= start.time):
            yield self._condition(table, "created <", min(times))
        elif start is not None:
            mark = self._dialect.mark
            yield _Condition(f"({table}.created, {table}.sid) < ({mark}, {mark})", start)

    def _behind_updated(self, table: str) -> Iterator[_Condition]:
        start, query, mark = self._page.start, self._query, self._dialect.mark
        if query.created_before is not None:
            yield self._condition(table, "created <", query.created_before.timestamp())
        if query.updated_after is not None:
            yield self._condition(table, "recent >=", minute_of(query.updated_after.timestamp()))
        newest = [time for time in (start and start.time, _time(query.updated_before)) if time is not None]
        if newest:
            yield self._condition(table, "recent <=", minute_of(min(newest)))
        if start is not None:
            yield _Condition(f"(session.updated, session.sid) < ({mark}, {mark})", start)

    def _condition(self, table: str, key: str, value: Any) -> _Condition:
        column, sign = condition_of(key)
        if column == "status":  # a literal: a plan may be made for each of the few values
            return _Condition(f"{table}.status = '{value}'")
        if value is None:
            return _Condition(f"{table}.{column} IS NULL")
        adapter = self._dialect.adapter(table, column)
        return _Condition(f"{table}.{column} {sign} {self._dialect.mark}", (adapter(value) if adapter else value,))


def _time(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _select(what: str, source: str, conditions: Sequence[_Condition], tail: str) -> _Condition:
    where = f" WHERE {' AND '.join(each.text for each in conditions)}" if conditions else ""
    values = [value for each in conditions for value in each.values]
    return _Condition(f"SELECT {what} FROM {source}{where} {tail}", values)


def _together(parts: Sequence[_Condition]) -> tuple[str, Sequence[Any]]:
    text = " UNION ALL ".join(f"SELECT * FROM ({part.text}) AS part" for part in parts)
    return text, [value for part in parts for value in part.values]
