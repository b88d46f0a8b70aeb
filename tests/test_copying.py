"""A copy of a whole store: the same sessions, between any two stores."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import apsw
import pytest
from tests import stories
from tests.crash import agent_process, copying_process
from tests.stories import KINDS, account, ledger_loops, opened

from perdure import (
    CorruptRecord,
    LongestAnswer,
    MemoryStore,
    SendParallel,
    SessionConflict,
    SessionRuntime,
    SqliteStore,
    StoreError,
    recover,
)
from perdure.archive import copy, fsck
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock
from perdure.testing.samples import new_session, texts

PAIRS = [(source, target) for source in KINDS for target in KINDS]
if not os.environ.get("PERDURE_TORTURE"):
    PAIRS = PAIRS[::3]  # they copy from and to every kind


@pytest.mark.sample(2)
@pytest.mark.parametrize(("one", "other"), PAIRS)
async def test_a_copy_tells_what_its_original_tells(tmp_path: Path, one: str, other: str) -> None:
    """Versions, views, records, events, keys, inbox, tags and links are the same; a second copy skips all."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(one, tmp_path / "one") as source, opened(other, tmp_path / "other") as target:
            await stories.tell(source, clock)
            expected = await account(source)
            seen: list[tuple[int, int]] = []
            report = await copy(source, target, progress=lambda done, of: seen.append((done, of)))
            count = len(expected["sessions"])
            assert (report.sessions, report.skipped, report.verified, report.differing) == (count, 0, count, ())
            assert seen == [(done, 2 * count) for done in range(1, 2 * count + 1)]
            assert await account(target) == expected
            assert await account(source) == expected
            again = await copy(source, target)
            assert (again.sessions, again.skipped, again.verified) == (0, count, count)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("one", "other"), [("sqlite", "file"), ("file", "sqlite")])
async def test_a_killed_copy_is_finished_by_the_next(tmp_path: Path, one: str, other: str) -> None:
    """However often it was killed, the target then equals the source, and is sound."""
    clock, chance = FrozenClock(tick=0.001), random.Random(one)
    places = [f"{kind}:{tmp_path / name / PATHS[kind]}" for kind, name in ((one, "one"), (other, "other"))]
    with use(clock=clock):
        async with opened(one, tmp_path / "one") as source:
            await stories.tell(source, clock)
            for _ in range(6):
                await asyncio.to_thread(copy_and_kill, places, chance.randrange(0, 12), chance.random() * 0.01)
            async with opened(other, tmp_path / "other") as target:
                assert (await fsck(target)).problems == ()
                report = await copy(source, target)
                assert report.skipped > 0
                assert (report.verified, report.differing) == (11, ())
                assert await account(target) == await account(source)
                assert (await fsck(target)).problems == ()


PATHS = {"sqlite": "sessions.db", "file": "sessions"}


def copy_and_kill(places: list[str], sessions: int, delay: float) -> None:
    """Copy in a process of its own, and kill it a moment after that number of sessions."""
    command = [sys.executable, copying_process.__file__, *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(1 + sessions):
            assert process.stdout.readline()
        time.sleep(delay)
        process.kill()


async def test_a_session_that_changes_meanwhile_is_told() -> None:
    """It is not verified, and the next copy names the conflict."""
    async with MemoryStore() as source, MemoryStore() as target:
        session = await source.create(new_session("one", id="it"))
        changes = iter([source.save(session)])

        def progress(done: int, of: int) -> None:
            for change in changes:
                with pytest.raises(StopIteration):  # a memory store does it at once
                    change.send(None)

        report = await copy(source, target, progress=progress)
        assert (report.sessions, report.verified, report.differing) == (1, 0, ("it",))
        with pytest.raises(SessionConflict):
            await copy(source, target)


async def test_a_damaged_source_is_not_copied_in_silence(tmp_path: Path) -> None:
    """A session whose header cannot be read stops the copy before it begins."""
    async with SqliteStore(tmp_path / "a.db") as source, MemoryStore() as target:
        await source.create(new_session("one", id="it"))
        connection = apsw.Connection(str(tmp_path / "a.db"))
        connection.execute("UPDATE head SET crc = crc + 1").fetchall()
        connection.close()
        with pytest.raises(CorruptRecord):
            await copy(source, target)
        assert len(await target.list()) == 0


async def test_a_parallel_evaluation_goes_on_in_the_copy(tmp_path: Path) -> None:
    """Its branches' logs are copied, and so is the progress of each."""
    for call in range(2, 12):
        clock = FrozenClock(tick=0.001)
        with use(clock=clock):
            async with MemoryStore() as source, opened("sqlite", tmp_path / str(call)) as target:
                await SessionRuntime(source).create(agent_process.AGENT, session_id="branches")
                failing = FailingStore(source)
                failing.crash(call=call, after=True)
                loops = ledger_loops(agent_process.branch_reply)
                send = SendParallel("Do it.", loops, configs=["a", "b"], strategy=LongestAnswer())
                with suppress(StoreError):
                    await SessionRuntime(failing).execute("branches", send)
                clock.advance(60)
                await copy(source, target)
                report = await recover(SessionRuntime(target), loops)
                assert report.failed == ()
                session = await target.load("branches")
                if session.version > 1:
                    assert texts(session)[-1] == "done by b, at length"
                assert (await fsck(target)).problems == ()
