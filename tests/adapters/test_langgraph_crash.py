"""Runs of LangGraph that race each other, and processes that are killed during a run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph")

from tests import postgres_server
from tests.adapters import langgraph_process
from tests.adapters.graphs import agent, answering, at, said, texts

from perdure import MemoryStore, PostgresStore, SessionConflict, SqliteStore
from perdure.adapters.langgraph import PerdureSaver
from perdure.archive import fsck
from perdure.protocols import SessionStore

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
RACES = 100 if TORTURE else 5
KILLS = 50 if TORTURE else 4


def store_of(kind: str, where: Path) -> SessionStore:
    if kind == "postgres":
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
    return SqliteStore(where / "a.db") if kind == "sqlite" else MemoryStore()


@pytest.mark.sample(3)
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_what_is_acknowledged_is_never_lost_in_a_race(tmp_path: Path, kind: str, durability: Any) -> None:
    """Four runs start at once on one thread; in every round, those that return have their words in it."""
    saver = PerdureSaver(store=store_of(kind, tmp_path))
    graph = agent(saver, racing)
    acknowledged: list[str] = []
    for round_ in range(RACES):
        words = [f"round {round_} run {number}" for number in range(4)]
        runs = (graph.ainvoke(said(word), at("t"), durability=durability) for word in words)
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(end, dict | SessionConflict) for end in ends), ends
        acknowledged += [word for word, end in zip(words, ends, strict=True) if isinstance(end, dict)]
        found = texts((await graph.aget_state(at("t"))).values)
        assert [word for word in acknowledged if word not in found] == []
    assert len(acknowledged) >= RACES
    saver._home.shared.close()


async def racing(state: Any) -> dict[str, Any]:
    await asyncio.sleep(random.random() / 500)
    return answering(state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(2))
async def test_a_killed_graph_goes_on(tmp_path: Path, seed: int) -> None:
    """Wherever SIGKILL strikes, every acknowledged turn is in the history, and the graph continues from there."""
    url = f"sqlite:///{tmp_path}/a.db"
    chance, acknowledged, first = random.Random(seed), list[int](), 0
    for _ in range(KILLS // 2):
        turns = await asyncio.to_thread(run_and_kill, url, first, chance.random() * 0.15)
        acknowledged += turns
        first = max([first, *turns]) + 10
        graph = langgraph_process.graph_at(url)
        state = await graph.aget_state(at("t"))
        if state.next:
            await graph.ainvoke(None, at("t"))
        told = await graph.ainvoke(said("And?"), at("t"))
        assert [turn for turn in acknowledged if f"Answer to turn {turn}" not in texts(told)] == []
        assert texts(told)[-1] == "Answer to And?"
        assert len([each async for each in graph.aget_state_history(at("t"))]) > 3
        graph.checkpointer._home.shared.close()
    async with SqliteStore(tmp_path / "a.db") as store:
        assert [problem async for problem in problems_of(store)] == []


async def problems_of(store: SqliteStore):
    for problem in (await fsck(store)).problems:
        yield problem


def run_and_kill(url: str, first: int, delay: float) -> list[int]:
    """Start a process that takes turns, and kill it after a while. Return the turns that it has acknowledged."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, langgraph_process.__file__, url, "t", str(first)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        return [int(line) for line in process.stdout.read().split()]
