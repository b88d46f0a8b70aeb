"""A page of a list as SQL: which index leads to its sessions, in their order, and what is asked of them besides.

A page costs what it shows, however many sessions there are. So the filters are served by one index that ends with the
order; and where a list leaves hidden sessions out, its page is put together from one of each other status.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.model.session import SessionStatus
from perdure.stores.engine import condition_of
from perdure.stores.jobs.listing import HeaderRow, Page

if TYPE_CHECKING:
    from perdure.stores.sql import Dialect

_SHOWN = tuple(status.value for status in SessionStatus if status is not SessionStatus.DELETED)
_COLUMNS = [f"{'head' if name in ('crc', 'body') else 'session'}.{name}" for name in HeaderRow._fields[2:]]
_OF_TAGS = frozenset({"tag", "owner", "agent", "status", "created"})
"""The columns that a tag has of its session."""


class _Condition(NamedTuple):
    text: str
    values: Sequence[Any] = ()


class PageText:
    """The statement for a page of a list, in one dialect. Its rows are `HeaderRow`s."""

    def __init__(self, dialect: Dialect, page: Page) -> None:
        self._dialect = dialect
        self._page = page
        apart = ("status", "status !=", "created <")
        self._asked = {key: value for key, value in page.where.items() if key not in apart}

    def statement(self) -> tuple[str, Sequence[Any]]:
        stretches = [*self._stretches()]
        together = " UNION ALL ".join(f"SELECT * FROM ({text}) AS part" for text, _ in stretches)
        read = [self._dialect.read(name.partition(".")[0], name) for name in _COLUMNS]
        text = (
            f"SELECT page.created, page.sid, {', '.join(read)} FROM ({together}) AS page"
            " LEFT JOIN session ON session.sid = page.sid"
            " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
            f" ORDER BY page.created DESC, page.sid DESC LIMIT {self._page.most:d}"
        )
        return text, [value for _, values in stretches for value in values]

    def _stretches(self) -> Iterator[_Condition]:
        """Return the parts of the page: each in order, and as long as the page may be."""
        query = self._page.query
        if query.id is not None:
            yield self._stretch("session", [*self._of("session"), *self._behind("session"), *self._hidden()])
            return
        before = None if query.updated_before is None else query.updated_before.timestamp()
        # A session has few children: what else is asked of them needs no index.
        table = "tag" if query.tag is not None and query.parent is None else "session"
        for status in self._statuses():
            conditions = self._hidden() if status is None else [self._condition(table, "status", status)]
            # What is not backdated was created before it was updated.
            conditions += [*self._of(table), *self._behind(table, before)]
            yield self._stretch(f"{table}{self._dialect.by(self._index(table))}", conditions)
        if before is not None:
            backdated = [_Condition("session.updated < session.created"), *self._of("session"), *self._hidden()]
            backdated += [self._condition("session", "created >=", before), *self._behind("session")]
            yield self._stretch(self._dialect.backdated, backdated)

    def _stretch(self, source: str, conditions: Sequence[_Condition]) -> _Condition:
        table = "tag" if source.startswith("tag") else "session"
        if table == "tag" and any("session." in condition.text for condition in conditions):
            source += " JOIN session ON session.sid = tag.sid"
        text = (
            f"SELECT {table}.created AS created, {table}.sid AS sid FROM {source}"
            f" WHERE {' AND '.join(condition.text for condition in conditions)}"
            f" ORDER BY {table}.created DESC, {table}.sid DESC LIMIT {self._page.most:d}"  # a plan may depend on it
        )
        return _Condition(text, [value for condition in conditions for value in condition.values])

    def _statuses(self) -> Sequence[str | None]:
        """Return the statuses to look for one by one; None stands for all that are shown."""
        query = self._page.query
        if query.status is not None:
            return (query.status.value,)
        is_filtered = any(each is not None for each in (query.agent, query.owner, query.parent, query.tag))
        return _SHOWN if is_filtered else (None,)

    def _index(self, table: str) -> str:
        query = self._page.query
        if query.parent is not None:
            return "session_by_parent"
        names = [name for name in ("owner", "agent") if getattr(query, name) is not None]
        if not names:
            names = ["status" if table == "session" and query.status is not None else "created"]
        return f"{table}_by_{'_and_'.join(names)}"

    def _of(self, table: str) -> Iterator[_Condition]:
        """Return the conditions but for `_hidden` and `_behind`, on a table's own columns where it has them."""
        for key, value in self._asked.items():
            is_own = table == "session" or condition_of(key)[0] in _OF_TAGS
            yield self._condition(table if is_own else "session", key, value)
        if self._page.query.tag is not None:
            tagged = self._condition("tag", "tag", self._page.query.tag)
            if table == "tag":
                yield from (tagged, _Condition("tag.created IS NOT NULL"))
            else:
                text = f"EXISTS (SELECT 1 FROM tag WHERE {tagged.text} AND tag.sid = session.sid)"
                yield _Condition(text, tagged.values)

    def _behind(self, table: str, *before: float | None) -> Iterator[_Condition]:
        """Return the one condition on how new a session may be that holds if all do: an index is entered by one."""
        start, asked = self._page.start, self._page.where.get("created <")
        times = [time for time in (asked, *before) if time is not None]
        if times and (start is None or min(times) <= start.created):
            yield self._condition(table, "created <", min(times))
        elif start is not None:
            mark = self._dialect.mark
            yield _Condition(f"({table}.created, {table}.sid) < ({mark}, {mark})", start)

    def _hidden(self) -> list[_Condition]:
        """Return the condition on the status, of sessions whatever it is."""
        query = self._page.query
        if query.status is not None:
            return [self._condition("session", "status", query.status.value)]
        return [] if query.shows_deleted else [_Condition(f"session.status <> '{SessionStatus.DELETED.value}'")]

    def _condition(self, table: str, key: str, value: Any) -> _Condition:
        column, sign = condition_of(key)
        if column == "status":  # one of a few, for which a plan may be made
            return _Condition(f"{table}.status = '{value}'")
        adapter = self._dialect.adapter(table, column)
        return _Condition(f"{table}.{column} {sign} {self._dialect.mark}", (adapter(value) if adapter else value,))
