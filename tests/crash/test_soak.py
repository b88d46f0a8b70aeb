"""A day of work in minutes: the resources of processes and files stay flat, and every conversation is right.

24 hours are simulated by 100,000 turns in torture (`PERDURE_SOAK_TURNS` names another number). Every half hour a
worker is killed and replaced, every hour the process that talks closes its store and opens it again, and workers erase
sessions that nobody has talked to for an hour.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
from tests.crash import soak_process
from tests.crash.addresses import KINDS, NAMES, address_of, store_at
from tests.crash.soak_process import Measured, Task

from perdure.archive import fsck
from perdure.testing.outcomes import Outcome, note

HOURS = 24
TURNS = int(os.environ.get("PERDURE_SOAK_TURNS", 100_000 if os.environ.get("PERDURE_TORTURE") else 120))
ENOUGH = 20_000
"""Turns after which a leak can be distinguished from a process that warms up."""
IS_LONG = TURNS >= ENOUGH
ATTACK = "24 simulated hours, workers killed" if IS_LONG else "a short soak, workers killed"
CONTROL = "workers keep what they read, nothing is erased" if IS_LONG else ""


class Process:
    """A process of the soak, and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.told: list[Measured] = []
        self.listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, role: str, task: Task) -> Process:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, soak_process.__file__, role, msgspec.json.encode(task).decode()),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return cls(started)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.told.append(msgspec.json.decode(line, type=Measured))

    @property
    def turns(self) -> int:
        return self.told[-1].turns if self.told else 0

    async def end(self, number: int = signal.SIGTERM) -> int:
        # Not `send_signal`: it may reap a process that has just ended, and asyncio then reports 255 for it.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
        await self.listening
        return await self._process.wait()


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of the store's files at the end of an hour, in bytes."""

    store: int
    log: int

    @classmethod
    def of(cls, directory: Path) -> Sizes:
        files = {path.name: path.stat().st_size for path in directory.glob("sessions.db*")}
        log = sum(size for name, size in files.items() if name.endswith("-wal"))
        return cls(sum(files.values()) - log, log)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_day_of_work_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    """Memory, handles, threads and files stay as in earlier hours, and every conversation is right."""
    began = time.monotonic()
    task = Task(address=address_of(kind, tmp_path), turns=TURNS, hour=TURNS // HOURS)
    async with store_at(task.address):
        pass
    lasting, talking, kills, sizes = await _day(task, tmp_path)
    wrong = [each.wrong for each in talking.told if each.wrong]
    async with store_at(task.address) as store:
        wrong += [str(problem) for problem in (await fsck(store)).problems]
    wrong += _left_behind(lasting, talking, sizes) if IS_LONG else []
    failures = len(wrong)
    note(Outcome(attack=ATTACK, store=NAMES[kind], rounds=talking.turns, failures=failures, control=CONTROL))
    took = time.monotonic() - began
    print(f"{kind}: {talking.turns} turns, {kills} kills, {took:.0f} s; {_told(lasting)}; {sizes[-1:]}")
    assert wrong == []
    assert talking.turns == TURNS
    assert kills >= HOURS if IS_LONG else kills >= 1


@pytest.mark.skipif(not IS_LONG, reason="make torture plays it")
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_behind_is_found(tmp_path: Path, kind: str) -> None:
    """The control, one shorter day: workers keep what they read, and nothing is ever erased."""
    task = Task(address=address_of(kind, tmp_path), turns=ENOUGH, hour=ENOUGH // HOURS, leaks=True, keep=1e6)
    async with store_at(task.address):
        pass
    lasting, talking, _, sizes = await _day(task, tmp_path)
    found = _left_behind(lasting, talking, sizes)
    counts = {"control_rounds": 1, "control_failures": int(bool(found))}
    note(Outcome(attack=ATTACK, store=NAMES[kind], rounds=0, failures=0, control=CONTROL, **counts))
    assert any("a worker: memory" in each for each in found)
    assert any("store: " in each for each in found) or kind == "postgres"


async def _day(task: Task, directory: Path) -> tuple[Process, Process, int, list[Sizes]]:
    """Play the day. Return the worker that was never harmed, the process that talked, the kills, and files' sizes."""
    lasting, mortal = await asyncio.gather(*(Process.start("work", task) for _ in range(2)))
    talking = await Process.start("talk", task)
    chance, kills, sizes, between = random.Random(7), 0, list[Sizes](), 0.5 if IS_LONG else 8
    try:
        while not talking.listening.done():
            await asyncio.sleep(0.02)
            if talking.turns >= (kills + 1) * task.hour * between:
                await asyncio.sleep(chance.random() / 4)
                await mortal.end(signal.SIGKILL)
                mortal, kills = await Process.start("work", task), kills + 1
            if talking.turns >= (len(sizes) + 1) * task.hour:
                sizes.append(Sizes.of(directory))
        assert await talking.end() == 0
    finally:
        ended = await asyncio.gather(talking.end(signal.SIGKILL), lasting.end(), mortal.end())
    assert ended[1] == 0
    assert ended[2] in (0, -signal.SIGTERM)  # a new one may not listen yet
    return lasting, talking, kills, sizes


def _left_behind(lasting: Process, talking: Process, sizes: list[Sizes]) -> list[str]:
    """Return what has grown in the last hours."""
    client = [each for each in talking.told if each.memory]
    return [*_grown(lasting.told, "a worker"), *_grown(client, "a client"), *_grown_files(sizes)]


def _grown(told: list[Measured], who: str) -> list[str]:
    """Compare the last third of a day with the second: the first warms up."""
    third = len(told) // 3
    middle, last = told[third : 2 * third], told[-third:]
    found = []
    for what, allowed in (("memory", 1.1), ("handles", 1.15), ("threads", 1.15)):
        before, after = (mean(getattr(each, what) for each in some) for some in (middle, last))
        if after > before * allowed:
            found.append(f"{who}: {what} went from {before:.0f} to {after:.0f}")
    return found


def _grown_files(sizes: list[Sizes]) -> list[str]:
    third = len(sizes) // 3
    middle, last = sizes[third : 2 * third], sizes[-third:]
    found = []
    for what in ("store", "log"):
        before, after = (max(getattr(each, what) for each in some) for some in (middle, last))
        if after > before * 1.15:
            found.append(f"{what}: {before} bytes at most, then {after}")
    return found


def _told(process: Process) -> Any:
    return [process.told[place] for place in (len(process.told) // 3, -1)] if process.told else "nothing was told"
