"""Worker processes that are killed, stopped, asked to end and cut off from their database while they work.

Whatever happens, each message is answered once and in order, no call is repeated, and a run is taken over in time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests import postgres_server
from tests.crash.addresses import address_of
from tests.crash.worker_chaos import ATTACKS, BEYOND, Attack, Stage, Victim, chaos, stage, take_overs, told
from tests.crash.worker_process import Task

LONGER = 2.0
"""Seconds beyond its lease until a run is taken over at the latest, on a quiet machine."""
IS_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
SIZE = {"sessions": 500, "messages": 4, "workers": 8} if IS_TORTURE else {"sessions": 40, "messages": 3, "workers": 4}
"""The amount of work while workers are killed; only torture plays the other attacks in full."""
SMALL = SIZE if IS_TORTURE else {"sessions": 12, "messages": 2, "workers": 3, "lease": 2.0}
EVERY = (1.0, 2.0) if IS_TORTURE else (0.9, 1.1)
TIMES = 1_000_000 if IS_TORTURE else 4
"""The most attacks on workers: torture does not end before all is done."""
PATIENCE = 600.0 if IS_TORTURE else 60.0
needs_torture = pytest.mark.skipif(not IS_TORTURE, reason="make torture plays it")


def task_of(address: str, where: Path, *, sessions: int, messages: int, lease: float, **more: Any) -> Task:
    return Task(
        address=address,
        ledger=str(where / "ledger"),
        sessions=[f"s{number:03}" for number in range(sessions)],
        messages=messages,
        thinks=0.1,
        options={"lease": lease, "concurrency": 3, "drain": 0.3, "tries": 100},  # no run is to be parked here
        **more,
    )


async def attacked(
    attack: Attack,
    address: str,
    where: Path,
    *,
    workers: int,
    lease: float = 6.0 if IS_TORTURE else 3.0,
    every: tuple[float, float] = EVERY,
    remote: bool = False,
    **task: Any,
) -> Stage:
    """Attack workers until all is done. Nothing may be wrong then, and no run may have waited for too long."""
    async with stage(task_of(address, where, lease=lease, **task), remote=remote) as on:
        wrong = await chaos(on, attack, workers=workers, every=every, times=TIMES, patience=PATIENCE)
        found = take_overs(on)
        print(f"{len(on.harms)} attacks, {told(found)}; slowness {on.slowness:.1f}")
        assert wrong == []
        # A stopped worker may hold the lock of a file, which nobody else can write until it is woken. So a run that
        # another has lost waits for that, too; most do not.
        # another has lost waits for that, too; most do not.
        stopped = lease + BEYOND if attack is ATTACKS["stop"] and "://" not in address else 0.0
        soon = lease + LONGER * on.slowness
        assert found == [] or (found[-1] <= soon + stopped and median(found) <= soon), told(found)
    return on


def places(*quick: str) -> Any:
    """Return stores with a dispatcher: those of `quick` are always played, the others by torture."""
    every = ("sqlite-inbox", "postgres-procrastinate", "postgres-inbox", "files-inbox")
    return pytest.mark.parametrize("place", [pytest.param(e, marks=() if e in quick else needs_torture) for e in every])


def at(place: str, where: Path) -> dict[str, Any]:
    kind, dispatcher = place.split("-")
    return {"address": address_of(kind, where), "where": where, "dispatcher": dispatcher}


@places("sqlite-inbox")
async def test_workers_that_are_killed(tmp_path: Path, place: str) -> None:
    """A worker is killed in the middle of its work, again and again, and another is started in its place."""
    on = await attacked(ATTACKS["kill"], **at(place, tmp_path), **SIZE)
    assert len(on.harms) >= 3
    assert take_overs(on)


@places("postgres-inbox")
async def test_workers_on_other_machines_that_are_killed(tmp_path: Path, place: str) -> None:
    """Nobody can see there that their processes are gone: their leases run out."""
    on = await attacked(ATTACKS["kill"], **at(place, tmp_path), **SMALL, remote=True)
    assert take_overs(on)


@places("postgres-procrastinate")
async def test_workers_that_are_stopped_beyond_their_lease(tmp_path: Path, place: str) -> None:
    """Others do their work. The stopped workers write nothing more when they are woken."""
    on = await attacked(ATTACKS["stop"], **at(place, tmp_path), **SMALL, every=(0.5, 1.5))
    assert take_overs(on)


@places("sqlite-inbox")
async def test_workers_that_are_asked_to_end(tmp_path: Path, place: str) -> None:
    """Others continue the runs that they cannot end in time."""
    on = await attacked(ATTACKS["term"], **at(place, tmp_path), **SMALL)
    assert on.harms


@pytest.fixture
def own_server() -> Iterator[Any]:
    """A server that this test may restart."""
    home = Path(tempfile.mkdtemp(prefix="perdure-restarted-")) / "data"
    server = postgres_server.start(home, settings="fsync = off\nmax_connections = 200\n")
    yield server
    server.cleanup()
    shutil.rmtree(home.parent, ignore_errors=True)


@needs_torture
@pytest.mark.parametrize("dispatcher", ["inbox", "procrastinate"])
async def test_a_database_that_is_restarted(tmp_path: Path, own_server: Any, dispatcher: str) -> None:
    """Workers wait until the database is back."""

    async def restarts(on: Stage, _: Victim) -> None:
        if len(on.harms) < 3:
            on.note("database")
            await asyncio.to_thread(own_server.stop)
            await asyncio.sleep(on.chance.uniform(0.2, 2.0))
            await asyncio.to_thread(own_server.start)

    address = address_of("postgres", tmp_path, own_server.get_uri())
    await attacked(restarts, address, tmp_path, **SMALL, every=(4.0, 6.0), dispatcher=dispatcher)
