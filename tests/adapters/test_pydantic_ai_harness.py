"""Runs of Pydantic AI's harness in perdure behave as in its own stores.

The harness pins one release of pydantic-ai-slim, so it is not installed with the rest: these tests run where it is.
"""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai_harness.step_persistence")

import asyncio
import os
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.test import TestModel
from pydantic_ai_harness.step_persistence import (
    ContinuableSnapshot,
    InMemoryStepStore,
    RunRecord,
    StepEvent,
    StepPersistence,
    StepStore,
    ToolEffectRecord,
)

from perdure import MemoryStore, Message
from perdure.adapters.pydantic_ai_harness import PerdureStepStore

STEPS = 5_000 if os.environ.get("PERDURE_TORTURE") else 300


class LockStep:
    """The same operations on two stores: each must return the same."""

    def __init__(self, ours: PerdureStepStore) -> None:
        self.stores = (InMemoryStepStore(), ours)
        self.chance = random.Random(1)
        self.at = datetime(2026, 1, 2, tzinfo=UTC)
        self.histories: dict[str, list[ModelMessage]] = {}

    async def both(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        theirs, ours = [await getattr(store, verb)(*args, **kwargs) for store in self.stores]
        assert theirs == ours, verb
        return ours

    async def step(self) -> None:
        run = f"run {self.chance.randrange(6)}"
        self.at += timedelta(seconds=1)
        kind = self.chance.randrange(6)
        key = self.chance.choice([None, f"{self.chance.randrange(5)}:x", "7:y", "plain"])
        if kind == 0:
            group = self.chance.choice([None, "c" * 300])
            record = RunRecord(run_id=run, conversation_id=group, parent_run_id=self.chance.choice([None, "run 0"]))
            await self.both("register_run", replace(record, started_at=self.at, metadata={"a": "b"}))
        elif kind == 1:
            event = StepEvent(run_id=run, kind="run_started", step_index=1, timestamp=self.at, idempotency_key=key)
            await self.both("append_event", event)
        elif kind == 2:
            status = self.chance.choice(["started", "completed"])
            call = f"call {self.chance.randrange(3)}"
            effect = ToolEffectRecord(tool_call_id=call, tool_name="t", run_id=run, status=status, started_at=self.at)
            await self.both("record_tool_effect", effect)
        else:
            await self.both("save_snapshot", self.snapshot(run, key))
        await self.same(run)

    def snapshot(self, run: str, key: str | None) -> ContinuableSnapshot:
        history = self.histories.setdefault(run, [])
        if self.chance.random() < 0.2:
            del history[self.chance.randrange(len(history) + 1) :]
        said = ModelResponse(parts=[TextPart("b"), ToolCallPart("t", '{"x":  1}', "c")], timestamp=self.at)
        history += [ModelRequest(parts=[UserPromptPart("a", timestamp=self.at)]), said]
        state = self.chance.choice(["complete", "interrupted"])
        made = ContinuableSnapshot(run_id=run, step_index=2, messages=list(history), timestamp=self.at)
        return replace(made, state=state, idempotency_key=key, agent_name="x")

    async def same(self, run: str) -> None:
        for verb in ("get_run", "list_events", "latest_snapshot", "list_unresolved_tool_effects"):
            await self.both(verb, run_id=run)
        await self.both("latest_snapshot", run_id=run, include_interrupted=True)
        await self.both("get_tool_effect", run_id=run, tool_call_id="call 1")
        await self.both(
            "list_runs", **self.chance.choice([{}, {"parent_run_id": "run 0"}, {"conversation_id": "c" * 300}])
        )


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_it_keeps_step_with_the_harness(kind: str, tmp_path: Path) -> None:
    """Random operations have the same outcome as in the store in memory."""
    ours = PerdureStepStore(store=MemoryStore() if kind == "memory" else f"sqlite:///{tmp_path}/a.db")
    assert isinstance(ours, StepStore)

    async def play() -> None:
        steps = LockStep(ours)
        for _ in range(STEPS):
            await steps.step()

    asyncio.run(play())


async def test_a_run_is_kept_and_continued() -> None:
    """An agent with `StepPersistence` leaves a run that perdure shows, and continues from perdure's changes."""
    store = PerdureStepStore(store=MemoryStore())
    agent = Agent(TestModel(), capabilities=[StepPersistence(store=store)])

    @agent.tool_plain
    def look() -> str:
        return "seen"

    await agent.run("Hello")
    (record,) = await store.list_runs()
    kinds = [event.kind for event in await store.list_events(run_id=record.run_id)]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_completed")
    assert await store.list_unresolved_tool_effects(run_id=record.run_id) == []
    chat = store.chat(record.run_id)
    assert (await chat.session()).state.messages[0].text == "Hello"
    await chat.inject(Message.user("And?"))
    snapshot = await store.latest_snapshot(run_id=record.run_id)
    assert snapshot is not None
    assert snapshot.messages[-1].parts[0].content == "And?"  # type: ignore[union-attr]
    assert (await agent.run(message_history=snapshot.messages)).output
