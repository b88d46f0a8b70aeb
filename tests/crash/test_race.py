"""Processes that want the same session at once: one runs it, and one that was stopped and woken writes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.crash import racing_process
from tests.crash.addresses import KINDS, address_of, store_at
from tests.loop.scenes import loops_of

from perdure import AgentDefinition, RunInterrupted, SendMessage, SessionRuntime, recover
from perdure.testing import ScriptedDriver

ROUNDS = 200 if os.environ.get("PERDURE_TORTURE") else 20
AGENT = AgentDefinition("agent")


class Racer:
    """A process of `racing_process` that follows the test's orders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, session_id: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{session_id}\n".encode())
        return await self.answer()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 30))


@asynccontextmanager
async def racers(database: str, how: str, count: int) -> AsyncIterator[list[Racer]]:
    started = [Racer(await _start(database, how)) for _ in range(count)]
    try:
        for racer in started:
            assert await racer.answer() == "ready"
        yield started
    finally:
        for racer in started:
            racer.process.kill()
            await racer.process.wait()


async def _start(database: str, how: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(racing_process.__file__, database, how),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_of_two_processes_one_runs_a_session(tmp_path: Path, kind: str) -> None:
    """The other gets an error before it has called its model."""
    database = address_of(kind, tmp_path)
    refusals: set[str] = set()
    async with store_at(database) as store, racers(database, "race", 2) as pair:
        runtime = SessionRuntime(store)
        for _ in range(ROUNDS):
            session = await runtime.create(AGENT)
            said = await asyncio.gather(*(racer.ask(session.id) for racer in pair))
            assert said.count("asked") == 1
            winner, refused = pair[said.index("asked")], said[1 - said.index("asked")]
            assert refused["calls"] == 0
            refusals.add(refused["error"])
            assert await winner.ask("go on") == {"error": None, "calls": 1}
            after = await runtime.get_session(session.id)
            assert (after.version, [m.text for m in after.state.messages]) == (2, ["Hi", "Hello."])
            assert not await store.is_claimed(session.id)
    assert refusals <= {"SessionBusy", "SessionConflict"}


async def has_lapsed(store: Any, session_id: str) -> None:
    async with asyncio.timeout(30):
        while await store.is_claimed(session_id):  # noqa: ASYNC110 (it lapses by itself, and nobody tells)
            await asyncio.sleep(racing_process.LEASE / 10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_process_that_was_stopped_and_taken_over_is_fenced_off(tmp_path: Path, kind: str) -> None:
    """Woken again, it cannot append, keep its claim alive, or save; nothing of its attempts is there."""
    database = address_of(kind, tmp_path)
    async with store_at(database) as store, racers(database, "hold", 1) as (holder,):
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        await holder.ask(session.id)
        holder.process.send_signal(signal.SIGSTOP)
        await has_lapsed(store, session.id)
        loops = loops_of(ScriptedDriver(["Hello."]))
        with pytest.raises(RunInterrupted):
            await runtime.execute(session.id, SendMessage("Hi", loops))
        await recover(runtime, loops)
        after = await runtime.execute(session.id, SendMessage("Hi", loops))
        record = await store.read(session.id)
        holder.process.send_signal(signal.SIGCONT)
        refused = dict.fromkeys(("append", "branch", "heartbeat", "save"), "ClaimLost")
        assert await holder.ask(session.id) == refused
        assert await runtime.get_session(session.id) == after
        assert await store.read(session.id) == record


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stopped_process_cannot_write_while_another_runs(tmp_path: Path, kind: str) -> None:
    """The new claim stays; the old holder is refused in the middle of its run."""
    database = address_of(kind, tmp_path)
    async with store_at(database) as store, racers(database, "hold", 1) as (holder,):
        session = await SessionRuntime(store).create(AGENT)
        await holder.ask(session.id)
        holder.process.send_signal(signal.SIGSTOP)
        await has_lapsed(store, session.id)
        claim, _ = await store.claim(session.id, version=1, owner="successor", take_over=True)
        holder.process.send_signal(signal.SIGCONT)
        assert set((await holder.ask(session.id)).values()) == {"ClaimLost"}
        await store.append(claim)
        assert (await store.save(session, claim=claim)).version == 2
        assert await store.read(session.id) == []
