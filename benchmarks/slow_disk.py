"""A disk on which a sync takes 1 ms, as on many servers: a library that is loaded before libc's own makes it so.

The sync itself is carried out, and then the rest of the millisecond is waited for. Run as a program, in a process that
has the library loaded, it prints the rates of 64 sessions at once: perdure's, and those of OpenAI Agents.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Rate

SECONDS = 0.001
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

static int slowly(const char *name, int handle) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += NANOSECONDS;
    if (until.tv_nsec >= 1000000000) { until.tv_nsec -= 1000000000; until.tv_sec += 1; }
    int result = ((int (*)(int))dlsym(RTLD_NEXT, name))(handle);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0)) {}
    return result;
}

int fsync(int handle) { return slowly("fsync", handle); }
int fdatasync(int handle) { return slowly("fdatasync", handle); }
"""


class NotHere(Exception):
    """The slow disk cannot be had here; the message says why."""


def rates_on_slow_disk(folder: Path) -> list[Rate]:
    """Return the rates of both sides, measured in one process of their own; raise NotHere if that is impossible."""
    environment = {**os.environ, "LD_PRELOAD": str(_library(folder))}
    command = [sys.executable, "-m", "benchmarks.slow_disk", str(folder)]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        raise NotHere(done.stderr.strip().rpartition("\n")[2] or f"the process ended with {done.returncode}")
    return [Rate(*each) for each in json.loads(done.stdout)]


def _library(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        raise NotHere("a sync is made slow by a library that is compiled here, on Linux, by cc or gcc")
    source, made = folder / "slow_disk.c", folder / "slow_disk.so"
    source.write_text(_SOURCE)
    options = [f"-DNANOSECONDS={round(SECONDS * 1e9)}", "-shared", "-fPIC", "-O2"]
    done = subprocess.run([compiler, *options, "-o", made, source, "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"{compiler} failed: {done.stderr.strip()}")
    return made


def require_slow(folder: Path) -> None:
    """Raise AssertionError unless a sync takes as long as it should."""
    with (folder / "synced").open("wb") as file:
        start = time.perf_counter()
        os.fdatasync(file.fileno())
        assert time.perf_counter() - start >= SECONDS, "a sync is as quick as ever: the library was not loaded"


def main(folder: Path) -> None:
    from benchmarks.bench_crowd import rates_beside_openai

    logging.disable(logging.WARNING)
    require_slow(folder)
    print(json.dumps(asyncio.run(rates_beside_openai(folder))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
