"""LangGraph's own conformance tests of checkpointers, on every store, and through the sync methods too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

pytest.importorskip("langgraph.checkpoint.conformance")

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import ProgressCallbacks

from perdure import MemoryStore, PostgresStore, SqliteStore
from perdure.adapters.langgraph import PerdureSaver
from perdure.protocols import SessionStore

ALL = 81
STORES: dict[str, Callable[[Path], SessionStore]] = {
    "memory": lambda where: MemoryStore(),
    "sqlite": lambda where: SqliteStore(where / "threads.db"),
    "postgres": lambda where: PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
}


class Bridged(PerdureSaver):
    """A saver whose async methods call the sync ones, in a thread without an event loop."""

    async def aget_tuple(self, *args: Any, **kwargs: Any) -> CheckpointTuple | None:
        return await asyncio.to_thread(self.get_tuple, *args, **kwargs)

    async def alist(self, *args: Any, **kwargs: Any) -> AsyncIterator[CheckpointTuple]:
        for each in await asyncio.to_thread(lambda: list(self.list(*args, **kwargs))):
            yield each


def bridged(name: str) -> Callable[..., Any]:
    async def method(self: PerdureSaver, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self, name), *args, **kwargs)

    return method


for name in ("put", "put_writes", "delete_thread", "delete_for_runs", "copy_thread", "prune"):
    setattr(Bridged, f"a{name}", bridged(name))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [PerdureSaver, Bridged], ids=["async", "sync"])
@pytest.mark.parametrize("store", STORES)
async def test_all_of_them_pass(store: str, kind: type[PerdureSaver], tmp_path: Path) -> None:
    """Every capability that LangGraph knows is there, and every test of it passes."""
    made: list[PerdureSaver] = []
    failed: list[str | None] = []

    @checkpointer_test(name=f"perdure on {store}")
    async def saver() -> AsyncIterator[PerdureSaver]:
        where = tmp_path / str(len(made))
        where.mkdir()
        made.append(kind(store=STORES[store](where)))
        yield made[-1]
        made[-1]._home.shared.close()

    def note(capability: str, test: str, passed: bool, trace: str | None) -> None:
        if not passed:
            failed.append(trace)

    report = await validate(saver, progress=ProgressCallbacks(on_test_result=note))
    counts: Counter[str] = Counter()
    for result in report.results.values():
        counts.update(passed=result.tests_passed, failed=result.tests_failed, skipped=result.tests_skipped)
    assert not failed, failed[0]
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (ALL, 0, 0)
