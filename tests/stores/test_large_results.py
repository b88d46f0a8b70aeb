"""A run whose tools have run can be saved and recovered, however much they have returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server
from tests.loop.scenes import loops_of

from perdure import (
    AgentDefinition,
    FileStore,
    LoopFactory,
    MemoryStore,
    PostgresStore,
    SendMessage,
    SessionRuntime,
    SqliteStore,
    StoreError,
    ToolCall,
    recover,
    tool,
)
from perdure.codec import values
from perdure.loop import results
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock

STORES: dict[str, Any] = {
    "memory": lambda where: MemoryStore(),
    "file": lambda where: FileStore(where / "sessions"),
    "sqlite": lambda where: SqliteStore(where / "sessions.db"),
    "postgres": lambda where: PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
}
CAP = 2_000_000
called: list[int] = []


@tool(idempotent=True)
def fetch(number: int) -> str:
    """Return nearly a quarter of what a version holds."""
    called.append(number)
    return str(number) * (CAP // 4 - 10_000)


def loops(**options: Any) -> LoopFactory:
    return loops_of([[ToolCall("fetch", {"number": n}, id=f"c{n}") for n in range(5)], "done"], fetch, **options)


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of each kind, where versions have a small cap."""
    called.clear()
    monkeypatch.setattr(values, "MAX_BYTES", CAP)
    monkeypatch.setattr(results, "MAX_RESULT_BYTES", CAP // 4)
    monkeypatch.setattr(results, "MAX_RUN_BYTES", CAP // 4 * 3)
    return STORES[request.param](tmp_path)


def _kept(session: Any) -> list[bool]:
    return [each.error is None for each in session.state.steps[0].tool_executions]


@pytest.mark.parametrize("concurrency", ["sequential", "parallel"])
async def test_results_that_do_not_fit_together_are_refused_one_by_one(opened: Any, concurrency: str) -> None:
    """A result that a version has no room for becomes an error result; the run continues and is saved."""
    async with opened as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent"))
        saved = await runtime.execute(session.id, SendMessage("go", loops(concurrency=concurrency)))
        assert saved.state.final_response.text == "done"
        assert sorted(called) == [0, 1, 2, 3, 4]
        assert _kept(saved) == [True, True, True, False, False]
        assert "was not kept" in saved.state.messages[5].text
        assert await store.load(session.id) == saved


async def test_a_run_that_was_killed_counts_what_it_has_on_record(opened: Any) -> None:
    """When it is recovered in the middle of its calls, it has room for the same results, and is saved."""
    with use(clock=(clock := FrozenClock())):
        async with opened as store:
            session = await SessionRuntime(store).create(AgentDefinition("agent"))
            failing = FailingStore(store)
            failing.crash(call=7, after=True)
            with pytest.raises(StoreError):
                await SessionRuntime(failing).execute(session.id, SendMessage("go", loops(concurrency="sequential")))
            assert 2 <= len(called) < 5
            clock.advance(60)
            report = await recover(SessionRuntime(store), loops(concurrency="sequential"))
            assert report.resumed == (session.id,)
            saved = await store.load(session.id)
            assert saved.state.final_response.text == "done"
            assert _kept(saved) == [True, True, True, False, False]
