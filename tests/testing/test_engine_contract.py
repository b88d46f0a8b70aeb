"""The contract for engines itself: an engine that breaks a promise of the port does not pass it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.stores.engine import Change, Delete, Job, Kind, Select, Statement, T, Update, drive
from perdure.stores.memory import MemoryEngine
from perdure.testing import EngineContract


class _KeepsHalfOfAWrite(MemoryEngine):
    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        return drive(job(), self._answer)


class _GivesNumbersOutAgain(MemoryEngine):
    def _answer(self, statement: Statement) -> list[Any]:
        if isinstance(statement, Delete) and statement.table == "session":
            self._tables.tables["session"]._numbers = count(1)
        return super()._answer(statement)


class _ForgetsTheOrder(MemoryEngine):
    def _answer(self, statement: Statement) -> list[Any]:
        return super()._answer(replace(statement, order="") if isinstance(statement, Select) else statement)


class _ForgetsToCount(MemoryEngine):
    def _answer(self, statement: Statement) -> list[Any]:
        answer = super()._answer(statement)
        return [(1,)] if isinstance(statement, Update) else answer


class _ForgetsToFinish(MemoryEngine):
    async def commit(self, change: Change) -> Any:
        return await self.run(change.job, "write")


class _IsAnybody(MemoryEngine):
    def __init__(self) -> None:
        super().__init__()
        self.origin = "the same"


@pytest.mark.parametrize(
    ("engine", "test"),
    [
        (_KeepsHalfOfAWrite, "test_a_write_that_raises_changes_nothing"),
        (_GivesNumbersOutAgain, "test_numbers_go_up_and_none_is_given_out_twice"),
        (_ForgetsTheOrder, "test_rows_come_in_the_order_that_was_asked_for"),
        (_ForgetsToCount, "test_an_insert_of_no_rows_is_nothing"),
        (_ForgetsToFinish, "test_a_change_is_finished_though_nobody_waits"),
        (_IsAnybody, "test_no_two_stores_have_the_same_id"),
    ],
)
def test_a_broken_promise_is_noticed(engine: type[MemoryEngine], test: str, tmp_path: Path) -> None:
    """An engine with a fault fails the test of that fault."""

    class Applied(EngineContract):
        def open_engine(self, where: Path) -> MemoryEngine:
            return engine()

    with pytest.raises(AssertionError):
        getattr(Applied(), test)(tmp_path)


def test_the_contract_says_what_it_needs(tmp_path: Path) -> None:
    """A class that applies the contract without opening an engine gets an error that says so."""
    with pytest.raises(NotImplementedError, match="open_engine"):
        EngineContract().test_the_store_has_an_id_of_its_own(tmp_path)
