"""Real processes that race against each other in the contracts. Each of them runs `race.py`."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


class Process:
    """A process that has the store open, and carries out commands."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self.name = name

    async def ask(self, command: str) -> dict[str, Any]:
        """Give a command, and return its outcome: `{"did": …}` or `{"error": …}`."""
        await self.tell(command)
        return await self.answer()

    async def tell(self, command: str) -> None:
        """Give a command, and do not wait for its outcome."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, f"process {self.name} has ended; its error output says why"
        found: dict[str, Any] = json.loads(line)
        return found

    async def kill(self) -> None:
        """End the process at once, as a power cut would."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            assert await self._process.wait() == 0, f"process {self.name} failed"


@asynccontextmanager
async def processes(contract: object, where: Path, session_id: str, *names: str) -> AsyncIterator[list[Process]]:
    """Start one process for each name, all of which open the contract's store in the same directory."""
    kind = type(contract)
    task = (inspect.getfile(kind), kind.__module__, kind.__qualname__, str(where))
    started = [Process(await _start(*task, name, session_id), name) for name in names]
    try:
        # All of them have opened the store before any is told to do something: the race is about the command.
        for process in started:
            assert await process.answer() == {"did": "open"}
        yield started
    # Also after a cancel: a process that waits for commands would outlive the test.
    except BaseException:
        for process in started:
            await process.kill()
        raise
    for process in started:
        await process.end()


async def ask_all(told: list[Process], command: str) -> list[dict[str, Any]]:
    """Give several processes the same command at once, and return the outcomes."""
    return [*await asyncio.gather(*(process.ask(command) for process in told))]


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "perdure.testing.race", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The process imports perdure and the contract's class, from wherever this one has them.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
