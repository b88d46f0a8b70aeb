"""The simulation of workers: it is consistent, and at small sizes agrees with real processes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.bench_workers import Place, sessions_at, text, until_empty
from benchmarks.simulate import Setting, main, part, simulate
from benchmarks.worker_process import WorkerProcess

SESSIONS, MESSAGES, CONCURRENCY, THINKS = 20, 3, 3, 0.2
SHARE, SLACK = 0.3, 0.3
"""The allowed error of the simulation: a share of the real time, and seconds for looks at other moments."""


def test_a_seed_is_a_play() -> None:
    """The same seed gives the same times, and another seed others."""
    setting = Setting(sessions=50, messages=0, arrivals=20, seconds=10, kills=0.2, lease=2.0)
    assert simulate(setting) == simulate(setting) != simulate(setting, seed=2)


def test_every_message_is_answered_once() -> None:
    """This holds even if workers are killed."""
    setting = Setting(sessions=100, messages=4, workers=4, think=0.5, lease=3.0, kills=0.5, seconds=60)
    result = simulate(setting)
    assert len(result.ends) == 400
    assert result.take_overs


def test_thinking_time_is_shared_by_workers_and_computing_time_is_not() -> None:
    """Twice the workers are twice as fast while models think, and no faster once the store's cores are busy."""
    thinking = [simulate(Setting(sessions=400, workers=number, think=1.0)).a_second() for number in (2, 4)]
    assert thinking[1] / thinking[0] == pytest.approx(2, rel=0.15)
    stored = Setting(sessions=400, think=0.1, processor=0.0, store=0.1, cores=1)
    for workers in (2, 4):
        found = simulate(replace(stored, workers=workers)).a_second()
        assert found == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(("is_seen_dead", "least", "most"), [(False, 4.0, 8.5), (True, 0.0, 2.5)])
def test_a_run_is_taken_over_when_its_lease_is_over_or_its_process_is_seen_to_be_gone(
    is_seen_dead: bool, least: float, most: float
) -> None:
    """It is taken over soon after either, by the next sweep that has room."""
    setting = Setting(sessions=200, messages=0, arrivals=20, workers=8, seconds=200, think=0.5, lease=6.0, kills=0.2)
    result = simulate(replace(setting, is_seen_dead=is_seen_dead))
    assert len(result.take_overs) > 10
    assert least <= min(result.take_overs) <= max(result.take_overs) <= most


def test_the_command_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints runs, waits, take-overs, sweeps and computing time."""
    main(["--sessions", "50", "--messages", "0", "--arrivals", "20", "--kills", "0.2", "--sweep", "0.001"])
    told = capsys.readouterr().out
    for word in ("runs", "a second", "wait for the model", "take-over", "sweeps", "workers computed"):
        assert word in told


async def test_it_is_right_about_two_real_workers(tmp_path: Path) -> None:
    """With the measured cost of a run, its runs a second and waits are about those of real workers."""
    place, runs = Place(f"sqlite:///{tmp_path / 'real.db'}", ""), SESSIONS * MESSAGES
    workers = [WorkerProcess(place.url, think=THINKS, concurrency=CONCURRENCY) for _ in range(2)]
    async with sessions_at(place, SESSIONS) as (sessions, ids):
        for _ in range(MESSAGES):
            await asyncio.gather(*(sessions.enqueue(each, text()) for each in ids))
        async with workers[0], workers[1]:
            before = [await each.cpu() for each in workers]
            began = time.monotonic()
            await asyncio.gather(*(each.go() for each in workers))
            await until_empty(sessions)
            used = sum([await each.cpu() for each in workers]) - sum(before)
    heard = sorted(at for each in workers for at in each.heard.values())
    assert len(heard) == runs

    processor = used / runs
    waited = sum(each.advanced for each in workers) / runs - THINKS
    setting = Setting(
        sessions=SESSIONS,
        messages=MESSAGES,
        concurrency=CONCURRENCY,
        think=THINKS,
        processor=processor,
        latency=max(waited - processor, 0.0),
    )
    told = simulate(setting)
    real = runs / (heard[-1] + THINKS + waited / 2 - heard[0])
    assert told.a_second() == pytest.approx(real, rel=SHARE)
    assert simulate(replace(setting, workers=1)).a_second() != pytest.approx(real, rel=SHARE)  # so it can be wrong
    for share in (0.5, 0.9):
        found = part([at - began for at in heard], share)
        assert part(told.waits, share) == pytest.approx(found, rel=SHARE, abs=SLACK), share
