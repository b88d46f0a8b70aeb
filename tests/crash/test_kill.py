"""Real processes killed with SIGKILL in the middle of a run, and another that continues from the record."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.crash import agent_process
from tests.crash.addresses import address_of, store_at, wait_for_server

from perdure import AgentSession, ExecutionStatus, SessionRuntime, recover
from perdure.archive import fsck
from perdure.loop.prompt import compile_prompt

ROUNDS = 500 if os.environ.get("PERDURE_TORTURE") else 30
SEEDS = 10


def run_and_kill(
    database: str,
    ledger: Path,
    session_id: str,
    delay: float,
    how: str = "send",
    program: str = agent_process.__file__,
) -> bool:
    """Start the agent in a process of its own and kill it after a while. Return True if it had finished."""
    command = [sys.executable, program, database, str(ledger), session_id, how]
    name = f"killed {session_id}"
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PGAPPNAME": name}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        finished = process.stdout.readline() == "done\n"
    wait_for_server(database, name)
    return finished


def results_of(session: AgentSession) -> dict[str, bool]:
    """Return the tool results in a transcript: call id → whether it is an error."""
    found = [result for message in session.state.messages for result in message.tool_results]
    assert len({result.call_id for result in found}) == len(found), "a call has two results"
    return {result.call_id: result.is_error for result in found}


def check(session: AgentSession, ledger: Path) -> None:
    """Check every promise about a recovered run."""
    assert session.state.status is ExecutionStatus.COMPLETED
    assert session.state.final_response is not None
    assert session.state.final_response.text == "done"
    assert [m.text for m in session.state.messages if m.role == "user"] == ["Do it."]
    results = results_of(session)
    assert set(results) == {"c1", "c2", "c3", "c4", "c5"}
    ledgered = Counter(ledger.read_text().splitlines()) if ledger.exists() else Counter()
    for call_id, line in {"c2": "charge 2", "c4": "charge 4", "c5": "charge 5"}.items():
        assert ledgered[line] <= 1, f"{call_id} was made twice"
        if not results[call_id]:
            assert ledgered[line] == 1
    for call_id, line in {"c1": "note one", "c3": "note three"}.items():
        assert not results[call_id]
        assert ledgered[line] >= 1
    assert {m.id for m in compile_prompt(session.state.messages)} == {m.id for m in session.state.messages}


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "seed"), [*(("sqlite", n) for n in range(SEEDS)), ("postgres", 0), ("postgres", 1)])
async def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, kind: str, seed: int) -> None:
    """Wherever SIGKILL strikes, the run ends, no completed tool runs twice, and no unknown outcome is repeated."""
    chance = random.Random(seed)
    database = address_of(kind, tmp_path)
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        for number in range(ROUNDS // SEEDS):
            ledger = tmp_path / f"ledger-{number}"
            session = await runtime.create(agent_process.AGENT)
            finished = await asyncio.to_thread(
                run_and_kill, database, ledger, session.id, chance.choice((0.0, 0.03)) + chance.random() * 0.03
            )
            began = bool(await store.read(session.id))
            report = await recover(runtime, agent_process.loops(str(ledger)))
            assert report.failed == ()
            kept = await runtime.get_session(session.id)
            if finished or began:
                check(kept, ledger)
            else:
                assert kept.version == 1
            assert await store.lapsed() == []
        assert (await fsck(store)).problems == ()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "seed"), [*(("sqlite", n) for n in range(SEEDS // 2)), ("postgres", 0)])
async def test_a_killed_parallel_evaluation_goes_on(tmp_path: Path, kind: str, seed: int) -> None:
    """Completed branches stay, the others continue, one is selected, and no branch repeats a charge."""
    chance = random.Random(seed)
    database = address_of(kind, tmp_path)
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        for number in range(ROUNDS // SEEDS):
            ledger = tmp_path / f"ledger-{number}"
            session = await runtime.create(agent_process.AGENT)
            delay = chance.choice((0.0, 0.02)) + chance.random() * 0.03
            await asyncio.to_thread(run_and_kill, database, ledger, session.id, delay, "parallel")
            began = bool(await store.read(session.id))
            report = await recover(runtime, agent_process.loops(str(ledger), agent_process.branch_reply))
            assert report.failed == ()
            kept = await runtime.get_session(session.id)
            if not began:
                assert kept.version == 1
                continue
            assert kept.state.final_response is not None
            assert kept.state.final_response.text == "done by b, at length"
            assert [m.text for m in kept.state.messages if m.role == "user"] == ["Do it."]
            charges = Counter(line for line in ledger.read_text().splitlines() if line.startswith("charge"))
            assert max(charges.values(), default=0) <= 1
            record = await runtime.record(session.id)
            assert [loop.parallel_group.is_selected for loop in record.loops if loop.parallel_group] == [False, True]
            assert await store.lapsed() == []
        assert (await fsck(store)).problems == ()
