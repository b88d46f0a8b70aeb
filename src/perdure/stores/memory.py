"""Sessions in this process's memory: for tests, prototypes, and runs that need not last."""

from __future__ import annotations

from collections.abc import Callable
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
from perdure.stores.store import Store
from perdure.stores.tables import Tables


class MemoryEngine(Engine):
    """Keeps the tables in memory. Every job is driven at once, so that nothing comes between its statements."""

    packs = False

    def __init__(self) -> None:
        self.origin = new_id()
        self._tables = Tables()
        self._tables.answer(Insert("meta", ("key", "value"), [("uid", self.origin), ("erasures", 0)]))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        self._tables.begin()
        try:
            return drive(job(), self._answer)
        except BaseException:
            self._tables.take_back()
            raise

    async def commit(self, change: Change) -> Any:
        return change.finish(await self.run(change.job, "write"))  # at once: nothing can be cancelled between the two

    def _answer(self, statement: Statement) -> list[Any]:
        match statement:
            case Lock() | Pledge():
                return []
            case Clock():
                return [(now().timestamp(),)]
            case Update(table, values, where):
                later = {name: now().timestamp() + each.seconds for name, each in values.items() if type(each) is Later}
                statement = Update(table, {**values, **later}, where) if later else statement
        return self._tables.answer(statement)


class MemoryStore(Store):
    """Keeps every version in memory. What it accepts, every other store accepts."""

    never_waits = True
    """Whether every call is carried out at once, so that nothing can be cancelled in its middle."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
