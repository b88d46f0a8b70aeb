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
from perdure.stores.store import Store
from perdure.stores.tables import Tables

_ROWS_AT_ONCE = 1_000
# Others may write all the time: then a long job is driven at once in the end.
_ATTEMPTS = 3
_FACTS = itemgetter(*COLUMNS_OF_FACTS)


class _Overtaken(Exception):
    """Somebody has written while a job was reading."""


class MemoryEngine(Engine):
    """Keeps the tables in memory. A job that writes is driven at once, so that nothing comes between its statements.

    One that reads much lets others have their turns, and begins again if one of them has written.
    """

    packs = False

    def __init__(self) -> None:
        self.origin = new_id()
        self._tables = Tables()
        self._tables.answer(Insert("meta", ("key", "value"), [("uid", self.origin), ("erasures", 0)]))
        self._writes = 0
        """How many jobs have written so far."""

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
        """Drive a job that reads, with a pause after every so many rows; _Overtaken if somebody has written in one."""
        began, rows = self._writes, 0
        with closing(job):
            try:
                statement = next(job)
                while True:
                    found = self._answer(statement)  # which is never damaged here
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
        self._tables.begin()
        try:
            return drive(job(), self._answer)
        except BaseException:
            self._tables.take_back()
            raise

    async def commit(self, change: Change) -> Any:
        # All at once: nothing can be cancelled in between.
        return change.finish(self._at_once(partial(self._made, change), "write"))

    def _made(self, change: Any) -> Job[Any]:
        """Return the job that makes a change. How its session stands is looked up in passing: every step asks."""
        row = self._tables.tables["session"].only("id", str(change.session_id))
        meta = self._tables.tables["meta"].only("key", "erasures")
        if row is None or meta is None:
            return change.job()  # type: ignore[no-any-return]  # as every change says
        *columns, recent, claim, expires = _FACTS(row)
        stands = claim is not None and expires > now().timestamp()
        facts = Facts(*columns, claim, stands, meta["value"], recent)  # type: ignore[call-arg]  # as many as there are
        return change.made_to(facts)  # type: ignore[no-any-return]  # as every change says

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
    """Keeps every version in memory. What it accepts, every other store accepts."""

    never_waits = True
    """Whether every call is carried out at once, so that nothing can be cancelled in its middle."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
