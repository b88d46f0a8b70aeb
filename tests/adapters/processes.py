"""Processes that use an adapter, run beside each other or killed with SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence


def run_at_once(program: str, arguments: Sequence[Sequence[str]]) -> list[list[str]]:
    """Run a program several times at once. Return the lines that each has written."""
    running = [_started(program, each) for each in arguments]
    told = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return told


def run_and_kill(program: str, arguments: Sequence[str], delay: float) -> list[str]:
    """Run a program, kill it a moment after its first line, and return the lines that it had written by then."""
    with _started(program, arguments) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(delay)
        process.kill()
        lines = process.stdout.read().split("\n")
        assert first, "it has not begun"
    return lines[:-1]  # the last is cut off, or empty


def _started(program: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True)
