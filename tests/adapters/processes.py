"""Processes that use an adapter, run beside each other or killed with SIGKILL.

They are forked from a server that has imported the frameworks, so that many of them cost little. Each reports through
a pipe, whose content survives a kill.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Tell = Callable[[Any], None]

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["tests.adapters.claude_process", "tests.adapters.strands_process"])


def run_at_once(target: Callable[..., None], arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Run a function in several processes, which wait for each other at a barrier. Return the reports of each."""
    barrier = _forking.Barrier(len(arguments))
    running = [_started(target, (barrier.wait, *each)) for each in arguments]
    told = [_told_by(pipe) for _, pipe in running]
    for process, _ in running:
        process.join(120)
    assert [process.exitcode for process, _ in running] == [0] * len(running)
    return told


def run_and_kill(target: Callable[..., None], arguments: Sequence[Any], delay: float) -> list[Any]:
    """Run a function in a process, kill it a moment after its first report, and return all of its reports."""
    process, pipe = _started(target, arguments)
    pipe.recv()
    time.sleep(delay)
    process.kill()
    process.join()
    return _told_by(pipe)


def _started(target: Callable[..., None], arguments: Sequence[Any]) -> tuple[Any, Connection]:
    pipe, sender = _forking.Pipe(duplex=False)
    process = _forking.Process(target=_run, args=(target, sender, *arguments))
    process.start()
    sender.close()  # only the process holds the other end: it closes when the process ends
    return process, pipe


def _run(target: Callable[..., None], sender: Connection, *arguments: Any) -> None:
    target(sender.send, *arguments)


def _told_by(pipe: Connection) -> list[Any]:
    told = []
    try:
        while True:
            told.append(pipe.recv())
    except (EOFError, OSError):  # it has ended, or was killed in the middle of a report
        return told
