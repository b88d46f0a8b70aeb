"""Processes killed with SIGKILL while a tool of an MCP server is called, and another that continues from the record."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from tests.crash import mcp_process
from tests.crash.addresses import address_of, store_at
from tests.crash.test_kill import check, results_of, run_and_kill
from tests.loop.mcp.scene import lines_of

import perdure
from perdure import ApproveToolCalls, ConfigurationError, LoopFactory, SessionRuntime, recover
from perdure.testing import ScriptedDriver

ROUNDS, SEEDS = (60, 3) if os.environ.get("PERDURE_TORTURE") else (2, 1)


async def killed(database: str, ledger: Path, session_id: str, delay: float, how: str = "send") -> bool:
    return await asyncio.to_thread(run_and_kill, database, ledger, session_id, delay, how, program=mcp_process.__file__)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_killed_run_repeats_no_completed_call(tmp_path: Path, seed: int) -> None:
    """Wherever SIGKILL strikes, no completed call is made again, and an unknown one only if the server allows it."""
    chance = random.Random(seed)
    database = address_of("sqlite", tmp_path)
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        for number in range(ROUNDS):
            ledger = tmp_path / f"ledger-{number}"
            session = await runtime.create(mcp_process.AGENT)
            finished = await killed(database, ledger, session.id, chance.random() * 0.12)
            began = bool(await store.read(session.id))
            loops = mcp_process.loops(str(ledger))
            try:
                assert (await recover(runtime, loops)).failed == ()
            finally:
                await loops.aclose()
            kept = await runtime.get_session(session.id)
            if finished or began:
                check(kept, ledger)
            else:
                assert kept.version == 1
            assert await store.lapsed() == []


async def test_a_run_waits_until_its_server_can_be_reached(tmp_path: Path) -> None:
    """Recovery without the server, or with one that does not start, leaves the run alone; `ask` then asks a person."""
    database, ledger = address_of("sqlite", tmp_path), tmp_path / "ledger"
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(mcp_process.AGENT)
        assert not await killed(database, ledger, session.id, 1.0, "slow")
        assert lines_of(ledger)[0] == "slow begun"

        broken = LoopFactory(tools=[perdure.mcp("no-such-command")], driver=ScriptedDriver(["done"]))
        report = await recover(runtime, broken)
        assert isinstance(report.errors[0], ConfigurationError)
        assert "no-such-command" in report.failed[0][1]
        assert await store.lapsed() == [session.id]
        (without,) = (await recover(runtime, LoopFactory(driver=ScriptedDriver(["done"])))).errors
        assert isinstance(without, ConfigurationError)
        assert without.missing == "tool"
        assert await store.lapsed() == [session.id]

        asking = mcp_process.loops(str(ledger), "slow", on_unknown={"slow": "ask"}, timeout=1.0)
        try:
            assert (await recover(runtime, asking)).suspended == (session.id,)
            assert lines_of(ledger).count("slow begun") == 1
            after = await runtime.execute(session.id, ApproveToolCalls(asking))
        finally:
            await asking.aclose()
        assert lines_of(ledger).count("slow begun") == 2
        assert results_of(after) == {"c1": True}  # it takes longer than its time-out


async def test_an_unknown_call_is_told_to_the_model(tmp_path: Path) -> None:
    """It is not repeated unless the server says that it may be."""
    database, ledger = address_of("sqlite", tmp_path), tmp_path / "ledger"
    async with store_at(database) as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(mcp_process.AGENT)
        assert not await killed(database, ledger, session.id, 1.0, "slow")
        loops = mcp_process.loops(str(ledger), "slow")
        try:
            assert (await recover(runtime, loops)).resumed == (session.id,)
        finally:
            await loops.aclose()
        kept = await runtime.get_session(session.id)
        (result,) = [result for message in kept.state.messages for result in message.tool_results]
        assert result.text.startswith("OutcomeUnknown: ")
        assert lines_of(ledger).count("slow begun") == 1
