"""The memory that a loaded session takes, in a process without other data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Run
from benchmarks.setting import AGENT, filled
from perdure import SessionRuntime, SqliteStore

MESSAGES = 10_000
HAS_STATM = Path("/proc/self/statm").exists()
_PROGRAM = """
import asyncio, gc, resource, sys
from perdure import SqliteStore

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

async def main():
    path, small, large = sys.argv[1:]
    async with SqliteStore(path) as store:
        await store.load(small)  # what the first load of all imports is not the session's
        before = resident()
        session = await store.load(large)
        print(resident() - before, len(session.state.transcript))

asyncio.run(main())
"""


async def measure(run: Run) -> None:
    if not HAS_STATM:
        run.skip("memory.loaded", "there is no /proc/self/statm")
        return
    with run.folder() as folder:
        path = folder / "bench.db"
        async with SqliteStore(path) as store:
            runtime = SessionRuntime(store)
            small, large = await runtime.create(AGENT), await filled(runtime, MESSAGES)
        held, count = loaded(str(path), small.id, large.id)
    assert count == MESSAGES
    run.report("memory.loaded", held / 1e6, "resident memory of a new process, after less before")


def loaded(*arguments: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], check=True, capture_output=True, text=True)
    return [int(number) for number in done.stdout.split()]
