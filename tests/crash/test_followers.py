"""A process with many runs is killed; another recovers them, and followers in a third miss nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.crash import stream_process
from tests.crash.addresses import KINDS, address_of

from perdure.archive import fsck

ROUNDS = {"sqlite": 3, "postgres": 1}
if os.environ.get("PERDURE_TORTURE"):
    ROUNDS = dict.fromkeys(ROUNDS, 100)
RUNS = 20
DELAYS = (0.3, 0.05, 0.4, 0.15, 0.0, 0.5)
"""Seconds between the beginning of the last run and the end of its process. An answer takes half a second."""


@contextmanager
def process(address: str, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, stream_process.__file__, address, how]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where) as started:
        try:
            assert said_by(started) == "ready"
            yield started
        finally:
            started.kill()


def tell(process: subprocess.Popen[str], *words: str) -> None:
    assert process.stdin is not None
    process.stdin.write(" ".join(words) + "\n")
    process.stdin.flush()


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def text_of(chunks: list[Any]) -> str:
    """Return the text of chunks after restarts have voided some: each chunk continues the text before it."""
    shown = ""
    for text, offset, restarts, _ in chunks:
        assert offset <= len(shown) if restarts else offset == len(shown), chunks
        assert not (restarts and text)
        shown = shown[:offset] + text
    return shown


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_followers_of_killed_runs_see_each_answer_once(tmp_path: Path, kind: str) -> None:
    """No piece of an attempt is shown twice or left out, restarts are announced, and the whole answer comes once."""
    address, chance, cut_off = address_of(kind, tmp_path), random.Random(7), 0
    async with stream_process.connection(address) as app:
        with process(address, "follow") as follower:
            for number in range(ROUNDS[kind] + len(DELAYS)):
                if number >= ROUNDS[kind] and cut_off:  # on a busy machine the first delays may all miss an answer
                    break
                ids = [f"r{number}-{run}" for run in range(RUNS)]
                delay = DELAYS[number % len(DELAYS)] + chance.random() * 0.05
                await asyncio.to_thread(kill_in_the_middle, address, follower, ids, delay)
                await asyncio.gather(*map(app.recover, ids))
                seen = json.loads(await asyncio.to_thread(said_by, follower))
                for session_id, chunks in zip(ids, seen, strict=True):
                    cut_off += await check(app, session_id, chunks)
        assert cut_off > 0, "no run was killed while it answered"
        assert [*await app.store.lapsed()] == []
        assert (await fsck(app.store)).problems == ()


def kill_in_the_middle(address: str, follower: subprocess.Popen[str], ids: list[str], delay: float) -> None:
    with process(address, "run") as victim:
        tell(victim, *ids)
        assert said_by(victim) == "begun"
        tell(follower, *ids)
        time.sleep(delay)
        victim.send_signal(signal.SIGKILL)


async def check(app: Any, session_id: str, chunks: list[Any]) -> int:
    """Compare a follower's text with the stored one. Return how many answers a crash has cut off."""
    session = await app.session(session_id)
    answer = session.state.final_response
    assert [chunk[3] for chunk in chunks if chunk[3] is not None] == [answer.text]
    assert text_of(chunks) == answer.text
    assert answer.text.split() == [f"{session_id}-{answer.text.split('-')[2]}-{n}" for n in range(stream_process.WORDS)]
    history = await app.history(session_id)
    lost = [message for message in history if message.metadata.get("superseded")]
    assert [message.text for message in session.state.messages] == [session_id, answer.text]
    assert [message.text for message in history] == [session_id, *(each.text for each in lost), answer.text]
    assert all(each.is_incomplete and each.text.startswith(f"{session_id}-") for each in lost)
    return len(lost)
