"""A process that is killed in a round of retention leaves a whole store, and the next round finishes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import NAMES, address_of, store_at, wait_for_server
from tests.crash.retaining_process import POLICY

from perdure import Sessions, connect
from perdure.archive import fsck
from perdure.model.ids import now, use
from perdure.testing import FrozenClock
from perdure.testing.outcomes import Outcome, note

IS_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
ROUNDS = 10 if IS_TORTURE else 1
COUNT = 12


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(7 if IS_TORTURE else 1))
@pytest.mark.parametrize("kind", ["sqlite", "files", "postgres"])
async def test_a_round_that_is_killed(kind: str, seed: int, tmp_path: Path) -> None:
    """Each session is whole, or gone whole. Held and young sessions, and a fork's, stay; the rest goes next."""
    for number in range(ROUNDS):
        where = tmp_path / str(number)
        where.mkdir()
        address = address_of(kind, where)
        async with connect(store_at(address), model="offline") as app:
            kept = await _filled(app)
        _kill(address, random.Random(seed * ROUNDS + number))
        async with connect(store_at(address), model="offline") as app:
            assert (await fsck(app.store)).problems == ()
            assert await _shown(app, kept) == kept
            told = await app.apply_retention(POLICY, dry_run=True)
            report = await app.apply_retention(POLICY)
            assert (report.sessions, report.versions, report.bytes) == (told.sessions, told.versions, told.bytes)
            assert {info.id for info in await app.headers(limit=1000)} == {*kept}
            assert (await fsck(app.store)).problems == ()
            again = await app.apply_retention(POLICY)
            assert (again.sessions, again.versions) == (0, 0)
            assert await _shown(app, kept) == kept
    note(Outcome(attack="kill during retention", store=NAMES[kind], rounds=ROUNDS, failures=0))


async def _filled(app: Sessions) -> dict[str, list[str]]:
    """Make sessions, most of them old. Return the views of those that have to stay."""
    with use(clock=FrozenClock(now() - timedelta(days=9), tick=0.001)):
        for number in range(COUNT):
            await (await app.open(f"old{number:02}")).send("hello")
        await app.hold("old03")
        grown = await app.open("grown", tags=("grown",))
        for text in "abcd":
            await grown.send(text)
    await (await app.open("old05")).fork("fork")
    await (await app.open("young")).send("hi")
    return await _shown(app, dict.fromkeys(("old03", "grown", "fork", "young")))


async def _shown(app: Sessions, names: Any) -> dict[str, list[str]]:
    return {name: [each.text for each in (await app.session(name)).state.messages] for name in names}


def _kill(address: str, dice: random.Random) -> None:
    """Start a round in another process, and kill it after some commits, at any moment."""
    command = [sys.executable, "-m", "tests.crash.retaining_process", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PGAPPNAME": "retaining"}) as process:
        assert process.stdout is not None
        for _ in range(dice.randrange(1, 4)):
            assert process.stdout.readline() == b"committed\n"
        time.sleep(dice.random() * 0.02)
        process.send_signal(signal.SIGKILL)
    wait_for_server(address, "retaining")
