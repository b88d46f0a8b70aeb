"""A backup, a restore and a repair killed at random instants: what was whole stays so, and the next run ends it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests import postgres_server
from tests.crash import backup_process
from tests.crash.addresses import NAMES
from tests.crash.backup_process import closed

from perdure import AgentDefinition, InjectMessage, Message, SessionRuntime
from perdure.archive import fsck, repair
from perdure.backups import backup, list_backups, restore, verify_backups
from perdure.errors import RestoreUnfinished
from perdure.testing.outcomes import Outcome, note

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
ROUNDS = {"sqlite": 200, "file": 200, "postgres": 200} if TORTURE else {"sqlite": 4, "file": 3, "postgres": 2}


class Children:
    """The process that forks for each round."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.took = 0.5

    async def run(self, *job: str, kill_after: float | None = None) -> list[str]:
        """Do a job in a child, which is killed after a while. Return its output."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        child = int((await self._line()).removeprefix("child "))
        began = time.monotonic()
        if kill_after is not None:
            asyncio.get_running_loop().call_later(kill_after, _kill, child)
        said: list[str] = []
        while (line := await self._line()) != f"ended {child}":
            said.append(line)
        if kill_after is None:
            self.took = time.monotonic() - began
        return said

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        assert line, "the process has ended; its error output says why"
        return line.decode().strip()


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):  # it was done before
        os.kill(child, signal.SIGKILL)


@asynccontextmanager
async def children() -> AsyncIterator[Children]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, backup_process.__file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield Children(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def prepared(kind: str, where: Path) -> Path:
    """Make a directory for a store, with a file that names its schema of PostgreSQL."""
    where.mkdir(parents=True, exist_ok=True)
    if kind == "postgres":
        (where / "postgres").write_text(f"{postgres_server.dsn()}\n{postgres_server.schema_of(where)}\n")
    return where


async def filled(kind: str, where: Path) -> None:
    async with closed(kind, prepared(kind, where)) as store:
        runtime = SessionRuntime(store)
        for name in ("s", "t", "u"):
            await runtime.create(AgentDefinition("talker"), session_id=name)
            said = [Message.user(random.Random(name).randbytes(20_000).hex()) for _ in range(20)]
            await runtime.execute(name, InjectMessage(*said))


async def version_of(store: Any, session_id: str) -> int:
    session = await store.load(session_id)
    assert session is not None
    return int(session.version)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ROUNDS)
async def test_a_killed_backup_leaves_the_others_whole(kind: str, tmp_path: Path) -> None:
    """Every backup that was reported is there and can be restored; the next one clears up."""
    where, target = tmp_path / "a", tmp_path / "backups"
    await filled(kind, where)
    rng, failures = random.Random(7), 0
    async with children() as process:
        (first,) = await process.run("backup", kind, str(where), str(target))
        reported = first.split()[1:]
        for _ in range(ROUNDS[kind]):
            said = await process.run(
                "backup", kind, str(where), str(target), kill_after=rng.uniform(0, process.took * 1.2)
            )
            reported = said[-1].split()[1:] if said else reported
            found = await verify_backups(target)
            whole = {each.id for each in found.backups}
            failures += bool(not found.is_sound or reported[0] not in whole)
        await process.run("backup", kind, str(where), str(target))
    assert list((target / "unfinished").iterdir()) == []
    assert 1 < len(await list_backups(target)) <= backup_process.KEPT
    report = await restore(target, closed(kind, prepared(kind, tmp_path / "b")), verify=True)
    assert report.problems == ()
    async with closed(kind, tmp_path / "b") as store:
        assert await version_of(store, "s") > int(reported[1])
    note(Outcome(attack="kill during backup", store=NAMES[kind], rounds=ROUNDS[kind], failures=failures))
    assert failures == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ROUNDS)
async def test_a_killed_restore_never_looks_whole(kind: str, tmp_path: Path) -> None:
    """It has not begun, or opening it raises RestoreUnfinished, or it is complete; repeated, it succeeds."""
    where, target = tmp_path / "a", tmp_path / "backups"
    await filled(kind, where)
    async with closed(kind, where) as store:
        await backup(store, target)
    rng, failures, unfinished = random.Random(9), 0, 0
    async with children() as process:
        await process.run("restore", kind, str(prepared(kind, tmp_path / "whole")), str(target))
        for number in range(ROUNDS[kind]):
            place = prepared(kind, tmp_path / f"round-{number}")
            said = await process.run(
                "restore", kind, str(place), str(target), kill_after=rng.uniform(0, process.took * 1.2)
            )
            try:
                async with closed(kind, place) as store:
                    found = len(await store.list())
                    failures += found not in ((3,) if said else (0, 3))
            except RestoreUnfinished:
                unfinished += 1
                failures += bool(said)
                found = 0
            if found == 0:
                is_last = number >= ROUNDS[kind] - 2
                report = await restore(target, closed(kind, place), verify=is_last)
                failures += bool(report.problems)
                async with closed(kind, place) as store:
                    failures += await version_of(store, "t") != 2
            if kind == "postgres":
                postgres_server.drop(postgres_server.dsn(), [postgres_server.schema_of(place)])
            shutil.rmtree(place)
    note(Outcome(attack="kill during restore", store=NAMES[kind], rounds=ROUNDS[kind], failures=failures))
    assert failures == 0
    assert unfinished or not TORTURE


DAMAGES = (
    "UPDATE session SET owner = 'eve', agent = 'nobody'",
    "DELETE FROM uses",
    "DROP INDEX session_by_agent_shelf",
    "UPDATE sqlite_sequence SET seq = 1",
)


async def test_a_killed_repair_can_be_repeated(tmp_path: Path) -> None:
    """Its repairs stay, nothing else is wrong, and the next repair finishes the rest."""
    rounds = 200 if TORTURE else 3
    await filled("sqlite", tmp_path / "original")
    damaged = apsw.Connection(str(tmp_path / "original" / "sessions.db"))
    for statement in DAMAGES:
        damaged.execute(statement)
    damaged.close()
    async with closed("sqlite", tmp_path / "original") as store:
        known = {(each.session_id, each.where) for each in (await fsck(store)).problems}
    rng, failures = random.Random(13), 0
    async with children() as process:
        shutil.copytree(tmp_path / "original", tmp_path / "whole")
        await process.run("repair", "sqlite", str(tmp_path / "whole"), "")
        for number in range(rounds):
            place = tmp_path / f"round-{number}"
            shutil.copytree(tmp_path / "original", place)
            await process.run("repair", "sqlite", str(place), "", kill_after=rng.uniform(0, process.took))
            async with closed("sqlite", place) as store:
                found = {(each.session_id, each.where) for each in (await fsck(store)).problems}
                failures += bool(found - known) or not (await repair(store)).is_sound
                failures += await version_of(store, "t") != 2
            shutil.rmtree(place)
    note(Outcome(attack="kill during repair", store="SQLite", rounds=rounds, failures=failures))
    assert failures == 0
