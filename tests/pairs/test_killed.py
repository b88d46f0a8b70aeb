"""Real processes, killed with SIGKILL while they play a case: another one settles what they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from tests.pairs import victim
from tests.pairs.case import ROUND
from tests.pairs.model import Model
from tests.pairs.promises import broken_in
from tests.pairs.settling import settle
from tests.pairs.world import World, opened

SEEDS = range(100) if os.environ.get("PERDURE_TORTURE") else range(1)


def play_and_kill(seed: int, kind: str, folder: Path, facts: Path, delay: float) -> None:
    """Start a process that plays a case, and kill it after a while."""
    command = [sys.executable, victim.__file__, str(seed), kind, str(folder), str(facts)]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        assert process.poll() is None, "it has ended by itself"
        process.send_signal(signal.SIGKILL)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["sqlite", "file"])
@pytest.mark.parametrize("number", SEEDS)
async def test_the_promises_hold_for_what_a_killed_process_leaves(tmp_path: Path, kind: str, number: int) -> None:
    """Wherever SIGKILL strikes, acknowledged changes are there, and nothing is done twice or left behind."""
    seed, folder, facts = int(os.environ.get("PERDURE_PAIR_SEED", number)), tmp_path / "store", tmp_path / "facts"
    folder.mkdir()
    await asyncio.to_thread(play_and_kill, seed, kind, folder, facts, Random(seed).random() * 0.3)
    model = Model()
    if facts.exists():
        model.read(facts.read_text().splitlines(keepends=True))
    world = World(seed + ROUND, kind, folder, model=model)  # so that no word or id of the dead is used again
    world.clock.advance(86_400)  # beyond the clock of the dead
    async with opened(world, is_new=False):
        await settle(world, has_died=True)
        broken = await broken_in(world)
    again = f"PERDURE_PAIR_SEED={seed} python -m pytest tests/pairs/test_killed.py -n 0 -k {kind}"
    assert not broken, "\n".join([again, *broken, "what was settled:", *world.story])
