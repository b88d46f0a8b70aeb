"""Sessions in this process's memory: for tests, prototypes, and runs that need not last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Self

from perdure.model.ids import new_id, now
from perdure.stores.engine import (
    Change,
    Clock,
    Engine,
    Insert,
    Job,
    Kind,
    Later,
    Lock,
    Pledge,
    Statement,
    T,
    Update,
    drive,
)
from perdure.stores.jobs.claiming import COLUMNS_OF_FACTS, Facts
from perdure.stores.jobs.saving import (
    BATCH_COLUMNS,
    MESSAGE_COLUMNS,
    RUN_COLUMNS,
    RUN_GROWS,
    Append,
    place_of,
    row_of_batch,
    rows_of_messages,
    rows_of_runs,
)
from perdure.stores.store import Store
from perdure.stores.tables import Record, Tables

_ROWS_AT_ONCE = 1_000
# Others may write all the time. After this many attempts, a long job is driven without pauses.
_ATTEMPTS = 3
_FACTS = itemgetter(*COLUMNS_OF_FACTS)


class _Overtaken(Exception):
    """Another job has written while this one was reading."""


class MemoryEngine(Engine):
    """An engine that keeps the tables in memory.

    A job that writes is driven without pauses, so nothing comes between its statements. A job that reads much lets
    others have their turns, and begins again if one of them has written.
    """

    packs = False

    def __init__(self) -> None:
        self.origin = new_id()
        self._tables = Tables()
        self._tables.answer(Insert("meta", ("key", "value"), [("uid", self.origin), ("erasures", 0)]))
        self._writes = 0
        """The number of jobs that have written so far."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        if kind == "read":
            for _ in range(_ATTEMPTS):
                with suppress(_Overtaken):
                    return await self._read(job())
        return self._at_once(job, kind)

    async def _read(self, job: Job[T]) -> T:
        """Drive a job that reads, with a pause now and then. Raise _Overtaken if another job has written in a pause."""
        began, rows = self._writes, 0
        with closing(job):
            try:
                statement = next(job)
                while True:
                    found = self._answer(statement)  # nothing is ever damaged in memory
                    rows += len(found)
                    if rows >= _ROWS_AT_ONCE:
                        await asyncio.sleep(0)
                        rows = 0
                        if self._writes != began:
                            raise _Overtaken
                    statement = job.send(found)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here

    def _at_once(self, job: Callable[[], Job[T]], kind: Kind) -> T:
        if kind in ("write", "erase"):
            self._writes += 1
        return self._whole_or_not_at_all(lambda: drive(job(), self._answer))

    def _whole_or_not_at_all(self, work: Callable[[], T]) -> T:
        """Do work on the tables, and undo all of it if it fails."""
        self._tables.begin()
        try:
            return work()
        except BaseException:  # a KeyboardInterrupt too must leave no half of a change
            self._tables.take_back()
            raise

    async def commit(self, change: Change) -> Any:
        # Without an await, so that nothing can be cancelled halfway.
        self._writes += 1
        return change.finish(self._whole_or_not_at_all(partial(self._make, change)))

    async def commit_all(self, change: Change) -> Any:
        return change.finish(self._at_once(change.job, "write"))

    def _make(self, change: Any) -> Any:
        """Make a change. The facts about its session are read here, since every step of a run needs them."""
        row = self._tables.tables["session"].only("id", str(change.session_id))
        meta = self._tables.tables["meta"].only("key", "erasures")
        if row is None or meta is None:
            return drive(change.job(), self._answer)
        *columns, recent, claim, expires = _FACTS(row)
        stands = claim is not None and expires > now().timestamp()
        facts = Facts(*columns, claim, stands, meta["value"], recent)  # type: ignore[call-arg]  # as many as there are
        if isinstance(change, Append) and change.is_plain:
            return self._appended(change, facts, row)
        return drive(change.made_to(facts), self._answer)

    def _appended(self, append: Append, facts: Facts, session: Record) -> Any:
        """Make the append of most steps of a run. A run makes two a step, so no statement is made for each row."""
        append.refuse(facts)
        place, batch, tables = place_of(facts), append.batch, self._tables.tables
        assert batch is not None
        for row in rows_of_messages(place.log, place.msg_end, append.messages):
            tables["msg"].put(dict(zip(MESSAGE_COLUMNS, row, strict=True)), None)
        last, stretch = place.evt_end + batch.count, (place.log, place.msg_end, place.msg_end + len(append.messages))
        (run,) = rows_of_runs(place.sid, last, batch, stretch)
        number = tables["run"].put(dict(zip(RUN_COLUMNS, run, strict=True)), RUN_GROWS)
        entries = row_of_batch(place.sid, last, batch, number)
        tables["batch"].put(dict(zip(BATCH_COLUMNS, entries, strict=True)), None)
        expires = now().timestamp() + append.claim.lease
        tables["session"].change(session, append.columns(place, facts) | {"expires": expires})
        return append.made(place, (place.log, place.msg_end), facts)

    def _answer(self, statement: Statement) -> list[Any]:
        kind = type(statement)
        if kind is Lock or kind is Pledge:
            return []
        if kind is Clock:
            return [(now().timestamp(),)]
        if isinstance(statement, Update):
            later = {name: each.seconds for name, each in statement.values.items() if type(each) is Later}
            if later:
                at = now().timestamp()
                values = {**statement.values, **{name: at + seconds for name, seconds in later.items()}}
                statement = Update(statement.table, values, statement.where)
        return self._tables.answer(statement)


class MemoryStore(Store):
    """A store in memory. Every other store accepts what this one accepts."""

    never_waits = True
    """True: every call is carried out at once, so that nothing can be cancelled halfway."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
