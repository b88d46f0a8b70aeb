"""Measuring the figures. Every round measures each library once, so that a noisy moment affects all alike."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.others.library import CannotFork, ScriptedModel, Subject
from benchmarks.others.turns import MESSAGES, Turn

SETTLE = 0.5
"""Seconds between the moment a run hangs and its end, for a library's writes in the background."""


PATIENCE = 20.0
"""Seconds after which a library gets no further rounds of a measurement; each gets at least one."""

Sample = tuple[float, float, int]
"""Seconds on the clock, seconds of the processor, bytes."""


@dataclass
class Sizes:
    """The sizes and rounds of a measurement."""

    histories: tuple[int, ...] = (0, 1_000, 10_000)
    rounds: int = 20
    slow_rounds: int = 5
    """Rounds of calls that take seconds in some libraries: loads and forks."""


@dataclass
class Findings:
    """The figures of one library. Times are medians in seconds, bytes are means."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    durability: str = ""
    append: dict[int, float] = field(default_factory=dict)
    append_cpu: dict[int, float] = field(default_factory=dict)
    append_bytes: float | None = None
    load: float | None = None
    fork: float | None = None
    fork_bytes: float | None = None
    two_writers: str = ""
    killed: dict[str, str] = field(default_factory=dict)
    power_cuts: int | None = None
    """Power cuts after which an acknowledged turn was missing."""
    flips: dict[str, int] = field(default_factory=dict)
    """Loads after one bit had flipped: how many were right, refused, or silently wrong."""
    rounds: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Bench:
    """A library under measurement, and the number of the next turn, which no two turns share."""

    subject: Subject
    folder: Path
    findings: Findings
    numbers: count[int] = field(default_factory=lambda: count(1_000_001))

    def turn(self) -> Turn:
        return Turn(next(self.numbers))


def session_of(messages: int) -> str:
    return f"history-{messages}"


async def prepare(bench: Bench, sizes: Sizes) -> None:
    bench.folder.mkdir(parents=True)
    await bench.subject.open(bench.folder)
    for messages in sizes.histories:
        turns = [Turn(number) for number in range(1, messages // MESSAGES + 1)]
        await bench.subject.fill(session_of(messages), turns)


async def timed(call: Callable[[], Awaitable[object]]) -> Sample:
    """Return the time of a call, and the bytes that this process made the kernel write during it."""
    os.sync()  # otherwise the first one that waits for the disk would pay for the unwritten data of others
    gc.disable()
    written = bytes_written()
    start, start_cpu = time.perf_counter(), time.process_time()
    try:
        await call()
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        return seconds, cpu, bytes_written() - written
    finally:
        gc.enable()


def bytes_written() -> int:
    """`write_bytes` of /proc/self/io: pages made dirty, so at least 4 KB; 0 without that file."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


Call = Callable[[Bench], Awaitable[Sample]]


async def interleaved(
    benches: Sequence[Bench], rounds: int, call: Call, *, warm_up: int = 0
) -> dict[str, list[Sample]]:
    """Measure each library once in every round. One that fails is left out afterwards, with its error noted."""
    taken: dict[str, list[Sample]] = {bench.subject.name: [] for bench in benches}
    gc.collect()
    gc.freeze()  # one library's memory must not slow the others down
    for number in range(rounds + warm_up):
        for bench in benches:
            if bench.subject.name not in taken or _clock(taken[bench.subject.name]) > PATIENCE:
                continue
            try:
                sample = await call(bench)
            except CannotFork:
                del taken[bench.subject.name]
            except Exception as error:  # any exception of a library is a finding, and does not end the others
                del taken[bench.subject.name]
                bench.findings.errors.append(f"{type(error).__name__}: {error}")
            else:
                if number >= warm_up:
                    taken[bench.subject.name].append(sample)
    gc.unfreeze()
    return taken


def _clock(samples: list[Sample]) -> float:
    return sum(seconds for seconds, _, _ in samples)


async def appends(benches: Sequence[Bench], sizes: Sizes) -> None:
    for messages in sizes.histories:
        session_id = session_of(messages)

        async def append(bench: Bench, session_id: str = session_id) -> Sample:
            turn = bench.turn()
            return await timed(lambda: bench.subject.append_turn(session_id, turn))

        taken = await interleaved(benches, sizes.rounds, append, warm_up=2)
        for bench in benches:
            if found := taken.get(bench.subject.name):
                seconds, cpu, written = zip(*found, strict=True)
                bench.findings.append[messages] = statistics.median(seconds)
                bench.findings.append_cpu[messages] = statistics.median(cpu)
                bench.findings.append_bytes = statistics.mean(written)
                bench.findings.rounds[f"append at {messages}"] = len(found)


async def loads(benches: Sequence[Bench], sizes: Sizes) -> None:
    """Measure a load by a library just opened, after that of the smallest session: only the connection is warm."""
    smallest, largest = session_of(min(sizes.histories)), session_of(max(sizes.histories))

    async def load(bench: Bench) -> Sample:
        fresh = type(bench.subject)()
        await fresh.open(bench.folder)
        await fresh.load(smallest)
        found: list[Any] = []

        async def read() -> None:
            found.extend(await fresh.load(largest))

        taken = await timed(read)
        assert len(found) >= max(sizes.histories), f"only {len(found)} messages were loaded"
        await fresh.close()
        return taken

    taken = await interleaved(benches, sizes.slow_rounds, load)
    for bench in benches:
        if found := taken.get(bench.subject.name):
            bench.findings.load = statistics.median(seconds for seconds, _, _ in found)
            bench.findings.rounds["load"] = len(found)


async def forks(benches: Sequence[Bench], sizes: Sizes) -> None:
    largest = session_of(max(sizes.histories))
    taken = await interleaved(benches, sizes.slow_rounds, lambda bench: timed(lambda: bench.subject.fork(largest)))
    for bench in benches:
        if found := taken.get(bench.subject.name):
            bench.findings.fork = statistics.median(seconds for seconds, _, _ in found)
            bench.findings.fork_bytes = statistics.mean(written for _, _, written in found)
            bench.findings.rounds["fork"] = len(found)


async def two_writers(bench: Bench) -> str:
    """Two writers load a session of one turn; the first writes, then the second."""
    one, two = type(bench.subject)(), type(bench.subject)()
    await bench.subject.fill("shared", [bench.turn()])
    await one.open(bench.folder)
    await two.open(bench.folder)
    first, second = bench.turn(), bench.turn()
    write_one, write_two = await one.writer("shared"), await two.writer("shared")
    await write_one(first)
    refused = ""
    try:
        await write_two(second)
    except Exception as error:  # any exception of a library is its answer
        refused = type(error).__name__
    for subject in (one, two):
        await subject.close()
    return await _outcome(bench, first, second, refused)


async def _outcome(bench: Bench, first: Turn, second: Turn, refused: str) -> str:
    fresh = type(bench.subject)()
    await fresh.open(bench.folder)
    now, past = repr(await fresh.load("shared")), repr(await fresh.past("shared"))
    await fresh.close()
    has_first, has_second = (turn.answer[:20] in now for turn in (first, second))
    if refused:
        return f"refused ({refused})" if has_first and not has_second else f"{refused}, and the session is changed"
    if has_first and has_second:
        return "both kept, one after the other"
    if has_first:
        return "the second is lost silently"
    return (
        "the first is left in the history only, silently" if first.answer[:20] in past else "the first is lost silently"
    )


async def killed(bench: Bench, setting: str) -> str:
    """Run two steps in a process of its own, and kill it with SIGKILL while the second model call hangs."""
    folder, mark = bench.folder / f"killed-{len(bench.findings.killed)}", bench.folder / "hanging"
    folder.mkdir()
    mark.unlink(missing_ok=True)
    child = _start(bench.subject, setting, folder, mark)
    try:
        while not mark.exists():
            if child.poll() is not None:
                assert child.stderr is not None
                lines = child.stderr.read().strip().splitlines()
                return f"the run failed: {lines[-1] if lines else child.returncode}"
            await asyncio.sleep(0.02)
        await asyncio.sleep(SETTLE)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    return await _afterwards(bench, folder, setting)


def _start(subject: Subject, setting: str, folder: Path, mark: Path) -> subprocess.Popen[str]:
    name = f"{type(subject).__module__}:{type(subject).__name__}"
    command = [sys.executable, "-m", "benchmarks.others", "--hang", name, setting, str(folder), str(mark)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


async def _afterwards(bench: Bench, folder: Path, setting: str) -> str:
    subject = type(bench.subject)()
    await subject.open(folder)
    try:
        kept = ", ".join(subject.kind(message) for message in await subject.load("run")) or "nothing"
        aside = ", ".join(subject.kind(message) for message in await subject.on_record("run"))
        model = ScriptedModel(Turn(1))
        how = await subject.go_on("run", setting, model)
        whole = [subject.kind(message) for message in await subject.load("run")]
    except Exception as error:  # any exception of a library is its answer
        return f"going on failed: {type(error).__name__}: {str(error)[:200]}"
    finally:
        await subject.close()
    again = f", tool run {model.tool_runs} more times" if model.tool_runs else ""
    there = f"{kept}, on record: {aside}" if aside else kept
    return f"there: {there}; then {how}{again}; now: {', '.join(whole)}"


async def hang(subject: Subject, setting: str, folder: Path, mark: Path) -> None:
    """Make a run that never ends, in the child process."""
    await subject.open(folder)
    await subject.run("run", setting, ScriptedModel(Turn(1), mark))


async def close(bench: Bench) -> None:
    await bench.subject.close()
    shutil.rmtree(bench.folder)
